"""Triton kernels: `in_place` is the backend, `fused` runs all branches of a pattern on one device at once.

Importing this, `in_place`, `fused` or `tiles` imports no triton; launching does.
"""
