"""The numbers of a command line: reads them as people write them (1M, 64Ki), writes bytes and rates (1.66 GB), and
refuses an option whose number does not fit 64 bits, or whose data this machine cannot hold. No torch."""

import argparse
import math
import re
import sys
from collections.abc import Iterable
from fractions import Fraction

from ..training.machine import physical_bytes
from ..training.options import LARGEST, flag, in_short

DECIMAL = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15}
BINARY = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
# Commas only group thousands. "2048,65536" is refused: a space must separate two numbers.
_NUMBER = re.compile(r"([+-]?(?:\d{1,3}(?:,\d{3})+|\d[\d_]*)(?:\.\d+)?(?:[eE][+-]?\d+)?)\s*([A-Za-z]*)")
_MOST_DIGITS = 400  # beyond any float's digits and exponent; writing out 1e999999999 would take hours
_RULE = (
    "K, M, G, T are powers of 1,000, Ki, Mi, Gi, Ti of 1,024: write 1M, 64Ki, 1e6 or 131,072; set several numbers "
    "apart by spaces"
)
# More ranks, heads or sequences would take minutes and gigabytes before the command prints anything.
MOST_RANKS, MOST_HEADS, MOST_BATCH = 2**20, 2**16, 2**12


def count(text: str) -> int:
    """The whole number of an option: 131072, 131,072, 64Ki, 1M, 1e6. Raises ArgumentTypeError for other texts."""
    number = _parse(text)
    if number.denominator != 1:
        raise argparse.ArgumentTypeError(f"{text!r} is {float(number):g}, not a whole number ({_RULE})")
    return int(number)


def amount(text: str) -> float:
    """The real number of an option, written as for `count`. Raises ArgumentTypeError for other texts."""
    if text.strip().lower() in ("inf", "nan", "-inf"):
        return float(text)
    return float(_parse(text))


def _parse(text: str) -> Fraction:
    found = _NUMBER.fullmatch(text.strip())
    unit = {name.lower(): size for name, size in (DECIMAL | BINARY).items()}.get(found[2].lower()) if found else None
    if found is None or unit is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number ({_RULE})")
    digits, _, exponent = found[1].replace("_", "").replace(",", "").lower().partition("e")
    is_short = len(digits) <= _MOST_DIGITS and len(exponent) <= _MOST_DIGITS and abs(int(exponent or 0)) <= _MOST_DIGITS
    number = Fraction(f"{digits}e{exponent or 0}") * unit if is_short else None
    if number is None or abs(number) > sys.float_info.max:
        raise argparse.ArgumentTypeError(f"{in_short(text.strip())} is beyond {sys.float_info.max:.1e}, or too precise")
    return number


def scaled(value: float, unit: str, *, digits: int = 3) -> str:
    """A quantity with a decimal prefix: 1.66 GB, 500 TFLOP/s."""
    if not math.isfinite(value) or value == 0:
        return f"{value:g} {unit}"
    size, prefix = max(((s, p) for p, s in DECIMAL.items() if abs(value) >= s), default=(1, ""))
    number = value / size
    places = 0 if abs(number) >= 10**digits else max(0, digits - 1 - math.floor(math.log10(abs(number))))
    return f"{number:,.{places}f} {prefix.replace('K', 'k')}{unit}"


def size_text(num_bytes: float) -> str:
    return scaled(num_bytes, "B")


def counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'s' * (number != 1)}"


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
