"""`rda suggest` against counting by hand.

What must hold: every suggestion keeps the budget; its pairs and reach are those of the definition, counted one by one;
JSON is JSON, and nothing prints nan or inf.
"""

import argparse
import json
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from fuzz import Output, Trial, captured, sentence_of
from fuzz_commands import broken, why_no_json

from ring_dilated_attention.commands import cli, suggest
from ring_dilated_attention.pattern import DilatedPattern
from ring_dilated_attention.reference import multiplicity

NO_NUMBER = re.compile(r"(?<![\w/.-])[+-]?(nan|inf|infinity)(?![\w.-])", re.IGNORECASE)


def prepare(folder: Path) -> None:
    pass


def why_not_text(output: Output) -> str | None:
    """What is wrong with any answer of a command."""
    if output.code not in (0, 1, 2) or "Traceback" in output.error:
        return f"it ends with {output.code}: {output.error[-2000:]}"
    found = NO_NUMBER.search(output.out + output.error)
    return f"it prints {found[0]!r}: {output.out[-2000:]}{output.error}" if found else None


def try_case(rng: random.Random, folder: Path) -> Trial:
    seq_len = rng.choice(
        [
            rng.randint(1, 80),
            rng.choice([64, 128, 256, 257]),
            *(rng.randint(130, 500) for _ in "1234"),
        ]
    )
    heads, layers = rng.randint(1, 9), rng.randint(1, 5)
    is_causal = rng.random() < 0.7
    words = ["suggest", "--seq-len", str(seq_len), "--heads", str(heads), "--layers", str(layers)]
    words += [] if is_causal else ["--not-causal"]
    words += ["--window"] if rng.random() < 0.3 else []
    dense = heads * (seq_len * (seq_len + 1) // 2 if is_causal else seq_len**2)
    speedup = rng.choice([1, 1.0001, *(rng.uniform(1, 2.5) for _ in range(6)), 1e6, 1e300])
    words += ["--speedup", repr(speedup)]
    most = dense / speedup
    with_json, without = (
        captured(lambda more=more: cli.main([*words, *more])) for more in (["--json"], [])
    )
    shown = " ".join(words)
    complaint = why_not_text(with_json) or why_not_text(without)
    if with_json.code != without.code:
        complaint = complaint or f"codes {with_json.code} and {without.code}"
    if complaint or with_json.code:
        return Trial("refused", f"{shown}: {without.error}", complaint or sentence_of(without))
    complaint = why_no_json(with_json.out)
    for row in () if complaint else json.loads(with_json.out)["suggestions"]:
        pattern = DilatedPattern(
            row["segment_lengths"], row["dilation_rates"], window=row["window"], is_causal=is_causal
        )
        complaint = complaint or why_wrong(row, pattern, seq_len, heads, layers, most, dense)
    rule = "causal" if is_causal else "not causal"
    return Trial(f"{rule}, {layers} layers", shown, complaint)


def unequal(name: str, found: object, expected: object) -> str | None:
    return None if found == expected else f"{name} is {found}, and should be {expected}"


def why_wrong(
    row: dict[str, Any],
    pattern: DilatedPattern,
    seq_len: int,
    heads: int,
    layers: int,
    most: float,
    dense: int,
) -> str | None:
    """By the definition's own count of who sees whom."""
    count = multiplicity(pattern, seq_len, heads)
    pairs = int(count.sum())
    if pairs > most * (1 + 1e-9):
        return f"{pairs} pairs are more than {most:g}: {row['rule']}"
    sees = ((count > 0).any(0) | torch.eye(seq_len, dtype=torch.bool)).float()
    heard, shares = torch.eye(seq_len), []
    may = torch.arange(1, seq_len + 1) if pattern.is_causal else torch.full((seq_len,), seq_len)
    for _ in range(layers):
        heard = ((sees @ heard) > 0).float()
        shares.append(float((heard.sum(1).double() / may).min()))
    first = next((i + 1 for i, x in enumerate(shares) if x >= 0.99), None)
    return (
        unequal("pairs", row["pairs"], pairs)
        or unequal("of_dense", row["of_dense"], pairs / dense)
        or unequal("reach_by_layer", row["reach_by_layer"], shares)
        or unequal("layers_for_most", row["layers_for_most"], first)
        or unequal("all_read", row["all_read"], max(pattern.dilation_rates) <= heads)
    )


_describe, _suggestions = suggest.describe, suggest.suggestions


def _describe_one_layer_less(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    found = _describe(arguments)
    return [
        {**row, "reach_by_layer": [row["reach_by_layer"][0], *row["reach_by_layer"][:-1]]}
        for row in found
    ]


BREAKAGES: dict[str, Callable[[], Any]] = {
    "a budget is passed by": broken(
        "suggestions",
        lambda n, heads, most, **options: _suggestions(n, heads, 4 * most, **options),
        suggest,
    ),
    "one layer less is followed": broken("describe", _describe_one_layer_less, suggest),
}
