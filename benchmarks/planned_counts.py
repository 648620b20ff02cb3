"""CPU seconds in which `rda plan` counts and estimates a job of many ranks, with as many documents as it is meant for.

The CPU time of this process is measured, so other processes matter little. Before that, the counts of the same branches
are compared with the plans of all ranks in a small job. The case fails if the best time of a row misses its target.
"""

import random
import time
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from functools import partial
from io import StringIO
from itertools import pairwise
from typing import Any, NamedTuple

from ring_dilated_attention.commands import cli
from ring_dilated_attention.forecast.call_cost import Way, all_plans, count, forecast
from ring_dilated_attention.forecast.clock import Hardware
from ring_dilated_attention.forecast.exchanges import advice
from ring_dilated_attention.kernels.traits import TRAITS
from ring_dilated_attention.pattern import DilatedPattern
from ring_dilated_attention.plan.job import Job
from ring_dilated_attention.plan.sharding import make_shards, split_lengths
from ring_dilated_attention.plan.sizes import Sizes

from .gate import GateError
from .record import branches, markdown

SUMMARY = "CPU seconds of rda plan for thousands of ranks and documents"
NUM_HEADS, HEAD_DIM, RATES = 64, 128, (1, 4, 16, 64, 256)
SLOW = Hardware(1e15, 1e8, 1e-5)  # bound by communication, so that advice is given too


class Settings(NamedTuple):
    seq_len: int
    segment_lengths: tuple[int, ...]
    num_documents: int
    targets: dict[int, float]  # by number of ranks: CPU seconds
    repeats: int


FULL = Settings(2**30, (2**11, 2**14, 2**20, 2**25, 2**30), 10_000, {4096: 3.0, 65_536: 10.0}, 3)
QUICK = Settings(2**14, (2**7, 2**8, 2**9, 2**12, 2**14), 40, {128: 3.0}, 1)


def num_steps(settings: Settings) -> int:
    return len(KINDS) * 2 * len(settings.targets)


def run(settings: Settings, step: Callable[[str], None]) -> list[dict[str, Any]]:
    pattern, passed, rows = DilatedPattern(settings.segment_lengths, RATES, is_causal=True), gate(), []
    for num_ranks, target in settings.targets.items():
        for shards, measure in KINDS.items():
            for exchange in ("ring", "all_gather"):
                step(f"{num_ranks:,} ranks, {shards} shards, {exchange}")
                rng = random.Random(num_ranks)
                times = [measure(rng, settings, pattern, num_ranks, exchange) for _ in range(settings.repeats)]
                sizes = {"seq_len": settings.seq_len, "num_heads": NUM_HEADS, "head_dim": HEAD_DIM, "dtype": "bfloat16"}
                rows.append(
                    {
                        "segment_lengths": pattern.segment_lengths,
                        "dilation_rates": pattern.dilation_rates,
                        "is_causal": pattern.is_causal,
                        **sizes,
                        "num_documents": settings.num_documents,
                        "ranks": num_ranks,
                        "shards": shards,
                        "exchange": exchange,
                        "cpu_seconds": times,
                        "target": target,
                        "gate": passed,
                    }
                )
    check_targets(rows)
    return rows


def check_targets(rows: list[dict[str, Any]]) -> None:
    """Raise GateError if the best time of a row is above its target."""
    missed = [
        f"{row['ranks']:,} ranks, {row['shards']} shards, {row['exchange']}: at best {min(row['cpu_seconds']):.2f} CPU "
        f"seconds, and the target is {row['target']:g}"
        for row in rows
        if min(row["cpu_seconds"]) > row["target"]
    ]
    if missed:
        raise GateError("; ".join(missed))


def gate() -> dict[str, Any]:
    """Raise GateError unless the counts of a small job are those of its plans."""
    job = _job(random.Random(0), QUICK._replace(seq_len=2**10), DilatedPattern((7, 2**8, 2**10), (1, 4, 16)), 12)
    [place], plans = count(job, Way()).places, [x.plan for x in all_plans(job, Way())]
    comes = [sum(message.size for hop in plan.hops for message in hop.receives) for plan in plans]
    off = [abs(a - b) for a, b in zip(place.counted.pairs, (plan.pairs for plan in plans), strict=True)]
    off += [abs(a - b) for a, b in zip(place.counted.received, comes, strict=True)]
    if max(off):
        raise GateError(f"the counts of 12 ranks differ from their plans by up to {max(off):,}")
    return {"passed": True, "error": max(off), "tolerance": 0}


def _documents(rng: random.Random, settings: Settings) -> tuple[int, ...]:
    return 0, *sorted(rng.sample(range(1, settings.seq_len), settings.num_documents - 1)), settings.seq_len


def _job(rng: random.Random, settings: Settings, pattern: DilatedPattern, num_ranks: int) -> Job:
    """A job of uneven shards: a tenth of the ranks gives half of its positions to the next rank."""
    lengths = list(split_lengths(settings.seq_len, num_ranks))
    for rank in rng.sample(range(num_ranks - 1), num_ranks // 10):
        given = lengths[rank] // 2
        lengths[rank], lengths[rank + 1] = lengths[rank] - given, lengths[rank + 1] + given
    return Job(pattern, make_shards("contiguous", lengths), NUM_HEADS, NUM_HEADS, _documents(rng, settings))


def _seconds_of_command(
    rng: random.Random,
    settings: Settings,
    pattern: DilatedPattern,
    num_ranks: int,
    exchange: str,
    sharding: str = "contiguous",
) -> float:
    lengths = [b - a for a, b in pairwise(_documents(rng, settings))]
    argv = ["plan", "--seq-len", settings.seq_len, "--ranks", num_ranks, "--causal", "--exchange", exchange]
    argv += ["--sharding", sharding]
    argv += ["--segment-lengths", *pattern.segment_lengths, "--dilation-rates", *pattern.dilation_rates]
    argv += ["--heads", NUM_HEADS, "--head-dim", HEAD_DIM, "--dtype", "bfloat16", "--documents", *lengths, "--json"]
    argv += ["--flops", SLOW.flops_per_second, "--bandwidth", SLOW.bytes_per_second, "--latency", SLOW.latency_seconds]
    began = time.process_time()
    with redirect_stdout(StringIO()), redirect_stderr(StringIO()):  # its progress is not ours
        code = cli.main(list(map(str, argv)))
    if code:
        raise GateError(f"rda plan ended with {code}")
    return time.process_time() - began


def _seconds_of_forecast(
    rng: random.Random, settings: Settings, pattern: DilatedPattern, num_ranks: int, exchange: str
) -> float:
    """What the command does after it has read its options, which know no uneven shards."""
    job, way, sizes = _job(rng, settings, pattern, num_ranks), Way(exchange), Sizes(1, HEAD_DIM, 2)
    began = time.process_time()
    figures = forecast(job, way, sizes, traits=TRAITS["cpu"], hardware=SLOW)
    advice(job, way, sizes, figures, SLOW)
    return time.process_time() - began


KINDS: dict[str, Callable[[random.Random, Settings, DilatedPattern, int, str], float]] = {
    "near-equal": _seconds_of_command,
    "zigzag": partial(_seconds_of_command, sharding="zigzag"),
    "uneven": _seconds_of_forecast,
}


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        (
            f"{row['ranks']:,}",
            f"{row['shards']}, {row['num_documents']:,} documents",
            row["exchange"],
            f"{min(row['cpu_seconds']):.2f} to {max(row['cpu_seconds']):.2f}",
            f"{row['target']:g}",
        )
        for row in rows
    ]
    headers = ("ranks", "shards", "exchange", "CPU seconds", "at most")
    how = "Near-equal and zigzag shards: the whole command rda plan, with times. Uneven ones: its forecast and advice."
    return f"{branches(rows[0])}, {rows[0]['num_heads']} heads. {how}\n\n{markdown(headers, lines)}"
