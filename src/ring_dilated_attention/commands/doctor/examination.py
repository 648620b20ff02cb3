"""Collects what `rda doctor` reports: facts about each rank, and measurements that all ranks take together."""

import os
import shutil
import socket
import statistics
import tempfile
import time
import tomllib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...attention import dilated_attention
from ...kernels.choose import reasons
from ...pattern import DilatedPattern
from ...ranks.context import ContextParallel
from ...ranks.link import GroupLink
from ...training.agreement import values_of_all
from ...training.machine import hardware, physical_bytes, versions
from ..errors import Case, measure, worst
from ..hardware import LARGE_MESSAGE
from ..local_ranks import Worker

ENVIRONMENT = tomllib.loads(Path(__file__).with_name("environment.toml").read_text())
WORTH_16_BITS = 1.1  # advise 16 bits on a CPU from this speedup on; a smaller one may be noise, float32 is more exact
OFF = ("", "0", "false", "False")
WRITTEN_BYTES = 32 * 2**20
NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")

SMALL_MESSAGE = 256  # bytes: small messages show the latency, large ones (LARGE_MESSAGE) the bandwidth
REPEATS = 5
# Rounds are apart, so that a second in which the machine is busy spoils one round, and not the median.
ROUNDS, SECONDS_APART = 3, 0.5
# With at most so many ranks, every pair is measured. With more, only pairs whose distance is a power of two.
MOST_PAIRS = 16
# With ROWS rows, most of the time of attention goes into FLOPs; with FEW_ROWS, into the kernel call itself.
ROWS, FEW_ROWS, HEADS, HEAD_DIM = 2048, 32, 4, 64
MORE = 8  # further tiles in one attention call, to measure the time that a tile takes whatever its size
CASE = Case("doctor", DilatedPattern((16, 96), (1, 3), is_causal=True), 96, 1, 4, 2, 16)


def examine_on(worker: Worker, folder: Path, seconds: float, environment: Mapping[str, str]) -> list[dict[str, Any]]:
    return examine(folder, seconds, environment)


def examine(folder: Path, seconds: float, environment: Mapping[str, str], dtype: str = "") -> list[dict[str, Any]]:
    """The findings of all ranks, in order; every rank gets them. folder: where runs will be written.
    seconds: the timeout of a message. environment: the environment variables as the user set them. dtype: the one in
    which rates are measured. If it is empty, the advised dtype is taken."""
    parallel = ContextParallel(exchange="ring", timeout=timedelta(seconds=seconds))
    device = f"cuda:{torch.cuda.current_device()}" if torch.cuda.is_available() else "cpu"
    own = facts(parallel.rank, device, folder, environment)
    meet(parallel)
    own |= {"clock": time.time(), "agreement": agreement(parallel, device)}
    own |= speeds(parallel, device, own["gpu"], dtype)
    everyone = values_of_all(parallel, own)
    parallel.close()
    return everyone


def facts(rank: int, device: str, folder: Path, environment: Mapping[str, str]) -> dict[str, Any]:
    """The facts that a rank finds out without a message."""
    card = gpu(device)
    # An example, by which each backend says whether it can compute bfloat16 on a GPU or float32 on a CPU.
    example = torch.empty(1, 1, 1, 64, dtype=torch.bfloat16 if card else torch.float32, device=device)
    return {
        "rank": rank,
        "host": socket.gethostname(),
        "versions": versions() | gpu_versions(),
        "hardware": hardware(),
        "threads": torch.get_num_threads(),
        "device": device,
        "gpu": card,
        "memory_bytes": float(card["memory_bytes"]) if card else physical_bytes(),
        "backends": reasons(example),
        "harmful": harmful(environment),
        "matter": {name: environment[name] for name in ENVIRONMENT["matter"] if name in environment},
        "interfaces": sorted(name for _, name in socket.if_nameindex()),
        "folder": storage(folder),
    }


def gpu(device: str) -> dict[str, Any] | None:
    if not device.startswith("cuda"):
        return None
    found = torch.cuda.get_device_properties(device)
    return {"name": found.name, "capability": [found.major, found.minor], "memory_bytes": found.total_memory}


def gpu_versions() -> dict[str, str]:
    """The versions of torch's CUDA and NCCL, and of the driver's kernel module; "none" where there is none."""
    found = {"CUDA": torch.version.cuda or "none", "NCCL": "none", "GPU driver": "none"}
    with suppress(AttributeError, ImportError, RuntimeError):  # raised if torch is built without NCCL
        found["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
    with suppress(OSError, UnicodeDecodeError, IndexError):
        first = NVIDIA_DRIVER.read_text().splitlines()[0]
        found["GPU driver"] = " ".join(first.removeprefix("NVRM version:").split())
    return found


def processors() -> dict[str, float]:
    """Processor seconds until now: those that this machine had, those of them that were busy, those of this process."""
    ticks = [0] * 8
    with suppress(OSError, ValueError):  # where the system does not say
        ticks = list(map(int, Path("/proc/stat").read_text().split()[1:9]))
    whole, idle = (sum(x) / os.sysconf("SC_CLK_TCK") for x in (ticks, ticks[3:5]))
    return {"all": whole, "busy": whole - idle, "own": time.process_time()}


def dtype_advice(card: dict[str, Any] | None, speedup: float) -> str:
    """Which dtype to train in, and why. speedup: of attention in bfloat16 over float32."""
    if card is None:
        faster = "bfloat16" if speedup >= WORTH_16_BITS else "float32"
        return f"{faster}: attention in bfloat16 was {speedup:.2f} times as fast as in float32 on this CPU"
    if (major := card["capability"][0]) >= 8:
        return "bfloat16: this GPU's matrix units compute it, and its range is float32's"
    if major == 7:
        return "float16 with loss scaling: this GPU's matrix units know no bfloat16"
    return "float32: Pascal and older have no matrix units for 16-bit types"


def harmful(environment: Mapping[str, str]) -> dict[str, str]:
    found = {name: why for name, why in ENVIRONMENT["obsolete"].items() if name in environment}
    return found | {name: why for name, why in ENVIRONMENT["harmful"].items() if environment.get(name, "") not in OFF}


def storage(folder: Path) -> dict[str, Any]:
    """The disk's free bytes, and the bytes per second of writing and flushing a file; or why none can be written."""
    there = folder
    try:
        there = next(parent for parent in (folder.absolute(), *folder.absolute().parents) if parent.exists())
        with tempfile.NamedTemporaryFile(dir=there) as file:
            began = time.perf_counter()
            file.write(os.urandom(2**20) * (WRITTEN_BYTES // 2**20))
            file.flush()
            os.fsync(file.fileno())
            seconds = time.perf_counter() - began
        free = shutil.disk_usage(there).free
    except OSError as error:
        return {"path": str(there), "failure": error.strerror or str(error)}
    return {"path": str(there), "free_bytes": free, "bytes_per_second": WRITTEN_BYTES / seconds}


def meet(parallel: ContextParallel) -> None:
    """A barrier: returns on all ranks at about the same time."""
    parallel.ranks.handshake(1, {"call": "rda doctor"})


def agreement(parallel: ContextParallel, device: str) -> dict[str, Any]:
    """Compare a forward and backward over all ranks with the definition. Returns the result nearest its tolerance."""
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    everyone = values_of_all(parallel, measure(CASE, dtype, "auto", device, parallel))
    found = worst([CASE], dtype, [[one] for one in everyone], device.partition(":")[0])
    quantity = found.where.partition(" ")[0]
    return {"quantity": quantity, "error": found.error, "tolerance": found.tolerance, "passed": found.passed}


def speeds(parallel: ContextParallel, device: str, card: dict[str, Any] | None, dtype: str) -> dict[str, Any]:
    """The findings of `speedup` and `processors`, and, as medians over all rounds, those of `rates` and `messages`."""
    rounds, before, gain = [], processors(), speedup(parallel, device)
    least = min(values_of_all(parallel, gain))
    dtype = dtype or dtype_advice(card, least).replace(":", " ").split()[0]
    for i in range(ROUNDS):
        time.sleep(SECONDS_APART * (i > 0))
        found: dict[str, Any] = {"rates": rates(parallel, device, getattr(torch, dtype))}
        if parallel.world_size > 1:
            found["messages"] = messages(parallel, device)
        rounds.append(found)
    found = typical(rounds) | {"bfloat16_speedup": gain, "dtype": dtype}
    return found | {"processors": {name: seconds - before[name] for name, seconds in processors().items()}}


def typical(rounds: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Nested dicts like those of each round, with the median of each number over the rounds."""
    columns = {name: [found[name] for found in rounds] for name in rounds[0]}
    return {name: (typical if isinstance(x[0], dict) else statistics.median)(x) for name, x in columns.items()}


def rates(parallel: ContextParallel, device: str, dtype: torch.dtype) -> dict[str, float]:
    """This rank's FLOPs per second, forward and backward, and the seconds of a call, while all ranks compute."""
    many = ROWS if device == "cpu" else 8 * ROWS
    large = _times(parallel, device, dtype, many, DilatedPattern.dense())
    one = _times(parallel, device, dtype, FEW_ROWS, DilatedPattern.dense())
    several = _times(parallel, device, dtype, FEW_ROWS, DilatedPattern((FEW_ROWS,) * (1 + MORE), (1,) * (1 + MORE)))
    tile = max(0.0, *((b - a) / MORE for a, b in zip(one, several, strict=True)))
    work = [products * 2 * HEAD_DIM * HEADS * many**2 for products in (2, 5)]
    rate = [flops / max(a - b, a / 2) for flops, a, b in zip(work, large, one, strict=True)]
    return {
        "flops_per_second": rate[0],
        "backward_flops_per_second": rate[1],
        "call_seconds": tile,
        "around_seconds": max(0.0, max(one) - tile),
    }


def speedup(parallel: ContextParallel, device: str) -> float:
    """The seconds of attention in float32, forward and backward, divided by those in bfloat16."""
    rows, dtypes = ROWS // 2 if device == "cpu" else 8 * ROWS, (torch.float32, torch.bfloat16)
    seconds = [sum(_times(parallel, device, dtype, rows, DilatedPattern.dense())) for dtype in dtypes]
    return seconds[0] / seconds[1]


def _times(
    parallel: ContextParallel, device: str, dtype: torch.dtype, rows: int, pattern: DilatedPattern
) -> Sequence[float]:
    """The seconds of a forward, and those of its backward."""
    shape = (1, rows, HEADS, HEAD_DIM)
    query, key, value = (torch.randn(shape, dtype=dtype, device=device, requires_grad=True) for _ in range(3))
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


def messages(parallel: ContextParallel, device: str) -> dict[str, Any]:
    """The seconds of a handshake, and those of small and large messages by the ranks' distance."""
    link = getattr(parallel.ranks, "all", None)
    assert isinstance(link, GroupLink)
    p = link.world_size
    handshakes = timed(parallel, "cpu", *[lambda: meet(parallel)] * 3)
    found: dict[str, Any] = {"handshake_seconds": statistics.median(handshakes), "small": {}, "large": {}}
    distances = range(1, p) if p <= MOST_PAIRS else [2**k for k in range((p - 1).bit_length())]
    on = device if link.backends.get(torch.device(device).type) else "cpu"
    for name, size in (("small", SMALL_MESSAGE), ("large", LARGE_MESSAGE)):
        leaves = torch.zeros(size, dtype=torch.uint8, device=on)
        comes = torch.empty_like(leaves)
        for distance in distances:
            [found[name][str(distance)]] = timed(parallel, on, partial(_swap, link, leaves, comes, distance))
    return found


def _swap(link: GroupLink, leaves: Tensor, comes: Tensor, distance: int) -> None:
    """Send to the rank that is `distance` ahead; receive from the rank that is `distance` behind."""
    onward, back = (link.rank + distance) % link.world_size, (link.rank - distance) % link.world_size
    link.exchange([(leaves, onward)], [(comes, back)], "rda doctor").wait()
