"""Stands in for xformers, which has no CPU operator, in the processes of peers."""
