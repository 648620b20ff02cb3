"""`rda plan --alternatives`: the same attention by every exchange and sharding, and dense, with a recommendation."""

import sys
import time
from math import inf
from typing import Any

from ..pattern import DilatedPattern
from ..plan.alternatives import (
    MOST_RANKS,
    MOST_SAMPLED_HOPS,
    Alternative,
    advice_on,
    alternatives,
    dense_of,
    has_forms,
    is_planned,
    places_of_forms,
    recommended,
)
from ..plan.clock import Hardware, time_text
from ..plan.job import Job
from ..plan.lockstep import EqualJob, all_hops
from ..plan.memory import Traits
from ..plan.planner import make_plan
from ..plan.sharding import default_lengths, make_shards
from .hardware import described
from .output import aligned
from .plan_large import SECONDS_A_PLACE, SECONDS_PER_HOP

# What all ways take of each rank, in plans of one way and for each rank that it meets: measured on 32 and 64 ranks.
PLANS_A_RANK = 0.8
# A head and branch take so long in the plans of few ranks that closed forms need: at most, where rates divide nothing.
SECONDS_A_HEAD = 4e-3
PLANS_OF_SAMPLES = 12  # of the pattern's, and of dense attention's, with their memory


def found_for(
    job: EqualJob,
    hardware: Hardware,
    source: str,
    traits: Traits,
    memory_bytes: int | None = None,
    *,
    every_rank: bool = False,
) -> dict[str, Any]:
    """Rows, recommendation and advice, as JSON has them.

    Raises:
        ValueError: for more ranks than are planned one by one, if every rank is to be.
    """
    if every_rank and job.num_ranks > MOST_RANKS:
        raise ValueError(
            f"--every-rank plans all ranks of every way, at most {MOST_RANKS} of them, got --ranks {job.num_ranks:,}. "
            "Leave it out, or compare fewer ranks with as many positions each: n = "
            f"{job.seq_len // job.num_ranks * MOST_RANKS:,} on {MOST_RANKS}."
        )
    if every_rank or is_planned(job):
        say_before(job, seconds_of_planning(job))
    elif has_forms(job):
        small_plans = SECONDS_A_HEAD * job.num_heads * len(job.pattern.branches)
        say_before(job, SECONDS_A_PLACE * places_of_forms(job) + small_plans)
    else:
        say_before(job, seconds_of_sampling(job))
    rows = alternatives(job, hardware, traits, every_rank=every_rank)
    best, reason = recommended(rows, memory_bytes)
    return {
        "assumed": described(hardware, source),
        "num_ranks": job.num_ranks,
        "alternatives": [_as_json(row) for row in rows],
        "recommended": None if best is None else _as_json(best),
        "reason": reason,
        "advice": None if best is None else advice_on(job, best, hardware),
    }


def _as_json(row: Alternative) -> dict[str, Any]:
    least, most = row.step_seconds
    return row._asdict() | {"name": row.name, "step_seconds": {"least": least, "most": None if most == inf else most}}


def seconds_of_planning(job: EqualJob) -> float:
    """About how long it takes, by one rank's part of dense attention by zigzag."""
    began = time.monotonic()
    dense = DilatedPattern.dense(is_causal=job.pattern.is_causal)
    shards = make_shards("zigzag", default_lengths("zigzag", job.seq_len, job.num_ranks))
    make_plan(Job(dense, shards, *job.heads), job.num_ranks - 1)
    return PLANS_A_RANK * job.num_ranks**2 * (time.monotonic() - began)


def seconds_of_sampling(job: EqualJob) -> float:
    """About how long two ranks of each way take, if they have no more hops than are sampled."""
    hops = (all_hops(x) // job.num_ranks for x in (job, job._replace(pattern=dense_of(job))))
    return PLANS_OF_SAMPLES * SECONDS_PER_HOP * sum(x for x in hops if x <= MOST_SAMPLED_HOPS)


def say_before(job: EqualJob, seconds: float) -> None:
    """Nobody should wait without knowing for what."""
    if seconds > 2:
        print(f"comparing all ways of {job.num_ranks:,} ranks takes about {time_text(seconds)}", file=sys.stderr)


def text(found: dict[str, Any]) -> str:
    headers = ("function", "exchange", "sharding", "step", "of it waiting", "balance", "sent, MB", "peak, MB")
    rows: list[tuple[str, ...]] = []
    impossible: list[str] = []
    for row in found["alternatives"]:
        if row["why_not"]:
            impossible.append(f"{row['function']} {row['name']}: {row['why_not']}")
            continue
        rows.append((row["function"], row["name"], row["sharding"], *_numbers(row)))
    lines = [found["assumed"], "", _texts_left(headers, rows)]
    if any("closed form" in line for line in impossible) and found["num_ranks"] <= MOST_RANKS:
        impossible.append("what has no closed form: --every-rank plans it")
    lines += [f"left out: {line}" for line in dict.fromkeys(impossible)]
    best = found["recommended"]
    name = "" if best is None else f"{best['name']}, {best['sharding']} shards: "
    lines += ["", f"recommended: {name}{found['reason']}"]
    return "\n".join(lines + ([found["advice"]] if found["advice"] else []))


def _numbers(row: dict[str, Any]) -> tuple[str, ...]:
    """What is a bound is marked as one."""
    least, most = row["step_seconds"].values()
    is_sample = row["found_by"] == "samples"
    at_least, at_most = (">= ", "<= ") if is_sample else ("", "")
    waits = "" if is_sample else f"{'' if least == most else '>= '}{row['exposed']:.0%}"
    sizes = f"{row['sent_bytes'] / 1e6:,.1f}", f"{row['peak_bytes'] / 1e6:,.0f}"
    return _span(least, most), waits, f"{at_most}{row['balance']:.1%}", *(at_least + size for size in sizes)


def _span(least: float, most: float | None) -> str:
    if most is None:
        return f"at least {time_text(least)}"
    return time_text(least) if time_text(least) == time_text(most) else f"{time_text(least)} to {time_text(most)}"


def _texts_left(headers: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """The first three columns are words: padded, so that they stand to the left like the first."""
    widths = [max(len(row[i]) for row in (headers, *rows)) for i in range(3)]

    def padded(row: tuple[str, ...]) -> tuple[str, ...]:
        return ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), *row[3:])

    return aligned(padded(headers), [padded(row) for row in rows])
