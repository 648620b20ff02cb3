"""`rda plan --alternatives`: the same attention by every exchange and sharding, and dense, with a recommendation."""

import sys
import time
from typing import Any

from ..pattern import DilatedPattern
from ..plan.alternatives import Job, advice_on, alternatives, recommended
from ..plan.clock import Hardware, time_text
from ..plan.memory import Traits
from ..plan.planner import make_plan
from ..plan.sharding import default_lengths, make_shards
from .hardware import described
from .output import aligned

# Each is planned and timed on every rank.
MOST_RANKS = 64
# What all ways take of each rank, in plans of one way and for each rank that it meets: measured on 32 and 64 ranks.
PLANS_A_RANK = 0.8


def found_for(
    job: Job, hardware: Hardware, source: str, traits: Traits, memory_bytes: int | None = None
) -> dict[str, Any]:
    """Rows, recommendation and advice, as JSON has them.

    Raises:
        ValueError: for more ranks than are planned one by one.
    """
    if job.num_ranks > MOST_RANKS:
        raise ValueError(
            f"--alternatives plans every rank of every way, at most {MOST_RANKS} of them, got --ranks "
            f"{job.num_ranks:,}. Compare fewer ranks with as many positions each: n = "
            f"{job.seq_len // job.num_ranks * MOST_RANKS:,} on {MOST_RANKS}."
        )
    say_before(job)
    rows = alternatives(job, hardware, traits)
    best, reason = recommended(rows, memory_bytes)
    return {
        "assumed": described(hardware, source),
        "alternatives": [row._asdict() | {"name": row.name} for row in rows],
        "recommended": None if best is None else best._asdict() | {"name": best.name},
        "reason": reason,
        "advice": None if best is None else advice_on(job, best, hardware),
    }


def say_before(job: Job) -> None:
    """Nobody should wait without knowing for what: about how long, by one rank's part of dense attention by zigzag."""
    began = time.monotonic()
    dense = DilatedPattern.dense(is_causal=job.pattern.is_causal)
    shards = make_shards("zigzag", default_lengths("zigzag", job.seq_len, job.num_ranks))
    make_plan(dense, shards, job.num_ranks - 1, job.num_heads, job.num_kv_heads)
    seconds = PLANS_A_RANK * job.num_ranks**2 * (time.monotonic() - began)
    if seconds > 2:
        print(f"comparing all ways of {job.num_ranks} ranks takes about {time_text(seconds)}", file=sys.stderr)


def text(found: dict[str, Any]) -> str:
    headers = ("function", "exchange", "sharding", "step", "of it waiting", "balance", "sent, MB", "peak, MB")
    rows: list[tuple[str, ...]] = []
    impossible: list[str] = []
    for row in found["alternatives"]:
        if row["why_not"]:
            impossible.append(f"{row['function']} {row['name']}: {row['why_not']}")
            continue
        numbers = (time_text(row["step_seconds"]), f"{row['exposed']:.0%}", f"{row['balance']:.1%}")
        sizes = (f"{row['sent_bytes'] / 1e6:,.1f}", f"{row['peak_bytes'] / 1e6:,.0f}")
        rows.append((row["function"], row["name"], row["sharding"], *numbers, *sizes))
    lines = [found["assumed"], "", _texts_left(headers, rows)]
    lines += [f"not possible: {line}" for line in dict.fromkeys(impossible)]
    best = found["recommended"]
    name = "" if best is None else f"{best['name']}, {best['sharding']} shards: "
    lines += ["", f"recommended: {name}{found['reason']}"]
    return "\n".join(lines + ([found["advice"]] if found["advice"] else []))


def _texts_left(headers: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """The first three columns are words: padded, so that they stand to the left like the first."""
    widths = [max(len(row[i]) for row in (headers, *rows)) for i in range(3)]

    def padded(row: tuple[str, ...]) -> tuple[str, ...]:
        return ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), *row[3:])

    return aligned(padded(headers), [padded(row) for row in rows])
