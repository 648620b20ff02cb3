"""Predicts what a job would compute, send, hold in memory and take in time, without running the job."""
