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
    """All tables and lists of the record of peers, in markdown."""
    inputs = list(dict.fromkeys(name for row in rows for name in row["inputs"]))
    verdicts = []
    for row in rows:
        verdicts.append((row["peer"], *(_verdict(row, name) for name in inputs)))
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
    """The cell of a peer and a kind of input."""
    verdict: str = row["inputs"].get(name, {}).get("verdict", "")
    return "-" if verdict == "not offered" else verdict


def _errors(row: Row) -> tuple[str, ...]:
    """A line of the table of errors: those of the first kind of input that has some."""
    found: dict[str, float] = {}
    for result in row["inputs"].values():
        found = found or result.get("errors", {})
    cells = []
    for name in ("out", "dq", "dk", "dv"):
        cells.append(f"{found[name]:.1e}" if name in found else "")
    return (row["peer"], row["version"], str(row["lines"]), *cells)


def _cost(row: Row) -> tuple[str, ...]:
    """A line of the table of costs."""
    ratio = row["ratio"]
    theirs = " + ".join(f"{shards:.1f}" for shards in row["sent_shards"])
    ours = " + ".join(f"{shards:.1f}" for shards in row["own_sent_shards"])
    return (
        row["peer"],
        f"{ratio['median']:.2f} ({ratio['min']:.2f} to {ratio['max']:.2f})",
        f"{row['peak_tensors']:.1f} / {row['own_peak_tensors']:.1f}",
        theirs,
        ours,
    )


def _cheaper(rows: Sequence[Row]) -> list[str]:
    """A line that names the peers whose calls cost less than this library's: in bytes sent, memory or CPU time."""

    def names(found: Iterable[Row]) -> str:
        return ", ".join(row["peer"] for row in found) or "none"

    others = [row for row in rows if row["version"]]
    sent = [row for row in others if sum(row["sent_shards"]) < sum(row["own_sent_shards"])]
    memory = [row for row in others if row["peak_tensors"] < 0.99 * row["own_peak_tensors"]]
    seconds = [row for row in others if row["ratio"]["max"] < 1]
    return [
        f"Less than ours: bytes sent by {names(sent)}; memory of {names(memory)}; "
        f"CPU time of {names(seconds)} (in every turn)."
    ]


def _list(title: str, lines: Iterable[str]) -> list[str]:
    """A title and a list in markdown, or nothing if there are no lines."""
    items = [f"- {line}" for line in lines]
    if not items:
        return []
    return [title, "\n".join(items)]


def _wrong(rows: Sequence[Row]) -> Iterable[str]:
    """A line for each reason why a peer's results are wrong, with the inputs for which it was the reason."""
    for row in rows:
        found: dict[str, list[str]] = {}
        for name, result in row["inputs"].items():
            if result["verdict"] != "wrong":
                continue
            off = []
            for key, error in result.get("errors", {}).items():
                if not error <= result["allowed"][key]:
                    off.append(f"{key} {error:.1e}")
            reason = result.get("reason") or ", ".join(off)
            found.setdefault(reason, []).append(name)
        yield from (f"{row['peer']}, {', '.join(names)}: {what}" for what, names in found.items())


def _shown(rows: Sequence[Row]) -> Iterable[str]:
    """A line for each script that shows an error, with what it printed."""
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
    without_places = re.sub(r"\[[^ ]*:\d+\] |\[[\d.]+\]:\d+", "", reason)
    first, *_ = without_places.split(". ")
    return first.rstrip(". ")
