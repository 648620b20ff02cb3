"""Counts of what ranks compute and receive, against the plans of all ranks and against the definition."""

from collections import Counter as Bag
from itertools import pairwise

import pytest
from drawn import patterns
from hypothesis import given, settings
from hypothesis import strategies as st

from ring_dilated_attention.forecast.call_cost import pairs
from ring_dilated_attention.pattern import DilatedPattern
from ring_dilated_attention.plan.counts import Counter, Phases, count_ranks, rows_before
from ring_dilated_attention.plan.job import Job
from ring_dilated_attention.plan.planner import make_plan
from ring_dilated_attention.plan.sharding import ShardSpec, make_shards
from ring_dilated_attention.reference import multiplicity
from ring_dilated_attention.simulate.one_rank import chunk_finder


@st.composite
def cuts(draw, seq_len):
    """Shards of one to six ranks: equal or not, some empty, zigzag, and slices of shards that ranks of a mesh hold."""
    num_ranks = draw(st.integers(1, 6))
    kind = draw(st.sampled_from(["contiguous", "zigzag", "uneven", "mesh"]))
    if kind == "uneven":
        borders = sorted(
            draw(st.lists(st.integers(0, seq_len), min_size=num_ranks - 1, max_size=num_ranks - 1))
        )
        return make_shards("contiguous", [b - a for a, b in pairwise((0, *borders, seq_len))])
    if kind == "mesh":
        cut = ShardSpec(draw(st.sampled_from(["contiguous", "zigzag"])), 2 * num_ranks, inner=2)
        return cut.shards_of(cut.default_lengths(seq_len))
    return make_shards(kind, ShardSpec(kind, num_ranks).default_lengths(seq_len))


@st.composite
def jobs(draw):
    """Any job: segments and rates that divide nothing, packed documents, grouped queries, held heads, all rules."""
    seq_len, num_kv_heads, ratio = (draw(st.integers(1, most)) for most in (150, 4, 3))
    longest = draw(st.sampled_from([seq_len + 5, 2**62]))
    pattern = draw(patterns(num_kv_heads * ratio, longest=longest, highest_rate=24))
    borders = draw(st.one_of(st.none(), st.sets(st.integers(1, seq_len), max_size=6)))
    documents = None if borders is None else tuple(sorted(borders | {0, seq_len}))
    first = draw(st.integers(0, num_kv_heads - 1))
    held = draw(st.sampled_from([None, range(first * ratio, num_kv_heads * ratio)]))
    return Job(pattern, draw(cuts(seq_len)), num_kv_heads * ratio, num_kv_heads, documents, held)


@settings(max_examples=300, deadline=None)
@given(jobs())
def test_counts_are_those_of_the_plans(job):
    """Pairs, rows that come, and rows whose gradients leave, of every rank; and what each branch sends in all."""
    counter = Counter(job)
    counted = count_ranks(counter)
    plans = [make_plan(job, rank) for rank in range(job.num_ranks)]
    for plan, num_pairs, received in zip(plans, counted.pairs, counted.received, strict=True):
        comes = sum(message.size for hop in plan.hops for message in hop.receives)
        assert (num_pairs, received, received) == (plan.pairs, comes, plan.sent(backward=True)[1])
    assert sum(counted.received) == sum(plan.sent()[0] for plan in plans)
    sent = Bag()
    for plan in plans:
        find = chunk_finder(job, plan.rank)
        for hop in plan.hops:
            for message in hop.receives:
                sent[find(message).branch] += message.size
    received = Bag()
    for (branch, _), segment in counted.segments.items():
        received[branch] += segment.received
    assert received == sent


@settings(max_examples=100, deadline=None)
@given(jobs())
def test_sharers_and_buffers(job):
    """The ranks that exchange rows of a segment are among its sharers, all of them where a shard has rows of all
    phases; and a buffer has room for one chunk of each segment, but for rings of few heads that need less."""
    counted = count_ranks(Counter(job))
    is_dense = max(job.pattern.dilation_rates) == 1
    for rank in range(job.num_ranks):
        plan, find = make_plan(job, rank), chunk_finder(job, rank)
        places = {
            find(message)[1:3] for hop in plan.hops for message in (*hop.receives, *hop.targets)
        }
        assert all(
            counted.segments[place].sharers > 1 and counted.segments[place].received
            for place in places
        )
        if is_dense and plan.hops and len(job.shards[rank]) == 1:
            assert counted.buffers[rank] <= plan.chunk_size


@pytest.mark.parametrize("is_causal", [False, True])
def test_a_rank_with_two_pieces_of_a_segment_receives_neither(is_causal):
    pattern = DilatedPattern((64,), (4,), is_causal=is_causal)
    job = Job(pattern, make_shards("zigzag", (16,) * 4), 4, 4)
    plans = [make_plan(job, rank) for rank in range(4)]
    received = [sum(m.size for hop in plan.hops for m in hop.receives) for plan in plans]
    assert count_ranks(Counter(job)).received == received
    assert max(received) == 2 * (64 - 16)  # of each position one head reads its phase


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("rule", [{}, {"phase": "blocked"}, {"heads": "split"}])
@pytest.mark.parametrize("seq_len", [1, 100])
def test_pairs_of_a_document(is_causal, rule, seq_len):
    """Those of the definition."""
    pattern = DilatedPattern((16, 50, 2**62), (1, 3, 8), is_causal=is_causal, **rule)
    assert pairs(pattern, seq_len, 6) == multiplicity(pattern, seq_len, 6).sum()


def test_rows_by_hand():
    assert [rows_before(x, 3, 4) for x in range(9)] == [0, 0, 0, 0, 1, 1, 1, 1, 2]
    phases = Phases([0, 3, 3], 4)
    assert [phases.rows(x) for x in (0, 1, 4, 5, 8)] == [0, 1, 3, 4, 6]


def test_planning_one_rank_of_many_costs_its_rings():
    """65,536 ranks, of which 256 hold rows of the widest branch: no hop but theirs, and none that carries nothing."""
    pattern = DilatedPattern((2048, 2**30), (1, 2**22), is_causal=True)
    shards = make_shards("contiguous", (2**14,) * 2**16)
    plan = make_plan(Job(pattern, shards, 4, 4), 256 * 200)
    assert len(plan.hops) == 201  # the last one sends the first chunk on
    assert all(any(hop) for hop in plan.hops)
    assert {m.owner % 256 for hop in plan.hops for m in hop.receives} == {0}
    assert plan.sent() == (201 * 2 * 4, 0)
    assert make_plan(Job(pattern, shards, 4, 4), 256 * 200 + 1).hops == ()
