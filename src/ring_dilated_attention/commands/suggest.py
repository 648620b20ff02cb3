"""`rda suggest`: picks a pattern for a sequence length and a budget, says why, and shows the other candidates."""

import json
import math
from argparse import ArgumentParser, Namespace
from typing import Any

from ..forecast.call_cost import pairs
from ..forecast.reach import reach
from ..forecast.suggestions import suggestions
from ..pattern import DilatedPattern
from ..training.options import MOST_LAYERS
from .arguments import MOST_HEADS, amount, sequence_length, within
from .console import progress, table, wrapped

EXAMPLES = """examples:
  rda suggest --seq-len 1Mi --heads 16 --speedup 50   1/50 of dense's work
  rda suggest --seq-len 1Mi --heads 16 --speedup 50 --not-causal   an encoder

A branch (w, r) cuts the sequence into segments of w positions. Head h takes
each r-th position of a segment, from h mod r on, and the queries there see the
keys there. A rate above the number of heads leaves positions that no head
takes. Layers reach further: what one branch brings in one layer, another
carries on in the next.
"""
MOST_HEARD = 0.99
# The criteria for comparing candidates, in order. The first criterion by which two candidates differ decides which one
# is better.
BETTER = (
    "no rate above the number of heads",
    "fewer layers to hear of 99 %",
    "less unheard",
    "more neighbours",
    "more of the budget used",
)


def add_arguments(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--seq-len",
        type=sequence_length,
        required=True,
        metavar="N",
        help="positions of a sequence",
    )
    add("--heads", type=within(1, MOST_HEADS), required=True, metavar="H", help="query heads")
    add(
        "--speedup",
        type=amount,
        required=True,
        metavar="X",
        help="budget: 1/X of dense attention's work",
    )
    add(
        "--layers",
        type=within(1, MOST_LAYERS),
        default=12,
        metavar="L",
        help="layers of the model (default 12)",
    )
    add("--not-causal", dest="is_causal", action="store_false", help="a query sees later keys too")
    add("--window", action="store_true", help="a sliding window, not segments of rate 1")
    add("--json", action="store_true", help="print the candidates as JSON, the best first")


def run(arguments: Namespace) -> int:
    if arguments.speedup < 1:
        raise ValueError(f"--speedup must be at least 1, got {arguments.speedup:g}")
    candidates = sorted(describe(arguments), key=costs)
    reason = reason_of(candidates)
    if arguments.json:
        print(json.dumps({"why": reason, "suggestions": candidates}, indent=1))
        return 0
    best = candidates[0]
    if not best["all_read"]:
        rate = max(best["dilation_rates"])
        print(
            wrapped(
                f"The budget forces a rate above the number of heads: {rate:,}, and there are {arguments.heads} heads. "
                "Small models with such patterns recalled little of what is far away (docs/learning.md): allow more "
                "work, or take more heads."
            )
        )
    pattern = DilatedPattern(
        best["segment_lengths"],
        best["dilation_rates"],
        window=best["window"],
        is_causal=arguments.is_causal,
    )
    print(f"Take 1, {best['rule']}: {reason}.")
    print(wrapped(repr(pattern)))
    print("What is within reach is not yet learnt: train the candidates, and compare.\n")
    print(candidates_table(arguments.layers, candidates))
    causal = " --causal" if arguments.is_causal else ""
    print(f"\nrda plan --seq-len {arguments.seq_len} --heads {arguments.heads}{causal}, with")
    for number, candidate in enumerate(candidates, start=1):
        print(wrapped(f"{number}. {options_of(candidate)}"))
    return 0


def describe(arguments: Namespace) -> list[dict[str, Any]]:
    """Compute the figures of each candidate pattern. Returns a dict for each. Raises ValueError if no pattern is within
    the budget."""
    seq_len, heads = arguments.seq_len, arguments.heads
    dense = pairs(DilatedPattern.dense(is_causal=arguments.is_causal), seq_len, heads)
    patterns = suggestions(
        seq_len,
        heads,
        dense / arguments.speedup,
        is_causal=arguments.is_causal,
        window=arguments.window,
    )
    if not patterns:
        raise ValueError(
            f"--speedup {arguments.speedup:g} over {seq_len:,} positions: every pattern that was tried needs more "
            "work; give a smaller --speedup"
        )
    candidates = []
    with progress(len(patterns), "candidate") as bar:
        for pattern, rule in patterns:
            work = pairs(pattern, seq_len, heads)
            shares = reach(pattern, seq_len, heads, arguments.layers)
            layers = [layer for layer, share in enumerate(shares, 1) if share >= MOST_HEARD]
            candidates.append(
                {
                    "segment_lengths": pattern.segment_lengths,
                    "dilation_rates": pattern.dilation_rates,
                    "window": pattern.window,
                    "rule": rule,
                    "all_read": max(pattern.dilation_rates) <= heads,
                    "pairs": work,
                    "of_dense": work / dense,
                    "reach_by_layer": shares,
                    "layers_for_most": layers[0] if layers else None,
                }
            )
            bar.update()
    return candidates


def costs(candidate: dict[str, Any]) -> tuple[float, ...]:
    """The numbers by which candidates are sorted: one for each entry of BETTER. A smaller number is better."""
    unheard = 1 - candidate["reach_by_layer"][-1]
    return (
        0 if candidate["all_read"] else 1,
        candidate["layers_for_most"] or math.inf,
        0 if candidate["layers_for_most"] else unheard,
        -(candidate["window"] or candidate["segment_lengths"][0]),
        -candidate["pairs"],
    )


def reason_of(candidates: list[dict[str, Any]]) -> str:
    """Why the first candidate is better than the second."""
    if len(candidates) == 1:
        return "it is the only candidate"
    best, second = map(costs, candidates[:2])
    for reason, cost, other in zip(BETTER, best, second, strict=True):
        if cost < other:
            return f"{reason} (against 2)"
    return "2 has equal figures"


def options_of(candidate: dict[str, Any]) -> str:
    lengths = " ".join(map(str, candidate["segment_lengths"]))
    rates = " ".join(map(str, candidate["dilation_rates"]))
    options = f"--segment-lengths {lengths} --dilation-rates {rates}"
    return options if candidate["window"] is None else f"{options} --window {candidate['window']}"


def candidates_table(num_layers: int, candidates: list[dict[str, Any]]) -> str:
    rows = []
    for number, candidate in enumerate(candidates, start=1):
        layers = candidate["layers_for_most"] or f"over {num_layers}"
        unheard = 1 - candidate["reach_by_layer"][-1]
        rows.append(
            (
                f"{number}. {candidate['rule']}",
                f"1/{1 / candidate['of_dense']:,.1f}",
                f"{max(candidate['dilation_rates']):,}",
                f"{layers}",
                f"{unheard:.2%}",
            )
        )
    return table(
        (
            "",
            "of dense\npairs",
            "largest\nrate",
            "layers to\nhear 99 %",
            f"unheard after\n{num_layers}",
        ),
        rows,
    )
