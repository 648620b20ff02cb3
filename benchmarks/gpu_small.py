"""One small call on a GPU: what the host spends on it, what it launches, and from where on it beats dense attention.

Time is the device's, call after call: where the host is slower than the device, it is the host's. On an H100 the case
should take about a minute.
"""

import statistics
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ring_dilated_attention.pattern import DilatedPattern

from .apart import Budget, refuse_empty
from .candidates import OWN, Candidate
from .crossover import first_faster
from .device import resolve
from .measure import Sizes, quantiles
from .record import branches, markdown, not_measured, tensors
from .side_by_side import Found, Group, measure_group

SUMMARY = "time and launches of a small call on a GPU"
MINUTES = 1
NEEDS_GPU = True
DENSE = Candidate("torch")
FASTER_FROM = 8192


class Settings(NamedTuple):
    device: str | None = "cuda"
    lengths: tuple[int, ...] = (1024, 2048, 4096, 8192, 16_384)
    sizes: Sizes = Sizes(0, 12, 64, torch.bfloat16)
    branches: tuple[tuple[int, ...], tuple[int, ...]] = ((2048, 4096), (1, 2))
    repeats: int = 50
    seconds: float = 120  # of a group's process
    budget: float = 420  # seconds of the case


FULL = Settings()
QUICK = Settings(None, (256, 512), Sizes(0, 2, 16, torch.bfloat16), ((128, 256), (1, 2)), 2, 60)


def groups(settings: Settings) -> list[Group]:
    device = resolve(settings.device)
    return [
        Group(
            settings.sizes._replace(seq_len=n),
            is_causal,
            (DENSE, Candidate(OWN, "", DilatedPattern(*settings.branches, is_causal=is_causal))),
            settings.repeats,
            device,
        )
        for is_causal in (False, True)
        for n in settings.lengths
    ]


def run(settings: Settings, step: Callable[[str], None]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    budget = Budget(settings.budget)
    for group in groups(settings):
        dense, found = measure_group(group, step, seconds=settings.seconds, budget=budget)
        rows.append(_row(group, group.candidates[1], found, dense))
    refuse_empty(rows)
    for row in rows:
        alike = [x for x in rows if x["is_causal"] == row["is_causal"]]
        row["faster_from"] = first_faster(
            {x["seq_len"]: x["speed_up"] for x in alike if "speed_up" in x}
        )
    return rows


def _row(
    group: Group, candidate: Candidate, found: Found | str, dense: Found | str
) -> dict[str, Any]:
    row = candidate.as_json(group.sizes, group.is_causal, group.device)
    if isinstance(found, str) or isinstance(dense, str):
        return row | {
            "reason": found if isinstance(found, str) else f"dense attention failed: {dense}"
        }
    both, dense_both = ([t.both for t in x.times] for x in (found, dense))
    return row | {
        "seconds": quantiles(both),
        "host_seconds": quantiles(found.host_seconds),
        "launches": found.profile.launches,
        "dense_seconds": quantiles(dense_both),
        "dense_host_seconds": quantiles(dense.host_seconds),
        "dense_launches": dense.profile.launches,
        "speed_up": statistics.median(dense_both) / statistics.median(both),
        "kernels": [kernel._asdict() for kernel in found.profile.kernels[:8]],
        "gate": found.gate,
    }


def table(rows: list[dict[str, Any]]) -> str:
    headers = (
        "pattern",
        "positions",
        "backend",
        "ms",
        "host, ms",
        "launches",
        "dense: ms",
        "host, ms",
        "launches",
    )
    measured = [row for row in rows if "reason" not in row]
    lines = []
    for row in measured:
        line: tuple[str, ...] = (branches(row), f"{row['seq_len']:,}", row["candidate"])
        for prefix in ("", "dense_"):
            medians = (
                row[f"{prefix}{name}"]["median"] * 1e3 for name in ("seconds", "host_seconds")
            )
            line += (*(f"{median:.3g}" for median in medians), str(row[f"{prefix}launches"]))
        lines.append((*line, f"{row['speed_up']:.2f}x"))
    found = {
        f"{row['candidate']}{', causal' if row['is_causal'] else ''}": row["faster_from"]
        for row in measured
    }
    said = "; ".join(
        f"{name} from {n:,} on" if n else f"{name} at no length" for name, n in found.items()
    )
    title = (
        f"{tensors(measured[0])}, forward and backward, on {measured[0]['device']}. Faster than torch's dense "
        f"attention (target: from {FASTER_FROM:,} on): {said}."
    )
    return "\n\n".join([title, markdown((*headers, "speed-up"), lines), *not_measured(rows)])
