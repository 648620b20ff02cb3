"""`rda suggest`: picks a pattern for a sequence length and a budget, says why, and shows the other candidates."""

import argparse
import json
import math
from typing import Any

from ..forecast.call_cost import Exchange, PlannedCall, pairs
from ..forecast.call_cost import count as count_ranks
from ..forecast.reach import reach
from ..forecast.suggestions import suggestions
from ..pattern import WHOLE_DOCUMENT, DilatedPattern
from ..plan.step import Sizes
from ..training.options import MOST_LAYERS, flag
from .arguments import (
    LARGEST,
    MOST_HEADS,
    amount,
    check_at_least,
    check_given,
    check_ranks_fit,
    count,
)
from .console import progress, size_text, table, wrapped
from .hardware import ITEMSIZE, check_dtype, described, machine_of

EXAMPLES = """examples:
  rda suggest --seq-len 1Mi --heads 16 --speedup 50   1/50 of dense's work
  rda suggest --seq-len 256Ki --heads 12 --seconds 0.1 --hardware h100

A branch (w, r) cuts the sequence into segments of w positions. Head h takes each r-th position of a segment, from
h mod r on, and the queries there see the keys there. A rate above the number of heads leaves positions that no head
takes. Layers reach further: what one branch brings in one layer, another carries on in the next.
"""
MOST_RANKS = 2**16
LEAST_SECONDS, MOST_SECONDS = 1e-9, 1e9
MOST_HEARD = 0.99
# What decides between candidates, in this order: the first point in which two differ.
BETTER = (
    "no rate above the number of heads",
    "fewer layers to hear of 99 %",
    "less unheard",
    "more neighbours",
    "less received by a rank",
    "more of the budget used",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--seq-len", type=count, metavar="N", help="positions of a sequence")
    add("--heads", type=count, metavar="H", help="query heads")
    add("--kv-heads", type=count, metavar="G", help="key/value heads (default as many)")
    add("--head-dim", type=count, default=64, metavar="D", help="default 64")
    budget = parser.add_mutually_exclusive_group()
    budget.add_argument(
        "--speedup", type=amount, metavar="X", help="budget: 1/X of dense attention's work"
    )
    seconds = "budget: seconds of a rank for one layer's attention, forward and backward"
    budget.add_argument("--seconds", type=amount, metavar="S", help=seconds)
    add("--hardware", metavar="NAME", help="for --seconds: a preset or a TOML file")
    add(
        "--dtype",
        choices=ITEMSIZE,
        default="bfloat16",
        help="of keys and values (default bfloat16)",
    )
    add("--layers", type=count, default=12, metavar="L", help="layers of the model (default 12)")
    add(
        "--ranks",
        type=count,
        default=1,
        metavar="P",
        help="ranks that share a sequence (default 1)",
    )
    add("--not-causal", dest="is_causal", action="store_false", help="a query sees later keys too")
    add("--json", action="store_true", help="print the candidates as JSON, the best first")


def run(arguments: argparse.Namespace) -> int:
    check(arguments)
    most_pairs, assumed = budget_of(arguments)
    candidates = sorted(describe(arguments, most_pairs), key=costs)
    reason = reason_of(candidates)
    if arguments.json:
        made = {
            "most_pairs": most_pairs,
            "assumed": assumed,
            "why": reason,
            "suggestions": candidates,
        }
        print(json.dumps(made, indent=1))
        return 0
    print(text(arguments, candidates, reason, assumed))
    return 0


def check(arguments: argparse.Namespace) -> None:
    """Check the numbers, and fill in --kv-heads."""
    needed = ["seq_len", "heads"]
    if arguments.seconds is None:
        needed.append("speedup")
    check_given(
        arguments,
        needed,
        "--speedup 50 allows 1/50 of dense attention's work; --seconds is another budget",
    )
    most = {"heads": MOST_HEADS, "layers": MOST_LAYERS, "ranks": MOST_RANKS}
    for name in ("seq_len", "heads", "head_dim", "layers", "ranks"):
        check_at_least(flag(name), getattr(arguments, name), most=most.get(name, LARGEST))
    check_ranks_fit(arguments.ranks, arguments.seq_len)
    if arguments.kv_heads is None:
        arguments.kv_heads = arguments.heads
    DilatedPattern.dense().check_heads(arguments.heads, arguments.kv_heads)


def dense_pairs(arguments: argparse.Namespace) -> int:
    return pairs(
        DilatedPattern.dense(is_causal=arguments.is_causal), arguments.seq_len, arguments.heads
    )


def sizes_of(arguments: argparse.Namespace) -> Sizes:
    return Sizes(1, arguments.head_dim, ITEMSIZE[arguments.dtype])


def budget_of(arguments: argparse.Namespace) -> tuple[float, str | None]:
    """The most pairs, over all heads, that the budget allows; and a line on the hardware that is assumed, if any."""
    if arguments.speedup is not None:
        if not 1 <= arguments.speedup < math.inf:
            raise ValueError(f"--speedup must be at least 1, got {arguments.speedup:g}")
        if arguments.hardware is not None:
            raise ValueError(
                f"--hardware {arguments.hardware} is for --seconds, and --speedup is given: leave it out"
            )
        return dense_pairs(arguments) / arguments.speedup, None
    if arguments.hardware is None:
        raise ValueError(
            "--seconds needs --hardware: a preset or a TOML file; rda doctor --save FILE.toml writes one"
        )
    machine = machine_of(arguments.hardware)
    if not LEAST_SECONDS <= arguments.seconds <= MOST_SECONDS:
        raise ValueError(
            f"--seconds must be from {LEAST_SECONDS:g} to {MOST_SECONDS:g}, got {arguments.seconds:g}"
        )
    check_dtype(machine, arguments.hardware, arguments.dtype)
    seconds_of_a_pair = machine.hardware._replace(call_seconds=0).work_seconds(
        1, sizes_of(arguments)
    )
    assumed = described(machine.hardware, machine.source)
    if arguments.ranks > 1:
        assumed += "\nthe seconds are those of the work: rda plan says what messages add to a step"
    return arguments.seconds * arguments.ranks / seconds_of_a_pair, assumed


def describe(arguments: argparse.Namespace, most_pairs: float) -> list[dict[str, Any]]:
    """The figures of each candidate."""
    seq_len, heads, kv_heads = arguments.seq_len, arguments.heads, arguments.kv_heads
    dense, sizes = dense_pairs(arguments), sizes_of(arguments)
    patterns = suggestions(seq_len, heads, most_pairs, is_causal=arguments.is_causal)
    if not patterns:
        fewer = (
            f"{dense / most_pairs:,.0f} times fewer than dense attention over {seq_len:,} positions"
        )
        few = f"{most_pairs:,.3g} pairs, {fewer}: allow more, or take a shorter sequence"
        raise ValueError(f"none of the patterns tried has as few as {few}")
    bytes_of_a_row = 2 * arguments.head_dim * sizes.itemsize  # a key and a value
    candidates = []
    with progress(len(patterns), "candidate") as bar:
        for pattern, rule in patterns:
            work = pairs(pattern, seq_len, heads)
            followed = reach(pattern, seq_len, heads, arguments.layers)
            call = PlannedCall(pattern, seq_len, arguments.ranks, heads, kv_heads, sizes)
            cache_bytes = None  # later keys cannot be in a cache
            if arguments.is_causal:
                cache_bytes = bytes_of_a_row * pattern.cache_rows(heads, kv_heads, seq_len)
            candidates.append(
                {
                    "segment_lengths": pattern.segment_lengths,
                    "dilation_rates": pattern.dilation_rates,
                    "rule": rule,
                    "all_read": max(pattern.dilation_rates) <= heads,
                    "pairs": work,
                    "of_dense": work / dense,
                    "reach_by_layer": followed.shares,
                    "layers_for_most": followed.layers_for(MOST_HEARD),
                    "worst_query": followed.worst,
                    "queries_followed": followed.num_followed,
                    "largest_received_bytes": count_ranks(call.job(), Exchange()).most_moved(sizes)[
                        1
                    ],
                    "cache_bytes": cache_bytes,
                }
            )
            bar.update()
    return candidates


def costs(candidate: dict[str, Any]) -> tuple[float, ...]:
    """One number for each of BETTER: the least is the best."""
    unheard = 1 - candidate["reach_by_layer"][-1]
    return (
        0 if candidate["all_read"] else 1,
        candidate["layers_for_most"] or math.inf,
        0 if candidate["layers_for_most"] else unheard,
        -candidate["segment_lengths"][0],
        candidate["largest_received_bytes"],
        -candidate["pairs"],
    )


def reason_of(candidates: list[dict[str, Any]]) -> str:
    """Why the first candidate is better than each other."""
    numbers_by_reason: dict[str, list[str]] = {}
    for number, other in enumerate(candidates[1:], start=2):
        compared = zip(BETTER, costs(candidates[0]), costs(other), strict=True)
        reasons = [reason for reason, best, worse in compared if best < worse]
        reason = reasons[0] if reasons else "equal figures"
        numbers_by_reason.setdefault(reason, []).append(f"{number}")
    if not numbers_by_reason:
        return "it is the only candidate"
    return "; ".join(
        f"{reason} (against {', '.join(numbers)})" for reason, numbers in numbers_by_reason.items()
    )


def text(
    arguments: argparse.Namespace,
    candidates: list[dict[str, Any]],
    reason: str,
    assumed: str | None,
) -> str:
    best = candidates[0]
    pattern = DilatedPattern(
        best["segment_lengths"], best["dilation_rates"], is_causal=arguments.is_causal
    )
    lines = []
    if not best["all_read"]:
        rate = max(best["dilation_rates"])
        lines.append(
            f"The budget forces a rate above the number of heads: {rate:,}, and there are {arguments.heads} heads. "
            "Small models with such patterns recalled little of what is far away (docs/learning.md): allow more work, "
            "or take more heads."
        )
    lines.append(f"Take 1, {best['rule']}: {reason}.")
    lines.append(repr(pattern))
    if best["layers_for_most"] is None:
        unheard = percent(1 - best["reach_by_layer"][-1])
        query = best["worst_query"]
        lines.append(
            f"After {arguments.layers} layers query {query:,} has not heard of {unheard} of what it may."
        )
    if assumed is not None:
        lines.append(assumed)
    lines.append(
        "What is within reach is not yet learnt: train the candidates on your data, and compare their losses."
    )
    paragraphs = [
        *map(wrapped, lines),
        "",
        candidates_table(arguments, candidates),
        "",
        plan_command(arguments, best),
    ]
    return "\n".join(paragraphs)


def plan_command(arguments: argparse.Namespace, best: dict[str, Any]) -> str:
    """The command that plans the pick."""
    words = [
        f"rda plan --seq-len {arguments.seq_len} --ranks {arguments.ranks} {options_of(arguments, best)}"
    ]
    words.append(
        f"--heads {arguments.heads} --kv-heads {arguments.kv_heads} --head-dim {arguments.head_dim}"
    )
    words.append(f"--dtype {arguments.dtype}")
    if arguments.is_causal:
        words.append("--causal")
    return " ".join(words)


def options_of(arguments: argparse.Namespace, candidate: dict[str, Any]) -> str:
    # The options of other commands have no word for a whole document, so its length is shown.
    lengths = [
        arguments.seq_len if w == WHOLE_DOCUMENT else w for w in candidate["segment_lengths"]
    ]
    rates = candidate["dilation_rates"]
    return f"--segment-lengths {' '.join(map(str, lengths))} --dilation-rates {' '.join(map(str, rates))}"


def candidates_table(arguments: argparse.Namespace, candidates: list[dict[str, Any]]) -> str:
    """All candidates with their figures; below, the options of each."""
    headers = [
        "",
        "of dense\npairs",
        "largest\nrate",
        "layers to\nhear 99 %",
        f"unheard after\n{arguments.layers}",
    ]
    names = []
    if arguments.ranks > 1:
        names.append("largest_received_bytes")
        headers.append("received\nby a rank")
    if arguments.is_causal:
        names.append("cache_bytes")
        headers.append("decoding\ncache a layer")
    rows = []
    options = []
    for number, candidate in enumerate(candidates, start=1):
        layers = candidate["layers_for_most"] or f"over {arguments.layers}"
        cells = [
            f"1/{1 / candidate['of_dense']:,.1f}",
            f"{max(candidate['dilation_rates']):,}",
            f"{layers}",
        ]
        cells.append(percent(1 - candidate["reach_by_layer"][-1]))
        rows.append(
            (
                f"{number}. {candidate['rule']}",
                *cells,
                *(size_text(candidate[name]) for name in names),
            )
        )
        options.append(wrapped(f"{number}. {options_of(arguments, candidate)}"))
    return "\n".join([table(tuple(headers), rows), *options])


def percent(share: float) -> str:
    """A share in two digits. Only a share of 0 is shown as 0 %, and only a share of 1 as 100 %."""
    if share in (0, 1):
        return f"{100 * share:.0f} %"
    return "over 99 %" if share >= 0.99 else f"{100 * share:.2g} %"
