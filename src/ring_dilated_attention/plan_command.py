"""`rda plan`: what each rank would compute, send and hold, without computing, sending or holding it. No torch."""

import argparse
import json
import sys
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from .estimate import KERNELS, AttentionMemory, attention_memory
from .pattern import PHASE_RULES, DilatedPattern
from .plan import Plan
from .planner import make_plan
from .sharding import SHARDINGS, Shard, default_lengths, make_shards

ITEMSIZE = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
# More ranks than this are shown by their extremes only.
MOST_ROWS = 16
MOST_COMPARED = 64

EXAMPLES = """examples:
  rda plan --seq-len 1048576 --ranks 8 --segment-lengths 2048 65536 1048576 --dilation-rates 1 16 256
        which branches stay at home and which travel: with shards of 131,072 positions only the longest one does
  rda plan --seq-len 131072 --ranks 4 --segment-lengths 131072 --dilation-rates 1 --causal
        dense ring attention; the last rank has seven times the work of the first
  rda plan --seq-len 131072 --ranks 4 --segment-lengths 131072 --dilation-rates 1 --causal --sharding zigzag
        the same, balanced
  rda plan --seq-len 65536 --ranks 2 --segment-lengths 2048 65536 --dilation-rates 1 16 --picture docs
        also draws the pattern and the ring

One attention call, forward and backward. FLOPs count the pairs of the pattern (2 products forward, 5 backward); memory
counts the rank's query, key, value and out, their gradients, the buffers of the ring and the kernel's partials.
"""


class RankRow(NamedTuple):
    """One rank's share of a call, forward and backward."""

    rank: int
    positions: int
    flops: int
    share: float
    forward_sent_bytes: int
    sent_bytes: int
    forward_peak_bytes: int
    peak_bytes: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EXAMPLES
    parser.add_argument("--seq-len", type=int, required=True, metavar="N", help="positions of the whole sequence")
    parser.add_argument("--ranks", type=int, default=1, metavar="P", help="ranks that share it (default 1)")
    parser.add_argument("--segment-lengths", type=int, nargs="+", required=True, metavar="W", help="one per branch")
    parser.add_argument("--dilation-rates", type=int, nargs="+", required=True, metavar="R", help="one per branch")
    parser.add_argument("--causal", action="store_true", help="a query sees no later key")
    parser.add_argument("--phase", choices=PHASE_RULES, default="modulo", help="which phase a head reads")
    parser.add_argument("--split-heads", action="store_true", help="each branch has heads of its own")
    parser.add_argument("--batch", type=int, default=1, metavar="B", help="sequences at a time (default 1)")
    parser.add_argument("--heads", type=int, default=12, metavar="H", help="query heads (default 12)")
    parser.add_argument("--kv-heads", type=int, metavar="G", help="key/value heads (default as many)")
    parser.add_argument("--head-dim", type=int, default=64, metavar="D", help="default 64")
    parser.add_argument("--dtype", choices=ITEMSIZE, default="float32", help="of query, key and value")
    parser.add_argument(
        "--kernel",
        choices=KERNELS,
        default=KERNELS[0],
        help="for the memory: composed of torch's (default), Triton's in place, or fused (one rank)",
    )
    parser.add_argument("--sharding", choices=SHARDINGS, default="contiguous", help="who owns which positions")
    parser.add_argument("--align", type=int, default=1, metavar="A", help="borders of shards at multiples of it")
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")
    parser.add_argument("--picture", type=Path, metavar="DIR", help="draw the pattern and the ring into a folder")


def run(arguments: argparse.Namespace) -> int:
    try:
        pattern = pattern_of(arguments)
        check_positive(arguments)
        plans = make_plans(pattern, split(arguments, arguments.seq_len), arguments)
        memories = [memory_of(plan, arguments) for plan in plans]
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    rows = rank_rows(plans, memories, arguments)
    # Planning many ranks twice more takes minutes, and the comparison says little new there.
    compared = compare_shardings(pattern, arguments) if 1 < arguments.ranks <= MOST_COMPARED else []
    if arguments.json:
        print(json.dumps(as_json(rows, memories) | {"shardings": [row._asdict() for row in compared]}, indent=1))
    else:
        print(pattern.explain(arguments.heads))
        print(table(rows))
        print(summary(rows, memories))
        if compared:
            print(sharding_lines(compared))
    if arguments.picture is not None:
        from .figures import draw

        shards_of = partial(split, arguments)
        for path in draw(arguments.picture, pattern, arguments.seq_len, arguments.heads, shards_of):
            print(path, file=sys.stderr)
    return 0


def pattern_of(arguments: argparse.Namespace) -> DilatedPattern:
    return DilatedPattern(
        arguments.segment_lengths,
        arguments.dilation_rates,
        is_causal=arguments.causal,
        phase=arguments.phase,
        heads="split" if arguments.split_heads else "all",
    )


def check_positive(arguments: argparse.Namespace) -> None:
    for name in ("seq_len", "ranks", "batch", "heads", "head_dim", "align"):
        if getattr(arguments, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(arguments, name)}")
    if arguments.sharding == "zigzag" and arguments.align != 1:
        raise ValueError(f"--align {arguments.align} is for contiguous shards; zigzag's are near-equal")


def split(arguments: argparse.Namespace, seq_len: int) -> tuple[Shard, ...]:
    """The default split of a sequence, as `ContextParallel` makes it."""
    return make_shards(
        arguments.sharding, default_lengths(arguments.sharding, seq_len, arguments.ranks, arguments.align)
    )


def make_plans(pattern: DilatedPattern, shards: tuple[Shard, ...], arguments: argparse.Namespace) -> list[Plan]:
    """Every rank's plan. A ring of a thousand ranks takes a moment for each, so that many show their progress."""
    from tqdm import tqdm

    num_kv_heads = arguments.heads if arguments.kv_heads is None else arguments.kv_heads
    ranks = tqdm(range(len(shards)), unit="rank", file=sys.stderr, disable=len(shards) <= MOST_ROWS)
    return [make_plan(pattern, shards, rank, arguments.heads, num_kv_heads) for rank in ranks]


def memory_of(plan: Plan, arguments: argparse.Namespace) -> AttentionMemory:
    itemsize = ITEMSIZE[arguments.dtype]
    return attention_memory(plan, arguments.batch, arguments.head_dim, itemsize, kernel=arguments.kernel)


def rank_rows(plans: list[Plan], memories: list[AttentionMemory], arguments: argparse.Namespace) -> list[RankRow]:
    batch, head_dim, itemsize = arguments.batch, arguments.head_dim, ITEMSIZE[arguments.dtype]
    flops = [sum(plan.flops(batch, head_dim, backward=backward) for backward in (False, True)) for plan in plans]
    rows = []
    for plan, memory, work in zip(plans, memories, flops, strict=True):
        sent = [plan.bytes_sent(batch, head_dim, itemsize, backward=backward) for backward in (False, True)]
        rows.append(
            RankRow(
                rank=plan.rank,
                positions=plan.num_rows,
                flops=work,
                share=work / sum(flops) if sum(flops) else 0.0,
                forward_sent_bytes=sent[0],
                sent_bytes=sum(sent),
                forward_peak_bytes=memory.forward.num_bytes,
                peak_bytes=memory.forward_backward.num_bytes,
            )
        )
    return rows


def balance(rows: list[RankRow]) -> float:
    """Mean work over the largest: the efficiency that the distribution of work allows."""
    largest = max(row.flops for row in rows)
    return sum(row.flops for row in rows) / (len(rows) * largest) if largest else 1.0


class ShardingRow(NamedTuple):
    """One way of dealing positions to ranks: the mean work over the largest, and the largest number of bytes sent."""

    sharding: str
    balance: float
    sent_bytes: int


def compare_shardings(pattern: DilatedPattern, arguments: argparse.Namespace) -> list[ShardingRow]:
    """Every sharding of the same sequence, the best first: neither is always better (DESIGN: w = 0.6 n on 4 ranks)."""
    found = []
    for sharding in SHARDINGS:
        lengths = default_lengths(sharding, arguments.seq_len, arguments.ranks)
        plans = make_plans(pattern, make_shards(sharding, lengths), arguments)
        arguments_of = (arguments.batch, arguments.head_dim, ITEMSIZE[arguments.dtype])
        sent = max(sum(plan.bytes_sent(*arguments_of, backward=b) for b in (False, True)) for plan in plans)
        pairs = [plan.pairs for plan in plans]
        found.append(ShardingRow(sharding, sum(pairs) / (len(pairs) * max(pairs)) if max(pairs) else 1.0, sent))
    return sorted(found, key=lambda row: (-round(row.balance, 3), row.sent_bytes))


def sharding_lines(found: list[ShardingRow]) -> str:
    listed = ", ".join(
        f"{row.sharding} {row.balance:.1%} ({row.sent_bytes / 1e6:,.1f} MB sent at most)" for row in found
    )
    return f"balance by sharding, near-equal: {listed}: {found[0].sharding} is the better one here"


def table(rows: list[RankRow]) -> str:
    shown = rows
    if len(rows) > MOST_ROWS:
        extremes = {min(rows, key=key) for key in _KEYS} | {max(rows, key=key) for key in _KEYS}
        shown = sorted({rows[0], rows[-1]} | extremes)
    lines: list[tuple[str, ...]] = [
        ("rank", "positions", "GFLOP", "share", "sent forward", "sent", "peak forward", "peak")
    ]
    for row in shown:
        sizes = (row.forward_sent_bytes, row.sent_bytes, row.forward_peak_bytes, row.peak_bytes)
        lines.append(
            (
                str(row.rank),
                f"{row.positions:,}",
                f"{row.flops / 1e9:,.1f}",
                f"{row.share:.1%}",
                *(f"{size / 1e6:,.1f} MB" for size in sizes),
            )
        )
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    text = "\n".join("  ".join(cell.rjust(width) for cell, width in zip(x, widths, strict=True)) for x in lines)
    return text if shown is rows else f"{text}\n({len(rows)} ranks; shown are the first, the last and the extremes)"


_KEYS = (lambda row: row.flops, lambda row: row.sent_bytes, lambda row: row.peak_bytes)


def summary(rows: list[RankRow], memories: list[AttentionMemory]) -> str:
    """Balance, and what the rank with the largest peak holds then."""
    largest = max(rows, key=lambda row: row.peak_bytes)
    items = memories[largest.rank].forward_backward.items
    lines = [f"balance: {balance(rows):.1%} (mean work over the largest)", f"rank {largest.rank} holds at its peak:"]
    return "\n".join(lines + [f"  {item.num_bytes / 1e6:>12,.1f} MB  {item.name}" for item in items])


def as_json(rows: list[RankRow], memories: list[AttentionMemory]) -> dict[str, Any]:
    return {
        "balance": balance(rows),
        "ranks": [
            row._asdict() | {"peak_items": [item._asdict() for item in memory.forward_backward.items]}
            for row, memory in zip(rows, memories, strict=True)
        ],
    }
