"""Rows of a tile as they lie in the tensors against copies side by side: from which distance on the copy pays for
itself in torch's CPU kernel (`kernels/traits.CPU_PACKING`)."""

import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ring_dilated_attention.kernels import cpu
from ring_dilated_attention.kernels.traits import CPU_PACKING
from ring_dilated_attention.pattern import DilatedPattern
from ring_dilated_attention.plan.rows import Rows
from ring_dilated_attention.run.views import rows_view

from .gate import gate
from .measure import Sizes
from .record import markdown

SUMMARY = "when a copy of a tile's rows pays for itself on this CPU"
NUM_HEADS, NUM_THREADS = 2, 1  # of a tile: seconds are of its thread, so that others disturb them little


class Settings(NamedTuple):
    repeats: int = 7
    num_rows: tuple[int, ...] = (512, 1024, 2048)
    layers: tuple[tuple[int, int], ...] = ((12, 64), (8, 128), (16, 32))  # heads and head dim of the tensors
    rates: tuple[int, ...] = (1, 2, 4, 8)
    dtypes: tuple[torch.dtype, ...] = (torch.float32,)  # 16-bit rows are copied whatever their distance


FULL = Settings()
QUICK = Settings(2, (64,), ((2, 16),), (1, 2), (torch.float32,))


def num_steps(settings: Settings) -> int:
    return len(settings.dtypes) * len(settings.layers) * len(settings.num_rows)


def run(settings: Settings, step: Callable[[str], None]) -> list[dict[str, Any]]:
    before = torch.get_num_threads()
    torch.set_num_threads(NUM_THREADS)
    try:
        rows = []
        for dtype in settings.dtypes:
            for num_heads, head_dim in settings.layers:
                for num_rows in settings.num_rows:
                    step(f"{str(dtype)[6:]}, {num_heads} heads of {head_dim}, {num_rows} rows")
                    for rate in settings.rates:
                        sizes = Sizes(num_rows * rate, num_heads, head_dim, dtype)
                        rows.append(_row(sizes, rate, settings.repeats))
        return rows
    finally:
        torch.set_num_threads(before)


def _row(sizes: Sizes, rate: int, repeats: int) -> dict[str, Any]:
    seq_len, num_heads, head_dim, dtype, _ = sizes
    num_rows = seq_len // rate
    pattern = DilatedPattern((seq_len,), (rate,))
    passed = gate(sizes, pattern)
    tensors = [torch.randn(1, seq_len, num_heads, head_dim, dtype=dtype) for _ in range(3)]
    views = [rows_view(x, Rows(range(min(NUM_HEADS, num_heads)), 0, 0, rate, num_rows)) for x in tensors]
    calls = max(1, 2048 // num_rows) ** 2

    def seconds(copied: bool) -> float:
        start = time.thread_time()
        for _ in range(calls):
            q, k, v = (x.contiguous() for x in views) if copied else views
            cpu.forward(q, k, v, False, head_dim**-0.5)
        return (time.thread_time() - start) / calls

    seconds(True)
    both = [(seconds(False), seconds(True)) for _ in range(repeats)]
    factors = [as_they_lie / copied for as_they_lie, copied in both]
    distance = rate * num_heads * head_dim * dtype.itemsize
    return {
        "segment_lengths": pattern.segment_lengths,
        "dilation_rates": pattern.dilation_rates,
        **sizes.as_json(),
        "num_rows": num_rows,
        "distance_bytes": distance,
        "is_copied": distance >= CPU_PACKING.distance and num_rows * dtype.itemsize >= CPU_PACKING.num_bytes,
        "seconds": statistics.median(x for x, _ in both),
        "speed_up": [min(factors), statistics.median(factors), max(factors)],
        "gate": passed,
    }


def table(rows: list[dict[str, Any]]) -> str:
    headers = ("dtype", "rows", "distance, bytes", "speed-up by copying, median", "least", "most", "copied")
    groups: dict[tuple[str, int, bool], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["dtype"], row["num_rows"], row["distance_bytes"] >= CPU_PACKING.distance), []).append(
            row
        )
    lines = []
    for (dtype, num_rows, is_far), found in sorted(groups.items()):
        factors = [row["speed_up"][1] for row in found]
        distance = f"{'>=' if is_far else '<'} {CPU_PACKING.distance:,}"
        copied = "yes" if found[0]["is_copied"] else "no"
        numbers = (f"{f(factors):.2f}x" for f in (statistics.median, min, max))
        lines.append((dtype, f"{num_rows:,}", distance, *numbers, copied))
    said = (
        "One thread, forward, segments that are not causal; the copy is part of the time. Each line is over layers of "
    )
    shapes = sorted({(row["num_heads"], row["head_dim"]) for row in rows})
    said += ", ".join(f"{heads} heads of {dim}" for heads, dim in shapes)
    rates = sorted({row["dilation_rates"][0] for row in rows})
    return f"{said} and rates {', '.join(map(str, rates))}.\n\n{markdown(headers, lines)}"
