"""The arguments of a command: reads numbers as people write them (1M, 64Ki), and refuses what cannot be. No torch."""

import argparse
import os
import re
import sys
import tempfile
from collections.abc import Iterable
from decimal import Decimal
from importlib.util import find_spec
from pathlib import Path

from ..training.machine import physical_bytes
from ..training.options import LARGEST, flag, in_short
from .console import size_text

DECIMAL = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15}
BINARY = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
UNITS = {name.lower(): size for name, size in (DECIMAL | BINARY).items()}
# Commas only group thousands. "2048,65536" is refused: a space must separate two numbers.
NUMBER = re.compile(
    r"([+-]?(?:\d{1,3}(?:,\d{3})+|\d[\d_]*)(?:\.\d+)?(?:[eE][+-]?\d+)?)\s*([A-Za-z]*)"
)
RULE = (
    "K, M, G, T are powers of 1,000, Ki, Mi, Gi, Ti of 1,024: write 1M, 64Ki, 1e6 or 131,072; set several numbers "
    "apart by spaces"
)
# More ranks, heads or sequences would take minutes and gigabytes before the command prints anything.
MOST_RANKS, MOST_HEADS, MOST_BATCH = 2**20, 2**16, 2**12


def count(text: str) -> int:
    """The whole number of an option: 131072, 131,072, 64Ki, 1M, 1e6. Raises ArgumentTypeError for other texts."""
    number = _parse(text)
    if number != number.to_integral_value():
        raise argparse.ArgumentTypeError(
            f"{text!r} is {float(number):g}, not a whole number ({RULE})"
        )
    return int(number)


def amount(text: str) -> float:
    """The real number of an option, written as for `count`. Raises ArgumentTypeError for other texts."""
    if text.strip().lower() in ("inf", "nan", "-inf"):
        return float(text)
    return float(_parse(text))


def _parse(text: str) -> Decimal:
    match = NUMBER.fullmatch(text.strip())
    unit = UNITS.get(match[2].lower()) if match else None
    if match is None or unit is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number ({RULE})")
    try:
        digits = Decimal(match[1].replace(",", ""))
        number = digits * unit
    except ArithmeticError:  # an exponent beyond Decimal's
        digits = number = Decimal("inf")
    if digits and not sys.float_info.min <= abs(number) <= sys.float_info.max:
        raise argparse.ArgumentTypeError(
            f"{in_short(text.strip())} is beyond {sys.float_info.max:.1e}, or too small"
        )
    return number


def check_given(arguments: argparse.Namespace, names: Iterable[str], remedy: str) -> None:
    """Raise ValueError with all the options that are missing, if any is."""
    missing = [flag(name) for name in names if getattr(arguments, name) is None]
    if missing:
        raise ValueError(f"missing {', '.join(missing)}: {remedy}")


def check_at_least(option: str, value: int | None, least: int = 1, most: int = LARGEST) -> None:
    """Raise ValueError if an option's number is given, and does not lie from `least` to `most`."""
    if value is not None and value < least:
        raise ValueError(f"{option} must be at least {least}, got {in_short(value)}")
    if value is not None and value > most:
        bits = " (64 bits)" if most == LARGEST else ""
        raise ValueError(f"{option} must be at most {most:,}{bits}, got {in_short(value)}")


def check_seconds(option: str, seconds: float, most: int) -> None:
    if not 0 < seconds <= most:
        raise ValueError(
            f"{option} must be a positive number of seconds, at most {most:,}, got {seconds:g}"
        )


def check_ranks_fit(num_ranks: int, seq_len: int, what: str = "--seq-len") -> None:
    """Raise ValueError if ranks would own no position. The library can run such ranks, but nobody asks for them."""
    if num_ranks > seq_len:
        shared = f"--ranks {num_ranks:,} share the {seq_len:,} positions of {what}"
        without = f"so that {num_ranks - seq_len:,} of them would own none"
        raise ValueError(f"{shared}, {without}: choose at most {seq_len:,} ranks")


def check_memory(what: str, num_bytes: float, remedy: str) -> None:
    """Raise ValueError if `what` does not fit the memory of this machine."""
    memory = physical_bytes()
    if num_bytes > memory:
        machine = f"this machine has {size_text(memory)} of memory"
        raise ValueError(f"{what} {size_text(num_bytes)}, and {machine}: {remedy}")


def check_installed(packages: Iterable[str], extra: str, who: str = "") -> None:
    """Raise ValueError with the packages that are missing. who: the option that needs them; else it is the command."""
    missing = [name for name in packages if find_spec(name) is None]
    if missing:
        raise ValueError(
            f"{who}needs {', '.join(missing)}: pip install 'ring-dilated-attention[{extra}]'"
        )


def check_writable(option: str, folder: Path, file: str | None = None) -> None:
    """Raise ValueError unless new files, or this file, can be written to a folder. The folder may not exist yet; it is
    not made. Commands call this before their work, so that no work is lost."""
    path = folder if file is None else folder / file
    try:
        there = next(
            parent for parent in (folder.absolute(), *folder.absolute().parents) if parent.exists()
        )
        with tempfile.TemporaryFile(dir=there):
            pass
        if file is not None and path.exists():
            os.close(os.open(path, os.O_WRONLY))
    except OSError as error:
        raise ValueError(
            f"{option} {path} cannot be written: {error.strerror}. Choose another place."
        ) from error
