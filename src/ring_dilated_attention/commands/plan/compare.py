"""`rda plan compare`: compares all exchanges and shardings, also for dense attention, and recommends one. No torch."""

import argparse
import json
from typing import Any

from ...forecast.call_cost import MOST_PLANNED
from ...forecast.clock import time_text
from ...forecast.exchanges import Alternative, advice, alternatives, recommended, ways_of
from ...forecast.large import ERRORS_TEXT
from ...kernels.traits import TRAITS
from ..hardware import add_hardware_options, described, machine_for
from ..numbers import count
from ..output import aligned, progress_bar, wrapped
from .job_options import SUGGEST, add_call, call_of

EXAMPLES = f"""examples:
  rda plan compare --seq-len 1Mi --ranks 8 --segment-lengths 2Ki 128Ki 1Mi \\
                   --dilation-rates 1 16 64 --causal --heads 16 --head-dim 128 \\
                   --dtype bfloat16 --hardware h100-infiniband
      by ring, all_gather, all_to_all and 2-D (a ring of groups that deal heads)
      on both shardings, and by dense attention; which to take, and why

Up to {MOST_PLANNED} ranks, every rank of every way is planned and timed. Beyond, the work is counted exactly, bytes are
those that a rank receives, and memory is an estimate. Only exchange "ring" has a time then, an estimate too.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_call(parser)
    add_hardware_options(parser)
    parser.add_argument("--memory", type=count, metavar="BYTES", help="memory of a rank, as 80G: recommend what fits")


def run(arguments: argparse.Namespace) -> int:
    """Print the comparison. Raises ValueError if the call is impossible, or if no option gives a machine's rates."""
    rates = ("hardware",) if arguments.flops is arguments.bandwidth is None else ()
    call = call_of(arguments, *rates, remedy=f"times need --hardware, or --flops and --bandwidth; {SUGGEST}")
    machine = machine_for(arguments)
    assert machine is not None
    hardware, said = machine.hardware, None
    with progress_bar(len(ways_of(call, hardware)) + 1, "way", delay=2) as bar:
        rows = alternatives(call, hardware, TRAITS[arguments.kernel], bar.update)
        best, reason = recommended(rows, arguments.memory or machine.memory_bytes)
        if best is not None:
            job = call.job(best.sharding, best.way.inner)
            said = advice(job, best.way, call.sizes, best.known, hardware)
        bar.update()
    found = {
        "assumed": described(hardware, machine.source),
        "num_ranks": call.num_ranks,
        "alternatives": [_as_json(row) for row in rows],
        "recommended": None if best is None else _as_json(best),
        "reason": reason,
        "advice": said,
    }
    print(json.dumps(found, indent=1) if arguments.json else text(found))
    return 0


def _as_json(row: Alternative) -> dict[str, Any]:
    named = {"function": row.function, **row.way._asdict(), "sharding": row.sharding, "name": row.name}
    if row.why_not:
        return named | {"why_not": row.why_not}
    names, found = ("balance", "sent_bytes", "peak_bytes", "is_planned"), row.known
    times = found.time and found.seconds, found.exposed if found.is_planned else None
    figures = {name: getattr(found, name) for name in names}
    return named | figures | dict(zip(("step_seconds", "exposed"), times, strict=True)) | {"why_not": ""}


def text(found: dict[str, Any]) -> str:
    is_about = found["num_ranks"] > MOST_PLANNED
    step, sent, peak = ("step,\nabout", "received", "peak, MB,\nabout") if is_about else ("step", "sent", "peak,\nMB")
    waits = () if is_about else ("waits",)
    headers = ("function", "exchange", "sharding", step, *waits, "balance", f"{sent},\nMB", peak)
    ways = [row for row in found["alternatives"] if not row["why_not"]]
    rows = [(row["function"], row["name"], row["sharding"], *_numbers(row)) for row in ways]
    left_out = dict.fromkeys(f"{row['name']}: {row['why_not']}" for row in found["alternatives"] if row["why_not"])
    best = found["recommended"]
    name = "" if best is None else f"{best['name']}, {best['sharding']} shards: "
    words = [*(f"left out: {line}" for line in left_out), *[ERRORS_TEXT] * is_about, ""]
    words += [f"recommended: {name}{found['reason']}", *([found["advice"]] if found["advice"] else [])]
    return "\n".join([wrapped(found["assumed"]), "", aligned(headers, rows, num_left=3), *map(wrapped, words)])


def _numbers(row: dict[str, Any]) -> tuple[str, ...]:
    time = "no time" if row["step_seconds"] is None else time_text(row["step_seconds"])
    waits = (f"{row['exposed']:.0%}",) if row["is_planned"] else ()
    return time, *waits, f"{row['balance']:.1%}", f"{row['sent_bytes'] / 1e6:,.1f}", f"{row['peak_bytes'] / 1e6:,.1f}"
