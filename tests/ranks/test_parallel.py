"""Several ranks: what they refuse, how they fail, what they send, and ContextParallel's own functions.

Every function whose name starts with `rank` runs on every rank, and every rank asserts.
"""

import gc
import threading
import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
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
from ring_dilated_attention.ranks.handshake import RefusedError
from ring_dilated_attention.ranks.link import ExchangeError, GroupLink
from ring_dilated_attention.ranks.reduce import all_reduce
from ring_dilated_attention.reference import dilated_attention_reference

PATTERN = DilatedPattern((4, 16), (1, 2), is_causal=True)
PATIENCE = timedelta(seconds=20)


def strict() -> None:
    """What pytest does in its own process: warnings are errors. And uninitialised memory is NaN."""
    warnings.simplefilter("error")
    # Ranks here choose their lengths, and drop contexts, as they like. What is said then has tests of its own.
    warnings.filterwarnings("ignore", message="ranks have .* positions; a near-equal cut")
    warnings.filterwarnings("ignore", message=".* was dropped without close")
    torch.use_deterministic_algorithms(True)
    assert torch.empty(9).isnan().all()


def assert_works(cp: ContextParallel, exchange_only: bool = False) -> None:
    """The ranks of a context compute together what the definition says, forward and backward."""
    generator = torch.Generator().manual_seed(3)
    full = [torch.randn(1, 21, 4, 8, dtype=torch.float64, generator=generator) for _ in range(3)]
    leaves = [x.clone().requires_grad_() for x in full]
    expected, _ = dilated_attention_reference(*leaves, PATTERN)
    grads = torch.autograd.grad(expected.sin().sum(), leaves)
    local = [cp.shard(x).requires_grad_() for x in full]
    out = dilated_attention(*local, PATTERN, parallel=cp)
    torch.testing.assert_close(out, rows_of(cp, expected), rtol=1e-11, atol=1e-11)
    for x, y in zip(torch.autograd.grad(out.sin().sum(), local), grads, strict=True):
        torch.testing.assert_close(x, rows_of(cp, y), rtol=1e-11, atol=1e-11)


# Ranks that do not make the same call.


def call_with(
    cp,
    *,
    pattern=PATTERN,
    shape=(1, 5, 4, 8),
    kv_heads=4,
    dtype=torch.float32,
    needs_grad="",
    **kwargs,
):
    batch, length, _, head_dim = shape
    shapes = (shape, (batch, length, kv_heads, head_dim), (batch, length, kv_heads, head_dim))
    tensors = [
        torch.ones(s, dtype=dtype, requires_grad=n in needs_grad)
        for n, s in zip("qkv", shapes, strict=True)
    ]
    return dilated_attention(*tensors, pattern, parallel=cp, **kwargs)


DISAGREEMENTS = [
    (
        "pattern",
        {"pattern": DilatedPattern((4, 8), (1, 2), is_causal=True)},
        "segment_lengths=(4, 8)",
    ),
    (
        "pattern",
        {"pattern": DilatedPattern((4, 16), (1, 4), is_causal=True)},
        "dilation_rates=(1, 4)",
    ),
    ("pattern", {"pattern": DilatedPattern((4, 16), (1, 2))}, "is_causal=False"),
    (
        "pattern",
        {"pattern": DilatedPattern((4, 16), (1, 2), is_causal=True, phase="blocked")},
        "phase='blocked'",
    ),
    (
        "pattern",
        {"pattern": DilatedPattern((4, 16), (1, 2), is_causal=True, heads="split")},
        "heads='split'",
    ),
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
    sent, post = [], GroupLink._post

    def noting_post(link, messages, moment):
        sent.extend([] if link.name.startswith("control") else messages)
        return post(link, messages, moment)

    GroupLink._post = noting_post
    cp = ContextParallel(timeout=PATIENCE)
    for odd in range(world_size):
        for field, deviation, quoted in DISAGREEMENTS:
            message = message_of(
                lambda d=deviation, odd=odd: call_with(cp, **(d if rank == odd else {}))
            )
            assert message.startswith(f"ranks disagree on {field}: rank 0 has "), message
            assert all(f"rank {k} has" in message for k in range(world_size)), message
            assert quoted in message.split(f"rank {odd} has")[1].split(", rank")[0], message
            assert "nothing was sent" in message
    assert sent == []
    assert_works(cp)
    assert sent != []
    assert cp.ranks.calls == 1  # a call that was refused has no number
    with torch.no_grad() if rank == 0 else nullcontext():
        message = message_of(lambda: call_with(cp, needs_grad="q"))
    assert "ranks disagree on gradients: rank 0 has none, rank 1 has q" in message
    assert_works(cp)


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_that_disagree(world_size):
    """Catches a hang, a wrong answer, or an error on some ranks only; and a group that is of no use afterwards."""
    run(world_size, rank_disagrees)


def rank_fails_validation(rank, world_size):
    strict()
    cp = ContextParallel(timeout=PATIENCE)
    bad = [{"shape": (0, 5, 4, 8)}, {"kv_heads": 3}, {"backend": "sdpa"}, {"scale": float("nan")}]
    bad.append({"cu_seqlens": torch.tensor([0, 10])})
    for odd in range(world_size):
        for arguments in bad:
            message = message_of(
                lambda a=arguments, odd=odd: call_with(cp, **(a if rank == odd else {}))
            )
            own = message.removeprefix(f"rank {odd} refused the call: ")
            assert (own == message) == (rank == odd), message
            assert own == message_of(lambda a=arguments: call_with(None, **a)), message
        assert_works(cp)
    message = message_of(lambda: call_with(cp, scale=f"bad on {rank}"))  # all at once
    assert all(
        f"rank {k} refused the call: " in message and f"'bad on {k}'" in message
        for k in range(world_size)
    )
    assert_works(cp)
    # What only shows when the ranks' lengths are known is refused by all, and nothing was sent.
    message = message_of(lambda: call_with(cp, cu_seqlens=torch.tensor([0, 3], dtype=torch.int32)))
    assert f"the length of the sequence, {5 * world_size}" in message
    zigzag = ContextParallel(sharding="zigzag", timeout=PATIENCE)
    message = message_of(lambda: call_with(zigzag, shape=(1, 5 + 9 * (rank == 0), 4, 8)))
    assert "zigzag shards of" in message
    assert "ContextParallel.shard" in message
    assert_works(zigzag)
    assert_works(cp)


@pytest.mark.parametrize("world_size", [2, 3])
def test_one_rank_that_fails_its_validation(world_size):
    """Catches ranks that wait for one that has long raised, and a count of calls that is out of step afterwards."""
    run(world_size, rank_fails_validation)


def rank_goes_another_way(rank, world_size):
    strict()
    cp = ContextParallel(timeout=PATIENCE)
    first, second = (call_with(cp, needs_grad="qkv").sum() for _ in range(2))
    first.backward(retain_graph=True)
    again = (
        (lambda: first.backward(retain_graph=True))
        if rank == 0
        else (lambda: call_with(cp, needs_grad="qkv"))
    )
    message = message_of(again)
    assert "ranks disagree on call: rank 0 has backward 1, rank 1 has forward 3" in message
    message = message_of((first if rank == 1 else second).backward)
    assert "ranks disagree on call: rank 0 has backward 2, rank 1 has backward 1" in message
    message = message_of(
        (lambda: cp.unshard(torch.ones(1, 5))) if rank == 1 else lambda: call_with(cp)
    )
    assert "ranks disagree on call: rank 0 has forward 3, rank 1 has unshard" in message
    message = message_of(lambda: cp.unshard(torch.ones(1, 5), dim=rank % 2))
    assert "ranks disagree on dim: rank 0 has 0, rank 1 has 1" in message
    message = message_of(
        lambda: cp.unshard(torch.ones(1, 5, dtype=(torch.int32, torch.int64)[rank == 1]))
    )
    assert "ranks disagree on dtype: rank 0 has torch.int32, rank 1 has torch.int64" in message
    message = message_of(lambda: shift_left(cp, torch.ones(1 + rank, 5, dtype=torch.int64), fill=0))
    assert "ranks disagree on batch: rank 0 has 1, rank 1 has 2" in message
    message = message_of(lambda: all_reduce(cp.ranks, torch.ones(4 - 2 * (rank == 1))))
    assert "ranks disagree on shape: rank 0 has (4,), rank 1 has (2,)" in message
    message = message_of(
        lambda: all_reduce(cp.ranks, torch.ones(4, dtype=(torch.int32, torch.float32)[rank == 1]))
    )
    assert "ranks disagree on dtype: rank 0 has torch.int32, rank 1 has torch.float32" in message
    message = message_of(
        (lambda: all_reduce(cp.ranks, torch.ones(1))) if rank == 1 else first.backward
    )
    assert "ranks disagree on call: rank 0 has backward 1, rank 1 has all_reduce" in message
    message = message_of(lambda: cp.shard(torch.ones(1, 8 + 2 * (rank == 1))))
    assert "ranks disagree on length of the whole: rank 0 has 8, rank 1 has 10" in message
    assert (
        all_reduce(cp.ranks, torch.full((2,), 1.0 + rank)).tolist()
        == [world_size * (world_size + 1) / 2] * 2
    )
    assert_works(cp)


def rank_wants_another_context(rank, world_size):
    strict()
    even, uneven = (6,) * world_size, (5, 7, *[6] * (world_size - 2))
    options = {"align": (1, 8), "lengths": (even, uneven)}
    options |= {"sharding": ("contiguous", "zigzag"), "exchange": ("ring", "all_gather")}
    for name, values in options.items():
        message = message_of(
            lambda n=name, v=values: ContextParallel(**{n: v[rank == 1]}, timeout=PATIENCE)
        )
        assert (
            f"ranks disagree on {name}: rank 0 has {values[0]}, rank 1 has {values[1]}" in message
        )
    bad = [
        {"lengths": (1, 2, 3, 4, 5)},
        {"sharding": "diagonal"},
        {"timeout": 3},
        {"align": 0},
        {"exchange": "simulator"},
    ]
    for odd in range(world_size):
        for arguments in bad:
            started = time.monotonic()
            message = message_of(
                lambda a=arguments, odd=odd: ContextParallel(**(a if rank == odd else {}))
            )
            assert (f"rank {odd} refused the call: " in message) == (rank != odd), message
            assert next(iter(arguments)) in message
            assert time.monotonic() - started < 15
    assert_works(ContextParallel(timeout=PATIENCE))  # what was refused ruins nothing


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_that_want_other_contexts(world_size):
    """Catches a constructor that is refused on one rank while the others wait, and one that ruins every later one."""
    run(world_size, rank_wants_another_context)


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_that_go_different_ways(world_size):
    """Catches the message of one call that is taken for that of another: of a wrong size it would end the process."""
    run(world_size, rank_goes_another_way)


# Ranks that fail.


def dense_call(cp, backward=False, length=5):
    """Sends something at every hop."""
    x = torch.ones(1, length, 4, 8, requires_grad=True)
    out = dilated_attention(x, x, x, DilatedPattern((10**6,), (1,)), parallel=cp)
    if backward:
        out.sum().backward()


def rank_cannot_copy_its_rows(rank, world_size):
    cp = ContextParallel(timeout=PATIENCE)
    x = torch.ones(1, 5, 4, 8, requires_grad=True)
    # kernels need a last stride of 1, and no memory holds such a copy
    vast = torch.ones(1).expand(1, 2**45, 4, 8)
    message = message_of(
        lambda: dilated_attention(*[vast if rank else x] * 3, PATTERN, parallel=cp)
    )
    assert ("rank 1 refused the call" in message) == (rank == 0), message
    assert "allocate" in message

    def fail(_):
        raise RuntimeError("no memory left")

    for place, name, used in ((attention, "with_unit_stride", 0), (torch, "zeros_like", 1)):
        results, right = (
            dilated_attention(x, x, x, PATTERN, parallel=cp, return_lse=True),
            getattr(place, name),
        )
        setattr(place, name, fail if rank else right)
        message = message_of(lambda y=results[used]: y.sum().backward())
        setattr(place, name, right)
        assert ("rank 1 refused the call" in message) == (rank == 0), message
        assert "no memory left" in message
    assert_works(cp)


def test_one_rank_without_memory_before_a_handshake():
    """Catches a copy that is made where its failure is not told: the others would wait for the timeout."""
    run(2, rank_cannot_copy_its_rows)


def rank_has_no_use_for_its_output(rank, world_size):
    cp = ContextParallel(timeout=timedelta(seconds=3))
    x = torch.randn(1, 5, 4, 8, requires_grad=True)
    out = dilated_attention(x, x, x, PATTERN, parallel=cp)
    (x.sum() + 0 * out.sum() if rank == 0 else out.sum()).backward()
    assert not torch.equal(x.grad, torch.ones_like(x))  # the other rank's queries see these keys


def test_a_rank_that_has_no_use_for_its_output():
    """Catches a remedy in the docstrings that is none."""
    run(2, rank_has_no_use_for_its_output)


# ContextParallel's own functions.

SPLITS = [
    (23, {}),
    (23, {"sharding": "zigzag"}),
    (2, {"sharding": "zigzag"}),
    (1, {}),
    (23, {"align": 8}),
    (23, {"lengths": "uneven"}),
    (23, {"lengths": "one has all"}),
]


def contexts(rank, world_size):
    """A context of each kind, with the length of its sequence and the global positions of this rank's rows."""
    for n, options in SPLITS:
        options = dict(options)
        if options.get("lengths") == "uneven":
            options["lengths"] = (5, 0, 18, *[0] * world_size)[:world_size]
            n = sum(options["lengths"])
        elif "lengths" in options:
            options["lengths"] = (*[0] * (world_size - 1), n)
        cp = ContextParallel(**options)
        mine = expected_rows(n, world_size, rank, options)
        yield cp, n, mine


def expected_rows(n, world_size, rank, options):
    """The global positions of a rank's rows, written down apart from the code."""

    def cuts(slices, unit=1):
        units = -(-n // unit)
        sizes = [units // slices + (i < units % slices) for i in range(slices)]
        borders = [min(sum(sizes[:i]) * unit, n) for i in range(slices + 1)]
        return [list(range(a, b)) for a, b in zip(borders, borders[1:], strict=False)]  # noqa: RUF007

    if options.get("sharding") == "zigzag":
        slices = cuts(2 * world_size)
        return slices[rank] + slices[-1 - rank]
    if "lengths" in options:
        start = sum(options["lengths"][:rank])
        return list(range(start, start + options["lengths"][rank]))
    return cuts(world_size, options.get("align", 1))[rank]


def rank_shards(rank, world_size):
    strict()
    for cp, n, mine in contexts(rank, world_size):
        for dim, shape in [
            (1, (2, n, 3)),
            (0, (n,)),
            (-1, (2, 1, n)),
            (-2, (n, 2)),
            (-3, (n, 2, 1)),
            (2, (1, 2, n, 2)),
        ]:
            for dtype in (torch.float64, torch.bfloat16, torch.int64, torch.bool):
                full = (
                    torch.randn(shape, generator=torch.Generator().manual_seed(1)).mul(3).to(dtype)
                )
                local = cp.shard(full, dim=dim)
                assert torch.equal(
                    local, full.index_select(dim, torch.tensor(mine, dtype=torch.int64))
                )
                assert torch.equal(cp.unshard(local, dim=dim), full)
            full, weight = (
                torch.randn(shape, generator=torch.Generator().manual_seed(s)) for s in (1, 2)
            )
            leaf = full.requires_grad_()
            (cp.shard(leaf, dim=dim) * cp.shard(weight, dim=dim)).sum().backward()
            torch.testing.assert_close(leaf.grad, weight / world_size)  # all of it, on every rank
            leaf = cp.shard(full.detach(), dim=dim).requires_grad_()
            (cp.unshard(leaf, dim=dim) * weight).sum().backward()
            torch.testing.assert_close(leaf.grad, cp.shard(weight * world_size, dim=dim))
        not_contiguous = torch.randn(
            3, n, generator=torch.Generator().manual_seed(1)
        ).T.requires_grad_()
        assert torch.equal(cp.unshard(cp.shard(not_contiguous, dim=0), dim=0), not_contiguous)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_shard_and_unshard(world_size):
    """Catches a gradient that is a rank's own part; rows in the wrong order; an empty rank."""
    run(world_size, rank_shards)


def rank_knows_positions(rank, world_size):
    strict()
    for cp, n, mine in contexts(rank, world_size):
        assert cp.positions(n).tolist() == mine
        assert cp.positions(n).dtype == torch.int64
        for documents in ([0, n], [0, n // 3, n // 3 + 1, n], [0, *range(1, n), n]):
            borders = sorted(set(documents))
            expected = [t - max(b for b in borders if b <= t) for t in mine]
            assert cp.positions(n, torch.tensor(borders, dtype=torch.int32)).tolist() == expected
        for dtype in (torch.int64, torch.int32, torch.uint8):
            full = torch.randint(0, 200, (2, n), generator=torch.Generator().manual_seed(1)).to(
                dtype
            )
            following = torch.cat([full[:, 1:], torch.full_like(full[:, :1], 77)], dim=1)
            assert torch.equal(shift_left(cp, cp.shard(full), fill=77), cp.shard(following))


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_positions_and_labels(world_size):
    """Catches rotary positions that start anew on every rank, and labels that stop at the border of a shard."""
    run(world_size, rank_knows_positions)


def rank_of_a_group(rank, world_size):
    strict()
    pair = [0, 1] if rank < 2 else [2, 3]
    groups = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    cp = ContextParallel(groups[rank // 2])
    assert (cp.world_size, cp.rank) == (2, pair.index(rank))
    assert_works(cp)
    message = message_of(lambda: call_with(cp, scale=1.0 + rank))
    # ranks of the job
    assert f"rank {pair[0]} has {1.0 + pair[0]}, rank {pair[1]} has {1.0 + pair[1]}" in message
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "dp"))
    across = ContextParallel(mesh["cp"])  # ranks 0 and 2, 1 and 3
    everyone, twin = ContextParallel(), ContextParallel(groups[rank // 2])
    for context in (across, everyone, twin, cp):
        assert_works(context)
    if rank < 2:  # the other group does something else meanwhile
        for _ in range(3):
            call_with(cp, shape=(2, 7, 2, 4), kv_heads=1, pattern=DilatedPattern((100,), (3,)))
    else:
        assert_works(cp)
    message = message_of(lambda: ContextParallel(DeviceMesh("cpu", torch.arange(4).view(1, 2, 2))))
    assert "3 axes" in message
    assert "mesh['cp']" in message
    # torch's own groups of all ranks, as a mesh makes them, would hang after this since torch 2.14
    if rank != 3:
        trio = dist.new_group([0, 1, 2], use_local_synchronization=True)
        assert_works(ContextParallel(trio))  # rank 3 knows nothing of it
    dist.barrier()


def test_groups_of_some_ranks():
    """Catches ranks of the job that are taken for ranks of the group, groups that disturb each other, and a group whose
    making waits for ranks that are not in it."""
    run(4, rank_of_a_group)


def rank_forgets_its_context(rank, world_size):
    strict()
    x = torch.ones(1, 5, 4, 8, requires_grad=True)

    def output():
        return dilated_attention(x, x, x, DilatedPattern((100,), (1,)), parallel=ContextParallel())

    out = output()
    gc.collect()
    out.sum().backward()
    assert x.grad.isfinite().all()
    x = torch.ones(1, 5 * (rank == 0), 300, 8)  # 300 heads: no warning where a rank owns little
    assert dilated_attention(x, x, x, PATTERN, parallel=ContextParallel()).shape == x.shape


def test_a_context_lives_as_long_as_its_graph():
    """Catches a backward that no longer finds its group, and a warning about short sequences for a short shard."""
    run(2, rank_forgets_its_context)


# The numbers.


def test_a_simulated_rank_that_fails(monkeypatch):
    """Catches one that fails and leaves the others waiting."""
    cp = simulate.all_ranks(4)
    whole, countdown = cpu.forward, iter([False] * 5 + [True])

    def fail(*arguments):
        if next(countdown, False):
            raise MemoryError("no memory left")
        return whole(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(cpu, "forward", fail)
        assert "no memory left" in message_of(lambda: dense_call(cp, length=20), MemoryError)
    dense_call(cp, length=20, backward=True)


def rank_measures_memory(rank, world_size):
    """Peak of forward and backward under each exchange, in local tensors."""
    sizes, peaks = Sizes(512 * world_size, 4, 64), {}
    for exchange in ("ring", "all_gather"):
        cp = ContextParallel(exchange=exchange)
        call = dilated_call(sizes, DilatedPattern((sizes.seq_len,), (1,)), cp)
        call()  # what is made once is not the call's
        peaks[exchange] = allocated(call).peak_bytes / (512 * 4 * 64 * 4)
    return peaks


def test_gathered_chunks_are_there_once():
    """Catches copies of what was gathered: what it costs is all others' chunks and their gradients, no more."""
    for peaks in run(4, rank_measures_memory):
        of_ring, of_all_gather = 2 * 2 + 2 * 2, 3 * (2 + 2)
        assert peaks["all_gather"] - peaks["ring"] == pytest.approx(
            of_all_gather - of_ring, abs=0.5
        )


def rank_in_float32(rank, world_size):
    strict()
    pattern = DilatedPattern((32, 128, 211), (1, 2, 3), is_causal=True)
    generator = torch.Generator().manual_seed(5)
    full = [torch.randn(2, 211, h, 24, generator=generator) for h in (6, 3, 3)]
    dout, dlse = (
        torch.randn(shape, generator=generator) for shape in ((2, 211, 6, 24), (2, 211, 6))
    )
    leaves = [x.double().requires_grad_() for x in full]
    exact = dilated_attention_reference(*leaves, pattern)
    exact += torch.autograd.grad(exact, leaves, [dout.double(), dlse.double()])
    leaves = [x.clone().requires_grad_() for x in full]
    alone = dilated_attention(*leaves, pattern, return_lse=True)
    alone += torch.autograd.grad(alone, leaves, [dout, dlse])
    for options in ({}, {"sharding": "zigzag"}, {"exchange": "all_gather"}):
        cp = ContextParallel(**options)
        runs = []
        for _ in range(2):
            local = [cp.shard(x).requires_grad_() for x in full]
            results = dilated_attention(*local, pattern, parallel=cp, return_lse=True)
            results += torch.autograd.grad(results, local, [rows_of(cp, dout), rows_of(cp, dlse)])
            runs.append(results)
        assert all(map(torch.equal, *runs))
        for name, x, y, z in zip(
            ("out", "lse", "dq", "dk", "dv"), runs[0], alone, exact, strict=True
        ):
            errors = [relative_error(r, z) for r in (cp.unshard(x), y)]
            # One device holds the tolerance against torch (test_attention.py); so does half of twice its error.
            assert errors[0] <= 1.5 * errors[1] + torch.finfo(torch.float32).eps / 4, (
                name,
                options,
                errors,
            )


@pytest.mark.parametrize("world_size", [2, 3])
def test_float32_on_many_ranks_is_as_good_as_on_one(world_size):
    """Catches partials that lose bits on their way, and results that differ from run to run."""
    run(world_size, rank_in_float32)


def rank_holds_nan(rank, world_size, exchange):
    """Segments of 16 straddle ranks of 10 positions; chunks of two segments, and of four heads, share a buffer."""
    strict()
    pattern = DilatedPattern((4, 16), (1, 2))
    cp = ContextParallel(exchange=exchange)
    generator = torch.Generator().manual_seed(5)
    full = [torch.randn(2, 30, h, 8, dtype=torch.float64, generator=generator) for h in (4, 2, 2)]

    def results(tensors):
        local = [cp.shard(x).requires_grad_() for x in tensors]
        out = dilated_attention(*local, pattern, parallel=cp, return_lse=True)
        grads = torch.autograd.grad([x.sin().sum() for x in out], local)
        return [cp.unshard(x.detach()) for x in (*out, *grads)]

    clean = results(full)
    for which in range(3):
        for bad in (torch.nan, torch.inf):
            tensors = [x.clone() for x in full]
            tensors[which][1, 9, -1, 0] = bad  # batch entry 1, segment 0..15, the last head
            spoilt = results(tensors)
            for name, x, y in zip(("out", "lse", "dq", "dk", "dv"), spoilt, clean, strict=True):
                assert torch.equal(x[0], y[0]), (name, which)
                assert torch.equal(x[1, 16:], y[1, 16:]), (name, which)
                assert torch.equal(x[1, :, 0], y[1, :, 0]), (name, which)
            assert not torch.equal(spoilt[0], clean[0])


@pytest.mark.parametrize("exchange", ["ring", "all_gather"])
def test_nan_and_inf_stay_in_their_segments_on_many_ranks(exchange):
    """Catches 0 * NaN in merging, and a buffer whose other chunks are touched."""
    run(3, rank_holds_nan, exchange)


def rank_has_other_defaults(rank, world_size):
    """torch.set_default_device("cuda") is common; "meta" shows even where there is no GPU."""
    cp = ContextParallel()
    torch.set_default_dtype(torch.float64)
    assert_works(cp)
    x = torch.randn(1, 5, 4, 8, requires_grad=True)
    labels = torch.arange(5)[None]
    borders = torch.tensor([0, 3, 5 * world_size], dtype=torch.int32)
    dout = torch.ones_like(x)
    with torch.device("meta"):
        out, lse = dilated_attention(
            x, x, x, PATTERN, parallel=cp, cu_seqlens=borders, return_lse=True
        )
        (grad,) = torch.autograd.grad([out, lse], x, [dout, lse.detach()])
        assert grad.isfinite().all()
        assert cp.positions(10, borders).device == torch.device("cpu")
        assert shift_left(cp, labels, fill=-1).tolist() == [
            [1, 2, 3, 4, -1 if rank == world_size - 1 else 0]
        ]
        assert cp.unshard(cp.shard(labels)).tolist() == labels.tolist()
        message = message_of(
            lambda: dilated_attention(x, x, x, PATTERN, parallel=cp, scale=1.0 + rank)
        )
        assert "ranks disagree on scale" in message


def test_other_defaults_of_torch():
    """Catches a record or an index that is made on the default device, where the control group cannot send it."""
    run(2, rank_has_other_defaults)


# Compilation.


def eager_and_compiled(cp=None, backend="aot_eager"):
    generator = torch.Generator().manual_seed(5)
    full = [torch.randn(2, 21, h, 8, generator=generator) for h in (4, 2, 2)]
    results = []

    def function(query, key, value):
        out, lse = dilated_attention(query * 2, key, value, PATTERN, parallel=cp, return_lse=True)
        return out.sin().sum() + lse.square().sum()

    def without_lse(query, key, value):
        return dilated_attention(query, key, value, PATTERN, parallel=cp).cos().sum()

    for f in (function, without_lse):
        for run_it in (f, torch.compile(f, fullgraph=True, backend=backend)):
            local = [x.clone() if cp is None else cp.shard(x) for x in full]
            local = [x.requires_grad_() for x in local]
            loss = run_it(*local)
            results.append([loss.detach(), *torch.autograd.grad(loss, local)])
    for eager, compiled in (results[:2], results[2:]):
        for x, y in zip(eager, compiled, strict=True):
            assert torch.equal(x, y)


def rank_compiles(rank, world_size):
    torch.use_deterministic_algorithms(True)
    cp = ContextParallel()
    eager_and_compiled(cp)
    assert cp.ranks.calls == 4


def test_compiled_equals_eager_on_two_ranks():
    """Catches an exchange that is compiled away, reordered, or done once where it was twice."""
    run(2, rank_compiles)


def rank_compiles_what_it_does_not_use(rank, world_size):
    cp = ContextParallel(timeout=PATIENCE)

    def function(first, second, num_used):
        """Without sums, nor gradients that are added: inductor would compile C++ for each, for ten seconds."""
        outs = [dilated_attention(*tensors, PATTERN, parallel=cp) for tensors in (first, second)]
        return first[0].detach()[0, 0] @ second[0].detach()[0, 0].T, *outs[:num_used]

    compiled = torch.compile(
        function, fullgraph=True, backend="inductor", dynamic=True, options=PLAIN
    )
    for num_used in (0, 1):
        for needs_grad in (False, True):
            before = cp.ranks.calls
            calls = [
                [torch.randn(1, 5 + num_used, 4, 8, requires_grad=needs_grad) for _ in "qkv"]
                for _ in range(2)
            ]
            expected = function(*calls, num_used if rank == 1 else 2)
            torch.testing.assert_close(compiled(*calls, num_used if rank == 1 else 2), expected)
            assert cp.ranks.calls == before + 4


def test_a_rank_that_does_not_use_what_it_compiled():
    """Catches a call that the compiler drops on one rank, of two in a graph the first too: the other would wait."""
    run(2, rank_compiles_what_it_does_not_use, seconds=120)


def rank_recomputes_in_compiled_code(rank, world_size):
    warnings.simplefilter("error")
    cp = ContextParallel(timeout=PATIENCE)

    def block(x):
        return dilated_attention(x.sin(), x, x, PATTERN, parallel=cp).square()

    def function(x):
        return (
            x.cos().sum()
            + checkpoint(block, x, use_reentrant=False, context_fn=attention.save_attention).sum()
        )

    x = torch.randn(1, 5, 4, 8, requires_grad=True)
    (plain,) = torch.autograd.grad(x.cos().sum() + block(x).sum(), x)
    assert cp.ranks.calls == 1
    (expected,) = torch.autograd.grad(function(x), x)
    assert torch.equal(expected, plain)
    (gradient,) = torch.autograd.grad(
        torch.compile(function, fullgraph=True, backend="aot_eager")(x), x
    )
    torch.testing.assert_close(gradient, expected)
    assert cp.ranks.calls == 3
    checkpoint(block, x, use_reentrant=False).sum().backward()
    assert cp.ranks.calls == 5  # without the policy attention is computed twice


def test_recomputation_sends_nothing_twice():
    """Catches a write that keeps the call in the graph and makes checkpointing repeat it."""
    run(2, rank_recomputes_in_compiled_code)


# Threads.


def sample(number: int) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Query, key and value of 10 positions, and what dilated attention makes of them."""
    generator = torch.Generator().manual_seed(number)
    full = [torch.randn(1, 10, 4, 8, dtype=torch.float64, generator=generator) for _ in range(3)]
    return full, dilated_attention(*full, PATTERN)


def in_threads(*works: Callable[[], None]) -> list[Exception | None]:
    """What each raised. They begin together."""
    errors: list[Exception | None] = [None] * len(works)
    barrier = threading.Barrier(len(works))

    def one(i: int) -> None:
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


def compute(cp: ContextParallel, rank: int, samples: list) -> None:
    """Forward and backward of each sample, whose numbers must be right."""
    for full, expected in samples:
        leaves = [x[:, 5 * rank : 5 * rank + 5].clone().requires_grad_() for x in full]
        out = dilated_attention(*leaves, PATTERN, parallel=cp)
        torch.testing.assert_close(
            out, expected[:, 5 * rank : 5 * rank + 5], rtol=1e-11, atol=1e-11
        )
        out.sum().backward()


def rank_uses_a_context_in_four_threads(rank, world_size):
    strict()
    samples = [sample(number) for number in range(4)]
    cp = ContextParallel(timeout=PATIENCE)
    errors = in_threads(*[lambda: compute(cp, rank, samples)] * 4)
    assert all(error is None or type(error) is RefusedError for error in errors), errors
    refused = [error for error in errors if error is not None]
    assert len(refused) >= 3  # at most the owner had come to its end before
    # another may win per rank
    reasons = ("belongs to the thread of its first call", "the name of the calling thread")
    assert all(any(reason in str(error) for reason in reasons) for error in refused), refused
    both = [ContextParallel(timeout=PATIENCE) for _ in range(2)]
    assert in_threads(*[lambda cp=cp: compute(cp, rank, samples) for cp in both]) == [None, None]


def test_four_threads_of_one_context():
    """Catches threads that take each other's messages: of another size these end the process, else numbers are wrong.
    Two contexts in two threads disturb each other in nothing."""
    run(2, rank_uses_a_context_in_four_threads)


def rank_leaves_the_owner(rank, world_size):
    """Rank 1 makes each call in another thread than before: both are refused it, and the context serves on."""
    strict()
    cp = ContextParallel(timeout=PATIENCE)
    x = torch.randn(1, 5, 4, 8, requires_grad=True)
    out = dilated_attention(x, x, x, PATTERN, parallel=cp)
    batch = {"x": torch.zeros(1, 10)}
    labels = torch.zeros(1, 5, dtype=torch.int64)
    layer = MultiheadDilatedAttention(32, 4, PATTERN, parallel=cp)
    deeds = [
        lambda: dilated_attention(x, x, x, PATTERN, parallel=cp),
        lambda: layer(*[x.flatten(2)] * 3),
        lambda: out.sum().backward(retain_graph=True),
        lambda: cp.shard(torch.zeros(1, 10)),
        lambda: cp.shard_batch(batch),
        lambda: cp.shard_batch(batch if rank == 0 else None, source=0),
        lambda: cp.unshard(labels),
        lambda: cp.mean_loss(x.sum(), 3),
        lambda: shift_left(cp, labels, 0),
        lambda: dilated_attention(x, x, x[:, :2], PATTERN, parallel=cp),  # which cannot be, at that
    ]
    for deed in deeds:
        said = message_of(deed) if rank == 0 else str(in_threads(deed)[0])
        assert (
            "belongs to the thread of its first call, 'MainThread', until close(). Make all calls"
            in said
        )
        assert ("rank 1 refused the call: thread 'Thread-" in said) == (
            rank == 0 or deed is deeds[-1]
        )
    for deed in deeds[:-1]:
        deed()
    assert torch.isfinite(x.grad).all()


def test_a_call_in_another_thread():
    """Catches a thread that is refused on its rank alone: the others would wait for it."""
    run(2, rank_leaves_the_owner)


class Nest(torch.autograd.Function):
    """Backward within backward, so deep that autograd goes on in a thread of its own, as it does for a GPU."""

    @staticmethod
    def forward(ctx, x, depth, innermost):
        ctx.rest = depth, innermost
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        depth, innermost = ctx.rest
        with torch.enable_grad():
            if depth:
                Nest.apply(
                    torch.zeros(1, requires_grad=True), depth - 1, innermost
                ).sum().backward()
            else:
                innermost()
        return grad, None, None


def rank_recomputes_in_a_thread_of_autograd(rank, world_size):
    strict()
    cp = ContextParallel(timeout=PATIENCE)
    x = torch.randn(1, 5, 4, 8, dtype=torch.float64, requires_grad=True)
    out = checkpoint(
        lambda x: dilated_attention(x, x, x, PATTERN, parallel=cp), x, use_reentrant=False
    )
    threads = []

    def innermost() -> None:
        threads.append(threading.current_thread())
        out.sin().sum().backward()

    Nest.apply(torch.zeros(1, requires_grad=True), 80, innermost).sum().backward()
    assert threads != [threading.main_thread()]
    [found], x.grad = [x.grad], None
    dilated_attention(x, x, x, PATTERN, parallel=cp).sin().sum().backward()
    torch.testing.assert_close(found, x.grad, rtol=1e-12, atol=1e-12)


def test_threads_of_autograd_count_as_the_owner():
    """Catches a backward, with what it recomputes, that is refused where autograd runs it in a thread of its own."""
    run(2, rank_recomputes_in_a_thread_of_autograd)


def rank_runs_out_of_memory(rank, world_size, stage):
    strict()
    cp = ContextParallel(timeout=timedelta(seconds=60))
    dense_call(cp, backward=True)
    whole = getattr(cpu, stage)
    if rank == 1:

        def fail(*_):
            raise MemoryError("no memory left")

        setattr(cpu, stage, fail)
    start = time.monotonic()
    message = message_of(
        lambda: dense_call(cp, backward=True), MemoryError if rank == 1 else ExchangeError
    )
    assert time.monotonic() - start < 20
    assert rank == 1 or f", rank {rank})" in message, message
    # The messages of a forward may be over when a kernel fails. The handshake of a known call may not be.
    names = ("backward, ", "rank 1 did not enter backward 2")
    assert rank == 1 or stage == "forward" or any(name in message for name in names), message
    assert "no memory left" in message or rank != 1
    setattr(cpu, stage, whole)
    message = message_of(lambda: dense_call(cp), ExchangeError)
    assert "Make a new ContextParallel" in message
    dist.barrier()
    assert_works(ContextParallel())  # which is what the message says


@pytest.mark.parametrize("stage", ["forward", "backward"])
def test_a_rank_that_fails_alone(stage):
    """Catches a rank whose error leaves the others waiting: they must fail at once. The user's groups stay whole."""
    run(3, rank_runs_out_of_memory, stage)


def rank_begins_in_a_thread_of_another_name(rank, world_size):
    """As when threads race for the first call, and another one wins on each rank."""
    cp, errors = ContextParallel(timeout=PATIENCE), []
    samples = [sample(number) for number in range(2)]

    def call(number):
        errors.append(message_of(lambda: compute(cp, rank, samples[number:])))

    for number in (0, 1) if rank == 0 else (1, 0):  # the first of them is the owner
        thread = threading.Thread(target=call, args=(number,), name=f"worker {number}")
        thread.start()
        thread.join()
    assert "rank 0 has worker 0, rank 1 has worker 1" in errors[0]
    assert "belongs to the thread of its first call" in errors[1]


def test_another_thread_is_first_on_each_rank():
    """Catches ranks that exchange the data of different threads without a word."""
    run(2, rank_begins_in_a_thread_of_another_name)
