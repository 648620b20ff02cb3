"""Pauses Python's garbage collector while many small objects are made. No torch."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_collection() -> Iterator[None]:
    """Turn the garbage collector off inside a `with` block, or while a decorated function runs.

    Plans and counts make no reference cycles, so there is nothing to collect. With the collector on, making a large
    plan takes twice as long.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
