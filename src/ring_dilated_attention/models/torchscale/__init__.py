"""torchscale's LongNet: its networks by its parameters' names, its zero rows, and the gate that accounts for them."""
