"""Sliding windows: what each rank computes, receives and holds, in numbers that can be worked out by hand."""

import pytest

from benchmarks.flops import computed_pairs
from ring_dilated_attention.forecast.call_cost import pairs
from ring_dilated_attention.pattern import DilatedPattern
from ring_dilated_attention.plan.exchange import plan_exchange
from ring_dilated_attention.plan.planner import make_plan
from ring_dilated_attention.plan.sharded_call import ShardedCall
from ring_dilated_attention.plan.sharding import ShardSpec, make_shards
from ring_dilated_attention.plan.step import Sizes
from ring_dilated_attention.simulate.weighing import weigh_attention


def plans_of(pattern, seq_len, num_ranks, sharding="contiguous", heads=(4, 2)):
    shards = make_shards(sharding, ShardSpec(sharding, num_ranks).default_lengths(seq_len))
    return [make_plan(ShardedCall(pattern, shards, *heads), rank) for rank in range(num_ranks)]


@pytest.mark.parametrize(
    ("window", "seq_len", "sharding", "is_causal", "num_reached"),
    [
        (64, 1600, "contiguous", True, [0, 63, 63, 63]),
        (64, 1600, "contiguous", False, [32, 64, 64, 32]),
        # rank 3's two spans are neighbours
        (64, 1600, "zigzag", True, [63, 126, 126, 63]),
        (64, 1600, "zigzag", False, [64, 128, 128, 64]),
        # wider than shards: the 24 positions before are those of three ranks, the last of them in part
        (25, 60, "contiguous", True, [0, 10, 20, 24, 24, 24]),
    ],
)
def test_a_rank_receives_what_its_window_reaches(window, seq_len, sharding, is_causal, num_reached):
    """Keys and values of 2 heads: before each span, and if the window is centred after it, but not at the ends."""
    pattern, num_ranks = DilatedPattern.sliding(window, is_causal=is_causal), len(num_reached)
    plans = plans_of(pattern, seq_len, num_ranks, sharding)
    received = [sum(m.size for hop in plan.hops for m in hop.receives) for plan in plans]
    assert received == [2 * 2 * number for number in num_reached]
    assert num_ranks > 4 or all(len(plan.hops) <= 2 for plan in plans)


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("window", [64, 512, 1024, 4096])
def test_the_kernel_computes_little_more_than_the_window(window, is_causal):
    """At most 1 + 512 / w times the window's pairs: torch's CPU kernel takes 512 keys at a time in causal squares."""
    pattern = DilatedPattern.sliding(window, is_causal=is_causal)
    [plan] = plans_of(pattern, 40_000, 1, heads=(1, 1))
    assert plan.pairs == pairs(pattern, 40_000, 1)
    assert computed_pairs(plan) <= (1 + 512 / window) * plan.pairs


@pytest.mark.parametrize("is_causal", [True, False])
def test_memory_of_a_rank_is_one_in_p(is_causal):
    """A rank's memory falls with its rows, but for the rows that it receives, and those that it copies at a time."""
    pattern = DilatedPattern.sliding(256, is_causal=is_causal)
    sizes, seq_len = Sizes(1, 64, 4), 2**18
    peaks = {}
    for num_ranks in (1, 2, 4, 8):
        shards = make_shards(
            "contiguous", ShardSpec("contiguous", num_ranks).default_lengths(seq_len)
        )
        sharded_call = ShardedCall(pattern, shards, 4, 4)
        weights = [
            weigh_attention(plan_exchange("ring", sharded_call, rank), sizes, "cpu")
            for rank in range(num_ranks)
        ]
        peaks[num_ranks] = max(weight.peak for weight in weights)
    row = 64 * 4  # bytes
    received = 2 * 2 * 4 * 256 * row  # keys and values before and after a span, of 4 heads
    copied = 2**16 * row  # of query, key, value, dout and out, and three gradients in both orders
    for num_ranks, peak in peaks.items():
        assert peak <= peaks[1] / num_ranks + 6 * received + 11 * copied
