"""`python -m benchmarks`: cases that measure, each with a correctness gate, a JSON record and a table made from it."""
