"""Bytes that each rank really sends as sequence and ranks grow together, beside the plan and beside undilated K and V.

Only dilated rows travel, and only among the ranks that share a segment: the bytes of a rank depend on its shard and on
the segment lengths, not on the length of the sequence.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ring_dilated_attention.commands.errors import Squares
from ring_dilated_attention.commands.local_ranks import Launch, Worker, run_ranks
from ring_dilated_attention.pattern import DilatedPattern
from ring_dilated_attention.plan.job import Job
from ring_dilated_attention.plan.plan import Plan
from ring_dilated_attention.plan.planner import make_plan
from ring_dilated_attention.plan.sharding import default_lengths, make_shards
from ring_dilated_attention.ranks.context import ContextParallel

from .gate import gate, gate_squares
from .measure import Sizes, allocated, attend, make_tensors
from .record import branches, markdown, tensors

SUMMARY = "bytes sent per rank as sequence and ranks grow together"


class Settings(NamedTuple):
    sizes: Sizes = Sizes(4096, 4, 64)  # of one rank
    pattern: DilatedPattern = DilatedPattern((2048, 8192), (1, 4))
    num_ranks: tuple[int, ...] = (2, 4, 8)
    seconds: float = 300


FULL = Settings()
QUICK = Settings(Sizes(256, 4, 32), DilatedPattern((128, 512), (1, 4)), (2, 3), 60)


def num_steps(settings: Settings) -> int:
    return len(settings.num_ranks)


def run(settings: Settings, step: Callable[[str], None]) -> list[dict[str, Any]]:
    rows = []
    for num_ranks in settings.num_ranks:
        step(f"{num_ranks} ranks")
        sizes = settings.sizes._replace(seq_len=settings.sizes.seq_len * num_ranks)
        launch = Launch(num_ranks, seconds=settings.seconds)
        found = run_ranks(launch, _measure_rank, sizes, settings.pattern)
        plans = _plans(sizes, settings.pattern, num_ranks)
        dense = _plans(sizes, _undilated(settings.pattern), num_ranks)
        rows.append(
            {
                "segment_lengths": settings.pattern.segment_lengths,
                "dilation_rates": settings.pattern.dilation_rates,
                "is_causal": settings.pattern.is_causal,
                **sizes.as_json(),
                "ranks": num_ranks,
                "threads_per_rank": launch.num_threads,
                "forward_bytes": [forward for _, forward, _ in found],
                "backward_bytes": [backward for _, _, backward in found],
                "planned_forward_bytes": [_bytes(plan, sizes, backward=False) for plan in plans],
                "planned_backward_bytes": [_bytes(plan, sizes, backward=True) for plan in plans],
                "undilated_forward_bytes": [_bytes(plan, sizes, backward=False) for plan in dense],
                "gate": gate(sizes, settings.pattern, [squares for squares, _, _ in found]),
            }
        )
        row = rows[-1]
        assert row["forward_bytes"] == row["planned_forward_bytes"], "the plan and the messages of forward disagree"
        assert row["backward_bytes"] == row["planned_backward_bytes"], "the plan and the messages of backward disagree"
    return rows


def _undilated(pattern: DilatedPattern) -> DilatedPattern:
    return DilatedPattern(pattern.segment_lengths, [1] * len(pattern.branches), is_causal=pattern.is_causal)


def _plans(sizes: Sizes, pattern: DilatedPattern, num_ranks: int) -> list[Plan]:
    shards = make_shards("contiguous", default_lengths("contiguous", sizes.seq_len, num_ranks))
    return [make_plan(Job(pattern, shards, sizes.num_heads, sizes.num_heads), rank) for rank in range(num_ranks)]


def _bytes(plan: Plan, sizes: Sizes, *, backward: bool) -> int:
    return plan.bytes_sent(sizes.batch, sizes.head_dim, sizes.dtype.itemsize, backward=backward)


def _measure_rank(worker: Worker, sizes: Sizes, pattern: DilatedPattern) -> tuple[Squares, int, int]:
    """The gate's part, and the bytes sent in forward and in backward."""
    parallel = ContextParallel(exchange="ring")
    squares = gate_squares(sizes, pattern, parallel)
    inputs, dout = make_tensors(sizes, parallel)
    outs: list[torch.Tensor] = []
    forward = allocated(lambda: outs.append(attend(inputs, pattern, parallel)))
    backward = allocated(lambda: torch.autograd.grad(outs[0], inputs, dout))
    return squares, forward.sent_bytes, backward.sent_bytes


def table(rows: list[dict[str, Any]]) -> str:
    headers = (
        "pattern",
        "positions",
        "ranks",
        "forward, bytes per rank",
        "backward, bytes per rank",
        "by the plan",
        "forward if K and V went undilated",
    )
    lines = [
        (
            branches(row),
            f"{row['seq_len']:,}",
            str(row["ranks"]),
            f"{max(row['forward_bytes']):,}",
            f"{max(row['backward_bytes']):,}",
            "equal",
            f"{max(row['undilated_forward_bytes']):,}",
        )
        for row in rows
    ]
    return f"{tensors(rows[0])}. Counted by the profiler, rank by rank.\n\n{markdown(headers, lines)}"
