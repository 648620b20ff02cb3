"""The order in which items run: every one of them once, and the longest are there."""

from collections import namedtuple

import pytest
from helpers import ROOT
from order import LONGEST, dealt

Item = namedtuple("Item", "name")


@pytest.mark.parametrize("num_workers", [1, 2, 8])
def test_every_item_runs_once(num_workers):
    items = [Item(f"test_{i}") for i in range(100)]
    items[3:3] = [Item(f"{LONGEST[i % 3]}[{i}]") for i in range(7)]
    assert sorted(dealt(items, num_workers)) == sorted(items)


def test_the_longest_are_tests():
    """Catches one that has another name now, and waits at the end again; and one that two names would run twice."""
    sources = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    assert [name for name in LONGEST if f"def {name.partition('[')[0]}" not in sources] == []
    assert not any(x != y and x.startswith(y) for x in LONGEST for y in LONGEST)
