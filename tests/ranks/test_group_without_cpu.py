"""After `init_process_group("nccl")`, the usual call, the default group has no backend for the CPU. Here "cuda:gloo" is
in its place. Whatever a context does, it does it with tensors on the CPU, and the results are those of one process.

Every function of the table is called on every rank, and in one process.
"""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from definition import PATIENCE
from distributed import LIKE_NCCL, over_gloo, run
from helpers import message_of
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import cross_entropy

from ring_dilated_attention import (
    ContextParallel,
    DilatedCache,
    DilatedPattern,
    dilated_attention,
    explain,
)
from ring_dilated_attention.models import LongNetConfig, LongNetLM
from ring_dilated_attention.ranks.link import ExchangeError
from ring_dilated_attention.ranks.processes import backends_with_cpu
from ring_dilated_attention.ranks.reduce import SumOverRanks, all_reduce
from ring_dilated_attention.training import agreement

PATTERN = DilatedPattern((4, 21), (1, 2), is_causal=True)
CONFIG = LongNetConfig((4, 21), (1, 2), embed_dim=16, num_layers=2, num_heads=4)
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


def rows(cp):
    x = whole(1, 21, 4)
    local = cp.shard(x)
    joined = cp.unshard(local)
    mean(cp, local).backward(retain_graph=True)
    found = [joined, *directions(x.grad)]
    x.grad = None
    joined.pow(2).sum().backward()
    return [*found, *directions(x.grad)]


def batches(cp, source):
    batch = {
        "tokens": torch.arange(42, dtype=torch.uint8).view(2, 21),
        "features": whole(1, 21, 2).detach().bfloat16(),
        "mask": torch.arange(21)[None] % 3 == 0,
        "weights": whole(21).detach(),
        "cu_seqlens": BORDERS,
    }
    if cp.world_size == 1 and source:
        source = 0
    local = cp.shard_batch(batch if source in (None, cp.rank) else None, source=source)
    assert all(local[name].dtype == x.dtype for name, x in batch.items())
    found = [local.pop("cu_seqlens")]
    for x in local.values():
        found.append(cp.unshard(x, min(1, x.dim() - 1), cu_seqlens=BORDERS))
    return found


def losses(cp):
    x, labels = whole(1, 21, 5), torch.arange(21)[None] % 5
    local, own = cp.shard(x), cp.shard(labels)[0]
    loss = cp.mean_loss(cross_entropy(local[0], own, reduction="sum"), own.numel())
    loss.backward()
    return [loss, SumOverRanks.apply(local.sum(), cp.ranks), *directions(x.grad)]


def documents(cp):
    leaves = [whole(1, 21, 4, 8), whole(1, 21, 4, 8), whole(1, 21, 4, 8)]
    local = [cp.shard(x, cu_seqlens=BORDERS) for x in leaves]
    out = dilated_attention(*local, PATTERN, parallel=cp, cu_seqlens=BORDERS)
    mean(cp, out).backward()
    positions = cp.positions(21, BORDERS)[None]
    joined = [cp.unshard(x, cu_seqlens=BORDERS) for x in (out, positions)]
    return [*joined, *directions(*[x.grad for x in leaves])]


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


cache_of_rank_1 = partial(cache, to=1)


def language_model(cp):
    torch.manual_seed(0)
    model = LongNetLM(CONFIG, parallel=cp).double()
    tokens = cp.shard(torch.arange(21)[None], cu_seqlens=BORDERS)
    loss = model.loss(tokens, BORDERS)
    loss.backward()
    sums = [all_reduce(cp.ranks, x.grad) for x in model.parameters()]
    logits = cp.unshard(model(tokens, BORDERS), cu_seqlens=BORDERS)
    return [loss, logits, *directions(*sums)]


def values(cp):
    """What training tells other ranks."""
    assert agreement.values_of_all(cp, cp.rank) == list(range(cp.world_size))
    assert agreement.on_first(cp, lambda: "first") == "first"
    return []


# With the arguments of a context.
CASES = [
    (rows, {}),
    (partial(batches, source=None), {}),
    (partial(batches, source=1), {"sharding": "zigzag"}),
    (partial(batches, source=None), {"sharding": "zigzag_documents"}),
    (partial(batches, source=1), {"sharding": "zigzag_documents"}),
    (losses, {}),
    (documents, {}),
    (documents, {"sharding": "zigzag_documents"}),
    (attention, {}),
    (attention, {"exchange": "ring"}),
    (attention, {"exchange": "all_gather"}),
    (attention, {"exchange": "all_to_all"}),
    (attention, {"group": "2-D mesh"}),
    (partial(cache, to=None), {}),
    (cache_of_rank_1, {}),
    (language_model, {"sharding": "zigzag_documents"}),
    (values, {}),
]


def rank_does(rank, world_size):
    """What comes of each case, with a context of its own. A context that is closed refuses them."""
    assert dist.get_backend_config() == LIKE_NCCL
    found = []
    with over_gloo():
        mesh = init_device_mesh("cuda", (1, 2), mesh_dim_names=("ring", "heads"))
        for case, options in CASES:
            if "group" in options:
                options = {"group": mesh}
            parallel = ContextParallel(timeout=PATIENCE, **options)
            found.append([x.tolist() for x in case(parallel)])
            parallel.close()
            assert "was closed" in message_of(partial(case, parallel), ExchangeError)
    return found


def test_whatever_a_context_does():
    """Catches a tensor on the CPU that is sent over a group that cannot carry it, also of rings and of ranks that deal
    heads to each other. The sharding that cuts each document tells the ranks of borders."""
    by_rank = run(2, rank_does, backend=LIKE_NCCL)
    for number, (case, _) in enumerate(CASES):
        expected = [torch.tensor(x.tolist()) for x in case(ContextParallel())]
        for rank, found_by_case in enumerate(by_rank):
            found = [torch.tensor(x) for x in found_by_case[number]]
            if case is not cache_of_rank_1 or rank == 1:
                torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6, msg=str(case))


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
