"""What `rda plan` refuses before it plans, and what it takes where nothing is said. No torch."""

import argparse
from importlib.util import find_spec

from ..pattern import DilatedPattern
from ..plan.sharding import Shard, shard_length
from .figures import check_pictures
from .limits import LARGEST, MOST_HEADS, MOST_RANKS, check_at_least, check_each, check_memory
from .output import check_writable

BYTES_PER_HOP = 2_000  # 1,024 ranks that share a segment took 2.1 GB


def complete(arguments: argparse.Namespace) -> None:
    """What stands neither on the command line nor in a config."""
    if arguments.heads is None:
        arguments.heads = 12
    if arguments.head_dim is None:
        arguments.head_dim = 64
    for name in ("seq_len", "segment_lengths", "dilation_rates"):
        if getattr(arguments, name) is None:
            raise ValueError(f"--{name.replace('_', '-')} is missing")


def check_together(arguments: argparse.Namespace, *, is_model: bool) -> None:
    """Refuse what would be read by nobody."""
    if not is_model:
        only = [name for name in ("mesh", "ffn_dim", "vocab", "tokens") if getattr(arguments, name) is not None]
        if arguments.memory is not None and not arguments.alternatives:
            only.append("memory")
        if only:
            raise ValueError(f"{_flags(only)}: of a whole model only; add --layers and --embed-dim, or --config")
    elif arguments.tokens is not None and arguments.hardware is None and arguments.flops is None:
        raise ValueError("--tokens asks for a time: give --hardware, or --flops and --bandwidth")
    if is_model or arguments.alternatives:
        neutral = {"exchange": "auto", "align": 1, "picture": None, "documents": None}
        only_of_calls = {"head_dim": None, "alternatives": False, "every_rank": False}
        neutral |= only_of_calls if is_model else {"sharding": "contiguous"}
        foreign = [name for name, value in neutral.items() if getattr(arguments, name) != value]
        if foreign and is_model:
            raise ValueError(f"{_flags(foreign)}: of one attention call, and not of a model; leave it out")
        if foreign:
            raise ValueError(f"{_flags(foreign)}: --alternatives compares all of one document, as tables; leave it out")


def _flags(names: list[str]) -> str:
    return ", ".join(f"--{name.replace('_', '-')}" for name in names)


def check_numbers(arguments: argparse.Namespace) -> None:
    for name in ("seq_len", "batch", "head_dim", "align", "memory", "layers", "embed_dim", "ffn_dim", "vocab"):
        if getattr(arguments, name) is not None:
            check_at_least(f"--{name.replace('_', '-')}", getattr(arguments, name))
    if arguments.tokens is not None and not 1 <= arguments.tokens <= LARGEST:
        raise ValueError(f"--tokens must be from 1 to {LARGEST:,}, got {arguments.tokens:g}")
    if arguments.ranks is not None:
        check_at_least("--ranks", arguments.ranks, most=MOST_RANKS)
    check_at_least("--heads", arguments.heads, most=MOST_HEADS)
    check_each("--segment-lengths", arguments.segment_lengths)
    check_each("--dilation-rates", arguments.dilation_rates)
    if arguments.sharding == "zigzag" and arguments.align != 1:
        raise ValueError(f"--align {arguments.align} is for contiguous shards; zigzag's are near-equal")


def check_shards(shards: tuple[Shard, ...], align: int) -> None:
    """Raise ValueError for ranks that would own nothing."""
    empty = sum(not shard_length(shard) for shard in shards)
    if empty:
        raise ValueError(
            f"--align {align} leaves {empty:,} of {len(shards):,} ranks without positions: choose fewer ranks, or a "
            "smaller --align"
        )


def check_documents(arguments: argparse.Namespace) -> None:
    lengths = arguments.documents
    if lengths is None:
        return
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


def check_picture(arguments: argparse.Namespace) -> None:
    """Before the work, which may take minutes."""
    if arguments.picture is None:
        return
    if find_spec("matplotlib") is None:
        raise ValueError("--picture needs matplotlib: pip install matplotlib")
    check_writable("--picture", arguments.picture)
    check_pictures(arguments.picture)


def check_work(pattern: DilatedPattern, arguments: argparse.Namespace) -> None:
    """Raise ValueError if the plans of all ranks would not fit the memory."""
    largest_shard = -(-arguments.seq_len // arguments.ranks)
    # How many ranks share a segment of each branch that no shard holds.
    shared = [-(-w // largest_shard) for w in pattern.segment_lengths if w > largest_shard]
    num_hops = arguments.ranks * sum(min(arguments.ranks, number) for number in shared)
    check_memory(
        f"the plans of {arguments.ranks:,} ranks have about {num_hops:,} hops, which take",
        num_hops * BYTES_PER_HOP,
        "plan fewer --ranks, or one of many with python -m benchmarks.slice --plan",
    )
