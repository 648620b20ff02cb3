"""For all tests: one thread per process. Tensors here are small, and threads that wait for each other cost more than
they save (sixfold, where other processes keep the cores busy)."""

import os
import signal

# A shell starts what runs in the background with Ctrl-C ignored, and so would be all that tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported
