"""Defines the options that `rda plan`, `plan model` and `plan compare` share, and checks their values. No torch."""

import argparse
from itertools import accumulate
from typing import Any

from ...forecast.exchanges import UncutJob
from ...kernels.traits import TRAITS
from ...pattern import PHASE_RULES, DilatedPattern
from ...plan.sizes import Sizes
from ...training.options import flag
from ..hardware import ITEMSIZE
from ..numbers import MOST_BATCH, MOST_HEADS, MOST_RANKS, check_at_least, check_given, check_ranks_fit, count

SUGGEST = "rda suggest --seq-len N --heads H --speedup 50 picks segment lengths and rates"


def add_call(parser: argparse.ArgumentParser, *, with_head_dim: bool = True) -> None:
    """Add options of pattern and sizes."""
    add = parser.add_argument
    add("--seq-len", type=count, metavar="N", help="positions of the whole sequence")
    add("--ranks", type=count, metavar="P", help="ranks that share a sequence (default 1)")
    branches: dict[str, Any] = {"type": count, "nargs": "+", "help": "one per branch"}
    add("--segment-lengths", metavar="W", **branches)
    add("--dilation-rates", metavar="R", **branches)
    add("--causal", action="store_true", help="a query sees no later key")
    add("--phase", choices=PHASE_RULES, help="which phase a head reads (default modulo)")
    add("--split-heads", action="store_true", help="each branch has heads of its own")
    add("--batch", type=count, default=1, metavar="B", help="sequences at a time (default 1)")
    add("--heads", type=count, metavar="H", help="query heads (default 12)")
    add("--kv-heads", type=count, metavar="G", help="key/value heads (default as many)")
    add("--dtype", choices=ITEMSIZE, default="float32", help="of query, key and value")
    add("--kernel", choices=TRAITS, default="cpu", help="the kernel whose memory is counted (default cpu)")
    add("--json", action="store_true", help="print the figures as JSON")
    if with_head_dim:
        add("--head-dim", type=count, default=64, metavar="D", help="default 64")


def complete(arguments: argparse.Namespace) -> None:
    """Check the numbers, and fill in the heads that were not given."""
    arguments.heads = 12 if arguments.heads is None else arguments.heads
    arguments.kv_heads = arguments.heads if arguments.kv_heads is None else arguments.kv_heads
    for name in ("seq_len", "head_dim", "align", "memory", "layers", "embed_dim", "ffn_dim", "vocab"):
        check_at_least(flag(name), getattr(arguments, name, None))
    check_at_least("--ranks", arguments.ranks, most=MOST_RANKS)
    check_at_least("--heads", arguments.heads, most=MOST_HEADS)
    check_at_least("--batch", arguments.batch, most=MOST_BATCH)
    for name in ("segment_lengths", "dilation_rates"):  # the pattern checks how small they may be
        check_at_least(flag(name), max([1, *getattr(arguments, name)]))


def pattern_of(arguments: argparse.Namespace) -> DilatedPattern:
    branches = arguments.segment_lengths, arguments.dilation_rates
    phase, heads = arguments.phase or PHASE_RULES[0], "split" if arguments.split_heads else "all"
    pattern = DilatedPattern(*branches, is_causal=arguments.causal, phase=phase, heads=heads)
    pattern.check_heads(arguments.heads, arguments.kv_heads)
    return pattern


def call_of(arguments: argparse.Namespace, *needed: str, remedy: str = SUGGEST) -> UncutJob:
    """The attention call that the options of `add_call` describe, checked. needed: further options."""
    check_given(arguments, ("seq_len", "segment_lengths", "dilation_rates", *needed), remedy)
    complete(arguments)
    pattern, num_ranks = pattern_of(arguments), arguments.ranks or 1
    check_ranks_fit(num_ranks, arguments.seq_len)
    sizes = Sizes(arguments.batch, arguments.head_dim, ITEMSIZE[arguments.dtype])
    return UncutJob(pattern, arguments.seq_len, num_ranks, arguments.heads, arguments.kv_heads, sizes)


def documents_of(arguments: argparse.Namespace) -> tuple[int, ...] | None:
    """The borders of packed documents, checked."""
    lengths = arguments.documents
    if lengths is None:
        return None
    if min(lengths) < 1:
        raise ValueError(f"--documents must be at least 1 each, got {min(lengths)}")
    if sum(lengths) != arguments.seq_len:
        raise ValueError(f"--documents add up to {sum(lengths)}, and --seq-len is {arguments.seq_len}")
    if arguments.batch != 1:
        one = f"--documents are packed into one sequence, so --batch must be 1, got {arguments.batch}"
        raise ValueError(f"{one}. Leave out --batch; more sequences are more documents.")
    if arguments.picture is not None:
        raise ValueError("--picture draws one document; leave out --documents")
    return tuple(accumulate(lengths, initial=0))
