"""In which order items run."""

import pytest

# Items that take six seconds or more, the longest first: at the end the other workers would wait for one of them.
LONGEST = (
    "test_in_the_interpreter",
    "test_runs_in_a_minute[train_fsdp2]",
    "test_registers_and_spills",  # where Triton's cache is empty
    "test_nothing_is_found",
    "test_the_example_for_many",
    "test_two_ranks_",
    "test_ranks_that_leave",
    "test_a_profiler_that_has_stopped",
    "test_every_case_leaves_a_record[planned_time]",
    "test_an_interface_that_is_not_there_is_found",
    "test_a_rank_that_does_not_use_what_it_compiled",
    "test_interrupted_ranks_save_and_go_on",
    "test_tasks_of_a_slurm_step_train_one_model",
)


def dealt(items: list[pytest.Item], num_workers: int) -> list[pytest.Item]:
    """Workers of xdist begin with equal shares of the list, one after the other: each has its own of the longest."""
    longest = [item for name in LONGEST for item in items if item.name.startswith(name)]
    others = [item for item in items if not item.name.startswith(LONGEST)]
    order: list[pytest.Item] = []
    for i in range(num_workers):
        own = longest[i::num_workers]
        num_others = max((len(items) - len(order)) // (num_workers - i) - len(own), 0)
        order += own + others[:num_others]
        del others[:num_others]
    return order
