"""Triton kernels. `in_place` and `all_at_once` are backends. Only the launch of a kernel imports triton."""
