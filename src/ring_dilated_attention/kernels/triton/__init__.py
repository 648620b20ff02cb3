"""Triton kernels: `partial` is the backend, `fused` runs all branches of a pattern on one device at once.

Importing this, `partial`, `fused` or `tiles` imports no triton; launching does.
"""
