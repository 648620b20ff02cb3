"""`python -m benchmarks multi_gpu`: runs one part after the other, each in processes of its own."""

from collections.abc import Sequence
from functools import partial

import torch

from ..parts import Part, folder_of, parser_of, print_rows, run_parts
from .faults import fault
from .network import network
from .right import model, right, there
from .settings import QUICK, TOLD_BY, Settings
from .speed import speed

SUMMARY = "what only several GPUs can show, for others to send us (make multi-gpu)"
NAME = "multi_gpu"


def parts(settings: Settings) -> list[Part]:
    """The parts in the order in which they run, each with its limit in seconds."""
    has_mesh = settings.num_ranks >= 4 and settings.num_ranks % 2 == 0
    ways = [way for way in settings.ways if way != "2-D mesh" or has_mesh]
    made = [Part("there", 30, there)]
    for way in ways:
        limit = 60 if way == "ring" else 30
        made.append(Part(f"right, {way}", limit, partial(right, way=way)))
    for told_by in TOLD_BY:
        made.append(Part(f"right, LongNetLM, {told_by}", 33, partial(model, told_by=told_by)))
    made.append(Part("network", 50, network))
    for way in ways:
        if way in ("ring", "all_gather"):
            made.append(Part(f"speed, {way}", 60, partial(speed, way=way)))
    # What leaves cards in an unknown state comes last.
    for kind, seconds in settings.faults:
        made.append(Part(f"fault, {kind}", seconds, partial(fault, kind=kind)))
    return made


def main(words: Sequence[str]) -> int:
    parser = parser_of(NAME, f"Measure {SUMMARY}. It takes ten minutes.", "two CPU ranks")
    arguments = parser.parse_args(words)
    num_gpus = torch.cuda.device_count()
    why_not = None
    if num_gpus < 2:
        why_not = f"needs two CUDA GPUs or more, and torch sees {num_gpus}."
    folder = folder_of(NAME, arguments, why_not)
    settings = Settings(num_gpus)
    if arguments.quick:
        settings = QUICK
    rows = run_parts(NAME, parts(settings), settings, folder, is_quick=arguments.quick)
    status = print_rows(rows)
    if folder is not None:
        print(f"\nPlease open an issue with this file: {folder / NAME}.json")
    return status
