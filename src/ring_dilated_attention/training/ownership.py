"""A run owns its folder: a second run is told who has it. No torch.

The lock is the system's (flock), on a file that says who holds it. It ends with its holder, however that process ends.
On a file system without such locks the file itself is the lock, and a holder that was killed leaves it behind.
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
from .files import folder_made, json_object, named_in_errors

LOCK_FILE = ".rda-train.lock"


@contextmanager
def own_folder(folder: Path, *, must_be_new: bool = False, shares: bool = False) -> Iterator[Path]:
    """Make a folder, if it is not there, and keep every other run out of it. It is removed at the end if it is empty.

    Args:
        must_be_new: if the folder is there already, make one with a number after its name instead.
        shares: a process that this one starts writes, too, and says so with `join_folder`.

    Raises:
        ValueError: if another run has it.
        OSError: if it cannot be made.
    """
    with _new_folder_made(folder) if must_be_new else folder_made(folder) as own:
        lock = _lock(own / LOCK_FILE, fcntl.LOCK_EX)
        try:
            if shares:
                _flock(lock, own / LOCK_FILE, fcntl.LOCK_SH)
            yield own
        finally:
            with suppress(OSError):
                (own / LOCK_FILE).unlink()  # before the lock goes, so that nobody else's is removed
            os.close(lock)


@contextmanager
def join_folder(folder: Path) -> Iterator[None]:
    """The folder stays owned while the block lasts, also if the process that shares it is killed meanwhile."""
    lock = _lock(folder / LOCK_FILE, fcntl.LOCK_SH)
    try:
        yield
    finally:
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


def _lock(path: Path, kind: int) -> int:
    """The descriptor of the locked file. The lock ends when it is closed."""
    while True:
        try:
            descriptor, is_made = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666), True
        except FileExistsError:
            descriptor, is_made = os.open(path, os.O_RDWR | os.O_CREAT, 0o666), False
        try:
            with named_in_errors(path):
                is_locked = _flock(descriptor, path, kind)
                if kind == fcntl.LOCK_EX:
                    if not is_locked and not is_made:
                        raise ValueError(_in_use(path))
                    _sign(descriptor, path)
                with suppress(FileNotFoundError):
                    if os.path.samestat(os.fstat(descriptor), path.stat()):
                        return descriptor
        except BaseException:
            if is_made and kind == fcntl.LOCK_EX:  # on a full disk, say: nobody's, and not signed
                with suppress(OSError):
                    path.unlink()
            os.close(descriptor)
            raise
        os.close(descriptor)  # its last owner removed it just now


def _flock(descriptor: int, path: Path, kind: int) -> bool:
    """Whether the system locked it; False on a file system that has no locks."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise ValueError(_in_use(path)) from error
    except OSError:
        return False
    return True


def _sign(descriptor: int, path: Path) -> None:
    if os.fstat(descriptor).st_size and _owner(path) is None:
        raise ValueError(f"{path} was not made by {MAKER}, and nothing is written over it: move it away")
    owner = {"made_by": MAKER, "pid": os.getpid(), "host": socket.gethostname()}
    os.truncate(descriptor, 0)
    os.write(descriptor, json.dumps(owner | {"since": time.strftime("%Y-%m-%d %H:%M:%S")}).encode())


def _in_use(path: Path) -> str:
    owner = _owner(path)
    who = "another run" if owner is None else "process {pid} on host {host} since {since}".format(**owner)
    return (
        f"{path.parent} is in use by {who}: let it end, or choose another --run-folder. If it is dead already, remove "
        f"{path}"
    )


def _owner(path: Path) -> dict[str, object] | None:
    """What the file says about its owner; None if `rda train` did not write it."""
    with suppress(OSError):
        owner = json_object(path.read_bytes())
        if owner.get("made_by") == MAKER and {"pid", "host", "since"} <= owner.keys():
            return owner
    return None
