"""Dilated attention in models and trainers of other libraries. The rest of the package does not import this folder."""
