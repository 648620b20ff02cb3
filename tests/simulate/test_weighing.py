"""The weight of a rank against what simulated ranks and torch's allocator hold, and against longer programs."""

import random

import pytest
import torch

from benchmarks.measure import allocated
from ring_dilated_attention import DilatedPattern, dilated_attention, simulate
from ring_dilated_attention.kernels.traits import TRAITS
from ring_dilated_attention.plan.exchange import plan_exchange
from ring_dilated_attention.plan.sharded_call import ShardedCall
from ring_dilated_attention.plan.sharding import WITHOUT_DOCUMENTS, ShardSpec, make_shards
from ring_dilated_attention.plan.step import Sizes
from ring_dilated_attention.simulate import weighing
from ring_dilated_attention.simulate.weighing import weigh_attention


@pytest.fixture
def only_visible(monkeypatch):
    """The weight is what a dispatch mode sees: not what one op makes and frees."""
    traits = TRAITS["cpu"]._replace(scratch=lambda *tile: 0)
    monkeypatch.setitem(TRAITS, "cpu", traits)


def drawn(rng, num_ranks=(1, 2, 3, 4), most_len=3000):
    p = rng.choice(num_ranks)
    kv_heads = rng.choice([1, 2, 4])
    n = rng.randint(p * 16, most_len)
    num_branches = rng.randint(1, 3)
    lengths = [rng.choice([64, 100, 512, 1024, n, 3 * n // 5]) for _ in range(num_branches)]
    rates = [rng.choice([1, 2, 3, 8]) for _ in lengths]
    pattern = DilatedPattern(lengths, rates, is_causal=rng.random() < 0.6)
    sharding = rng.choice(WITHOUT_DOCUMENTS)
    shards = make_shards(sharding, ShardSpec(sharding, p).default_lengths(n))
    return ShardedCall(pattern, shards, 4, kv_heads), sharding


@pytest.mark.parametrize("seed", range(4))
def test_a_rank_weighs_what_a_simulated_rank_holds(seed, only_visible):
    """And sends: to the byte, on every rank. Catches calls that are left out and hold more than those that are kept,
    and results of other shapes or strides than the kernel's."""
    rng = random.Random(seed)
    sharded_call, sharding = drawn(rng)
    dtype = rng.choice([torch.float32, torch.float64, torch.bfloat16])
    batch = rng.choice([1, 2])
    parallel = simulate.all_ranks(sharded_call.num_ranks, sharding=sharding)
    heads = sharded_call.num_heads, sharded_call.num_kv_heads, sharded_call.num_kv_heads
    inputs = [
        torch.randn(batch, sharded_call.seq_len, h, 16, dtype=dtype, requires_grad=True)
        for h in heads
    ]
    with simulate.measuring(parallel) as measured:
        out = dilated_attention(*inputs, sharded_call.pattern, parallel=parallel)
        torch.autograd.grad(out, inputs, torch.ones_like(out))
    for rank in range(sharded_call.num_ranks):
        rank_plan = plan_exchange("ring", sharded_call, rank)
        sizes = Sizes(batch, 16, dtype.itemsize)
        assert measured[rank].peak_bytes == weigh_attention(rank_plan, sizes, "cpu").peak
        sent = [rank_plan.bytes_sent(sizes, backward=backward) for backward in (False, True)]
        assert measured[rank].sent_bytes == sum(sent)


def whole_program(*facts):
    return filter(takes_or_frees, weighing.make_program(*facts))


def takes_or_frees(step):
    return not isinstance(step, weighing.Post | weighing.Wait | weighing.Zero | weighing.Unpack)


@pytest.mark.parametrize("exchange", ["ring", "all_gather", "all_to_all"])
@pytest.mark.parametrize("kernel", ["cpu", "sdpa"])
def test_few_calls_and_hops_weigh_as_much_as_all(exchange, kernel, monkeypatch):
    """Catches kinds of calls, or of hops, that are told apart too coarsely."""
    rng = random.Random(f"{exchange} {kernel}")
    for _ in range(3):
        sharded_call, _ = drawn(rng, num_ranks=(4, 9, 12), most_len=2000)
        sharded_call = (
            sharded_call._replace(num_heads=36, num_kv_heads=36)
            if exchange == "all_to_all"
            else sharded_call
        )
        rank = rng.randrange(sharded_call.num_ranks)
        rank_plan = plan_exchange(exchange, sharded_call, rank)
        sizes = Sizes(rng.choice([1, 3]), 16, rng.choice([2, 4]), num_threads=2)
        monkeypatch.setattr(weighing, "MOST_HOPS", 2)
        few = weigh_attention(rank_plan, sizes, kernel)
        with monkeypatch.context() as patch:
            patch.setattr(weighing, "MOST_HOPS", 10**6)
            patch.setattr(weighing, "brief_program", whole_program)
            assert few == weigh_attention(rank_plan, sizes, kernel), (sharded_call, rank)


def test_a_long_ring_is_weighed_in_moments():
    """Two thousand hops. Catches a program that is carried out hop by hop on tensors without data."""
    sharded_call = ShardedCall(
        DilatedPattern((2**20,), (1,), is_causal=True),
        make_shards("contiguous", (512,) * 2048),
        8,
        8,
    )
    rank_plan = plan_exchange("ring", sharded_call, 2047)
    assert len(weighing._with_few_hops(rank_plan.plan).hops) < 8
    chunk = 512 * 8 * 64 * 2
    weight = weigh_attention(rank_plan, Sizes(1, 64, 2), "sdpa")
    assert weight.given_forward == 3 * chunk
    assert weight.forward >= weight.given_forward + 4 * chunk  # two buffers of keys and values


@pytest.mark.parametrize(
    ("n", "batch", "dtype"), [(4096, 1, torch.float32), (3000, 2, torch.bfloat16)]
)
def test_the_weight_is_what_the_allocator_sees(n, batch, dtype):
    """A call of one rank, with the kernel's scratch, within 5 %."""
    pattern = DilatedPattern((512, n), (1, 4), is_causal=True)
    inputs = [torch.randn(batch, n, 4, 64, dtype=dtype, requires_grad=True) for _ in range(3)]

    def step():
        out = dilated_attention(*inputs, pattern)
        torch.autograd.grad(out, inputs, torch.ones_like(out))

    step()  # what a first call keeps
    largest = allocated(step).peak_bytes
    sizes = Sizes(batch, 64, dtype.itemsize, torch.get_num_threads())
    rank_plan = plan_exchange(
        "none", ShardedCall(pattern, make_shards("contiguous", (n,)), 4, 4), 0
    )
    weight = weigh_attention(rank_plan, sizes, "cpu")
    assert weight.peak - weight.given_forward == pytest.approx(largest, rel=0.05)


def test_half_a_million_positions_fit(monkeypatch):
    """LongNet's pattern at 524,288 positions, 12 heads of 64, float16, forward and backward. Catches results of all
    heads that are kept at once."""
    pattern = DilatedPattern((2048, 4096, 8192, 16384, 32768), (1, 2, 4, 6, 12))
    sharded_call = ShardedCall(pattern, make_shards("contiguous", (524_288,)), 12, 12)
    rank_plan = plan_exchange("none", sharded_call, 0)
    assert weigh_attention(rank_plan, Sizes(1, 64, 2), "sdpa").peak < 8e9
    at_once = TRAITS["sdpa"]._replace(kept_bytes=2**40)
    monkeypatch.setitem(TRAITS, "sdpa", at_once)
    assert weigh_attention(rank_plan, Sizes(1, 64, 2), "sdpa").peak > 12e9
