"""Carries out plans on tensors: the forward and backward of one rank, and the cache of keys and values."""
