"""Kernels. A kernel computes attention, and its gradients, for one tile: some queries and the keys that they attend to.

The forward of a tile returns a partial: out and lse of the tile's queries, computed over the tile's keys only.
"""
