"""Restarts of a run: who starts the ranks again, and when it is of no use any more. The file imports no torch.

A file in the run's folder holds the name of the run, which has no checkpoint at first, and how often it was started
since its newest checkpoint.
"""

import argparse
import json
import os
import secrets
from pathlib import Path
from typing import Any, BinaryIO

from ..models.saved_run import MAKER, find_checkpoint
from .files import MOST_BYTES, json_object, write_whole

STARTS_FILE, MOST_STARTS = ".rda-train.starts", 3


def are_by_torchrun() -> bool:
    """Whether torchrun starts the ranks again (its --max-restarts)."""
    return os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0"


def are_meant(arguments: argparse.Namespace) -> bool:
    """Whether --run-folder names a new run or one to go on with."""
    return arguments.restarts is not None or are_by_torchrun()


def count_start(folder: Path, *, anew: bool = False) -> None:
    """Note that the run is started. A ValueError if the last MOST_STARTS starts left no new checkpoint.

    anew: this is the first start of a command, and earlier ones do not count.
    """
    newest = find_checkpoint(folder)
    number = 0 if anew else num_starts(folder)
    if number >= MOST_STARTS:
        since = f"a checkpoint after {newest}" if newest else "a first checkpoint"
        raise ValueError(f"{folder}: {number} starts in a row ended without {since}: mend what ended them first")
    note = {"made_by": MAKER, "run": name_of(folder), "newest": newest and newest.name, "starts": number + 1}
    write_whole(folder / STARTS_FILE, json.dumps(note).encode(), _is_ours, MAKER)


def num_starts(folder: Path) -> int:
    """How often the run was started since its newest checkpoint."""
    note, newest = _note(folder), find_checkpoint(folder)
    return int(note.get("starts", 0)) if note.get("newest", "") == (newest and newest.name) else 0


def forget_starts(folder: Path) -> None:
    if _note(folder):
        (folder / STARTS_FILE).unlink(missing_ok=True)


def name_of(folder: Path) -> str:
    """The name of the run that restarts in this folder, or a new one."""
    return str(_note(folder).get("run", secrets.token_hex(16)))


def _note(folder: Path) -> dict[str, Any]:
    path = folder / STARTS_FILE
    note = json_object(path.read_bytes()) if path.is_file() else {}
    return note if note.get("made_by") == MAKER else {}


def _is_ours(file: BinaryIO) -> bool:
    return json_object(file.read(MOST_BYTES)).get("made_by") == MAKER
