"""`rda plan`, `rda plan model` and `rda plan compare`. No torch."""
