"""After `init_process_group("nccl")`, the usual call, the default group has no backend for the CPU. Here "cuda:gloo" is
in its place. Whatever a context does, it does it with tensors on the CPU, and the results are those of one process.

Every function of the table is called on every rank, and in one process.
"""

from collections.abc import Callable
from contextlib import closing, nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from distributed import LIKE_NCCL, over_gloo, run
from helpers import StopAfter, message_of
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import cross_entropy

from ring_dilated_attention import (
    ContextParallel,
    DilatedCache,
    DilatedPattern,
    dilated_attention,
    explain,
)
from ring_dilated_attention.layers import MultiheadDilatedAttention
from ring_dilated_attention.models import LongNetConfig, LongNetLM
from ring_dilated_attention.models.longnet_vit import LongNetViT
from ring_dilated_attention.models.torchscale.gate import torchscale_attention
from ring_dilated_attention.ranks.link import ExchangeError
from ring_dilated_attention.ranks.processes import backends_with_cpu
from ring_dilated_attention.ranks.reduce import SumOverRanks, all_reduce
from ring_dilated_attention.training import agreement
from ring_dilated_attention.training.data import Document
from ring_dilated_attention.training.loop import train
from ring_dilated_attention.training.options import Hyperparameters
from ring_dilated_attention.training.run import Run

PATIENCE = timedelta(seconds=20)
PATTERN = DilatedPattern((4, 21), (1, 2), is_causal=True)
CONFIG = LongNetConfig((4, 21), (1, 2), embed_dim=16, num_layers=2, num_heads=4)
OPTIONS = Hyperparameters(
    seq_len=48, embed_dim=16, num_layers=1, num_heads=2, segment_lengths=(8, 48), dilation_rates=(1, 3), steps=4,
    warmup_steps=2, held_out_bytes=96,
)  # fmt: skip
BORDERS = torch.tensor([0, 8, 21], dtype=torch.int32)
Found = list[Tensor]


def whole(*shape: int) -> Tensor:
    """The same on every rank."""
    return torch.randn(
        *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0), requires_grad=True
    )


def mean(cp: ContextParallel, x: Tensor) -> Tensor:
    return cp.mean_loss(x.pow(2).sum(), x.numel())


def directions(*gradients: Tensor | None) -> Found:
    """Gradients of tensors that all ranks hold, up to a factor."""
    found = [x for x in gradients if x is not None]
    return [x / x.norm() for x in found]


def averaged(cp: ContextParallel, module: torch.nn.Module) -> Found:
    """The mean of the ranks' gradients, as DDP takes it."""
    return [
        all_reduce(cp.ranks, x.grad) / cp.world_size
        for x in module.parameters()
        if x.grad is not None
    ]


def rows(cp: ContextParallel) -> Found:
    x = whole(1, 21, 4)
    local = cp.shard(x)
    joined = cp.unshard(local)
    mean(cp, local).backward(retain_graph=True)
    found = [joined, *directions(x.grad)]
    x.grad = None
    joined.pow(2).sum().backward()
    return [*found, *directions(x.grad)]


def positions(cp: ContextParallel) -> Found:
    return [cp.unshard(cp.positions(21)[None]), cp.unshard(cp.positions(21, BORDERS)[None])]


def batches(cp: ContextParallel, source: int | None) -> Found:
    batch = {
        "tokens": torch.arange(21)[None],
        "features": whole(1, 21, 2).detach(),
        "cu_seqlens": BORDERS,
    }
    holds = source in (None, cp.rank) or cp.world_size == 1
    local = cp.shard_batch(
        batch if holds else None, source=0 if source and cp.world_size == 1 else source
    )
    dims = {"tokens": 1, "features": 1, "positions": 0}
    return [cp.unshard(local[name], dim=dim) for name, dim in dims.items()] + [local["cu_seqlens"]]


def losses(cp: ContextParallel) -> Found:
    x = whole(1, 21, 5)
    labels = torch.arange(21)[None] % 5
    local, local_labels = cp.shard(x), cp.shard(labels)
    loss = cp.mean_loss(
        cross_entropy(local[0], local_labels[0], reduction="sum"), local_labels.numel()
    )
    loss.backward()
    return [loss, SumOverRanks.apply(local.sum(), cp.ranks), *directions(x.grad)]


def losses_of_micro_batches(cp: ContextParallel) -> Found:
    """Over a context of all replicas, here one; and of two micro-batches of unequal counts."""
    x = whole(1, 21, 5)
    parts = [cp.shard(part) for part in x.split([13, 8], dim=1)]
    count = sum(part.numel() for part in parts)
    loss = torch.zeros((), dtype=x.dtype)
    with closing(ContextParallel(timeout=PATIENCE)) as everyone:
        for part in parts:
            terms = part.pow(2).sum()
            loss += cp.mean_loss(terms, part.numel(), over=everyone, step_count=count)
    torch.testing.assert_close(loss, x.pow(2).mean())
    loss.backward()
    return [loss, *directions(x.grad)]


def documents(cp: ContextParallel) -> Found:
    leaves = [whole(1, 21, 4, 8), whole(1, 21, 4, 8), whole(1, 21, 4, 8)]
    local = [cp.shard(x, cu_seqlens=BORDERS) for x in leaves]
    out = dilated_attention(*local, PATTERN, parallel=cp, cu_seqlens=BORDERS)
    mean(cp, out).backward()
    batch = cp.shard_batch({"tokens": torch.arange(21)[None], "cu_seqlens": BORDERS})
    positions = cp.positions(21, BORDERS)[None]
    rows = [cp.unshard(x, cu_seqlens=BORDERS) for x in (out, batch["tokens"], positions)]
    return [*rows, *directions(*[x.grad for x in leaves])]


def attention(cp: ContextParallel) -> Found:
    """The second time it computes while its handshake goes on."""
    found = []
    for _ in range(2):
        leaves = [whole(1, 21, 4, 8), whole(1, 21, 4, 8), whole(1, 21, 4, 8)]
        local = [cp.shard(x) for x in leaves]
        out, lse = dilated_attention(*local, PATTERN, parallel=cp, return_lse=True)
        assert "kernel" in str(explain(*local, PATTERN, parallel=cp))
        (mean(cp, out) + mean(cp, lse)).backward()
        found += [cp.unshard(out), cp.unshard(lse), *directions(*[x.grad for x in leaves])]
    return found


def cache(cp: ContextParallel, to: int | None) -> Found:
    key, value = (cp.shard(whole(1, 21, 2, 8)) for _ in range(2))
    target = to if cp.world_size > 1 else None
    gathered = DilatedCache.gather(cp, key, value, PATTERN, 4, to=target)
    return [] if gathered is None else gathered.state_dict()["rows"]


def layer(cp: ContextParallel) -> Found:
    torch.manual_seed(0)
    module = MultiheadDilatedAttention(16, 4, PATTERN, rotary=True, parallel=cp).double()
    x = cp.shard(whole(1, 21, 16))
    out = module(x, x, x)[0]
    mean(cp, out).backward()
    return [cp.unshard(out), *averaged(cp, module)]


def language_model(cp: ContextParallel) -> Found:
    torch.manual_seed(0)
    model = LongNetLM(CONFIG, parallel=cp).double()
    local = cp.shard_batch({"tokens": torch.arange(42).view(2, 21)})
    loss = model.loss(local["tokens"])
    loss.backward()
    return [
        loss,
        cp.unshard(model(local["tokens"])),
        *averaged(cp, model),
    ]


def slide_encoder(cp: ContextParallel) -> Found:
    torch.manual_seed(0)
    sizes = {"segment_lengths": (4, 32), "dilation_rates": (1, 2)}
    model = LongNetViT(8, 16, 2, 4, **sizes, global_pool=True, parallel=cp).double()
    local = cp.shard_batch(
        {"features": whole(1, 21, 8).detach(), "coords": torch.arange(42).view(1, 21, 2) * 256}
    )
    return [model(local["features"], local["coords"])[0]]


def gates(cp: ContextParallel) -> Found:
    x = cp.shard(whole(1, 21, 4, 8))
    return [
        cp.unshard(
            torchscale_attention(
                x, x, x, DilatedPattern((4, 8), (1, 2), phase="blocked"), parallel=cp
            )
        )
    ]


def values(cp: ContextParallel) -> Found:
    assert agreement.values_of_all(cp, cp.rank) == list(range(cp.world_size))
    assert agreement.on_first(cp, lambda: "first") == "first"
    return []


CASES: dict[str, Callable[[ContextParallel], Found]] = {
    "shard, unshard": rows,
    "positions": positions,
    "shard_batch": partial(batches, source=None),
    "shard_batch, source=0": partial(batches, source=0),
    "shard_batch, source=1": partial(batches, source=1),
    "mean_loss, sums": losses,
    "mean_loss, over=, step_count=": losses_of_micro_batches,
    "documents": documents,
    "attention": attention,
    "DilatedCache.gather": partial(cache, to=None),
    "DilatedCache.gather, to=1": partial(cache, to=1),
    "MultiheadDilatedAttention": layer,
    "LongNetLM": language_model,
    "LongNetViT": slide_encoder,
    "torchscale_attention": gates,
    "values of rda train": values,
}


def rank_does(rank: int, world_size: int, case: str, options: dict[str, str]) -> list[list]:
    assert dist.get_backend_config() == LIKE_NCCL
    of_mesh = options.get("exchange") == "2-D mesh"
    with over_gloo():
        mesh = (
            init_device_mesh("cuda", (1, 2), mesh_dim_names=("ring", "heads")) if of_mesh else None
        )
        parallel = ContextParallel(mesh, timeout=PATIENCE, **({} if of_mesh else options))
        found = [x.tolist() for x in CASES[case](parallel)]
        parallel.close()
        assert "was closed" in message_of(lambda: CASES[case](parallel), ExchangeError)
    return found


def check(case: str, **options: str) -> None:
    by_rank = run(2, rank_does, case, options, backend=LIKE_NCCL)
    expected = [x.tolist() for x in CASES[case](ContextParallel())]
    for rank, found in enumerate(by_rank):
        if case != "DilatedCache.gather, to=1" or rank == 1:
            assert len(found) == len(expected)
            for x, y in zip(found, expected, strict=True):
                torch.testing.assert_close(torch.tensor(x), torch.tensor(y), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("case", CASES)
def test_whatever_a_context_does(case):
    """Catches a tensor on the CPU that is sent over a group that cannot carry it."""
    check(case)


@pytest.mark.parametrize("exchange", ["ring", "all_gather", "all_to_all", "2-D mesh"])
def test_every_exchange(exchange):
    """The same, for the groups of rings and of ranks that deal heads to each other."""
    check("attention", exchange=exchange)


@pytest.mark.parametrize("sharding", ["zigzag", "zigzag_documents"])
def test_every_sharding(sharding):
    """The same, for the other ways to cut a sequence. The one that cuts each document tells the ranks of borders."""
    check("documents", sharding=sharding)


def rank_abandons(rank: int, world_size: int) -> None:
    with over_gloo():
        parallel = ContextParallel(timeout=PATIENCE)
        losses(parallel)
        if rank == 1:
            parallel.abandon("on purpose")
        reason = (
            "(on purpose)" if rank == 1 else "that rank died, or gave up after an error of its own"
        )
        assert reason in message_of(lambda: attention(parallel), ExchangeError)
        parallel.close()
        losses(ContextParallel(timeout=PATIENCE))


def test_a_context_that_is_broken():
    """Catches ranks that wait for one that gave up, and a context that cannot be made after it."""
    run(2, rank_abandons, backend=LIKE_NCCL, seconds=20)


def rank_trains(rank: int, world_size: int, folder: Path) -> list[float]:
    with over_gloo() if world_size > 1 else nullcontext():
        document = Document(
            bytes(range(97, 123)) * 30, "text", OPTIONS.seq_len, OPTIONS.held_out_bytes
        )
        whole_run = Run(OPTIONS, document, folder, None, save_every=2)
        return train(whole_run, ContextParallel(), StopAfter(10**9))["bits_per_byte"]


def test_rda_train(tmp_path):
    """What `rda train` does on ranks: shards, losses, checkpoints, scores and what ranks tell each other."""
    first, second = run(2, rank_trains, tmp_path / "two", backend=LIKE_NCCL)
    assert first == second == pytest.approx(rank_trains(0, 1, tmp_path / "one"), abs=1e-4)


@pytest.mark.parametrize(
    ("devices", "backends"),
    [
        ("cuda:nccl", "cpu:gloo,cuda:nccl"),
        ("xpu:xccl", "cpu:gloo,xpu:xccl"),
        ("cpu:gloo,cuda:nccl", None),
        ("cuda:nccl,cpu:mpi", None),
        ("cpu:gloo,cuda:gloo", None),
    ],
)
def test_gloo_is_added_only_where_the_cpu_has_no_backend(devices, backends):
    """Catches a group that loses the backends of the user's."""
    assert backends_with_cpu(devices) == backends
