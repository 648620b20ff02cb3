"""Triton kernels: `in_place` and `all_at_once` are backends, and `fused` runs all branches of a pattern on one device.

Importing this, a backend, `fused` or `strips` imports no triton; launching does.
"""
