"""Reads the numbers in a command's options as people write them (1M, 64Ki). Imports no torch."""

import re
import sys
from argparse import ArgumentTypeError
from collections.abc import Callable, Iterable
from decimal import Decimal
from importlib.util import find_spec

from ..training.options import MAX_INT64, in_short

DECIMAL = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15}
BINARY = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
UNITS = {name.lower(): size for name, size in (DECIMAL | BINARY).items()}
# Matches a number and its unit. Commas may only group thousands. So "2048,65536" does not match: two numbers
# must be separated by a space.
NUMBER = re.compile(
    r"([+-]?(?:\d{1,3}(?:,\d{3})+|\d[\d_]*)(?:\.\d+)?(?:[eE][+-]?\d+)?)\s*([A-Za-z]*)"
)
RULE = (
    "K, M, G, T are powers of 1,000, Ki, Mi, Gi, Ti of 1,024: write 1M, 64Ki, 1e6 or 131,072; set several numbers "
    "apart by spaces"
)
# The largest numbers of ranks, heads and sequences that an option accepts. Larger numbers would take minutes and
# gigabytes before the command prints anything.
MOST_RANKS, MOST_HEADS, MOST_BATCH = 2**20, 2**16, 2**12
MOST_ENTRIES = 2**24  # the largest layer width or vocabulary; a larger number is a typing mistake


def count(text: str) -> int:
    """Read the whole number of an option, such as 131072, 131,072, 64Ki, 1M or 1e6. Raises ArgumentTypeError for other
    texts."""
    number = _parse(text)
    if number != number.to_integral_value():
        raise ArgumentTypeError(f"{text!r} is {float(number):g}, not a whole number ({RULE})")
    return int(number)


def amount(text: str) -> float:
    """Read the real number of an option, in any notation that `count` accepts. Raises ArgumentTypeError for other
    texts."""
    return float(_parse(text))


def _parse(text: str) -> Decimal:
    match = NUMBER.fullmatch(text.strip())
    unit = UNITS.get(match[2].lower()) if match else None
    if match is None or unit is None:
        raise ArgumentTypeError(f"{text!r} is not a number ({RULE})")
    try:
        digits = Decimal(match[1].replace(",", ""))
        number = digits * unit
    except ArithmeticError:  # the exponent is too large for Decimal
        digits = number = Decimal("inf")
    if digits and not sys.float_info.min <= abs(number) <= sys.float_info.max:
        raise ArgumentTypeError(
            f"{in_short(text.strip())} is beyond {sys.float_info.max:.1e}, or too small"
        )
    return number


def within(least: int, most: int = MAX_INT64) -> Callable[[str], int]:
    """Return a function for argparse's `type=`. It reads a whole number, and refuses one below `least` or above
    `most`."""

    def count_within(text: str) -> int:
        number = count(text)
        if number < least:
            raise ArgumentTypeError(f"must be at least {least}, got {in_short(number)}")
        if number > most:
            raise ArgumentTypeError(f"must be at most {most:,}, got {in_short(number)}")
        return number

    return count_within


positive = within(1)
sequence_length = within(1, 2**44)  # the byte counts of longer sequences might not fit 64 bits


def check_installed(packages: Iterable[str], extra: str, who: str = "") -> None:
    """Raise a ValueError if one of the packages is not installed. The message says how to install it with pip.

    extra: the extra of this package (pip install 'ring-dilated-attention[extra]') that installs the packages. who: the
    option that needs the packages, followed by a space, such as "--picture "; "" if the whole command needs them.
    """
    missing = [name for name in packages if find_spec(name) is None]
    if missing:
        raise ValueError(
            f"{who}needs {', '.join(missing)}: pip install 'ring-dilated-attention[{extra}]'"
        )
