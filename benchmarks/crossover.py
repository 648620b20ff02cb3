"""Dense attention against a fixed pattern, length by length: below which length dense attention is the faster call."""

import statistics
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from ring_dilated_attention.pattern import DilatedPattern

from .gate import gate
from .measure import Sizes, Times, dense_call, dilated_call, quantiles
from .record import branches, markdown, seconds, tensors

SUMMARY = "the length below which dense attention is faster"


class Settings(NamedTuple):
    repeats: Mapping[int, int] = {1024: 15, 2048: 15, 4096: 9, 8192: 7, 16_384: 3}
    sizes: Sizes = Sizes(seq_len=0, num_heads=4, head_dim=64)
    branches: tuple[tuple[int, ...], tuple[int, ...]] = ((2048, 4096), (1, 2))


FULL = Settings()
QUICK = Settings({256: 2, 1024: 2}, Sizes(0, 2, 32), ((128, 256), (1, 2)))


def num_steps(settings: Settings) -> int:
    return 2 * sum(1 + repeats for repeats in settings.repeats.values())


def run(settings: Settings, step: Callable[[str], None]) -> list[dict[str, Any]]:
    rows = []
    for is_causal in (False, True):
        pattern = DilatedPattern(*settings.branches, is_causal=is_causal)
        found = [
            _row(settings.sizes._replace(seq_len=n), pattern, repeats, step) for n, repeats in settings.repeats.items()
        ]
        first = first_faster({row["seq_len"]: row["speed_up"] for row in found})
        rows += [row | {"faster_from": first} for row in found]
    return rows


def _row(sizes: Sizes, pattern: DilatedPattern, repeats: int, step: Callable[[str], None]) -> dict[str, Any]:
    passed = gate(sizes, pattern)
    dense, ours = dense_call(sizes, is_causal=pattern.is_causal), dilated_call(sizes, pattern)
    times: list[tuple[Times, Times]] = []
    small = sizes._replace(seq_len=min(sizes.seq_len, 1024))  # a long dense call is too dear for a warm-up
    dense_call(small, is_causal=pattern.is_causal)()
    ours()
    step(f"{sizes.seq_len:,} positions, warm-up")
    for _ in range(repeats):
        step(f"{sizes.seq_len:,} positions{', causal' if pattern.is_causal else ''}")
        times.append((dense(), ours()))
    theirs, mine = ([t.both for t in column] for column in zip(*times, strict=True))
    return {
        "segment_lengths": pattern.segment_lengths,
        "dilation_rates": pattern.dilation_rates,
        "is_causal": pattern.is_causal,
        **sizes.as_json(),
        "dense_seconds": quantiles(theirs),
        "seconds": quantiles(mine),
        "speed_up": statistics.median(theirs) / statistics.median(mine),
        "gate": passed,
    }


def first_faster(speed_up: Mapping[int, float]) -> int | None:
    """The smallest measured length from which on the pattern is faster at every measured length."""
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
        f"{name} is faster than dense attention from {n:,} positions on" if n else f"{name} is never faster"
        for name, n in found.items()
    )
    return f"{tensors(rows[0])}, forward and backward. Among these lengths, {said}.\n\n{markdown(headers, lines)}"
