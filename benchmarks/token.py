"""A token against the bytes that it must read: the time of a call over that of a torch reduction of as many bytes."""

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

from ring_dilated_attention.pattern import DilatedPattern
from ring_dilated_attention.run.dilated_cache import DilatedCache

from .cached import PAPER, WIDE, bytes_read, cached_gate, filled, make_cache, period_of, stratified, token_call
from .measure import Sizes
from .record import branches, markdown

SUMMARY = "one token against a reduction of the bytes that it must read"
# Where a call's time goes, by the ops that it calls.
KINDS = {
    "attention": ("attention",),
    "writing and merging": (
        "copy",
        "index",
        "exp",
        "log",
        "sum",
        "mul",
        "sub",
        "fill",
        "stack",
        "cat",
        "zero",
        "masked",
    ),
}


class Settings(NamedTuple):
    sizes: Sequence[tuple[Sizes, int]] = (  # and key/value heads
        (Sizes(0, 12, 64, batch=8), 12),
        (Sizes(0, 12, 64, torch.bfloat16, batch=8), 12),
        (Sizes(0, 12, 64, batch=8), 4),
        (Sizes(0, 12, 64, batch=1), 12),
    )
    patterns: tuple[DilatedPattern, ...] = (PAPER, WIDE)
    num_residues: int = 32
    repeats: int = 7
    flushed_bytes: int = 2**30  # more than the caches of the CPU hold
    flushed_share: int = 4  # so many times fewer places and repeats where they are emptied, which takes long


FULL = Settings()
QUICK = Settings(((Sizes(0, 2, 16, batch=2), 2),), (DilatedPattern((64, 512), (1, 4), is_causal=True),), 4, 2, 2**20, 2)
STATES = ("as the call before left them", "emptied before each call")


def num_steps(settings: Settings) -> int:
    places = sum(len(range(0, settings.num_residues, every)) for every in (1, settings.flushed_share))
    return len(settings.patterns) * len(settings.sizes) * (1 + places)


def run(settings: Settings, step: Callable[[str], None]) -> list[dict[str, Any]]:
    return [
        row
        for pattern in settings.patterns
        for sizes, num_kv_heads in settings.sizes
        for row in _rows(settings, pattern, sizes, num_kv_heads, step)
    ]


def _rows(
    settings: Settings, pattern: DilatedPattern, sizes: Sizes, num_kv_heads: int, step: Callable[[str], None]
) -> list[dict[str, Any]]:
    widest = max(pattern.segment_lengths)
    passed = cached_gate(sizes._replace(seq_len=widest), pattern, num_kv_heads)
    cache = filled(make_cache(pattern, sizes, num_kv_heads))
    call = token_call(cache)
    positions = [widest + residue for residue in stratified(period_of(pattern, widest), settings.num_residues)]
    longest = max(bytes_read(cache, position) for position in positions)
    numbers = torch.randn(longest // 4 + 1)
    flush = torch.zeros(settings.flushed_bytes // 4)
    step("profile")
    shares = _shares(call, positions)
    rows = []
    for state, every in zip(STATES, (1, settings.flushed_share), strict=True):
        ours, theirs, visited = [], [], positions[::every]
        for position in visited:
            step(f"{pattern.segment_lengths}, batch {sizes.batch}, caches {state}")
            read = numbers[: bytes_read(cache, position) // 4]
            # By turns, in one run; each finds the caches in the same state.
            functions: tuple[Callable[[], object], ...] = (partial(call, position), read.sum)
            pair: tuple[list[float], ...] = ([], [])
            for _ in range(1 + -(-settings.repeats // every)):
                for seconds, function in zip(pair, functions, strict=True):
                    if state == STATES[1]:
                        flush.add_(1)
                    else:
                        function()
                    began = time.perf_counter()
                    function()
                    seconds.append(time.perf_counter() - began)
            ours.append(statistics.median(pair[0][1:]))
            theirs.append(statistics.median(pair[1][1:]))
        rows.append(
            {
                "segment_lengths": pattern.segment_lengths,
                "dilation_rates": pattern.dilation_rates,
                "is_causal": True,
                **sizes._replace(seq_len=widest).as_json(),
                "num_kv_heads": num_kv_heads,
                "num_threads": torch.get_num_threads(),
                "cpu_caches": {"state": state, "bytes": cpu_cache_bytes(), "flushed": settings.flushed_bytes},
                "bytes_read": statistics.mean(bytes_read(cache, position) for position in visited),
                "seconds": statistics.mean(ours),
                "reduction_seconds": statistics.mean(theirs),
                "ratio": statistics.mean(ours) / statistics.mean(theirs),
                "nothing_cached_seconds": _nothing_cached(cache, call, settings.repeats),
                "shares": shares,
                "gate": passed,
            }
        )
    return rows


def _nothing_cached(cache: DilatedCache, call: Callable[[int], object], repeats: int) -> float:
    """A call that reads next to nothing, at a border of all segments: what calls cost by themselves."""
    border = period_of(cache.pattern, max(cache.pattern.segment_lengths))
    seconds = []
    for _ in range(10 * repeats):
        began = time.perf_counter()
        call(border)
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


def _shares(call: Callable[[int], object], positions: Sequence[int]) -> dict[str, float]:
    """The parts of a call's time that its ops take themselves; the rest is between them, in Python and in dispatch."""
    for position in positions[:2]:
        call(position)
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        for position in positions:
            call(position)
    spent = dict.fromkeys((*KINDS, "other ops"), 0.0)
    events = [event for event in profiled.key_averages() if not event.key.startswith("ring_dilated")]
    for event in events:
        kind = next((kind for kind, words in KINDS.items() if any(word in event.key for word in words)), "other ops")
        spent[kind] += event.self_cpu_time_total * 1e-6
    began = time.perf_counter()
    for position in positions:
        call(position)
    total = max(time.perf_counter() - began, sum(spent.values()))
    shares = {kind: seconds / total for kind, seconds in spent.items()}
    return shares | {"between ops": 1 - sum(shares.values())}


def cpu_cache_bytes() -> int | None:
    """The last level's, where the system says."""
    sizes = [path.read_text().strip() for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")]
    numbers = [int(size[:-1]) * {"K": 2**10, "M": 2**20}[size[-1]] for size in sizes if size[-1:] in ("K", "M")]
    return max(numbers, default=None)


def table(rows: list[dict[str, Any]]) -> str:
    headers = (
        "pattern",
        "batch",
        "heads",
        "dtype",
        "CPU caches",
        "read, MB",
        "a token, ms",
        "reduction, ms",
        "ratio",
        "next to nothing cached, ms",
    )
    lines = [
        (
            branches(row),
            str(row["batch"]),
            f"{row['num_heads']}/{row['num_kv_heads']} of {row['head_dim']}",
            row["dtype"],
            row["cpu_caches"]["state"],
            f"{row['bytes_read'] / 1e6:.1f}",
            f"{1e3 * row['seconds']:.3f}",
            f"{1e3 * row['reduction_seconds']:.3f}",
            f"{row['ratio']:.2f}",
            f"{1e3 * row['nothing_cached_seconds']:.3f}",
        )
        for row in rows
    ]
    kinds = list(rows[0]["shares"])
    profiled = {(branches(row), row["batch"], row["num_kv_heads"], row["dtype"]): row for row in rows}
    shares = [
        (name, str(batch), str(kv), dtype, *(f"{100 * row['shares'][kind]:.0f}%" for kind in kinds))
        for (name, batch, kv, dtype), row in profiled.items()
    ]
    size = rows[0]["cpu_caches"]["bytes"]
    held = "an unknown size" if size is None else f"{size / 1e6:,.0f} MB"
    return "\n\n".join(
        [
            "Means over places in the segments. Each is a median, by turns with a torch sum of as many float32 bytes, "
            f"on {rows[0]['num_threads']} threads. The CPU's largest cache has {held}: in it lies what the same "
            "call read just before, unless it was emptied by writing to other memory.",
            markdown(headers, lines),
            "Where the time goes, by a profile:",
            markdown(("pattern", "batch", "key/value heads", "dtype", *kinds), shares),
        ]
    )
