"""Peak memory per rank on 1, 2, 4 and 8 ranks, beside the plan's own list and beside one rank's peak.

The reports' promise was memory O(n/p). A row holds the largest of the ranks' peaks, forward alone and with backward,
and how the peaks compare with `estimate.attention_memory`; `of_one_rank` is p times the peak over one rank's peak.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ring_dilated_attention.commands.errors import Squares
from ring_dilated_attention.commands.local_ranks import Launch, Worker, run_ranks
from ring_dilated_attention.forecast.ledger import attention_memory
from ring_dilated_attention.kernels.traits import TRAITS
from ring_dilated_attention.pattern import DilatedPattern
from ring_dilated_attention.plan.job import Job
from ring_dilated_attention.plan.planner import make_plan
from ring_dilated_attention.plan.sharding import default_lengths, make_shards
from ring_dilated_attention.ranks.context import ContextParallel

from .gate import gate, gate_squares
from .measure import Sizes, allocated, attend, dilated_call, make_tensors
from .record import branches, markdown, tensors

SUMMARY = "peak memory per rank on 1, 2, 4 and 8 ranks"


class Setup(NamedTuple):
    """What runs, and p times the peak over one rank's peak that it may have at most."""

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
    """One rank's part: the gate, and its peaks in bytes, inputs included."""

    squares: Squares
    forward: int
    forward_backward: int
    sent_bytes: int


def num_steps(settings: Settings) -> int:
    return len(settings.setups) * len(settings.num_ranks)


def run(settings: Settings, step: Callable[[str], None]) -> list[dict[str, Any]]:
    rows = []
    for setup in settings.setups:
        alone = 0
        for num_ranks in settings.num_ranks:
            step(f"{setup.pattern.segment_lengths} on {num_ranks} ranks")
            launch = Launch(num_ranks, num_threads=1, seconds=settings.seconds)
            found: list[Found] = run_ranks(launch, measure_rank, setup.sizes, setup.pattern)
            row = _row(setup, num_ranks, found) | {"threads_per_rank": launch.num_threads}
            alone = alone or row["forward_backward_bytes"]
            row["of_one_rank"] = num_ranks * row["forward_backward_bytes"] / alone
            rows.append(row | {"gate": gate(setup.sizes, setup.pattern, [one.squares for one in found])})
    return rows


def measure_rank(worker: Worker, sizes: Sizes, pattern: DilatedPattern) -> Found:
    parallel = ContextParallel(exchange="ring")
    squares = gate_squares(sizes, pattern, parallel)
    dilated_call(sizes._replace(seq_len=256), pattern, parallel)()  # what is made once is not the call's
    inputs, _ = make_tensors(sizes, parallel)
    held = sum(x.nbytes for x in inputs)

    def forward() -> None:
        with torch.no_grad():
            attend(inputs, pattern, parallel)

    def both() -> None:
        out = attend(inputs, pattern, parallel)
        torch.autograd.grad(out, inputs, torch.ones_like(out))

    found = allocated(both)
    return Found(squares, held + allocated(forward).peak_bytes, held + found.peak_bytes, found.sent_bytes)


def _row(setup: Setup, num_ranks: int, found: list[Found]) -> dict[str, Any]:
    sizes, pattern = setup.sizes, setup.pattern
    shards = make_shards("contiguous", default_lengths("contiguous", sizes.seq_len, num_ranks))
    arguments = (sizes.batch, sizes.head_dim, sizes.dtype.itemsize)
    forwards, boths, sent = [], [], []
    for rank, one in enumerate(found):
        plan = make_plan(Job(pattern, shards, sizes.num_heads, sizes.num_heads), rank)
        planned = attention_memory(plan, sizes.planned(), TRAITS["cpu"])
        forwards.append(one.forward / planned.forward.num_bytes)
        boths.append(one.forward_backward / planned.forward_backward.num_bytes)
        sent.append(sum(plan.bytes_sent(*arguments, backward=backward) for backward in (False, True)))
    assert sent == [one.sent_bytes for one in found], "the plan and the messages disagree"
    return {
        "segment_lengths": pattern.segment_lengths,
        "dilation_rates": pattern.dilation_rates,
        "is_causal": pattern.is_causal,
        **sizes.as_json(),
        "ranks": num_ranks,
        "forward_bytes": max(one.forward for one in found),
        "forward_backward_bytes": max(one.forward_backward for one in found),
        "of_plan_forward": [min(forwards), max(forwards)],
        "of_plan_forward_backward": [min(boths), max(boths)],
        "sent_bytes": max(sent),
        "target": setup.target,
    }


def table(rows: list[dict[str, Any]]) -> str:
    headers = (
        "pattern",
        "positions",
        "ranks",
        "forward, MB",
        "of the plan's list",
        "forward + backward, MB",
        "of the plan's list",
        "p x peak / one rank's",
        "at most",
        "sent per rank, MB",
    )
    lines = [
        (
            branches(row),
            f"{row['seq_len']:,}",
            str(row["ranks"]),
            f"{row['forward_bytes'] / 1e6:.1f}",
            _span(row["of_plan_forward"]),
            f"{row['forward_backward_bytes'] / 1e6:.1f}",
            _span(row["of_plan_forward_backward"]),
            f"{row['of_one_rank']:.3f}",
            f"{row['target']}",
            f"{row['sent_bytes'] / 1e6:.1f}",
        )
        for row in rows
    ]
    return f"{tensors(rows[0])}, the largest peak of a rank, inputs included.\n\n{markdown(headers, lines)}"


def _span(pair: list[float]) -> str:
    return f"{pair[0]:.3f} to {pair[1]:.3f}"
