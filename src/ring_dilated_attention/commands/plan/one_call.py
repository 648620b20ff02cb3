"""`rda plan`: shows what each rank of an attention call would compute, send and hold, without a run; and the exchanges
and shardings by their time."""

import argparse
import json
from pathlib import Path
from typing import Any

from ...forecast.call_cost import (
    ERRORS_TEXT,
    FLOPS_PER_PAIR,
    MOST_TIMED,
    Counted,
    Exchange,
    Figures,
    PlannedCall,
    count,
    forecast,
)
from ...forecast.clock import time_text
from ...forecast.exchanges import Alternative, advice, alternatives, best_of
from ...pattern import Branch
from ...plan.collection import without_collection
from ...plan.exchange import EXCHANGES, Choice, choice_by
from ...plan.job import Job
from ...plan.sharding import SHARDINGS, Borders, shard_length, sharding_of
from ...plan.step import Sizes
from ..arguments import MOST_RANKS, check_at_least, check_given, check_ranks_fit
from ..arguments import count as whole_number
from ..console import progress, scaled, size_text, table, wrapped
from ..hardware import ITEMSIZE, Machine, described, known, machine_for
from .job_options import (
    SUGGEST,
    add_shared,
    complete,
    documents_of,
    itemsize_of,
    kernel_of,
    pattern_of,
)
from .picture import check_picture, draw

MOST_COMPARED = 4096  # with more ranks, counting takes long: only the exchange and sharding of the call are counted
EXAMPLES = f"""examples:
  rda plan --seq-len 1Mi --ranks 8 --segment-lengths 2Ki 64Ki 1Mi \\
           --dilation-rates 1 16 256 --dtype bfloat16 --hardware h100
      which branches stay at home and which travel, what a rank holds, and how
      long a step takes, by each exchange
  rda plan --seq-len 128Ki --ranks 4 --segment-lengths 128Ki \\
           --dilation-rates 1 --causal
      dense ring attention; the last rank has seven times the work of the first
  the same with
      --sharding zigzag           balanced
      --documents 100000 31072    packed
      --picture pattern.png       also draws the pattern

One attention call, forward and backward; rda plan model plans the training of a whole model. The time is a model: a
rank computes at --flops, and sends and receives at --bandwidth each. The rates of presets are presumed; rda doctor
--save FILE.toml measures those of your machines. With more than {MOST_TIMED} ranks, memory and time are estimates,
marked "about". docs/planning.md says what is counted, and how far off estimates may be.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_shared(parser)
    add = parser.add_argument
    add("--ranks", type=whole_number, metavar="P", help="ranks that share a sequence (default 1)")
    add("--causal", action="store_true", help="a query sees no later key")
    add("--head-dim", type=whole_number, default=64, metavar="D", help="default 64")
    add(
        "--dtype",
        choices=ITEMSIZE,
        default="float32",
        help="of query, key and value (default float32)",
    )
    exchange_help = "how chunks travel (default auto: as a call chooses)"
    add("--exchange", choices=("auto", *EXCHANGES), default="auto", help=exchange_help)
    add(
        "--sharding",
        choices=SHARDINGS,
        default="contiguous",
        help="who owns what (default contiguous)",
    )
    add(
        "--align",
        type=whole_number,
        default=1,
        metavar="A",
        help="borders of shards at multiples of A",
    )
    documents_help = "lengths of packed documents, which add up to --seq-len"
    add("--documents", type=whole_number, nargs="+", metavar="N", help=documents_help)
    add("--picture", type=Path, metavar="NAME.png", help="draw the pattern")


@without_collection()
def run(arguments: argparse.Namespace) -> int:
    """Print the plan. Raises ValueError for a call that is not possible."""
    check_given(arguments, ("seq_len", "segment_lengths", "dilation_rates"), SUGGEST)
    complete(arguments)
    num_ranks = 1 if arguments.ranks is None else arguments.ranks
    check_at_least("--ranks", num_ranks, most=MOST_RANKS)
    check_ranks_fit(num_ranks, arguments.seq_len)
    pattern = pattern_of(arguments, is_causal=arguments.causal)
    sizes = Sizes(arguments.batch, arguments.head_dim, itemsize_of(arguments))
    call = PlannedCall(
        pattern, arguments.seq_len, num_ranks, arguments.heads, arguments.kv_heads, sizes
    )
    machine = machine_for(arguments, num_ranks)
    documents = documents_of(arguments)
    job = job_of(call, arguments, documents)
    if arguments.picture is not None:
        check_picture(arguments.picture)
    found = plan(call, job, documents, arguments, machine)
    if arguments.json:
        print(json.dumps(found.as_json(), indent=1))
    else:
        print(wrapped(pattern.explain(arguments.heads, arguments.documents or [arguments.seq_len])))
        print(found.text())
    if arguments.picture is not None:
        draw(arguments.picture, pattern, arguments.seq_len, arguments.heads)
    return 0


def job_of(call: PlannedCall, arguments: argparse.Namespace, documents: Borders) -> Job:
    sharding = sharding_of(arguments.sharding)
    if not sharding.takes_lengths and arguments.align != 1:
        raise ValueError(
            f"--align {arguments.align} is for contiguous shards; {arguments.sharding}'s are near-equal"
        )
    if sharding.needs_documents and (documents is None or call.num_ranks > MOST_TIMED):
        raise ValueError(
            f"--sharding {arguments.sharding} needs --documents, and at most {MOST_TIMED} ranks"
        )
    job = call.job(arguments.sharding, align=arguments.align, documents=documents)
    empty = sum(1 for shard in job.shards if not shard_length(shard))
    if empty:
        cause = (
            f"--sharding {arguments.sharding}"
            if arguments.align == 1
            else f"--align {arguments.align}"
        )
        left = f"{empty:,} of {job.num_ranks:,} ranks without positions"
        raise ValueError(f"{cause} leaves {left}: choose fewer ranks, or a smaller --align")
    return job


def plan(
    call: PlannedCall,
    job: Job,
    documents: Borders,
    arguments: argparse.Namespace,
    machine: Machine | None,
) -> "CallPlan":
    hardware = None if machine is None else machine.hardware
    is_compared = 1 < job.num_ranks <= MOST_COMPARED
    with progress(None, "step") as bar:
        counted, choice = counted_of(job, call.sizes, arguments.exchange)
        kernel = kernel_of(arguments, machine)
        figures = forecast(
            job, counted.exchange, call.sizes, kernel=kernel, hardware=hardware, counted=counted
        )
        bar.update()
        rows = alternatives(call, hardware, documents, bar.update) if is_compared else []
        said: list[str] = []
        if hardware is not None:
            said = advice(job, counted.exchange, call.sizes, figures, hardware, best_of(rows))
    return CallPlan(call.sizes, choice, figures, kernel, machine, rows, said)


def counted_of(job: Job, sizes: Sizes, asked_for: str) -> tuple[Counted, Choice]:
    """The counts of all ranks, and the exchange: the one asked for, or the one that a call would choose."""
    if job.num_ranks == 1:
        return count(job, Exchange()), Choice("none", "one rank: nothing to send")
    if asked_for != "auto":
        return count(job, Exchange(asked_for)), Choice(asked_for, "asked for")
    undealt = count(job, Exchange())
    choice = choice_by(undealt.places[0], job, sizes)
    exchange = Exchange(choice.exchange)
    if exchange.is_dealt:
        return count(job, exchange), choice
    return undealt._replace(exchange=exchange), choice


class CallPlan:
    """The figures of a call, as text and as JSON."""

    def __init__(
        self,
        sizes: Sizes,
        choice: Choice,
        figures: Figures,
        kernel: str,
        machine: Machine | None,
        rows: list[Alternative],
        said: list[str],
    ) -> None:
        self.sizes, self.choice, self.figures, self.kernel = sizes, choice, figures, kernel
        self.machine, self.rows, self.said = machine, rows, said

    def flops(self, num_pairs: int) -> int:
        return FLOPS_PER_PAIR * self.sizes.unit * num_pairs

    def waits(self) -> list[float]:
        """The share of the step in which each planned rank waits."""
        figures = self.figures
        if figures.step is None:
            return []
        times = figures.step.ranks
        if not figures.is_about:
            times = tuple(times[rank.rank] for rank in figures.ranks)
        return [
            time.exposed_seconds / figures.seconds if figures.seconds else 0.0 for time in times
        ]

    def as_json(self) -> dict[str, Any]:
        figures = self.figures
        ranks = []
        for rank in figures.ranks:
            assert rank.weight is not None
            named = {"rank": rank.rank, "positions": rank.num_rows, "flops": self.flops(rank.pairs)}
            named |= {"forward_sent_bytes": rank.forward_sent, "sent_bytes": rank.sent}
            ranks.append(
                named | {"forward_peak_bytes": rank.weight.forward, "peak_bytes": rank.weight.peak}
            )
        made: dict[str, Any] = {
            "num_ranks": figures.num_ranks,
            "is_about": figures.is_about,
            "flops": self.flops(figures.pairs),
            "busiest_rank": figures.busiest,
            "balance": figures.balance,
            "largest_forward_received_bytes": figures.most_moved[0],
            "largest_received_bytes": figures.most_moved[1],
            "kernel": self.kernel,
            "peak_bytes": figures.peak_bytes,
            "exchange": self.choice._asdict(),
            "branches": [self.branch_json(i) for i in range(len(figures.branches))],
            "ranks": ranks,
            "alternatives": [alternative_json(row) for row in self.rows],
            "advice": self.said,
        }
        if self.machine is not None:
            made["hardware"] = known(self.machine.hardware)
        if figures.step is not None:
            names = ("step_seconds", "forward_seconds", "backward_seconds")
            made["step"] = {name: getattr(figures.step, name) for name in names} | {
                "waits": self.waits()
            }
        return made

    def branch_json(self, branch: int) -> dict[str, Any]:
        share = self.figures.branches[branch]
        names = ("segment_length", "dilation_rate", "num_sharing")
        sent = share.sent * self.sizes.unit * self.sizes.itemsize
        return {name: getattr(share, name) for name in names} | {"forward_sent_bytes": sent}

    def text(self) -> str:
        figures, lines = self.figures, [self.table_of_ranks()]
        work = scaled(self.flops(figures.pairs), "FLOP")
        lines.append(
            f"work of all ranks: {work}; balance: {figures.balance:.1%} (mean work over the largest)"
        )
        about = "about " if len(figures.ranks) < figures.num_ranks else ""
        lines.append(
            f"a rank holds at most {about}{size_text(figures.peak_bytes)}, with the kernel {self.kernel}"
        )
        memory_bytes = None if self.machine is None else self.machine.memory_bytes
        if memory_bytes is not None and figures.peak_bytes > memory_bytes:
            lines.append(f"that does not fit: a rank has {size_text(memory_bytes)}")
        if figures.num_ranks > 1:
            received = size_text(figures.most_moved[0]), size_text(figures.most_moved[1])
            lines.append(
                f"a rank receives at most {received[0]} in a forward, {received[1]} in both stages"
            )
            lines.append(f"exchange: {self.choice.exchange}: {self.choice.reason}")
            lines += [self.branch_line(branch) for branch in range(len(figures.branches))]
        if self.machine is not None:
            lines.append(described(self.machine.hardware, self.machine.source))
        if figures.step is not None:
            stages = [
                time_text(figures.step.forward_seconds),
                time_text(figures.step.backward_seconds),
            ]
            lines.append(
                f"modelled step: {figures.time_text} (forward {stages[0]}, backward {stages[1]})"
            )
        if figures.is_about:
            lines.append(ERRORS_TEXT)
        text = "\n".join([lines[0], *map(wrapped, lines[1:])])
        if self.rows:
            text += f"\n\n{table_of_alternatives(self.rows, figures.is_about)}"
        return "\n".join([text, *map(wrapped, self.said)])

    def table_of_ranks(self) -> str:
        headers = [
            "rank",
            "positions",
            "work",
            "share",
            "sent,\nforward",
            "in all",
            "held,\nforward",
            "in all",
        ]
        waits = self.waits()
        if waits:
            headers.append("waits,\nof a step")
        rows = []
        for number, rank in enumerate(self.figures.ranks):
            assert rank.weight is not None
            share = rank.pairs / self.figures.pairs if self.figures.pairs else 0.0
            cells = [
                f"{rank.rank:,}",
                f"{rank.num_rows:,}",
                scaled(self.flops(rank.pairs), "FLOP"),
                f"{share:.1%}",
            ]
            sizes = (rank.forward_sent, rank.sent, rank.weight.forward, rank.weight.peak)
            cells += [size_text(num_bytes) for num_bytes in sizes]
            if waits:
                cells.append(f"{waits[number]:.1%}")
            rows.append(tuple(cells))
        text = table(tuple(headers), rows)
        if len(rows) == self.figures.num_ranks:
            return text
        return f"{text}\n({self.figures.num_ranks:,} ranks; shown are those that stand out)"

    def branch_line(self, branch: int) -> str:
        row = self.branch_json(branch)
        what = "stays at home"
        if self.choice.exchange == "all_to_all":
            what = "is computed by heads: each rank has all positions of some heads"
        elif row["forward_sent_bytes"]:
            sent = f"{size_text(row['forward_sent_bytes'])} of keys and values in a forward, over all ranks"
            what = f"travels among up to {row['num_sharing']:,} ranks, {sent}"
        return f"branch {branch} ({Branch(row['segment_length'], row['dilation_rate'])}) {what}"


def alternative_json(row: Alternative) -> dict[str, Any]:
    named: dict[str, Any] = {
        **row.exchange._asdict(),
        "sharding": row.sharding,
        "why_not": row.why_not,
    }
    if row.figures is None:
        return named
    named |= {"balance": row.figures.balance, "largest_received_bytes": row.figures.most_moved[1]}
    if row.figures.step is not None:
        named |= {"step_seconds": row.figures.seconds, "waits": row.figures.exposed}
    return named


def table_of_alternatives(rows: list[Alternative], is_about: bool) -> str:
    """Every exchange and sharding, with near-equal shards, the fastest first."""
    is_timed = any(row.figures is not None and row.figures.step is not None for row in rows)
    headers = ["exchange", "sharding", "balance", "received\nby a rank"]
    if is_timed:
        headers += ["step", "waits"]
    lines = []
    for row in rows:
        if row.figures is None:
            continue
        cells = [
            str(row.exchange),
            row.sharding,
            f"{row.figures.balance:.1%}",
            size_text(row.figures.most_moved[1]),
        ]
        if is_timed and row.figures.step is None:
            cells += ["no time", ""]
        elif is_timed:
            cells += [row.figures.time_text, "" if is_about else f"{row.figures.exposed:.0%}"]
        lines.append(tuple(cells))
    left_out = dict.fromkeys(
        f"left out: {row.exchange}: {row.why_not}" for row in rows if row.why_not
    )
    return "\n".join([table(tuple(headers), lines, num_left=2), *map(wrapped, left_out)])
