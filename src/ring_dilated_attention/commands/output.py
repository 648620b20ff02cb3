"""Tables, text and progress bars, until `rda plan`, `rda suggest` and the benchmarks take those of `console.py`."""

import textwrap
from collections.abc import Sequence
from contextlib import nullcontext
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

from ..training.files import LossyStderr
from .arguments import check_installed as check_installed
from .arguments import check_writable as check_writable

WIDTH = 80  # characters of a terminal


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
