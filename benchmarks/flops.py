"""How much of the possible speed-up over dense attention is reached (NATTEN's measure).

A pattern needs fewer FLOPs than dense attention, say a quarter. Then it could be 4 times as fast. If it is 3 times as
fast, its share is 75%:

    share = (time of dense / our time) * (our FLOPs / FLOPs of dense)

Dense is torch's attention at the same length.

Torch's causal CPU kernel computes whole blocks of 512 keys, also the parts of blocks that the mask hides. In short
segments this loss is greater than in dense attention. It is computed from the plan, and has a column of its own.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from ring_dilated_attention.kernels.traits import KEY_BLOCK, query_block
from ring_dilated_attention.pattern import DilatedPattern
from ring_dilated_attention.plan import sight
from ring_dilated_attention.plan.plan import Plan
from ring_dilated_attention.plan.planner import make_plan
from ring_dilated_attention.plan.sharded_call import ShardedCall
from ring_dilated_attention.plan.sharding import make_shards

from .gate import gate
from .measure import (
    Sizes,
    Times,
    by_turns,
    call_json,
    dense_call,
    dilated_call,
    quantiles,
    seconds_of,
)
from .record import branches, markdown, seconds, tensors

SUMMARY = "share of the FLOP-bound speed-up over dense attention"
MINUTES = 5


class Settings(NamedTuple):
    sizes: Sizes = Sizes(seq_len=16_384, num_heads=12, head_dim=64)
    branches: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...] = (
        ((2048, 4096), (1, 2)),
        ((2048, 4096, 8192, 16384), (1, 2, 4, 8)),
    )
    repeats: int = 5


FULL = Settings()
QUICK = Settings(Sizes(1024, 2, 32), (((256, 512), (1, 2)),), 2)


def target(num_branches: int, stage: str, *, is_causal: bool) -> float:
    if is_causal:
        return 0.80
    if num_branches > 2:
        return 0.95
    return 0.98 if stage == "forward" else 0.97


def run(settings: Settings, step: Callable[[str], None]) -> list[dict[str, Any]]:
    rows = []
    for is_causal in (False, True):
        patterns = {
            str(pair): DilatedPattern(*pair, is_causal=is_causal) for pair in settings.branches
        }
        gates = {name: gate(settings.sizes, pattern) for name, pattern in patterns.items()}
        calls = {"dense": dense_call(settings.sizes, is_causal=is_causal)}
        for name, pattern in patterns.items():
            calls[name] = dilated_call(settings.sizes, pattern)
        times = by_turns(calls, settings.repeats, step)
        for name, pattern in patterns.items():
            rows += _rows(settings.sizes, pattern, times["dense"], times[name], gates[name])
    return rows


def _rows(
    sizes: Sizes,
    pattern: DilatedPattern,
    dense: list[Times],
    ours: list[Times],
    passed: dict[str, Any],
) -> list[dict[str, Any]]:
    """Two rows: one for the forward, one for forward and backward."""
    plan = _plan(pattern, sizes)
    dense_plan = _plan(DilatedPattern((sizes.seq_len,), (1,), is_causal=pattern.is_causal), sizes)
    ratio = plan.pairs / dense_plan.pairs
    rounding = computed_pairs(plan) / plan.pairs
    dense_rounding = computed_pairs(dense_plan) / dense_plan.pairs
    # the share if whole blocks of keys were the only loss
    kept = dense_rounding / rounding
    rows = []
    for stage in ("forward", "forward + backward"):
        dense_seconds, seconds = seconds_of(dense, stage), seconds_of(ours, stage)
        share = quantiles(
            ratio * theirs / own for theirs, own in zip(dense_seconds, seconds, strict=True)
        )
        row = {
            **call_json(sizes, pattern),
            "stage": stage,
            "flop_bound_speed_up": 1 / ratio,
            "seconds": quantiles(seconds),
            "dense_seconds": quantiles(dense_seconds),
            "share": share,
            "lost_to_rounding": 1 - kept,
            "share_without_rounding": share["median"] / kept,
            "target": target(len(pattern.branches), stage, is_causal=pattern.is_causal),
            "gate": passed,
        }
        rows.append(row)
    return rows


def computed_pairs(plan: Plan) -> int:
    """The number of (query, key) pairs that torch's CPU kernel computes for a plan.

    A tile is a block of queries x keys. In a causal tile the kernel computes whole blocks of keys.
    """
    total = 0
    for tile in [*plan.local, *(tile for hop in plan.hops for tile in hop.tiles)]:
        if tile.mask != sight.FULL:
            total += causal_pairs(tile.query.num_rows) * len(tile.query.heads) * tile.query.segments
        else:
            total += tile.pairs
    return total


def causal_pairs(num_rows: int) -> int:
    """The number of pairs that the kernel computes for num_rows queries and as many keys, under a causal mask.

    For each block of queries these are the keys up to the block's end, rounded up to whole blocks of keys.
    """
    block = query_block(num_rows)
    total = 0
    for start in range(0, num_rows, block):
        stop = min(start + block, num_rows)
        total += (stop - start) * min(num_rows, -(-stop // KEY_BLOCK) * KEY_BLOCK)
    return total


def _plan(pattern: DilatedPattern, sizes: Sizes) -> Plan:
    return make_plan(
        ShardedCall(
            pattern, make_shards("contiguous", (sizes.seq_len,)), sizes.num_heads, sizes.num_heads
        ),
        0,
    )


def table(rows: list[dict[str, Any]]) -> str:
    first = rows[0]
    headers = (
        "pattern",
        "stage",
        "dense, s",
        "ours, s",
        "FLOP bound",
        "share kept",
        "target",
        "lost to rounding",
        "else kept",
    )
    lines = [
        (
            branches(row),
            row["stage"],
            seconds(row["dense_seconds"]),
            seconds(row["seconds"]),
            f"{row['flop_bound_speed_up']:.2f}x",
            f"{row['share']['median']:.1%} ({row['share']['min']:.1%} to {row['share']['max']:.1%})",
            f"{row['target']:.0%}",
            f"{row['lost_to_rounding']:.1%}",
            f"{row['share_without_rounding']:.1%}",
        )
        for row in rows
    ]
    return (
        f"{first['seq_len']:,} positions, {tensors(first)}. Median (smallest to largest) of "
        f"{first['share']['repeats']} interleaved repeats. Torch's causal kernel rounds work up to blocks of "
        f"{KEY_BLOCK} keys; the last column leaves that loss out.\n\n{markdown(headers, lines)}"
    )
