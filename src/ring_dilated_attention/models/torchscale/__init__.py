"""torchscale's LongNet: its networks with its parameter names, and attention that counts the zero rows it pads with."""
