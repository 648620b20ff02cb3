"""Kernels: each computes attention for one tile (some queries and the keys that they attend to), and its gradients.

The result for a tile is a partial: out and lse of the tile's queries over the tile's keys alone.
"""
