"""Forecasts of a call against the plans and the clock of all ranks, in random calls."""

import random
from functools import cache

import pytest

from ring_dilated_attention.forecast import call_cost
from ring_dilated_attention.forecast.call_cost import Exchange, count, forecast, picked_ranks
from ring_dilated_attention.forecast.clock import Hardware, model_step
from ring_dilated_attention.pattern import DilatedPattern
from ring_dilated_attention.plan.exchange import plan_exchange
from ring_dilated_attention.plan.sharded_call import ShardedCall
from ring_dilated_attention.plan.sharding import ShardSpec, make_shards
from ring_dilated_attention.plan.step import Sizes
from ring_dilated_attention.simulate.weighing import weigh_attention


def random_call(rng, num_ranks):
    n = num_ranks * rng.choice([16, 40, 64]) + rng.randint(0, 9)
    lengths = rng.choices([32, 64, 100, 512, n, 3 * n // 5], k=rng.randint(1, 3))
    rates = rng.choices([1, 2, 3, 8], k=len(lengths))
    pattern = DilatedPattern(lengths, rates, is_causal=rng.random() < 0.6)
    sharding = rng.choice(["contiguous", "zigzag"])
    shards = make_shards(sharding, ShardSpec(sharding, num_ranks).default_lengths(n))
    return ShardedCall(pattern, shards, 8, 4)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "exchange", [Exchange(), Exchange("all_gather"), Exchange("all_to_all"), Exchange("ring", 2)]
)
def test_figures_are_those_of_the_plans(seed, exchange, monkeypatch):
    """To weigh a plan takes most of the time: one that the forecast has weighed is not weighed again."""
    weigh = cache(weigh_attention)
    monkeypatch.setattr(call_cost, "weigh_attention", weigh)
    rng = random.Random(seed)
    sharded_call = random_call(rng, 4)
    sizes = Sizes(rng.choice([1, 2]), 16, rng.choice([2, 4]))
    plans = [plan_exchange(exchange.name, sharded_call, rank, exchange.inner) for rank in range(4)]
    hardware = Hardware(1e10, 1e8, 1e-5)
    figures = forecast(sharded_call, exchange, sizes, kernel="cpu", hardware=hardware)
    pairs = [plan.plan.pairs for plan in plans]
    assert figures.flops == 14 * sizes.unit * sum(pairs)
    assert figures.balance == pytest.approx(sum(pairs) / 4 / max(pairs))
    for rank, plan in zip(figures.ranks, plans, strict=True):
        forward = plan.bytes_sent(sizes, backward=False)
        sent = forward + plan.bytes_sent(sizes, backward=True)
        assert (rank.num_rows, rank.forward_sent, rank.sent) == (plan.num_rows, forward, sent)
        assert rank.weight == weigh(plan, sizes, "cpu")
    sent = sum(plan.plan.sent()[0] for plan in plans) * sizes.unit * sizes.itemsize
    assert sum(figures.sent_by_branch) == sent
    assert figures.most_sent == max(rank.sent for rank in figures.ranks)
    assert figures.seconds == model_step(plans, sizes, hardware).step_seconds
    assert 0 <= figures.exposed < 1


def test_the_picked_ranks_hold_as_much_as_any():
    """Of 14, rank 3 alone holds most, and its place is none of those that are always picked."""
    sharded_call, sizes = random_call(random.Random(2), 14), Sizes(1, 16, 4)
    picked = picked_ranks(count(sharded_call, Exchange()))
    assert len(picked) < 14
    weights = [
        weigh_attention(plan_exchange("ring", sharded_call, rank), sizes, "cpu").peak
        for rank in range(sharded_call.num_ranks)
    ]
    assert max(weights[rank] for rank in picked) >= 0.98 * max(weights)
