"""A plan carried out on tensors."""
