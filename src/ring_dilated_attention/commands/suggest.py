"""`rda suggest`: suggests a few patterns for a sequence length and a budget, and explains them. No torch."""

import argparse
import json
import math
import shlex
import textwrap
from typing import Any

from ..forecast.call_cost import FLOPS_PER_PAIR, Way, pairs
from ..forecast.call_cost import count as count_ranks
from ..forecast.exchanges import UncutJob
from ..forecast.reach import reach
from ..forecast.suggestions import suggestions, unread_positions
from ..pattern import WHOLE_DOCUMENT, DilatedPattern
from ..plan.sizes import Sizes
from ..training.options import LARGEST, MOST_LAYERS, flag
from .hardware import ITEMSIZE, check_dtype, described, machine_of
from .numbers import MOST_HEADS, amount, check_at_least, check_given, check_ranks_fit, count, counted, size_text
from .output import aligned, progress_bar, wrapped

EXAMPLES = """examples:
  rda suggest --seq-len 1Mi --heads 16 --speedup 50   1/50 of dense's work
  rda suggest --seq-len 256Ki --heads 12 --seconds 0.1 --hardware h100-nvlink

A branch (w, r) cuts the sequence into segments of w positions. Head h takes each r-th position of a segment, from
h mod r on, and the queries there see the keys there. A query sees every key nearby, and few far away. Layers reach
further: what one branch brings in one layer, another carries on in the next. docs/planning.md says more.
"""
MOST_RANKS = 2**16
# What decides between candidates, in this order. The first "leaves less unheard" decides where no layer hears of 99 %.
BETTER = (
    *("needs fewer layers to hear of 99 %", "leaves less unheard", "shows more neighbours", "leaves less unheard"),
    *("sends less", "uses more of the budget"),
)
LEAST_SECONDS, MOST_SECONDS = 1e-9, 1e9


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--seq-len", type=count, metavar="N", help="positions of a sequence")
    add("--heads", type=count, metavar="H", help="query heads")
    add("--kv-heads", type=count, metavar="G", help="key/value heads (default as many)")
    add("--head-dim", type=count, default=64, metavar="D", help="default 64")
    budget = parser.add_mutually_exclusive_group()
    budget.add_argument("--speedup", type=amount, metavar="X", help="budget: 1/X of dense attention's work")
    seconds = "budget: seconds of a rank for one layer's attention, forward and backward"
    budget.add_argument("--seconds", type=amount, metavar="S", help=seconds)
    add("--hardware", metavar="NAME", help="for --seconds: a preset or a TOML file")
    add("--dtype", choices=ITEMSIZE, default="bfloat16", help="of keys and values (default bfloat16)")
    add("--layers", type=count, default=12, metavar="L", help="layers of the model (default 12)")
    add("--ranks", type=count, default=1, metavar="P", help="ranks that share a sequence (default 1)")
    add("--not-causal", dest="is_causal", action="store_false", help="a query sees later keys too")
    add("--json", action="store_true", help="print the suggestions as JSON, the best first")


def run(arguments: argparse.Namespace) -> int:
    check(arguments)
    most_pairs, assumed = budget_of(arguments)
    found, why = ranked(describe(arguments, most_pairs))
    if arguments.json:
        print(json.dumps({"most_pairs": most_pairs, "assumed": assumed, "why": why, "suggestions": found}, indent=1))
    else:
        print(text(arguments, found, why, assumed))
    return 0


def check(arguments: argparse.Namespace) -> None:
    """Check the numbers, and fill in --kv-heads."""
    needed = ("seq_len", "heads", *(() if arguments.seconds is not None else ("speedup",)))
    check_given(arguments, needed, "--speedup 50 allows 1/50 of dense attention's work; --seconds is another budget")
    most = {"heads": MOST_HEADS, "layers": MOST_LAYERS, "ranks": MOST_RANKS}
    for name in ("seq_len", "heads", "head_dim", "layers", "ranks"):
        check_at_least(flag(name), getattr(arguments, name), most=most.get(name, LARGEST))
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
        fewer = f"{dense / most_pairs:,.0f} times fewer than dense attention over {n:,} positions"
        few = f"{most_pairs:,.3g} pairs, {fewer}: allow more, or take a shorter sequence"
        raise ValueError(f"none of the patterns tried has as few as {few}")
    row = 2 * arguments.head_dim * sizes.itemsize  # bytes of a key and a value
    rows = []
    with progress_bar(len(found) * arguments.ranks, "rank", delay=2) as bar:
        for pattern, rule in found:
            work, followed = pairs(pattern, n, heads), reach(pattern, n, heads, arguments.layers)
            call = UncutJob(pattern, n, arguments.ranks, heads, kv_heads, sizes)
            figures = {
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
                "unread_positions": unread_positions(pattern, n, heads),
                "largest_received_bytes": count_ranks(call.job(), Way(), bar.update).most_moved(sizes)[1],
                # Only causal patterns have a cache: later keys cannot be in one.
                "cache_bytes": row * pattern.cache_rows(heads, kv_heads, n) if is_causal else None,
                "dense_cache_bytes": row * n * kv_heads if is_causal else None,
            }
            rows.append(figures)
    return rows


def ranked(found: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], str]:
    """The suggestions, the best first; and why the first is better than every other."""

    def costs(row: dict[str, Any]) -> tuple[float, ...]:
        layers, heard, neighbours = row["layers_for_most"], row["reach_by_layer"][-1], row["segment_lengths"][0]
        first = (layers, 0) if layers else (math.inf, -heard)
        return *first, -neighbours, -heard, row["largest_received_bytes"], -row["pairs"]

    found = sorted(found, key=costs)
    beaten: dict[str, list[str]] = {}
    for i, row in enumerate(found[1:]):
        compared = zip(BETTER, costs(found[0]), costs(row), strict=True)
        reason = next((reason for reason, best, other in compared if best < other), "is no worse")
        beaten.setdefault(reason, []).append(f"#{i + 2}")
    reasons = [f"it {reason} than {' and '.join(numbers)}" for reason, numbers in beaten.items()]
    return found, ": " + (", ".join(reasons) or "the budget allows it")


def text(arguments: argparse.Namespace, found: list[dict[str, Any]], why: str, assumed: str | None) -> str:
    best, causal = found[0], "causal" if arguments.is_causal else "not causal"
    pattern = DilatedPattern(best["segment_lengths"], best["dilation_rates"], is_causal=arguments.is_causal)
    lines = [
        f"{counted(arguments.seq_len, 'position')}, {counted(arguments.heads, 'head')} of {arguments.head_dim}, "
        f"{causal}, {counted(arguments.layers, 'layer')}, {counted(arguments.ranks, 'rank')}",
        *([assumed] if assumed else []),
        f"take this ({best['rule']}){why}",
    ]
    lines = [*map(wrapped, lines), "", indented(repr(pattern)), "", *map(wrapped, words(arguments, best))]
    lines += [f"\n{command}" for command in commands(arguments, best)]
    return "\n".join([*lines, "", table(arguments, found)])


def commands(arguments: argparse.Namespace, row: dict[str, Any]) -> list[str]:
    """The command that plans the pattern, and the one that trains it, or a sentence in its place."""
    a, width, branches = arguments, arguments.heads * arguments.head_dim, options_of(arguments, row)
    shared = f"--seq-len {a.seq_len}{f' --ranks {a.ranks}' * (a.ranks > 1)} {branches}"
    plan = f"rda plan {shared} --heads {a.heads} --kv-heads {a.kv_heads} --head-dim {a.head_dim} --dtype {a.dtype}"
    file = shlex.quote(a.hardware or "").replace(" ", "\0")  # so that no line breaks inside the name
    plan += " --causal" * a.is_causal + f" --hardware {file}" * (a.hardware is not None)
    train = f"rda train {shared} --num-layers {a.layers} --embed-dim {width} --num-heads {a.heads} --num-kv-heads "
    lacking = ["only causal patterns"] * (not a.is_causal) + [f"no odd head dim, as {a.head_dim}"] * (a.head_dim % 2)
    lacking += ["no single position"] * (a.seq_len < 2)
    trains = f"rda train cannot: it takes {', '.join(lacking)}" if lacking else indented(f"{train}{a.kv_heads}", " \\")
    return [indented(plan, " \\"), trains]


def indented(text: str, end: str = "") -> str:
    """A long line as several, each but the last with an end."""
    wrapper = textwrap.TextWrapper(78, " " * 4, " " * 8, break_long_words=False, break_on_hyphens=False)
    return f"{end}\n".join(wrapper.wrap(text)).replace("\0", " ")


def options_of(arguments: argparse.Namespace, row: dict[str, Any]) -> str:
    # The options of other commands have no word for a whole document, so its length is shown.
    lengths = (str(arguments.seq_len if w == WHOLE_DOCUMENT else w) for w in row["segment_lengths"])
    return f"--segment-lengths {' '.join(lengths)} --dilation-rates {' '.join(map(str, row['dilation_rates']))}"


def words(arguments: argparse.Namespace, row: dict[str, Any]) -> list[str]:
    """What a newcomer should know of the pattern, as sentences."""
    lines, until = [], " up to itself" * arguments.is_causal
    columns = (row[name] for name in ("segment_lengths", "dilation_rates", "unread_positions"))
    for w, r, unread in zip(*columns, strict=True):
        seen = f"a query sees every key{until}"
        if r > 1:
            seen = f"a head takes one in {r:,}: a query there sees every key there{until}, other queries see none"
        note = f"; {percent(unread / arguments.seq_len)} of the positions are taken by no head" if unread else ""
        lines.append(f"In each segment of {min(w, arguments.seq_len):,} positions {seen}{note}.")
    shares, most, layers = row["reach_by_layer"], row["layers_for_most"], counted(arguments.layers, "layer")
    before, rest = "what came before" if arguments.is_causal else "the sequence", percent(1 - shares[-1])
    if most is None:
        is_final = shares[-2:-1] == shares[-1:]
        remedy = "more layers add nothing: add heads, or lower rates" if is_final else "add layers, or a wider branch"
        lines.append(f"After {layers} query {row['worst_query']:,} has not heard of {rest} of {before}; {remedy}.")
    else:
        share = "all" if row["layers_for_all"] == most else "99 %"
        lines.append(f"After {counted(most, 'layer')} a query can have heard of {share} of {before}.")
        if shares[-1] < 1:
            lines.append(f"After {layers} it can have heard of all but {rest}, which lies at ends of segments.")
    if (followed := row["queries_followed"]) < arguments.seq_len:
        lines.append(f"This was computed for {followed:,} queries at starts of segments, where least is heard.")
    learnt = "What is within reach is not yet learnt: train the candidates on your data, and compare their losses."
    return [*lines, learnt]


def table(arguments: argparse.Namespace, found: list[dict[str, Any]]) -> str:
    """All candidates with their figures, and the options of those that were not picked."""
    unheard = f"unheard\nafter {arguments.layers:,}\nlayer{'s' * (arguments.layers > 1)}"
    sizes = {"largest_received_bytes": "received\nby a rank,\nat most"} if arguments.ranks > 1 else {}
    sizes |= {"cache_bytes": "decoding\ncache a\nlayer"} if arguments.is_causal else {}
    rows = []
    for i, row in enumerate(found):
        share, layers = f"1/{1 / row['of_dense']:,.1f}", str(row["layers_for_most"] or f"over {arguments.layers:,}")
        cells = share, layers, percent(1 - row["reach_by_layer"][-1]), *(size_text(row[name]) for name in sizes)
        rows.append((f"{i + 1}. {row['rule']}", *cells))
    headers = ("candidates", "of dense\npairs", "layers to\nhear 99 %", unheard, *sizes.values())
    options = (f"{i + 1}. {options_of(arguments, row)}" for i, row in enumerate(found) if i)
    return "\n".join([aligned(headers, rows), *map(wrapped, options)])


def percent(share: float) -> str:
    """A share in two digits. Only a share of 0 is shown as 0 %, and only a share of 1 as 100 %."""
    if share == 0 or share >= 0.99:
        return "0 %" if share == 0 else "100 %" if share == 1 else "over 99 %"
    return f"{100 * share:.2g} %"
