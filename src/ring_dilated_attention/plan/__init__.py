"""Plans: which positions each rank owns, which rows it sends and receives, and what it computes. No torch."""
