"""Files that are whole or absent, and that never take the place of somebody else's. No torch."""

import os
import secrets
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

MADE_BY = "ring_dilated_attention"  # what pictures say they were made with


def write_whole(path: Path, content: bytes, is_mine: Callable[[bytes], bool], maker: str) -> None:
    """Write a file under another name, flush it to the disk and rename it.

    Args:
        is_mine: whether what a file holds was made by `maker`, so that it may be replaced.

    Raises:
        ValueError: if a file of this name is somebody else's.
        OSError: if it cannot be written, with its path. Nothing is left of it then.
    """
    check_mine(path, is_mine, maker)
    unfinished = path.with_name(f"unfinished-{secrets.token_hex(8)}-{path.name}")
    try:
        try:
            with open(unfinished, "xb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            unfinished.replace(path)
        finally:
            unfinished.unlink(missing_ok=True)
        flush(path.parent)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


@contextmanager
def folder_made(folder: Path) -> Iterator[Path]:
    """Make a folder with its parents. Those that are made, and empty at the end of the block, are removed."""
    made: list[Path] = []
    try:
        for path in (*reversed(folder.parents), folder):
            if path.is_dir():
                continue
            try:
                path.mkdir()
                made.append(path)
            except FileExistsError:
                if not path.is_dir():  # it is no other process's
                    raise
        yield folder
    finally:
        with suppress(OSError):
            for path in reversed(made):
                path.rmdir()


def check_mine(path: Path, is_mine: Callable[[bytes], bool], maker: str) -> None:
    """Raise ValueError if there is a file that may not be replaced."""
    try:
        if not stat.S_ISREG(path.stat().st_mode) and not path.is_dir():
            raise ValueError(f"{path} is in the way: it is no regular file. Move it away, or choose another place.")
        found = path.read_bytes()
    except FileNotFoundError:
        return
    except OSError as error:
        raise ValueError(f"{path} is in the way: {error.strerror}. Move it away, or choose another place.") from error
    if not is_mine(found):
        raise ValueError(
            f"{path} was not made by {maker}, and nothing is written over it. Move it away, or choose another place."
        )


def in_words(error: Exception) -> str:
    """What an error says; one of the system's with its file."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return str(error) or type(error).__name__


class LossyStream:
    """A stream that loses what it cannot write: no progress bar is worth the work whose progress it shows."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.encoding = stream.encoding

    def write(self, text: str) -> int:
        with suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError):
            self._stream.flush()

    def isatty(self) -> bool:
        return self._stream.isatty()

    def fileno(self) -> int:
        return self._stream.fileno()


def is_our_picture(content: bytes) -> bool:
    """A PNG says by what it was made before it says anything else."""
    return MADE_BY.encode() in content[:1024]


def flush(path: Path) -> None:
    """Bring a file or a folder's list of names to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
