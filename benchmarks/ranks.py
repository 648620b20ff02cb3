"""Peak memory per rank on 1, 2, 4 and 8 ranks.

The peak is compared with two numbers: the size of the tensors that any call needs, and the peak of one rank alone.

A row holds the largest peak of all p ranks, inputs included, for a forward alone and for a forward and backward. Its
entry `of_one_rank` is p * peak / (peak of one rank alone). This is 1 if each rank holds 1/p of everything.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ring_dilated_attention.commands.errors import Squares
from ring_dilated_attention.commands.local_ranks import Launch, Worker, run_ranks
from ring_dilated_attention.pattern import DilatedPattern
from ring_dilated_attention.ranks.context import ContextParallel

from .gate import gate, gate_squares
from .measure import Sizes, allocated, attend, call_json, dilated_call, make_tensors, planned_bytes
from .record import branches, markdown, tensors

SUMMARY = "peak memory per rank on 1, 2, 4 and 8 ranks"
MINUTES = 15
NUM_TENSORS = 8  # the tensors that any call needs: query, key, value and out, and their gradients


class Setup(NamedTuple):
    """A call that is measured. target: the largest `of_one_rank` that it should have."""

    sizes: Sizes
    pattern: DilatedPattern
    target: float


class Settings(NamedTuple):
    setups: tuple[Setup, ...] = (
        Setup(Sizes(65_536, 12, 64), DilatedPattern((2048, 4096), (1, 2)), 1.08),
        Setup(Sizes(65_536, 12, 64), DilatedPattern((8192, 65_536), (1, 16)), 1.2),
        Setup(Sizes(32_768, 12, 64), DilatedPattern((32_768,), (1,)), 2.25),
    )
    num_ranks: tuple[int, ...] = (1, 2, 4, 8)
    seconds: float = 1200


FULL = Settings()
QUICK = Settings(
    (
        Setup(Sizes(1024, 2, 16), DilatedPattern((64, 128), (1, 2)), 1.08),
        Setup(Sizes(1024, 2, 16), DilatedPattern((1024,), (1,)), 2.25),
    ),
    (1, 2),
    120,
)


class Found(NamedTuple):
    """The results of one rank: its part of the gate, its peaks in bytes with inputs, and the bytes that it sent."""

    squares: Squares
    forward: int
    forward_backward: int
    sent_bytes: int


def run(settings: Settings, step: Callable[[str], None]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for sizes, pattern, target in settings.setups:
        one_rank_bytes = 0
        for num_ranks in settings.num_ranks:
            step(f"{pattern.segment_lengths} on {num_ranks} ranks")
            launch = Launch(num_ranks, num_threads=1, seconds=settings.seconds)
            ranks: list[Found] = run_ranks(launch, measure_rank, sizes, pattern)
            sent = planned_bytes(sizes, pattern, num_ranks)
            assert sent == [rank.sent_bytes for rank in ranks], "the plan and the messages disagree"
            peak = max(rank.forward_backward for rank in ranks)
            one_rank_bytes = one_rank_bytes or peak
            row = {
                **call_json(sizes, pattern),
                "ranks": num_ranks,
                "threads_per_rank": launch.num_threads,
                "forward_bytes": max(rank.forward for rank in ranks),
                "forward_backward_bytes": peak,
                "of_one_rank": num_ranks * peak / one_rank_bytes,
                "target": target,
                "sent_bytes": max(sent),
                "gate": gate(sizes, pattern, [rank.squares for rank in ranks]),
            }
            rows.append(row)
    return rows


def measure_rank(worker: Worker, sizes: Sizes, pattern: DilatedPattern) -> Found:
    parallel = ContextParallel(exchange="ring")
    squares = gate_squares(sizes, pattern, parallel)
    # a small call before, since the first call also allocates what later calls use again
    dilated_call(sizes._replace(seq_len=256), pattern, parallel)()
    inputs, _ = make_tensors(sizes, parallel)
    held = sum(x.nbytes for x in inputs)

    def forward() -> None:
        with torch.no_grad():
            attend(inputs, pattern, parallel)

    def both() -> None:
        out = attend(inputs, pattern, parallel)
        torch.autograd.grad(out, inputs, torch.ones_like(out))

    found = allocated(both)
    return Found(
        squares, held + allocated(forward).peak_bytes, held + found.peak_bytes, found.sent_bytes
    )


def table(rows: list[dict[str, Any]]) -> str:
    headers = (
        "pattern",
        "positions",
        "ranks",
        "forward, MB",
        "forward + backward, MB",
        "of 8 tensors",
        "p x peak / one rank's",
        "at most",
        "sent per rank, MB",
    )
    lines = []
    for row in rows:
        itemsize = getattr(torch, row["dtype"]).itemsize
        tensor = (
            row["batch"]
            * row["seq_len"]
            / row["ranks"]
            * row["num_heads"]
            * row["head_dim"]
            * itemsize
        )
        line = (
            branches(row),
            f"{row['seq_len']:,}",
            str(row["ranks"]),
            f"{row['forward_bytes'] / 1e6:.1f}",
            f"{row['forward_backward_bytes'] / 1e6:.1f}",
            f"{row['forward_backward_bytes'] / (NUM_TENSORS * tensor):.3f}",
            f"{row['of_one_rank']:.3f}",
            f"{row['target']}",
            f"{row['sent_bytes'] / 1e6:.1f}",
        )
        lines.append(line)
    return (
        f"{tensors(rows[0])}, the largest peak of a rank, inputs included. The 8 tensors are the rank's rows of query, "
        f"key, value and out, and their gradients.\n\n{markdown(headers, lines)}"
    )
