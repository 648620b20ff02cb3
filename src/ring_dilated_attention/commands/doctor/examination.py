"""Collects what `rda doctor` reports: facts about each rank, and measurements that all ranks take together."""

import os
import socket
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
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

NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")
# bytes: small messages show the latency, large ones (LARGE_MESSAGE) the bandwidth
SMALL_MESSAGE = 256
REPEATS = 5
# Rounds are apart, so that a second in which the machine is busy spoils one round, and not the median.
ROUNDS, SECONDS_APART = 3, 0.5
# With ROWS rows, most of the time of attention goes into FLOPs; with FEW_ROWS, into the kernel call itself.
ROWS, FEW_ROWS, HEADS, HEAD_DIM = 2048, 32, 4, 64
MORE = 8  # further tiles in one attention call, to measure the time that a tile takes whatever its size


def examine_on(worker: Worker, seconds: float, dtype: str | None) -> list[dict[str, Any]]:
    return examine(seconds, dtype)


def examine(seconds: float, dtype: str | None) -> list[dict[str, Any]]:
    """The findings of all ranks, in order; every rank gets them. seconds: the timeout of a message. dtype: that rates
    are measured in, or None for the usual one."""
    parallel = ContextParallel(exchange="ring", timeout=timedelta(seconds=seconds))
    device = f"cuda:{torch.cuda.current_device()}" if torch.cuda.is_available() else "cpu"
    findings = facts(parallel.rank, device)
    findings["dtype"] = dtype or usual_dtype(device)
    rounds = []
    for i in range(ROUNDS):
        if i > 0:
            time.sleep(SECONDS_APART)
        measured: dict[str, Any] = {
            "rates": rates(parallel, device, getattr(torch, findings["dtype"]))
        }
        if parallel.world_size > 1:
            measured["messages"] = messages(parallel, device)
        rounds.append(measured)
    everyone = values_of_all(parallel, findings | typical(rounds))
    parallel.close()
    return everyone


def facts(rank: int, device: str) -> dict[str, Any]:
    """What a rank finds out without a message."""
    machine, card = hardware(), gpu(device)
    return {
        "rank": rank,
        "host": socket.gethostname(),
        "versions": versions() | gpu_versions(),
        "processor": machine["processor"],
        "threads": torch.get_num_threads(),
        "load": os.getloadavg()[0],
        "gpu": card,
        "memory_bytes": float(card["memory_bytes"]) if card else physical_bytes(),
        "interfaces": sorted(name for _, name in socket.if_nameindex()),
    }


def gpu(device: str) -> dict[str, Any] | None:
    if device == "cpu":
        return None
    card = torch.cuda.get_device_properties(device)
    return {
        "name": card.name,
        "capability": [card.major, card.minor],
        "memory_bytes": card.total_memory,
    }


def gpu_versions() -> dict[str, str]:
    """The versions of torch's CUDA and NCCL, and of the driver's kernel module; "none" where there is none."""
    versions = {"CUDA": torch.version.cuda or "none", "NCCL": "none", "GPU driver": "none"}
    # raised if torch is built without NCCL
    with suppress(AttributeError, ImportError, RuntimeError):
        versions["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
    with suppress(OSError, UnicodeDecodeError, IndexError):
        first = NVIDIA_DRIVER.read_text().splitlines()[0]
        versions["GPU driver"] = " ".join(first.removeprefix("NVRM version:").split())
    return versions


def usual_dtype(device: str) -> str:
    if device == "cpu":
        return "float32"
    return "bfloat16" if torch.cuda.get_device_capability(device) >= (8, 0) else "float16"


def typical(rounds: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Nested dicts like those of each round, with the median of each number over the rounds."""
    medians: dict[str, Any] = {}
    for name, first in rounds[0].items():
        column = [measured[name] for measured in rounds]
        medians[name] = typical(column) if isinstance(first, dict) else statistics.median(column)
    return medians


def meet(parallel: ContextParallel) -> None:
    """A barrier: returns on all ranks at about the same time."""
    parallel.ranks.handshake(1, {"call": "rda doctor"})


def rates(parallel: ContextParallel, device: str, dtype: torch.dtype) -> dict[str, float]:
    """This rank's FLOPs per second, forward and backward, and the seconds of a call, while all ranks compute."""
    many = ROWS if device == "cpu" else 8 * ROWS
    one_tile = DilatedPattern.dense()
    nine_tiles = DilatedPattern((FEW_ROWS,) * (1 + MORE), (1,) * (1 + MORE))
    large = _times(parallel, device, dtype, many, one_tile)
    small = _times(parallel, device, dtype, FEW_ROWS, one_tile)
    several = _times(parallel, device, dtype, FEW_ROWS, nine_tiles)
    tile = max(0.0, (several[0] - small[0]) / MORE, (several[1] - small[1]) / MORE)
    # of one product of matrices; a forward has 2 and a backward 5
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
    """The seconds of a forward, and those of its backward."""
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
    """The median seconds of each action. A round runs the actions one after another, and all ranks begin it together.
    The first round warms up and is left out."""
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
    """The seconds of a handshake, and of a small and a large message to the next rank, while all ranks send."""
    link = getattr(parallel.ranks, "all", None)
    assert isinstance(link, GroupLink)
    handshakes = timed(parallel, "cpu", *[lambda: meet(parallel)] * 3)
    seconds = {"handshake_seconds": statistics.median(handshakes)}
    onward, back = (link.rank + 1) % link.world_size, (link.rank - 1) % link.world_size
    on = device if link.backends.get(torch.device(device).type) else "cpu"
    for name, size in (("small_seconds", SMALL_MESSAGE), ("large_seconds", LARGE_MESSAGE)):
        leaves = torch.zeros(size, dtype=torch.uint8, device=on)
        comes = torch.empty_like(leaves)

        def swap(leaves: torch.Tensor = leaves, comes: torch.Tensor = comes) -> None:
            link.exchange([(leaves, onward)], [(comes, back)], "rda doctor").wait()

        [seconds[name]] = timed(parallel, on, swap)
    return seconds
