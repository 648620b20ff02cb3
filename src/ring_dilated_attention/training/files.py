"""Writes files whole or not at all, and never over a file that somebody else made. Imports no torch."""

import json
import os
import secrets
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

MOST_BYTES = 2**28  # to learn who made a file, read at most this many of its bytes
HEAD_BYTES = 4096  # each file of a run has the run's name in its first HEAD_BYTES bytes


def write_whole(
    path: Path, content: bytes, is_mine: Callable[[BinaryIO], bool], maker: str
) -> None:
    """Write a file, and make its folder if there is none. If writing fails, everything is left as it was.

    Raises ValueError if there is a file at `path` for which is_mine(the open file) is false. maker: the name of the
    program whose files may be replaced; the error message contains this name.
    """
    check_mine(path, is_mine, maker)
    with folder_made(path.parent), named_in_errors(path), replaced(path) as unfinished:
        unfinished.write_bytes(content)


@contextmanager
def named_in_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        error.filename = str(path)
        raise


@contextmanager
def replaced(path: Path) -> Iterator[Path]:
    """Yields the path of a new file to write to. At the end of the block the new file replaces the file at `path`.

    If `path` is a symbolic link, the file that it leads to is replaced.
    """
    place = Path(os.path.realpath(path))
    unfinished = place.with_name(f"unfinished-{secrets.token_hex(8)}-{place.name}")
    try:
        unfinished.touch(exist_ok=False)
        yield unfinished
        # Give the new file the mode of the old file, so that a file that only its owner may read stays private.
        if place.exists():
            unfinished.chmod(stat.S_IMODE(place.stat().st_mode))
        flush(unfinished)
        unfinished.replace(place)
    finally:
        unfinished.unlink(missing_ok=True)
    flush(place.parent)


@contextmanager
def folder_made(folder: Path) -> Iterator[Path]:
    """Make a folder and its parents. At the end of the block new folders are removed if they are empty."""
    made: list[Path] = []
    try:
        for path in (*reversed(folder.parents), folder):
            try:
                path.mkdir()
                made.append(path)
            except OSError:
                if not path.is_dir():  # `mkdir` also raises if the folder exists already
                    raise
        yield folder
    finally:
        with suppress(OSError):
            for path in reversed(made):
                path.rmdir()


def check_mine(path: Path, is_mine: Callable[[BinaryIO], bool], maker: str) -> None:
    """Raise ValueError if a file at `path` may not be replaced: if it cannot be opened, or is_mine(the open file) is
    false.

    maker: the name of the program whose files may be replaced; the error message contains this name.
    """
    remedy = "Move it away, or choose another place."
    try:
        if not stat.S_ISREG(path.stat().st_mode) and not path.is_dir():
            raise ValueError(f"{path} is in the way: it is no regular file. {remedy}")
        with path.open("rb") as file:
            may_go = is_mine(file)
    except FileNotFoundError:
        return
    except OSError as error:
        raise ValueError(f"{path} is in the way: {error.strerror}. {remedy}") from error
    if not may_go:
        raise ValueError(
            f"{path} was not made by {maker}, and nothing is written over it. {remedy}"
        )


def in_words(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return str(error) or type(error).__name__


class LossyStderr:
    """Writes to stderr, and drops text that cannot be written: a progress bar must not end the work that it shows."""

    def __getattr__(self, name: str) -> Any:
        return getattr(sys.stderr, name)

    def write(self, text: str) -> int:
        with suppress(OSError):
            sys.stderr.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError):
            sys.stderr.flush()


def mentions(run: str) -> Callable[[BinaryIO], bool]:
    """Return a function that tells whether an open file belongs to a run.

    run: the name of the run, 32 random hex digits. Each file of the run contains the name in its first HEAD_BYTES
    bytes.
    """
    return lambda file: run.encode() in file.read(HEAD_BYTES)


def json_object(text: str | bytes) -> dict[str, Any]:
    """Parse a text as a JSON object. Returns {} if the text is not a JSON object."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def flush(path: Path) -> None:
    """Flush a file, or a folder's list of names, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
