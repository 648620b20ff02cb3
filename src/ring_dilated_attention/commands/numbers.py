"""Reads numbers as people write them on a command line (1M, 64Ki), and writes bytes and rates (1.66 GB)."""

import argparse
import math
import re
import sys
from fractions import Fraction

from ..training.options import in_short

DECIMAL = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15}
BINARY = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
# Commas only group thousands. "2048,65536" is refused: a space must separate two numbers.
_NUMBER = re.compile(r"([+-]?(?:\d{1,3}(?:,\d{3})+|\d[\d_]*)(?:\.\d+)?(?:[eE][+-]?\d+)?)\s*([A-Za-z]*)")
_MOST_DIGITS = 400  # beyond any float's digits and exponent; writing out 1e999999999 would take hours
_RULE = (
    "K, M, G, T are powers of 1,000, Ki, Mi, Gi, Ti of 1,024: write 1M, 64Ki, 1e6 or 131,072; set several numbers "
    "apart by spaces"
)


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
