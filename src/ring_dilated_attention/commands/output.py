"""What commands put out: tables for a terminal, progress bars, and whether a file can be written. No torch."""

import os
import sys
import tempfile
import textwrap
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Any

from ..training.files import LossyStream


def check_writable(option: str, folder: Path, file: str | None = None) -> None:
    """Before the work, so that none is done whose result has no place. Nothing is made yet.

    Raises:
        ValueError: unless new files can be written to a folder, or to where it would be made; or to this file of it.
    """
    path = folder if file is None else folder / file
    try:
        there = next(parent for parent in (folder.absolute(), *folder.absolute().parents) if parent.exists())
        with tempfile.TemporaryFile(dir=there):
            pass
        if file is not None and path.exists():
            os.close(os.open(path, os.O_WRONLY))
    except OSError as error:
        why = "a file is in the way" if isinstance(error, (NotADirectoryError, FileExistsError)) else error.strerror
        raise ValueError(f"{option} {path} cannot be written: {why}. Choose another place.") from error


def aligned(headers: tuple[str, ...], rows: Sequence[tuple[str, ...]], num_left: int = 1) -> str:
    """A table for a terminal, its first columns to the left. Headers may have several lines."""
    tallest = max(header.count("\n") for header in headers)
    tall = [("\n" * (tallest - header.count("\n")) + header).split("\n") for header in headers]
    lines = [*zip(*tall, strict=True), *rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(headers))]
    return "\n".join(
        "  ".join(line[i].ljust(w) if i < num_left else line[i].rjust(w) for i, w in enumerate(widths)).rstrip()
        for line in lines
    )


def wrapped(text: str, width: int = 80) -> str:
    """Lines of words, cut for a terminal; what goes on is indented."""
    found = []
    for line in text.splitlines():
        indent = line[: len(line) - len(line.lstrip())] + "  "
        cut = textwrap.TextWrapper(width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
        found += cut.wrap(line) if len(line) > width else [line]
    return "\n".join(found)


def stepper(bar: Any) -> Callable[[str], None]:
    """Called before each step with its name; the bar counts those that are done."""
    started = False

    def step(text: str) -> None:
        nonlocal started
        if started:
            bar.update()
        started = True
        bar.set_postfix_str(text)

    return step


def progress_bar(total: int, unit: str, *, is_shown: bool = True, delay: float = 0.0) -> Any:
    """A bar on stderr while a context lasts, or none where tqdm is not installed: it is no part of a result. It
    appears with the first update after `delay` seconds."""
    if not is_shown or find_spec("tqdm") is None:
        return _NoBar()
    from tqdm import tqdm

    return tqdm(total=total, unit=unit, file=LossyStream(sys.stderr), dynamic_ncols=True, delay=delay)


class _NoBar:
    """What is used of tqdm, without a bar."""

    def __enter__(self) -> "_NoBar":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def update(self) -> None:
        pass

    def set_postfix_str(self, text: str) -> None:
        pass
