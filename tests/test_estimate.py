"""The estimate of memory against torch's allocator, and that it is a sum of what the plan lists."""

import subprocess
import sys

import pytest
import torch

from benchmarks.measure import allocated
from ring_dilated_attention import ContextParallel, DilatedPattern, dilated_attention
from ring_dilated_attention.commands.processes import Launch, run_ranks
from ring_dilated_attention.plan.memory import _Sizes, attention_memory
from ring_dilated_attention.plan.planner import make_plan
from ring_dilated_attention.plan.sharding import default_lengths, make_shards, split_lengths
from ring_dilated_attention.ranks.one_rank import OtherRanks
from ring_dilated_attention.run import ring

# n, batch, heads, key/value heads, head dim, dtype, pattern
CASES = [
    (2048, 1, 4, 4, 64, torch.float32, DilatedPattern((256, 512), (1, 2))),
    (2048, 2, 4, 4, 64, torch.float32, DilatedPattern((256, 512), (1, 2), is_causal=True)),
    (2048, 1, 4, 2, 64, torch.float32, DilatedPattern((256, 2048), (1, 4))),
    (2048, 1, 4, 4, 64, torch.bfloat16, DilatedPattern((256, 2048), (1, 4))),
    (2049, 2, 4, 4, 48, torch.float32, DilatedPattern((256, 2048), (2, 4))),
    (2048, 1, 4, 4, 64, torch.float64, DilatedPattern((256, 2048), (1, 4), heads="split")),
    (2048, 1, 4, 1, 64, torch.float32, DilatedPattern((2048,), (1,), is_causal=True)),
]


def peaks(worker, cases):
    """For each case the measured and the estimated peak, of a forward and of a forward with its backward."""
    parallel = ContextParallel(exchange="ring") if worker.world_size > 1 else None
    return [case_peaks(worker, parallel, *case) for case in cases]


def case_peaks(worker, parallel, n, batch, heads, kv_heads, dim, dtype, pattern):
    lengths = split_lengths(n, worker.world_size)
    inputs = [
        torch.randn(batch, lengths[worker.rank], h, dim, dtype=dtype, requires_grad=True)
        for h in (heads, kv_heads, kv_heads)
    ]

    def forward():
        return dilated_attention(*inputs, pattern, parallel=parallel)

    def both():
        out = forward()
        torch.autograd.grad(out, inputs, torch.empty_like(out))

    forward()  # what only the first call makes is not the call's
    given = sum(x.nbytes for x in inputs)
    plan = make_plan(pattern, make_shards("contiguous", lengths), worker.rank, heads, kv_heads)
    estimate = attention_memory(plan, batch, dim, dtype.itemsize)
    return [
        (given + allocated(forward).peak_bytes, estimate.forward.num_bytes),
        (given + allocated(both).peak_bytes, estimate.forward_backward.num_bytes),
    ]


@pytest.mark.parametrize("world_size", [1, 2])
def test_the_estimate_is_what_the_allocator_sees(world_size):
    """Within 5 %, on every rank. Catches a buffer that nobody planned, and one that lives longer than it should."""
    for rank, found in enumerate(run_ranks(Launch(world_size), peaks, CASES)):
        for case, pairs in zip(CASES, found, strict=True):
            for measured, estimated in pairs:
                assert abs(estimated / measured - 1) < 0.05, (rank, case, measured, estimated)


@pytest.fixture
def no_scratch(monkeypatch):
    """An estimate of what a dispatch mode can see: not what a kernel takes and frees inside one op."""
    monkeypatch.setattr(_Sizes, "scratch", lambda *_, **__: 0)
    monkeypatch.setattr(_Sizes, "dout_copy", lambda *_: 0)


def simulated_peaks(world_size, pattern, sharding="contiguous", n=2048):
    """For each rank the measured and the estimated peak and bytes sent: of a forward, and of it with its backward."""
    cp = ContextParallel(exchange="simulated", world_size=world_size, sharding=sharding)
    inputs = [torch.randn(2, n, h, 64, requires_grad=True) for h in (4, 2, 2)]
    with cp.measuring() as forward, torch.no_grad():
        dilated_attention(*inputs, pattern, parallel=cp)
    with cp.measuring() as both:
        out = dilated_attention(*inputs, pattern, parallel=cp)
        torch.autograd.grad(out, inputs, torch.ones_like(out))
    for rank in range(world_size):
        plan = make_plan(pattern, make_shards(sharding, default_lengths(sharding, n, world_size)), rank, 4, 2)
        planned = attention_memory(plan, 2, 64, 4)
        sent = [plan.bytes_sent(2, 64, 4, backward=backward) for backward in (False, True)]
        yield forward[rank], planned.forward.num_bytes, sent[0]
        yield both[rank], planned.forward_backward.num_bytes, sum(sent)


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize(
    ("pattern", "sharding"),
    [
        (DilatedPattern((2048,), (1,)), "contiguous"),
        (DilatedPattern((2048,), (1,), is_causal=True), "zigzag"),
        (DilatedPattern((256, 2048), (1, 8)), "contiguous"),
        (DilatedPattern((256, 2048), (1, 4), is_causal=True), "zigzag"),
    ],
)
def test_the_estimate_is_what_a_simulated_rank_holds(no_scratch, world_size, pattern, sharding):
    """Within 1 %, on every rank. Catches a simulation that makes other calls than a real rank, or shares memory that
    real ranks would hold each."""
    for rank, planned, sent in simulated_peaks(world_size, pattern, sharding):
        assert abs(planned / rank.peak_bytes - 1) < 0.01, (rank, planned)
        assert rank.sent_bytes == sent > 0


def test_a_third_chunk_buffer_would_be_seen(no_scratch, monkeypatch):
    """The comparison can fail: a ring that keeps one buffer more than the plan lists is off by more than 5 %."""
    whole = ring.RingCall.chunk_buffers

    def with_another(call, key, value):
        own, other = whole(call, key, value)
        call.forgotten = torch.empty_like(other)
        return own, other

    monkeypatch.setattr(ring.RingCall, "chunk_buffers", with_another)
    for rank, planned, _ in simulated_peaks(4, DilatedPattern((2048,), (1,))):
        assert rank.peak_bytes > 1.05 * planned


def test_measuring_adds_up_over_calls():
    """Bytes sent are a sum, the peak is a maximum; and what is done outside of the block is not counted."""
    cp = ContextParallel(exchange="simulated", world_size=2)
    x, pattern = torch.ones(1, 8, 2, 4), DilatedPattern((8,), (1,))
    dilated_attention(x, x, x, pattern, parallel=cp)
    with cp.measuring() as once:
        dilated_attention(x, x, x, pattern, parallel=cp)
    with cp.measuring() as twice:
        dilated_attention(x, x, x, pattern, parallel=cp)
        dilated_attention(x, x, x, pattern, parallel=cp)
    dilated_attention(x, x, x, pattern, parallel=cp)
    for rank, (a, b) in enumerate(zip(once, twice, strict=True)):
        assert b == (rank, 2, 2 * a.sent_bytes, a.peak_bytes)
        assert a.sent_bytes == 2 * 4 * 2 * 4 * 4  # K and V, 4 positions, 2 heads of 4, float32
        assert str(a) == f"rank {rank} of 2: held {a.peak_bytes:,} bytes at most, sent 256"


def test_measuring_is_for_simulated_ranks():
    with pytest.raises(ValueError, match="was made with exchange='auto'"), ContextParallel().measuring():
        pass
    alone = ContextParallel(exchange="simulated", world_size=4, rank=1, others=OtherRanks())
    with pytest.raises(ValueError, match="was made with exchange='simulated' and rank"), alone.measuring():
        pass


def estimate(n=8192, ranks=1, itemsize=4, pattern=None, **kwargs):
    pattern = pattern or DilatedPattern((1024, 8192), (1, 8))
    plan = make_plan(pattern, make_shards("contiguous", split_lengths(n, ranks)), 0, 4, 4)
    return attention_memory(plan, 1, 64, itemsize, **kwargs)


def zigzag_peaks(worker):
    n, heads, dim = 3072, 4, 64
    pattern = DilatedPattern((n,), (1,), is_causal=True)
    parallel = ContextParallel(exchange="ring", sharding="zigzag")
    lengths = parallel.default_lengths(n)
    inputs = [torch.randn(1, lengths[worker.rank], heads, dim, requires_grad=True) for _ in range(3)]

    def both():
        out = dilated_attention(*inputs, pattern, parallel=parallel)
        torch.autograd.grad(out, inputs, torch.empty_like(out))

    both()
    plan = make_plan(pattern, parallel.shards(lengths), worker.rank, heads, heads)
    planned = attention_memory(plan, 1, dim, 4).forward_backward
    late = any(m.owner == worker.rank for hop in plan.hops[1:] for m in hop.sends)
    return sum(x.nbytes for x in inputs) + allocated(both).peak_bytes, planned.num_bytes, late


def test_a_chunk_that_is_sent_late_is_planned():
    """Catches memory that only a zigzag rank in the middle needs: it dilates its later part once more."""
    found = run_ranks(Launch(3), zigzag_peaks)
    assert [late for *_, late in found] == [False, True, False]
    for measured, planned, _ in found:
        assert abs(planned / measured - 1) < 0.05


def test_memory_grows_with_the_local_length_only():
    pattern = DilatedPattern((1024, 8192), (1, 8))
    one, doubled = (estimate(n, ranks, pattern=pattern) for n, ranks in ((8192, 4), (16384, 8)))
    assert one == doubled


def test_items_are_named_and_add_up():
    peak = estimate(ranks=2).forward_backward
    assert peak.num_bytes == sum(item.num_bytes for item in peak.items)
    names = {item.name for item in peak.items}
    assert {"query", "key and value", "out", "dout", "dq", "dk", "dv", "lse", "two chunks of keys and values"} <= names


def test_one_rank_holds_no_chunks():
    assert not any("chunks" in item.name for peak in estimate() for item in peak.items)


def test_accumulators_of_16_bit_types_are_float32():
    half, single = (dict(estimate(itemsize=size).forward_backward.items) for size in (2, 4))
    assert half["dq"] == single["dq"]
    assert half["query"] * 2 == single["query"]


def test_scratch_grows_with_threads():
    few, many = (estimate(num_threads=count).forward.num_bytes for count in (1, 4))
    assert few < many


def test_estimate_does_not_import_torch():
    code = "import sys, ring_dilated_attention.plan.memory; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
