"""`rda plan`: shows what each rank of an attention call would compute, send and hold, without a run; and the exchanges
and shardings by their time."""

import argparse
import json
from itertools import accumulate
from pathlib import Path

from ...forecast.call_cost import (
    ERRORS_TEXT,
    MOST_TIMED,
    Counted,
    Exchange,
    Figures,
    PlannedCall,
    count,
    forecast,
)
from ...forecast.clock import time_text
from ...forecast.exchanges import Alternative, alternatives, better
from ...pattern import Branch
from ...plan.collection import without_collection
from ...plan.exchange import EXCHANGES, Choice, choice_by
from ...plan.job import Job
from ...plan.sharding import SHARDINGS, sharding_of
from ...plan.step import Sizes
from ..arguments import MOST_RANKS, check_at_least, check_given, check_ranks_fit
from ..arguments import count as whole_number
from ..console import as_plain, progress, scaled, size_text, table, wrapped
from ..hardware import ITEMSIZE, Machine, assumed, known, machine_for
from .job_options import SUGGEST, add_shared, complete, needed_of_pattern, pattern_of
from .picture import check_picture, draw

MOST_COMPARED = 4096  # with more ranks, counting takes long: only the exchange and sharding of the call are counted
EXAMPLES = f"""examples:
  rda plan --seq-len 1Mi --ranks 8 --segment-lengths 2Ki 64Ki 1Mi \\
           --dilation-rates 1 16 256 --hardware h100
      which branches stay at home and which travel, what a rank holds, and how
      long a step takes, by each exchange
  rda plan --seq-len 128Ki --ranks 4 --segment-lengths 128Ki \\
           --dilation-rates 1 --causal
      dense ring attention; the last rank has seven times the work of the first
  the same with
      --sharding zigzag           balanced
      --documents 100000 31072    packed
      --picture pattern.png       also draws the pattern

One attention call, forward and backward; rda plan model plans the training of a whole model. The rates of presets are
presumed; rda doctor --save FILE.toml measures those of your machines. With more than {MOST_TIMED} ranks, memory and
time are estimates, marked "about". docs/planning.md says what is counted, and how far off estimates may be.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_shared(parser)
    add = parser.add_argument
    add(
        "--ranks",
        type=whole_number,
        default=1,
        metavar="P",
        help="ranks that share a sequence (default 1)",
    )
    add("--causal", action="store_true", help="a query sees no later key")
    add("--head-dim", type=whole_number, default=64, metavar="D", help="default 64")
    exchange_help = "how chunks travel (default auto: as a call chooses)"
    add("--exchange", choices=("auto", *EXCHANGES), default="auto", help=exchange_help)
    add(
        "--sharding",
        choices=SHARDINGS,
        default="contiguous",
        help="who owns what (default contiguous)",
    )
    documents_help = "lengths of packed documents, which add up to --seq-len"
    add("--documents", type=whole_number, nargs="+", metavar="N", help=documents_help)
    add("--picture", type=Path, metavar="NAME.png", help="draw the pattern")


@without_collection()
def run(arguments: argparse.Namespace) -> int:
    """Print the plan. Raises ValueError for a call that is not possible."""
    check_given(arguments, ("seq_len", *needed_of_pattern(arguments)), SUGGEST)
    complete(arguments)
    check_at_least("--ranks", arguments.ranks, most=MOST_RANKS)
    check_ranks_fit(arguments.ranks, arguments.seq_len)
    pattern = pattern_of(arguments, is_causal=arguments.causal)
    documents = documents_of(arguments)
    if arguments.picture is not None:
        check_picture(arguments.picture, arguments.seq_len)
    machine = machine_for(arguments)
    kernel = "cpu" if machine is None else machine.kernel
    hardware = None if machine is None else machine.hardware
    sizes = Sizes(arguments.batch, arguments.head_dim, ITEMSIZE[arguments.dtype])
    heads = arguments.heads, arguments.kv_heads
    call = PlannedCall(pattern, arguments.seq_len, arguments.ranks, *heads, sizes)
    job = call.job(arguments.sharding, documents=documents)
    rows: list[Alternative] = []
    with progress(None, "step") as bar:
        counted, choice = counted_of(job, sizes, arguments.exchange)
        figures = forecast(
            job, counted.exchange, sizes, kernel=kernel, hardware=hardware, counted=counted
        )
        bar.update()
        if 1 < job.num_ranks <= MOST_COMPARED:
            rows = alternatives(call, hardware, documents, bar.update)
    advice = better(figures, rows)
    if arguments.json:
        named = {"kernel": kernel, "exchange": choice, **as_plain(figures)}
        named |= {"alternatives": rows, "better": advice}
        if machine is not None:
            named["hardware"] = known(machine.hardware)
        print(json.dumps({name: as_plain(value) for name, value in named.items()}, indent=1))
    else:
        print(wrapped(pattern.explain(arguments.heads, arguments.documents or [arguments.seq_len])))
        print(table_of_ranks(figures))
        print(*map(wrapped, lines_of(figures, choice, kernel, machine)), sep="\n")
        if rows:
            print(f"\n{table_of_alternatives(rows)}")
        if advice:
            print(wrapped(advice))
    if arguments.picture is not None:
        draw(arguments.picture, pattern, arguments.seq_len, arguments.heads)
    return 0


def documents_of(arguments: argparse.Namespace) -> tuple[int, ...] | None:
    """The borders of packed documents, checked."""
    lengths = arguments.documents
    sharding = arguments.sharding
    if sharding_of(sharding).needs_documents and (lengths is None or arguments.ranks > MOST_TIMED):
        raise ValueError(f"--sharding {sharding} needs --documents, and at most {MOST_TIMED} ranks")
    if lengths is None:
        return None
    if min(lengths) < 1:
        raise ValueError(f"--documents must be at least 1 each, got {min(lengths)}")
    if sum(lengths) != arguments.seq_len:
        raise ValueError(
            f"--documents add up to {sum(lengths)}, and --seq-len is {arguments.seq_len}"
        )
    if arguments.batch != 1:
        raise ValueError(
            f"--documents are packed into one sequence, so --batch must be 1, got {arguments.batch}"
        )
    return tuple(accumulate(lengths, initial=0))


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


def table_of_ranks(figures: Figures) -> str:
    headers = (
        "rank",
        "positions",
        "work",
        "share",
        "sent,\nforward",
        "in all",
        "held,\nforward",
        "in all",
    )
    rows = []
    for rank in figures.ranks:
        assert rank.weight is not None
        share = rank.flops / figures.flops if figures.flops else 0.0
        cells = [f"{rank.rank:,}", f"{rank.num_rows:,}", scaled(rank.flops, "FLOP"), f"{share:.1%}"]
        sizes = (rank.forward_sent, rank.sent, rank.weight.forward, rank.weight.peak)
        rows.append((*cells, *map(size_text, sizes)))
    text = table(headers, rows)
    if len(rows) == figures.num_ranks:
        return text
    return f"{text}\n({figures.num_ranks:,} ranks; shown are those that stand out)"


def lines_of(figures: Figures, choice: Choice, kernel: str, machine: Machine | None) -> list[str]:
    """What holds for all ranks, the exchange with what each branch sends, and the time."""
    work = scaled(figures.flops, "FLOP")
    about = "about " if len(figures.ranks) < figures.num_ranks else ""
    held = f"{about}{size_text(figures.peak_bytes)}, with the kernel {kernel}"
    lines = [
        f"work of all ranks: {work}; balance: {figures.balance:.1%} (mean work over the largest)",
        f"a rank holds at most {held}",
    ]
    memory_bytes = None if machine is None else machine.memory_bytes
    if memory_bytes is not None and figures.peak_bytes > memory_bytes:
        lines.append(f"that does not fit: a rank has {size_text(memory_bytes)}")
    if figures.num_ranks > 1:
        forward, both = map(size_text, figures.most_moved)
        lines.append(f"a rank receives at most {forward} in a forward, {both} in both stages")
        lines.append(f"exchange: {choice.exchange}: {choice.reason}")
        for number, branch in enumerate(figures.branches):
            what = "stays at home"
            if choice.exchange == "all_to_all":
                what = "is computed by heads: each rank has all positions of some heads"
            elif branch.sent:
                sent = f"{size_text(branch.sent)} of keys and values in a forward, over all ranks"
                what = f"travels among up to {branch.num_sharing:,} ranks, {sent}"
            name = Branch(branch.segment_length, branch.dilation_rate, branch.is_window)
            lines.append(f"branch {number} ({name}) {what}")
    if machine is not None:
        lines.append(assumed(machine))
    if figures.step is not None:
        forward = time_text(figures.step.forward_seconds)
        backward = time_text(figures.step.backward_seconds)
        lines.append(f"modelled step: {figures.time_text} (forward {forward}, backward {backward})")
    if figures.is_about:
        lines.append(ERRORS_TEXT)
    return lines


def table_of_alternatives(rows: list[Alternative]) -> str:
    """Every exchange and sharding, with near-equal shards, the fastest first."""
    lines = []
    for row in rows:
        cells = [str(row.exchange), row.sharding, f"{row.figures.balance:.1%}"]
        cells.append(size_text(row.figures.most_moved[1]))
        if row.figures.step is None:
            cells += ["", ""]
        else:
            cells += [row.figures.time_text, f"{row.figures.exposed:.0%}"]
        lines.append(tuple(cells))
    headers = ("exchange", "sharding", "balance", "received\nby a rank", "step", "waits")
    return table(headers, lines, num_left=2)
