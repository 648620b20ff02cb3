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
from ring_dilated_attention.plan.sharding import ShardSpec, make_shards, shard_length
from ring_dilated_attention.plan.step import Sizes
from ring_dilated_attention.ranks.processes import Processes

DENSE = DilatedPattern.dense()
CAUSAL = DilatedPattern.dense(is_causal=True)
ALIGNED = DilatedPattern((1024,), (1,), is_causal=True)
# each third of 40 ranks is the first of a segment of three
THIRDS = DilatedPattern((48, 48), (1, 2), is_causal=True, heads="split")
NOTHING = "nothing is sent: every segment lies in one shard"
SEVEN = {"heads": (7, 7)}  # which cannot be dealt to 8 ranks
SIXTEEN = {"heads": (16, 16)}


def job_of(pattern, p, n, sharding="contiguous", heads=(8, 8), documents=None):
    shards = make_shards(sharding, ShardSpec(sharding, p).default_lengths(n))
    return Job(pattern, shards, *heads, documents)


def documents_from(start, step):
    return {"documents": (0, *range(start, 16385, step))}


@pytest.mark.parametrize(
    ("pattern", "p", "n", "options", "sizes", "exchange", "words"),
    [
        (CAUSAL, 8, 8192, {}, (1, 64), "all_to_all", "makes 1 kernel calls; in the ring"),
        # segments that align with shards, and not with zigzag's
        (ALIGNED, 8, 8192, {}, (1, 64), "ring", NOTHING),
        (ALIGNED, 8, 8192, {"sharding": "zigzag"}, (1, 64), "ring", "to 2,097,152 bytes in 1 hop;"),
        # small chunks go at once
        (
            DilatedPattern((1024, 8192), (1, 512)),
            8,
            8192,
            SEVEN,
            (1, 64),
            "all_gather",
            "one round",
        ),
        (
            DilatedPattern((4096,), (256,)),
            8,
            8192,
            SEVEN,
            (1, 64),
            "all_gather",
            "one round instead",
        ),
        (DENSE, 3, 24, {"heads": (2, 2)}, (1, 8), "all_gather", "receives 2,048, no more than two"),
        (DENSE, 8, 8192, SEVEN, (1, 64), "ring", "7 key/value heads cannot be dealt to 8 ranks"),
        (
            DENSE,
            8,
            64,
            SEVEN,
            (1, 8),
            "ring",
            "cannot",
        ),  # seven chunks as large as the shard itself
        # the rank that receives most decides: others receive nothing, and chunks would be small
        (THIRDS, 40, 640, {"heads": (4, 2)}, (300, 64), "ring", "in the ring"),
        # documents that lie in shards, and dealt heads that have every document's tile on every rank
        (CAUSAL, 16, 16384, SIXTEEN | documents_from(1024, 1024), (1, 64), "ring", NOTHING),
        (CAUSAL, 16, 16384, SIXTEEN | documents_from(12288, 4096), (1, 64), "all_to_all", "holds"),
        (CAUSAL, 16, 16384, SIXTEEN | documents_from(12288, 16), (1, 64), "ring", "in 257 calls"),
    ],
)
def test_what_is_chosen_and_why(pattern, p, n, options, sizes, exchange, words):
    """Catches a choice that does not look at documents or zigzag, a threshold on something else than a message,
    gathering what does not fit beside the shard, and a choice by bytes alone."""
    assert SMALL_CHUNK_BYTES > 2 * 7 * 8 * 8 * 4
    choice = choose_exchange(job_of(pattern, p, n, **options), Sizes(*sizes, 4))
    assert choice.exchange == exchange, choice.reason
    assert words in choice.reason


@pytest.mark.parametrize("seed", range(8))
def test_each_figure_of_a_reason_is_that_of_the_plans(seed):
    """Of random jobs: bytes, hops and calls of the rank that receives most, bytes of dealt heads, and about how much
    chunks hold."""
    rng = random.Random(seed)
    p, n = rng.randint(2, 8), rng.randrange(200, 6000)
    heads = rng.choice(((8, 8), (8, 4), (6, 3), (12, 2)))
    lengths, rates = rng.sample(range(8, n), 2), rng.sample(range(1, 40), 2)
    pattern = DilatedPattern(sorted(lengths), sorted(rates), is_causal=rng.random() < 0.5)
    job = job_of(pattern, p, n, rng.choice(("contiguous", "zigzag")), heads)
    sizes = Sizes(1, 64, 4)
    reason, plans = choose_exchange(job, sizes).reason, [make_plan(job, rank) for rank in range(p)]
    received = [[m.size for hop in plan.hops for m in hop.receives] for plan in plans]
    totals = [sum(messages) for messages in received]
    rows = tuple(map(shard_length, job.shards))
    can_deal = heads[1] % p == 0
    figures = {
        r"in the ring a rank receives up to ([\d,]+) bytes": max(totals) * 64 * 4,
        r"bytes in (\d+) hop": max(len(plan.hops) for plan in plans),
        r"two chunks have about ([\d,]+)": 2 * max(plan.chunk_size for plan in plans) * 64 * 4,
        r"chunks of ([\d,]+) bytes are small": max(map(max, filter(None, received))) * 64 * 4,
        r"and makes (\d+) kernel calls meanwhile": plans[totals.index(max(totals))].num_tiles,
        r"(?:would send|sends up to) ([\d,]+) bytes": max(
            dealt_bytes(rows, k, heads, sizes, backward=False) for k in range(p)
        ),
        r"(?:in|inputs and makes) (\d+) (?:kernel )?calls(?! meanwhile)": (
            plan_exchange("all_to_all", job, 0).plan.num_tiles if can_deal else None
        ),
    }
    assert "in the ring a rank receives up to" in reason
    for words, expected in figures.items():
        for figure in re.findall(words, reason):
            rel = 0.2 if words.startswith("two chunks") else 0
            assert int(figure.replace(",", "")) == pytest.approx(expected, rel=rel), (words, reason)


def unconnected(world_size, exchange):
    """One of several processes, as far as a choice looks at it."""
    ranks = Processes.__new__(Processes)
    ranks.world_size, ranks.exchange = world_size, exchange
    ranks.cut = ShardSpec("contiguous", world_size)
    return ranks


def test_explain_takes_what_only_the_other_ranks_know():
    """Catches an explanation of equal shards where they are not, and one of a call that would be refused."""
    parallel = ContextParallel()
    parallel.ranks = unconnected(3, "auto")
    local = [torch.randn(1, 2, 3, 8) for _ in range(3)]
    equal = explain(*local, DENSE, parallel=parallel)
    uneven = explain(*local, DENSE, parallel=parallel, lengths=(64, 2, 2))
    assert equal.reasons["exchange"] != uneven.reasons["exchange"]
    borders = torch.tensor([0, 64, 66, 68], dtype=torch.int32)
    apart = explain(*local, DENSE, parallel=parallel, lengths=(64, 2, 2), cu_seqlens=borders)
    assert apart.reasons["exchange"].startswith("nothing is sent")
    parallel.ranks = unconnected(2, "all_to_all")
    with pytest.raises(ValueError, match="3 key/value heads do not divide among 2 ranks"):
        explain(*local, DENSE, parallel=parallel)


@pytest.mark.parametrize("num_ranks", [2, 8])
@pytest.mark.parametrize("sharding", ["contiguous", "zigzag"])
def test_dealt_heads_are_one_tile_whatever_the_sharding(num_ranks, sharding):
    """Catches rows that keep the order of zigzag's shards once heads are dealt: 8 and 120 tiles instead of one."""
    job = job_of(CAUSAL, num_ranks, 8192, sharding)
    assert plan_exchange("all_to_all", job, 1).plan.num_tiles == 1
