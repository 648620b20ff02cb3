"""Refuses an option whose number does not fit 64 bits, or whose data this machine cannot hold. No torch."""

import argparse
from collections.abc import Iterable

from ..training.machine import physical_bytes
from ..training.options import LARGEST, flag, in_short
from .numbers import size_text

# More ranks, heads or sequences would take minutes and gigabytes before the command prints anything.
MOST_RANKS, MOST_HEADS, MOST_BATCH = 2**20, 2**16, 2**12


def check_given(arguments: argparse.Namespace, names: Iterable[str], remedy: str) -> None:
    """Raise ValueError with all the options that are missing, if any is."""
    if missing := [flag(name) for name in names if getattr(arguments, name) is None]:
        raise ValueError(f"missing {', '.join(missing)}: {remedy}")


def check_at_least(option: str, value: int | None, least: int = 1, most: int = LARGEST) -> None:
    """Raise ValueError if an option's number is given, and does not lie from `least` to `most`."""
    if value is not None and value < least:
        raise ValueError(f"{option} must be at least {least}, got {in_short(value)}")
    if value is not None and value > most:
        raise ValueError(f"{option} must be at most {most:,}{' (64 bits)' * (most == LARGEST)}, got {in_short(value)}")


def check_seconds(option: str, seconds: float, most: int) -> None:
    if not 0 < seconds <= most:
        raise ValueError(f"{option} must be a positive number of seconds, at most {most:,}, got {seconds:g}")


def check_ranks_fit(num_ranks: int, seq_len: int, what: str = "--seq-len") -> None:
    """Raise ValueError if ranks would own no position. The library can run such ranks, but nobody asks for them."""
    if num_ranks > seq_len:
        shared = f"--ranks {num_ranks:,} share the {seq_len:,} positions of {what}"
        without = f"so that {num_ranks - seq_len:,} of them would own none"
        raise ValueError(f"{shared}, {without}: choose at most {seq_len:,} ranks")


def check_memory(what: str, num_bytes: float, remedy: str) -> None:
    """Raise ValueError if `what` does not fit the memory of this machine."""
    if num_bytes > (there := physical_bytes()):
        machine = f"this machine has {size_text(there)} of memory"
        raise ValueError(f"{what} {size_text(num_bytes)}, and {machine}: {remedy}")
