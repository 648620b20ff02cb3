"""What commands show: tables and progress (by rich), wrapped text, numbers with their units. Imports no torch.

rich is imported where it is used, so that `rda --help` works without it. `cli.py` refuses commands if rich is missing.
"""

import math
import sys
import textwrap
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from io import StringIO
from typing import TYPE_CHECKING, Any

from ..training.files import LossyStderr
from .terminal import say

if TYPE_CHECKING:
    from rich.progress import Progress as Bars

UNLIMITED = 10_000  # the width of a table in letters, so large that rich cuts nothing
SECONDS_BETWEEN_LINES = 10.0
PREFIXES = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15}


def table(headers: Sequence[str], rows: Sequence[Sequence[str]], num_left: int = 1) -> str:
    """An aligned table as text. Its first `num_left` columns are left-aligned, the others right-aligned.

    No cell is wrapped or cut.
    """
    from rich.console import Console
    from rich.table import Table

    made = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="")
    for i, header in enumerate(headers):
        made.add_column(header, justify="left" if i < num_left else "right")
    for row in rows:
        made.add_row(*row)
    file = StringIO()
    console = Console(
        file=file, width=UNLIMITED, color_system=None, markup=False, highlight=False, emoji=False
    )
    console.print(made, crop=False)
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines())


def wrapped(text: str) -> str:
    """The text in lines of at most 80 characters. A longer word, such as a path, stays whole; rich would cut it."""
    wrapper = textwrap.TextWrapper(
        80, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
    )
    return "\n".join(wrapper.fill(line) for line in text.splitlines())


@contextmanager
def progress(total: int | None, unit: str) -> "Iterator[Progress]":
    """Shows on stderr how much is done.

    total: how many units are to be done; None if this number is not known. unit: what is counted, in the singular, such
    as "step".
    """
    if not sys.stderr.isatty():
        yield Progress(total, unit)
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        TextColumn,
        TimeRemainingColumn,
    )
    from rich.progress import Progress as Bars

    # Keep rich from taking over sys.stdout. Otherwise rich would send to stderr what a command prints to stdout.
    with Bars(
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn(f"{unit}s"),
        TimeRemainingColumn(),
        TextColumn("{task.description}", markup=False),
        console=Console(file=LossyStderr()),  # type: ignore[arg-type]
        transient=True,
        redirect_stdout=False,
        redirect_stderr=False,
    ) as bars:
        yield Progress(total, unit, bars)


class Progress:
    """Shows progress: on a terminal as a bar, elsewhere as a line every ten seconds, so that a log stays short.

    Call `note` with a text about the unit that is in progress. Then call `update` with the number of units that were
    finished since the last `update`.
    """

    def __init__(self, total: int | None, unit: str, bars: "Bars | None" = None) -> None:
        self.total, self.unit, self.bars = total, unit, bars
        self.done, self.text = 0, ""
        self.began = self.shown = time.monotonic()
        if bars is not None:
            self.task = bars.add_task("", total=total)

    def note(self, text: str) -> None:
        self.text = text

    def update(self, number: int = 1) -> None:
        self.done += number
        now = time.monotonic()
        if self.bars is not None:
            self.bars.update(self.task, completed=self.done, description=self.text)
        elif now - self.shown >= SECONDS_BETWEEN_LINES:
            self.shown = now
            of_all = "" if self.total is None else f" of {self.total:,}"
            words = f"{self.done:,}{of_all} {self.unit}s"
            if self.text:
                words = f"{words} ({self.text})"
            say(f"{words}, {now - self.began:.0f} s")


def scaled(value: float, unit: str) -> str:
    """A quantity in three digits with a decimal prefix: 1.66 GB, 500 TFLOP/s."""
    if not math.isfinite(value) or value == 0:
        return f"{value:g} {unit}"
    prefix = ""
    for name, size in PREFIXES.items():
        if abs(value) >= size:
            prefix = name
    number = value / PREFIXES[prefix]
    places = max(0, 2 - math.floor(math.log10(abs(number))))
    return f"{number:,.{places}f} {prefix}{unit}"


def size_text(num_bytes: float) -> str:
    return scaled(num_bytes, "B")


def as_plain(value: Any) -> Any:
    """The value with every named tuple replaced by a dict, for JSON."""
    if hasattr(value, "_asdict"):
        return {name: as_plain(field) for name, field in value._asdict().items()}
    return [as_plain(each) for each in value] if isinstance(value, (list, tuple)) else value
