"""Several ranks: what they refuse, how they fail, what they send, and ContextParallel's own functions.

Every function whose name starts with `rank` runs on every rank, and every rank asserts.
"""

import gc
import threading
import time
import warnings
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import count, product
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from definition import (
    DENSE,
    PATIENCE,
    PATTERN,
    check_refused,
    check_step,
    noted_messages,
    strict,
    whole,
    with_gradients,
)
from distributed import run
from helpers import PLAIN, message_of, relative_error, rows_of
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.checkpoint import checkpoint

from benchmarks.measure import Sizes, allocated, dilated_call
from ring_dilated_attention import ContextParallel, DilatedPattern, dilated_attention, simulate
from ring_dilated_attention.attention import attention
from ring_dilated_attention.kernels import cpu
from ring_dilated_attention.layers import MultiheadDilatedAttention
from ring_dilated_attention.models.longnet import shift_left
from ring_dilated_attention.ranks import call as call_module
from ring_dilated_attention.ranks.handshake import RefusedError
from ring_dilated_attention.ranks.processes import Processes
from ring_dilated_attention.ranks.reduce import all_reduce
from ring_dilated_attention.reference import dilated_attention_reference

# Ranks that do not make the same call.


def call_with(
    cp, shape=(1, 5, 4, 8), kv_heads=4, dtype=torch.float32, needs_grad="", pattern=PATTERN, **more
):
    batch, length, _, head_dim = shape
    of_keys = (batch, length, kv_heads, head_dim)
    tensors = [
        torch.ones(size, dtype=dtype, requires_grad=name in needs_grad)
        for name, size in zip("qkv", (shape, of_keys, of_keys), strict=True)
    ]
    return dilated_attention(*tensors, pattern, parallel=cp, **more)


# what ranks disagree on, how one of them deviates, and what the error says of it
DISAGREEMENTS = [
    ("pattern", {"pattern": replace(PATTERN, segment_lengths=(4, 8))}, "segment_lengths=(4, 8)"),
    ("shape", {"shape": (1, 5, 8, 8)}, "8 heads"),
    ("shape", {"kv_heads": 2}, "2 key/value heads"),
    ("shape", {"shape": (1, 5, 4, 16)}, "head dim 16"),
    ("shape", {"shape": (2, 5, 4, 8)}, "batch 2"),
    ("dtype", {"dtype": torch.bfloat16}, "torch.bfloat16"),
    ("scale", {"scale": 0.5}, "0.5"),
    ("cu_seqlens", {"cu_seqlens": torch.tensor([0, 3, 10], dtype=torch.int32)}, "(0, 3, 10)"),
    ("gradients", {"needs_grad": "kv"}, "kv"),
    ("return_lse", {"return_lse": True}, "True"),
    ("sinks", {"sinks": torch.zeros(4)}, "given"),
]


def rank_disagrees(rank, world_size):
    strict()
    cp = ContextParallel(timeout=PATIENCE)
    local = [rows_of(cp, x) for x in whole(21)]
    for _ in range(2):  # the second time they compute while their handshake goes on
        call_with(cp)
        expected = dilated_attention(*local, PATTERN, parallel=cp)
    sent = noted_messages()
    for odd in range(world_size):
        for field, deviation, quoted in DISAGREEMENTS:
            options = deviation if rank == odd else {}
            message = message_of(partial(call_with, cp, **options))
            assert message.startswith(f"ranks disagree on {field}: rank 0 has "), message
            assert all(f"rank {k} has" in message for k in range(world_size)), message
            assert quoted in message.split(f"rank {odd} has")[1].split(", rank")[0], message
            assert "nothing was sent" in message
    assert sent == []
    assert torch.equal(dilated_attention(*local, PATTERN, parallel=cp), expected)
    assert sent != []
    assert cp.ranks.calls == 5  # a call that was refused has no number
    with torch.no_grad() if rank == 0 else nullcontext():
        message = message_of(lambda: call_with(cp, needs_grad="q"))
    assert "ranks disagree on gradients: rank 0 has none, rank 1 has q" in message
    check_step(cp)
    message = message_of(lambda: call_with(cp, scale=f"bad on {rank}"))  # all at once
    for k in range(world_size):
        assert f"rank {k} refused the call: " in message
        assert f"'bad on {k}'" in message
    # What only shows when the ranks' lengths are known is refused by all. (Borders: test_borders.py.)
    zigzag = ContextParallel(sharding="zigzag", timeout=PATIENCE)
    message = message_of(lambda: call_with(zigzag, shape=(1, 5 + 9 * (rank == 0), 4, 8)))
    assert "zigzag shards of" in message
    assert "ContextParallel.shard" in message
    check_step(zigzag)
    with torch.inference_mode():
        for _ in range(2):
            assert torch.equal(dilated_attention(*local, PATTERN, parallel=cp), expected)


def test_ranks_that_disagree():
    """Catches a hang, a wrong answer, or an error on some ranks only; and a group that is of no use afterwards."""
    run(3, rank_disagrees)


def rank_goes_another_way(rank, world_size):
    strict()
    cp = ContextParallel(timeout=PATIENCE)
    forward = partial(call_with, cp, needs_grad="qkv")
    first, second = (forward().sum() for _ in range(2))
    first.backward(retain_graph=True)
    ids, labels = torch.ones(1, 5), torch.ones(1, 5, dtype=torch.int64)
    wanting, wants = ids.clone().requires_grad_(), "gradients: rank 0 has False, rank 1 has True"
    of_first = partial(first.backward, retain_graph=True)
    reduce = partial(all_reduce, cp.ranks)
    # what rank 1 does, what the others do, and what they disagree on
    deeds = [
        (forward, of_first, "call: rank 0 has backward 1, rank 1 has forward 3"),
        (of_first, second.backward, "call: rank 0 has backward 2, rank 1 has backward 1"),
        (lambda: cp.unshard(ids), forward, "call: rank 0 has forward 3, rank 1 has unshard"),
        (
            lambda: cp.unshard(ids, dim=1),
            lambda: cp.unshard(ids, dim=0),
            "dim: rank 0 has 0, rank 1 has 1",
        ),
        (
            lambda: cp.unshard(labels),
            lambda: cp.unshard(labels.int()),
            "dtype: rank 0 has torch.int32, rank 1 has torch.int64",
        ),
        (
            lambda: shift_left(cp, labels.expand(2, -1), 0),
            lambda: shift_left(cp, labels, 0),
            "batch: rank 0 has 1, rank 1 has 2",
        ),
        (
            lambda: reduce(torch.ones(2)),
            lambda: reduce(torch.ones(4)),
            "shape: rank 0 has (4,), rank 1 has (2,)",
        ),
        (
            lambda: reduce(ids),
            lambda: reduce(ids.int()),
            "dtype: rank 0 has torch.int32, rank 1 has torch.float32",
        ),
        (lambda: reduce(ids), of_first, "call: rank 0 has backward 1, rank 1 has all_reduce"),
        (
            lambda: cp.shard(torch.ones(1, 10)),
            lambda: cp.shard(torch.ones(1, 8)),
            "length of the whole: rank 0 has 8, rank 1 has 10",
        ),
        (lambda: cp.shard(wanting), lambda: cp.shard(ids), wants),
        (lambda: cp.unshard(wanting), lambda: cp.unshard(ids), wants),
    ]
    for odd, others, words in deeds:
        assert f"ranks disagree on {words}" in message_of(odd if rank == 1 else others)
    total = world_size * (world_size + 1) / 2
    assert reduce(torch.full((2,), 1.0 + rank)).tolist() == [total, total]
    check_step(cp)


def test_ranks_that_go_different_ways():
    """Catches the message of one call that is taken for that of another: of a wrong size it would end the process."""
    run(3, rank_goes_another_way)


def rank_wants_another_context(rank, world_size):
    strict()
    even, uneven = (6,) * world_size, (5, 7, *[6] * (world_size - 2))
    options = {"align": (1, 8), "lengths": (even, uneven)}
    options |= {"sharding": ("contiguous", "zigzag"), "exchange": ("ring", "all_gather")}

    def make(arguments):
        return ContextParallel(**{"timeout": PATIENCE, **arguments})

    for name, values in options.items():
        message = message_of(partial(make, {name: values[rank == 1]}))
        said = f"ranks disagree on {name}: rank 0 has {values[0]}, rank 1 has {values[1]}"
        assert said in message
    bad = {"lengths": (1, 2, 3, 4, 5), "sharding": "diagonal", "timeout": 3, "align": 0}
    bad["exchange"] = "simulator"
    check_refused(rank, world_size, [(make, {}, {name: x}, name) for name, x in bad.items()])
    check_step(make({}))  # what was refused ruins nothing


def test_ranks_that_want_other_contexts():
    """Catches a constructor that is refused on one rank while the others wait, and one that ruins every later one."""
    run(3, rank_wants_another_context)


# Ranks that fail.


def compiled_call(x, cp):
    """The op itself: what compiled code calls, whose tracing cannot ask."""
    text = call_module.Call(PATTERN, 0.3, "auto", "", False, range(4), 4, cp.key).text
    return torch.ops.ring_dilated_attention.forward(x, x, x, None, text)


def rank_fails_before_a_handshake(rank, world_size):
    cp = ContextParallel(timeout=PATIENCE)
    x = torch.ones(1, 5, 4, 8, requires_grad=True)
    attend = partial(dilated_attention, pattern=PATTERN, parallel=cp)
    # kernels need a last stride of 1, and no memory holds such a copy
    vast = torch.ones(1).expand(1, 2**45, 4, 8)

    def fail(*_):
        raise RuntimeError("no memory left")

    out, lse = attend(x, x, x, return_lse=True)
    for place, name, deed, said in (
        (None, "", lambda: attend(*[vast if rank else x] * 3), "allocate"),
        (attention, "with_unit_stride", lambda: out.sum().backward(retain_graph=True), ""),
        (torch, "zeros_like", lambda: lse.sum().backward(retain_graph=True), ""),
        (Processes, "fields", lambda: out.sum().backward(), ""),
        (call_module, "choose", lambda: compiled_call(x, cp), ""),
    ):
        started = time.monotonic()
        with mock.patch.object(place, name, fail) if place and rank else nullcontext():
            message = message_of(deed)
        assert ("rank 1 refused the call" in message) == (rank == 0), message
        assert (said or "no memory left") in message
        assert time.monotonic() - started < PATIENCE.total_seconds() / 2
    check_step(cp)


def test_one_rank_that_fails_before_a_handshake():
    """Catches a copy, or a choice inside the op, that is made where its failure is not told: the others would wait."""
    run(2, rank_fails_before_a_handshake)


# ContextParallel's own functions.


# Arguments of a context, positions, and the spans of rows of each of three ranks.
CUTS = [
    ({}, 23, [(0, 8)], [(8, 16)], [(16, 23)]),
    ({}, 1, [(0, 1)], [], []),
    ({"align": 8}, 20, [(0, 8)], [(8, 16)], [(16, 20)]),
    ({"lengths": (5, 0, 18)}, 23, [(0, 5)], [], [(5, 23)]),
    ({"sharding": "zigzag"}, 23, [(0, 4), (20, 23)], [(4, 8), (16, 20)], [(8, 12), (12, 16)]),
    ({"sharding": "zigzag"}, 2, [(0, 1)], [(1, 2)], []),
    (
        {"sharding": "zigzag_documents"},  # of 7 and of 16 positions
        23,
        [(0, 1), (5, 9), (20, 23)],
        [(1, 2), (4, 5), (9, 12), (17, 20)],
        [(2, 4), (12, 17)],
    ),
]


def rank_cuts(rank, world_size):
    """Gradients: test_gradients.py."""
    strict()
    dtypes = (torch.float64, torch.bfloat16, torch.int64, torch.bool)
    for options, n, *spans_by_rank in CUTS:
        cp = ContextParallel(**options)
        mine = [i for start, stop in spans_by_rank[rank] for i in range(start, stop)]
        documents = (0, 7, n) if cp.sharding == "zigzag_documents" else None
        of = {"cu_seqlens": documents and torch.tensor(documents, dtype=torch.int32)}
        shapes = {1: (2, n, 3), 0: (n,), -1: (2, 1, n), -3: (n, 2, 1)}
        for (dim, shape), dtype in product(shapes.items(), dtypes):
            full = torch.randn(shape).mul(3).to(dtype)
            local = cp.shard(full, dim, **of)
            assert torch.equal(local, full.index_select(dim, torch.tensor(mine).long()))
            assert torch.equal(cp.unshard(local, dim, **of), full)
        transposed = torch.randn(3, n).T.requires_grad_()
        assert torch.equal(cp.unshard(cp.shard(transposed, 0, **of), 0, **of), transposed)
        several_borders = [documents]
        if documents is None:
            several_borders = [{0, n // 3, n // 3 + 1, n}, set(range(n + 1))]
            assert cp.positions(n).tolist() == mine
        for borders in several_borders:
            expected = [t - max(b for b in borders if b <= t) for t in mine]
            cu_seqlens = torch.tensor(sorted(borders), dtype=torch.int32)
            assert cp.positions(n, cu_seqlens).tolist() == expected
        for dtype in (torch.int64, torch.uint8):
            full = torch.randint(0, 200, (2, n)).to(dtype)
            following = torch.cat([full[:, 1:], torch.full_like(full[:, :1], 77)], dim=1)
            shifted = shift_left(cp, cp.shard(full, **of), 77, documents)
            assert torch.equal(shifted, cp.shard(following, **of))


def test_rows_positions_and_labels():
    """Catches rows in the wrong order, an empty rank, rotary positions that start anew on every rank or go on in the
    next document, and labels that stop at the border of a shard or come from the wrong span."""
    run(3, rank_cuts)


def rank_of_a_group(rank, world_size):
    strict()
    pair = [0, 1] if rank < 2 else [2, 3]
    own, others = (dist.new_group(ranks) for ranks in ([0, 1], [2, 3]))
    if rank >= 2:
        own, others = others, own
    cp = ContextParallel(own)
    assert (cp.world_size, cp.rank) == (2, pair.index(rank))
    check_step(cp)
    message = message_of(lambda: call_with(cp, scale=1.0 + rank))
    # ranks of the job
    assert f"rank {pair[0]} has {1.0 + pair[0]}, rank {pair[1]} has {1.0 + pair[1]}" in message
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "dp"))
    across = ContextParallel(mesh["cp"])  # ranks 0 and 2, 1 and 3
    everyone, twin = ContextParallel(), ContextParallel(own)
    for context in (across, everyone, twin, cp):
        check_step(context)
    for _ in range(1 + 2 * (rank < 2)):  # one group calls oftener than the other
        check_step(cp)
    no_member = f"this rank, {rank}, is not in the"
    mistakes = [
        (
            DeviceMesh("cpu", torch.arange(4).view(1, 2, 2)),
            "3 axes None; name one or two, as in mesh['cp']",
        ),
        (others, f"{no_member} group (new_group gave it"),
    ]
    trio = DeviceMesh("cpu", [0, 1, 2])
    if rank == 3:
        mistakes.append((trio, f"{no_member} DeviceMesh of the ranks [0, 1, 2]"))
    for group, said in mistakes:
        assert said in message_of(partial(ContextParallel, group))
    if rank < 2:
        twin.close()
        check_step(ContextParallel(own))
    # ours have not changed torch's names
    group = dist.new_group(list(range(world_size)), timeout=PATIENCE)
    dist.all_reduce(torch.ones(1), group=group)
    # torch's own groups of all ranks, as a mesh makes them, would hang after this since torch 2.14
    if rank != 3:
        trio = dist.new_group([0, 1, 2], use_local_synchronization=True)
        check_step(ContextParallel(trio))  # rank 3 knows nothing of it
    contexts = [ContextParallel(given, timeout=PATIENCE) for given in (None, group)]
    for context in contexts:
        check_step(context)
        assert {link.name.split(" of ")[1] for link in context.ranks.opened} == {context.name}
    # torch's own again
    assert dist.distributed_c10d._process_group_name.__module__ == dist.distributed_c10d.__name__
    return [context.name for context in contexts]


def test_groups_of_some_ranks():
    """Catches ranks of the job that are taken for ranks of the group, groups that disturb each other, a group whose
    making waits for ranks that are not in it, and torch's mark of a group of others, a number, in an error. And names
    of groups that differ between ranks, which wait for each other beyond any timeout, or that two contexts have."""
    names, *others = run(4, rank_of_a_group)
    assert others == [names] * 3
    assert names[0] != names[1]


def rank_forgets_its_context(rank, world_size):
    strict()
    x = torch.ones(1, 5, 4, 8, requires_grad=True)
    out = dilated_attention(x, x, x, DENSE, parallel=ContextParallel(timeout=PATIENCE))
    gc.collect()
    # a rank that has no use for its output says so; the other's queries see its keys
    (x.sum() + 0 * out.sum() if rank == 0 else out.cos().sum()).backward()
    assert x.grad.isfinite().all()
    assert not torch.equal(x.grad, torch.ones_like(x))
    x = torch.ones(1, 5 * (rank == 0), 300, 8)  # 300 heads: no warning where a rank owns little
    assert dilated_attention(x, x, x, PATTERN, parallel=ContextParallel()).shape == x.shape


def test_a_context_lives_as_long_as_its_graph():
    """Catches a backward that no longer finds its group, a remedy in the docstrings that is none, and a warning about
    short sequences for a short shard."""
    run(2, rank_forgets_its_context)


# The numbers.


def test_a_simulated_rank_that_fails(monkeypatch):
    """Catches one that fails and leaves the others waiting."""
    cp, x = simulate.all_ranks(4), torch.ones(1, 20, 4, 8, requires_grad=True)
    kernel, calls = cpu.forward, count()

    def fail_once(*arguments):
        if next(calls) == 5:
            raise MemoryError("no memory left")
        return kernel(*arguments)

    monkeypatch.setattr(cpu, "forward", fail_once)
    attend = partial(dilated_attention, x, x, x, DENSE, parallel=cp)
    assert "no memory left" in message_of(attend, MemoryError)
    attend().sum().backward()


def rank_measures_memory(rank, world_size):
    """Peak of forward and backward under each exchange, in local tensors."""
    sizes, peaks = Sizes(512 * world_size, 4, 64), {}
    for exchange in ("ring", "all_gather"):
        cp = ContextParallel(exchange=exchange)
        call = dilated_call(sizes, DENSE, cp)
        call()  # what is made once is not the call's
        peaks[exchange] = allocated(call).peak_bytes / (512 * 4 * 64 * 4)
    of_ring, of_all_gather = 2 * 2 + 2 * 2, 3 * (2 + 2)
    more = peaks["all_gather"] - peaks["ring"]
    assert more == pytest.approx(of_all_gather - of_ring, abs=0.5)
    joined = cp.unshard(torch.ones(1, 2**16, requires_grad=True))
    backward = partial(joined.backward, torch.ones_like(joined), retain_graph=True)
    backward()
    # what is sent, what is received, and sums of own rows
    assert joined.nbytes < allocated(backward).peak_bytes < 3 * joined.nbytes


def test_gathered_chunks_are_there_once():
    """Catches copies of what was gathered: what it costs is all others' chunks and their gradients, no more. And a copy
    of the whole gradient for each rank, in the backward of `unshard`."""
    run(4, rank_measures_memory)


def rank_in_float32(rank, world_size):
    strict()
    pattern = DilatedPattern((32, 128, 211), (1, 2, 3), is_causal=True)
    inputs = whole(211, (6, 3, 3, 6, 1), batch=2, head_dim=24, dtype=torch.float32)
    dout, dlse = inputs[3], inputs[4][:, :, 0, :6]
    inputs = inputs[:3]
    attend = partial(dilated_attention, pattern=pattern, return_lse=True)
    reference = partial(dilated_attention_reference, pattern=pattern)
    exact = with_gradients(reference, [x.double() for x in inputs], (dout.double(), dlse.double()))
    alone = with_gradients(attend, inputs, (dout, dlse))
    for options in ({}, {"sharding": "zigzag"}, {"exchange": "all_gather"}):
        cp = ContextParallel(**options)
        given = [cp.shard(x) for x in inputs], (rows_of(cp, dout), rows_of(cp, dlse))
        runs = [with_gradients(partial(attend, parallel=cp), *given) for _ in range(2)]
        assert all(map(torch.equal, *runs))
        for x, y, z in zip(runs[0], alone, exact, strict=True):
            errors = [relative_error(cp.unshard(x), z), relative_error(y, z)]
            # One device holds the tolerance against torch (test_attention.py); so does half of twice its error.
            bound = 1.5 * errors[1] + torch.finfo(torch.float32).eps / 4
            assert errors[0] <= bound, (options, errors)


def test_float32_on_many_ranks_is_as_good_as_on_one():
    """Catches partials that lose bits on their way, and results that differ from run to run."""
    run(3, rank_in_float32)


def rank_holds_nan(rank, world_size):
    """Segments of 16 straddle ranks of 10 positions; chunks of two segments, and of four heads, share a buffer."""
    strict()
    pattern, inputs = replace(PATTERN, is_causal=False), whole(30, batch=2)
    for exchange in ("ring", "all_gather"):
        cp = ContextParallel(exchange=exchange)
        attend = partial(dilated_attention, pattern=pattern, parallel=cp, return_lse=True)

        def results(tensors, cp=cp, attend=attend):
            return [cp.unshard(x) for x in with_gradients(attend, [cp.shard(x) for x in tensors])]

        clean = results(inputs)
        for which, bad in product(range(3), (torch.nan, torch.inf)):
            tensors = [x.clone() for x in inputs]
            tensors[which][1, 9, -1, 0] = bad  # batch entry 1, segment 0..15, the last head
            spoilt = results(tensors)
            for x, y in zip(spoilt, clean, strict=True):
                assert torch.equal(x[0], y[0])
                assert torch.equal(x[1, 16:], y[1, 16:])
                assert torch.equal(x[1, :, 0], y[1, :, 0])
            assert not torch.equal(spoilt[0], clean[0])


def test_nan_and_inf_stay_in_their_segments_on_many_ranks():
    """Catches 0 * NaN in merging, and a buffer whose other chunks are touched."""
    run(3, rank_holds_nan)


def rank_has_other_defaults(rank, world_size):
    """torch.set_default_device("cuda") is common; "meta" shows even where there is no GPU."""
    cp = ContextParallel()
    torch.set_default_dtype(torch.float64)
    x = torch.randn(1, 5, 4, 8, requires_grad=True)
    labels = torch.arange(5)[None]
    borders = torch.tensor([0, 3, 5 * world_size], dtype=torch.int32)
    dout, last = torch.ones_like(x), -1 if rank == world_size - 1 else 0
    attend = partial(dilated_attention, pattern=PATTERN, parallel=cp)
    with torch.device("meta"):
        out, lse = attend(x, x, x, cu_seqlens=borders, return_lse=True)
        (grad,) = torch.autograd.grad([out, lse], x, [dout, lse.detach()])
        assert grad.isfinite().all()
        assert cp.positions(10, borders).device == torch.device("cpu")
        assert shift_left(cp, labels, fill=-1).tolist() == [[1, 2, 3, 4, last]]
        assert cp.unshard(cp.shard(labels)).tolist() == labels.tolist()
        assert "ranks disagree on scale" in message_of(lambda: attend(x, x, x, scale=1.0 + rank))


def test_other_defaults_of_torch():
    """Catches a record or an index that is made on the default device, where the control group cannot send it."""
    run(2, rank_has_other_defaults)


# Compilation.


def as_it_is(function):
    return function


def rank_compiles(rank, world_size):
    """Only rank 1 compiles: it must make the calls that rank 0 makes, in their order."""
    compile_whole = (
        partial(torch.compile, fullgraph=True, backend="aot_eager") if rank == 1 else as_it_is
    )
    recomputes_in_compiled_code(compile_whole)
    warnings.resetwarnings()
    torch.use_deterministic_algorithms(True)
    cp = ContextParallel(timeout=PATIENCE)
    local = [rows_of(cp, x) for x in whole(21)]

    def with_lse(query, key, value):
        return dilated_attention(query * 2, key, value, PATTERN, parallel=cp, return_lse=True)

    def without_lse(query, key, value):
        out = dilated_attention(query, key, value, PATTERN, parallel=cp)
        return out, out.sum(-1)

    for function in (with_lse, without_lse):
        eager, compiled = (with_gradients(f, local) for f in (function, compile_whole(function)))
        assert all(map(torch.equal, eager, compiled))
    assert cp.ranks.calls == 4
    layer = MultiheadDilatedAttention(32, 4, PATTERN, rotary=True, parallel=cp)
    x = torch.randn(1, 8, 32)
    compiled = compile_whole(lambda x: layer(x, x, x)[0])
    torch.testing.assert_close(compiled(x), layer(x, x, x)[0])
    attend = compile_whole(lambda *x: dilated_attention(*x, PATTERN, parallel=cp))
    query, key, value = whole(8)
    bad = value[..., :3] if rank == 1 else value
    message = message_of(lambda: attend(query, key, bad), Exception)
    assert "value (1, 8, 2, 3) must have the same shape" in message
    assert torch.isfinite(attend(query, key, value)).all()
    scaled = compile_whole(lambda x, scale: dilated_attention(x, x, x, PATTERN, scale=scale))
    for scale in (0.5, 0.25, -1.0, 0.0):
        expected = dilated_attention(query, query, query, PATTERN, scale=scale)
        torch.testing.assert_close(scaled(query, scale), expected)


def test_compiled_equals_eager_on_two_ranks():
    """Catches an exchange that is compiled away, reordered, or done once where it was twice; a write that keeps the
    call in the graph and makes checkpointing repeat it; a module that no whole graph takes; and a refusal in compiled
    code that the other ranks wait for."""
    run(2, rank_compiles)


def rank_compiles_what_it_does_not_use(rank, world_size):
    """Only rank 1 compiles: it must make the calls that rank 0 makes, which waits for it so long."""
    cp = ContextParallel(timeout=6 * PATIENCE)

    def function(first, second):
        """Without sums: inductor would compile C++ for each, for ten seconds."""
        outs = [dilated_attention(*tensors, PATTERN, parallel=cp) for tensors in (first, second)]
        return outs[1]

    # Inductor drops calls that other backends keep.
    options = {"fullgraph": True, "dynamic": True, "options": PLAIN}
    compiled = torch.compile(function, backend="inductor", **options)
    own = compiled if rank == 1 else function
    calls = [tensors.unbind() for tensors in torch.randn(2, 3, 1, 5, 4, 8)]
    torch.testing.assert_close(own(*calls), function(*calls))
    assert cp.ranks.calls == 4


def test_a_rank_that_does_not_use_what_it_compiled():
    """Catches a call that the compiler drops on one rank, also before one that is used: the other would wait."""
    run(2, rank_compiles_what_it_does_not_use, seconds=120)


def recomputes_in_compiled_code(compile_whole):
    warnings.simplefilter("error")
    cp = ContextParallel(timeout=PATIENCE)

    def block(x):
        return dilated_attention(x.sin(), x, x, PATTERN, parallel=cp).square()

    save = partial(checkpoint, block, use_reentrant=False, context_fn=attention.save_attention)

    def gradient(kept, compiler=as_it_is):
        function = compiler(lambda x: x.cos().sum() + kept(x).sum())
        return torch.autograd.grad(function(x), x)[0]

    x = torch.randn(1, 5, 4, 8, requires_grad=True)
    expected = gradient(block)
    assert cp.ranks.calls == 1
    assert torch.equal(gradient(save), expected)
    torch.testing.assert_close(gradient(save, compile_whole), expected)
    assert cp.ranks.calls == 3
    checkpoint(block, x, use_reentrant=False).sum().backward()
    assert cp.ranks.calls == 5  # without the policy attention is computed twice


# Threads.

BELONGS = "belongs to the thread of its first call"


def in_threads(*works):
    """What each raised. They begin together."""
    errors, barrier = [None] * len(works), threading.Barrier(len(works))

    def one(i):
        barrier.wait()
        try:
            works[i]()
        except Exception as error:  # noqa: BLE001  given to the test
            errors[i] = error

    threads = [threading.Thread(target=one, args=(i,)) for i in range(len(works))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return errors


def take_steps(cp):
    for _ in range(4):
        check_step(cp)


def rank_uses_a_context_in_four_threads(rank, world_size):
    strict()
    cp = ContextParallel(timeout=PATIENCE)
    errors = in_threads(*[partial(take_steps, cp)] * 4)
    assert all(error is None or type(error) is RefusedError for error in errors), errors
    refused = [str(error) for error in errors if error is not None]
    assert len(refused) >= 3  # at most the owner had come to its end before
    # another may win per rank
    assert all(BELONGS in x or "the name of the calling thread" in x for x in refused), refused
    both = [ContextParallel(timeout=PATIENCE) for _ in range(2)]
    assert in_threads(*[partial(take_steps, cp) for cp in both]) == [None, None]


def test_four_threads_of_one_context():
    """Catches threads that take each other's messages: of another size these end the process, else numbers are wrong.
    Two contexts in two threads disturb each other in nothing."""
    run(2, rank_uses_a_context_in_four_threads)


def rank_begins_in_a_thread_of_another_name(rank, world_size):
    """As when threads race for the first call, and another one wins on each rank."""
    cp, errors = ContextParallel(timeout=PATIENCE), []

    def call():
        errors.append(message_of(partial(check_step, cp)))

    for number in (0, 1) if rank == 0 else (1, 0):  # the first of them is the owner
        thread = threading.Thread(target=call, name=f"worker {number}")
        thread.start()
        thread.join()
    assert "rank 0 has worker 0, rank 1 has worker 1" in errors[0]
    assert BELONGS in errors[1]


def rank_leaves_the_owner(rank, world_size):
    """Rank 1 makes each call in another thread than before: both are refused it, and the context serves on."""
    strict()
    rank_begins_in_a_thread_of_another_name(rank, world_size)
    cp = ContextParallel(timeout=PATIENCE)
    x = torch.randn(1, 5, 4, 8, requires_grad=True)
    attend = partial(dilated_attention, pattern=PATTERN, parallel=cp)
    out = attend(x, x, x)
    batch, labels = {"x": torch.zeros(1, 10)}, torch.zeros(1, 5, dtype=torch.int64)
    layer = MultiheadDilatedAttention(32, 4, PATTERN, parallel=cp)
    deeds = [
        lambda: attend(x, x, x),
        lambda: layer(*[x.flatten(2)] * 3),
        lambda: out.sum().backward(retain_graph=True),
        lambda: cp.shard(torch.zeros(1, 10)),
        lambda: cp.shard_batch(batch if rank == 0 else None, source=0),
        lambda: cp.mean_loss(x.sum(), 3),
        lambda: shift_left(cp, labels, 0),
        lambda: attend(x, x, x[:, :2]),  # which cannot be, at that
    ]
    for deed in deeds:
        said = message_of(deed) if rank == 0 else str(in_threads(deed)[0])
        assert f"{BELONGS}, 'MainThread', until close(). Make all calls" in said
        is_told = "rank 1 refused the call: thread 'Thread-" in said
        assert is_told == (rank == 0 or deed is deeds[-1])
    for deed in deeds[:-1]:
        deed()
    assert torch.isfinite(x.grad).all()


def test_a_call_in_another_thread():
    """Catches a thread that is refused on its rank alone: the others would wait for it. And ranks that exchange the
    data of different threads without a word."""
    run(2, rank_leaves_the_owner)


def nest(depth, innermost):
    """Backward within backward: so deep that autograd goes on in a thread of its own, as it does for a GPU."""
    if depth == 0:
        innermost()
        return
    x = torch.zeros(1, requires_grad=True)
    x.register_hook(lambda _: nest(depth - 1, innermost))
    x.backward()


def rank_recomputes_in_a_thread_of_autograd(rank, world_size):
    strict()
    cp = ContextParallel(timeout=PATIENCE)
    x = torch.randn(1, 5, 4, 8, dtype=torch.float64, requires_grad=True)

    def attend(x):
        return dilated_attention(x, x, x, PATTERN, parallel=cp).sin().sum()

    loss = checkpoint(attend, x, use_reentrant=False)
    threads = []

    def innermost():
        threads.append(threading.current_thread())
        loss.backward()

    nest(80, innermost)
    assert threads != [threading.main_thread()]
    [expected] = torch.autograd.grad(attend(x), x)
    torch.testing.assert_close(x.grad, expected, rtol=1e-12, atol=1e-12)


def test_threads_of_autograd_count_as_the_owner():
    """Catches a backward, with what it recomputes, that is refused where autograd runs it in a thread of its own."""
    run(2, rank_recomputes_in_a_thread_of_autograd)
