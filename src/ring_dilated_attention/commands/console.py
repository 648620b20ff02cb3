"""What commands show: tables and progress (by rich), wrapped text, and numbers with their units. No torch.

rich is imported where it is used, so that `rda --help` works without it. `cli.py` refuses commands where it is missing.
"""

import math
import shutil
import sys
import textwrap
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from io import StringIO
from typing import TYPE_CHECKING

from ..training.files import LossyStderr
from .terminal import say

if TYPE_CHECKING:
    from rich.progress import Progress

WIDTH = 80  # of wrapped text, in characters
UNLIMITED = 10_000  # the width of a table in a file or a pipe: there nothing is folded
SECONDS_BETWEEN_LINES = 10.0
PREFIXES = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15}


def table(headers: Sequence[str], rows: Sequence[Sequence[str]], num_left: int = 1) -> str:
    """The first `num_left` columns are flush left, and the others right. On a terminal that is too narrow columns move
    together, and those on the left fold between words. Nothing is cut: a table that is still too wide stays so."""
    from rich.cells import cell_len
    from rich.console import Console
    from rich.table import Table

    longest_lines = []  # of each column, in characters
    longest_words = []
    for column in zip(headers, *rows, strict=True):
        text = "\n".join(column)
        longest_lines.append(max(map(cell_len, text.splitlines()), default=0))
        longest_words.append(max(map(cell_len, text.split()), default=0))
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else UNLIMITED
    gap = 2
    if sum(longest_lines) + gap * (len(headers) - 1) > width:
        gap = 1
    least = sum(longest_words[:num_left]) + sum(longest_lines[num_left:]) + gap * len(headers)
    made = Table(box=None, pad_edge=False, padding=(0, gap, 0, 0), header_style="")
    for i, header in enumerate(headers):
        is_left = i < num_left
        made.add_column(
            header,
            justify="left" if is_left else "right",
            no_wrap=not is_left,
            min_width=longest_words[i] if is_left else longest_lines[i],
        )
    for row in rows:
        made.add_row(*row)
    file = StringIO()
    console = Console(
        file=file,
        width=max(width, least),
        color_system=None,
        markup=False,
        highlight=False,
        emoji=False,
    )
    console.print(made, crop=False)
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines())


def wrapped(text: str) -> str:
    """The text in lines of at most 80 characters, or longer ones where a word is longer: rich would cut a path."""
    wrapper = textwrap.TextWrapper(
        WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
    )
    return "\n".join(wrapper.fill(line) for line in text.splitlines())


@contextmanager
def progress(total: int | None, unit: str) -> "Iterator[BarOfRich | LinesOfProgress]":
    """Shows on stderr how much is done: by a bar on a terminal, and elsewhere by a line every ten seconds, so that a
    log stays short. unit: what is counted, in the singular; "B" are bytes. Call `update` with the number of those that
    were done since, and `note` with what is done now."""
    if not sys.stderr.isatty():
        yield LinesOfProgress(total, unit)
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    amount = DownloadColumn() if unit == "B" else MofNCompleteColumn()
    columns = (
        BarColumn(),
        amount,
        TextColumn("" if unit == "B" else f"{unit}s"),
        TimeRemainingColumn(),
    )
    text = TextColumn("{task.description}", markup=False)
    # Not sys.stdout and sys.stderr through the bar: what a command prints for a pipe must stay on stdout.
    console = Console(file=LossyStderr())  # type: ignore[arg-type]
    with Progress(
        *columns,
        text,
        console=console,
        transient=True,
        redirect_stdout=False,
        redirect_stderr=False,
    ) as bars:
        yield BarOfRich(bars, total)


class BarOfRich:
    def __init__(self, bars: "Progress", total: int | None) -> None:
        self.bars = bars
        self.task = bars.add_task("", total=total)

    def update(self, number: int = 1) -> None:
        self.bars.advance(self.task, number)

    def note(self, text: str) -> None:
        self.bars.update(self.task, description=text)


class LinesOfProgress:
    def __init__(self, total: int | None, unit: str) -> None:
        self.total, self.unit = total, unit
        self.done, self.text = 0, ""
        self.began = self.shown = time.monotonic()

    def update(self, number: int = 1) -> None:
        self.done += number
        now = time.monotonic()
        if now - self.shown < SECONDS_BETWEEN_LINES:
            return
        self.shown = now
        words = self._amount(self.done)
        if self.total is not None:
            words = f"{words} of {self._amount(self.total)}"
        if self.unit != "B":
            words = f"{words} {self.unit}s"
        if self.text:
            words = f"{words} ({self.text})"
        say(f"{words}, {now - self.began:.0f} s")

    def note(self, text: str) -> None:
        self.text = text

    def _amount(self, number: int) -> str:
        return size_text(number) if self.unit == "B" else f"{number:,}"


def scaled(value: float, unit: str, *, digits: int = 3) -> str:
    """A quantity with a decimal prefix: 1.66 GB, 500 TFLOP/s."""
    if not math.isfinite(value) or value == 0:
        return f"{value:g} {unit}"
    prefix = ""
    for name, size in PREFIXES.items():
        if abs(value) >= size:
            prefix = name
    number = value / PREFIXES[prefix]
    places = max(0, digits - 1 - math.floor(math.log10(abs(number))))
    return f"{number:,.{places}f} {prefix}{unit}"


def size_text(num_bytes: float) -> str:
    return scaled(num_bytes, "B")


def counted(number: int, noun: str) -> str:
    """1 rank, 2 ranks."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
