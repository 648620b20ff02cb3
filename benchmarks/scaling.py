"""Parallel efficiency of two ranks, and the highest efficiency that this machine allows (the ceiling).

Each rank has one thread. T1 is the time of one rank, and T2 that of two ranks. Parallel efficiency is T1 / (2 T2). For
the ceiling T2 is the time of two processes that exchange nothing: each computes half of the heads over all positions.

The three setups are timed in turn, in the same two processes, each on a core of its own. The waiting share is the part
of T2 in which a rank only waits for messages. All this is for two cores: it does not tell how more ranks scale.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from ring_dilated_attention.commands.errors import Squares
from ring_dilated_attention.commands.local_ranks import Launch, Worker, run_ranks
from ring_dilated_attention.pattern import DilatedPattern
from ring_dilated_attention.ranks.context import ContextParallel
from ring_dilated_attention.ranks.processes import recorded_waits

from .device import meet
from .gate import gate, gate_squares
from .measure import Sizes, Times, call_json, dilated_call, planned_bytes, quantiles
from .record import branches, markdown, seconds, tensors

SUMMARY = "parallel efficiency of two ranks, beside the machine's ceiling"
MINUTES = 6
NUM_RANKS = 2
SETUPS = ("one rank", "two ranks", "two processes, half of the heads each")
WAITING = "waiting share of two ranks"


class Settings(NamedTuple):
    sizes: Sizes = Sizes(32_768, 4, 64)
    # (pattern, sharding, number of repeats)
    patterns: tuple[tuple[DilatedPattern, str, int], ...] = (
        (DilatedPattern((2048, 32_768), (1, 16)), "contiguous", 9),
        (DilatedPattern((32_768,), (1,)), "contiguous", 2),
        (DilatedPattern((32_768,), (1,), is_causal=True), "zigzag", 3),
    )
    seconds: float = 1800


FULL = Settings()
QUICK = Settings(
    Sizes(2048, 2, 32),
    (
        (DilatedPattern((256, 2048), (1, 16)), "contiguous", 2),
        (DilatedPattern((2048,), (1,), is_causal=True), "zigzag", 1),
    ),
    120,
)


def run(settings: Settings, step: Callable[[str], None]) -> list[dict[str, Any]]:
    launch = Launch(NUM_RANKS, num_threads=1, is_pinned=True, seconds=settings.seconds)
    ranks = run_ranks(launch, _rank, settings, on_report=lambda rank, message: step(message))
    rows = []
    for i, (pattern, sharding, _) in enumerate(settings.patterns):
        passed = gate(settings.sizes, pattern, [results[i][0] for results in ranks])
        row = _row(settings.sizes, pattern, sharding, [results[i][1] for results in ranks])
        rows.append(row | {"threads_per_rank": launch.num_threads, "gate": passed})
    return rows


def _rank(worker: Worker, settings: Settings) -> list[tuple[Squares, dict[str, list[float]]]]:
    """For each pattern: this rank's part of the gate, and its seconds in each setup and waiting share by repeat."""
    results = []
    for pattern, sharding, repeats in settings.patterns:
        parallel = ContextParallel(exchange="ring", sharding=sharding)
        squares = gate_squares(settings.sizes, pattern, parallel)
        calls = _calls(worker, settings.sizes, pattern, parallel)
        times: dict[str, list[float]] = {name: [] for name in (*SETUPS, WAITING)}
        for _ in range(repeats):
            for setup, call in calls.items():  # no run to warm up: the gate was a call already
                if worker.rank == 0:
                    worker.report(f"{branches(call_json(settings.sizes, pattern))}, {setup}")
                meet(parallel)
                if call is None:
                    continue
                with recorded_waits(parallel.ranks) as waits:
                    times[setup].append(call().both)
                if setup == SETUPS[1]:
                    times[WAITING].append(
                        sum(wait.end - wait.start for wait in waits) / times[setup][-1]
                    )
        results.append((squares, times))
    return results


def _calls(
    worker: Worker, sizes: Sizes, pattern: DilatedPattern, parallel: ContextParallel
) -> dict[str, Callable[[], Times] | None]:
    half = sizes._replace(num_heads=sizes.num_heads // NUM_RANKS)
    return {
        SETUPS[0]: dilated_call(sizes, pattern) if worker.rank == 0 else None,
        SETUPS[1]: dilated_call(sizes, pattern, parallel),
        SETUPS[2]: dilated_call(half, pattern),
    }


def _row(
    sizes: Sizes, pattern: DilatedPattern, sharding: str, ranks: list[dict[str, list[float]]]
) -> dict[str, Any]:
    one, two, apart, waiting = (_slowest(ranks, name) for name in (*SETUPS, WAITING))
    efficiency = quantiles(a / (NUM_RANKS * b) for a, b in zip(one, two, strict=True))
    ceiling = quantiles(a / (NUM_RANKS * b) for a, b in zip(one, apart, strict=True))
    assert all(planned_bytes(sizes, pattern, NUM_RANKS, sharding)), (
        "two ranks that send nothing measure no exchange"
    )
    return {
        **call_json(sizes, pattern),
        "sharding": sharding,
        "one_rank_seconds": quantiles(one),
        "two_ranks_seconds": quantiles(two),
        "two_processes_seconds": quantiles(apart),
        "efficiency": efficiency,
        "ceiling": ceiling,
        "ratio": efficiency["median"] / ceiling["median"],
        "waiting_share": quantiles(waiting),
    }


def _slowest(ranks: list[dict[str, list[float]]], name: str) -> list[float]:
    """For each repeat the largest value of a setup over the ranks that ran it."""
    took_part = [times[name] for times in ranks if times[name]]
    return [max(of_repeat) for of_repeat in zip(*took_part, strict=True)]


def table(rows: list[dict[str, Any]]) -> str:
    headers = (
        "pattern",
        "one rank, s",
        "two ranks, s",
        "two processes apart, s",
        "efficiency",
        "ceiling",
        "of the ceiling",
        "waiting",
    )
    lines = [
        (
            branches(row) + (", zigzag" if row["sharding"] == "zigzag" else ""),
            seconds(row["one_rank_seconds"]),
            seconds(row["two_ranks_seconds"]),
            seconds(row["two_processes_seconds"]),
            f"{row['efficiency']['median']:.1%}",
            f"{row['ceiling']['median']:.1%}",
            f"{row['ratio']:.1%}",
            f"{row['waiting_share']['median']:.1%}",
        )
        for row in rows
    ]
    first = rows[0]
    return (
        f"{first['seq_len']:,} positions, {tensors(first)}, forward and backward, one thread per rank. The ceiling is "
        f"that of two processes that exchange nothing and compute half of the heads each. Waiting: the share of a "
        f"step, of the rank that waits longer, in hops and handshakes.\n\n{markdown(headers, lines)}"
    )
