"""Per hop: computation, communication and *exposed* communication (time in which a rank does nothing but wait).

Exposed time is recorded by the run itself. What a hop's messages take without any computation is measured beside it,
by the same messages alone.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from ..compare import Squares
from ..exchange.comm import Wait
from ..exchange.ring import RingCall
from ..parallel import ContextParallel
from ..pattern import DilatedPattern
from ..plan import Plan
from ..planner import make_plan
from ..processes import Launch, Worker, run_ranks
from .gate import gate, gate_squares
from .measure import Sizes, attend, make_tensors, quantiles, stopwatch
from .record import branches, markdown, tensors

SUMMARY = "per hop: computation, communication, and how much of it is exposed"


class Settings(NamedTuple):
    sizes: Sizes = Sizes(32_768, 4, 64)
    num_ranks: int = 2
    setups: tuple[tuple[DilatedPattern, str], ...] = (  # with the sharding
        (DilatedPattern((2048, 32_768), (1, 16)), "contiguous"),
        (DilatedPattern((32_768,), (1,), is_causal=True), "zigzag"),
    )
    repeats: int = 3
    seconds: float = 900


FULL = Settings()
QUICK = Settings(
    Sizes(2048, 2, 32),
    3,
    ((DilatedPattern((256, 2048), (1, 16)), "contiguous"), (DilatedPattern((2048,), (1,), is_causal=True), "zigzag")),
    1,
    120,
)


def num_steps(settings: Settings) -> int:
    return len(settings.setups) * (1 + settings.repeats)


def run(settings: Settings, step: Callable[[str], None]) -> list[dict[str, Any]]:
    launch = Launch(settings.num_ranks, num_threads=1, is_pinned=True, seconds=settings.seconds)
    ranks = run_ranks(launch, _rank, settings, on_report=lambda rank, message: step(message))
    rows = []
    for i, (pattern, sharding) in enumerate(settings.setups):
        passed = gate(settings.sizes, pattern, [rank[i][0] for rank in ranks])
        for rank, found in enumerate(ranks):
            rows.append(
                {
                    "segment_lengths": pattern.segment_lengths,
                    "dilation_rates": pattern.dilation_rates,
                    "is_causal": pattern.is_causal,
                    "sharding": sharding,
                    **settings.sizes.as_json(),
                    "ranks": settings.num_ranks,
                    "rank": rank,
                    **found[i][1],
                    "gate": passed,
                }
            )
    return rows


def _rank(worker: Worker, settings: Settings) -> list[tuple[Squares, dict[str, Any]]]:
    results = []
    for pattern, sharding in settings.setups:
        parallel = ContextParallel(exchange="ring", sharding=sharding)
        squares = gate_squares(settings.sizes, pattern, parallel)
        shards = parallel.shards(parallel.default_lengths(settings.sizes.seq_len))
        heads = settings.sizes.num_heads
        plan = make_plan(pattern, shards, parallel.rank, heads, heads)
        steps = []
        for repeat in range(1 + settings.repeats):
            if worker.rank == 0:
                worker.report(f"{pattern.segment_lengths}, {sharding}")
            found = _step(settings.sizes, pattern, parallel)
            steps += [found] if repeat else []
        results.append((squares, _summary(plan, steps, _alone(settings, plan, parallel))))
    return results


def _step(sizes: Sizes, pattern: DilatedPattern, parallel: ContextParallel) -> tuple[float, list[Wait]]:
    """Seconds of one forward and backward, and its waits."""
    inputs, dout = make_tensors(sizes, parallel)
    assert parallel.link is not None
    parallel.all_reduce(torch.zeros(1))  # start together
    waits: list[Wait] = []
    parallel.link.waits = waits
    watch = stopwatch()
    torch.autograd.grad(attend(inputs, pattern, parallel), inputs, dout)
    parallel.link.waits = None
    return watch(), waits


def _alone(settings: Settings, plan: Plan, parallel: ContextParallel) -> list[float]:
    """Seconds of each hop's key/value messages when nothing is computed; the median of several passes."""
    inputs, _ = make_tensors(settings.sizes, parallel)
    query, key, value = (x.detach() for x in inputs)
    passes = []
    for _ in range(3):
        ring = RingCall(plan, query, parallel.link, "messages alone")
        chunks = ring.chunk_buffers(key, value)
        parallel.all_reduce(torch.zeros(1))
        times = []
        for s in range(len(plan.hops)):
            watch = stopwatch()
            ring.start(s, chunks[s % 2], chunks[(s + 1) % 2]).wait()
            times.append(watch())
        passes.append(times)
    return [sorted(times)[len(passes) // 2] for times in zip(*passes, strict=True)]


def _summary(plan: Plan, steps: Sequence[tuple[float, list[Wait]]], alone: Sequence[float]) -> dict[str, Any]:
    """Of all repeats: the step, its exposed share, and each stage and hop."""
    hops: list[dict[str, Any]] = []
    for stage in ("forward", "backward"):
        local = quantiles(_local(waits, stage) for _, waits in steps)
        hops.append({"stage": stage, "hop": 0, "computing_seconds": local})
        for s in range(len(plan.hops)):
            moment = f"{stage}, hop {s + 1},"
            exposed = [sum(w.end - w.start for w in waits if w.moment.startswith(moment)) for _, waits in steps]
            computing = [_computing(waits, moment, seconds) for seconds, waits in steps]
            hops.append(
                {
                    "stage": stage,
                    "hop": s + 1,
                    "pairs": sum(tile.pairs for tile in plan.hops[s].tiles),
                    "sent_units": sum(m.size for m in plan.hops[s].sends),
                    "computing_seconds": quantiles(computing),
                    "messages_alone_seconds": alone[s],
                    "exposed_seconds": quantiles(exposed),
                }
            )
    shares = [sum(w.end - w.start for w in waits) / seconds for seconds, waits in steps]
    return {
        "step_seconds": quantiles(seconds for seconds, _ in steps),
        "computing_seconds": quantiles(t - sum(w.end - w.start for w in waits) for t, waits in steps),
        "exposed_share": quantiles(shares),
        "local_pairs": sum(tile.pairs for tile in plan.local),
        "hops": hops,
    }


def _computing(waits: Sequence[Wait], moment: str, step_seconds: float) -> float:
    """Seconds between a hop's waits and what follows: the work on what has arrived."""
    ordered = sorted(waits, key=lambda w: w.start)
    ends = [_next_work(w, after) for w, after in pairwise(ordered)]
    ends.append(min(w.posted for w in waits) + step_seconds)
    return sum(end - w.end for w, end in zip(ordered, ends, strict=True) if w.moment.startswith(moment))


def _next_work(wait: Wait, after: Wait) -> float:
    """When the work after a wait ends: at the next wait, or where backward begins by posting its first messages."""
    return after.start if _stage(wait) == _stage(after) else after.posted


def _stage(wait: Wait) -> str:
    return wait.moment.split(",")[0]


def _local(waits: Sequence[Wait], stage: str) -> float:
    """Seconds from a stage's first messages to its first wait: the work on own rows, while they fly."""
    own = [w for w in waits if _stage(w) == stage]
    return min(w.start for w in own) - min(w.posted for w in own)


def table(rows: list[dict[str, Any]]) -> str:
    headers = (
        "pattern",
        "rank",
        "stage",
        "hop",
        "computing, ms",
        "messages alone, ms",
        "exposed, ms",
        "step, s",
        "exposed share of it",
    )
    lines = []
    for row in rows:
        for i, hop in enumerate(row["hops"]):
            lines.append(
                (
                    f"{branches(row)}, {row['sharding']}" if i == 0 else "",
                    str(row["rank"]) if i == 0 else "",
                    hop["stage"],
                    str(hop["hop"] or "own rows"),
                    f"{1e3 * hop['computing_seconds']['median']:.1f}",
                    f"{1e3 * hop['messages_alone_seconds']:.1f}" if hop["hop"] else "",
                    f"{1e3 * hop['exposed_seconds']['median']:.1f}" if hop["hop"] else "",
                    f"{row['step_seconds']['median']:.2f}" if i == 0 else "",
                    f"{row['exposed_share']['median']:.1%}" if i == 0 else "",
                )
            )
    first = rows[0]
    return (
        f"{first['seq_len']:,} positions over {first['ranks']} ranks of one thread, {tensors(first)}, forward and "
        "backward. Exposed is what a rank waited, recorded by the run; the rest of the communication hid behind "
        f"computation. Messages alone: the hop's keys and values with nothing to compute.\n\n{markdown(headers, lines)}"
    )
