"""Pauses Python's search for garbage while many small objects are made. No torch."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_collection() -> Iterator[None]:
    """Turn the search off. Plans and counts make no garbage, and the search would double the time of a large plan."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
