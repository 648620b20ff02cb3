"""The plan's memory: against tensors without storage to the byte, against torch's allocator, and that it is a sum."""

import subprocess
import sys
from itertools import product
from unittest import mock

import pytest
import torch

from benchmarks.measure import allocated
from ring_dilated_attention import ContextParallel, DilatedPattern, dilated_attention
from ring_dilated_attention.commands.local_ranks import Launch, run_ranks
from ring_dilated_attention.forecast.ledger import attention_memory
from ring_dilated_attention.kernels import cpu
from ring_dilated_attention.kernels.contract import BackwardRows
from ring_dilated_attention.kernels.traits import TRAITS, no_scratch
from ring_dilated_attention.plan import step
from ring_dilated_attention.plan.exchange import plan_exchange
from ring_dilated_attention.plan.job import Job
from ring_dilated_attention.plan.planner import make_plan
from ring_dilated_attention.plan.sharding import default_lengths, make_shards, split_lengths
from ring_dilated_attention.plan.sizes import Sizes
from ring_dilated_attention.plan.step import Packing
from ring_dilated_attention.run import executor
from ring_dilated_attention.run.executor import Means
from ring_dilated_attention.simulate.measuring import Held
from ring_dilated_attention.simulate.one_rank import Delivered

CPU = TRAITS["cpu"]
VISIBLE = CPU._replace(scratch=no_scratch)  # what a dispatch mode sees: not what a kernel makes and frees in one op


class NoLink:
    """Takes messages and brings nothing: what tensors without storage hold is not looked at."""

    def carry(self, sends, receives, moment):
        return Delivered()

    def carry_apart(self, sends, receives, moment):
        return Delivered(), Delivered()

    def all_to_all_single(self, tensors, sizes, like, moment):
        return list(torch.empty(sum(sizes), dtype=like.dtype, device=like.device).split(list(sizes)))


def held_peaks(rank_plan, sizes, dtype):
    """The executor itself on tensors of torch.device("meta"): the storages that are alive at once, in bytes."""
    plan, dealing = rank_plan
    share = 1 if dealing is None else dealing.size
    shapes = [(sizes.batch, rank_plan.num_rows, share * h, sizes.head_dim) for h in (plan.num_heads, plan.num_kv_heads)]
    query, key, value, dout = (torch.empty(shapes[i], dtype=dtype, device="meta") for i in (0, 1, 1, 0))
    means = Means(cpu, 1.0, NoLink(), NoLink())
    # Without storage, torch follows logaddexp in Python, for a third of all the time. Another op makes as much.
    with mock.patch.object(torch, "logaddexp", torch.maximum):
        with Held([query, key, value]) as forward:
            out, lse = executor.forward(rank_plan, means, query, key, value)
        rows = BackwardRows(dout, None, query, key, value, out, lse)
        with Held([dout, query, key, value, out, lse]) as backward:
            executor.backward(rank_plan, means, rows)
    return forward.peak_bytes, max(forward.peak_bytes, backward.peak_bytes)


JOBS = [
    (DilatedPattern((256, 4096), (1, 4)), "contiguous"),
    (DilatedPattern((4096,), (1,), is_causal=True), "zigzag"),
    (DilatedPattern((100, 1000, 4001), (2, 3, 17), is_causal=True), "contiguous"),
    (DilatedPattern((64, 4096), (1, 7), heads="split"), "contiguous"),
    (DilatedPattern((4096, 700), (5, 2), is_causal=True, phase="blocked"), "zigzag"),
]


@pytest.mark.parametrize("exchange", ["ring", "all_gather", "all_to_all"])
@pytest.mark.parametrize(("pattern", "sharding"), JOBS)
def test_the_plan_holds_what_the_executor_holds(pattern, sharding, exchange):
    """To the byte, for every exchange. Catches a step whose bytes are added up otherwise than they are taken."""
    num_checked = 0
    for num_ranks, (heads, kv_heads), batch, n in ((1, (4, 2), 2, 4096), (3, (6, 3), 1, 4096), (4, (8, 4), 2, 4001)):
        shards = make_shards(sharding, default_lengths(sharding, n, num_ranks))
        for rank, dtype in product({0, num_ranks // 2, num_ranks - 1}, (torch.float32, torch.float64, torch.bfloat16)):
            rank_plan = plan_exchange(exchange, Job(pattern, shards, heads, kv_heads), rank)
            sizes = Sizes(batch, 24, dtype.itemsize)
            planned = attention_memory(rank_plan.plan, sizes, VISIBLE, rank_plan.dealing)
            assert tuple(peak.num_bytes for peak in planned) == held_peaks(rank_plan, sizes, dtype), (num_ranks, rank)
            num_checked += 1
    assert num_checked >= 12


@pytest.mark.parametrize(("num_ranks", "sharding"), [(64, "contiguous"), (64, "zigzag"), (256, "contiguous")])
def test_sampled_ranks_of_many(num_ranks, sharding):
    """The same where nobody has so many ranks."""
    pattern = DilatedPattern((2048, 65536, 2**20), (1, 8, 128), is_causal=sharding == "zigzag")
    shards = make_shards(sharding, default_lengths(sharding, 2**20, num_ranks))
    for rank in (0, 3 * num_ranks // 5, num_ranks - 1):
        rank_plan = plan_exchange("ring", Job(pattern, shards, 4, 4), rank)
        planned = attention_memory(rank_plan.plan, Sizes(1, 64, 4), VISIBLE)
        assert tuple(peak.num_bytes for peak in planned) == held_peaks(rank_plan, Sizes(1, 64, 4), torch.float32)


@pytest.mark.parametrize("exchange", ["ring", "all_to_all"])
def test_rows_that_are_copied_are_held(exchange, monkeypatch):
    """Catches copies of a tile's rows that the plan does not hold, or that live longer than the kernel's call."""
    always = VISIBLE._replace(packing=Packing(distance=1, num_bytes=1, max_rows=2000))
    monkeypatch.setattr(cpu, "TRAITS", always)
    pattern = DilatedPattern((100, 1000, 4001), (1, 3, 4), is_causal=True)
    for num_ranks, batch, n in ((1, 1, 4096), (1, 2, 4001), (3, 2, 4096)):
        shards = make_shards("contiguous", split_lengths(n, num_ranks))
        for rank in range(num_ranks):
            rank_plan = plan_exchange(exchange if num_ranks > 1 else "none", Job(pattern, shards, 6, 3), rank)
            planned = attention_memory(rank_plan.plan, Sizes(batch, 24, 4), always, rank_plan.dealing)
            held = held_peaks(rank_plan, Sizes(batch, 24, 4), torch.float32)
            assert tuple(peak.num_bytes for peak in planned) == held, (num_ranks, rank)
            unpacked = attention_memory(rank_plan.plan, Sizes(batch, 24, 4), VISIBLE, rank_plan.dealing)
            assert planned.forward.num_bytes != unpacked.forward.num_bytes


def test_a_third_chunk_buffer_would_be_seen(monkeypatch):
    """The comparison can fail: an executor that keeps one buffer more than the program says."""
    pack = executor._Executor.pack

    def with_another(call, step):
        pack(call, step)
        call.forgotten = call.flat(step.size, call.dtype)

    monkeypatch.setitem(executor._Executor.do, step.Pack, with_another)
    shards = make_shards("contiguous", split_lengths(2048, 4))
    rank_plan, sizes = plan_exchange("ring", Job(DilatedPattern((2048,), (1,)), shards, 4, 4), 1), Sizes(1, 64, 4)
    planned = attention_memory(rank_plan.plan, sizes, VISIBLE)
    assert held_peaks(rank_plan, sizes, torch.float32)[0] > planned.forward.num_bytes


# n, batch, heads, key/value heads, head dim, dtype, pattern
CASES = [
    (2048, 1, 4, 4, 64, torch.float32, DilatedPattern((256, 512), (1, 2))),
    (2048, 2, 4, 4, 64, torch.float32, DilatedPattern((256, 512), (1, 2), is_causal=True)),
    (2048, 1, 4, 2, 64, torch.float32, DilatedPattern((256, 2048), (1, 4))),
    (2048, 1, 4, 4, 64, torch.bfloat16, DilatedPattern((256, 2048), (1, 4))),
    (2048, 1, 4, 2, 64, torch.float16, DilatedPattern((2048,), (1,), is_causal=True)),
    (40000, 1, 8, 8, 16, torch.bfloat16, DilatedPattern((125, 40000), (1, 32))),  # copied in several calls
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
    plan = make_plan(Job(pattern, make_shards("contiguous", lengths), heads, kv_heads), worker.rank)
    estimate = attention_memory(plan, Sizes(batch, dim, dtype.itemsize), CPU)
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


def planned(n=8192, ranks=1, itemsize=4, pattern=None, num_threads=1, kernel="cpu"):
    pattern = pattern or DilatedPattern((1024, 8192), (1, 8))
    plan = make_plan(Job(pattern, make_shards("contiguous", split_lengths(n, ranks)), 4, 4), 0)
    return attention_memory(plan, Sizes(1, 64, itemsize, num_threads), TRAITS[kernel])


def zigzag_peaks(worker):
    n, heads, dim = 1536, 4, 64
    pattern = DilatedPattern((n,), (1,), is_causal=True)
    parallel = ContextParallel(exchange="ring", sharding="zigzag")
    lengths = parallel.cut.default_lengths(n)
    inputs = [torch.randn(1, lengths[worker.rank], heads, dim, requires_grad=True) for _ in range(3)]

    def both():
        out = dilated_attention(*inputs, pattern, parallel=parallel)
        torch.autograd.grad(out, inputs, torch.empty_like(out))

    both()
    plan = make_plan(Job(pattern, parallel.cut.shards_of(lengths), heads, heads), worker.rank)
    peak = attention_memory(plan, Sizes(1, dim, 4), CPU).forward_backward
    late = any(m.owner == worker.rank for hop in plan.hops[1:] for m in hop.sends)
    return sum(x.nbytes for x in inputs) + allocated(both).peak_bytes, peak.num_bytes, late


def test_a_chunk_that_is_sent_late_is_planned():
    """Catches memory that only a zigzag rank in the middle needs: it dilates its later slice once more."""
    found = run_ranks(Launch(3), zigzag_peaks)
    assert [late for *_, late in found] == [False, True, False]
    for measured, planned, _ in found:
        assert abs(planned / measured - 1) < 0.05


def test_memory_grows_with_the_local_length_only():
    pattern = DilatedPattern((1024, 8192), (1, 8))
    one, doubled = (planned(n, ranks, pattern=pattern) for n, ranks in ((8192, 4), (16384, 8)))
    assert one == doubled


def test_items_are_named_and_add_up():
    peak = planned(ranks=2).forward_backward
    assert peak.num_bytes == sum(item.num_bytes for item in peak.items)
    names = {item.name for item in peak.items}
    assert {
        "query",
        "key",
        "value",
        "out",
        "dout",
        "dq",
        "dk",
        "dv",
        "lse",
        "own chunks of K and V",
        "received chunks of K and V",
    } <= names


def test_one_rank_holds_no_chunks():
    assert not any("chunks" in item.name for peak in planned() for item in peak.items)


def test_accumulators_of_16_bit_types_are_float32():
    pattern = DilatedPattern((1024, 8192), (1, 1))  # the peak is in the second tile, when there are accumulators
    half, single = (dict(planned(itemsize=size, pattern=pattern).forward_backward.items) for size in (2, 4))
    assert half["dq"] == single["dq"]
    assert half["query"] * 2 == single["query"]


def test_scratch_grows_with_threads():
    few, many = (planned(num_threads=count).forward.num_bytes for count in (1, 4))
    assert few < many


def test_plans_import_no_torch():
    modules = "ring_dilated_attention.forecast.ledger, ring_dilated_attention.kernels.traits"
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
