"""Benchmarks for machines that are rarely at hand: many parts, each in processes of its own and with a limit.

A part that fails leaves a row that says so, and the others go on. The record is written whenever a part ends.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ring_dilated_attention.training.files import check_mine

from .progress import stepper
from .record import is_record, make_record, markdown, write_record

MAKER = "python -m benchmarks"

# part, what, passed (None: nothing to judge), found (in words), and what was measured
Row = dict[str, Any]
VERDICTS = {None: "", True: "passed", False: "FAILED"}


class Part(NamedTuple):
    """`run` is given the settings and starts processes that may take so many seconds. It returns rows."""

    name: str
    seconds: float
    run: Callable[[Any, float], list[Row]]


def parser_of(name: str, description: str, quick: str) -> argparse.ArgumentParser:
    """A parser with --quick, which says what it runs, and --results."""
    parser = argparse.ArgumentParser(prog=f"{MAKER} {name}", description=description)
    quick_help = f"{quick}; writes nothing unless --results is given"
    parser.add_argument("--quick", action="store_true", help=quick_help)
    parser.add_argument(
        "--results", type=Path, metavar="DIR", help="where the record goes (default: runs)"
    )
    return parser


def folder_of(name: str, arguments: argparse.Namespace, why_not: str | None) -> Path | None:
    """Where the record goes, if anywhere. A ValueError says why not quick ones cannot run here, or whose file it is."""
    folder: Path | None = arguments.results
    if not arguments.quick:
        if why_not is not None:
            raise ValueError(f"{name} {why_not}")
        folder = folder or Path("runs")
    if folder is not None:
        check_mine(folder / f"{name}.json", is_record, MAKER)
    return folder


def failed_row(error: BaseException) -> Row:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return {
        "what": "all of it",
        "passed": False,
        "found": f"it failed: {lines[-1]}",
        "error": str(error)[-4000:],
    }


def run_part(part: Part, settings: Any) -> list[Row]:
    begun = time.monotonic()
    try:
        rows = part.run(settings, part.seconds)
    except Exception as error:  # noqa: BLE001  whatever it is, the other parts go on
        rows = [failed_row(error)]
    seconds = time.monotonic() - begun
    return [{"part": part.name, **row, "part_seconds": seconds} for row in rows]


def run_parts(
    name: str, parts: Sequence[Part], settings: Any, folder: Path | None, *, is_quick: bool
) -> list[Row]:
    """The rows of all parts. The first row with "cards" says which cards they are."""
    rows: list[Row] = []
    step = stepper(name)
    for part in parts:
        step(part.name)
        rows += run_part(part, settings)
        if folder is not None:
            cards = [row["cards"][0] for row in rows if "cards" in row]
            card = cards[0] if cards and not is_quick else None
            write_record(make_record(name, rows, is_quick=is_quick, gpu=card), folder)
    return rows


def print_rows(rows: Sequence[Row]) -> int:
    """The exit status: 1 if a row failed."""
    for row in rows:
        print(f"{VERDICTS[row['passed']]:6} {row['part']}: {row['what']}: {row['found']}")
    return 1 if any(row["passed"] is False for row in rows) else 0


def table(rows: list[Row]) -> str:
    lines = []
    for row in rows:
        words = " ".join(row["found"].split())
        lines.append((row["part"], row["what"], VERDICTS[row["passed"]], words))
    return markdown(("part", "what", "verdict", "found"), lines)
