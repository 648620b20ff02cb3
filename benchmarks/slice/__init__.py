"""One rank's share of a job of any size, run and verified (`python -m benchmarks.slice`)."""
