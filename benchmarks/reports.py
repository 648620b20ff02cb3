"""Milliseconds and memory at the shapes of the five reports that began this project (docs/reports.md).

Their model is 768 wide: 12 heads of 64, branches (2048, 4096)/(1, 2), float32. Their code splits the heads between the
branches, LongNet gives every branch to every head: both are measured. A rank is one process of one thread on a core of
its own. One rank and two ranks take turns; on one rank the other process waits. Memory is the allocator's exact peak.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from ring_dilated_attention.commands.local_ranks import Launch, Worker, run_ranks
from ring_dilated_attention.pattern import HEAD_RULES, DilatedPattern
from ring_dilated_attention.ranks.context import ContextParallel

from .gate import gate
from .measure import Sizes, Times, dilated_call, quantiles
from .ranks import Found, measure_rank
from .record import branches, markdown, seconds, tensors

SUMMARY = "time and memory at the shapes of the five reports (docs/reports.md)"
TIMED_RANKS = (1, 2)


class Settings(NamedTuple):
    lengths: tuple[int, ...] = (4096, 8192, 16_384, 32_768, 65_536)
    sizes: Sizes = Sizes(seq_len=0, num_heads=12, head_dim=64)
    pattern: DilatedPattern = DilatedPattern((2048, 4096), (1, 2))
    more_ranks: tuple[tuple[int, int], ...] = ((4, 32_768), (8, 32_768))  # of which only memory is measured, where
    repeats: int = 3
    seconds: float = 3600


FULL = Settings()
QUICK = Settings((1000,), Sizes(0, 4, 16), DilatedPattern((64, 128), (1, 2)), ((3, 1000),), 1, 60)


class Shape(NamedTuple):
    """What is measured, and whether it is timed or only its memory is taken."""

    num_ranks: int
    seq_len: int
    pattern: DilatedPattern
    is_timed: bool


def shapes(settings: Settings) -> Iterator[Shape]:
    """All that is measured, in the order of the table."""
    for heads in reversed(HEAD_RULES):
        pattern = replace(settings.pattern, heads=heads)
        for n in settings.lengths:
            yield from (Shape(p, n, pattern, True) for p in TIMED_RANKS)
            yield from (Shape(p, n, pattern, False) for p, where in settings.more_ranks if where == n)


def num_steps(settings: Settings) -> int:
    return settings.repeats * sum(shape.is_timed for shape in shapes(settings)) + len(list(shapes(settings)))


def run(settings: Settings, step: Callable[[str], None]) -> list[dict[str, Any]]:
    every = list(shapes(settings))
    found: dict[Shape, list[Found]] = {}
    for p in sorted({shape.num_ranks for shape in every}):
        own = [shape for shape in every if shape.num_ranks == p]
        launch = Launch(p, seconds=settings.seconds)
        ranks = run_ranks(launch, _memory, settings.sizes, own, on_report=lambda rank, message: step(message))
        found |= {shape: [rank[i] for rank in ranks] for i, shape in enumerate(own)}
    timed = [shape for shape in every if shape.is_timed]
    launch = Launch(max(TIMED_RANKS), is_pinned=True, seconds=settings.seconds)
    ranks = run_ranks(launch, _times, settings, timed, on_report=lambda rank, message: step(message))
    times = {
        shape: [_slowest(r) for r in zip(*[rank[i] for rank in ranks if rank[i]], strict=True)]
        for i, shape in enumerate(timed)
    }
    rows = []
    for shape in every:
        row = _row(settings.sizes._replace(seq_len=shape.seq_len), shape, found[shape])
        if shape.is_timed:
            alone = times[shape._replace(num_ranks=1)]
            row["forward_seconds"] = quantiles(t.forward for t in times[shape])
            row["seconds"] = quantiles(t.both for t in times[shape])
            row["speed_up"] = quantiles(a.both / b.both for a, b in zip(alone, times[shape], strict=True))
        rows.append(row)
    return rows


def _slowest(ranks: tuple[Times, ...]) -> Times:
    return Times(max(t.forward for t in ranks), max(t.backward for t in ranks))


def _memory(worker: Worker, sizes: Sizes, every: list[Shape]) -> list[Found]:
    """This rank's part of the gate, its peaks and what it sent, for each shape."""
    found = []
    for shape in every:
        if worker.rank == 0:
            worker.report(f"memory, {shape.seq_len:,} positions on {shape.num_ranks}")
        found.append(measure_rank(worker, sizes._replace(seq_len=shape.seq_len), shape.pattern))
    return found


def _times(worker: Worker, settings: Settings, timed: list[Shape]) -> list[list[Times]]:
    """This rank's times of each shape; none where it only waits."""
    parallel = ContextParallel(exchange="ring")
    times: list[list[Times]] = [[] for _ in timed]
    for _ in range(settings.repeats):
        for i, shape in enumerate(timed):
            if worker.rank == 0:
                worker.report(f"time, {shape.seq_len:,} positions on {shape.num_ranks}")
            sizes, is_alone = settings.sizes._replace(seq_len=shape.seq_len), shape.num_ranks == 1
            parallel.ranks.handshake(0, {"call": "start together"})  # and leave the core to whoever is alone
            if worker.rank < shape.num_ranks:
                context = None if is_alone else parallel
                # What is made once, by the first call, is not the call's.
                dilated_call(sizes._replace(seq_len=settings.pattern.segment_lengths[0]), shape.pattern, context)()
                times[i].append(dilated_call(sizes, shape.pattern, context)())
    return times


def _row(sizes: Sizes, shape: Shape, found: list[Found]) -> dict[str, Any]:
    return {
        "segment_lengths": shape.pattern.segment_lengths,
        "dilation_rates": shape.pattern.dilation_rates,
        "is_causal": shape.pattern.is_causal,
        "heads": shape.pattern.heads,
        **sizes.as_json(),
        "ranks": shape.num_ranks,
        "threads_per_rank": 1,
        "forward_bytes": max(one.forward for one in found),
        "forward_backward_bytes": max(one.forward_backward for one in found),
        "sent_bytes": max(one.sent_bytes for one in found),
        "gate": gate(sizes, shape.pattern, [one.squares for one in found]),
    }


def table(rows: list[dict[str, Any]]) -> str:
    headers = (
        "heads of a branch",
        "positions",
        "ranks",
        "forward, s",
        "forward + backward, s",
        "speed-up",
        "forward, MB",
        "forward + backward, MB",
        "sent per rank, MB",
    )
    lines = [
        (
            row["heads"],
            f"{row['seq_len']:,}",
            str(row["ranks"]),
            seconds(row["forward_seconds"]) if "seconds" in row else "",
            seconds(row["seconds"]) if "seconds" in row else "",
            f"{row['speed_up']['median']:.2f}" if "seconds" in row and row["ranks"] > 1 else "",
            f"{row['forward_bytes'] / 1e6:.1f}",
            f"{row['forward_backward_bytes'] / 1e6:.1f}",
            f"{row['sent_bytes'] / 1e6:.1f}",
        )
        for row in rows
    ]
    first = rows[0]
    return (
        f"{branches(first)}, {tensors(first)}. A rank is one thread on a core of its own; more ranks than two are not "
        "timed. Memory is that of the rank that holds most, inputs included. Split: each head has one of the branches, "
        f"as in the reports' code; all: each head has every branch, as in LongNet.\n\n{markdown(headers, lines)}"
    )
