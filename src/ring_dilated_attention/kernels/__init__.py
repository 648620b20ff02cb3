"""What computes a partial."""
