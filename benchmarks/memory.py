"""Peak memory of one attention call, forward and backward: on one device, and on each of two ranks.

Inputs are counted; the rest is what torch's allocator gave out. The bytes sent are counted too: two ranks that send
nothing would prove nothing.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ring_dilated_attention.commands.local_ranks import Launch, Worker, run_ranks
from ring_dilated_attention.forecast.ledger import attention_memory
from ring_dilated_attention.kernels.traits import TRAITS
from ring_dilated_attention.pattern import DilatedPattern
from ring_dilated_attention.plan.job import Job
from ring_dilated_attention.plan.plan import Plan
from ring_dilated_attention.plan.planner import make_plan
from ring_dilated_attention.plan.sharding import make_shards, split_lengths
from ring_dilated_attention.ranks.context import ContextParallel

from .gate import gate, gate_squares
from .measure import Allocated, Sizes, allocated, attend, dilated_call, make_tensors
from .record import branches, markdown

SUMMARY = "peak memory on one device and on each of two ranks"
NUM_RANKS = 2
# Query, key, value and out, and their four gradients.
NUM_TENSORS = 8


class Settings(NamedTuple):
    one_device: tuple[Sizes, DilatedPattern] = (Sizes(16_384, 12, 64), DilatedPattern((2048, 4096), (1, 2)))
    two_ranks: tuple[Sizes, DilatedPattern] = (Sizes(32_768, 4, 64), DilatedPattern((2048, 32_768), (1, 16)))
    seconds: float = 300


FULL = Settings()
QUICK = Settings(
    (Sizes(4096, 4, 64), DilatedPattern((512, 1024), (1, 2))),
    (Sizes(4096, 4, 64), DilatedPattern((256, 4096), (1, 16))),
)


def num_steps(settings: Settings) -> int:
    return 3


def run(settings: Settings, step: Callable[[str], None]) -> list[dict[str, Any]]:
    sizes, pattern = settings.one_device
    step("one device")
    tensors = NUM_TENSORS * _tensor_bytes(sizes, sizes.seq_len)
    row = _row(sizes, pattern, 1, 0, _measure(sizes, pattern, None)) | {"gate": gate(sizes, pattern)}
    rows = [row | {"eight_tensors_bytes": tensors, "ratio": row["peak_bytes"] / tensors, "target": 1.25}]

    sizes, pattern = settings.two_ranks
    step("two ranks' sequence on one device")
    alone = _row(sizes, pattern, 1, 0, _measure(sizes, pattern, None)) | {"gate": gate(sizes, pattern)}
    rows.append(alone)
    step("two ranks")
    launch = Launch(NUM_RANKS, num_threads=torch.get_num_threads(), seconds=settings.seconds)
    found = run_ranks(launch, _measure_rank, sizes, pattern)
    passed = gate(sizes, pattern, [squares for squares, _ in found])
    for rank, (_, memory) in enumerate(found):
        row = _row(sizes, pattern, NUM_RANKS, rank, memory)
        row |= {"threads_per_rank": launch.num_threads, "gate": passed}
        assert row["sent_bytes"] == row["planned_sent_bytes"] > 0, "the plan and the messages disagree"
        rows.append(row | {"ratio": row["peak_bytes"] / alone["peak_bytes"], "target": 0.58})
    return rows


def _measure_rank(worker: Worker, sizes: Sizes, pattern: DilatedPattern) -> tuple[Any, Allocated]:
    parallel = ContextParallel(exchange="ring")
    return gate_squares(sizes, pattern, parallel), _measure(sizes, pattern, parallel)


def _measure(sizes: Sizes, pattern: DilatedPattern, parallel: ContextParallel | None) -> Allocated:
    small = sizes._replace(seq_len=256)
    dilated_call(small, pattern, parallel)()  # what is made once, by the first call, is not the call's
    inputs, _ = make_tensors(sizes, parallel)

    def call() -> None:
        out = attend(inputs, pattern, parallel)
        torch.autograd.grad(out, inputs, torch.ones_like(out))

    return allocated(call)


def _tensor_bytes(sizes: Sizes, num_rows: int) -> int:
    return sizes.batch * num_rows * sizes.num_heads * sizes.head_dim * sizes.dtype.itemsize


def _plan(sizes: Sizes, pattern: DilatedPattern, num_ranks: int, rank: int) -> Plan:
    shards = make_shards("contiguous", split_lengths(sizes.seq_len, num_ranks))
    return make_plan(Job(pattern, shards, sizes.num_heads, sizes.num_heads), rank)


def _row(sizes: Sizes, pattern: DilatedPattern, num_ranks: int, rank: int, found: Allocated) -> dict[str, Any]:
    plan = _plan(sizes, pattern, num_ranks, rank)
    arguments = (sizes.batch, sizes.head_dim, sizes.dtype.itemsize)
    planned = attention_memory(plan, sizes.planned(torch.get_num_threads()), TRAITS["cpu"])
    return {
        "segment_lengths": pattern.segment_lengths,
        "dilation_rates": pattern.dilation_rates,
        "is_causal": pattern.is_causal,
        **sizes.as_json(),
        "ranks": num_ranks,
        "rank": rank,
        "peak_bytes": 3 * _tensor_bytes(sizes, plan.num_rows) + found.peak_bytes,
        "planned_peak_bytes": planned.forward_backward.num_bytes,
        "sent_bytes": found.sent_bytes,
        "planned_sent_bytes": sum(plan.bytes_sent(*arguments, backward=backward) for backward in (False, True)),
    }


def table(rows: list[dict[str, Any]]) -> str:
    headers = (
        "pattern",
        "positions",
        "heads",
        "rank",
        "peak, MB",
        "planned, MB",
        "sent, MB",
        "compared with",
        "target",
    )
    lines = []
    for row in rows:
        other = "8 tensors" if row["ranks"] == 1 else "one device"
        lines.append(
            (
                branches(row),
                f"{row['seq_len']:,}",
                f"{row['num_heads']} of {row['head_dim']}",
                f"{row['rank']} of {row['ranks']}",
                f"{row['peak_bytes'] / 1e6:.1f}",
                f"{row['planned_peak_bytes'] / 1e6:.1f}",
                f"{row['sent_bytes'] / 1e6:.1f}",
                f"{row['ratio']:.3f} of {other}" if "ratio" in row else "",
                f"at most {row['target']}" if "ratio" in row else "",
            )
        )
    return f"Forward and backward, {rows[0]['dtype']}, inputs included.\n\n{markdown(headers, lines)}"
