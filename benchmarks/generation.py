"""One token at any length: memory of the cache and time of a call, beside caches that hold every position."""

import importlib
import statistics
import time
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from typing import Any, NamedTuple

import torch
from torch.nn.functional import scaled_dot_product_attention

from ring_dilated_attention.pattern import DilatedPattern
from ring_dilated_attention.run.dilated_cache import free_bytes

from .cached import (
    PAPER,
    WIDE,
    cached_gate,
    distinct_rows,
    exponent,
    filled,
    live_rows,
    make_cache,
    period_of,
    rows_read,
    stratified,
    token_call,
    worst_residue,
)
from .measure import Sizes
from .record import branches, markdown, tensors

SUMMARY = "memory and time of one token, from 4 thousand to 16 million positions"
# A share of the free memory, so that a dense cache is not timed while memory is being found for it.
SHARE_FOR_DENSE = 0.4


class Settings(NamedTuple):
    lengths: tuple[int, ...] = (4096, 32_768, 262_144, 1_048_576, 16_777_216)
    patterns: tuple[DilatedPattern, ...] = (PAPER, WIDE)
    sizes: Sizes = Sizes(seq_len=0, num_heads=12, head_dim=64)
    num_residues: int = 48
    repeats: int = 5


FULL = Settings()
QUICK = Settings(
    (256, 1024, 4096), (DilatedPattern((64, 512), (1, 4), is_causal=True),), Sizes(0, 2, 16), num_residues=4, repeats=2
)


def num_steps(settings: Settings) -> int:
    return len(settings.patterns) * (len(settings.lengths) + settings.num_residues)


def run(settings: Settings, step: Callable[[str], None]) -> list[dict[str, Any]]:
    return [row for pattern in settings.patterns for row in _rows(settings, pattern, step)]


def _rows(settings: Settings, pattern: DilatedPattern, step: Callable[[str], None]) -> list[dict[str, Any]]:
    passed = cached_gate(settings.sizes._replace(seq_len=max(pattern.segment_lengths)), pattern)
    dense = {}
    for n in settings.lengths:
        step(f"{n:,} positions, dense")
        dense[n] = {name: _dense(settings, n, make, copies) for name, (make, copies) in DENSE.items()}
    cache = filled(make_cache(pattern, settings.sizes))
    call, plan = token_call(cache), cache.plan
    periods = {n: period_of(pattern, n) for n in settings.lengths}
    residues = {n: stratified(period, settings.num_residues) for n, period in periods.items()}
    times: dict[int, list[float]] = {n: [] for n in settings.lengths}
    for i in range(settings.num_residues):
        step(f"{pattern.segment_lengths}, residue {i + 1}")
        found = _interleaved(
            {n: partial(call, n - periods[n] + residues[n][i]) for n in settings.lengths}, settings.repeats
        )
        for n, seconds in found.items():
            times[n].append(seconds)
    worst_at = {n: n - period + worst_residue(plan, period) for n, period in periods.items()}
    worst = _interleaved({n: partial(call, worst_at[n]) for n in settings.lengths}, 3 * settings.repeats)
    alike = [n for n in settings.lengths if n >= max(pattern.segment_lengths)]  # these have the same residues
    slope, half = exponent([{n: times[n][i] for n in alike} for i in range(settings.num_residues)])
    heads = settings.sizes.num_heads

    def over_residues(count: Callable[[int], int], n: int) -> float:
        return statistics.mean(count(n - periods[n] + residue) for residue in residues[n]) / heads

    return [
        {
            "segment_lengths": pattern.segment_lengths,
            "dilation_rates": pattern.dilation_rates,
            "is_causal": True,
            **settings.sizes._replace(seq_len=n).as_json(),
            "period": periods[n],
            "num_residues": settings.num_residues,
            "filled": "rows of no sequence, put at the position",
            "allocated_bytes": make_cache(pattern, settings.sizes, max_len=n).num_bytes,
            "rows_per_head": make_cache(pattern, settings.sizes, max_len=n).num_rows / heads,
            "live_rows_per_head": over_residues(lambda t: live_rows(plan, t + 1), n),
            "distinct_rows_per_head": over_residues(lambda t: distinct_rows(plan, t + 1), n),
            "rows_read_per_head": over_residues(partial(rows_read, plan), n),
            "seconds": statistics.mean(times[n]),
            "worst_seconds": worst[n],
            "exponent": slope,
            "exponent_half_interval": half,
            "exponent_over": alike,
            "dense": dense[n],
            "gate": passed,
        }
        for n in settings.lengths
    ]


def _interleaved(calls: dict[int, Callable[[], object]], repeats: int) -> dict[int, float]:
    """The median of each, all by turns."""
    found: dict[int, list[float]] = {n: [] for n in calls}
    for repeat in range(1 + repeats):
        for n, call in calls.items():
            began = time.perf_counter()
            call()
            if repeat:
                found[n].append(time.perf_counter() - began)
    return {n: statistics.median(seconds) for n, seconds in found.items()}


def _dense(settings: Settings, num_positions: int, make: Callable, copies: int) -> dict[str, Any]:
    """Bytes and seconds of a cache of every position, of which so many are held at once; or why there are none."""
    sizes = settings.sizes
    num_bytes = 2 * sizes.batch * num_positions * sizes.num_heads * sizes.head_dim * sizes.dtype.itemsize
    free = free_bytes(torch.device("cpu"))
    if free is not None and copies * num_bytes > SHARE_FOR_DENSE * free:
        return {"bytes": num_bytes, "reason": f"{copies} times {num_bytes:,} bytes do not fit"}
    try:
        call = make(sizes, num_positions)
    except ImportError as error:
        return {"bytes": num_bytes, "reason": f"{error.name} cannot be imported"}
    found = {"bytes": num_bytes, "seconds": _interleaved({0: call}, settings.repeats)[0]}
    return found | ({"transformers": version("transformers")} if make is _dynamic else {})


def _preallocated(sizes: Sizes, num_positions: int) -> Callable[[], object]:
    """Torch's attention over keys and values of all positions, of which the last is written."""
    shape = (sizes.batch, sizes.num_heads, num_positions, sizes.head_dim)
    keys, values = (torch.full(shape, 0.5, dtype=sizes.dtype) for _ in range(2))
    query, key, value = (torch.randn((*shape[:2], 1, shape[3]), dtype=sizes.dtype) for _ in range(3))

    def call() -> object:
        keys[:, :, -1:], values[:, :, -1:] = key, value
        return scaled_dot_product_attention(query, keys, values)

    return call


def _dynamic(sizes: Sizes, num_positions: int) -> Callable[[], object]:
    """The same over transformers' DynamicCache, which is made anew with each token."""
    cache = importlib.import_module("transformers").DynamicCache()
    shape = (sizes.batch, sizes.num_heads, num_positions - 1, sizes.head_dim)
    cache.update(*(torch.full(shape, 0.5, dtype=sizes.dtype) for _ in range(2)), 0)
    query, key, value = (torch.randn((*shape[:2], 1, shape[3]), dtype=sizes.dtype) for _ in range(3))
    return lambda: scaled_dot_product_attention(query, *cache.update(key, value, 0))


DENSE = {"torch's attention, preallocated": (_preallocated, 1), "transformers' DynamicCache": (_dynamic, 2)}


def table(rows: list[dict[str, Any]]) -> str:
    names = list(rows[0]["dense"])
    headers = (
        "pattern",
        "positions",
        "allocated, MB",
        "rows per head: allocated",
        "live",
        "distinct",
        "read by a token",
        "a token, ms: mean",
        "worst",
        *(f"{name}, ms" for name in names),
        "cache of all positions, MB",
    )
    lines = [
        (
            branches(row),
            f"{row['seq_len']:,}",
            f"{row['allocated_bytes'] / 1e6:,.1f}",
            f"{row['rows_per_head']:,.0f}",
            f"{row['live_rows_per_head']:,.0f}",
            f"{row['distinct_rows_per_head']:,.0f}",
            f"{row['rows_read_per_head']:,.0f}",
            f"{1e3 * row['seconds']:.3f}",
            f"{1e3 * row['worst_seconds']:.3f}",
            *(_milliseconds(row["dense"][name]) for name in names),
            f"{row['dense'][names[0]]['bytes'] / 1e6:,.0f}",
        )
        for row in rows
    ]
    said = [
        f"From {row['exponent_over'][0]:,} positions on, time grows with length to the power of {row['exponent']:.4f} "
        f"± {row['exponent_half_interval']:.4f} for {branches(row)}."
        for row in {branches(row): row for row in rows}.values()
    ]
    first = rows[0]
    return "\n\n".join(
        [
            f"{tensors(first)}, batch {first['batch']}, one token. What a token reads depends on its place in its "
            f"segments: means are over {first['num_residues']} places, the same at every length of at "
            "least the widest segment. Long positions are reached by filling the cache with rows of no sequence. Rows "
            "are live if this token or a later one sees them; distinct are those left if rows of several branches were "
            "held once.",
            *said,
            markdown(headers, lines),
            *_reasons(rows),
        ]
    )


def _milliseconds(found: dict[str, Any]) -> str:
    return f"{1e3 * found['seconds']:.3f}" if "seconds" in found else "not measured"


def _reasons(rows: list[dict[str, Any]]) -> list[str]:
    found = {
        f"- {name}, {row['seq_len']:,} positions: {dense['reason']}": None
        for row in rows
        for name, dense in row["dense"].items()
        if "reason" in dense
    }
    return ["Not measured:", "\n".join(found)] if found else []
