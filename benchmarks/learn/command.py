"""`python -m benchmarks learn`: train the models of `text`, one after the other.

Each run is a row of the record, written when it is done. So Ctrl-C loses the run at hand alone, and another start goes
on from there.
"""

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ring_dilated_attention.training.files import check_mine

from ..record import for_terminal, is_record, make_record, page_of, read_record, write_record
from . import text
from .text import Row, Run

NAME = "learn_text"


def parsed(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks learn",
        description=f"Measure {text.SUMMARY}. All runs take an hour. A second start makes the missing ones.",
    )
    parser.add_argument(
        "--only",
        default="",
        metavar="TEXT",
        help='only runs whose names hold this text, as "240 s"',
    )
    parser.add_argument(
        "--quick", action="store_true", help="tiny sizes; writes nothing unless --results is given"
    )
    parser.add_argument(
        "--results", type=Path, metavar="DIR", help="where the record goes (default: in the clone)"
    )
    return parser.parse_args(argv)


def main(
    argv: Sequence[str],
    results: Path,
    step: Callable[[str], None],
    write_page: Callable[[Path], Path],
) -> int:
    arguments = parsed(argv)
    folder = arguments.results or results
    is_kept = arguments.results is not None or not arguments.quick
    path = folder / f"{NAME}.json"
    if is_kept:
        page_of(folder)
        check_mine(path, is_record, "python -m benchmarks")
    order = text.runs(text.QUICK if arguments.quick else text.FULL)
    rows: list[Row] = []
    for run in order:
        if is_kept:
            rows = rows_of(path)
        if arguments.only not in run.name or is_done(run, rows):
            continue
        step(run.name)
        row = {"name": run.name, "settings": as_json(run.settings), **run.make()}
        record = make_record(NAME, [], is_quick=arguments.quick)
        if is_kept:
            rows = rows_of(path)  # another process may have added one meanwhile
        rows = in_order([*rows, row | {"date": record["date"], "commit": record["commit"]}], order)
        if is_kept:
            words = "python -m benchmarks learn" + (" --quick" if arguments.quick else "")
            write_record(record | {"command": words, "rows": rows}, folder)
    if rows:
        print(for_terminal(text.table(rows)))
    if is_kept:
        print(f"page: {write_page(folder)}")
    return 0


def rows_of(path: Path) -> list[Row]:
    return read_record(path)["rows"] if path.exists() else []


def as_json(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings as a record keeps them: tuples are lists."""
    return dict(json.loads(json.dumps(settings)))


def is_done(run: Run, rows: Sequence[Row]) -> bool:
    """Whether a row was made by the same settings."""
    return any(row["settings"] == as_json(run.settings) for row in rows)


def in_order(rows: Sequence[Row], order: Sequence[Run]) -> list[Row]:
    """The last row of each run, in the order of the runs. Rows of settings that are no longer run go."""
    found = []
    for run in order:
        made = [row for row in rows if is_done(run, [row])]
        if made:
            found.append(made[-1] | {"name": run.name})
    return found
