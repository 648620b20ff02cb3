"""The order in which items run: every one of them, and the longest first."""

from collections import namedtuple

import pytest
from helpers import ROOT
from order import LONGEST, dealt

Item = namedtuple("Item", "name")


@pytest.mark.parametrize("num_workers", [1, 2, 3, 8])
@pytest.mark.parametrize("num_others", [0, 5, 100])
@pytest.mark.parametrize("num_long", [0, 1, 7])
def test_every_item_runs_once_and_each_worker_begins_with_a_long_one(
    num_long, num_others, num_workers
):
    """Catches an item that is dropped or runs twice, and long ones that all wait in the queue of one worker."""
    items = [Item(f"test_{i}") for i in range(num_others)]
    items[3:3] = [Item(f"{LONGEST[i % 3]}[{i}]") for i in range(num_long)]
    order = dealt(items, num_workers)
    assert sorted(order) == sorted(items)
    starts = [0]
    for i in range(num_workers - 1):  # as xdist's scheduler cuts the list
        starts.append(starts[i] + (len(items) - starts[i]) // (num_workers - i))
    if num_others == 100:
        assert sum(order[i].name.startswith(LONGEST) for i in starts) == min(num_long, num_workers)


def test_the_longest_are_tests():
    """Catches one that has another name now, and waits at the end again."""
    sources = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    assert [name for name in LONGEST if f"def {name.partition('[')[0]}" not in sources] == []


def test_no_name_of_the_longest_begins_another():
    """Catches an item that two of them name, which would run twice."""
    assert not any(x != y and x.startswith(y) for x in LONGEST for y in LONGEST)
