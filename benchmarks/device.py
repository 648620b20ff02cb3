"""What the GPU cases ask of a device. On a CPU, which stands in at tiny sizes, the same questions have humbler answers.

Nothing else in `python -m benchmarks` calls torch.cuda, so this is what a first run on a GPU has to prove.
"""

import os
import statistics
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from ring_dilated_attention.ranks.context import ContextParallel
from ring_dilated_attention.ranks.processes import recorded_waits

from .measure import allocated

# What nvidia-smi is asked: the clocks as the case leaves them, and what limits them.
_QUESTIONS = (
    "driver_version",
    "clocks.sm",
    "clocks.max.sm",
    "clocks.mem",
    "power.limit",
    "temperature.gpu",
)


def synchronize(device: str) -> None:
    """Wait for the device. Raises what went wrong on it since."""
    if device != "cpu":
        torch.cuda.synchronize(device)


def release(device: str) -> None:
    """Give cached memory back, so that what comes next is not short of it."""
    if device != "cpu":
        torch.cuda.empty_cache()


class Mark:
    """A moment in the device's own time: on a GPU an event in its stream, which the host does not wait for."""

    def __init__(self, device: str) -> None:
        self._event = None if device == "cpu" else torch.cuda.Event(enable_timing=True)
        if self._event is not None:
            self._event.record()
        self._time = time.perf_counter()

    def since(self, start: "Mark") -> float:
        """Seconds; on a GPU to be asked after `synchronize`."""
        if self._event is None or start._event is None:
            return self._time - start._time
        return start._event.elapsed_time(self._event) / 1000


def peak_bytes(device: str, function: Callable[[], object]) -> int:
    """What a function takes from torch's allocator at its peak, beyond what was held before."""
    if device == "cpu":
        return allocated(function).peak_bytes
    synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    function()
    synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


class Kernel(NamedTuple):
    """What ran on the device under one name, copies and fills included."""

    name: str
    launches: int
    seconds: float


class Profile(NamedTuple):
    """One call: what the device ran, the longest first (nothing on a CPU), and which of torch's attention ops."""

    kernels: tuple[Kernel, ...]
    attention_ops: tuple[str, ...]

    @property
    def launches(self) -> int:
        return sum(kernel.launches for kernel in self.kernels)


def profiled(device: str, function: Callable[[], object]) -> Profile:
    # else it writes to stderr when it starts and stops
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    activities = [ProfilerActivity.CPU] + ([] if device == "cpu" else [ProfilerActivity.CUDA])
    with profile(activities=activities) as found:
        function()
        synchronize(device)
    assert found.profiler is not None
    launches: Counter[str] = Counter()
    nanoseconds: Counter[str] = Counter()
    ops = set()
    for event in found.profiler.kineto_results.events():
        name = event.name()
        if event.device_type() == DeviceType.CUDA:
            launches[name] += 1
            nanoseconds[name] += event.duration_ns()
        elif name.startswith("aten::_") and "attention" in name:
            ops.add(name)
    kernels = (
        Kernel(name[:120], launches[name], total / 1e9) for name, total in nanoseconds.most_common()
    )
    return Profile(tuple(kernels), tuple(sorted(ops)))


def meet(parallel: ContextParallel) -> None:
    """All ranks go on together. Whoever waits leaves the core to whoever is alone."""
    parallel.ranks.handshake(0, {"call": "start together"})


def timed(
    device: str, parallel: ContextParallel, action: Callable[[], object], *, repeats: int = 5
) -> float:
    """The median seconds of an action that all ranks begin together. The first one warms up."""
    seconds = []
    for _ in range(1 + repeats):
        meet(parallel)
        began = time.perf_counter()
        action()
        synchronize(device)
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds[1:])


def exposed(device: str, parallel: ContextParallel, step: Callable[[], object]) -> dict[str, float]:
    """The seconds of a step, and those in which this rank did nothing but exchange messages.

    On gloo these are the waits of the process. Waits of NCCL do not stop a process, and the profiler tells when the
    device ran kernels of NCCL alone. Handshakes go over gloo in both cases.
    """
    meet(parallel)
    with recorded_waits(parallel.ranks) as waits:
        begin = time.perf_counter()
        step()
        synchronize(device)
        seconds = time.perf_counter() - begin
    handshakes = sum(wait.end - wait.start for wait in waits if wait.moment.endswith("handshake"))
    found = {
        "step": seconds,
        "handshakes": handshakes,
        "exposed": sum(wait.end - wait.start for wait in waits),
    }
    if device == "cpu":
        return found
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
        meet(parallel)  # the profilers of the ranks do not begin at the same time
        step()
        synchronize(device)
    assert profiled.profiler is not None
    spans: dict[bool, list[tuple[int, int]]] = {False: [], True: []}
    for event in profiled.profiler.kineto_results.events():
        if event.device_type() == DeviceType.CUDA and not event.is_user_annotation():
            spans[event.name().startswith("nccl")].append(
                (event.start_ns(), event.start_ns() + event.duration_ns())
            )
    return found | {"exposed": handshakes + uncovered(spans[True], spans[False]) / 1e9}


def uncovered(spans: Iterable[tuple[int, int]], covers: Iterable[tuple[int, int]]) -> int:
    """The time in which one span lasts at least, and no cover."""
    events = sorted(
        (moment, kind, change)
        for kind, given in enumerate((spans, covers))
        for begin, end in given
        for moment, change in ((begin, 1), (end, -1))
    )
    total, last, num_open = 0, 0, [0, 0]
    for moment, kind, change in events:
        total += moment - last if num_open[0] and not num_open[1] else 0
        num_open[kind] += change
        last = moment
    return total


class Ceilings(NamedTuple):
    """The most that was measured on this device: of a matrix product, and of a copy (bytes read and written)."""

    flops_per_second: float
    bytes_per_second: float


def ceilings(device: str, dtype: torch.dtype, *, rows: int = 8192, repeats: int = 10) -> Ceilings:
    """A rows x rows product and a copy of 16 such matrices (2 GiB for 8,192 rows of 16 bits), the best of `repeats`."""
    x, y = (torch.randn(rows, rows, device=device, dtype=dtype) for _ in range(2))
    source = torch.randn(16, rows, rows, device=device, dtype=dtype)
    target = torch.empty_like(source)
    product = min(_times(device, lambda: torch.matmul(x, y), repeats))
    copy = min(_times(device, lambda: target.copy_(source), repeats))
    return Ceilings(2 * rows**3 / product, 2 * source.nbytes / copy)


def _times(device: str, function: Callable[[], object], repeats: int) -> list[float]:
    marks = []
    for _ in range(1 + repeats):  # the first warms up
        marks.append(Mark(device))
        function()
    marks.append(Mark(device))
    synchronize(device)
    return [end.since(start) for start, end in pairwise(marks[1:])]


def describe() -> dict[str, Any]:
    """The GPU, its driver and its libraries, for a record."""
    found = torch.cuda.get_device_properties(torch.cuda.current_device())
    return {
        "name": found.name,
        "capability": f"{found.major}.{found.minor}",
        "multiprocessors": found.multi_processor_count,
        "memory_bytes": found.total_memory,
        "cuda": torch.version.cuda or torch.version.hip,
        "cudnn": torch.backends.cudnn.version(),
        **_by_nvidia_smi(),
    }


def _by_nvidia_smi() -> dict[str, str]:
    command = [
        "nvidia-smi",
        f"--query-gpu={','.join(_QUESTIONS)}",
        "--format=csv,noheader",
        "--id=0",
    ]
    try:
        said = subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=10
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return {}
    return dict(zip(_QUESTIONS, (value.strip() for value in said.split(",")), strict=False))
