"""`python -m benchmarks multi_gpu`: one part after the other, each in processes of its own."""

import argparse
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch

from ring_dilated_attention.training.files import check_mine

from ..parts import Part, print_rows, run_parts
from ..record import is_record
from .faults import fault
from .network import network
from .right import model, right, there
from .settings import QUICK, Settings
from .speed import speed

SUMMARY = "what only several GPUs can show, for others to send us (make multi-gpu)"
NAME, MAKER = "multi_gpu", "python -m benchmarks"


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
    is_quick = not settings.has_gpus
    rows = run_parts(NAME, parts(settings), settings, folder, is_quick=is_quick)
    status = print_rows(rows)
    if folder is not None:
        print(f"\nPlease open an issue with this file: {folder / NAME}.json")
    return status
