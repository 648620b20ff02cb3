"""For all tests: one thread per process. Tensors here are small, and threads that wait for each other cost more than
they save (sixfold, where other processes keep the cores busy). Linux runs the processes as a batch: whoever is woken
waits for its turn. Otherwise it takes the core from who woke it, who may hold a lock on which a thread of gloo's spins
(a twelfth of all the work)."""

import fcntl
import gc
import os
import signal
import sys
from contextlib import suppress

import pytest
from hypothesis import settings
from order import dealt

# A shell starts what runs in the background with Ctrl-C ignored, and so would be all that tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported
# Each process that compiles would start another one that imports torch.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
with suppress(AttributeError, OSError):  # not on Linux, or not allowed
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))  # for all that this process starts

# Nearly all that imports and tests make lives on. By default Python looks for garbage in it after every 700 objects.
gc.set_threshold(10_000)


def pytest_configure(config):
    """Hypothesis draws the same cases each time, unless FUZZ is set, as by `make fuzz`, or a seed is given, which it
    would ignore. Before the tests are imported, whose own settings begin with these."""
    if not ("FUZZ" in os.environ or config.getoption("--hypothesis-seed")):
        settings.register_profile("fixed", derandomize=True, database=None)
        settings.load_profile("fixed")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    items[:] = dealt(items, getattr(config, "workerinput", {}).get("workercount", 1))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers():
    """One more than there are cores: tests of faults wait for clocks, and leave theirs to others."""
    return 1 + (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """One worker compiles all sources, where that is still to be done, and the others find them compiled."""
    with open(__file__) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            fcntl.flock(file, fcntl.LOCK_SH)
        return (yield)


def pytest_collection_finish():
    """Where ranks will be needed, their server imports what it needs while the first tests run. All that a worker has
    imported until now lives as long as it does: nobody looks for garbage in it again. (Where there are no workers, a
    plugin of hypothesis asks at the end who refers to an object, and what is frozen does not answer.)"""
    is_worker = "PYTEST_XDIST_WORKER" in os.environ
    if is_worker:
        gc.freeze()
    if (distributed := sys.modules.get("distributed")) is not None:
        distributed.fork_server() if is_worker else distributed.start_server()


def pytest_unconfigure():
    """Before it ends, pytest searches all objects five times for what was left open: once is enough, here."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module")
def nan_in_new_memory():
    """Memory that is not initialised is NaN, for the tests of a module that asks for it."""
    from helpers import poisoned_memory  # which imports torch

    with poisoned_memory():
        yield


@pytest.fixture(autouse=True)
def seeded():
    """Each test draws the same numbers, whatever ran before it. (Ranks: `_rank` in distributed.py.)"""
    if torch := sys.modules.get("torch"):
        torch.manual_seed(0)
