"""Writes files whole or not at all, and never over a file that somebody else made. The file imports no torch."""

import json
import os
import secrets
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

MOST_BYTES = 2**28  # the most bytes of a file that are read to learn who made it
HEAD_BYTES = 4096  # each file of a run has the run's name in its first HEAD_BYTES bytes


def write_whole(
    path: Path, content: bytes, is_mine: Callable[[BinaryIO], bool], maker: str
) -> None:
    """Write a whole file, and make its folder if there is none. If that fails, all is left as it was.

    A ValueError refuses to replace a file for which is_mine(the open file) is false. maker: who makes such files, for
    the message.
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
    """Yields the path of a new file to write to. At the end this file replaces the file at `path`. If `path` is a
    symbolic link, its target is replaced."""
    place = Path(os.path.realpath(path))
    unfinished = place.with_name(f"unfinished-{secrets.token_hex(8)}-{place.name}")
    try:
        unfinished.touch(exist_ok=False)
        yield unfinished
        # A file that only its owner may read stays so.
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
                if not path.is_dir():  # a folder that was there already is no error
                    raise
        yield folder
    finally:
        with suppress(OSError):
            for path in reversed(made):
                path.rmdir()


def check_mine(path: Path, is_mine: Callable[[BinaryIO], bool], maker: str) -> None:
    """Raise ValueError if there is a file at `path` that may not be replaced: is_mine(the open file) is false, or it
    cannot be opened. maker: who makes files that may be replaced, for the message."""
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
    """Writes to stderr, and drops text that cannot be written: the work is worth more than its progress bar."""

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
    """A function that tells whether an open file belongs to a run. run: the run's name, 32 random letters, which each
    of its files has in the first HEAD_BYTES."""
    return lambda file: run.encode() in file.read(HEAD_BYTES)


def json_object(text: str | bytes) -> dict[str, Any]:
    """The JSON object of a text, or an empty one if the text is anything else."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def flush(path: Path) -> None:
    """Write a file, or a folder's list of names, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
