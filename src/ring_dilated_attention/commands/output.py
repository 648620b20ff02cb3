"""Helps commands write: tables, wrapped text, progress bars; checks that packages and places are there. No torch."""

import os
import tempfile
import textwrap
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ..training.files import LossyStderr

WIDTH = 80  # characters of a terminal


def check_writable(option: str, folder: Path, file: str | None = None) -> None:
    """Raise ValueError unless new files, or this file, can be written to a folder. The folder may not exist yet; it is
    not made. Commands call this before their work, so that no work is lost."""
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


def check_installed(packages: Iterable[str], extra: str, who: str = "") -> None:
    """Raise ValueError with the packages that are missing. who: the option that needs them; else it is the command."""
    if missing := [name for name in packages if find_spec(name) is None]:
        raise ValueError(f"{who}needs {', '.join(missing)}: pip install 'ring-dilated-attention[{extra}]'")


def aligned(headers: tuple[str, ...], rows: Sequence[tuple[str, ...]], *, num_left: int = 1) -> str:
    """A table. The first `num_left` columns are flush left, the others right. Headers may have several lines. Columns
    are two spaces apart, or one if only then the table fits a terminal."""
    tallest = max(header.count("\n") for header in headers)
    tall = [("\n" * (tallest - header.count("\n")) + header).split("\n") for header in headers]
    columns = list(zip(*zip(*tall, strict=True), *rows, strict=True))
    for i, cells in enumerate(columns):
        justify, width = str.ljust if i < num_left else str.rjust, max(map(len, cells))
        columns[i] = tuple(justify(cell, width) for cell in cells)
    narrow = sum(1 + len(cells[0]) for cells in columns) - 1
    apart = " " if narrow <= WIDTH < narrow + len(columns) - 1 else "  "
    return "\n".join(apart.join(line).rstrip() for line in zip(*columns, strict=True))


def wrapped(text: str, width: int = WIDTH) -> str:
    """The lines of a text, wrapped for a terminal. Continued lines are indented."""
    found = []
    for line in text.splitlines():
        indent = line[: len(line) - len(line.lstrip())] + "  "
        cut = textwrap.TextWrapper(width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
        found += cut.wrap(line) if len(line) > width else [line]
    return "\n".join(found)


def progress_bar(total: int | None, unit: str, *, delay: float = 0.0) -> Any:
    """A context with a progress bar on stderr; without a bar if tqdm is not installed. The bar appears with the first
    update after `delay` seconds. Bytes ("B") are shown in thousands and so on."""
    if find_spec("tqdm") is None:
        return nullcontext(SimpleNamespace(update=lambda number=1: None, set_postfix_str=lambda text: None))
    from tqdm import tqdm

    is_scaled = unit == "B"
    return tqdm(total=total, unit=unit, file=LossyStderr(), dynamic_ncols=True, delay=delay, unit_scale=is_scaled)
