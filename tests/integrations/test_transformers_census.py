"""Every architecture of the pinned transformers is equal to its own attention under log M, refused, or not built; and
over two ranks it is right, or refused; and as it was trained it is equal over ranks, refused, or not built."""

import json
from collections import Counter
from functools import partial

import census
import census_as_trained
import census_ranks
import pytest


def on_one_device(names):
    everything = census.architectures()
    return {name: census.outcome(*everything[name]) for name in names}


over_two = partial(census_as_trained.over_ranks, 2, census_ranks.rank_of_census)
over_three = partial(census_as_trained.over_ranks, 3, census_as_trained.rank_of_census)
# The committed list, all architectures, the outcomes of some, and into how many shares they are cut.
LISTS = [
    (census.LIST, census.architectures, on_one_device, 24),
    (census_ranks.LIST_OVER_RANKS, census_ranks.architectures_over_ranks, over_two, 12),
    (census_as_trained.LIST_AS_TRAINED, census_as_trained.architectures_as_trained, over_three, 16),
]


@pytest.mark.parametrize(
    ("number", "share"),
    [(number, share) for number, entry in enumerate(LISTS) for share in range(entry[-1])],
)
def test_as_committed(number, share):
    """None in between: not one computes another function."""
    path, architectures, outcomes_of, shares = LISTS[number]
    committed = json.loads(path.read_text())
    assert [*committed] == [*architectures()]
    counts = Counter(found for found, _ in committed.values())
    assert {*counts} <= {"right", "equal", "refused", "not built"}
    assert counts["not built"] < len(committed) / 5
    names = [*architectures()][share::shares]
    assert outcomes_of(names) == {name: committed[name] for name in names}
