"""What connects processes, and what stands in for them: all ranks simulated, one rank of a larger job."""
