"""`python -m benchmarks.slice`: one rank's share of a job that no machine holds, run and verified on this one."""

import argparse
import datetime
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

from ring_dilated_attention.commands.cli import filled
from ring_dilated_attention.commands.numbers import (
    MOST_HEADS,
    MOST_RANKS,
    check_at_least,
    check_memory,
    check_ranks_fit,
    count,
)
from ring_dilated_attention.commands.output import check_writable, progress_bar
from ring_dilated_attention.commands.terminal import guarded
from ring_dilated_attention.pattern import DilatedPattern
from ring_dilated_attention.training.files import MOST_BYTES, check_mine, json_object, write_whole
from ring_dilated_attention.training.machine import hardware, versions
from ring_dilated_attention.training.options import in_short

from .. import progress
from . import report
from .share import SlicedJob, choose_rank, longnet_pattern

# As strides of tensors, times heads and head dim, these fit 64 bits.
MOST_POSITIONS, MOST_HEAD_DIM = 2**40, 2**16
MOST_SEED = 2**61 - 1  # times the number of tensors it fits 64 bits
RECORDED = {"command", "date", "hardware", "versions", "rows"}  # by which a record is known for one

EXAMPLES = """examples:
  python -m benchmarks.slice
      rank 64,507 of 65,536 that share 1,073,741,824 positions; minutes on two
      cores
  python -m benchmarks.slice --plan
      only the plan's figures, for the rank and for all ranks together
  python -m benchmarks.slice --seq-len 1048576 --ranks 64 --heads 2
  python -m benchmarks.slice --segment-lengths 2048 1048576 \\
         --dilation-rates 1 4112 --seq-len 1048576 --ranks 64 --json

Keys and values of any position are made by a counter-based generator, so the chunks of the other ranks are made when
they are met. The rank runs forward and backward; so does every rank that meets its chunks, for the gradients that come
home. Then rows drawn for every branch are compared with direct evaluation in float64: out, lse and dq of 64 queries,
this rank's contribution to dK and dV of 64 keys, and the complete dK and dV of 8 keys. If the pattern is not
causal, many more ranks meet its chunks and are run.

The default rank holds rows of the widest branch, stands behind others in as many rings as possible, and has others
behind it, but few. Exit codes: 0 verified, 1 not, 2 refused.
"""


def main(argv: Sequence[str] | None = None) -> int:
    return guarded("python -m benchmarks.slice", lambda: run(parsed(argv)), is_process=argv is None)


def parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.slice",
        description="Run and verify one rank's share of a job that no machine holds.",
        epilog=filled(EXAMPLES),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_arguments(parser)
    arguments = parser.parse_args(argv)
    arguments.argv = list(sys.argv[1:] if argv is None else argv)
    return arguments


def add_arguments(parser: argparse.ArgumentParser) -> None:
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
    try:
        job = job_of(arguments)
        if arguments.rank is not None and not 0 <= arguments.rank < job.num_ranks:
            raise ValueError(f"--rank must be from 0 to {job.num_ranks - 1}, got {arguments.rank}")
        rank = choose_rank(job) if arguments.rank is None else arguments.rank
        if not arguments.plan:
            check_share(job, rank)
        if arguments.record is not None:
            check_writable("--record", arguments.record.parent, arguments.record.name)
            check_mine(arguments.record, is_record, "python -m benchmarks.slice --record")
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    if arguments.plan:
        described = report.describe(job, rank)
        print(json.dumps(described, indent=1) if arguments.json else report.plan_table(described))
        return 0
    with progress_bar(report.num_steps_of(job, rank), "step") as bar:
        row = report.measure(job, rank, progress.stepper(bar))
    record = {
        "command": " ".join(["python -m benchmarks.slice", *arguments.argv]),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "hardware": hardware(),
        "versions": versions(),
        "rows": [row],
    }
    text = json.dumps(record, indent=1)
    print(text if arguments.json else report.text(row))
    if arguments.record is not None:
        try:
            write_whole(arguments.record, f"{text}\n".encode(), is_record, "python -m benchmarks.slice --record")
        except ValueError as error:  # somebody put something there meanwhile
            print(error, file=sys.stderr)
            return 2
    return 0 if row["passed"] else 1


def is_record(file: BinaryIO) -> bool:
    """Whether a file is one that this command wrote, so that it may be replaced."""
    record = json_object(file.read(MOST_BYTES))
    return record.keys() == RECORDED and str(record["command"]).startswith("python -m benchmarks.slice")


def check_numbers(arguments: argparse.Namespace) -> None:
    most = {"seq_len": MOST_POSITIONS, "ranks": MOST_RANKS, "heads": MOST_HEADS, "head_dim": MOST_HEAD_DIM}
    for option, number in most.items():
        check_at_least(f"--{option.replace('_', '-')}", getattr(arguments, option), most=number)
    for name in ("segment_lengths", "dilation_rates"):
        check_at_least(f"--{name.replace('_', '-')}", max([1, *(getattr(arguments, name) or ())]), most=MOST_POSITIONS)
    if not -MOST_SEED <= arguments.seed <= MOST_SEED:
        raise ValueError(f"--seed must be from {-MOST_SEED:,} to {MOST_SEED:,}, got {in_short(arguments.seed)}")
    check_ranks_fit(arguments.ranks, arguments.seq_len)


def check_share(job: SlicedJob, rank: int) -> None:
    """Raise ValueError if there is nothing to verify, or not the memory to run it."""
    from .report import describe

    plan = describe(job, rank)["rank_plan"]
    if not plan["pairs"]:
        raise ValueError(
            f"rank {rank} of {job.num_ranks} holds no row of any branch: there is nothing to verify. Leave out --rank, "
            "or see with --plan what it holds."
        )
    check_memory(f"rank {rank} holds", plan["peak_bytes"], "use more --ranks, or see the figures with --plan")


def job_of(arguments: argparse.Namespace) -> SlicedJob:
    """The job that the arguments describe. ValueError if they do not fit."""

    check_numbers(arguments)
    if arguments.seq_len % arguments.ranks:
        rest = arguments.seq_len % arguments.ranks
        raise ValueError(
            f"--seq-len {arguments.seq_len} must be a multiple of --ranks {arguments.ranks}; {rest} remain"
        )
    if arguments.segment_lengths is None and arguments.dilation_rates is None:
        pattern = longnet_pattern(arguments.seq_len, is_causal=not arguments.not_causal)
    else:
        lengths, rates = arguments.segment_lengths or (), arguments.dilation_rates or ()
        pattern = DilatedPattern(lengths, rates, is_causal=not arguments.not_causal)
    num_kv_heads = arguments.heads if arguments.kv_heads is None else arguments.kv_heads
    pattern.check_heads(arguments.heads, num_kv_heads)
    sizes = (arguments.seq_len, arguments.ranks, arguments.heads, num_kv_heads, arguments.head_dim, arguments.seed)
    return SlicedJob(pattern, *sizes)
