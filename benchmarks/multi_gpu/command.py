"""`python -m benchmarks multi_gpu`: one part after the other, each in processes of its own."""

import argparse
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from ring_dilated_attention.training.files import check_mine

from ..progress import stepper
from ..record import is_record, make_record, markdown, write_record
from .faults import fault
from .network import network
from .right import model, right, there
from .settings import QUICK, Row, Settings
from .speed import speed

SUMMARY = "what only several GPUs can show, for others to send us (make multi-gpu)"
NAME, MAKER = "multi_gpu", "python -m benchmarks"
VERDICTS = {None: "", True: "passed", False: "FAILED"}


class Part(NamedTuple):
    """`run` starts ranks that may take so many seconds, and returns rows."""

    name: str
    seconds: float
    run: Callable[[Settings, float], list[Row]]


def parts(settings: Settings) -> list[Part]:
    has_mesh = settings.num_ranks >= 4 and settings.num_ranks % 2 == 0
    ways = [way for way in settings.ways if way != "2-D mesh" or has_mesh]
    made = [Part("there", 30, there)]
    for way in ways:
        made.append(Part(f"right, {way}", 60 if way == "ring" else 35, partial(right, way=way)))
    made.append(Part("right, LongNetLM", 40, model))
    made.append(Part("network", 60, network))
    for way in ways:
        if way in ("ring", "all_gather"):
            made.append(Part(f"speed, {way}", 70, partial(speed, way=way)))
    for kind, seconds in settings.faults:
        made.append(Part(f"fault, {kind}", seconds, partial(fault, kind=kind)))
    return made


def run_part(part: Part, settings: Settings) -> list[Row]:
    begun = time.monotonic()
    try:
        rows = part.run(settings, part.seconds)
    except Exception as error:  # noqa: BLE001  whatever it is, the other parts go on
        lines = str(error).strip().splitlines() or [type(error).__name__]
        failed = f"it failed: {lines[-1]}"
        rows = [
            {"what": "all of it", "passed": False, "found": failed, "error": str(error)[-4000:]}
        ]
    seconds = time.monotonic() - begun
    return [{"part": part.name, **row, "part_seconds": seconds} for row in rows]


def run(settings: Settings, folder: Path | None) -> list[Row]:
    """The rows of all parts. The record is written whenever a part ends."""
    rows: list[Row] = []
    step = stepper(NAME)
    for part in parts(settings):
        step(part.name)
        rows += run_part(part, settings)
        if folder is not None:
            card = None
            if settings.has_gpus and "cards" in rows[0]:
                card = rows[0]["cards"][0]
            write_record(make_record(NAME, rows, is_quick=not settings.has_gpus, gpu=card), folder)
    return rows


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog=f"{MAKER} {NAME}", description=f"Measure {SUMMARY}. It takes ten minutes."
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="two CPU ranks; writes nothing unless --results is given",
    )
    parser.add_argument(
        "--results", type=Path, metavar="DIR", help="where the record goes (default: runs)"
    )
    arguments = parser.parse_args(words)
    settings, folder = QUICK, arguments.results
    if not arguments.quick:
        settings = Settings(torch.cuda.device_count())
        folder = folder or Path("runs")
        if settings.num_ranks < 2:
            raise ValueError(
                f"{NAME} needs two CUDA GPUs or more, and torch sees {settings.num_ranks}."
            )
    if folder is not None:
        check_mine(folder / f"{NAME}.json", is_record, MAKER)
    rows = run(settings, folder)
    for row in rows:
        print(f"{VERDICTS[row['passed']]:6} {row['part']}: {row['what']}: {row['found']}")
    if folder is not None:
        print(f"\nPlease open an issue with this file: {folder / NAME}.json")
    has_failed = any(row["passed"] is False for row in rows)
    return 1 if has_failed else 0


def table(rows: list[Row]) -> str:
    lines = []
    for row in rows:
        words = " ".join(row["found"].split())
        lines.append((row["part"], row["what"], VERDICTS[row["passed"]], words))
    return markdown(("part", "what", "verdict", "found"), lines)
