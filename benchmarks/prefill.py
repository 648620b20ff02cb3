"""A prompt in chunks against one call over all of it."""

import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ring_dilated_attention.attention import dilated_attention
from ring_dilated_attention.pattern import DilatedPattern
from ring_dilated_attention.run.dilated_cache import DilatedCache

from .cached import PAPER, WIDE, cached_gate, make_cache
from .measure import Sizes, make_tensors, quantiles
from .record import branches, markdown, seconds, tensors

SUMMARY = "a prompt appended in chunks against one call"
TARGET = 0.85


class Settings(NamedTuple):
    sizes: Sizes = Sizes(262_144, num_heads=12, head_dim=64)
    chunk: int = 8192
    patterns: tuple[DilatedPattern, ...] = (PAPER, WIDE)
    repeats: int = 3


FULL = Settings()
QUICK = Settings(Sizes(1024, 2, 16), 100, (DilatedPattern((64, 512), (1, 4), is_causal=True),), 2)


def num_steps(settings: Settings) -> int:
    return len(settings.patterns) * 2 * (1 + settings.repeats)


def run(settings: Settings, step: Callable[[str], None]) -> list[dict[str, Any]]:
    return [_row(settings, pattern, step) for pattern in settings.patterns]


def _row(settings: Settings, pattern: DilatedPattern, step: Callable[[str], None]) -> dict[str, Any]:
    passed = cached_gate(settings.sizes, pattern)
    inputs, _ = make_tensors(settings.sizes)
    query, key, value = rows = [x.detach() for x in inputs]
    cache = make_cache(pattern, settings.sizes)
    calls: dict[str, Callable[[], object]] = {
        "one call": lambda: dilated_attention(query, key, value, pattern),
        "chunks": lambda: _in_chunks(rows, pattern, cache, settings.chunk),
    }
    times: dict[str, list[float]] = {name: [] for name in calls}
    for repeat in range(1 + settings.repeats):
        for name, call in calls.items():
            step(f"{pattern.segment_lengths}, {name}")
            began = time.perf_counter()
            call()
            if repeat:
                times[name].append(time.perf_counter() - began)
    shares = [one / chunks for one, chunks in zip(*times.values(), strict=True)]
    return {
        "segment_lengths": pattern.segment_lengths,
        "dilation_rates": pattern.dilation_rates,
        "is_causal": True,
        **settings.sizes.as_json(),
        "chunk": settings.chunk,
        "num_threads": torch.get_num_threads(),
        "one_call_seconds": quantiles(times["one call"]),
        "seconds": quantiles(times["chunks"]),
        "share": statistics.median(shares),
        "target": TARGET,
        "gate": passed,
    }


def _in_chunks(rows: list[Tensor], pattern: DilatedPattern, cache: DilatedCache, chunk: int) -> None:
    cache.reset()
    for query, key, value in zip(*(x.split(chunk, dim=1) for x in rows), strict=True):
        dilated_attention(query, key, value, pattern, cache=cache)


def table(rows: list[dict[str, Any]]) -> str:
    headers = ("pattern", "one call, s", "slices, s", "speed kept", "target")
    lines = [
        (
            branches(row),
            seconds(row["one_call_seconds"]),
            seconds(row["seconds"]),
            f"{100 * row['share']:.0f}%",
            f"at least {100 * row['target']:.0f}%",
        )
        for row in rows
    ]
    first = rows[0]
    return (
        f"{first['seq_len']:,} positions in slices of {first['chunk']:,}, {tensors(first)}, forward, "
        f"{first['num_threads']} threads. Both return all rows.\n\n{markdown(headers, lines)}"
    )
