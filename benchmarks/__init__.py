"""`python -m benchmarks`: a case measures one thing, such as time against length, after a check of correctness.

Each case writes a JSON record. Tables and pages are made from the records.
"""
