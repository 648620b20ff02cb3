"""`rda slice`: one rank's share of a job that no machine holds, run and verified on this one."""

import argparse
import datetime
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from ..numbers import count

if TYPE_CHECKING:
    from .share import Job

EXAMPLES = """examples:
  rda slice                    rank 64,507 of 65,536 that share 1,073,741,824 positions; minutes on two cores
  rda slice --seq-len 1048576 --ranks 64 --heads 2
  rda slice --plan             only the plan's figures, for the rank and for all ranks together
  rda slice --segment-lengths 2048 1048576 --dilation-rates 1 4112 --seq-len 1048576 --ranks 64 --json

Keys and values of any position are made by a counter-based generator, so the chunks of the other ranks are made when
they are met. The rank runs forward and backward; so does every rank that meets its chunks, for the gradients that come
home. Then rows drawn for every branch are compared with direct evaluation in float64: out, lse and dq of 64 queries,
this rank's contribution to dK and dV of 64 keys, and the complete dK and dV of 8 keys. Not causal, many more ranks meet
its chunks and are run.

The default rank holds rows of the widest branch, stands behind others in as many rings as possible, and has others
behind it, but few. Exit codes: 0 verified, 1 not, 2 refused.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EXAMPLES
    parser.add_argument("--seq-len", type=count, default=2**30, metavar="N", help="positions in all (default 2^30)")
    parser.add_argument(
        "--ranks", type=count, default=2**16, metavar="P", help="ranks that share them (default 65,536)"
    )
    parser.add_argument("--rank", type=count, metavar="K", help="the rank to run")
    parser.add_argument(
        "--segment-lengths", type=count, nargs="+", metavar="W", help="one per branch (default LongNet's)"
    )
    parser.add_argument("--dilation-rates", type=count, nargs="+", metavar="R", help="one per branch")
    parser.add_argument("--not-causal", action="store_true", help="a query sees later keys too")
    parser.add_argument("--heads", type=count, default=4, metavar="H", help="query heads (default 4)")
    parser.add_argument("--kv-heads", type=count, metavar="G", help="key/value heads (default as many)")
    parser.add_argument("--head-dim", type=count, default=64, metavar="D", help="default 64")
    parser.add_argument("--seed", type=int, default=0, help="of the tensors and of the rows that are drawn")
    parser.add_argument("--plan", action="store_true", help="only print the plan's figures")
    parser.add_argument("--json", action="store_true", help="print the record as JSON")
    parser.add_argument("--record", type=Path, metavar="FILE", help="also write the record to a file")


def run(arguments: argparse.Namespace) -> int:
    from ...training.report import hardware, versions
    from ..output import check_writable, progress_bar, stepper
    from . import report
    from .share import choose_rank

    try:
        job = job_of(arguments)
        rank = choose_rank(job) if arguments.rank is None else arguments.rank
        if not 0 <= rank < job.num_ranks:
            raise ValueError(f"--rank must be from 0 to {job.num_ranks - 1}, got {rank}")
        if arguments.record is not None:
            check_writable("--record", arguments.record.parent, arguments.record.name)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    if arguments.plan:
        described = report.describe(job, rank)
        print(json.dumps(described, indent=1) if arguments.json else report.plan_table(described))
        return 0
    with progress_bar(report.num_steps_of(job, rank), "step") as bar:
        row = report.measure(job, rank, stepper(bar))
    record = {
        "command": " ".join(["rda slice", *arguments.argv]),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "hardware": hardware(),
        "versions": versions(),
        "rows": [row],
    }
    text = json.dumps(record, indent=1)
    if arguments.record is not None:
        arguments.record.write_text(text + "\n")
    print(text if arguments.json else report.text(row))
    return 0 if row["passed"] else 1


def job_of(arguments: argparse.Namespace) -> "Job":
    """The job that the arguments describe. ValueError if they do not fit."""
    from ...pattern import DilatedPattern
    from .share import Job, longnet_pattern

    for name in ("seq_len", "ranks", "heads", "head_dim"):
        if getattr(arguments, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(arguments, name)}")
    if arguments.seq_len % arguments.ranks:
        rest = arguments.seq_len % arguments.ranks
        raise ValueError(
            f"--seq-len {arguments.seq_len} must be a multiple of --ranks {arguments.ranks}; {rest} remain"
        )
    pattern = longnet_pattern(arguments.seq_len, is_causal=not arguments.not_causal)
    if arguments.segment_lengths is not None or arguments.dilation_rates is not None:
        lengths, rates = arguments.segment_lengths or (), arguments.dilation_rates or ()
        pattern = DilatedPattern(lengths, rates, is_causal=not arguments.not_causal)
    num_kv_heads = arguments.heads if arguments.kv_heads is None else arguments.kv_heads
    pattern.check_heads(arguments.heads, num_kv_heads)
    sizes = (arguments.seq_len, arguments.ranks, arguments.heads, num_kv_heads, arguments.head_dim, arguments.seed)
    return Job(pattern, *sizes)
