"""`rda suggest` against counting by hand, and what `rda doctor` says of ranks of which some are not well.

What must hold: every suggestion keeps the budget; its pairs and reach are those of the
definition, counted one by one; each thing that is wrong with a rank is said, by an exit code of 1, and nothing else
is; what is saved is what `rda plan` reads; JSON is JSON, and nothing prints nan or inf.
"""

import argparse
import functools
import json
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from fuzz import Output, Trial, captured, sentence_of
from fuzz_commands import a_quick_doctor, broken, why_no_json

from ring_dilated_attention.commands import cli, suggest
from ring_dilated_attention.commands.doctor import doctor
from ring_dilated_attention.commands.hardware import machine_of
from ring_dilated_attention.pattern import DilatedPattern
from ring_dilated_attention.reference import multiplicity

NO_NUMBER = re.compile(r"(?<![\w/.-])[+-]?(nan|inf|infinity)(?![\w.-])", re.IGNORECASE)


def prepare(folder: Path) -> None:
    pass


def try_case(rng: random.Random, folder: Path) -> Trial:
    return rng.choices([try_suggest, try_doctor], [2, 3])[0](rng, folder)


def why_not_text(output: Output) -> str | None:
    """What is wrong with any answer of a command."""
    if output.code not in (0, 1, 2) or "Traceback" in output.error:
        return f"it ends with {output.code}: {output.error[-2000:]}"
    found = NO_NUMBER.search(output.out + output.error)
    return f"it prints {found[0]!r}: {output.out[-2000:]}{output.error}" if found else None


def try_suggest(rng: random.Random, folder: Path) -> Trial:
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
        return Trial(
            f"suggest {with_json.code}",
            f"{shown}: {without.error}",
            complaint or sentence_of(without),
        )
    complaint = why_no_json(with_json.out)
    for row in () if complaint else json.loads(with_json.out)["suggestions"]:
        pattern = DilatedPattern(
            row["segment_lengths"], row["dilation_rates"], window=row["window"], is_causal=is_causal
        )
        complaint = complaint or why_wrong(row, pattern, seq_len, heads, layers, most, dense)
    return Trial("suggest 0", shown, complaint)


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


@functools.cache
def well() -> str:
    """What one rank of this machine says of itself, as JSON."""
    with a_quick_doctor():
        output = captured(lambda: cli.main(["doctor", "--json"]))
    return json.dumps(json.loads(output.out)["ranks"][0])


def _other_torch(rank: dict[str, Any]) -> str:
    rank["versions"] = {**rank["versions"], "torch": "1.0"}
    return "torch differs"


def _other_card(rank: dict[str, Any]) -> str:
    rank["versions"] = {**rank["versions"], "GPU": "A card"}
    return "GPU differs"


WRONG = [_other_torch, _other_card]  # beside other ranks


def draw_ranks(rng: random.Random) -> tuple[list[dict[str, Any]], list[str]]:
    """What all ranks say, and what the doctor must say of it."""
    everyone = [json.loads(well()) for _ in range(rng.choice([1, 1, 2, 3, 5]))]
    spread = rng.choice([1.0, 1e3])
    for rank, one in enumerate(everyone):
        one |= {"rank": rank, "host": f"host{rank // 2}"}
        one["rates"] = {
            name: rng.uniform(1, spread) * 1e9 if "flops" in name else 1e-5 for name in one["rates"]
        }
        if len(everyone) > 1:
            times = {
                "small_seconds": rng.uniform(1, 1.5) * 1e-5,
                "large_seconds": rng.uniform(1, 1.5) * 1e-2,
            }
            one["messages"] = {"handshake_seconds": rng.choice([0.0, 1e-4]), **times}
    if len(everyone) == 1:
        return everyone, []
    drawn = rng.sample(WRONG, rng.choice([0, 0, 1, 2]))
    return everyone, [wrong(rng.choice(everyone)) for wrong in drawn]


def reported(arguments: argparse.Namespace, everyone: list[dict[str, Any]]) -> int:
    problems = doctor.to_mend(everyone)
    doctor.report(arguments, everyone, problems)
    return int(bool(problems))


def try_doctor(rng: random.Random, folder: Path) -> Trial:
    everyone, expected = draw_ranks(rng)
    file = folder / "here.toml" if rng.random() < 0.5 and len(everyone) > 1 else None
    is_json = rng.random() < 0.4
    arguments = argparse.Namespace(json=is_json, save=file)
    output = captured(lambda: reported(arguments, json.loads(json.dumps(everyone))))
    complaint = why_not_text(output) or unequal("code", output.code, int(bool(expected)))
    complaint = complaint or (why_no_json(output.out) if is_json else None)
    if complaint is None:
        said = (
            json.loads(output.out)["to_mend"]
            if is_json
            else re.findall(r"^not ready: (.*)$", output.out, re.M)
        )
        missing = [text for text in expected if not any(text in line for line in said)]
        complaint = (
            f"{missing} is not said: {said}"
            if missing
            else unequal("how much is said", len(said), len(expected))
        )
    if complaint is None and file is not None:
        saved, slowest = (
            machine_of(str(file)).hardware,
            min(x["rates"]["flops_per_second"] for x in everyone),
        )
        if abs(saved.flops_per_second / slowest - 1) > 1e-2:
            complaint = (
                f"{saved.flops_per_second} is saved, and the slowest rank's rate is {slowest}"
            )
    how = "ready" if not expected else f"{len(expected)} to mend"
    return Trial(
        f"doctor, {len(everyone)} ranks, {how}", f"{expected}, saved: {file is not None}", complaint
    )


_describe, _suggestions, _to_mend = suggest.describe, suggest.suggestions, doctor.to_mend


def _describe_one_layer_less(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    found = _describe(arguments)
    return [
        {**row, "reach_by_layer": [row["reach_by_layer"][0], *row["reach_by_layer"][:-1]]}
        for row in found
    ]


def _of_the_first(everyone: list[dict[str, Any]]) -> list[str]:
    return _to_mend(everyone[:1])


BREAKAGES: dict[str, Callable[[], Any]] = {
    "a budget is passed by": broken(
        "suggestions",
        lambda n, heads, most, **options: _suggestions(n, heads, 4 * most, **options),
        suggest,
    ),
    "one layer less is followed": broken("describe", _describe_one_layer_less, suggest),
    "only the first rank is listened to": broken("to_mend", _of_the_first, doctor),
    "nothing is to mend": broken("to_mend", lambda everyone: [], doctor),
}
