"""Records: what a case found, on which hardware with which versions, as JSON, and the page made from all of them."""

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
Table = Callable[[list[dict[str, Any]]], str]  # what makes a case's table of the rows of its record

# By which a record and a page are known for those that may be made anew.
RECORDED = {"case", "command", "date", "commit", "hardware", "versions", "rows"}
# The record of a benchmark whose code is gone has its table as text, and the last commit that holds the code.
RETIRED = RECORDED | {"last_commit_with_code", "table"}
HEAD = "# Benchmarks\n\nMade by `python -m benchmarks --page` from the records in `results/`."
NOT_RUN_ANY_MORE = """\
These records were made once, to show one thing each. Their rows stay in `results/`, as data, and the tables are those
that were made at the time. Each names the last commit that holds its code: check that commit out to run it again."""


def make_record(
    name: str, rows: list[dict[str, Any]], *, is_quick: bool, gpu: Mapping[str, Any] | None = None
) -> Record:
    """gpu: what `device.describe` says of the one that was measured."""
    # Ranks may have other numbers of threads than this process: their rows say how many.
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
    """Whether a file is a record, so that another may take its place."""
    record = json_object(file.read(MOST_BYTES))
    return record.keys() in (RECORDED, RETIRED) and str(record["command"]).startswith(
        "python -m benchmarks"
    )


def read_record(path: Path) -> Record:
    """A record that was written before.

    Raises:
        ValueError: if the file is none.
    """
    with path.open("rb") as file:
        if not is_record(file):
            raise ValueError(f"{path} is no record of python -m benchmarks: run its case again")
    return dict(json.loads(path.read_bytes()))


def page_of(folder: Path) -> Path:
    """README.md beside the folder of records.

    Raises:
        ValueError: if it is somebody else's.
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
    """Whether a file is a page, by how it begins."""
    return file.read(len(HEAD)) == HEAD.encode()


def write_page(folder: Path, tables: Mapping[str, Table]) -> Path:
    """Make the page: a table for each record. A record that was renamed, as linear.other-cpu.json, stays beside new
    ones: of another machine, say."""
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
    """The records of a case; that of this clone first."""
    return [
        read_record(path)
        for path in sorted(folder.glob(f"{name}.*json"), key=lambda path: len(path.name))
    ]


def retired_names(folder: Path) -> list[str]:
    """The cases whose records are there, and whose code is gone."""
    names = set()
    for path in folder.glob("*.json"):
        record = json_object(path.read_bytes())
        if record.keys() == RETIRED:
            names.add(record["case"])
    return sorted(names)


def table_of(record: Record, tables: Mapping[str, Table]) -> str:
    """The record's table: as text, or made of its rows."""
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
    """A table, aligned in the source too; all columns but the first to the right."""
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
    """What `markdown` made, without its bars and its rule."""
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
    """A row's pattern in words."""
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
    """Heads and dtype of a row in words."""
    return f"{row['num_heads']} heads of {row['head_dim']}, {row['dtype']}"


def seconds(found: dict[str, float]) -> str:
    """Median with the spread, as a table shows it."""
    return f"{found['median']:.3g} ({found['min']:.3g} to {found['max']:.3g})"


def not_measured(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Paragraphs that give each reason once, with the candidates that it stopped; none if all were measured."""
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
    """The commit, "-dirty" if code was changed since: other records and documents do not matter."""

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
