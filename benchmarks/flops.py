"""The share of the FLOP-bound speed-up over dense attention that is kept (NATTEN's measure).

share = (time of dense / our time) * (our FLOPs / FLOPs of dense), where dense is torch's attention at the same length.

Torch's causal CPU kernel computes whole blocks of 512 keys, so part of a causal row is lost to work that no pair needs,
and more of it in short segments than in dense attention. That part is known from the plan, and reported by itself.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from ring_dilated_attention.kernels.traits import KEY_BLOCK, query_block
from ring_dilated_attention.pattern import DilatedPattern
from ring_dilated_attention.plan.job import Job
from ring_dilated_attention.plan.plan import Plan
from ring_dilated_attention.plan.planner import make_plan
from ring_dilated_attention.plan.sharding import make_shards

from .gate import gate
from .measure import Sizes, Times, dense_call, dilated_call, flops_of, quantiles
from .record import branches, markdown, seconds, tensors

SUMMARY = "share of the FLOP-bound speed-up over dense attention"


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


def num_steps(settings: Settings) -> int:
    return 2 * (1 + settings.repeats) * (1 + len(settings.branches))


def run(settings: Settings, step: Callable[[str], None]) -> list[dict[str, Any]]:
    rows = []
    for is_causal in (False, True):
        patterns = [DilatedPattern(*pair, is_causal=is_causal) for pair in settings.branches]
        gates = [gate(settings.sizes, pattern) for pattern in patterns]
        calls = {"dense": dense_call(settings.sizes, is_causal=is_causal)}
        calls |= {str(i): dilated_call(settings.sizes, pattern) for i, pattern in enumerate(patterns)}
        times: dict[str, list[Times]] = {name: [] for name in calls}
        for repeat in range(1 + settings.repeats):
            for name, call in calls.items():  # interleaved, so that a change of clock speed meets all alike
                step(f"{'causal' if is_causal else 'not causal'}, {name}")
                found = call()
                if repeat:  # the first warms up
                    times[name].append(found)
        for i, pattern in enumerate(patterns):
            rows += _rows(settings, pattern, gates[i], times["dense"], times[str(i)])
    return rows


def _rows(
    settings: Settings, pattern: DilatedPattern, passed: dict[str, Any], dense: list[Times], ours: list[Times]
) -> list[dict[str, Any]]:
    sizes = settings.sizes
    plan, whole = _plan(pattern, sizes), _plan(_dense_pattern(pattern, sizes), sizes)
    ratio = plan.pairs / whole.pairs
    rounding, dense_rounding = (computed_pairs(x) / x.pairs for x in (plan, whole))
    kept = dense_rounding / rounding  # what would be left of the share if rounding were the only loss
    rows = []
    for stage in ("forward", "forward + backward"):
        theirs, mine = ([t.forward if stage == "forward" else t.both for t in x] for x in (dense, ours))
        share = quantiles(ratio * a / b for a, b in zip(theirs, mine, strict=True))
        rows.append(
            {
                "segment_lengths": pattern.segment_lengths,
                "dilation_rates": pattern.dilation_rates,
                "is_causal": pattern.is_causal,
                "stage": stage,
                **sizes.as_json(),
                "flops": sum(flops_of(plan, sizes.batch, sizes.head_dim)[: 1 if stage == "forward" else 2]),
                "flop_bound_speed_up": 1 / ratio,
                "seconds": quantiles(mine),
                "dense_seconds": quantiles(theirs),
                "share": share,
                "computed_per_counted_pair": rounding,
                "dense_computed_per_counted_pair": dense_rounding,
                "lost_to_rounding": 1 - kept,
                "share_without_rounding": share["median"] / kept,
                "target": target(len(pattern.branches), stage, is_causal=pattern.is_causal),
                "gate": passed,
            }
        )
    return rows


def computed_pairs(plan: Plan) -> int:
    """(query, key) pairs that torch's CPU kernel computes: causal tiles in whole blocks of keys."""
    tiles = [*plan.local, *(tile for hop in plan.hops for tile in hop.tiles)]
    return sum(
        causal_pairs(tile.query.num_rows) * len(tile.query.heads) * tile.query.segments
        if tile.is_causal
        else tile.pairs
        for tile in tiles
    )


def causal_pairs(num_rows: int) -> int:
    """Pairs of one causal square: for each block of queries the keys up to its end, rounded up to blocks of keys."""
    block = query_block(num_rows)
    total = 0
    for start in range(0, num_rows, block):
        stop = min(start + block, num_rows)
        total += (stop - start) * min(num_rows, -(-stop // KEY_BLOCK) * KEY_BLOCK)
    return total


def _dense_pattern(pattern: DilatedPattern, sizes: Sizes) -> DilatedPattern:
    return DilatedPattern((sizes.seq_len,), (1,), is_causal=pattern.is_causal)


def _plan(pattern: DilatedPattern, sizes: Sizes) -> Plan:
    return make_plan(Job(pattern, make_shards("contiguous", (sizes.seq_len,)), sizes.num_heads, sizes.num_heads), 0)


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
