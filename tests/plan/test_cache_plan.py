"""What a cache keeps, enumerated against the definition: nothing longer than it is seen, nothing dropped before."""

import math
from collections import defaultdict

import pytest
from drawn import patterns
from hypothesis import given, settings
from hypothesis import strategies as st

from ring_dilated_attention.pattern import DilatedPattern
from ring_dilated_attention.plan.cache_plan import (
    plan_append,
    plan_cache,
)
from ring_dilated_attention.plan.program import program_of
from ring_dilated_attention.plan.step import CallFacts

PAPER = DilatedPattern((2048, 4096, 8192, 16384, 32768), (1, 2, 4, 6, 12), is_causal=True)


@st.composite
def calls(draw):
    """A causal pattern with heads that it can run on."""
    num_kv_heads = draw(st.integers(1, 3))
    num_heads = num_kv_heads * draw(st.integers(1, 3))
    return (
        draw(patterns(num_heads, longest=12, highest_rate=5, is_causal=True)),
        num_heads,
        num_kv_heads,
    )


def phases_read(pattern, num_heads, num_kv_heads):
    """(branch, key/value head, phase) that some query head reads, from the definition alone."""
    found = set()
    for b, (w, r, _) in enumerate(pattern.branches):
        for h in range(num_heads):
            phase = pattern.phase_of(b, h, num_heads)
            if phase is not None and any(t % r == phase for t in range(w)):
                found.add((b, h // (num_heads // num_kv_heads), phase))
    return found


def live(buffers, position):
    """The numbers of the rows that the query at `position - 1`, or a later query, sees.

    If the segment of `position - 1` has no row of the phase from there on, its earlier rows are kept but not live.
    """
    stop = buffers.before(position)
    if buffers.is_window:
        return range(max(0, position - buffers.segment_length), stop)
    number = buffers.before(max(0, position - 1))  # of the last query's row, or of the next row
    return range(number - number % buffers.rows_per_segment, stop)


def rows_seen(pattern, branch, phase, first_query, num_positions):
    """Positions before or at first_query that a query from there on sees in a branch, if it has the phase."""
    w, r, is_window = pattern.branches[branch]
    return {
        j
        for i in range(first_query, num_positions)
        for j in range(first_query + 1)
        if (i - j < w if is_window else i // w == j // w and i % w % r == j % w % r == phase)
    }


def buffers_of(plan):
    """(branch, key/value head, phase) -> the buffers that hold it; none twice."""
    found = {}
    for (branch, phase), several in plan.of_phase.items():
        for buffers in several:
            kind = (buffers.segment_length, buffers.rate, buffers.is_window)
            assert kind == plan.pattern.branches[branch]
            assert buffers.number == branch
            assert buffers.phase == phase
            for head in buffers.kv_heads:
                assert (branch, head, phase) not in found
                found[branch, head, phase] = buffers
    return found


@settings(max_examples=150, deadline=None)
@given(calls(), st.integers(1, 30))
def test_what_is_live_is_what_is_seen(call, num_positions):
    """Catches a row that is dropped too early or counted too long: at every position, the rows of a buffer that the
    last or a later query sees, found by asking every query. The largest number of them is the buffer's size, and the
    sum of these the closed form."""
    pattern, num_heads, num_kv_heads = call
    plan, horizon = (
        plan_cache(*call),
        num_positions + max(b.segment_length for b in pattern.branches),
    )
    found = buffers_of(plan)
    assert set(found) == phases_read(*call)
    for position in range(1, num_positions + 1):
        for (branch, _, phase), buffers in found.items():
            seen = rows_seen(pattern, branch, phase, position - 1, horizon)
            assert [buffers.position_of(c) for c in live(buffers, position)] == sorted(seen)
    for buffers in found.values():
        longest = range(1, 1 + math.lcm(*pattern.segment_lengths) + (pattern.window or 0))
        assert max(len(live(buffers, position)) for position in longest) == buffers.capacity
    assert plan.num_rows == pattern.cache_rows(num_heads, num_kv_heads)


@settings(max_examples=100, deadline=None)
@given(calls(), st.integers(1, 20))
def test_a_longest_sequence_caps_every_buffer(call, max_len):
    """Catches a buffer larger than what a query of a sequence of max_len positions ever sees, or smaller."""
    pattern, num_heads, num_kv_heads = call
    plan = plan_cache(*call, max_len)
    largest = defaultdict(int)
    for branch, head, phase in phases_read(*call):
        for t in range(max_len):
            seen = len(rows_seen(pattern, branch, phase, t, max_len))
            largest[branch, head, phase] = max(largest[branch, head, phase], seen)
    assert {key: buffers.capacity for key, buffers in buffers_of(plan).items()} == {
        k: n for k, n in largest.items() if n
    }
    assert (
        plan.num_rows
        == pattern.cache_rows(num_heads, num_kv_heads, max_len)
        == sum(largest.values())
    )


@settings(max_examples=100, deadline=None)
@given(calls(), st.integers(0, 30), st.sampled_from([None, 1, 7, 40]))
def test_going_back(call, keep, max_len):
    """Catches rows that are written over although one can go back to where they are seen: from every position to each
    of the `keep` before it, and to any in segments that are open; and buffers that are larger than that needs."""
    pattern = call[0]
    plan = plan_cache(*call, max_len, keep)
    largest = defaultdict(int)
    for position in range(1, 1 + min(80, max_len or 80)):
        floor = plan.floor(position)
        assert floor <= max(0, position - keep)
        if pattern.window is None or position - keep < pattern.window:  # it has dropped no row
            assert floor <= max((position // w * w for w in pattern.segment_lengths), default=0)
        for key, buffers in buffers_of(plan).items():
            kept = plan.kept(buffers, position)
            for back in range(floor, position + 1):
                # The next query of this phase, after going back, sees rows from the start of its segment on.
                first = buffers.before(back) - buffers.before(back) % buffers.rows_per_segment
                if buffers.is_window:
                    first = buffers.seen(back).start
                numbers = range(first, buffers.before(back))
                assert not numbers or numbers.start >= kept.start
            # what the last query saw, itself included
            own = range(buffers.seen(position - 1).start, kept.stop)
            largest[key] = max(largest[key], len(kept), len(own))
            assert len(kept) <= buffers.capacity
    if max_len is not None or keep + max(pattern.segment_lengths) <= 80:
        capacities = {key: buffers.capacity for key, buffers in buffers_of(plan).items()}
        assert capacities == {key: n for key, n in largest.items() if n}


def test_layers_share_the_program_of_a_chunk():
    """Catches a plan that is made anew for each layer: the programs of such plans are kept, and never found again."""
    plan = plan_cache(PAPER, 12, 12)
    first, second = (
        program_of(plan_append(plan, 5000, 40), "forward", CallFacts()) for _ in range(2)
    )
    assert first is second


def test_the_papers_pattern():
    """About w / r rows for each branch: 11,606 of 32,768 positions, at any length; below that many positions a dense
    cache is the smaller one."""
    per_head = sum(math.ceil(w / r) for w, r, _ in PAPER.branches)
    assert per_head == 11_606
    assert 12 * (per_head - 5) < PAPER.cache_rows(12, 12) <= 12 * per_head
    # Key/value heads that are shared hold the phases of all their query heads.
    assert PAPER.cache_rows(12, 1) == 2048 + 4096 + 8192 + 16384 + 32768
    assert PAPER.cache_rows(12, 12, max_len=2048) > 12 * 2048
    assert DilatedPattern((2**40,), (1,), is_causal=True).cache_rows(2, 2, max_len=100) == 200


@pytest.mark.parametrize("keep", [0, 2])
def test_a_window_that_is_full_goes_back_by_keep_alone(keep):
    plan = plan_cache(DilatedPattern.sliding(8, is_causal=True), 2, 2, None, keep)
    assert plan.floor(7) == 0
    assert plan.floor(30) == 30 - keep
