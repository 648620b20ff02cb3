"""Restarts of a run by `--restarts` or by torchrun. Both tell the ranks by the same variable. No torch."""

import argparse
import os
from pathlib import Path

from ..models.saved_run import MAKER, find_checkpoint
from .files import write_whole

RESTART = "TORCHELASTIC_RESTART_COUNT"  # how often rda's launcher, or this host's torchrun, started ranks again
STARTS_FILE, MOST_STARTS = ".rda-train.starts", 3


def are_by_torchrun() -> bool:
    """Whether torchrun starts the ranks again (its --max-restarts)."""
    return os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0"


def are_meant(arguments: argparse.Namespace) -> bool:
    """Whether --run-folder may also name a run that exists, to go on with."""
    return arguments.restarts is not None or are_by_torchrun()


def no_progress(folder: Path) -> str:
    awaited = f"a checkpoint after {newest.name}" if (newest := find_checkpoint(folder)) else "a first checkpoint"
    return f"{folder}: {MOST_STARTS} starts in a row ended without {awaited}: mend what ended them first"


def count_start(folder: Path, *, anew: bool) -> None:
    """Note this start by torchrun in the folder. Raise ValueError if the last MOST_STARTS left no new checkpoint."""
    path, newest = folder / STARTS_FILE, find_checkpoint(folder)
    notes = [f"{MAKER}: start {i} after {newest and newest.name}\n".encode() for i in range(1, MOST_STARTS + 1)]
    noted = path.read_bytes() if not anew and path.exists() else b""
    if noted == notes[-1]:
        raise ValueError(no_progress(folder))
    note = notes[notes.index(noted) + 1 if noted in notes else 0]
    write_whole(path, note, lambda file: file.read(len(MAKER)) == MAKER.encode(), MAKER)
