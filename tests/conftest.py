"""For all tests: one thread per process. Tensors here are small, and threads that wait for each other cost more than
they save (sixfold, where other processes keep the cores busy)."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported
