"""`rda plan`: shows what each rank of an attention call would compute, send and hold, without making the call.

It also lists all exchanges and shardings, sorted by the predicted time of the call.
"""

import json
import sys
from argparse import ArgumentParser, Namespace
from io import BytesIO
from itertools import accumulate
from pathlib import Path

from ...forecast.call_cost import (
    MOST_TIMED,
    Exchange,
    Figures,
    PlannedCall,
    forecast,
)
from ...forecast.clock import time_text
from ...forecast.exchanges import Alternative, alternatives, better
from ...pattern import DilatedPattern
from ...plan.collection import without_collection
from ...plan.exchange import EXCHANGES, Choice, choose_exchange
from ...plan.sharded_call import ShardedCall
from ...plan.sharding import SHARDINGS, sharding_of
from ...plan.step import Sizes
from ...training.files import write_whole
from ..arguments import MOST_HEADS, MOST_RANKS, check_installed, positive, within
from ..console import as_plain, progress, scaled, size_text, table, wrapped
from ..hardware import ITEMSIZE, Machine, assumed, known, machine_for
from .job_options import add_shared, pattern_of

MOST_COMPARED = 4096  # with more ranks, comparing the exchanges would take long
MOST_DRAWN = 128  # the most positions that a picture can show
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

One attention call, forward and backward; rda plan model plans the training of
a whole model. The rates of presets are presumed; rda doctor --save FILE.toml
measures those of your machines. With more than {MOST_TIMED} ranks no time is
modelled. docs/planning.md says what is counted.
"""


def add_arguments(parser: ArgumentParser) -> None:
    add_shared(parser)
    add = parser.add_argument
    add(
        "--ranks",
        type=within(1, MOST_RANKS),
        default=1,
        metavar="P",
        help="ranks that share a sequence (default 1)",
    )
    add("--causal", action="store_true", help="a query sees no later key")
    heads = within(1, MOST_HEADS)
    add("--heads", type=heads, default=12, metavar="H", help="query heads (default 12)")
    add("--kv-heads", type=heads, metavar="G", help="key/value heads (default as many)")
    add("--head-dim", type=positive, default=64, metavar="D", help="default 64")
    add(
        "--exchange",
        choices=("auto", *EXCHANGES),
        default="auto",
        help="how chunks travel (default auto: as a call chooses)",
    )
    add(
        "--sharding",
        choices=SHARDINGS,
        default="contiguous",
        help="who owns what (default contiguous)",
    )
    add(
        "--documents",
        type=positive,
        nargs="+",
        metavar="N",
        help="lengths of packed documents, which add up to --seq-len",
    )
    add("--picture", type=Path, metavar="NAME.png", help="draw the pattern")


@without_collection()
def run(arguments: Namespace) -> int:
    """Print the plan. Raises ValueError if the call is impossible."""
    pattern = pattern_of(arguments, is_causal=arguments.causal)
    num_kv_heads = arguments.kv_heads or arguments.heads
    pattern.check_heads(arguments.heads, num_kv_heads)
    documents = documents_of(arguments)
    machine = machine_for(arguments)
    kernel, dtype, hardware = "cpu", "float32", None
    if machine is not None:
        kernel, dtype, hardware = machine.kernel, machine.dtype, machine.hardware
    sizes = Sizes(arguments.batch, arguments.head_dim, ITEMSIZE[dtype])
    call = PlannedCall(
        pattern, arguments.seq_len, arguments.ranks, arguments.heads, num_kv_heads, sizes
    )
    sharded_call = call.sharded_call(arguments.sharding, documents=documents)
    rows: list[Alternative] = []
    with progress(None, "step") as bar:
        choice = choice_of(sharded_call, sizes, arguments.exchange)
        exchange = Exchange(choice.exchange)
        figures = forecast(sharded_call, exchange, sizes, kernel=kernel, hardware=hardware)
        bar.update()
        if 1 < sharded_call.num_ranks <= MOST_COMPARED:
            rows = alternatives(call, hardware, documents, bar.update)
    advice = better(figures, rows)
    if arguments.picture is not None:
        draw(arguments.picture, pattern, arguments.seq_len, arguments.heads)
    if arguments.json:
        named = {
            "kernel": kernel,
            "exchange": choice,
            **as_plain(figures),
            "alternatives": as_plain(rows),
            "better": advice,
        }
        if hardware is not None:
            named["hardware"] = known(hardware)
        print(json.dumps(named, indent=1))
    else:
        print(wrapped(pattern.explain(arguments.heads, arguments.documents or [arguments.seq_len])))
        print(table_of_ranks(figures))
        print(*map(wrapped, lines_of(pattern, figures, choice, machine)), sep="\n")
        if rows:
            print(f"\n{table_of_alternatives(rows)}")
        if advice:
            print(wrapped(advice))
    return 0


def draw(path: Path, pattern: DilatedPattern, seq_len: int, num_heads: int) -> None:
    """Draw the pattern to a new file, and print the file's path on stderr.

    Raises ValueError if the sequence is too long, matplotlib is missing, or the file exists already.
    """
    if seq_len > MOST_DRAWN:
        raise ValueError(
            f"--picture shows at most {MOST_DRAWN} positions, and --seq-len is {seq_len:,}: draw a shorter pattern of "
            "the same shape"
        )
    check_installed(["matplotlib"], "train", "--picture ")
    from ...pictures import draw_pattern

    content = BytesIO()
    draw_pattern(pattern, seq_len, num_heads).savefig(content, dpi=160, format="png")
    write_whole(path, content.getvalue(), lambda file: False, "this run of rda plan --picture")
    print(path, file=sys.stderr)


def documents_of(arguments: Namespace) -> tuple[int, ...] | None:
    """The borders of the packed documents, such as (0, 40, 97) for --documents 40 57; None without --documents.

    Raises ValueError if the options do not fit together.
    """
    lengths = arguments.documents
    sharding = arguments.sharding
    if sharding_of(sharding).needs_documents and (lengths is None or arguments.ranks > MOST_TIMED):
        raise ValueError(f"--sharding {sharding} needs --documents, and at most {MOST_TIMED} ranks")
    if lengths is None:
        return None
    if sum(lengths) != arguments.seq_len:
        raise ValueError(
            f"--documents add up to {sum(lengths)}, and --seq-len is {arguments.seq_len}"
        )
    if arguments.batch != 1:
        raise ValueError(
            f"--documents are packed into one sequence, so --batch must be 1, got {arguments.batch}"
        )
    return tuple(accumulate(lengths, initial=0))


def choice_of(sharded_call: ShardedCall, sizes: Sizes, asked_for: str) -> Choice:
    """The exchange that the user asked for, or else the one that a call would choose, and the reason."""
    if sharded_call.num_ranks == 1:
        return Choice("none", "one rank: nothing to send")
    if asked_for == "auto":
        return choose_exchange(sharded_call, sizes)
    return Choice(asked_for, "asked for")


def table_of_ranks(figures: Figures) -> str:
    rows = []
    for rank in figures.ranks:
        assert rank.weight is not None
        sizes = (rank.forward_sent, rank.sent, rank.weight.forward, rank.weight.peak)
        cells = [f"{rank.rank:,}", f"{rank.num_rows:,}", scaled(rank.flops, "FLOP")]
        rows.append((*cells, *map(size_text, sizes)))
    text = table(
        (
            "rank",
            "positions",
            "work",
            "sent,\nforward",
            "in all",
            "held,\nforward",
            "in all",
        ),
        rows,
    )
    if len(rows) == figures.num_ranks:
        return text
    return f"{text}\n({figures.num_ranks:,} ranks; shown are those that stand out)"


def lines_of(
    pattern: DilatedPattern, figures: Figures, choice: Choice, machine: Machine | None
) -> list[str]:
    """Lines of text about three things: the totals over all ranks, what each branch sends, and the time."""
    about = "about " if len(figures.ranks) < figures.num_ranks else ""
    lines = [
        f"work of all ranks: {scaled(figures.flops, 'FLOP')}; "
        f"balance: {figures.balance:.1%} (mean work over the largest)",
        f"a rank holds at most {about}{size_text(figures.peak_bytes)}",
    ]
    if figures.num_ranks > 1:
        lines.append(f"exchange: {choice.exchange}: {choice.reason}")
        # With all_to_all each rank computes some heads of all branches, so no message belongs to a single branch.
        for number, num_bytes in enumerate(figures.sent_by_branch):
            what = "stays at home"
            if choice.exchange == "all_to_all":
                what = "is computed by heads"
            elif num_bytes:
                what = f"sends {size_text(num_bytes)} of keys and values in a forward"
            lines.append(f"branch {number} ({pattern.branches[number]}) {what}")
    if machine is not None:
        if machine.memory_bytes is not None and figures.peak_bytes > machine.memory_bytes:
            lines.append(f"that does not fit: a rank has {size_text(machine.memory_bytes)}")
        lines.append(assumed(machine))
    if figures.step is not None:
        forward = time_text(figures.step.forward_seconds)
        backward = time_text(figures.step.backward_seconds)
        lines.append(
            f"modelled step: {time_text(figures.seconds)} (forward {forward}, backward {backward})"
        )
    return lines


def table_of_alternatives(rows: list[Alternative]) -> str:
    """A table of every exchange and sharding, the fastest first. Each row assumes shards of nearly equal lengths."""
    lines = []
    for row in rows:
        step = waits = ""
        if row.figures.step is not None:
            step = time_text(row.figures.seconds)
            waits = f"{row.figures.exposed:.0%}"
        lines.append(
            (
                str(row.exchange),
                row.sharding,
                f"{row.figures.balance:.1%}",
                size_text(row.figures.most_sent),
                step,
                waits,
            )
        )
    return table(
        ("exchange", "sharding", "balance", "sent\nby a rank", "step", "waits"), lines, num_left=2
    )
