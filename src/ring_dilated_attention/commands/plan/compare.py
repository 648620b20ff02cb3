"""`rda plan compare`: the same attention by every exchange and sharding, and dense, with a recommendation. No torch."""

import argparse
import json
from typing import Any

from ...forecast.call import MOST_PLANNED
from ...forecast.clock import Hardware, time_text
from ...forecast.compare import Alternative, Call, advice_on, alternatives, recommended, ways_of
from ...forecast.large import ERRORS_TEXT
from ...kernels.traits import TRAITS
from ...plan.sizes import Traits
from ..hardware import add_options as add_hardware_options
from ..hardware import described, machine_for
from ..limits import check_ranks_fit
from ..numbers import count
from ..output import aligned, progress_bar, wrapped
from .options import add_call, add_head_dim, answered, complete, pattern_of, sizes_of

EXAMPLES = f"""examples:
  rda plan compare --seq-len 1Mi --ranks 8 --segment-lengths 2Ki 128Ki 1Mi --dilation-rates 1 16 64 --causal \\
                   --heads 16 --head-dim 128 --dtype bfloat16 --hardware h100-infiniband
        by ring, all-gather, all-to-all and both, on both shardings, and dense; which to take, and why

Up to {MOST_PLANNED} ranks every rank of every way is planned and timed. Of more the work is counted exactly, bytes are
those that a rank receives, memory is an estimate, and only rings are timed, about.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EXAMPLES
    add_call(parser)
    add_head_dim(parser)
    add_hardware_options(parser)
    parser.add_argument("--memory", type=count, metavar="BYTES", help="of a rank, as 80G: what fits")


def run(arguments: argparse.Namespace) -> int:
    return answered(lambda: answer(arguments))


def answer(arguments: argparse.Namespace) -> None:
    """Print the comparison.

    Raises:
        ValueError: for a call that cannot be, or without the rates of a machine.
    """
    complete(arguments)
    arguments.ranks = 1 if arguments.ranks is None else arguments.ranks
    pattern, machine = pattern_of(arguments), machine_for(arguments)
    check_ranks_fit(arguments.ranks, arguments.seq_len)
    if machine is None:
        raise ValueError("rda plan compare compares times: give --hardware, or --flops and --bandwidth")
    heads = arguments.heads, arguments.kv_heads
    call = Call(pattern, arguments.seq_len, arguments.ranks, *heads, sizes_of(arguments))
    memory = arguments.memory or machine.memory_bytes
    found = found_for(call, machine.hardware, machine.source, TRAITS[arguments.kernel], memory)
    print(json.dumps(found, indent=1) if arguments.json else text(found))


def found_for(
    call: Call, hardware: Hardware, source: str, traits: Traits, memory_bytes: int | None = None
) -> dict[str, Any]:
    """Rows, recommendation and advice, as JSON has them."""
    with progress_bar(len(ways_of(call)) * call.num_ranks, "rank", delay=2) as bar:
        rows = alternatives(call, hardware, traits, bar.update)
        best, reason = recommended(rows, memory_bytes)
        said = None if best is None else advice_on(call, best, hardware)
    return {
        "assumed": described(hardware, source),
        "num_ranks": call.num_ranks,
        "alternatives": [_as_json(row) for row in rows],
        "recommended": None if best is None else _as_json(best),
        "reason": reason,
        "advice": said,
    }


def _as_json(row: Alternative) -> dict[str, Any]:
    named = {"function": row.function, **row.way._asdict(), "sharding": row.sharding, "name": row.name}
    if row.figures is None:
        return named | {"why_not": row.why_not}
    found = row.figures
    assert found.peak is not None
    return named | {
        "balance": found.balance,
        "sent_bytes": found.sent_bytes,
        "peak_bytes": found.peak.num_bytes,
        "step_seconds": None if found.time is None else found.time.seconds,
        "exposed": None if found.time is None else found.exposed,
        "is_planned": found.is_planned,
        "why_not": "",
    }


def text(found: dict[str, Any]) -> str:
    step, *moved = ("step", "sent,\nMB", "peak,\nMB")
    if found["num_ranks"] > MOST_PLANNED:
        step, *moved = ("step,\nabout", "received,\nMB", "peak, MB,\nabout")
    headers = ("function", "exchange", "sharding", step, "waits", "balance", *moved)
    rows: list[tuple[str, ...]] = []
    impossible: list[str] = []
    for row in found["alternatives"]:
        if row["why_not"]:
            impossible.append(f"{row['name']}: {row['why_not']}")
            continue
        rows.append((row["function"], row["name"], row["sharding"], *_numbers(row)))
    lines = [wrapped(found["assumed"]), "", _texts_left(headers, rows)]
    lines += [wrapped(f"left out: {line}") for line in dict.fromkeys(impossible)]
    lines += [wrapped(ERRORS_TEXT)] if found["num_ranks"] > MOST_PLANNED else []
    best = found["recommended"]
    name = "" if best is None else f"{best['name']}, {best['sharding']} shards: "
    lines += ["", wrapped(f"recommended: {name}{found['reason']}")]
    return "\n".join(lines + ([wrapped(found["advice"])] if found["advice"] else []))


def _numbers(row: dict[str, Any]) -> tuple[str, ...]:
    sizes = f"{row['sent_bytes'] / 1e6:,.1f}", f"{row['peak_bytes'] / 1e6:,.1f}"
    if row["step_seconds"] is None:
        return "no time", "", f"{row['balance']:.1%}", *sizes
    return time_text(row["step_seconds"]), f"{row['exposed']:.0%}", f"{row['balance']:.1%}", *sizes


def _texts_left(headers: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """The first three columns are words: padded, so that they stand to the left like the first."""
    widths = [max(len(row[i]) for row in (headers, *rows)) for i in range(3)]

    def padded(row: tuple[str, ...]) -> tuple[str, ...]:
        return ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), *row[3:])

    return aligned(padded(headers), [padded(row) for row in rows])
