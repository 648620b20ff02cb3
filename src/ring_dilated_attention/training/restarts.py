"""Restarts of a run by `--restarts` or by torchrun. Both tell the ranks by the same variables. No torch."""

import argparse
import os
from pathlib import Path

from ..models.saved_run import find_checkpoint, read_state

JOB, RESTART = "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"
MOST_STARTS = 3


def this_start() -> tuple[str, int]:
    """The name of the launcher's job, and how often it has started ranks again."""
    return os.environ.get(JOB, ""), int(os.environ.get(RESTART, "0"))


def are_by_torchrun() -> bool:
    """Whether torchrun starts the ranks again (its --max-restarts)."""
    return os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0"


def are_meant(arguments: argparse.Namespace) -> bool:
    """Whether --run-folder names a new run or one to go on with."""
    return arguments.restarts is not None or are_by_torchrun()


def check_progress(folder: Path) -> None:
    """Raise ValueError if the last MOST_STARTS starts of this launcher's job left no new checkpoint."""
    job, restart = this_start()
    newest = find_checkpoint(folder)
    its_job, saved = read_state(newest).get("start", ("", -1)) if newest else ("", -1)
    if restart - (saved if its_job == job else -1) > MOST_STARTS:
        since = f"a checkpoint after {newest}" if newest else "a first checkpoint"
        raise ValueError(f"{folder}: {MOST_STARTS} starts in a row ended without {since}: mend what ended them first")
