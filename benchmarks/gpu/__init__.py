"""A benchmark of one GPU in nine minutes: are the results right, and how much time and memory do calls take?"""
