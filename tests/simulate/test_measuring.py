"""What `simulate.measuring` says that simulated ranks hold and send, against their plans."""

import pytest
import torch

from ring_dilated_attention import ContextParallel, DilatedPattern, dilated_attention, simulate
from ring_dilated_attention.kernels.traits import TRAITS
from ring_dilated_attention.plan.exchange import plan_exchange
from ring_dilated_attention.plan.job import Job
from ring_dilated_attention.plan.sharding import ShardSpec, make_shards
from ring_dilated_attention.plan.step import Sizes
from ring_dilated_attention.simulate.one_rank import OtherRanks
from ring_dilated_attention.simulate.weighing import weigh_attention


@pytest.fixture
def only_visible(monkeypatch):
    """The weight is what a dispatch mode sees: not what one op makes and frees."""
    traits = TRAITS["cpu"]._replace(scratch=lambda *tile: 0)
    monkeypatch.setitem(TRAITS, "cpu", traits)


@pytest.mark.parametrize(
    ("pattern", "sharding", "dtype"),
    [
        (DilatedPattern((2048,), (1,), is_causal=True), "zigzag", torch.float32),
        (DilatedPattern((256, 2048), (1, 8)), "contiguous", torch.float32),
        (DilatedPattern((256, 2048), (1, 8)), "contiguous", torch.bfloat16),
    ],
)
def test_what_a_simulated_rank_is_said_to_hold(pattern, sharding, dtype, only_visible):
    """To the byte, on every rank. Catches a simulation that makes other calls than a real rank, or shares memory that
    real ranks would hold each."""
    n, world_size = 2048, 4
    cp = simulate.all_ranks(world_size, sharding=sharding)
    inputs = [torch.randn(2, n, h, 64, dtype=dtype, requires_grad=True) for h in (4, 2, 2)]
    with simulate.measuring(cp) as both:
        out = dilated_attention(*inputs, pattern, parallel=cp)
        torch.autograd.grad(out, inputs, torch.ones_like(out))
    for rank in range(world_size):
        shards = make_shards(sharding, ShardSpec(sharding, world_size).default_lengths(n))
        rank_plan = plan_exchange("ring", Job(pattern, shards, 4, 2), rank)
        weight = weigh_attention(rank_plan, Sizes(2, 64, dtype.itemsize), "cpu")
        sent = [
            rank_plan.bytes_sent(Sizes(2, 64, dtype.itemsize), backward=backward)
            for backward in (False, True)
        ]
        assert both[rank].peak_bytes == weight.peak
        assert both[rank].sent_bytes == sum(sent) > 0


def test_measuring_adds_up_over_calls():
    """Bytes sent are a sum, the peak is a maximum; and what is done outside of the block is not counted."""
    cp = simulate.all_ranks(2)
    x, pattern = torch.ones(1, 8, 2, 4), DilatedPattern((8,), (1,))
    dilated_attention(x, x, x, pattern, parallel=cp)
    with simulate.measuring(cp) as once:
        dilated_attention(x, x, x, pattern, parallel=cp)
    with simulate.measuring(cp) as twice:
        dilated_attention(x, x, x, pattern, parallel=cp)
        dilated_attention(x, x, x, pattern, parallel=cp)
    dilated_attention(x, x, x, pattern, parallel=cp)
    for rank, (a, b) in enumerate(zip(once, twice, strict=True)):
        assert b == (rank, 2, 2 * a.sent_bytes, a.peak_bytes)
        assert a.sent_bytes == 2 * 4 * 2 * 4 * 4  # K and V, 4 positions, 2 heads of 4, float32
        assert str(a) == f"rank {rank} of 2: held {a.peak_bytes:,} bytes at most, sent 256"


def test_the_example_of_measuring_is_code():
    """Catches an escape that Python reads when it reads the docstring."""
    assert 'print(*ranks, sep="\\n")' in simulate.measuring.__doc__


def test_measuring_is_for_simulated_ranks():
    with (
        pytest.raises(ValueError, match=r"that simulate\.all_ranks"),
        simulate.measuring(ContextParallel()),
    ):
        pass
    alone = simulate.one_rank(1, 4, OtherRanks())
    with pytest.raises(ValueError, match=r"that simulate\.all_ranks"), simulate.measuring(alone):
        pass
