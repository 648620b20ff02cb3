"""Counts of what ranks compute and receive, against the plans of all ranks and against the definition."""

from collections import Counter as Bag

import pytest
from drawn import sharded_calls
from hypothesis import given, settings

from ring_dilated_attention.forecast.call_cost import pairs
from ring_dilated_attention.pattern import DilatedPattern
from ring_dilated_attention.plan.counts import Counter, count_ranks
from ring_dilated_attention.plan.planner import make_plan
from ring_dilated_attention.plan.sharded_call import ShardedCall
from ring_dilated_attention.plan.sharding import make_shards
from ring_dilated_attention.reference import multiplicity
from ring_dilated_attention.simulate.one_rank import chunk_finder


def units_read(sharded_call, plan):
    """Of the units that a rank receives, those that its tiles read at that hop."""
    find, read = chunk_finder(sharded_call, plan.rank), 0
    for hop in plan.hops:
        seen = {(tile.key.offset, head) for tile in hop.tiles for head in tile.key.heads}
        for message in hop.receives:
            for _, block in find(message).rows:
                offset = message.offset + block.offset
                num_seen = sum((offset, head) in seen for head in range(block.num_heads))
                read += 2 * num_seen * block.num_rows
    return read


@settings(max_examples=150, deadline=None)
@given(sharded_calls())
def test_counts_are_those_of_the_plans(sharded_call):
    """Pairs, rows that come, and rows whose gradients leave, of every rank; and what each branch sends in all.

    Catches, too, a chunk that passes through ranks whose queries all come before it, and phases of which the receiver
    has no row: whatever comes is read."""
    counter = Counter(sharded_call)
    counted = count_ranks(counter)
    plans = [make_plan(sharded_call, rank) for rank in range(sharded_call.num_ranks)]
    for plan, num_pairs, received in zip(plans, counted.pairs, counted.received, strict=True):
        comes = sum(message.size for hop in plan.hops for message in hop.receives)
        assert (num_pairs, received) == (plan.pairs, comes)
        assert comes == units_read(sharded_call, plan) == plan.sent(backward=True)[1]
    assert sum(counted.received) == sum(plan.sent()[0] for plan in plans)
    sent = Bag()
    for plan in plans:
        find = chunk_finder(sharded_call, plan.rank)
        for hop in plan.hops:
            for message in hop.receives:
                sent[find(message).branch] += message.size
    received = Bag()
    for (branch, _), segment in counted.segments.items():
        received[branch] += segment.received
    assert received == sent


@settings(max_examples=100, deadline=None)
@given(sharded_calls())
def test_sharers_and_buffers(sharded_call):
    """The ranks that exchange rows of a segment are among its sharers, all of them where a shard has rows of all
    phases; and a buffer has room for one chunk of each segment, but for rings of few heads that need less."""
    counted = count_ranks(Counter(sharded_call))
    is_dense = max(sharded_call.pattern.dilation_rates) == 1
    for rank in range(sharded_call.num_ranks):
        plan, find = make_plan(sharded_call, rank), chunk_finder(sharded_call, rank)
        places = {
            find(message)[1:3] for hop in plan.hops for message in (*hop.receives, *hop.targets)
        }
        assert all(
            counted.segments[place].sharers > 1 and counted.segments[place].received
            for place in places
        )
        if is_dense and plan.hops and len(sharded_call.shards[rank]) == 1:
            assert counted.buffers[rank] <= plan.chunk_size


@pytest.mark.parametrize("is_causal", [False, True])
def test_a_rank_with_two_pieces_of_a_segment_receives_neither(is_causal):
    pattern = DilatedPattern((64,), (4,), is_causal=is_causal)
    sharded_call = ShardedCall(pattern, make_shards("zigzag", (16,) * 4), 4, 4)
    plans = [make_plan(sharded_call, rank) for rank in range(4)]
    received = [sum(m.size for hop in plan.hops for m in hop.receives) for plan in plans]
    assert count_ranks(Counter(sharded_call)).received == received
    assert max(received) == 2 * (64 - 16)  # of each position one head reads its phase


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("rule", [{}, {"phase": "blocked"}, {"heads": "split"}])
@pytest.mark.parametrize("seq_len", [1, 100])
def test_pairs_of_a_document(is_causal, rule, seq_len):
    """Those of the definition."""
    pattern = DilatedPattern((16, 50, 2**62), (1, 3, 8), is_causal=is_causal, **rule)
    assert pairs(pattern, seq_len, 6) == multiplicity(pattern, seq_len, 6).sum()


def test_planning_one_rank_of_many_costs_its_rings():
    """65,536 ranks, of which 256 hold rows of the widest branch: no hop but theirs, and none that carries nothing."""
    pattern = DilatedPattern((2048, 2**30), (1, 2**22), is_causal=True)
    shards = make_shards("contiguous", (2**14,) * 2**16)
    sharded_call = ShardedCall(pattern, shards, 4, 4)
    plan = make_plan(sharded_call, 256 * 200)
    assert len(plan.hops) == 201  # the last one sends the first chunk on
    assert all(any(hop) for hop in plan.hops)
    assert {m.owner % 256 for hop in plan.hops for m in hop.receives} == {0}
    assert plan.sent() == (201 * 2 * 4, 0)
    assert make_plan(sharded_call, 256 * 200 + 1).hops == ()
