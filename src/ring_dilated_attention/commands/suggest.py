"""`rda suggest`: suggests a few patterns for a sequence length and a budget, and explains them. No torch."""

import argparse
import json
import math
from typing import Any

from ..forecast.call import FLOPS_PER_PAIR, Way
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
from .numbers import amount, count, counted, scaled, size_text
from .output import aligned, progress_bar, wrapped

EXAMPLES = """examples:
  rda suggest --seq-len 1Mi --heads 16 --speedup 50   1/50 of dense's work
  rda suggest --seq-len 256Ki --heads 12 --seconds 0.1 --hardware h100-nvlink
  rda suggest --seq-len 1Mi --heads 16 --speedup 50 --ranks 8 --kv-heads 4

A dilated pattern lets each query see every key nearby, and fewer keys the further away they are. A branch (w, r) cuts
the sequence into segments of w positions, in which a head reads one position in r; different heads read different ones
(phases). What one layer cannot connect, a stack of layers can, from one branch into another. docs/planning.md has the
rule and its limits. The rule counts work and follows connections, and knows nothing of what your data needs: train the
candidates and compare their losses.
"""
MOST_RANKS = 2**16
LEAST_SECONDS, MOST_SECONDS = 1e-9, 1e9


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EXAMPLES
    add = parser.add_argument
    add("--seq-len", type=count, required=True, metavar="N", help="positions of a sequence")
    add("--heads", type=count, required=True, metavar="H", help="query heads")
    add("--kv-heads", type=count, metavar="G", help="key/value heads (default as many)")
    add("--head-dim", type=count, default=64, metavar="D", help="default 64")
    budget = parser.add_mutually_exclusive_group(required=True)
    budget.add_argument("--speedup", type=amount, metavar="X", help="budget: 1/X of dense attention's work")
    seconds = "budget: seconds of a rank for one layer's attention, forward and backward"
    budget.add_argument("--seconds", type=amount, metavar="S", help=seconds)
    add("--hardware", metavar="NAME", help="for --seconds: a preset or a TOML file")
    add("--dtype", choices=ITEMSIZE, default="bfloat16", help="of keys and values (default bfloat16)")
    add("--layers", type=count, default=12, metavar="L", help="layers of the model (default 12)")
    add("--ranks", type=count, default=1, metavar="P", help="ranks that share a sequence (default 1)")
    add("--not-causal", dest="is_causal", action="store_false", help="a query sees later keys too")
    add("--json", action="store_true", help="print the suggestions as JSON")


def run(arguments: argparse.Namespace) -> int:
    check(arguments)
    most_pairs, assumed = budget_of(arguments)
    found = describe(arguments, most_pairs)
    if arguments.json:
        print(json.dumps({"most_pairs": most_pairs, "assumed": assumed, "suggestions": found}, indent=1))
    else:
        print(text(arguments, found, assumed))
    return 0


def check(arguments: argparse.Namespace) -> None:
    """Check the numbers, and fill in --kv-heads."""
    most = {"heads": MOST_HEADS, "layers": MOST_LAYERS, "ranks": MOST_RANKS}
    for name in ("seq_len", "heads", "head_dim", "layers", "ranks"):
        check_at_least(f"--{name.replace('_', '-')}", getattr(arguments, name), most=most.get(name, LARGEST))
    check_ranks_fit(arguments.ranks, arguments.seq_len)
    if arguments.kv_heads is None:
        arguments.kv_heads = arguments.heads
    DilatedPattern.dense().check_heads(arguments.heads, arguments.kv_heads)


def dense_pairs(arguments: argparse.Namespace) -> int:
    return pairs(DilatedPattern.dense(is_causal=arguments.is_causal), arguments.seq_len, arguments.heads)


def budget_of(arguments: argparse.Namespace) -> tuple[float, str | None]:
    """The most pairs, over all heads, that the budget allows; and a line on the hardware that is assumed, if any."""
    if arguments.speedup is not None:
        if not 1 <= arguments.speedup < math.inf:
            raise ValueError(f"--speedup must be at least 1, got {arguments.speedup:g}")
        if arguments.hardware is not None:
            raise ValueError(f"--hardware {arguments.hardware} is for --seconds, and --speedup is given: leave it out")
        return dense_pairs(arguments) / arguments.speedup, None
    if arguments.hardware is None:
        raise ValueError("--seconds needs --hardware: a preset or a TOML file; rda doctor --save FILE.toml writes one")
    machine = machine_of(arguments.hardware)
    if not LEAST_SECONDS <= arguments.seconds <= MOST_SECONDS:
        raise ValueError(f"--seconds must be from {LEAST_SECONDS:g} to {MOST_SECONDS:g}, got {arguments.seconds:g}")
    check_dtype(machine, arguments.hardware, arguments.dtype)
    seconds = machine.hardware._replace(call_seconds=0).work_seconds(1, sizes_of(arguments))  # for one pair
    assumed = described(machine.hardware, machine.source)
    if arguments.ranks > 1:
        assumed += "\nthe seconds are those of the work: rda plan says what messages add to a step"
    return arguments.seconds * arguments.ranks / seconds, assumed


def sizes_of(arguments: argparse.Namespace) -> Sizes:
    return Sizes(1, arguments.head_dim, ITEMSIZE[arguments.dtype])


def describe(arguments: argparse.Namespace, most_pairs: float) -> list[dict[str, Any]]:
    n, heads, kv_heads, is_causal = arguments.seq_len, arguments.heads, arguments.kv_heads, arguments.is_causal
    dense, sizes = dense_pairs(arguments), sizes_of(arguments)
    found = suggestions(n, heads, most_pairs, is_causal=is_causal)
    if not found:
        raise ValueError(
            f"no pattern of the rule has as few as {most_pairs:,.3g} pairs, {dense / most_pairs:,.0f} times fewer "
            f"than dense attention over {n:,} positions: allow more, or take a shorter sequence"
        )
    row = 2 * arguments.head_dim * sizes.itemsize  # bytes of a key and a value
    rows = []
    with progress_bar(len(found) * arguments.ranks, "rank", delay=2) as bar:
        for pattern, rule in found:
            work, followed = pairs(pattern, n, heads), reach(pattern, n, heads, arguments.layers)
            call = Call(pattern, n, arguments.ranks, heads, kv_heads, sizes)
            rows.append(
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
                    "largest_received_bytes": count_ranks(call.job(), Way(), bar.update).most_moved(sizes)[1],
                    # Only causal patterns have a cache: later keys cannot be in one.
                    "cache_bytes": row * pattern.cache_rows(heads, kv_heads, n) if is_causal else None,
                    "dense_cache_bytes": row * n * kv_heads if is_causal else None,
                }
            )
    return rows


def text(arguments: argparse.Namespace, found: list[dict[str, Any]], assumed: str | None) -> str:
    unheard = f"unheard\nafter {arguments.layers:,}\nlayer{'s' * (arguments.layers > 1)}"
    headers = ("", "pairs of\ndense's", "layers to\nhear 99 %", unheard, "received\nby a rank,\nat most")
    rows = []
    for i, row in enumerate(found):
        share, layers = f"1/{1 / row['of_dense']:,.1f}", str(row["layers_for_most"] or f"over {arguments.layers:,}")
        sizes = [size_text(row[x]) for x in ("largest_received_bytes", *["cache_bytes"] * arguments.is_causal)]
        rows.append((f"{i + 1}. {row['rule']}", share, layers, percent(1 - row["reach_by_layer"][-1]), *sizes))
    sequence = f"{arguments.seq_len:,} positions, {arguments.heads} heads of {arguments.head_dim}"
    lines = [f"{sequence}, {counted(arguments.ranks, 'rank')}", *([wrapped(assumed)] if assumed else [])]
    headers += ("decoding\ncache a\nlayer",) * arguments.is_causal
    lines += [aligned(headers, rows), f"heard: by the worst of the queries that were followed, of {heard(arguments)}"]
    if arguments.ranks > 1:
        received = "keys and values around the ring, in a layer's forward and backward, by the rank that receives most"
        lines.append(wrapped(f"received: {received}; with the gradients that it sends for them"))
    for i, row in enumerate(found):
        # The options of other commands have no word for a whole document, so its length is shown.
        lengths = (str(arguments.seq_len if w == WHOLE_DOCUMENT else w) for w in row["segment_lengths"])
        options = f"--segment-lengths {' '.join(lengths)} --dilation-rates {' '.join(map(str, row['dilation_rates']))}"
        lines += ["", wrapped(f"{i + 1}. {row['rule']}: {options}")]
        lines += [wrapped(f"   {line}") for line in words(arguments, row)]
    return "\n".join(lines)


def words(arguments: argparse.Namespace, row: dict[str, Any]) -> list[str]:
    """What a newcomer should know of one pattern, as lines of text."""
    lines = []
    columns = (row[name] for name in ("segment_lengths", "dilation_rates", "unread_phases"))
    for w, r, (unread, num_phases) in zip(*columns, strict=True):
        shown = min(w, arguments.seq_len)
        seen = "every key" if r == 1 else f"one key in {r:,}, {-(-shown // r):,} of them"
        note = f"; {unread:,} of {num_phases:,} phases are read by no head" if unread else ""
        lines.append(f"within {shown:,} positions a head sees {seen}{note}")
    shares = (f"{share:.1%}" if share < 0.9995 or share == 1 else "over 99.9%" for share in row["reach_by_layer"][:4])
    who = f"all {row['queries_followed']:,} queries"
    if row["queries_followed"] < arguments.seq_len:
        who = f"the {row['queries_followed']:,} queries followed (at starts of segments, of {arguments.seq_len:,})"
    lines += [
        f"work: {scaled(row['flops'], 'FLOP')} a layer and sequence, forward and backward, {row['of_dense']:.2%} of "
        "dense attention's",
        f"the worst of {who} has heard of {', '.join(shares)} of {heard(arguments)} after 1, 2, ... layers",
        _loss(arguments, row, who),
    ]
    if arguments.is_causal:
        dense, cache = row["dense_cache_bytes"], row["cache_bytes"]
        less = f"{dense / cache:,.1f} times less than dense attention's {size_text(dense)}"
        less = less if cache < dense else "no less than dense attention would"
        lines.append(f"decoding keeps {size_text(cache)} a layer, {less}")
    return lines


def heard(arguments: argparse.Namespace) -> str:
    """In words, the positions that the pattern permits a query to see."""
    return "the positions up to it" if arguments.is_causal else "all positions"


def _loss(arguments: argparse.Namespace, row: dict[str, Any], who: str) -> str:
    """A sentence: how much stays out of reach, and what would help. who: the queries that were followed."""
    shares, most, everything = row["reach_by_layer"], row["layers_for_most"], row["layers_for_all"]
    has_unread = any(unread for unread, _ in row["unread_phases"])
    rest = percent(1 - shares[-1])
    if most is None:
        is_final = shares[-2:-1] == shares[-1:]
        remedy = "more of them add nothing: add heads, or lower rates" if is_final else "add layers, or a wider branch"
        far = f"out of reach of {counted(arguments.layers, 'layer')}: {remedy}"
        return f"{rest} of what query {row['worst_query']:,} might hear of is {far}"
    if everything is None:
        why = "unread phases matter little: " * has_unread
        return (
            f"{why}after {most} layers {who} have heard of 99 %, and after {arguments.layers:,} of all but {rest}. The "
            "rest lies at ends of segments, behind the last row of a wider branch: more heads or lower rates help"
        )
    why = "unread phases do not matter to who can hear of whom, since neighbours pass on what they hold: "
    return f"{why * has_unread}after {counted(everything, 'layer')} nothing is out of reach of {who}"


def percent(share: float) -> str:
    """A share in two digits. Only a share of 0 is shown as 0 %, and only a share of 1 as 100 %."""
    if share == 0 or share >= 0.99:
        return "0 %" if share == 0 else "100 %" if share == 1 else "over 99 %"
    return f"{100 * share:.2g} %"
