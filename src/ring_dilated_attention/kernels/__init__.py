"""Kernels: they compute attention over the keys of one tile (its partial: out and lse), and the gradients of that."""
