"""Dense attention and a fixed pattern at several lengths: below which length is dense attention faster?"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from ring_dilated_attention.pattern import DilatedPattern

from .gate import gate
from .measure import Sizes, by_turns, call_json, dense_call, dilated_call, quantiles
from .record import branches, markdown, seconds, tensors

SUMMARY = "the length below which dense attention is faster"
MINUTES = 2


class Settings(NamedTuple):
    repeats: Mapping[int, int] = {1024: 15, 2048: 15, 4096: 9, 8192: 7, 16_384: 3}
    sizes: Sizes = Sizes(seq_len=0, num_heads=4, head_dim=64)
    branches: tuple[tuple[int, ...], tuple[int, ...]] = ((2048, 4096), (1, 2))


FULL = Settings()
QUICK = Settings({256: 2, 1024: 2}, Sizes(0, 2, 32), ((128, 256), (1, 2)))


def run(settings: Settings, step: Callable[[str], None]) -> list[dict[str, Any]]:
    rows = []
    for is_causal in (False, True):
        pattern = DilatedPattern(*settings.branches, is_causal=is_causal)
        of_pattern = []
        for n, repeats in settings.repeats.items():
            of_pattern.append(_row(settings.sizes._replace(seq_len=n), pattern, repeats, step))
        first = first_faster({row["seq_len"]: row["speed_up"] for row in of_pattern})
        rows += [row | {"faster_from": first} for row in of_pattern]
    return rows


def _row(
    sizes: Sizes, pattern: DilatedPattern, repeats: int, step: Callable[[str], None]
) -> dict[str, Any]:
    passed = gate(sizes, pattern)
    ours, dense = f"{sizes.seq_len:,} positions", f"{sizes.seq_len:,} positions, dense"
    calls = {
        dense: dense_call(sizes, is_causal=pattern.is_causal),
        ours: dilated_call(sizes, pattern),
    }
    times = by_turns(calls, repeats, step)
    seconds = {name: quantiles(t.both for t in times[name]) for name in calls}
    return {
        **call_json(sizes, pattern),
        "dense_seconds": seconds[dense],
        "seconds": seconds[ours],
        "speed_up": seconds[dense]["median"] / seconds[ours]["median"],
        "gate": passed,
    }


def first_faster(speed_up: Mapping[int, float]) -> int | None:
    """The smallest measured length such that the pattern is faster there and at all greater ones, or None.

    speed_up: at each length, the time of dense attention over the pattern's.
    """
    first = None
    for n, factor in sorted(speed_up.items(), reverse=True):
        if factor <= 1:
            break
        first = n
    return first


def table(rows: list[dict[str, Any]]) -> str:
    headers = ("pattern", "positions", "dense, s", "ours, s", "speed-up")
    lines = [
        (
            branches(row),
            f"{row['seq_len']:,}",
            seconds(row["dense_seconds"]),
            seconds(row["seconds"]),
            f"{row['speed_up']:.2f}x",
        )
        for row in rows
    ]
    found = {branches(row): row["faster_from"] for row in rows}
    said = "; ".join(
        f"{name} is faster than dense attention from {n:,} positions on"
        if n
        else f"{name} is never faster"
        for name, n in found.items()
    )
    return f"{tensors(rows[0])}, forward and backward. Among these lengths, {said}.\n\n{markdown(headers, lines)}"
