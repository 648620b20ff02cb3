"""Counts of what ranks compute and receive, against the plans of all ranks and against the definition."""

from collections import Counter as Bag
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ring_dilated_attention.forecast.call_cost import pairs
from ring_dilated_attention.pattern import DilatedPattern
from ring_dilated_attention.plan.counts import Counter, Phases, count_ranks, rows_before
from ring_dilated_attention.plan.job import Job
from ring_dilated_attention.plan.planner import make_plan
from ring_dilated_attention.plan.sharding import ShardSpec, make_shards
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
    seq_len, num_branches = draw(st.integers(1, 150)), draw(st.integers(1, 3))
    lengths = st.one_of(st.integers(1, seq_len + 5), st.sampled_from([seq_len, 2**62]))
    rule = draw(st.sampled_from([{}, {"phase": "blocked"}, {"heads": "split"}]))
    num_kv_heads = draw(st.integers(num_branches if "heads" in rule else 1, 4))
    ratio = draw(st.integers(1, 3))
    pattern = DilatedPattern(
        draw(st.lists(lengths, min_size=num_branches, max_size=num_branches)),
        draw(st.lists(st.integers(1, 24), min_size=num_branches, max_size=num_branches)),
        window=None if rule.get("heads") else draw(st.none() | lengths),
        is_causal=draw(st.booleans()),
        **rule,
    )
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
@pytest.mark.parametrize("seq_len", [1, 7, 64, 100])
def test_pairs_of_a_document(is_causal, rule, seq_len):
    """By the definition, position by position."""
    pattern, expected = (
        DilatedPattern((16, 50, 2**62), (1, 3, 8), is_causal=is_causal, **rule),
        [0, 0, 0],
    )
    for branch, (w, r, _) in enumerate(pattern.branches):
        for head in range(6):
            phase = pattern.phase_of(branch, head, 6)
            rows = [t for t in range(seq_len) if t % w % r == phase]
            expected[branch] += sum(
                a // w == b // w and (b <= a or not is_causal) for a in rows for b in rows
            )
    assert pairs(pattern, seq_len, 6) == sum(expected)


def test_rows_by_hand():
    assert [rows_before(x, 3, 4) for x in range(9)] == [0, 0, 0, 0, 1, 1, 1, 1, 2]
    phases = Phases([0, 3, 3], 4)
    assert [phases.rows(x) for x in (0, 1, 4, 5, 8)] == [0, 1, 3, 4, 6]


@pytest.mark.parametrize("sharding", ["contiguous", "zigzag"])
@pytest.mark.parametrize("is_causal", [False, True])
def test_a_message_carries_what_its_owner_packs(sharding, is_causal):
    """Catches a chunk that is made on demand with other rows, or in another order, than its owner would send."""
    n, world_size, heads = 90, 5, (4, 2)
    pattern = DilatedPattern((7, 30, 90), (1, 4, 17), is_causal=is_causal)
    shards = make_shards(sharding, ShardSpec(sharding, world_size).default_lengths(n))
    documents = (0, 41, n)
    positions = [[t for span in shard for t in range(*span)] for shard in shards]
    plans = [make_plan(Job(pattern, shards, *heads, documents), k) for k in range(world_size)]
    num_checked = 0
    for k, plan in enumerate(plans):
        find = chunk_finder(Job(pattern, shards, *heads, documents), k)
        for message in (
            m for hop in plan.hops for m in (*hop.receives, *hop.grad_sends, *hop.grad_receives)
        ):
            chunk = find(message)
            assert (chunk.owner, chunk.size) == (message.owner, message.size)
            owners = chunk_finder(Job(pattern, shards, *heads, documents), message.owner)
            packs = [
                (rows, block)
                for rows, block in plans[message.owner].packs
                if owners(message._replace(offset=_start(plans[message.owner], block)))[1:4]
                == chunk[1:4]
            ]
            assert len(packs) == len(chunk.rows)
            for (local, packed), (rows, block) in zip(packs, chunk.rows, strict=True):
                assert block == packed._replace(offset=packed.offset - packs[0][1].offset)
                for j in range(len(local.heads)):
                    mine = [
                        local.first + j * local.shift + m * local.step
                        for m in range(local.num_rows)
                    ]
                    theirs = [
                        rows.first + j * rows.shift + m * rows.step for m in range(rows.num_rows)
                    ]
                    assert [positions[message.owner][row] for row in mine] == theirs
                    assert local.heads == rows.heads
            num_checked += 1
    assert num_checked > 40


def _start(plan, block):
    """Where the ring's chunks lie in the rank's buffer, given a block of its own chunk."""
    offsets = {
        m.offset for hop in plan.hops for m in (*hop.sends, *hop.receives, *hop.grad_receives)
    }
    return max(offset for offset in offsets if offset <= block.offset)


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
