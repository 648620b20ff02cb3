"""After `init_process_group("nccl")`, the usual call, the default group has no backend for the CPU. Here "cuda:gloo" is
in its place. Whatever a context does, it does it with tensors on the CPU, and the results are those of one process.

Every function of the table is called on every rank, and in one process.
"""

from contextlib import closing, nullcontext
from datetime import timedelta
from functools import partial

import pytest
import torch
import torch.distributed as dist
from distributed import LIKE_NCCL, over_gloo, run
from helpers import StopAfter, message_of
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


def whole(*shape):
    """The same on every rank."""
    return torch.randn(
        *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0), requires_grad=True
    )


def mean(cp, x):
    return cp.mean_loss(x.pow(2).sum(), x.numel())


def directions(*gradients):
    """Gradients of tensors that all ranks hold, up to a factor."""
    found = [x for x in gradients if x is not None]
    return [x / x.norm() for x in found]


def averaged(cp, module):
    """The mean of the ranks' gradients, as DDP takes it."""
    return [
        all_reduce(cp.ranks, x.grad) / cp.world_size
        for x in module.parameters()
        if x.grad is not None
    ]


def rows(cp):
    x = whole(1, 21, 4)
    local = cp.shard(x)
    joined = cp.unshard(local)
    mean(cp, local).backward(retain_graph=True)
    found = [joined, *directions(x.grad)]
    x.grad = None
    joined.pow(2).sum().backward()
    return [*found, *directions(x.grad)]


def positions(cp):
    return [cp.unshard(cp.positions(21)[None]), cp.unshard(cp.positions(21, BORDERS)[None])]


def batches(cp, source):
    batch = {"tokens": torch.arange(21)[None], "features": whole(1, 21, 2).detach()}
    batch["cu_seqlens"] = BORDERS
    if cp.world_size == 1 and source:
        source = 0
    local = cp.shard_batch(batch if source in (None, cp.rank) else None, source=source)
    dims = {"tokens": 1, "features": 1, "positions": 0}
    return [cp.unshard(local[name], dim=dim) for name, dim in dims.items()] + [local["cu_seqlens"]]


def losses(cp):
    x, labels = whole(1, 21, 5), torch.arange(21)[None] % 5
    local, own = cp.shard(x), cp.shard(labels)[0]
    loss = cp.mean_loss(cross_entropy(local[0], own, reduction="sum"), own.numel())
    loss.backward()
    return [loss, SumOverRanks.apply(local.sum(), cp.ranks), *directions(x.grad)]


def losses_of_micro_batches(cp):
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


def documents(cp):
    leaves = [whole(1, 21, 4, 8), whole(1, 21, 4, 8), whole(1, 21, 4, 8)]
    local = [cp.shard(x, cu_seqlens=BORDERS) for x in leaves]
    out = dilated_attention(*local, PATTERN, parallel=cp, cu_seqlens=BORDERS)
    mean(cp, out).backward()
    batch = cp.shard_batch({"tokens": torch.arange(21)[None], "cu_seqlens": BORDERS})
    positions = cp.positions(21, BORDERS)[None]
    rows = [cp.unshard(x, cu_seqlens=BORDERS) for x in (out, batch["tokens"], positions)]
    return [*rows, *directions(*[x.grad for x in leaves])]


def attention(cp):
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


def cache(cp, to):
    key, value = (cp.shard(whole(1, 21, 2, 8)) for _ in range(2))
    target = to if cp.world_size > 1 else None
    gathered = DilatedCache.gather(cp, key, value, PATTERN, 4, to=target)
    return [] if gathered is None else gathered.state_dict()["rows"]


def layer(cp):
    torch.manual_seed(0)
    module = MultiheadDilatedAttention(16, 4, PATTERN, rotary=True, parallel=cp).double()
    x = cp.shard(whole(1, 21, 16))
    out = module(x, x, x)[0]
    mean(cp, out).backward()
    return [cp.unshard(out), *averaged(cp, module)]


def language_model(cp):
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


def slide_encoder(cp):
    torch.manual_seed(0)
    sizes = {"segment_lengths": (4, 32), "dilation_rates": (1, 2)}
    model = LongNetViT(8, 16, 2, 4, **sizes, global_pool=True, parallel=cp).double()
    local = cp.shard_batch(
        {"features": whole(1, 21, 8).detach(), "coords": torch.arange(42).view(1, 21, 2) * 256}
    )
    return [model(local["features"], local["coords"])[0]]


def gates(cp):
    x, pattern = cp.shard(whole(1, 21, 4, 8)), DilatedPattern((4, 8), (1, 2), phase="blocked")
    return [cp.unshard(torchscale_attention(x, x, x, pattern, parallel=cp))]


def values(cp):
    assert agreement.values_of_all(cp, cp.rank) == list(range(cp.world_size))
    assert agreement.on_first(cp, lambda: "first") == "first"
    return []


CASES = {
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


def rank_does(rank, world_size, cases, options):
    """What comes of each case, with a context of its own. A context that is closed refuses them."""
    assert dist.get_backend_config() == LIKE_NCCL
    found = {}
    with over_gloo():
        if options.get("exchange") == "2-D mesh":
            mesh = init_device_mesh("cuda", (1, 2), mesh_dim_names=("ring", "heads"))
            options = {"group": mesh}
        for case in cases:
            parallel = ContextParallel(timeout=PATIENCE, **options)
            found[case] = [x.tolist() for x in CASES[case](parallel)]
            parallel.close()
            assert "was closed" in message_of(partial(CASES[case], parallel), ExchangeError)
    return found


def check(*cases, **options):
    by_rank = run(2, rank_does, cases, options, backend=LIKE_NCCL)
    for case in cases:
        expected = CASES[case](ContextParallel())
        for rank, found in enumerate(by_rank):
            if case != "DilatedCache.gather, to=1" or rank == 1:
                for x, y in zip(found[case], expected, strict=True):
                    x, y = torch.tensor(x), torch.tensor(y.tolist())
                    torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-6, msg=case)


def test_whatever_a_context_does():
    """Catches a tensor on the CPU that is sent over a group that cannot carry it."""
    check(*CASES)


@pytest.mark.parametrize("exchange", ["ring", "all_gather", "all_to_all", "2-D mesh"])
def test_every_exchange(exchange):
    """The same, for the groups of rings and of ranks that deal heads to each other."""
    check("attention", exchange=exchange)


@pytest.mark.parametrize("sharding", ["zigzag", "zigzag_documents"])
def test_every_sharding(sharding):
    """The same, for the other ways to cut a sequence. The one that cuts each document tells the ranks of borders."""
    check("documents", sharding=sharding)


def rank_abandons(rank, world_size):
    with over_gloo():
        parallel = ContextParallel(timeout=PATIENCE)
        losses(parallel)
        if rank == 1:
            parallel.abandon("on purpose")
        gave_up = "that rank died, or gave up after an error of its own"
        reason = "(on purpose)" if rank == 1 else gave_up
        assert reason in message_of(partial(attention, parallel), ExchangeError)
        parallel.close()
        losses(ContextParallel(timeout=PATIENCE))


def test_a_context_that_is_broken():
    """Catches ranks that wait for one that gave up, and a context that cannot be made after it."""
    run(2, rank_abandons, backend=LIKE_NCCL, seconds=20)


def rank_trains(rank, world_size, folder):
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
