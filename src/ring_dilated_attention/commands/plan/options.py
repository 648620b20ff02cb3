"""What the three commands that plan take alike, and what they refuse before they plan. No torch."""

import argparse
import sys
from collections.abc import Callable
from itertools import accumulate

from ...forecast.compare import Call
from ...kernels.traits import TRAITS
from ...pattern import PHASE_RULES, DilatedPattern
from ...plan.sharding import Shard, shard_length
from ...plan.sizes import Sizes
from ..hardware import ITEMSIZE
from ..limits import MOST_HEADS, MOST_RANKS, check_at_least, check_each, check_ranks_fit
from ..numbers import count


def add_call(parser: argparse.ArgumentParser, *, is_required: bool = True) -> None:
    """Pattern and sizes. is_required: no config can say them."""
    parser.add_argument(
        "--seq-len", type=count, required=is_required, metavar="N", help="positions of the whole sequence"
    )
    parser.add_argument("--ranks", type=count, metavar="P", help="ranks that share it (default 1)")
    parser.add_argument(
        "--segment-lengths", type=count, nargs="+", required=is_required, metavar="W", help="one per branch"
    )
    parser.add_argument(
        "--dilation-rates", type=count, nargs="+", required=is_required, metavar="R", help="one per branch"
    )
    parser.add_argument("--causal", action="store_true", help="a query sees no later key")
    parser.add_argument("--phase", choices=PHASE_RULES, default="modulo", help="which phase a head reads")
    parser.add_argument("--split-heads", action="store_true", help="each branch has heads of its own")
    parser.add_argument("--batch", type=count, default=1, metavar="B", help="sequences at a time (default 1)")
    parser.add_argument("--heads", type=count, metavar="H", help="query heads (default 12)")
    parser.add_argument("--kv-heads", type=count, metavar="G", help="key/value heads (default as many)")
    parser.add_argument("--dtype", choices=ITEMSIZE, default="float32", help="of query, key and value")
    parser.add_argument(
        "--kernel",
        choices=TRAITS,
        default="cpu",
        help="for the memory: what computes (default cpu; triton-fused serves one rank)",
    )
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")


def add_head_dim(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--head-dim", type=count, default=64, metavar="D", help="default 64")


def answered(answer: Callable[[], None]) -> int:
    """The exit code of a command that may refuse."""
    try:
        answer()
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def complete(arguments: argparse.Namespace) -> None:
    """Check the numbers, and take what nobody said as usual."""
    arguments.heads = 12 if arguments.heads is None else arguments.heads
    arguments.kv_heads = arguments.heads if arguments.kv_heads is None else arguments.kv_heads
    for name in ("seq_len", "batch", "head_dim", "align", "memory", "layers", "embed_dim", "ffn_dim", "vocab"):
        if getattr(arguments, name, None) is not None:
            check_at_least(f"--{name.replace('_', '-')}", getattr(arguments, name))
    if arguments.ranks is not None:
        check_at_least("--ranks", arguments.ranks, most=MOST_RANKS)
    check_at_least("--heads", arguments.heads, most=MOST_HEADS)
    check_each("--segment-lengths", arguments.segment_lengths)
    check_each("--dilation-rates", arguments.dilation_rates)


def pattern_of(arguments: argparse.Namespace) -> DilatedPattern:
    pattern = DilatedPattern(
        arguments.segment_lengths,
        arguments.dilation_rates,
        is_causal=arguments.causal,
        phase=arguments.phase,
        heads="split" if arguments.split_heads else "all",
    )
    pattern.check_heads(arguments.heads, arguments.kv_heads)
    return pattern


def call_of(arguments: argparse.Namespace) -> Call:
    """The attention call of all that `add_call` and --head-dim say, checked."""
    complete(arguments)
    pattern, num_ranks = pattern_of(arguments), arguments.ranks or 1
    check_ranks_fit(num_ranks, arguments.seq_len)
    sizes = Sizes(arguments.batch, arguments.head_dim, ITEMSIZE[arguments.dtype])
    return Call(pattern, arguments.seq_len, num_ranks, arguments.heads, arguments.kv_heads, sizes)


def check_shards(shards: tuple[Shard, ...], align: int) -> None:
    """Raise ValueError for ranks that would own nothing."""
    empty = sum(not shard_length(shard) for shard in shards)
    if empty:
        raise ValueError(
            f"--align {align} leaves {empty:,} of {len(shards):,} ranks without positions: choose fewer ranks, or a "
            "smaller --align"
        )


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
        raise ValueError(
            f"--documents are packed into one sequence, so --batch must be 1, got {arguments.batch}. "
            "Leave out --batch; more sequences are more documents."
        )
    if arguments.picture is not None:
        raise ValueError("--picture draws one document; leave out --documents")
    return tuple(accumulate(lengths, initial=0))
