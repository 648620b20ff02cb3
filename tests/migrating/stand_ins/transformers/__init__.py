"""Stands in for transformers in the processes of peers: ring-flash-attn imports it, and uses it for models alone."""
