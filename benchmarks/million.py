"""1,048,576 positions, forward and backward, on one device: how long it takes and what it holds."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ring_dilated_attention.commands.local_ranks import Launch, Worker, run_ranks
from ring_dilated_attention.forecast.ledger import attention_memory
from ring_dilated_attention.kernels.traits import TRAITS
from ring_dilated_attention.pattern import DilatedPattern
from ring_dilated_attention.plan.job import Job
from ring_dilated_attention.plan.planner import make_plan
from ring_dilated_attention.plan.sharding import make_shards
from ring_dilated_attention.training.machine import peak_resident_bytes

from .gate import gate
from .measure import Allocated, Sizes, Times, allocated, attend, dilated_call, flops_of, make_tensors
from .record import branches, markdown, tensors

SUMMARY = "one million positions, forward and backward, on one device"


class Settings(NamedTuple):
    # Every branch has keys that no shorter one has, and each head reads a phase of its own from the second branch on.
    sizes: Sizes = Sizes(1_048_576, 4, 64, torch.bfloat16)
    pattern: DilatedPattern = DilatedPattern((2048, 8192, 32_768, 131_072, 1_048_576), (1, 4, 16, 64, 512))
    seconds: float = 1800


FULL = Settings()
QUICK = Settings(Sizes(8192, 4, 32, torch.bfloat16), DilatedPattern((256, 1024, 8192), (1, 4, 64)), 120)


def num_steps(settings: Settings) -> int:
    return 2


def run(settings: Settings, step: Callable[[str], None]) -> list[dict[str, Any]]:
    sizes, pattern = settings.sizes, settings.pattern
    passed = gate(sizes, pattern)
    launch = Launch(1, num_threads=torch.get_num_threads(), seconds=settings.seconds)
    # Two runs, because the profiler takes memory of its own.
    step("timed")
    [(times, resident)] = run_ranks(launch, _timed, sizes, pattern)
    step("profiled")
    [found] = run_ranks(launch, _profiled, sizes, pattern)
    plan = make_plan(Job(pattern, make_shards("contiguous", (sizes.seq_len,)), sizes.num_heads, sizes.num_heads), 0)
    planned = attention_memory(plan, sizes.planned(launch.num_threads), TRAITS["cpu"])
    tensor = sizes.batch * sizes.seq_len * sizes.num_heads * sizes.head_dim * sizes.dtype.itemsize
    return [
        {
            "segment_lengths": pattern.segment_lengths,
            "dilation_rates": pattern.dilation_rates,
            "is_causal": pattern.is_causal,
            **sizes.as_json(),
            "threads_per_rank": launch.num_threads,
            "forward_seconds": times.forward,
            "backward_seconds": times.backward,
            "flops": sum(flops_of(plan, sizes.batch, sizes.head_dim)),
            "tensor_bytes": tensor,
            "peak_bytes": 3 * tensor + found.peak_bytes,
            "planned_peak_bytes": planned.forward_backward.num_bytes,
            "peak_resident_bytes": resident,
            "gate": passed,
        }
    ]


def _timed(worker: Worker, sizes: Sizes, pattern: DilatedPattern) -> tuple[Times, int]:
    dilated_call(sizes._replace(seq_len=256), pattern)()
    return dilated_call(sizes, pattern)(), peak_resident_bytes()


def _profiled(worker: Worker, sizes: Sizes, pattern: DilatedPattern) -> Allocated:
    inputs, _ = make_tensors(sizes)

    def call() -> None:
        out = attend(inputs, pattern, None)
        torch.autograd.grad(out, inputs, torch.ones_like(out))

    return allocated(call)


def table(rows: list[dict[str, Any]]) -> str:
    headers = (
        "pattern",
        "forward, s",
        "backward, s",
        "TFLOP",
        "peak, GB",
        "planned, GB",
        "resident, GB",
        "one tensor, GB",
    )
    lines = [
        (
            branches(row),
            f"{row['forward_seconds']:.1f}",
            f"{row['backward_seconds']:.1f}",
            f"{row['flops'] / 1e12:.1f}",
            *(
                f"{row[name] / 1e9:.2f}"
                for name in ("peak_bytes", "planned_peak_bytes", "peak_resident_bytes", "tensor_bytes")
            ),
        )
        for row in rows
    ]
    first = rows[0]
    return (
        f"{first['seq_len']:,} positions, {tensors(first)}, one run. The peak is "
        f"the allocator's, inputs included; resident is the process's.\n\n{markdown(headers, lines)}"
    )
