"""Collects what `rda doctor` reports: facts about each rank, and measurements that all ranks take together."""

import socket
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from itertools import pairwise
from typing import Any

import torch

from ...attention import dilated_attention
from ...pattern import DilatedPattern
from ...ranks.context import ContextParallel
from ...ranks.link import GroupLink
from ...training.agreement import values_of_all
from ...training.machine import hardware, physical_bytes, versions
from ..hardware import LARGE_MESSAGE
from ..local_ranks import Worker

# The bytes of a small message, which measures the latency. A large message (LARGE_MESSAGE) measures the bandwidth.
SMALL_MESSAGE = 256
REPEATS = 11
# With ROWS rows, most of the time of attention goes into FLOPs. With FEW_ROWS, most of it is the fixed cost of kernel
# calls.
ROWS, FEW_ROWS, HEADS, HEAD_DIM = 2048, 32, 4, 64
# A tile is a block of queries x keys. A call of 1 + 8 small tiles is compared with a call of 1 small tile. The
# difference in time is the fixed time of 8 tiles.
FURTHER_TILES = 8


def examine(worker: Worker | None, seconds: float) -> list[dict[str, Any]]:
    """Examine this rank while all other ranks examine themselves. Returns the findings of all ranks, in the order of
    ranks.

    seconds: how long a message may take.
    """
    parallel = ContextParallel(exchange="ring", timeout=timedelta(seconds=seconds))
    device = f"cuda:{torch.cuda.current_device()}" if torch.cuda.is_available() else "cpu"
    findings = facts(parallel.rank, device)
    findings["rates"] = rates(parallel, device, getattr(torch, findings["dtype"]))
    if parallel.world_size > 1:
        findings["messages"] = messages(parallel, device)
    everyone = values_of_all(parallel, findings)
    parallel.close()
    return everyone


def facts(rank: int, device: str) -> dict[str, Any]:
    """Facts about this rank and its host. Collecting them sends no message to other ranks."""
    findings = {
        "rank": rank,
        "host": socket.gethostname(),
        "interfaces": sorted(name for _, name in socket.if_nameindex()),
        "processor": hardware()["processor"],
        "kernel": "cpu",
        "dtype": "float32",
        "device": f"CPU, threads: {torch.get_num_threads()}",
        "memory_bytes": physical_bytes(),
        "versions": versions() | {"CUDA": "none", "NCCL": "none", "GPU": "none"},
    }
    if device != "cpu":
        card = torch.cuda.get_device_properties(device)
        findings |= {"device": card.name, "memory_bytes": card.total_memory, "kernel": "sdpa"}
        findings["dtype"] = "bfloat16" if card.major >= 8 else "float16"
        findings["versions"] |= {"CUDA": torch.version.cuda, "GPU": card.name}
        # Leave NCCL at "none" if torch raises one of these errors, which means that torch has no NCCL.
        with suppress(AttributeError, ImportError, RuntimeError):
            findings["versions"]["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
    return findings


def meet(parallel: ContextParallel) -> None:
    """A barrier: returns on all ranks at about the same time."""
    parallel.ranks.handshake(1, {"call": "rda doctor"})


def rates(parallel: ContextParallel, device: str, dtype: torch.dtype) -> dict[str, float]:
    """Measure how fast this rank computes attention, while all ranks compute.

    Returns the FLOPs per second of a forward and of a backward, and two durations. "call_seconds" is the part of a
    tile's time (a tile is a block of queries x keys) that does not grow with the tile. "around_seconds" is the time
    that an attention call takes in addition to the time of its tiles.
    """
    many = ROWS if device == "cpu" else 8 * ROWS
    one_tile = DilatedPattern.dense()
    nine_tiles = DilatedPattern((FEW_ROWS,) * (1 + FURTHER_TILES), (1,) * (1 + FURTHER_TILES))
    large = _times(parallel, device, dtype, many, one_tile)
    small = _times(parallel, device, dtype, FEW_ROWS, one_tile)
    several = _times(parallel, device, dtype, FEW_ROWS, nine_tiles)
    tile = max(
        0.0, (several[0] - small[0]) / FURTHER_TILES, (several[1] - small[1]) / FURTHER_TILES
    )
    # The FLOPs of one matrix product, over all heads. A forward computes 2 matrix products, and a backward 5.
    flops = 2 * HEAD_DIM * HEADS * many**2
    return {
        "flops_per_second": 2 * flops / max(large[0] - small[0], large[0] / 2),
        "backward_flops_per_second": 5 * flops / max(large[1] - small[1], large[1] / 2),
        "call_seconds": tile,
        "around_seconds": max(0.0, max(small) - tile),
    }


def _times(
    parallel: ContextParallel, device: str, dtype: torch.dtype, rows: int, pattern: DilatedPattern
) -> Sequence[float]:
    """The median seconds of an attention forward over `rows` positions, and of its backward."""
    shape = (1, rows, HEADS, HEAD_DIM)
    query, key, value = (
        torch.randn(shape, dtype=dtype, device=device, requires_grad=True) for _ in range(3)
    )
    outs: list[Any] = []

    def forward() -> None:
        outs[:] = [dilated_attention(query, key, value, pattern)]

    def backward() -> None:
        torch.autograd.grad(outs[0], (query, key, value), torch.ones_like(outs[0]))

    return timed(parallel, device, forward, backward)


def timed(parallel: ContextParallel, device: str, *actions: Callable[[], object]) -> list[float]:
    """The median seconds of each action. In a round all ranks begin together, and each runs the actions one after
    another. The first round is a warm-up and is not counted."""
    rounds = []
    for _ in range(REPEATS):
        meet(parallel)
        times = [time.perf_counter()]
        for action in actions:
            action()
            if device.startswith("cuda"):
                torch.cuda.synchronize()
            times.append(time.perf_counter())
        rounds.append([stop - start for start, stop in pairwise(times)])
    return [statistics.median(seconds) for seconds in zip(*rounds[1:], strict=True)]


def messages(parallel: ContextParallel, device: str) -> dict[str, float]:
    """Time a handshake (a barrier of all ranks), a small message and a large message. Each rank sends the messages to
    the next rank, and all ranks send at the same time. Returns the seconds by name."""
    link = getattr(parallel.ranks, "all", None)
    assert isinstance(link, GroupLink)
    [handshake] = timed(parallel, "cpu", lambda: meet(parallel))
    seconds = {"handshake_seconds": handshake}
    onward, back = (link.rank + 1) % link.world_size, (link.rank - 1) % link.world_size
    on = device if link.backends.get(torch.device(device).type) else "cpu"
    for name, size in (("small_seconds", SMALL_MESSAGE), ("large_seconds", LARGE_MESSAGE)):
        leaves = torch.zeros(size, dtype=torch.uint8, device=on)
        comes = torch.empty_like(leaves)

        def swap(leaves: torch.Tensor = leaves, comes: torch.Tensor = comes) -> None:
            link.exchange([(leaves, onward)], [(comes, back)], "rda doctor").wait()

        [seconds[name]] = timed(parallel, on, swap)
    return seconds
