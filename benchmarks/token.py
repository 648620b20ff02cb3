"""The time of one token in generation. Its query must read keys and values from a cache.

This time is compared with the time in which torch sums up as many bytes, which is about the least that reading costs.
"""

import math
import random
import statistics
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ring_dilated_attention.attention import dilated_attention
from ring_dilated_attention.commands.errors import measure_cached
from ring_dilated_attention.pattern import DilatedPattern
from ring_dilated_attention.run.dilated_cache import DilatedCache

from .gate import judged, small_case
from .measure import Sizes, call_json
from .record import branches, markdown

SUMMARY = "one token against a reduction of the bytes that it must read"
MINUTES = 5
PAPER = DilatedPattern((2048, 4096, 8192, 16_384, 32_768), (1, 2, 4, 6, 12), is_causal=True)
WIDE = DilatedPattern((2048, 32_768, 524_288), (1, 16, 256), is_causal=True)
STATES = ("as the call before left them", "emptied before each call")


class Settings(NamedTuple):
    # (sizes, number of key/value heads)
    sizes: Sequence[tuple[Sizes, int]] = (
        (Sizes(0, 12, 64, batch=8), 12),
        (Sizes(0, 12, 64, torch.bfloat16, batch=8), 12),
        (Sizes(0, 12, 64, batch=8), 4),
        (Sizes(0, 12, 64, batch=1), 12),
    )
    patterns: tuple[DilatedPattern, ...] = (PAPER, WIDE)
    num_residues: int = 32
    repeats: int = 7
    # To empty the CPU's caches, so much memory is written: more than they hold.
    flushed_bytes: int = 2**30
    # Emptying takes long. So calls with emptied caches have this many times fewer positions and repeats.
    flushed_share: int = 4


FULL = Settings()
QUICK = Settings(
    ((Sizes(0, 2, 16, batch=2), 2),),
    (DilatedPattern((64, 512), (1, 4), is_causal=True),),
    4,
    2,
    2**20,
    2,
)


def run(settings: Settings, step: Callable[[str], None]) -> list[dict[str, Any]]:
    rows = []
    for pattern in settings.patterns:
        for sizes, num_kv_heads in settings.sizes:
            step(f"{pattern.segment_lengths}, batch {sizes.batch}, {sizes.dtype}")
            rows += _rows(settings, pattern, sizes, num_kv_heads)
    return rows


def _rows(
    settings: Settings, pattern: DilatedPattern, sizes: Sizes, num_kv_heads: int
) -> list[dict[str, Any]]:
    widest = max(pattern.segment_lengths)
    sizes = sizes._replace(seq_len=widest)
    passed = cached_gate(sizes, pattern, num_kv_heads)
    cache = DilatedCache(
        pattern, sizes.batch, sizes.num_heads, num_kv_heads, sizes.head_dim, dtype=sizes.dtype
    )
    # Random rows, not those of a sequence: so the cache can stand at any position without a prefill.
    cache.memory.normal_()
    call = token_call(cache)
    # Tokens that are so many positions apart read equally many rows.
    period = math.lcm(*pattern.segment_lengths)
    positions = [widest + residue for residue in stratified(period, settings.num_residues)]
    longest = max(bytes_read(cache, position) for position in positions)
    numbers = torch.randn(longest // 4 + 1)
    nothing_cached = _seconds_at_a_border(call, period, 10 * settings.repeats)
    rows = []
    for state, every in zip(STATES, (1, settings.flushed_share), strict=True):
        flush = torch.zeros(settings.flushed_bytes // 4) if state == STATES[1] else None
        visited = positions[::every]
        repeats = -(-settings.repeats // every)
        ours, theirs = [], []
        for position in visited:
            read = numbers[: bytes_read(cache, position) // 4]
            token, reduction = _by_turns(lambda at=position: call(at), read.sum, repeats, flush)  # type: ignore[misc]
            ours.append(token)
            theirs.append(reduction)
        row = {
            **call_json(sizes, pattern),
            "num_kv_heads": num_kv_heads,
            "num_threads": torch.get_num_threads(),
            "cpu_caches": {
                "state": state,
                "bytes": cpu_cache_bytes(),
                "flushed": settings.flushed_bytes,
            },
            "bytes_read": statistics.mean(bytes_read(cache, position) for position in visited),
            "seconds": statistics.mean(ours),
            "reduction_seconds": statistics.mean(theirs),
            "ratio": statistics.mean(ours) / statistics.mean(theirs),
            "nothing_cached_seconds": nothing_cached,
            "gate": passed,
        }
        rows.append(row)
    return rows


def cached_gate(sizes: Sizes, pattern: DilatedPattern, num_kv_heads: int) -> dict[str, Any]:
    """The gate of calls with a cache. At a small size tokens are appended several at a time, and one by one."""
    case = small_case(sizes, pattern)._replace(num_kv_heads=num_kv_heads)
    return judged(case, sizes.dtype, [measure_cached(case, sizes.dtype, "auto", "cpu")])


def token_call(cache: DilatedCache) -> Callable[[int], Tensor]:
    """A function that appends one token to the cache at a position, and returns its attention."""
    generator = torch.Generator().manual_seed(0)
    made = []
    for num_heads in (cache.plan.num_heads, cache.plan.num_kv_heads, cache.plan.num_kv_heads):
        shape = (cache.batch, 1, num_heads, cache.head_dim)
        made.append(torch.randn(shape, generator=generator).to(cache.dtype))
    query, key, value = made

    def call(position: int) -> Tensor:
        cache.progress[0].fill_(position)
        out = dilated_attention(query, key, value, cache.pattern, cache=cache)
        assert isinstance(out, Tensor)
        return out

    return call


def bytes_read(cache: DilatedCache, position: int) -> int:
    """The bytes of keys and values that the token at a position reads. Its own key and value are counted too."""
    rows = 0
    for buffers in cache.plan.of_position(position):
        rows += len(buffers.kv_heads) * (len(buffers.seen(position)) + 1)
    return 2 * cache.batch * rows * cache.head_dim * cache.dtype.itemsize


def stratified(period: int, num_strata: int) -> list[int]:
    """Integers below `period`: a random one from each of `num_strata` equal parts, the same ones at every call."""
    draw = random.Random(0)
    borders = [period * i // num_strata for i in range(num_strata + 1)]
    return [draw.randrange(a, b) for a, b in pairwise(borders) if a < b]


def _by_turns(
    first: Callable[[], object], second: Callable[[], object], repeats: int, flush: Tensor | None
) -> tuple[float, float]:
    """The median seconds of two functions, which run in turn.

    Before each timed run the CPU's caches are emptied by writing to `flush`. Without `flush` the function is run once
    before, so that the caches hold what it reads.
    """
    seconds: tuple[list[float], list[float]] = ([], [])
    for repeat in range(1 + repeats):
        for function, of_function in zip((first, second), seconds, strict=True):
            if flush is None:
                function()
            else:
                flush.add_(1)
            began = time.perf_counter()
            function()
            if repeat > 0:  # the first run warms up
                of_function.append(time.perf_counter() - began)
    return statistics.median(seconds[0]), statistics.median(seconds[1])


def _seconds_at_a_border(call: Callable[[int], object], border: int, repeats: int) -> float:
    """The median seconds of a call that reads next to nothing, since all segments begin at its position.

    This is the cost of a call by itself.
    """
    seconds = []
    for _ in range(repeats):
        began = time.perf_counter()
        call(border)
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


def cpu_cache_bytes() -> int | None:
    """The size of the CPU's largest cache in bytes, or None if the system does not tell."""
    sizes = [
        path.read_text().strip()
        for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")
    ]
    numbers = [
        int(size[:-1]) * {"K": 2**10, "M": 2**20}[size[-1]]
        for size in sizes
        if size[-1:] in ("K", "M")
    ]
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
    size = rows[0]["cpu_caches"]["bytes"]
    held = "an unknown size" if size is None else f"{size / 1e6:,.0f} MB"
    return (
        "Means over places in the segments. Each is a median, by turns with a torch sum of as many float32 bytes, on "
        f"{rows[0]['num_threads']} threads. The CPU's largest cache has {held}: in it lies what the same call read "
        f"just before, unless it was emptied by writing to other memory.\n\n{markdown(headers, lines)}"
    )
