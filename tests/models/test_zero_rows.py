"""torchscale's padding in integers, place by place against what its code does: pad, cut, fill up, dilate, crop."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ring_dilated_attention.models.torchscale.zero_rows import (
    heads_of_phases,
    is_misaligned,
    moves,
    zero_keys,
    zero_queries,
)
from ring_dilated_attention.pattern import Branch, DilatedPattern
from ring_dilated_attention.plan.sharding import default_lengths, make_shards, shard_length

BRANCHES = st.builds(Branch, st.integers(1, 12), st.integers(1, 8))


def places_of(branch, length):
    """The row at each place of torchscale's padded tensor, None for a row of zeros."""
    w = min(branch.segment_length, length)
    taken = -(-w // branch.dilation_rate) * branch.dilation_rate
    for segment in range(-(-length // w)):
        for p in range(taken):
            row = segment * w + p
            yield row if p < w and row < length else None


def seen_by(branch, num_heads, length):
    """For each (place, head) that the branch covers: what stands at the places of its keys."""
    w = min(branch.segment_length, length)
    taken = -(-w // branch.dilation_rate) * branch.dilation_rate
    places = list(places_of(branch, length))
    phase = DilatedPattern(
        (branch.segment_length,), (branch.dilation_rate,), phase="blocked"
    ).phase_of
    for place in range(len(places)):
        for head in range(num_heads):
            s = phase(0, head, num_heads)
            if place % taken % branch.dilation_rate == s:
                start = place // taken * taken
                yield place, head, places[start + s : start + taken : branch.dilation_rate]


@settings(max_examples=150, deadline=None)
@given(BRANCHES, st.integers(1, 5), st.integers(1, 40), st.data())
def test_zero_keys(branch, num_heads, length, data):
    """Catches a miscounted zero key, at its query's own position, however the positions are cut into spans."""
    cuts = sorted({0, length, *data.draw(st.lists(st.integers(0, length), max_size=3))})
    found = {}
    for start, stop in pairwise(cuts):
        for keys in zero_keys(branch, num_heads, length, range(start, stop)):
            assert keys.num_zeros > 0
            for query in keys.queries:
                assert start <= query < stop
                for head in keys.heads:
                    assert (query, head) not in found
                    found[query, head] = keys.num_zeros
    places = list(places_of(branch, length))
    expected = {}
    for place, head, keys in seen_by(branch, num_heads, length):
        if places[place] is not None and None in keys:
            expected[places[place], head] = keys.count(None)
    assert found == expected


@settings(max_examples=150, deadline=None)
@given(BRANCHES, st.integers(1, 5), st.integers(1, 40))
def test_zero_queries(branch, num_heads, length):
    """Catches a place that is left empty, or filled though it has a query, and a value that is missed in its sum."""
    places = list(places_of(branch, length))
    expected = {}
    for place, head, keys in seen_by(branch, num_heads, length):
        if place < length and places[place] is None and len(keys) > 1:
            expected[place, head] = [row for row in keys if row is not None]
    found = {
        (q.position, head): list(q.rows)
        for q in zero_queries(branch, num_heads, length)
        for head in q.heads
    }
    assert found == expected


@settings(max_examples=150, deadline=None)
@given(BRANCHES, st.integers(1, 40), st.integers(1, 4), st.data())
def test_moves(branch, length, world_size, data):
    """Every rank's rows come out where torchscale's padding puts them, under any cut."""
    sharding = data.draw(st.sampled_from(["contiguous", "zigzag"]))
    lengths = default_lengths(sharding, length, world_size)
    if sharding == "contiguous" and data.draw(st.booleans()):  # uneven, perhaps empty
        cuts = sorted(
            data.draw(
                st.lists(st.integers(0, length), min_size=world_size - 1, max_size=world_size - 1)
            )
        )
        lengths = tuple(b - a for a, b in pairwise([0, *cuts, length]))
    shards = make_shards(sharding, lengths)
    rows = [[t for span in shard for t in range(*span)] for shard in shards]
    found = {}
    for move in moves(branch, shards, length):
        for j in range(move.num_rows):
            place = rows[move.target_rank][move.target_row + j]
            assert place not in found
            found[place] = rows[move.source_rank][move.source_row + j]
    expected = {
        place: row
        for place, row in enumerate(list(places_of(branch, length))[:length])
        if row is not None
    }
    assert found == expected
    assert all(shard_length(shard) == n for shard, n in zip(shards, lengths, strict=True))


def test_gigapath_is_misaligned_beyond_its_fourth_segment():
    branches = [
        Branch(w, r)
        for w, r in zip((1024, 5792, 32768, 185363, 1048576), (1, 2, 4, 8, 16), strict=True)
    ]
    assert [is_misaligned(branch, 185_364) for branch in branches] == [
        False,
        False,
        False,
        True,
        False,
    ]
    assert not any(is_misaligned(branch, 185_363) for branch in branches)
    found = moves(branches[3], make_shards("contiguous", (200_000,)), 200_000)
    assert [move.target_row - move.source_row for move in found] == [0, 5]
    assert [q.position for q in zero_queries(branches[3], 16, 200_000)] == list(
        range(185_363, 185_368)
    )
    assert [list(q.heads) for q in zero_queries(branches[3], 16, 200_000)] == [
        [2 * s, 2 * s + 1] for s in range(3, 8)
    ]


@pytest.mark.parametrize(("num_heads", "rate"), [(16, 8), (3, 4), (5, 2), (1, 7)])
def test_heads_of_phases(num_heads, rate):
    pattern = DilatedPattern((64,), (rate,), phase="blocked")
    for phase, heads in enumerate(heads_of_phases(num_heads, rate)):
        assert list(heads) == [
            h for h in range(num_heads) if pattern.phase_of(0, h, num_heads) == phase
        ]
