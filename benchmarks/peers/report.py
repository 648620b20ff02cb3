"""Makes the tables of the peers: which inputs each gets right, its errors, and its costs."""

import re
from collections.abc import Iterable, Sequence
from typing import Any

from ..record import branches, markdown

Row = dict[str, Any]

INTRODUCTION = """\
Each peer was compared with the float64 definition *of what it claims to compute*, at {small} positions: "right" is an
error of at most ten times that of torch's attention in the same dtype under the same mask, "wrong" a larger one without
a word. A dash: its interface cannot express the input. "Uneven" is one position more than what divides; "16 bits" is
bfloat16, or float16 for peers that run in bfloat16 anyway."""

COSTS = """\
Cost, {seq_len:,} positions, {heads} heads of {head_dim}: CPU seconds of one thread (those of two ranks added) beside
this library's, by turns in the same processes, median and spread of {repeats} turns; the peak beside the inputs, in
tensors of the query's size on a rank, theirs / ours; bytes sent per rank in shards of K, forward + backward.
Where both run torch's CPU kernel on the same pairs, a time near 1 says nothing for either. Beside torch SDPA ours
is another function: {beside}. A figure of a peer that is wrong above is that of a wrong result."""


def table(rows: list[Row]) -> str:
    inputs = list(dict.fromkeys(name for row in rows for name in row["inputs"]))
    words = {"not offered": "-"}
    verdicts = [
        (
            row["peer"],
            *(words.get(verdict, verdict) for verdict in (_verdict(row, name) for name in inputs)),
        )
        for row in rows
    ]
    first = rows[0]
    texts = [
        INTRODUCTION.format(small=first["gate"]["seq_len"]),
        markdown(("peer", *inputs), verdicts),
        "Relative L2 errors, of full attention or, where there is none, of causal:",
        markdown(
            ("peer", "version", "lines", "out", "dq", "dk", "dv"), [_errors(row) for row in rows]
        ),
        "Lines: those that call it here. FlexAttention has no backward on a CPU; torch_math has none at all.",
    ]
    if measured := [row for row in rows if "seconds" in row]:
        beside = next((branches(row) for row in rows if row["peer"] == "torch SDPA"), "")
        texts += [
            COSTS.format(
                seq_len=first["seq_len"],
                heads=first["num_heads"],
                head_dim=first["head_dim"],
                repeats=measured[0]["seconds"]["repeats"],
                beside=beside,
            ),
            markdown(
                ("peer", "their time / ours", "peak", "sent", "sent by ours"),
                [_cost(row) for row in measured],
            ),
            *_cheaper(measured),
        ]
    texts += _list("Wrong without a word:", _wrong(rows))
    texts += _list("Shown by scripts in `benchmarks/peer_errors`:", _shown(rows))
    texts += _list("Not run to an end:", _reasons(rows))
    texts += _list("Replaced, in this run only:", _stood_in(rows))
    return "\n\n".join(texts)


def _verdict(row: Row, name: str) -> str:
    return row["inputs"].get(name, {}).get("verdict", "")


def _errors(row: Row) -> tuple[str, ...]:
    found: dict[str, float] = next(
        (x["errors"] for x in row["inputs"].values() if "errors" in x), {}
    )
    errors = (f"{found[name]:.1e}" if name in found else "" for name in ("out", "dq", "dk", "dv"))
    return (row["peer"], row["version"], str(row["lines"]), *errors)


def _cost(row: Row) -> tuple[str, ...]:
    ratio = row["ratio"]
    return (
        row["peer"],
        f"{ratio['median']:.2f} ({ratio['min']:.2f} to {ratio['max']:.2f})",
        f"{row['peak_tensors']:.1f} / {row['own_peak_tensors']:.1f}",
        *(
            " + ".join(f"{shards:.1f}" for shards in row[name])
            for name in ("sent_shards", "own_sent_shards")
        ),
    )


def _cheaper(rows: Sequence[Row]) -> list[str]:
    """A line that names the peers whose calls cost less than this library's: in bytes sent, memory or CPU time."""

    def names(found: Iterable[Row]) -> str:
        return ", ".join(row["peer"] for row in found) or "none"

    others = [row for row in rows if row["version"]]
    return [
        "Less than ours: "
        f"bytes sent by {names(r for r in others if sum(r['sent_shards']) < sum(r['own_sent_shards']))}; "
        f"memory of {names(r for r in others if r['peak_tensors'] < 0.99 * r['own_peak_tensors'])}; "
        f"CPU time of {names(r for r in others if r['ratio']['max'] < 1)} (in every turn)."
    ]


def _list(title: str, lines: Iterable[str]) -> list[str]:
    found = list(lines)
    return [title, "\n".join(f"- {line}" for line in found)] if found else []


def _wrong(rows: Sequence[Row]) -> Iterable[str]:
    for row in rows:
        found: dict[str, list[str]] = {}
        for name, result in row["inputs"].items():
            if result["verdict"] == "wrong":
                errors, allowed = result.get("errors", {}), result.get("allowed", {})
                off = [
                    f"{key} {error:.1e}"
                    for key, error in errors.items()
                    if not error <= allowed[key]
                ]
                found.setdefault(result.get("reason") or ", ".join(off), []).append(name)
        yield from (f"{row['peer']}, {', '.join(names)}: {what}" for what, names in found.items())


def _shown(rows: Sequence[Row]) -> Iterable[str]:
    for row in rows:
        for name, lines in row.get("shown_by", {}).items():
            yield f"`{name}.py` ({row['version']}): {'; '.join(lines)}"


def _stood_in(rows: Sequence[Row]) -> Iterable[str]:
    """A line for each stand-in, with the peers that use it."""
    found: dict[str, list[str]] = {}
    for row in rows:
        found.setdefault(row["stands_in"], []).append(row["peer"])
    return (f"{', '.join(peers)}: {what}" for what, peers in found.items() if what)


def _reasons(rows: Sequence[Row]) -> Iterable[str]:
    """A line for each reason why a peer could not be run, with the inputs for which it was the reason."""
    for row in rows:
        found: dict[str, list[str]] = {}
        for name, result in row["inputs"].items():
            if result["verdict"] in ("refused", "crashed", "hung"):
                found.setdefault(result["reason"], []).append(name)
        if "reason" in row:
            found.setdefault(row["reason"], []).append("cost" if row["inputs"] else "everything")
        yield from (
            f"{row['peer']}, {', '.join(names)}: {_short(why)}" for why, names in found.items()
        )


def _short(reason: str) -> str:
    """The first sentence of a reason, without line numbers of files and ports, which differ from run to run."""
    return re.sub(r"\[[^ ]*:\d+\] |\[[\d.]+\]:\d+", "", reason).split(". ")[0].rstrip(". ")
