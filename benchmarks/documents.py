"""A step over packed documents on two ranks, by sharding: how long the busiest rank takes, beside its share of the
work by the plans.

Under a causal pattern the queries at the end of a document see most keys. "zigzag" deals both ends of the sequence to
one rank, "zigzag_documents" both ends of each document. The shares are those of (query, key) pairs, also for more ranks
than are measured here.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ring_dilated_attention import ContextParallel, DilatedPattern, dilated_attention
from ring_dilated_attention.commands.local_ranks import Launch, Worker, run_ranks
from ring_dilated_attention.plan.counts import Counter, count_ranks
from ring_dilated_attention.plan.job import Job
from ring_dilated_attention.plan.sharding import SHARDINGS, Cut
from ring_dilated_attention.reference import dilated_attention_reference

from .gate import SMALL, GateError
from .measure import Sizes, quantiles
from .record import branches, markdown, tensors
from .scaled import scaled_down

SUMMARY = "a step over packed documents on two ranks, by sharding"
TOLERANCE = 1e-5  # relative L2 error of out and gradients in float32
NUM_RANKS = 2  # that are measured


class Settings(NamedTuple):
    """shares: of how many positions each document has. planned: numbers of ranks."""

    sizes: Sizes = Sizes(8192, 4, 64)
    patterns: tuple[DilatedPattern, ...] = (
        DilatedPattern.dense(is_causal=True),
        DilatedPattern((2048, 8192), (1, 4), is_causal=True),
    )
    shares: tuple[float, ...] = (0.75, 0.25)
    planned: tuple[int, ...] = (2, 8, 64, 1024)
    repeats: int = 7
    seconds: float = 600


FULL = Settings()
QUICK = Settings(Sizes(512, 2, 16), (DilatedPattern((128, 512), (1, 4), is_causal=True),), planned=(2, 4), repeats=1)


def num_steps(settings: Settings) -> int:
    return len(settings.patterns) * (1 + settings.repeats)


def run(settings: Settings, step: Callable[[str], None]) -> list[dict[str, Any]]:
    launch = Launch(NUM_RANKS, is_pinned=True, seconds=settings.seconds)
    ranks = run_ranks(launch, _rank, settings, on_report=lambda rank, message: step(message))
    rows = []
    for i, pattern in enumerate(settings.patterns):
        for name in SHARDINGS:
            found = [rank[i][name] for rank in ranks]
            error = max(sum(x.wrong[k] for x in found) / sum(x.right[k] for x in found) for k in range(4)) ** 0.5
            if error > TOLERANCE:
                raise GateError(f"{pattern}, {name}: relative L2 error {error:.2e} exceeds {TOLERANCE:.0e}.")
            rows.append(
                {
                    **_branches(pattern),
                    **settings.sizes.as_json(),
                    "documents": _lengths(settings.shares, settings.sizes.seq_len),
                    "sharding": name,
                    "ranks": NUM_RANKS,
                    "threads_per_rank": launch.num_threads,
                    "step_seconds": quantiles(map(max, zip(*(x.seconds for x in found), strict=True))),
                    "busiest": {p: _busiest(settings, pattern, name, p) for p in settings.planned},
                    "gate": {"passed": True, "error": error, "tolerance": TOLERANCE},
                }
            )
    return rows


class Found(NamedTuple):
    """By one rank. wrong, right: sums of squares of the error and of the definition, for out and three gradients."""

    wrong: list[float]
    right: list[float]
    seconds: list[float]


def _rank(worker: Worker, settings: Settings) -> list[dict[str, Found]]:
    contexts, everything = {name: ContextParallel(sharding=name, exchange="ring") for name in SHARDINGS}, []
    for pattern in settings.patterns:
        gates = {name: _gate(settings, pattern, parallel) for name, parallel in contexts.items()}
        steps = {name: _step(settings.sizes, pattern, settings.shares, x)[1] for name, x in contexts.items()}
        seconds: dict[str, list[float]] = {name: [] for name in contexts}
        for repeat in range(1 + settings.repeats):
            if worker.rank == 0:
                worker.report(branches(_branches(pattern)))
            for name, step in steps.items():
                dist.barrier()
                began = time.perf_counter()
                step()
                if repeat:
                    seconds[name].append(time.perf_counter() - began)
        everything.append({name: Found(*gates[name], seconds[name]) for name in contexts})
    return everything


def _branches(pattern: DilatedPattern) -> dict[str, Any]:
    return {name: getattr(pattern, name) for name in ("segment_lengths", "dilation_rates", "is_causal")}


def _lengths(shares: Sequence[float], seq_len: int) -> list[int]:
    return [round(share * seq_len) for share in shares]


def _step(
    sizes: Sizes, pattern: DilatedPattern, shares: Sequence[float], parallel: ContextParallel
) -> tuple[list[Tensor], Callable[[], list[Tensor]]]:
    """query, key, value and the gradient of out, whole; and what computes out and three gradients, of this rank."""
    generator = torch.Generator().manual_seed(0)
    borders = torch.tensor([0, *accumulate(_lengths(shares, sizes.seq_len))], dtype=torch.int32)
    shape = (sizes.batch, sizes.seq_len, sizes.num_heads, sizes.head_dim)
    whole = [torch.randn(shape, generator=generator, dtype=sizes.dtype) for _ in range(4)]
    *inputs, dout = (parallel.shard(x, cu_seqlens=borders) for x in whole)
    inputs = [x.detach().requires_grad_() for x in inputs]

    def step() -> list[Tensor]:
        query, key, value = inputs
        out = dilated_attention(query, key, value, pattern, cu_seqlens=borders, parallel=parallel)
        assert isinstance(out, Tensor)
        return [out, *torch.autograd.grad(out, inputs, dout)]

    return whole, step


def _gate(settings: Settings, pattern: DilatedPattern, parallel: ContextParallel) -> tuple[list[float], list[float]]:
    small, seq_len, _ = scaled_down(pattern, settings.sizes.seq_len, SMALL)
    sizes = settings.sizes._replace(seq_len=seq_len)
    whole, step = _step(sizes, small, settings.shares, parallel)
    *inputs, dout = (x.double() for x in whole)
    query, key, value = inputs = [x.requires_grad_() for x in inputs]
    borders = [0, *accumulate(_lengths(settings.shares, seq_len))]
    out, _ = dilated_attention_reference(query, key, value, small, cu_seqlens=borders)
    right = [out, *torch.autograd.grad(out, inputs, dout)]
    mine = [parallel.shard(x.detach(), cu_seqlens=torch.tensor(borders, dtype=torch.int32)) for x in right]
    pairs = list(zip(step(), mine, strict=True))
    return [(x - y).square().sum().item() for x, y in pairs], [y.square().sum().item() for _, y in pairs]


def _busiest(settings: Settings, pattern: DilatedPattern, sharding: str, num_ranks: int) -> float:
    """The most pairs of a rank, divided by the mean."""
    seq_len, num_heads = settings.sizes.seq_len, settings.sizes.num_heads
    borders, cut = (0, *accumulate(_lengths(settings.shares, seq_len))), Cut(sharding, num_ranks)
    shards = cut.shards_of(cut.default_lengths(seq_len, borders), borders)
    job = Job(pattern, shards, num_heads, num_heads, borders)
    pairs = count_ranks(Counter(job)).pairs
    return max(pairs) / statistics.mean(pairs)


def table(rows: list[dict[str, Any]]) -> str:
    first = rows[0]
    planned = list(first["busiest"])
    fastest = {branches(row): row["step_seconds"]["median"] for row in rows if row["sharding"] == "zigzag_documents"}
    lines = [
        (
            branches(row),
            row["sharding"],
            f"{row['step_seconds']['median']:.3f}",
            f"{row['step_seconds']['min']:.3f} to {row['step_seconds']['max']:.3f}",
            f"{row['step_seconds']['median'] / fastest[branches(row)]:.2f}",
            *(f"{row['busiest'][p]:.3f}" for p in planned),
        )
        for row in rows
    ]
    of_ranks = (f"busiest rank of {p} / mean" for p in planned)
    headers = ("pattern", "sharding", "step, s", "least to most", "divided by that of zigzag_documents", *of_ranks)
    return (
        f"Documents of {' and '.join(f'{n:,}' for n in first['documents'])} positions packed into one sequence, "
        f"{tensors(first)}, {first['ranks']} ranks of one thread, each on a core of its own. Forward and backward, of "
        f"the slower rank. Busiest rank: its share of the (query, key) pairs, computed.\n\n{markdown(headers, lines)}"
    )
