"""`rda train`: trains a byte-level LongNet on one long document."""
