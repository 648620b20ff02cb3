"""Closed forms against enumerated plans, and what the plan says of chunks that nobody has made yet."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ring_dilated_attention.pattern import DilatedPattern
from ring_dilated_attention.plan.job import Job
from ring_dilated_attention.plan.planner import chunk_finder, make_plan
from ring_dilated_attention.plan.sharding import default_lengths, make_shards
from ring_dilated_attention.plan.totals import Sent, pairs, sent_by_all, sent_by_rank


@st.composite
def jobs(draw):
    """A pattern with any segments and rates, aligned or not, over equal contiguous shards."""
    num_ranks, length = draw(st.integers(1, 8)), draw(st.sampled_from([1, 4, 5, 8, 16]))
    seq_len = num_ranks * length
    num_branches = draw(st.integers(1, 3))
    lengths = st.sampled_from([1, 3, length, 2 * length, 4 * length, 30, seq_len, 2 * seq_len, 2**62])
    pattern = DilatedPattern(
        draw(st.lists(lengths, min_size=num_branches, max_size=num_branches)),
        draw(st.lists(st.integers(1, 40), min_size=num_branches, max_size=num_branches)),
        is_causal=draw(st.booleans()),
        phase=draw(st.sampled_from(["modulo", "blocked"])),
    )
    return pattern, seq_len, num_ranks, draw(st.sampled_from([(4, 4), (4, 2), (6, 1), (3, 3)]))


@settings(max_examples=200, deadline=None)
@given(jobs())
def test_closed_forms_equal_the_plans(job):
    """Catches a formula that holds only where rates divide shards and shards divide segments."""
    pattern, seq_len, num_ranks, heads = job
    shards = make_shards("contiguous", (seq_len // num_ranks,) * num_ranks)
    plans = [make_plan(Job(pattern, shards, *heads), rank) for rank in range(num_ranks)]
    assert pairs(pattern, seq_len, heads[0]) == sum(plan.pairs for plan in plans)
    sent = [Sent(*plan.sent(backward=True)) for plan in plans]
    assert [sent_by_rank(pattern, seq_len, num_ranks, rank, *heads) for rank in range(num_ranks)] == sent
    assert sent_by_all(pattern, seq_len, num_ranks, *heads) == sum(sent, Sent(0, 0))
    for plan in plans:
        in_bytes = tuple(plan.bytes_sent(3, 8, 2, backward=backward) for backward in (False, True))
        assert Sent(*plan.sent(backward=True)).num_bytes(3, 8, 2) == in_bytes


def test_the_design_formula():
    """(g - 1) * 2 * B * L/r * H * D * itemsize per rank and straddling branch."""
    sent = sent_by_rank(DilatedPattern((32, 128, 256), (1, 2, 4)), 256, 4, 1, 4, 4)
    assert sent.chunks == sum((w // 64 - 1) * 2 * (64 // r) * 4 for w, r in [(128, 2), (256, 4)])


def test_shards_must_be_equal():
    with pytest.raises(ValueError, match=r"10 positions.*4 ranks: 10 mod 4 = 2"):
        sent_by_all(DilatedPattern((4,), (1,)), 10, 4, 1, 1)


@pytest.mark.parametrize("sharding", ["contiguous", "zigzag"])
@pytest.mark.parametrize("is_causal", [False, True])
def test_a_message_carries_what_its_owner_packs(sharding, is_causal):
    """Catches a chunk that is made on demand with other rows, or in another order, than its owner would send."""
    n, world_size, heads = 90, 5, (4, 2)
    pattern = DilatedPattern((7, 30, 90), (1, 4, 17), is_causal=is_causal)
    shards = make_shards(sharding, default_lengths(sharding, n, world_size))
    documents = (0, 41, n)
    positions = [[t for span in shard for t in range(*span)] for shard in shards]
    plans = [make_plan(Job(pattern, shards, *heads, documents), k) for k in range(world_size)]
    num_checked = 0
    for k, plan in enumerate(plans):
        find = chunk_finder(Job(pattern, shards, *heads, documents), k)
        for message in (m for hop in plan.hops for m in (*hop.receives, *hop.grad_sends, *hop.grad_receives)):
            chunk = find(message)
            assert (chunk.owner, chunk.size) == (message.owner, message.size)
            owners = chunk_finder(Job(pattern, shards, *heads, documents), message.owner)
            packs = [
                (rows, block)
                for rows, block in plans[message.owner].packs
                if owners(message._replace(offset=_start(plans[message.owner], block)))[1:4] == chunk[1:4]
            ]
            assert len(packs) == len(chunk.rows)
            for (local, packed), (rows, block) in zip(packs, chunk.rows, strict=True):
                assert block == packed._replace(offset=packed.offset - packs[0][1].offset)
                for j in range(len(local.heads)):
                    mine = [local.first + j * local.shift + m * local.step for m in range(local.num_rows)]
                    theirs = [rows.first + j * rows.shift + m * rows.step for m in range(rows.num_rows)]
                    assert [positions[message.owner][row] for row in mine] == theirs
                    assert local.heads == rows.heads
            num_checked += 1
    assert num_checked > 40


def _start(plan, block):
    """Where the ring's chunks lie in the rank's buffer, given a block of its own chunk."""
    offsets = {m.offset for hop in plan.hops for m in (*hop.sends, *hop.receives, *hop.grad_receives)}
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
