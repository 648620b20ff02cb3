"""Checks that all cards answer, and that attention and a model over all cards give correct results."""

import os
import subprocess
from contextlib import suppress

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from ring_dilated_attention import ContextParallel, DilatedPattern
from ring_dilated_attention.commands.errors import FLOOR_ON_GPU, Case, Squares, measure, worst
from ring_dilated_attention.commands.local_ranks import Worker
from ring_dilated_attention.models import LongNetConfig, LongNetLM
from ring_dilated_attention.ranks.reduce import all_reduce

from ..device import describe
from ..parts import Row
from .settings import Settings


def there(settings: Settings, seconds: float) -> list[Row]:
    """Let all ranks add up a number. Returns a row that describes the cards, and how they are connected."""
    cards = settings.run_ranks(seconds, _there)
    links = "nvidia-smi did not answer"
    with suppress(OSError, subprocess.SubprocessError):
        topology = subprocess.run(
            ["nvidia-smi", "topo", "-m"],
            capture_output=True,
            text=True,
            timeout=9,
        )
        links = topology.stdout
    variables = {}
    for name, value in os.environ.items():
        if "NCCL" in name or name.startswith("CUDA_"):
            variables[name] = value
    row = {
        "what": "cards and a first message",
        "passed": all(card["sum"] == len(cards) for card in cards),
        "found": f"{len(cards)} x {cards[0]['name']}, NCCL {cards[0]['nccl']}",
        "cards": cards,
        "links": links,
        "variables": variables,
    }
    return [row]


def _there(worker: Worker, settings: Settings) -> Row:
    """On one rank: its card, the sum over all ranks, and the cards whose memory this card can read."""
    total = torch.ones(1, device=settings.device(worker.rank))
    dist.all_reduce(total)
    if not settings.has_gpus:
        return {"name": "CPU", "nccl": "none", "sum": total.item()}
    reached = []
    for other in range(worker.world_size):
        if other != worker.rank and torch.cuda.can_device_access_peer(worker.rank, other):
            reached.append(other)
    return {
        **describe(),
        "nccl": str(torch.cuda.nccl.version()),
        "sum": total.item(),
        "reaches_directly": reached,
    }


def right(settings: Settings, seconds: float, way: str) -> list[Row]:
    """Compare out, lse and all gradients over all ranks with the definition in float64.

    way: the exchange, or "2-D mesh". Returns a row for each dtype, with the largest error of all cases.
    """
    ranks = settings.run_ranks(seconds, _right, way)
    rows = []
    for i, dtype in enumerate(settings.dtypes):
        of_dtype = [rank[i] for rank in ranks]
        result = worst(cases(settings), dtype, of_dtype, settings.device_type)
        row = {
            "what": str(dtype).removeprefix("torch."),
            "passed": result.passed,
            "found": f"error {result.error:.1e} of at most {result.tolerance:.1e}: {result.where}",
        }
        rows.append(row)
    return rows


def cases(settings: Settings) -> list[Case]:
    """The calls that are checked, each twice: the second call may use again what the first one made.

    The length is a prime, so ranks have shards of different lengths. The number of heads is a multiple of the ranks'.
    """
    n = settings.seq_len
    num_kv_heads = 2 * settings.num_ranks
    sizes = (n, 1, 2 * num_kv_heads, num_kv_heads, settings.head_dim)
    causal = DilatedPattern((n // 8, n), (1, 4), is_causal=True)
    dense = DilatedPattern((n,), (1,), is_causal=True)
    blocked = DilatedPattern((n // 3, n), (2, 3), phase="blocked")
    documents = (0, 1, n // 3, n)
    once = [
        Case("causal, zigzag", causal, *sizes, sharding="zigzag"),
        Case("dense causal, zigzag", dense, *sizes, sharding="zigzag"),
        Case("causal, contiguous", causal, *sizes),
        Case("blocked, not causal", blocked, *sizes),
        Case("packed documents", causal, *sizes, documents=documents),
    ]
    return 2 * once


def _right(worker: Worker, settings: Settings, way: str) -> list[list[Squares]]:
    """For each dtype and case this rank's sums of squares: of the errors, and of the expected values."""
    group = None
    exchange = way
    if way == "2-D mesh":
        # two neighbours share the heads, and the pairs are a ring
        group = init_device_mesh(
            settings.device_type,
            (worker.world_size // 2, 2),
            mesh_dim_names=("ring", "heads"),
        )
        exchange = "ring"
    contexts = {}
    for sharding in ("contiguous", "zigzag"):
        contexts[sharding] = ContextParallel(group, sharding=sharding, exchange=exchange)
    device = settings.device(worker.rank)
    of_dtypes = []
    for dtype in settings.dtypes:
        of_cases = []
        for case in cases(settings):
            parallel = contexts[case.sharding]
            of_cases.append(measure(case, dtype, "auto", device, parallel))
        of_dtypes.append(of_cases)
    return of_dtypes


def model(settings: Settings, seconds: float, told_by: str) -> list[Row]:
    """Compare a step of a LongNetLM on all ranks with one in float64 on the CPU. No rank may use another rank's card.

    The error may be twice that of one rank. As in many users' scripts, the group is made by
    `init_process_group("nccl")`. told_by: what tells a rank its card.
    """
    transport = settings.usual_transport
    ranks = settings.run_ranks(seconds, _model, transport=transport, told_by=told_by)
    errors, _ = ranks[0]
    rows: list[Row] = []
    for name, (of_one_rank, of_all_ranks) in errors.items():
        allowed = 2 * of_one_rank + FLOOR_ON_GPU[torch.float32]
        row = {
            "what": f"{name}, float32, {transport}",
            "passed": of_all_ranks <= allowed,
            "found": f"error {of_all_ranks:.1e} of at most {allowed:.1e}",
        }
        rows.append(row)
    cards = [of_rank for _, of_rank in ranks]
    rows.append(contexts(settings, cards))
    return rows


def contexts(settings: Settings, cards: list[list[int]]) -> Row:
    """Whether each rank has a CUDA context on its own card alone. cards: where each rank has one."""
    expected: list[list[int]] = []
    for rank in range(settings.num_ranks):
        expected.append([rank] if settings.has_gpus else [])
    found = "; ".join(f"rank {rank}: {of_rank}" for rank, of_rank in enumerate(cards))
    return {
        "what": "contexts on cards",
        "passed": cards == expected,
        "found": f"a rank should have one on its own card alone: {found}",
    }


def _model(worker: Worker, settings: Settings) -> tuple[dict[str, tuple[float, float]], list[int]]:
    """The relative errors of loss and gradients, on one rank and on all ranks.

    Also returns the cards on which this rank has a CUDA context.
    """
    device = settings.device(worker.rank)
    parallel = ContextParallel(sharding="zigzag", exchange="ring")
    one_rank = _model_step(settings, device, torch.float32)
    all_ranks = _model_step(settings, device, torch.float32, parallel)
    exact = _model_step(settings, "cpu", torch.float64)
    errors = {}
    for i, name in enumerate(("loss", "gradients")):
        size = exact[i].norm()
        of_one = (one_rank[i] - exact[i]).norm() / size
        of_all = (all_ranks[i] - exact[i]).norm() / size
        errors[name] = (float(of_one), float(of_all))
    # torch without CUDA has no such function.
    has_context = getattr(torch._C, "_cuda_hasPrimaryContext", None)
    cards = []
    for card in range(torch.cuda.device_count()):
        if has_context is not None and has_context(card):
            cards.append(card)
    return errors, cards


def _model_step(
    settings: Settings, device: str, dtype: torch.dtype, parallel: ContextParallel | None = None
) -> tuple[Tensor, Tensor]:
    """The loss and all gradients of a step, computed on `device` in `dtype`, and returned in float64 on the CPU."""
    n = settings.seq_len
    num_heads = 2 * settings.num_ranks
    config = LongNetConfig(
        (n // 8, n),
        (1, 4),
        embed_dim=16 * num_heads,
        num_heads=num_heads,
    )
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(256, (1, n), generator=generator)
    torch.manual_seed(0)
    longnet = LongNetLM(config, parallel=parallel).to(device, dtype)
    batch = {"tokens": tokens}
    if parallel is not None:
        batch = parallel.shard_batch(batch if parallel.rank == 0 else None, source=0)
    loss = longnet.loss(batch["tokens"].to(device))
    loss.backward()
    gradients = []
    for parameter in longnet.parameters():
        if parameter.grad is not None:
            gradients.append(parameter.grad.flatten())
    gradient = torch.cat(gradients)
    if parallel is not None:
        # average the gradients over the ranks, as DDP and FSDP2 do
        gradient = all_reduce(parallel.ranks, gradient) / parallel.world_size
    return loss.detach().cpu().double(), gradient.cpu().double()
