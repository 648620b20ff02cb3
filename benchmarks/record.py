"""Records of cases, and the page made from all records.

A record is a JSON file with the rows that a case measured, the hardware, and the versions of torch and Python.
"""

import datetime
import json
import os
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import torch

from ring_dilated_attention.pattern import WHOLE_DOCUMENT
from ring_dilated_attention.training.files import MOST_BYTES, json_object, write_whole
from ring_dilated_attention.training.machine import hardware, versions

Record = dict[str, Any]
# A function that makes the table of a case from the rows of its record.
Table = Callable[[list[dict[str, Any]]], str]

# The keys by which a file is known as a record, and HEAD, by which it is known as the page. No other file is replaced.
RECORDED = {"case", "command", "date", "commit", "hardware", "versions", "rows"}
# The record of a benchmark whose code was removed also has its table as text, and the last commit with the code.
RETIRED = RECORDED | {"last_commit_with_code", "table"}
HEAD = "# Benchmarks\n\nMade by `python -m benchmarks --page` from the records in `results/`."
NOT_RUN_ANY_MORE = """\
These records were made once, to show one thing each. Their rows stay in `results/`, as data, and the tables are those
that were made at the time. Each names the last commit that holds its code: check that commit out to run it again."""


def make_record(
    name: str, rows: list[dict[str, Any]], *, is_quick: bool, gpu: Mapping[str, Any] | None = None
) -> Record:
    """The record of a case, from its rows. gpu: the properties of the GPU, from `device.describe`."""
    # Only of this process: the rows of ranks say how many threads each rank had.
    machine = hardware() | {"threads_of_this_process": torch.get_num_threads()}
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    return {
        "case": name,
        "command": f"python -m benchmarks {name}" + (" --quick" if is_quick else ""),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": _commit(),
        "hardware": machine | {"load_average_at_the_end": load} | ({"gpu": gpu} if gpu else {}),
        "versions": versions(),
        "rows": rows,
    }


def write_record(record: Record, folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{record['case']}.json"
    write_whole(
        path, (json.dumps(record, indent=1) + "\n").encode(), is_record, "python -m benchmarks"
    )
    return path


def is_record(file: BinaryIO) -> bool:
    """Whether a file is a record of `python -m benchmarks`. Only then may a new record replace it."""
    record = json_object(file.read(MOST_BYTES))
    return record.keys() in (RECORDED, RETIRED) and str(record["command"]).startswith(
        "python -m benchmarks"
    )


def read_record(path: Path) -> Record:
    """Read a record from its file.

    Raises:
        ValueError: if the file is not a record.
    """
    with path.open("rb") as file:
        if not is_record(file):
            raise ValueError(f"{path} is no record of python -m benchmarks: run its case again")
    return dict(json.loads(path.read_bytes()))


def page_of(folder: Path) -> Path:
    """The path of the page: README.md in the parent of the folder of records.

    Raises:
        ValueError: if this file exists, and was not made by `python -m benchmarks`.
    """
    page = folder.parent / "README.md"
    if not page.exists():
        return page
    with page.open("rb") as file:
        if is_page(file):
            return page
    raise ValueError(
        f"the page of the records in {folder} would be {page}, which python -m benchmarks did not make. Choose a "
        f"--results folder in one of its own, such as {folder.parent / 'benchmarks' / (folder.name or 'results')}"
    )


def is_page(file: BinaryIO) -> bool:
    """Whether a file is a page of records. It is known by its first lines."""
    return file.read(len(HEAD)) == HEAD.encode()


def write_page(folder: Path, tables: Mapping[str, Table]) -> Path:
    """Write the page, with a table for each record. Returns its path.

    A case may have several records. Rename one, say to linear.other-cpu.json, and the next run does not replace it.
    """
    texts = [
        f"{HEAD} Timed attention passed a correctness gate first: the same",
        "branches, heads and dtype at a small size against the definition in float64.",
    ]
    for name in tables:
        records = records_of(name, folder)
        if records:
            texts += ["", f"## {name}"]
        for record in records:
            texts += ["", table_of(record, tables), "", provenance(record)]
    retired = retired_names(folder)
    if retired:
        texts += ["", "## Not run any more", "", NOT_RUN_ANY_MORE]
    for name in retired:
        texts += ["", f"### {name}"]
        for record in records_of(name, folder):
            texts += ["", table_of(record, tables), "", provenance(record)]
    page = page_of(folder)
    page.parent.mkdir(parents=True, exist_ok=True)
    write_whole(page, ("\n".join(texts) + "\n").encode(), is_page, "python -m benchmarks")
    return page


def records_of(name: str, folder: Path) -> list[Record]:
    """All records of a case. The one that was not renamed comes first."""
    return [
        read_record(path)
        for path in sorted(folder.glob(f"{name}.*json"), key=lambda path: len(path.name))
    ]


def retired_names(folder: Path) -> list[str]:
    """The names of cases that have records in the folder, and whose code was removed."""
    names = set()
    for path in folder.glob("*.json"):
        record = json_object(path.read_bytes())
        if record.keys() == RETIRED:
            names.add(record["case"])
    return sorted(names)


def table_of(record: Record, tables: Mapping[str, Table]) -> str:
    """The table of a record: the text in the record, or else made from its rows."""
    if "table" in record:
        return str(record["table"])
    return tables[record["case"]](record["rows"])


def provenance(record: Record) -> str:
    machine, found = record["hardware"], record["versions"]
    gpu = machine.get("gpu")
    on_gpu = ""
    if gpu:
        on_gpu = f"{gpu['name']}, driver {gpu.get('driver_version', 'unknown')}, "
    text = (
        f"`{record['command']}`, {record['date'][:10]}, commit {record['commit'] or 'unknown'}: {on_gpu}"
        f"{machine['processor']}, {machine['cores']} cores, {machine['memory_bytes'] / 2**30:.0f} GiB, "
        f"torch {found['torch']}, Python {found['python']}."
    )
    if "last_commit_with_code" in record:
        text += f" Commit {record['last_commit_with_code']} is the last one with its code."
    return text


def markdown(headers: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    """A markdown table, with columns aligned in the text too. All columns but the first are aligned to the right."""
    lines = [headers, *rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(headers))]
    rule = ["-" * (widths[0] + 2)] + ["-" * (width + 1) + ":" for width in widths[1:]]

    def joined(cells: tuple[str, ...]) -> str:
        first, *others = (
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(cells, widths, strict=True))
        )
        return "| " + " | ".join([first, *others]) + " |"

    return "\n".join([joined(headers), f"|{'|'.join(rule)}|", *map(joined, rows)])


def for_terminal(text: str) -> str:
    """A text in which tables of `markdown` have no bars, and no rule below the headers."""
    lines = [
        line
        for line in text.splitlines()
        if not (line.startswith("|") and set(line) <= set("|-: "))
    ]
    plain = [
        line.strip("|").replace(" | ", "  ").rstrip() if line.startswith("|") else line
        for line in lines
    ]
    return "\n".join(
        line.removeprefix(" ") if old.startswith("|") else line
        for old, line in zip(lines, plain, strict=True)
    )


def branches(row: dict[str, Any]) -> str:
    """The pattern of a row as text, such as "(2048, 4096)/(1, 2) causal"."""
    is_whole = [w == WHOLE_DOCUMENT for w in row["segment_lengths"]]
    lengths = [
        "whole" if whole else str(w)
        for whole, w in zip(is_whole, row["segment_lengths"], strict=True)
    ]
    pairs = f"({', '.join(lengths)})/({', '.join(map(str, row['dilation_rates']))})"
    if is_whole == [True] and list(row["dilation_rates"]) == [1]:
        pairs = "dense"
    if row.get("window"):
        pairs += f" and a window of {row['window']}"
    return pairs + (" causal" if row.get("is_causal") else "")


def tensors(row: dict[str, Any]) -> str:
    """The heads and the dtype of a row as text, such as "12 heads of 64, float32"."""
    return f"{row['num_heads']} heads of {row['head_dim']}, {row['dtype']}"


def seconds(found: dict[str, float]) -> str:
    """A median with the smallest and the largest value, as text: "1.14 (1.02 to 1.42)"."""
    return f"{found['median']:.3g} ({found['min']:.3g} to {found['max']:.3g})"


def not_measured(rows: Sequence[dict[str, Any]]) -> list[str]:
    """A list of the reasons why candidates were not measured, each once with its candidates. Empty if all were."""
    stopped: dict[str, set[str]] = {}
    for row in rows:
        if "reason" in row:
            stopped.setdefault(row["reason"], set()).add(row["candidate"])
    if not stopped:
        return []
    return [
        "Not measured:",
        "\n".join(f"- {'; '.join(sorted(names))}: {why}" for why, names in stopped.items()),
    ]


def _commit() -> str | None:
    """The commit of this clone, with "-dirty" if code in src or benchmarks was changed. None outside of a clone."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(Path(__file__).parents[1]), *arguments]
        return subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=10
        ).stdout.strip()

    try:
        return git("describe", "--always") + (
            "-dirty"
            if git("status", "--porcelain", "--", "src", ":(glob)benchmarks/**/*.py")
            else ""
        )
    except (OSError, subprocess.SubprocessError):
        return None
