"""Times of `rda plan`, with what `rda doctor` found, beside measured ones: shapes that the doctor does not know."""

import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch

from ring_dilated_attention.commands.doctor import doctor, examination
from ring_dilated_attention.commands.local_ranks import Launch, Worker, run_ranks
from ring_dilated_attention.forecast.clock import model_step
from ring_dilated_attention.pattern import DilatedPattern
from ring_dilated_attention.plan.job import Job
from ring_dilated_attention.plan.planner import make_plan
from ring_dilated_attention.plan.sharding import make_shards, split_lengths
from ring_dilated_attention.ranks.context import ContextParallel

from .gate import gate, gate_squares
from .measure import Sizes, attend, make_tensors
from .record import branches, markdown, tensors

SUMMARY = "times that rda plan models with rda doctor's file, beside measured ones"
NUM_RANKS, REPEATS, TARGET = 2, 5, 0.15


class Settings(NamedTuple):
    """doctor_rows: of the attention by which the doctor measures rates."""

    jobs: tuple[tuple[Sizes, DilatedPattern], ...]
    doctor_rows: int = examination.ROWS
    seconds: float = 300


FULL = Settings(
    (
        (Sizes(16_384, 4, 64), DilatedPattern.dense()),
        (Sizes(32_768, 8, 64), DilatedPattern((4096, 32_768), (1, 4))),
        (Sizes(32_768, 4, 64), DilatedPattern((8192, 32_768), (1, 8), is_causal=True)),
        (Sizes(16_384, 8, 128), DilatedPattern((2048, 16_384), (1, 16))),
    )
)
QUICK = Settings(((Sizes(512, 2, 16), DilatedPattern((128, 512), (1, 4))),), doctor_rows=256)


def num_steps(settings: Settings) -> int:
    return 1


def run(settings: Settings, step: Callable[[str], None]) -> list[dict[str, Any]]:
    step("the doctor, then every job")
    launch = Launch(NUM_RANKS, is_pinned=True, seconds=settings.seconds)
    ranks = run_ranks(launch, _measure, settings)
    hardware = doctor.hardware_of(ranks[0][0])
    rows = []
    for i, (sizes, pattern) in enumerate(settings.jobs):
        shards = make_shards("contiguous", split_lengths(sizes.seq_len, NUM_RANKS))
        plans = [make_plan(Job(pattern, shards, sizes.num_heads, sizes.num_heads), rank) for rank in range(NUM_RANKS)]
        # A step ends when the slowest rank does; both begin together.
        times = [max(rank[1][i][0][k] for rank in ranks) for k in range(REPEATS)]
        median = statistics.median(times)
        modelled = model_step(plans, sizes.planned(), hardware).step_seconds
        rows.append(
            {
                "segment_lengths": pattern.segment_lengths,
                "dilation_rates": pattern.dilation_rates,
                "is_causal": pattern.is_causal,
                **sizes.as_json(),
                "ranks": NUM_RANKS,
                "hardware": hardware._asdict(),
                "seconds": {"min": min(times), "median": median, "max": max(times), "repeats": REPEATS},
                "modelled_seconds": modelled,
                "off": modelled / median - 1,
                "target": TARGET,
                "gate": gate(sizes, pattern, [rank[1][i][1] for rank in ranks]),
            }
        )
    return rows


def _measure(worker: Worker, settings: Settings) -> tuple[Any, Any]:
    with mock.patch.object(examination, "ROWS", settings.doctor_rows):
        found = examination.examine(Path("."), settings.seconds, os.environ, "float32")
    parallel = ContextParallel(exchange="ring")
    return found, [
        (_times(sizes, pattern, parallel), gate_squares(sizes, pattern, parallel)) for sizes, pattern in settings.jobs
    ]


def _times(sizes: Sizes, pattern: DilatedPattern, parallel: ContextParallel) -> list[float]:
    inputs, dout = make_tensors(sizes, parallel)
    times = []
    for _ in range(REPEATS + 1):
        parallel.ranks.handshake(1, {"call": "begin together"})
        began = time.perf_counter()
        out = attend(inputs, pattern, parallel)
        torch.autograd.grad(out, inputs, dout)
        times.append(time.perf_counter() - began)
    return times[1:]


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        (
            branches(row),
            f"{row['seq_len']:,}",
            tensors(row),
            f"{row['seconds']['median']:.3g}",
            f"{row['modelled_seconds']:.3g}",
            f"{row['off']:+.1%}",
        )
        for row in rows
    ]
    headers = ("pattern", "positions", "tensors", "measured, s", "modelled, s", "off by")
    return f"Two ranks of one thread, forward and backward, median of {REPEATS}.\n\n{markdown(headers, lines)}"
