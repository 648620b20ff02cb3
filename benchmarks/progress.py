"""What is measured now, on stderr: one line of a terminal, or else a line every ten seconds at most."""

import sys
import time
from collections.abc import Callable

SECONDS = 10


def stepper(name: str) -> Callable[[str], None]:
    """A function that is called with what comes next."""
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
