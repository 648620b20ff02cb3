"""torchscale's LongNet: networks with torchscale's parameter names, and attention with torchscale's padding.

torchscale pads with rows of zeros, which take part in the softmax. Published weights need this padding.
"""
