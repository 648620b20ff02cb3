"""Results of tiles that are kept, and gathered in one pass: whole calls on the CPU, where the definitions in plain
torch (`run/merge.py`) stand in for the kernels; the steps of a program; and what a call on a GPU launches and holds.
"""

import sys
from itertools import product
from unittest.mock import Mock

import pytest
import torch
from helpers import randn
from torch.utils._python_dispatch import TorchDispatchMode

from ring_dilated_attention import DilatedCache, DilatedPattern, dilated_attention, simulate
from ring_dilated_attention.kernels import cpu, rows_at_once, sdpa
from ring_dilated_attention.layers import multihead, rotary
from ring_dilated_attention.models import LongNetConfig, LongNetLM, longnet
from ring_dilated_attention.plan.exchange import plan_exchange
from ring_dilated_attention.plan.program import make_program
from ring_dilated_attention.plan.sharded_call import ShardedCall
from ring_dilated_attention.plan.sharding import make_shards
from ring_dilated_attention.plan.step import CallFacts, Gather
from ring_dilated_attention.run.merge import PLAIN
from ring_dilated_attention.run.views import on_device

pytestmark = pytest.mark.usefixtures("nan_in_new_memory")


@pytest.fixture(params=["whole", "blocks of heads", "lse in multiples of 32"])
def gathering(request, monkeypatch):
    """The CPU's kernel, as if its results were gathered as on a GPU."""

    def use():
        kept_bytes = 4096 if request.param == "blocks of heads" else 2**29
        traits = cpu.TRAITS._replace(packing=None, kept_bytes=kept_bytes)
        monkeypatch.setattr(cpu, "TRAITS", traits)
        multiple = 32 if request.param == "lse in multiples of 32" else 1
        monkeypatch.setattr(cpu, "merging", lambda query: PLAIN._replace(lse_multiple=multiple))
        if multiple > 1:
            monkeypatch.setattr(cpu, "backward", without_added_rows(cpu.backward))

    return use


def without_added_rows(backward):
    def checked(rows, is_causal, scale):
        num_rows = rows.query.shape[2]
        assert rows.lse.shape[2] == num_rows + -num_rows % 32
        assert (rows.lse[..., num_rows:] == torch.inf).all()
        return backward(rows._replace(lse=rows.lse[..., :num_rows].contiguous()), is_causal, scale)

    return checked


# (pattern, positions, query heads, key/value heads, batch), and what more there is to the call
CALLS = {
    "the paper's rates": ((DilatedPattern((8, 16, 32, 64, 128), (1, 2, 4, 6, 12)), 101, 12, 12, 1), {}),
    "causal": ((DilatedPattern((8, 37), (1, 3), is_causal=True), 37, 4, 4, 2), {}),
    "rows without a partial": ((DilatedPattern((8, 37), (3, 5)), 41, 2, 2, 2), {}),
    "shared keys": ((DilatedPattern((9, 37), (1, 2), is_causal=True), 41, 6, 2, 1), {}),
    "one head of keys": ((DilatedPattern((9, 37), (2, 3)), 41, 6, 1, 2), {}),
    "blocked": ((DilatedPattern((9, 37), (1, 4), phase="blocked"), 41, 6, 6, 1), {}),
    "split": ((DilatedPattern((9, 20, 41), (1, 2, 3), heads="split"), 41, 7, 7, 2), {}),
    "window": ((DilatedPattern((37,), (3,), window=9, is_causal=True), 41, 4, 2, 1), {}),
    "centred window": ((DilatedPattern.sliding(8), 41, 4, 4, 2), {}),
    # tiles of many sizes, some of them of one row
    "documents": (
        (DilatedPattern((24, 100), (1, 3), is_causal=True), 70, 4, 2, 1),
        {"cu_seqlens": torch.tensor([0, 1, 2, 33, 34, 70], dtype=torch.int32)},
    ),
    "no rows": ((DilatedPattern((4,), (1,)), 0, 2, 2, 1), {}),
}  # fmt: skip
# On several ranks a hop must not overwrite what others left, gradients of chunks are sent and not kept, and one rank
# owns nothing.
OVER_RANKS = [
    ("causal", "contiguous", 2),
    ("shared keys", "contiguous", 2),
    ("causal", "zigzag", 5),
    ("shared keys", "zigzag", 5),
    ("no rows", "contiguous", 3),
]


def results(pattern, n, num_heads, num_kv_heads, batch, dtype=torch.float64, **kwargs):
    torch.manual_seed(1)
    heads = (num_heads, num_kv_heads, num_kv_heads)
    inputs = [randn(batch, n, h, 16).to(dtype) for h in heads]
    leaves = [x.requires_grad_() for x in inputs]
    out, lse = dilated_attention(*leaves, pattern, return_lse=True, **kwargs)
    is_covered = lse > -torch.inf
    root = out.sin().sum() + lse.where(is_covered, 0).square().sum()
    return [out, lse, *torch.autograd.grad(root, leaves)]


@pytest.mark.parametrize(
    ("name", "sharding", "num_ranks"), [*((name, "contiguous", 1) for name in CALLS), *OVER_RANKS]
)
def test_a_call(gathering, name, sharding, num_ranks):
    """Catches a row that is written twice, from another tile, or not at all; a block of heads that touches others; and
    results of one batch entry that go to another."""
    call, more = CALLS[name]
    expected = results(*call, **more)
    gathering()
    parallel = simulate.all_ranks(num_ranks, sharding=sharding) if num_ranks > 1 else None
    torch.testing.assert_close(
        results(*call, **more, parallel=parallel), expected, rtol=1e-12, atol=1e-12
    )


@pytest.mark.parametrize("is_gathered", [False, True])
@pytest.mark.parametrize("name", ["causal", "shared keys", "one head of keys"])
def test_calls_of_one_head_and_segment(gathering, monkeypatch, name, is_gathered):
    """Catches gradients of a key that query heads in calls of their own overwrite, or leave out."""
    call, more = CALLS[name]
    expected = results(*call, **more)
    if is_gathered:
        gathering()
    few_rows = cpu.TRAITS._replace(packing=None, most_rows=lambda head_dim, has_dlse: 1)
    monkeypatch.setattr(cpu, "TRAITS", few_rows)
    torch.testing.assert_close(results(*call, **more), expected, rtol=1e-12, atol=1e-12)


def test_appending_to_a_cache(gathering):
    """Catches partials of cached rows that are not merged with those of new rows."""
    pattern = DilatedPattern((8, 37), (1, 3), is_causal=True)
    inputs = [randn(1, 37, h, 16) for h in (4, 2, 2)]
    expected = dilated_attention(*inputs, pattern)
    gathering()
    cache = DilatedCache(pattern, 1, 4, 2, 16, dtype=torch.float64)
    slices = zip(*(x.split(10, dim=1) for x in inputs), strict=True)
    found = [dilated_attention(*rows, pattern, cache=cache) for rows in slices]
    torch.testing.assert_close(torch.cat(found, dim=1), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_dtypes(gathering, dtype):
    """Catches sums in 16 bits: results differ from those of float64 by the rounding of inputs, partials and results."""
    call, _ = CALLS["the paper's rates"]
    exact = results(*call)
    gathering()
    for x, y in zip(results(*call, dtype=dtype), exact, strict=True):
        assert (x.double() - y).norm() <= 4 * torch.finfo(dtype).eps * y.norm()


def test_blocks_of_heads_gather_once_for_each_hop():
    """Catches a merge for each tile of a hop, and blocks that miss a head or have one twice."""
    shards = make_shards("contiguous", (64,) * 4)
    plan = plan_exchange(
        "ring", ShardedCall(DilatedPattern((64, 256), (1, 2)), shards, 4, 4), 0
    ).plan
    for stage, kept_rows in product(("forward", "backward"), (10**6, 100)):
        program = make_program(plan, stage, CallFacts(kept_rows=kept_rows))
        gathers = [step for step in program if isinstance(step, Gather)]
        assert [head for step in gathers for head in step.kv_heads] == 4 * [0, 1, 2, 3]
        num_local = sum(not step.adds for step in gathers)
        assert [step.adds for step in gathers[num_local:]] == [True] * (len(gathers) - num_local)
        gives_dk = [step.names == ("dq", "dk", "dv") for step in gathers]
        assert sum(gives_dk) == (num_local if stage == "backward" else 0)
        if kept_rows == 100:
            assert num_local == 4
        else:
            assert len(gathers) == 4


@pytest.mark.parametrize(
    ("source", "target", "steps"),
    [
        ("cpu", "cuda:0", ["pin_memory", "to"]),
        ("cuda:0", "cuda:0", ["to"]),
        ("cpu", "cpu", ["to"]),
    ],
)
def test_what_goes_to_a_gpu_does_not_block(source, target, steps):
    """Catches a copy from pageable memory, for which the host waits until the GPU has done all else."""
    x = Mock(device=torch.device(source))
    x.pin_memory.return_value = x
    on_device(x, torch.device(target))
    assert [name for name, *_ in x.method_calls] == steps
    x.to.assert_called_once_with(torch.device(target), non_blocking=True)


class ToTheDevice(TorchDispatchMode):
    """Notes each op that makes a tensor on the device "meta" of one on the CPU."""

    def __init__(self):
        super().__init__()
        self.shapes = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        tensors = [x for x in args if isinstance(x, torch.Tensor)]
        if getattr(found, "is_meta", False) and any(x.device.type == "cpu" for x in tensors):
            self.shapes.append(tuple(found.shape))
        return found


def test_positions_of_documents_do_not_block(monkeypatch):
    """Catches positions and labels of packed documents that reach a model by a copy of another kind, also beside the
    copies that do not block."""
    taken = []

    def counted(x, device):
        if x.device != device:
            taken.append(tuple(x.shape))
        return on_device(x, device)

    for module in (longnet, rotary, multihead):
        monkeypatch.setattr(module, "on_device", counted)
    config = LongNetConfig((4,), (1,), num_layers=1, num_heads=2, embed_dim=16)
    model = LongNetLM(config).to("meta")
    alone = multihead.MultiheadDilatedAttention(16, 2, config.pattern, rotary=True).to("meta")
    borders = torch.tensor([0, 3, 8], dtype=torch.int32)
    x = torch.zeros(1, 8, 16, device="meta")
    with ToTheDevice() as copies:
        tokens = torch.zeros(1, 8, dtype=torch.uint8, device="meta")
        model.loss(tokens, cu_seqlens=borders).backward()
        alone(x, x, x, cu_seqlens=borders)
    # the last labels of documents, and borders or positions
    assert sorted(taken) == [(2,), (3,), (8,)]
    assert sorted(copies.shapes) == sorted(taken)


def test_without_triton_a_warning_says_so(monkeypatch):
    """Catches a slower way that is taken in silence, or an error where there is such a way. (No device is needed: the
    error comes from what stands in for the kernels' file.)"""
    monkeypatch.setitem(sys.modules, rows_at_once.__package__ + ".row_kernels", None)
    device = torch.device("cuda", 99)
    with pytest.warns(
        UserWarning, match="merged one by one, which is slower: Triton does not work"
    ):
        reason = rows_at_once.why_not(device)
    assert "ModuleNotFoundError" in reason
    assert rows_at_once.why_not(device) == reason  # and no second warning
    rows_at_once.why_not.cache_clear()
    assert sdpa.merging(torch.empty(1, 2, 1, 8)) is None
