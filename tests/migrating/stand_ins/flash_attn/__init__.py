"""Stands in for flash_attn 2.8, which needs a GPU, in the processes of peers: the same functions in plain torch."""

__version__ = "2.8.3"
