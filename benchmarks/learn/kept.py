"""Rows of a study, written as soon as each is done, so that a second start goes on where the first one ended."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ..record import make_record, read_record, write_record

Row = dict[str, Any]


class Run(NamedTuple):
    """One row to come. Its settings decide the row; `name` is for people, and for --only."""

    name: str
    settings: dict[str, Any]
    make: Callable[[], Row]


def record_name(study: str) -> str:
    return f"learn_{study}"


def rows_of(folder: Path, study: str) -> list[Row]:
    path = folder / f"{record_name(study)}.json"
    return read_record(path)["rows"] if path.exists() else []


def is_done(run: Run, rows: Sequence[Row]) -> bool:
    """Whether a row was made by the same settings, as JSON keeps them."""
    settings = json.loads(json.dumps(run.settings))
    return any(row["settings"] == settings for row in rows)


def keep(row: Row, run: Run, folder: Path, study: str, order: Sequence[Run], *, is_quick: bool) -> Path:
    """Add a row to the study's record, in the order of the runs. The record is read anew: another process may have
    added to it; rows of settings that are no longer run go."""
    record = make_record(record_name(study), [], is_quick=is_quick)
    made = {name: record[name] for name in ("date", "commit")}
    row = {"name": run.name, "settings": json.loads(json.dumps(run.settings)), **row, **made}
    rows = [*rows_of(folder, study), row]
    found = ([row | {"name": each.name} for row in rows if is_done(each, [row])][-1:] for each in order)
    record["command"] = f"python -m benchmarks learn {study}" + (" --quick" if is_quick else "")
    return write_record(record | {"rows": [row for some in found for row in some]}, folder)
