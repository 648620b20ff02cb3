"""`rda plan` and `rda plan model`."""
