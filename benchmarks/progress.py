"""Prints to stderr what is measured now. A terminal shows it in one line. A file gets at most a line in ten seconds."""

import sys
import time
from collections.abc import Callable

SECONDS = 10


def stepper(name: str) -> Callable[[str], None]:
    """A function that prints a text: it is called before each measurement, with a name of this measurement."""
    last = 0.0

    def step(text: str) -> None:
        nonlocal last
        line = f"{name}: {text}"
        if sys.stderr.isatty():
            print(f"\r{line[:79]:<79}", end="", file=sys.stderr, flush=True)
        elif time.monotonic() > last + SECONDS:
            last = time.monotonic()
            print(line, file=sys.stderr, flush=True)

    return step
