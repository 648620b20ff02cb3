"""A hundred thousand calls on one device, and ten thousand training steps on two ranks: whether anything grows.

Resident memory, file descriptors and threads of each process, sampled as it goes. Memory is flat if its median over the
last quarter is that over the second within what it varies by inside them; the first quarter fills caches.
"""

import os
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ring_dilated_attention.attention import dilated_attention
from ring_dilated_attention.commands.local_ranks import Launch, Worker, run_ranks
from ring_dilated_attention.models.longnet import LongNetLM
from ring_dilated_attention.models.longnet_config import LongNetConfig
from ring_dilated_attention.pattern import DilatedPattern
from ring_dilated_attention.ranks.context import ContextParallel

from .gate import gate, gate_squares
from .measure import Sizes
from .record import markdown

SUMMARY = "memory, file descriptors and threads over 100,000 calls and 10,000 steps"
NUM_RANKS = 2
PAGE = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096


class Settings(NamedTuple):
    num_calls: int = 100_000
    num_steps: int = 10_000
    sizes: Sizes = Sizes(64, 2, 8)
    pattern: DilatedPattern = DilatedPattern((16, 64), (1, 4), is_causal=True)
    num_samples: int = 100
    seconds: float = 3000


FULL = Settings()
QUICK = Settings(num_calls=40, num_steps=16, num_samples=8)


class Sample(NamedTuple):
    """Of this process, after so many calls or steps."""

    number: int
    resident_bytes: int
    descriptors: int
    threads: int


def take_sample(number: int) -> Sample:
    own = Path("/proc/self")
    resident = int((own / "statm").read_text().split()[1]) * PAGE
    return Sample(number, resident, len(os.listdir(own / "fd")), len(os.listdir(own / "task")))


def num_steps(settings: Settings) -> int:
    return 2 * settings.num_samples


def run(settings: Settings, step: Callable[[str], None]) -> list[dict[str, Any]]:
    if not Path("/proc/self/statm").exists():
        raise ValueError("soak reads /proc, which this system does not have: run it on Linux")
    sizes, pattern = settings.sizes, settings.pattern
    alone = Launch(1, num_threads=1, seconds=settings.seconds)
    [samples] = run_ranks(alone, _soak_alone, settings, on_report=lambda rank, n: step(f"call {n:,} on one device"))
    rows = [_row(settings, "calls on one device", 1, 0, samples) | {"gate": gate(sizes, pattern)}]
    launch = alone._replace(world_size=NUM_RANKS)

    def report(rank: int, number: int) -> None:
        if rank == 0:
            step(f"step {number:,} on {NUM_RANKS} ranks")

    found = run_ranks(launch, _soak_rank, settings, on_report=report)
    passed = gate(sizes, pattern, [squares for squares, _ in found])
    for rank, (_, samples) in enumerate(found):
        row = _row(settings, "training steps", NUM_RANKS, rank, samples)
        rows.append(row | {"threads_per_rank": launch.num_threads, "gate": passed})
    return rows


def _soak(number: int, num_samples: int, call: Callable[[int], None], report: Callable[[int], object]) -> list[Sample]:
    samples = []
    for i in range(1, number + 1):
        if (i - 1) % (number // num_samples) == 0:
            report(i)
        call(i)
        if i % (number // num_samples) == 0:
            samples.append(take_sample(i))
    return samples


def _soak_alone(worker: Worker, settings: Settings) -> list[Sample]:
    return _soak(settings.num_calls, settings.num_samples, _calls(settings), worker.report)


def _calls(settings: Settings) -> Callable[[int], None]:
    """Forward and backward, at lengths that come again and again."""
    sizes = settings.sizes
    shape = (1, sizes.seq_len, sizes.num_heads, sizes.head_dim)
    whole = [torch.randn(shape, dtype=sizes.dtype) for _ in range(3)]

    def call(i: int) -> None:
        length = sizes.seq_len // 2 + i % (sizes.seq_len // 2) + 1
        query, key, value = inputs = [x[:, :length].detach().requires_grad_() for x in whole]
        out, lse = dilated_attention(query, key, value, settings.pattern, return_lse=True)
        torch.autograd.grad(out.sum() + lse.sum(), inputs)

    return call


def _soak_rank(worker: Worker, settings: Settings) -> tuple[Any, list[Sample]]:
    """Steps of a small language model, whose attention and labels cross the border of the shards."""
    parallel = ContextParallel()
    sizes, pattern = settings.sizes, settings.pattern
    squares = gate_squares(sizes, pattern, parallel)
    torch.manual_seed(0)
    config = LongNetConfig(
        tuple(pattern.segment_lengths),
        tuple(pattern.dilation_rates),
        num_layers=1,
        embed_dim=sizes.num_heads * sizes.head_dim,
        num_heads=sizes.num_heads,
    )
    model = LongNetLM(config, parallel=parallel)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    tokens = parallel.shard(torch.randint(config.vocab_size, (1, sizes.seq_len)))

    def train(i: int) -> None:
        optimizer.zero_grad()
        model.loss(tokens).backward()
        for parameter in model.parameters():
            assert parameter.grad is not None
            torch.distributed.all_reduce(parameter.grad)
            parameter.grad /= worker.world_size
        optimizer.step()

    samples = _soak(settings.num_steps, settings.num_samples, train, worker.report)
    parallel.close()
    return squares, samples


def _row(settings: Settings, what: str, num_ranks: int, rank: int, samples: Sequence[Sample]) -> dict[str, Any]:
    found = growth([sample.resident_bytes for sample in samples])
    settled = samples[len(samples) // 4 :]
    per_sample = samples[1].number - samples[0].number
    slope = statistics.linear_regression(range(len(settled)), [x.resident_bytes for x in settled]).slope
    return {
        "what": what,
        "number": samples[-1].number,
        "segment_lengths": settings.pattern.segment_lengths,
        "dilation_rates": settings.pattern.dilation_rates,
        "is_causal": settings.pattern.is_causal,
        **settings.sizes.as_json(),
        "ranks": num_ranks,
        "rank": rank,
        "resident_bytes": settled[-1].resident_bytes,
        "slope_bytes_per_thousand": slope / per_sample * 1000,
        **found,
        "descriptors": sorted({sample.descriptors for sample in settled}),
        "threads": sorted({sample.threads for sample in settled}),
        "samples": [list(sample) for sample in samples],
    }


def growth(resident: Sequence[int]) -> dict[str, Any]:
    """From the second quarter to the last, and what memory varies by inside a quarter; 64 KiB are 16 pages."""
    quarter = len(resident) // 4
    second, last = resident[quarter : 2 * quarter], resident[-quarter:]
    noise = max(max(third) - min(third) for third in (second, last)) + 2**16
    grown = statistics.median(last) - statistics.median(second)
    return {"grown_bytes": grown, "noise_bytes": noise, "is_flat": abs(grown) <= noise}


def table(rows: list[dict[str, Any]]) -> str:
    headers = (
        "what",
        "rank",
        "number",
        "resident, MB",
        "grown, KiB",
        "varies by, KiB",
        "bytes per 1,000",
        "descriptors",
        "threads",
    )
    lines = [
        (
            row["what"],
            f"{row['rank']} of {row['ranks']}",
            f"{row['number']:,}",
            f"{row['resident_bytes'] / 1e6:.1f}",
            f"{row['grown_bytes'] / 1024:,.0f}",
            f"{row['noise_bytes'] / 1024:,.0f}",
            f"{row['slope_bytes_per_thousand']:,.0f}",
            " to ".join(map(str, sorted({row["descriptors"][0], row["descriptors"][-1]}))),
            " to ".join(map(str, sorted({row["threads"][0], row["threads"][-1]}))),
        )
        for row in rows
    ]
    return (
        "Forward and backward on one device; training steps of a small language model on two ranks. Grown: from the "
        "median of the second quarter of the samples to that of the last; it is flat if that is within what memory "
        "varies by inside those quarters. Bytes per 1,000: slope over the last three quarters.\n\n"
        + markdown(headers, lines)
    )
