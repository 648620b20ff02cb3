"""Defines the options that `rda plan` and `rda plan model` share, and checks their values."""

import argparse
from typing import Any

from ...pattern import PHASE_RULES, DilatedPattern
from ...training.options import flag
from ..arguments import MOST_BATCH, MOST_HEADS, check_at_least, count
from ..hardware import ITEMSIZE, add_hardware_options

MOST_ENTRIES = 2**24  # of a width, or of a vocabulary: more is a typing mistake
SUGGEST = "rda suggest --seq-len N --heads H --speedup 50 picks segment lengths and rates"


def add_shared(parser: argparse.ArgumentParser) -> None:
    """Add options of pattern, sizes and hardware."""
    add = parser.add_argument
    add("--seq-len", type=count, metavar="N", help="positions of the whole sequence")
    branches: dict[str, Any] = {"type": count, "nargs": "+", "help": "one per branch"}
    add("--segment-lengths", metavar="W", **branches)
    add("--dilation-rates", metavar="R", **branches)
    add("--window", type=count, metavar="W", help="a sliding window besides, or alone")
    add("--phase", choices=PHASE_RULES, help="which phase a head reads (default modulo)")
    add("--split-heads", action="store_true", help="each branch has heads of its own")
    add("--batch", type=count, default=1, metavar="B", help="sequences at a time (default 1)")
    add("--heads", type=count, metavar="H", help="query heads (default 12)")
    add("--kv-heads", type=count, metavar="G", help="key/value heads (default as many)")
    add("--dtype", choices=ITEMSIZE, help="default: that of --hardware, or float32")
    add("--json", action="store_true", help="print the figures as JSON")
    add_hardware_options(parser)


def complete(arguments: argparse.Namespace) -> None:
    """Check the numbers, and fill in the heads that were not given."""
    if arguments.heads is None:
        arguments.heads = 12
    if arguments.kv_heads is None:
        arguments.kv_heads = arguments.heads
    for name in ("seq_len", "head_dim"):
        check_at_least(flag(name), getattr(arguments, name, None))
    for name in ("layers", "embed_dim", "ffn_dim", "vocab"):
        check_at_least(flag(name), getattr(arguments, name, None), most=MOST_ENTRIES)
    check_at_least("--heads", arguments.heads, most=MOST_HEADS)
    check_at_least("--batch", arguments.batch, most=MOST_BATCH)
    for name in ("segment_lengths", "dilation_rates"):  # the pattern checks how small they may be
        check_at_least(flag(name), max([1, *(getattr(arguments, name) or ())]))


def needed_of_pattern(arguments: argparse.Namespace) -> tuple[str, ...]:
    """The options that a pattern needs: none beside a window."""
    return () if arguments.window is not None else ("segment_lengths", "dilation_rates")


def pattern_of(arguments: argparse.Namespace, *, is_causal: bool) -> DilatedPattern:
    pattern = DilatedPattern(
        arguments.segment_lengths or (),
        arguments.dilation_rates or (),
        window=arguments.window,
        is_causal=is_causal,
        phase=arguments.phase or PHASE_RULES[0],
        heads="split" if arguments.split_heads else "all",
    )
    pattern.check_heads(arguments.heads, arguments.kv_heads)
    return pattern
