"""What connects processes, and what they agree on before a call."""
