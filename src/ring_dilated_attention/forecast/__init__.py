"""Predicts what a call or a training would compute, send, hold in memory and take in time, without running it."""
