"""Calls that repeat others: ranks that change their lengths. (Ranks that disagree, or fail, and other threads:
test_parallel.py.) Functions named `rank...` run on every rank."""

import warnings
from functools import partial

import pytest
from definition import PATIENCE, check_step, whole
from distributed import run

from ring_dilated_attention import ContextParallel, DilatedPattern

PATTERN = DilatedPattern((5, 16), (1, 3), is_causal=True)
LOCAL = DilatedPattern((8,), (1,))  # with shards of 8 rows nothing is sent


def rank_repeats(rank, world_size):
    """Lengths that stay, change on one rank, on all, and come again."""
    warnings.simplefilter("ignore")  # of cuts that are not near-equal
    cp = ContextParallel(timeout=PATIENCE)
    first, second = [6] * world_size, [6, 9, *[6] * (world_size - 2)]
    third = [7, 3, *[8] * (world_size - 2)]
    local, longer = [8] * world_size, [12, *[8] * (world_size - 1)]
    steps = [(PATTERN, x) for x in (first, first, second, second, third, first, third, third)]
    steps += [(LOCAL, x) for x in (local, local, longer, longer, local)]
    for pattern, lengths in steps:
        cut = partial(rows_of_rank, lengths, rank)
        check_step(cp, whole(sum(lengths)), pattern, cut=cut)


def rows_of_rank(lengths, rank, x):
    return x.split(lengths, dim=1)[rank]


@pytest.mark.parametrize("world_size", [2, 4])
def test_values_and_gradients_are_those_of_the_definition(world_size):
    """Catches the lengths of an earlier call, on a rank whose own did not change."""
    run(world_size, rank_repeats)
