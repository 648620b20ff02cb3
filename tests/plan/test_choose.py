"""Which exchange "auto" takes, and why: from the plans of the ranks, so without processes."""

import random
import re

import pytest
import torch

from ring_dilated_attention import ContextParallel, DilatedPattern, explain
from ring_dilated_attention.plan.exchange import (
    SMALL_CHUNK_BYTES,
    choose_exchange,
    dealt_bytes,
    plan_exchange,
)
from ring_dilated_attention.plan.job import Job
from ring_dilated_attention.plan.planner import make_plan
from ring_dilated_attention.plan.sharding import (
    ShardSpec,
    make_shards,
    shard_length,
)
from ring_dilated_attention.plan.step import Sizes
from ring_dilated_attention.ranks.processes import Processes

CAUSAL = DilatedPattern((8192,), (1,), is_causal=True)


def choose(pattern, p, n, *, sharding="contiguous", heads=(8, 8), documents=None, head_dim=64):
    shards = make_shards(sharding, ShardSpec(sharding, p).default_lengths(n))
    return choose_exchange(Job(pattern, shards, *heads, documents), Sizes(1, head_dim, 4))


def test_documents_that_lie_in_shards_send_nothing():
    """Catches a choice that does not look at documents: dealing heads would move what needs no message."""
    borders = tuple(range(0, 8192 + 1, 1024))
    assert choose(CAUSAL, 8, 8192).exchange == "all_to_all"
    assert choose(CAUSAL, 8, 8192, documents=borders) == (
        "ring",
        "nothing is sent: every segment lies in one shard",
    )


def test_zigzag_is_not_contiguous():
    """Catches "nothing is sent" of segments that align with contiguous shards and not with zigzag's."""
    pattern = DilatedPattern((1024,), (1,), is_causal=True)
    assert choose(pattern, 8, 8192).reason.startswith("nothing is sent")
    assert (
        "receives up to 2,097,152 bytes in 1 hop; "
        in choose(pattern, 8, 8192, sharding="zigzag", heads=(8, 8)).reason
    )


@pytest.mark.parametrize(
    ("pattern", "seq_len", "head_dim", "exchange"),
    [
        (DilatedPattern((1024, 8192), (1, 512)), 8192, 64, "all_gather"),
        (DilatedPattern((4096,), (256,)), 8192, 64, "all_gather"),
        (DilatedPattern((8192,), (1,)), 8192, 64, "ring"),
        # seven chunks as large as the shard itself
        (DilatedPattern((64,), (1,)), 64, 8, "ring"),
    ],
)
def test_small_chunks_go_at_once(pattern, seq_len, head_dim, exchange):
    """Catches a threshold on something else than a message, and gathering what does not fit beside the shard."""
    assert SMALL_CHUNK_BYTES > 2 * 7 * 8 * 8 * 4
    choice = choose(pattern, 8, seq_len, heads=(7, 7), head_dim=head_dim)
    assert choice.exchange == exchange
    assert ("one round instead of" in choice.reason) == (exchange == "all_gather")


def test_the_reason_for_one_round():
    two = choose(DilatedPattern((24,), (1,)), 3, 24, heads=(2, 2), head_dim=8).reason
    # which are 1,024
    assert "a rank receives 2,048, no more than two chunks or its own keys and values" in two


@pytest.mark.parametrize("seed", range(8))
def test_each_figure_of_a_reason_is_that_of_the_plans(seed):
    """Of random jobs: bytes, hops and calls of the rank that receives most, bytes of dealt heads, and about how much
    chunks hold."""
    rng = random.Random(seed)
    p, n, heads = (
        rng.randint(2, 8),
        rng.randrange(200, 6000),
        rng.choice(((8, 8), (8, 4), (6, 3), (12, 2))),
    )
    lengths, rates = rng.sample(range(8, n), 2), rng.sample(range(1, 40), 2)
    pattern = DilatedPattern(sorted(lengths), sorted(rates), is_causal=rng.random() < 0.5)
    sharding, sizes = rng.choice(("contiguous", "zigzag")), Sizes(1, 64, 4)
    shards = make_shards(sharding, ShardSpec(sharding, p).default_lengths(n))
    job = Job(pattern, shards, *heads)
    reason, plans = choose_exchange(job, sizes).reason, [make_plan(job, rank) for rank in range(p)]
    received = [sum(m.size for hop in plan.hops for m in hop.receives) * 64 * 4 for plan in plans]
    dealt = max(
        dealt_bytes(tuple(map(shard_length, shards)), k, heads, sizes, backward=False)
        for k in range(p)
    )
    found = dict(
        receives=re.findall(r"in the ring a rank receives up to ([\d,]+) bytes", reason),
        hops=re.findall(r"bytes in (\d+) hop", reason),
        chunks=re.findall(r"two chunks have about ([\d,]+)", reason),
        small=re.findall(r"chunks of ([\d,]+) bytes are small", reason),
        calls=re.findall(r"and makes (\d+) kernel calls meanwhile", reason),
        dealt=re.findall(r"(?:would send|sends up to) ([\d,]+) bytes", reason),
        dealt_calls=re.findall(r"in (\d+) calls|inputs and makes (\d+) kernel calls", reason),
    )
    most = plans[received.index(max(received))]
    expected = dict(receives=max(received), hops=max(len(plan.hops) for plan in plans))
    expected |= dict(
        chunks=2 * max(plan.chunk_size for plan in plans) * 64 * 4,
        calls=most.num_tiles,
        dealt=dealt,
    )
    expected |= dict(
        small=max(m.size for plan in plans for hop in plan.hops for m in hop.receives) * 64 * 4
    )
    expected |= dict(
        dealt_calls=plan_exchange("all_to_all", job, 0).plan.num_tiles
        if heads[1] % p == 0
        else None
    )
    for name, texts in found.items():
        for text in texts:
            figure = int("".join(text).replace(",", ""))
            assert figure == pytest.approx(expected[name], rel=0.2 if name == "chunks" else 0), (
                name,
                reason,
            )
    assert found["receives"]


def unconnected(world_size, exchange):
    """One of several processes, as far as a choice looks at it."""
    ranks = Processes.__new__(Processes)
    ranks.world_size, ranks.exchange, ranks.cut = (
        world_size,
        exchange,
        ShardSpec("contiguous", world_size),
    )
    return ranks


def test_explain_takes_what_only_the_other_ranks_know():
    """Catches an explanation of equal shards where they are not, and one of a call that would be refused."""
    parallel = ContextParallel()
    parallel.ranks = unconnected(3, "auto")
    local = [torch.randn(1, 2, 3, 8) for _ in range(3)]
    dense = DilatedPattern((68,), (1,))
    equal = explain(*local, dense, parallel=parallel)
    uneven = explain(*local, dense, parallel=parallel, lengths=(64, 2, 2))
    assert equal.reasons["exchange"] != uneven.reasons["exchange"]
    borders = torch.tensor([0, 64, 66, 68], dtype=torch.int32)
    apart = explain(*local, dense, parallel=parallel, lengths=(64, 2, 2), cu_seqlens=borders)
    assert apart.reasons["exchange"].startswith("nothing is sent")
    parallel.ranks = unconnected(2, "all_to_all")
    with pytest.raises(ValueError, match="3 key/value heads do not divide among 2 ranks"):
        explain(*local, dense, parallel=parallel)


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_dealt_heads_are_one_tile_whatever_the_sharding(num_ranks):
    """Catches rows that keep the order of zigzag's shards once heads are dealt: 8, 28 and 120 tiles instead of one."""
    for sharding in ("contiguous", "zigzag"):
        shards = make_shards(sharding, ShardSpec(sharding, num_ranks).default_lengths(8192))
        assert plan_exchange("all_to_all", Job(CAUSAL, shards, 8, 8), 1).plan.num_tiles == 1


def test_kernel_calls_count_too():
    """Catches a choice by bytes alone: dealt heads have every document's tile on every rank."""
    causal, sizes = DilatedPattern((16384,), (1,), is_causal=True), (16, 16384)
    few, many = ((0, *range(12288, 16385, step)) for step in (4096, 16))
    assert choose(causal, *sizes, heads=(16, 16), documents=few).exchange == "all_to_all"
    choice = choose(causal, *sizes, heads=(16, 16), documents=many)
    assert choice.exchange == "ring"
    assert "but in 257 calls" in choice.reason


def test_the_rank_that_receives_most_decides():
    """Each third of 40 ranks is the first of a segment of three: none of those receives, and chunks would be small."""
    pattern = DilatedPattern((48, 48), (1, 2), is_causal=True, heads="split")
    shards = make_shards("contiguous", (16,) * 40)
    assert choose_exchange(Job(pattern, shards, 4, 2), Sizes(300, 64, 4)).exchange == "ring"
