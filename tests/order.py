"""In which order items run."""

import pytest

# Items that take six seconds or more, the longest first: at the end the other workers would wait for one of them.
LONGEST = (
    "test_nothing_is_found",
    "test_runs_in_a_minute[train_fsdp2]",
    "test_every_row_of_one_and_two_ranks_passes",
    "test_interrupted_ranks_save_and_go_on",
    "test_a_rank_that_does_not_",
    "test_one_of_each_fault",
    "test_three_ranks_resume",
)


def dealt(items, num_workers):
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
