"""The options that `rda plan` and `rda plan model` share."""

from argparse import ArgumentParser, Namespace

from ...pattern import DilatedPattern
from ..arguments import MOST_BATCH, positive, sequence_length, within
from ..hardware import add_hardware_options


def add_shared(parser: ArgumentParser) -> None:
    """Add the options for the pattern, the sizes and the hardware."""
    add = parser.add_argument
    add(
        "--seq-len",
        type=sequence_length,
        required=True,
        metavar="N",
        help="positions of the whole sequence",
    )
    per_branch = "one per branch"
    add("--segment-lengths", type=positive, nargs="+", default=(), metavar="W", help=per_branch)
    add("--dilation-rates", type=positive, nargs="+", default=(), metavar="R", help=per_branch)
    add("--window", type=positive, metavar="W", help="a sliding window besides, or alone")
    add(
        "--batch",
        type=within(1, MOST_BATCH),
        default=1,
        metavar="B",
        help="sequences at a time (default 1)",
    )
    add("--json", action="store_true", help="print the figures as JSON")
    add_hardware_options(parser)


def pattern_of(arguments: Namespace, *, is_causal: bool) -> DilatedPattern:
    if arguments.window is None and not arguments.segment_lengths:
        raise ValueError(
            "missing --segment-lengths and --dilation-rates, or --window: rda suggest --seq-len N --heads H "
            "--speedup 50 picks them"
        )
    return DilatedPattern(
        arguments.segment_lengths,
        arguments.dilation_rates,
        window=arguments.window,
        is_causal=is_causal,
    )
