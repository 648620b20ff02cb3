"""Per hop: computation, communication and *exposed* communication (time in which a rank does nothing but wait).

All of it comes from the run itself, which records every wait on every link. A stage begins with a handshake, while the
rank computes with its own rows. What a rank waits before the others have posted the same messages is reported apart: it
is no communication, but a late rank. (The ranks are on one host, and read one clock.)
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from ring_dilated_attention.commands.errors import Squares
from ring_dilated_attention.commands.local_ranks import Launch, Worker, run_ranks
from ring_dilated_attention.pattern import DilatedPattern
from ring_dilated_attention.plan.job import Job
from ring_dilated_attention.plan.plan import Plan
from ring_dilated_attention.plan.planner import make_plan
from ring_dilated_attention.plan.sharding import Cut
from ring_dilated_attention.ranks.context import ContextParallel
from ring_dilated_attention.ranks.link import WaitTimes
from ring_dilated_attention.ranks.processes import recorded_waits

from .gate import gate, gate_squares
from .measure import Sizes, attend, make_tensors, quantiles
from .record import branches, markdown, tensors

SUMMARY = "per hop: computation, communication, and how much of it is exposed"
HANDSHAKE, CHUNKS, GRADIENTS = "handshake", "keys and values", "gradients"  # how a moment ends
LATE = "a late rank"


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
    Sizes(512, 2, 16),
    3,
    ((DilatedPattern((64, 512), (1, 16)), "contiguous"), (DilatedPattern((512,), (1,), is_causal=True), "zigzag")),
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
        plans, steps = plans_of(settings, pattern, sharding), [rank[i][1] for rank in ranks]
        for rank, plan in enumerate(plans):
            rows.append(
                {
                    "segment_lengths": pattern.segment_lengths,
                    "dilation_rates": pattern.dilation_rates,
                    "is_causal": pattern.is_causal,
                    "sharding": sharding,
                    **settings.sizes.as_json(),
                    "ranks": settings.num_ranks,
                    "threads_per_rank": launch.num_threads,
                    "rank": rank,
                    **summary(plan, steps),
                    "gate": passed,
                }
            )
    return rows


def plans_of(settings: Settings, pattern: DilatedPattern, sharding: str) -> list[Plan]:
    cut, heads = Cut(sharding, settings.num_ranks), settings.sizes.num_heads
    shards = cut.shards_of(cut.default_lengths(settings.sizes.seq_len))
    return [make_plan(Job(pattern, shards, heads, heads), rank) for rank in range(settings.num_ranks)]


class Stage(NamedTuple):
    """When a forward or a backward began and ended, and its waits."""

    begin: float
    end: float
    waits: list[WaitTimes]

    @property
    def seconds(self) -> float:
        return self.end - self.begin

    @property
    def exposed(self) -> float:
        return _exposed(self.waits)


Step = dict[str, Stage]


def _rank(worker: Worker, settings: Settings) -> list[tuple[Squares, list[Step]]]:
    results = []
    for pattern, sharding in settings.setups:
        parallel = ContextParallel(exchange="ring", sharding=sharding)
        squares = gate_squares(settings.sizes, pattern, parallel)
        steps: list[Step] = []
        for repeat in range(1 + settings.repeats):
            if worker.rank == 0:
                worker.report(f"{pattern.segment_lengths}, {sharding}")
            found = take_step(settings.sizes, pattern, parallel)
            steps += [found] if repeat else []
        results.append((squares, steps))
    return results


def take_step(sizes: Sizes, pattern: DilatedPattern, parallel: ContextParallel) -> Step:
    """One forward and its backward."""
    inputs, dout = make_tensors(sizes, parallel)
    parallel.ranks.handshake(0, {"call": "start together"})
    with recorded_waits(parallel.ranks) as waits:
        begin = time.perf_counter()
        out = attend(inputs, pattern, parallel)
        middle, num_forward = time.perf_counter(), len(waits)
        torch.autograd.grad(out, inputs, dout)
        end = time.perf_counter()
    return {"forward": Stage(begin, middle, waits[:num_forward]), "backward": Stage(middle, end, waits[num_forward:])}


def summary(plan: Plan, ranks: Sequence[Sequence[Step]]) -> dict[str, Any]:
    """One rank's step of all repeats, its exposed share, and what each stage is made of (handshake, own rows, hops).

    ranks: every rank's steps.
    """
    steps = ranks[plan.rank]
    seconds = [sum(stage.seconds for stage in step.values()) for step in steps]
    exposed = [sum(stage.exposed for stage in step.values()) for step in steps]
    return {
        "step_seconds": quantiles(seconds),
        "computing_seconds": quantiles(a - b for a, b in zip(seconds, exposed, strict=True)),
        "exposed_share": quantiles(b / a for a, b in zip(seconds, exposed, strict=True)),
        "parts": [
            found
            for name in steps[0]
            for found in _of_stage(plan, name, [[steps[i][name] for steps in ranks] for i in range(len(steps))])
        ],
    }


def _of_stage(plan: Plan, name: str, repeats: Sequence[Sequence[Stage]]) -> Iterator[dict[str, Any]]:
    """What one rank's stage is made of. Its computation and exposed time add up to the stage.

    repeats: for each repeat, every rank's stage.
    """
    stages = [stages[plan.rank] for stages in repeats]
    late = [_late(plan.rank, stages) for stages in repeats]

    def exposed(moment: str) -> dict[str, float]:
        found = (zip(stage.waits, lates, strict=True) for stage, lates in zip(stages, late, strict=True))
        return quantiles(sum(w.end - w.start - before for w, before in waits if moment in w.moment) for waits in found)

    yield {"stage": name, "part": LATE, "exposed_seconds": quantiles(map(sum, late))}
    yield {"stage": name, "part": HANDSHAKE, "exposed_seconds": exposed(HANDSHAKE)}
    working = [_working(stage, len(plan.hops)) for stage in stages]
    yield {
        "stage": name,
        "part": "own rows",
        "pairs": sum(tile.pairs for tile in plan.local),
        "computing_seconds": quantiles(found[0] for found in working),
    }
    for s, hop in enumerate(plan.hops, start=1):
        start = f"{name}, hop {s}, "
        waits = [[w for w in stage.waits if w.moment.startswith(start)] for stage in stages]
        yield {
            "stage": name,
            "part": f"hop {s}",
            "pairs": sum(tile.pairs for tile in hop.tiles),
            "sent_units": sum(m.size for m in hop.sends),
            "sent_gradient_units": sum(m.size for m in hop.grad_sends) if name == "backward" else 0,
            "computing_seconds": quantiles(found[s] for found in working),
            "chunks_in_flight_seconds": quantiles(_in_flight(found, CHUNKS) for found in waits),
            "gradients_in_flight_seconds": quantiles(_in_flight(found, GRADIENTS) for found in waits),
            "exposed_seconds": exposed(start),
        }


def _late(rank: int, stages: Sequence[Stage]) -> list[float]:
    """Of each wait of a rank, the seconds before all others had posted the same messages."""
    posted: dict[str, float] = {}
    for other in (stage for k, stage in enumerate(stages) if k != rank):
        for wait in other.waits:
            posted[wait.moment] = max(posted.get(wait.moment, 0.0), wait.posted)
    waits = stages[rank].waits
    return [max(min(w.end, posted.get(w.moment, 0.0)) - w.start, 0.0) for w in waits]


def _exposed(waits: Iterable[WaitTimes]) -> float:
    return sum(wait.end - wait.start for wait in waits)


def _in_flight(waits: Sequence[WaitTimes], kind: str) -> float:
    """Seconds from posting the messages of one kind until the last of them was through."""
    own = [wait for wait in waits if wait.moment.endswith(kind)]
    return max((w.arrived for w in own), default=0.0) - min((w.posted for w in own), default=0.0)


def _working(stage: Stage, num_hops: int) -> list[float]:
    """Seconds outside of waits: on own rows, and on what each hop brought, until the next hop's has come."""
    working = [0.0] * (1 + num_hops)
    hop, last = 0, stage.begin
    for wait in stage.waits:
        working[hop] += wait.start - last
        last = wait.end
        if wait.moment.endswith(CHUNKS):
            hop = int(wait.moment.split(", ")[1].removeprefix("hop "))
    working[hop] += stage.end - last
    return working


def table(rows: list[dict[str, Any]]) -> str:
    headers = (
        "pattern",
        "rank",
        "stage",
        "part",
        "computing, ms",
        "keys and values in flight, ms",
        "gradients in flight, ms",
        "exposed, ms",
        "step, s",
        "exposed share of it",
    )
    lines = []
    for row in rows:
        for i, found in enumerate(row["parts"]):
            lines.append(
                (
                    f"{branches(row)}, {row['sharding']}" if i == 0 else "",
                    str(row["rank"]) if i == 0 else "",
                    found["stage"],
                    found["part"],
                    _milliseconds(found, "computing_seconds"),
                    _milliseconds(found, "chunks_in_flight_seconds"),
                    _milliseconds(found, "gradients_in_flight_seconds"),
                    _milliseconds(found, "exposed_seconds"),
                    f"{row['step_seconds']['median']:.2f}" if i == 0 else "",
                    f"{row['exposed_share']['median']:.1%}" if i == 0 else "",
                )
            )
    first = rows[0]
    return (
        f"{first['seq_len']:,} positions over {first['ranks']} ranks of one thread, {tensors(first)}, forward and "
        "backward, recorded by the run itself. In flight: from posting a hop's messages until the last is through, "
        "waiting for the other side to post its own included. Exposed: what a rank waited for them; the rest hid behind"
        " computation. A late rank: what it waited before the others had posted the same messages.\n\n"
        f"{markdown(headers, lines)}"
    )


def _milliseconds(found: dict[str, Any], name: str) -> str:
    return f"{1e3 * found[name]['median']:.1f}" if found.get(name, {}).get("max") else ""
