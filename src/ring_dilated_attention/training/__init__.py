"""The main job: a byte-level LongNet on one long document (`rda train`)."""
