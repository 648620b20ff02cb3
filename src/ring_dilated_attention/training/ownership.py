"""Keeps a second run out of a run's folder, and tells it who has the folder. The file imports no torch.

The lock is the system's (flock), on a file that names the owner. It ends with the last process that has the file open.
On a file system without such locks the file itself is the lock, and a run that was killed leaves it behind.
"""

import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import chain, count
from pathlib import Path

from ..models.saved_run import MAKER
from .files import LossyStderr, folder_made, json_object, named_in_errors

LOCK_FILE = ".rda-train.lock"
POLL_SECONDS = 0.5


@contextmanager
def own_folder(folder: Path, *, must_be_new: bool = False, seconds: float = 0) -> Iterator[tuple[Path, int]]:
    """Make a folder if it is not there, and keep other runs out of it. At the end an empty folder is removed.

    Yields the folder and the lock's descriptor. A process that inherits the descriptor holds the lock too. must_be_new:
    if the folder is there, make another with a number after its name. Raises ValueError if another run has the folder,
    and still has it after so many seconds.
    """
    with _new_folder_made(folder) if must_be_new else folder_made(folder) as own:
        lock = _lock(own / LOCK_FILE, seconds)
        try:
            yield own, lock
        finally:
            with suppress(OSError):
                (own / LOCK_FILE).unlink()  # while the lock is held: later the file may be another run's
            os.close(lock)


@contextmanager
def _new_folder_made(folder: Path) -> Iterator[Path]:
    with folder_made(folder.parent):
        for path in chain([folder], (folder.with_name(f"{folder.name}-{number}") for number in count(2))):
            with suppress(FileExistsError):
                path.mkdir()
                break
        try:
            yield path
        finally:
            with suppress(OSError):
                path.rmdir()


def _lock(path: Path, seconds: float) -> int:
    """The descriptor of the locked file, which names this process. It waits so many seconds for another owner."""
    for attempt in count():
        try:
            descriptor, is_made = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666), True
        except FileExistsError:
            descriptor, is_made = os.open(path, os.O_RDWR | os.O_CREAT, 0o666), False
        try:
            with named_in_errors(path):
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except OSError as error:  # another run has the lock, or the file system has no locks
                    if (is_owned := isinstance(error, BlockingIOError)) or not is_made:
                        owner = _owner(path)
                        who = "process {pid} on host {host} since {since}".format(**owner) if owner else "another run"
                        if is_owned and attempt * POLL_SECONDS < seconds:
                            if attempt == 0:
                                said = f"rda train: waiting up to {seconds:g} s for {path.parent}, in use by {who}"
                                print(said, file=LossyStderr(), flush=True)
                            time.sleep(POLL_SECONDS)
                            os.close(descriptor)
                            continue
                        remedy = f"let it end, or choose another --run-folder. If it is dead already, remove {path}"
                        raise ValueError(f"{path.parent} is in use by {who}: {remedy}") from error
                with suppress(FileNotFoundError):
                    if os.path.samestat(os.fstat(descriptor), path.stat()):
                        _sign(descriptor, path)
                        return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)  # its last owner removed it just now
    raise AssertionError("it counts for ever")


def _sign(descriptor: int, path: Path) -> None:
    if os.fstat(descriptor).st_size and _owner(path) is None:
        raise ValueError(f"{path} was not made by {MAKER}, and nothing is written over it: move it away")
    owner = {"made_by": MAKER, "pid": os.getpid(), "host": socket.gethostname()}
    try:
        os.truncate(descriptor, 0)
        os.write(descriptor, json.dumps(owner | {"since": time.strftime("%Y-%m-%d %H:%M:%S")}).encode())
        os.fsync(descriptor)  # other hosts compare it
    except BaseException:  # the disk is full, say, and the file would name nobody
        path.unlink(missing_ok=True)
        raise


def _owner(path: Path) -> dict[str, object] | None:
    """The owner that the file names; None if `rda train` did not write it."""
    with suppress(OSError):
        owner = json_object(path.read_bytes())
        if owner.get("made_by") == MAKER and {"pid", "host", "since"} <= owner.keys():
            return owner
    return None
