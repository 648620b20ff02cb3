"""For all tests: one thread per process. Tensors here are small, and threads that wait for each other cost more than
they save (sixfold, where other processes keep the cores busy)."""

import os
import signal
import sys

import pytest

# A shell starts what runs in the background with Ctrl-C ignored, and so would be all that tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported

# Items that take six seconds or more, the longest first: at the end the other workers would wait for one of them.
LONGEST = (
    "test_in_the_interpreter",
    "test_the_rehearsal",
    "test_runs_in_a_minute[train_fsdp2]",
    "test_registers_and_spills",  # where Triton's cache is empty
    "test_nothing_is_found",
    "test_the_examples_for_many",
    "test_two_ranks_",
    "test_ranks_that_leave",
    "test_a_profiler_that_has_stopped",
    "test_every_case_leaves_a_record[planned_time]",
    "test_an_interface_that_is_not_there_is_found",
    "test_a_rank_that_does_not_use_what_it_compiled",
    "test_interrupted_ranks_save_and_go_on",
    "test_tasks_of_a_slurm_step_train_one_model",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--share", metavar="I/N", help="run every Nth item, from the Ith on")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if share := config.getoption("--share"):
        first, step = map(int, share.split("/"))
        items[:] = items[first - 1 :: step]
    lengths = {item: next((i for i, name in enumerate(LONGEST) if item.name.startswith(name)), None) for item in items}
    longest = sorted((item for item in items if lengths[item] is not None), key=lengths.__getitem__)
    others = [item for item in items if lengths[item] is None]
    items.clear()
    # Workers of xdist begin with equal shares of the list, one after the other: each has its own of the longest.
    num_workers = getattr(config, "workerinput", {}).get("workercount", 1)
    for i in range(num_workers):
        own = longest[i::num_workers]
        size = (len(longest) + len(others) - len(items)) // (num_workers - i)
        items += own + others[: size - len(own)]
        del others[: size - len(own)]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """One more than there are cores: tests of faults wait for clocks, and leave theirs to others."""
    return 1 + (len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)


def pytest_collection_finish() -> None:
    """Where ranks will be needed, their server imports what it needs while the first tests run."""
    if (distributed := sys.modules.get("distributed")) is not None:
        distributed.start_server()
