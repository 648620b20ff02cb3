"""Triton kernels. `in_place` and `all_at_once` are backends. Only a launch imports kernels, and with them triton."""
