"""Pauses Python's search for garbage while many small objects are made. No torch."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_collection() -> Iterator[None]:
    """Plans and counts make no garbage. The search would double the time of a large plan, and still take a tenth of it
    if it came once, afterwards: so all that was made counts as old, which Python searches least."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            if not gc.get_freeze_count():  # unfreezing would bring back what others had frozen
                gc.freeze()
                gc.unfreeze()
            gc.enable()
