"""`rda suggest`: a few patterns for a length and a budget, explained in words. No torch."""

import argparse
import json
import math
import sys
from typing import Any

from ..forecast.call import Way
from ..forecast.call import count as count_ranks
from ..forecast.compare import Call
from ..forecast.reach import reach
from ..forecast.suggest import suggestions, unread_phases
from ..pattern import WHOLE_DOCUMENT, DilatedPattern
from ..plan.counts import pairs
from ..plan.sizes import Sizes
from ..training.options import MOST_LAYERS
from .hardware import ITEMSIZE, check_dtype, described, machine_of
from .limits import LARGEST, MOST_HEADS, check_at_least, check_ranks_fit
from .numbers import amount, count, scaled, size_text
from .output import aligned, progress_bar, wrapped

EXAMPLES = """examples:
  rda suggest --seq-len 1Mi --heads 16 --speedup 50         a fiftieth of dense attention's work
  rda suggest --seq-len 256Ki --heads 12 --seconds 0.1 --hardware h100-nvlink --dtype bfloat16
  rda suggest --seq-len 1Mi --heads 16 --speedup 50 --layers 24 --ranks 8 --kv-heads 4

A dilated pattern lets each query see every key nearby and ever fewer further away. A branch (w, r) is segments of w
positions in which a head reads one position in r; different heads read different ones (phases). What one layer cannot
connect, a stack of layers can, from one branch into another. docs/planning.md has the rule and its limits: it counts
work and follows connections, and knows nothing of what your data needs. Train the candidates and compare their losses.
"""
MOST_RANKS = 2**16
LEAST_SECONDS, MOST_SECONDS = 1e-9, 1e9
FLOPS_PER_PAIR = 14  # times the head dim: 2 products forward and 5 backward, 2 operations each


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EXAMPLES
    parser.add_argument("--seq-len", type=count, required=True, metavar="N", help="positions of a sequence")
    parser.add_argument("--heads", type=count, required=True, metavar="H", help="query heads")
    parser.add_argument("--kv-heads", type=count, metavar="G", help="key/value heads (default as many)")
    parser.add_argument("--head-dim", type=count, default=64, metavar="D", help="default 64")
    budget = parser.add_mutually_exclusive_group(required=True)
    budget.add_argument("--speedup", type=amount, metavar="X", help="budget: a 1/X of dense attention's work")
    budget.add_argument(
        "--seconds", type=amount, metavar="S", help="budget: of one layer's attention, both ways, a rank"
    )
    parser.add_argument("--hardware", metavar="NAME", help="for --seconds: a preset or a TOML file")
    parser.add_argument("--dtype", choices=ITEMSIZE, default="bfloat16", help="of keys and values (default bfloat16)")
    parser.add_argument("--layers", type=count, default=12, metavar="L", help="of the model (default 12)")
    parser.add_argument("--ranks", type=count, default=1, metavar="P", help="that share a sequence (default 1)")
    parser.add_argument("--not-causal", action="store_true", help="a query sees later keys too")
    parser.add_argument("--json", action="store_true", help="print what was found as JSON")


def run(arguments: argparse.Namespace) -> int:
    try:
        check(arguments)
        most_pairs, assumed = budget_of(arguments)
        found = describe(arguments, most_pairs)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    if arguments.json:
        print(json.dumps({"most_pairs": most_pairs, "assumed": assumed, "suggestions": found}, indent=1))
    else:
        print(text(arguments, found, assumed))
    return 0


def check(arguments: argparse.Namespace) -> None:
    most = {"heads": MOST_HEADS, "layers": MOST_LAYERS, "ranks": MOST_RANKS}
    for name in ("seq_len", "heads", "head_dim", "layers", "ranks"):
        check_at_least(f"--{name.replace('_', '-')}", getattr(arguments, name), most=most.get(name, LARGEST))
    check_ranks_fit(arguments.ranks, arguments.seq_len)
    DilatedPattern.dense().check_heads(arguments.heads, kv_heads_of(arguments))


def kv_heads_of(arguments: argparse.Namespace) -> int:
    return arguments.heads if arguments.kv_heads is None else arguments.kv_heads


def budget_of(arguments: argparse.Namespace) -> tuple[float, str | None]:
    """The most pairs of all heads, and what it assumes."""
    dense = pairs(DilatedPattern.dense(is_causal=not arguments.not_causal), arguments.seq_len, arguments.heads)
    if arguments.speedup is not None:
        if not 1 <= arguments.speedup < math.inf:
            raise ValueError(f"--speedup must be at least 1, got {arguments.speedup:g}")
        return dense / arguments.speedup, None
    if arguments.hardware is None:
        raise ValueError("--seconds needs --hardware: a preset or a TOML file; rda doctor --save FILE.toml writes one")
    machine = machine_of(arguments.hardware)
    if not LEAST_SECONDS <= arguments.seconds <= MOST_SECONDS:
        raise ValueError(f"--seconds must be from {LEAST_SECONDS:g} to {MOST_SECONDS:g}, got {arguments.seconds:g}")
    check_dtype(machine, arguments.hardware, arguments.dtype)
    rates = ((2, False), (5, True))  # products of a pair, forward and backward
    seconds = sum(
        machine.hardware.compute_seconds(2 * products * arguments.head_dim, backward=backward, calls=0)
        for products, backward in rates
    )
    assumed = described(machine.hardware, machine.source)
    said = "" if arguments.ranks == 1 else "\nseconds are those of the work: rda plan says what messages add to a step"
    return arguments.seconds * arguments.ranks / seconds, assumed + said


def describe(arguments: argparse.Namespace, most_pairs: float) -> list[dict[str, Any]]:
    n, heads, kv_heads = arguments.seq_len, arguments.heads, kv_heads_of(arguments)
    is_causal = not arguments.not_causal
    dense = pairs(DilatedPattern.dense(is_causal=is_causal), n, heads)
    found = suggestions(n, heads, most_pairs, is_causal=is_causal)
    if not found:
        raise ValueError(
            f"no pattern of the rule has as little as {most_pairs:,.3g} pairs, {dense / most_pairs:,.0f} times less "
            f"than dense attention over {n:,} positions: allow more, or take a shorter sequence"
        )
    sizes = Sizes(1, arguments.head_dim, ITEMSIZE[arguments.dtype])
    row = arguments.head_dim * sizes.itemsize
    described = []
    calls = [Call(pattern, n, arguments.ranks, heads, kv_heads, sizes) for pattern, _ in found]
    for (pattern, rule), received in zip(found, most_received(calls), strict=True):
        work, followed = pairs(pattern, n, heads), reach(pattern, n, heads, arguments.layers)
        described.append(
            {
                "segment_lengths": pattern.segment_lengths,
                "dilation_rates": pattern.dilation_rates,
                "rule": rule,
                "pairs": work,
                "of_dense": work / dense,
                "flops": FLOPS_PER_PAIR * arguments.head_dim * work,
                "reach_by_layer": followed.shares,
                "layers_for_all": followed.layers_for(1.0),
                "layers_for_most": followed.layers_for(0.99),
                "worst_query": followed.worst,
                "queries_followed": followed.num_followed,
                "unread_phases": unread_phases(pattern, heads),
                "largest_received_bytes": received,
                # Keys that come later cannot be in a cache: only causal patterns have one.
                "cache_bytes": 2 * row * pattern.cache_rows(heads, kv_heads, n) if is_causal else None,
                "dense_cache_bytes": 2 * row * n * kv_heads if is_causal else None,
            }
        )
    return described


def most_received(calls: list[Call]) -> list[int]:
    """Bytes of the rank that receives most around the ring, of each call."""
    with progress_bar(sum(call.num_ranks for call in calls), "rank", delay=2) as bar:
        return [count_ranks(call.job(), Way(), bar.update).most_moved(call.sizes)[1] for call in calls]


def text(arguments: argparse.Namespace, found: list[dict[str, Any]], assumed: str | None) -> str:
    layers = f"{arguments.layers:,}\nlayer{'s' * (arguments.layers > 1)}"
    headers: tuple[str, ...] = ("", "pairs of\ndense's", "layers to\nhear 99 %", f"unheard\nafter {layers}")
    headers += ("received\nby a rank,\nat most", "decoding\ncache a\nlayer")
    rows: list[tuple[str, ...]] = [
        (
            f"{i + 1}. {row['rule']}",
            f"1/{1 / row['of_dense']:,.1f}",
            str(row["layers_for_most"] or f"over {arguments.layers:,}"),
            percent(1 - row["reach_by_layer"][-1]),
            size_text(row["largest_received_bytes"]),
            size_text(row["cache_bytes"] or 0),
        )
        for i, row in enumerate(found)
    ]
    if arguments.not_causal:
        headers, rows = headers[:-1], [cells[:-1] for cells in rows]
    start = (
        f"{arguments.seq_len:,} positions, {arguments.heads} heads of {arguments.head_dim}, "
        f"{arguments.ranks:,} rank{'s' * (arguments.ranks > 1)}"
    )
    lines = [start, *([wrapped(assumed)] if assumed else []), aligned(headers, rows), wrapped(legend(arguments))]
    for i, row in enumerate(found):
        said = [f"{i + 1}. {row['rule']}: {options(row, arguments.seq_len)}", *words(arguments, row)]
        lines += ["", *map(wrapped, said)]
    return "\n".join(lines)


def legend(arguments: argparse.Namespace) -> str:
    """Of which query, and of which rank, the table speaks."""
    what = "all positions" if arguments.not_causal else "the positions up to it"
    lines = [f"heard: by the worst of the queries that were followed, of {what}"]
    if arguments.ranks > 1:
        lines.append(
            "received: keys and values around the ring, in a layer's forward and backward, by the rank that receives "
            "most; with the gradients that it sends for them"
        )
    return "\n".join(lines)


def options(row: dict[str, Any], seq_len: int) -> str:
    """As other commands take them, which know no word for a whole document."""
    lengths = " ".join(str(seq_len if w == WHOLE_DOCUMENT else w) for w in row["segment_lengths"])
    return f"--segment-lengths {lengths} --dilation-rates {' '.join(map(str, row['dilation_rates']))}"


def words(arguments: argparse.Namespace, row: dict[str, Any]) -> list[str]:
    """What a newcomer should know of one pattern."""
    n, lines = arguments.seq_len, []
    branches = list(zip(row["segment_lengths"], row["dilation_rates"], strict=True))
    for (w, r), (unread, there) in zip(branches, row["unread_phases"], strict=True):
        shown = min(w, n)
        seen = "every key" if r == 1 else f"one key in {r:,}, {-(-shown // r):,} of them"
        note = "" if not unread else f"; {unread:,} of {there:,} phases are read by no head"
        lines.append(f"   within {shown:,} positions a head sees {seen}{note}")
    lines.append(
        f"   work: {scaled(row['flops'], 'FLOP')} a layer and sequence, forward and backward, "
        f"{row['of_dense']:.2%} of dense attention's"
    )
    shares = row["reach_by_layer"]
    shown_shares = ", ".join(f"{share:.1%}" if share < 0.9995 or share == 1 else "over 99.9%" for share in shares[:4])
    what = "all positions" if arguments.not_causal else "the positions up to it"
    lines.append(f"   the worst of {queries(row, n)} has heard of {shown_shares} of {what} after 1, 2, ... layers")
    lines.append(f"   {_matters(arguments, row)}")
    return lines if arguments.not_causal else [*lines, f"   {_cache(row)}"]


def queries(row: dict[str, Any], seq_len: int) -> str:
    """Whom the shares speak of."""
    num = row["queries_followed"]
    if num == seq_len:
        return f"all {num:,} queries"
    return f"the {num:,} queries followed (at starts of segments, of {seq_len:,})"


def _cache(row: dict[str, Any]) -> str:
    saved = row["dense_cache_bytes"] / row["cache_bytes"]
    kept = f"decoding keeps {size_text(row['cache_bytes'])} a layer"
    if saved > 1:
        return f"{kept}, {saved:,.1f} times less than dense attention's {size_text(row['dense_cache_bytes'])}"
    return f"{kept}, no less than dense attention would"


def _matters(arguments: argparse.Namespace, row: dict[str, Any]) -> str:
    """Whether phases that nobody reads, or distances that one layer lacks, are a loss."""
    has_unread = any(unread for unread, _ in row["unread_phases"])
    layers, most = row["layers_for_all"], row["layers_for_most"]
    rest = percent(1 - row["reach_by_layer"][-1])
    if layers is None and most is None:
        is_final = row["reach_by_layer"][-2:-1] == row["reach_by_layer"][-1:]
        remedy = "more of them add nothing: add heads, or lower rates" if is_final else "add layers, or a wider branch"
        return (
            f"{rest} of what query {row['worst_query']:,} might hear of is out of reach of {arguments.layers:,} "
            f"layer{'s' * (arguments.layers > 1)}: {remedy}"
        )
    who = queries(row, arguments.seq_len)
    if layers is None:
        why = "unread phases matter little: " if has_unread else ""
        return (
            f"{why}after {most} layers {who} have heard of 99 %, and after {arguments.layers:,} of all but {rest}. The "
            "rest are ends of segments, behind the last row that a wider branch reads there; more heads, or lower "
            "rates, leave fewer of them"
        )
    why = "unread phases do not matter to who can hear of whom, since neighbours pass on what they hold: "
    return f"{why * has_unread}after {layers} layer{'s' * (layers > 1)} nothing is out of reach of {who}"


def percent(share: float) -> str:
    """Two digits of a share, 0 % only where it is nothing and 100 % only where it is all."""
    if share == 0 or share >= 0.99:
        return "0 %" if share == 0 else "100 %" if share == 1 else "over 99 %"
    return f"{100 * share:.2g} %"
