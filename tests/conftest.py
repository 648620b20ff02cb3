"""For all tests: one thread per process. Tensors here are small, and threads that wait for each other cost more than
they save (sixfold, where other processes keep the cores busy)."""

import os
import signal

# A shell starts what runs in the background with Ctrl-C ignored, and so would be all that tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported


def pytest_xdist_auto_num_workers(config):
    """For `-n auto`: half of the time tests wait for processes that they started."""
    return 2 * (os.cpu_count() or 1)


LONGEST = ("test_in_the_interpreter", "test_the_rehearsal")


def pytest_collection_modifyitems(items):
    """The longest first: what begins last would end last, with all cores but one at rest."""
    items.sort(key=lambda item: item.name not in LONGEST)
