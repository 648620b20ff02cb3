"""One rank's share of 1,073,741,824 positions, run and verified row by row (`benchmarks.slice` takes other sizes)."""

from collections.abc import Callable
from typing import Any

from ring_dilated_attention.pattern import DilatedPattern

from .gate import GateError
from .record import markdown
from .slice.report import measure, num_steps_of, text
from .slice.share import SlicedJob, choose_rank, longnet_pattern

SUMMARY = "one rank's share of a billion positions, verified row by row"

FULL = SlicedJob(longnet_pattern(2**30), 2**30, 2**16)
QUICK = SlicedJob(DilatedPattern((64, 512, 4096), (1, 3, 17), is_causal=True), 4096, 16, head_dim=16)


def num_steps(settings: SlicedJob) -> int:
    return num_steps_of(settings, choose_rank(settings))


def run(settings: SlicedJob, step: Callable[[str], None]) -> list[dict[str, Any]]:
    row = measure(settings, choose_rank(settings), step)
    if not row["passed"]:
        raise GateError(f"relative L2 error {row['error']:.2e} exceeds {row['tolerance']:.2e}: {row['checks']}")
    return [row]


def table(rows: list[dict[str, Any]]) -> str:
    return "\n\n".join(text(row, markdown) for row in rows)
