"""What numbers a command takes: what fits 64 bits, and what this machine can hold. No torch."""

import math
import os
from collections.abc import Iterable

from ..training.options import in_short

LARGEST = 2**63 - 1
# More would take minutes and gigabytes before anything is said.
MOST_RANKS, MOST_HEADS = 2**20, 2**16


def check_at_least(option: str, value: int, least: int = 1, most: int = LARGEST) -> None:
    """Raise ValueError unless an option's number lies between."""
    if value < least:
        raise ValueError(f"{option} must be at least {least}, got {in_short(value)}")
    if value > most:
        raise ValueError(f"{option} must be at most {most:,}{' (64 bits)' * (most == LARGEST)}, got {in_short(value)}")


def check_each(option: str, values: Iterable[int], most: int = LARGEST) -> None:
    """The same of every number of a list; how small they may be is the pattern's to say."""
    for value in values:
        check_at_least(option, value, least=-LARGEST, most=most)


def check_ranks_fit(num_ranks: int, seq_len: int, what: str = "--seq-len") -> None:
    """The library serves ranks that own nothing; who asks a command for them has mistaken one number for another."""
    if num_ranks > seq_len:
        raise ValueError(
            f"--ranks {num_ranks:,} share the {seq_len:,} positions of {what}, so that {num_ranks - seq_len:,} of "
            f"them would own none: choose at most {seq_len:,} ranks"
        )


def check_memory(what: str, num_bytes: float, remedy: str) -> None:
    """Raise ValueError if something does not fit the memory of this machine."""
    there = physical_bytes()
    if num_bytes > there:
        raise ValueError(
            f"{what} {in_gigabytes(num_bytes)}, and this machine has {in_gigabytes(there)} of memory: {remedy}"
        )


def physical_bytes() -> float:
    """The memory of this machine; infinite where the system does not say."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return math.inf


def in_gigabytes(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:,.1f} GB" if num_bytes < 1e15 else f"{num_bytes / 1e9:.1e} GB"
