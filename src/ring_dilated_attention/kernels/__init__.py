"""Kernels: the code that computes a partial."""
