"""Benchmarks of many parts, for machines with GPUs. Each part has processes of its own, and a limit of seconds.

If a part fails, a row says so, and the next part runs. The record is written after each part.
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

# A row of a record. "part": the part's name. "what": what was measured or checked. "passed": None if nothing can fail.
# "found": the result in words. Other entries are the numbers.
Row = dict[str, Any]
VERDICTS = {None: "", True: "passed", False: "FAILED"}


class Part(NamedTuple):
    """A part of a benchmark. `run(settings, seconds)` returns its rows; `seconds` is the limit for its processes."""

    name: str
    seconds: float
    run: Callable[[Any, float], list[Row]]


def parser_of(name: str, description: str, quick: str) -> argparse.ArgumentParser:
    """A parser with the options --quick and --results. quick: what --quick runs, for its help."""
    parser = argparse.ArgumentParser(prog=f"{MAKER} {name}", description=description)
    quick_help = f"{quick}; writes nothing unless --results is given"
    parser.add_argument("--quick", action="store_true", help=quick_help)
    parser.add_argument(
        "--results", type=Path, metavar="DIR", help="where the record goes (default: runs)"
    )
    return parser


def folder_of(name: str, arguments: argparse.Namespace, why_not: str | None) -> Path | None:
    """The folder for the record, or None if none is written. Without --results this is so for --quick.

    why_not: why a run without --quick is not possible on this machine, or None.

    Raises:
        ValueError: if the run is not possible, or if a file that is not a record has the record's name.
    """
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
    except Exception as error:  # noqa: BLE001  after any error the next part runs
        rows = [failed_row(error)]
    seconds = time.monotonic() - begun
    return [{"part": part.name, **row, "part_seconds": seconds} for row in rows]


def run_parts(
    name: str, parts: Sequence[Part], settings: Any, folder: Path | None, *, is_quick: bool
) -> list[Row]:
    """Run the parts, and write the record after each one. Returns the rows of all parts.

    The first row with an entry "cards" describes the GPUs, for the record.
    """
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
    """Print all rows. Returns the exit status: 1 if a row failed, else 0."""
    for row in rows:
        print(f"{VERDICTS[row['passed']]:6} {row['part']}: {row['what']}: {row['found']}")
    return 1 if any(row["passed"] is False for row in rows) else 0


def table(rows: list[Row]) -> str:
    lines = []
    for row in rows:
        words = " ".join(row["found"].split())
        lines.append((row["part"], row["what"], VERDICTS[row["passed"]], words))
    return markdown(("part", "what", "verdict", "found"), lines)
