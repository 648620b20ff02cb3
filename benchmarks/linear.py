"""Time against length at a fixed pattern. Time grows as length to the power of an exponent, which should be 1."""

import math
import statistics
from collections.abc import Callable
from typing import Any, NamedTuple

from ring_dilated_attention.pattern import DilatedPattern

from .gate import gate
from .measure import Sizes, by_turns, call_json, dilated_call, quantiles
from .record import branches, markdown, seconds, tensors

SUMMARY = "time against length at a fixed pattern"
MINUTES = 5
TARGET = (0.97, 1.03)


class Settings(NamedTuple):
    lengths: tuple[int, ...] = (16_384, 32_768, 65_536, 131_072, 262_144)
    sizes: Sizes = Sizes(seq_len=0, num_heads=4, head_dim=64)
    pattern: DilatedPattern = DilatedPattern((2048, 4096), (1, 2))
    repeats: int = 5


FULL = Settings()
QUICK = Settings((1024, 2048, 4096), Sizes(0, 2, 32), DilatedPattern((256, 512), (1, 2)), 2)


def run(settings: Settings, step: Callable[[str], None]) -> list[dict[str, Any]]:
    sizes = {f"{n:,} positions": settings.sizes._replace(seq_len=n) for n in settings.lengths}
    gates = {name: gate(of_length, settings.pattern) for name, of_length in sizes.items()}
    calls = {name: dilated_call(of_length, settings.pattern) for name, of_length in sizes.items()}
    times = by_turns(calls, settings.repeats, step)
    rows = []
    for name, of_length in sizes.items():
        row = {
            **call_json(of_length, settings.pattern),
            "forward_seconds": quantiles(t.forward for t in times[name]),
            "seconds": quantiles(t.both for t in times[name]),
            "gate": gates[name],
        }
        rows.append(row)
    slope = exponent({row["seq_len"]: row["seconds"]["median"] for row in rows})
    return [row | {"exponent": slope} for row in rows]


def exponent(seconds_at: dict[int, float]) -> float:
    """The exponent: the slope of log(time) over log(length), by least squares. seconds_at: the time at each length."""
    x = [math.log(n) for n in seconds_at]
    y = [math.log(t) for t in seconds_at.values()]
    return statistics.linear_regression(x, y).slope


def table(rows: list[dict[str, Any]]) -> str:
    headers = ("positions", "forward, s", "forward + backward, s", "positions per second")
    lines = [
        (
            f"{row['seq_len']:,}",
            seconds(row["forward_seconds"]),
            seconds(row["seconds"]),
            f"{row['seq_len'] / row['seconds']['median']:,.0f}",
        )
        for row in rows
    ]
    first = rows[0]
    return (
        f"{branches(first)}, {tensors(first)}. Time grows with length to the power of "
        f"{first['exponent']:.3f} (target {TARGET[0]} to {TARGET[1]}).\n\n{markdown(headers, lines)}"
    )
