"""torchscale's LongNet: its networks with its parameter names, and attention that counts torchscale's zero rows."""
