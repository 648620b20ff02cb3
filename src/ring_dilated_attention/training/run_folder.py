"""Lets only one run at a time use a folder, and counts the starts that left no new checkpoint. Imports no torch."""

import argparse
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from ..models.saved_run import MAKER, find_checkpoint
from .files import check_mine, folder_made, write_whole

LOCK_FILE, STARTS_FILE = ".rda-train.lock", ".rda-train.starts"
# Matches what filelock writes into a lock file: the process id, the host, and perhaps a number.
OF_FILELOCK = re.compile(rb"\d+\n[^\n]+\n(\d+\n)?")
MOST_STARTS = 3  # the most starts in a row without a new checkpoint


@contextmanager
def own_folder(folder: Path, seconds: float = 0) -> Iterator[Path]:
    """Keep other runs out of a folder during the block. The folder is made if it is not there.

    At the end a new folder is removed if it is empty. Raises ValueError if another run still owns the folder after
    `seconds`.
    """
    from filelock import FileLock, Timeout

    with folder_made(folder):
        path = folder / LOCK_FILE
        check_mine(path, is_lock, MAKER)
        lock = FileLock(path)
        try:
            lock.acquire(timeout=seconds, poll_interval=0.2)
        except Timeout:
            raise ValueError(
                f"{folder} is in use by another run: let it end, or choose another --run-folder (fuser {path} names "
                "its process)"
            ) from None
        try:
            yield folder
        finally:
            # Delete the file before the lock is released, because after the release another run may own the file.
            path.unlink(missing_ok=True)
            lock.release()


def is_lock(file: BinaryIO) -> bool:
    """Whether an open file is a lock file of the package filelock. Such a file is empty or, on a file system without
    flock, names the process that holds the lock."""
    content = file.read(512)
    return not content or OF_FILELOCK.fullmatch(content) is not None


def are_by_torchrun() -> bool:
    """Whether the elastic launcher of this process starts failed ranks again. The launcher is torchrun --max-restarts
    or rda train --restarts."""
    return os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0"


def may_start_again(arguments: argparse.Namespace) -> bool:
    """Whether the ranks of this command may be started again."""
    return arguments.restarts is not None or are_by_torchrun()


def count_start(folder: Path, *, anew: bool) -> None:
    """Count one more start of the run, in a file in `folder`. anew: whether to forget earlier starts.

    Raises ValueError if the last MOST_STARTS starts left no new checkpoint.
    """
    path, newest = folder / STARTS_FILE, find_checkpoint(folder)
    note = f"{MAKER}: a start after {newest and newest.name}\n"
    notes: list[str] = []
    if path.exists() and not anew:
        notes = path.read_text(errors="replace").splitlines(keepends=True)
    if notes == MOST_STARTS * [note]:
        awaited = f"a checkpoint after {newest.name}" if newest else "a first checkpoint"
        raise ValueError(
            f"{folder}: {MOST_STARTS} starts in a row ended without {awaited}: find and mend the cause first"
        )
    content = "".join([*notes, note][-MOST_STARTS:]).encode()
    write_whole(path, content, lambda file: file.read(len(MAKER)) == MAKER.encode(), MAKER)
