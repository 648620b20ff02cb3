"""Which exchange "auto" takes, and why: from the plans of the ranks, so without processes."""

import pytest
import torch

from ring_dilated_attention import ContextParallel, DilatedPattern, explain
from ring_dilated_attention.plan.exchange import (
    SMALL_CHUNK_BYTES,
    choose_exchange,
    plan_exchange,
)
from ring_dilated_attention.plan.sharded_call import ShardedCall
from ring_dilated_attention.plan.sharding import WITHOUT_DOCUMENTS, ShardSpec, make_shards
from ring_dilated_attention.plan.step import Sizes
from ring_dilated_attention.ranks.processes import Processes

DENSE = DilatedPattern.dense()
CAUSAL = DilatedPattern.dense(is_causal=True)
ALIGNED = DilatedPattern((1024,), (1,), is_causal=True)
# each third of 40 ranks is the first of a segment of three
THIRDS = DilatedPattern((48, 48), (1, 2), is_causal=True, heads="split")
# 1,024 rows of 8 heads of 64 numbers of 4 bytes: 2,097,152 bytes. Keys and values of seven other ranks: 14 times that.
DEALT = "a rank sends up to 7,368,704 bytes, at most 1/3 of the ring's, and waits for them, holds them beside"
DEALT += " the inputs and makes 1 kernel calls; in the ring a rank receives up to 29,360,128 bytes in 7 hops; "
DEALT += "two chunks have about 8,388,608, and makes 15 kernel calls meanwhile"
SENT = "in the ring a rank receives up to 2,097,152 bytes in 1 hop; two chunks have about 8,388,608; dealing"
SENT += " heads would send 7,368,704 bytes while ranks wait"
SMALL = "chunks of 14,336 bytes are small, and a rank receives 43,008, no more than two chunks or its own "
SMALL += "keys and values: one round instead of 3 hops; in the ring a rank receives up to 43,008 bytes in 3 "
SMALL += "hops; two chunks have about 28,672"
NO_DEAL = "in the ring a rank receives up to 25,690,112 bytes in 7 hops; two chunks have about 7,340,032; 7 "
NO_DEAL += "key/value heads cannot be dealt to 8 ranks"
CALLS = "and makes 34 kernel calls meanwhile; dealing heads would send 15,790,080 bytes, but in 257 calls"
NOTHING = "nothing is sent: every segment lies in one shard"
SEVEN = {"heads": (7, 7)}  # which cannot be dealt to 8 ranks
SIXTEEN = {"heads": (16, 16)}


def job_of(pattern, p, n, sharding="contiguous", heads=(8, 8), documents=None):
    shards = make_shards(sharding, ShardSpec(sharding, p).default_lengths(n))
    return ShardedCall(pattern, shards, *heads, documents)


def documents_from(start, step):
    return {"documents": (0, *range(start, 16385, step))}


@pytest.mark.parametrize(
    ("pattern", "p", "n", "options", "sizes", "exchange", "words"),
    [
        (CAUSAL, 8, 8192, {}, (1, 64), "all_to_all", DEALT),
        # segments that align with shards, and not with zigzag's
        (ALIGNED, 8, 8192, {}, (1, 64), "ring", NOTHING),
        (ALIGNED, 8, 8192, {"sharding": "zigzag"}, (1, 64), "ring", SENT),
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
            SMALL,
        ),
        (DENSE, 3, 24, {"heads": (2, 2)}, (1, 8), "all_gather", "receives 2,048, no more than two"),
        (DENSE, 8, 8192, SEVEN, (1, 64), "ring", NO_DEAL),
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
        (CAUSAL, 16, 16384, SIXTEEN | documents_from(12288, 16), (1, 64), "ring", CALLS),
    ],
)
def test_what_is_chosen_and_why(pattern, p, n, options, sizes, exchange, words):
    """Catches a choice that does not look at documents or zigzag, a threshold on something else than a message,
    gathering what does not fit beside the shard, and a choice by bytes alone."""
    assert SMALL_CHUNK_BYTES > 2 * 7 * 8 * 8 * 4
    choice = choose_exchange(job_of(pattern, p, n, **options), Sizes(*sizes, 4))
    assert choice.exchange == exchange, choice.reason
    assert words in choice.reason


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
    with pytest.raises(
        ValueError, match=r"divide among 2 ranks: 3 mod 2 = 1\. exchange='ring' takes any"
    ):
        explain(*local, DENSE, parallel=parallel)


@pytest.mark.parametrize("num_ranks", [2, 8])
@pytest.mark.parametrize("sharding", WITHOUT_DOCUMENTS)
def test_dealt_heads_are_one_tile_whatever_the_sharding(num_ranks, sharding):
    """Catches rows that keep the order of zigzag's shards once heads are dealt: 8 and 120 tiles instead of one."""
    sharded_call = job_of(CAUSAL, num_ranks, 8192, sharding)
    assert plan_exchange("all_to_all", sharded_call, 1).plan.num_tiles == 1
