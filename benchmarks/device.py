"""Time, memory and kernels of calls on a GPU. With `--quick` the same functions measure tiny sizes on a CPU.

All measuring by torch.cuda is in this file. So it is the part of the benchmarks that only a run on a GPU can test.
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

# The fields of nvidia-smi for a record: the clocks at the end of a case, and the limits on them.
_QUESTIONS = (
    "driver_version",
    "clocks.sm",
    "clocks.max.sm",
    "clocks.mem",
    "power.limit",
    "temperature.gpu",
)


def synchronize(device: str) -> None:
    """Wait until the device is idle. Raises the errors of the kernels that ran on it."""
    if device != "cpu":
        torch.cuda.synchronize(device)


def release(device: str) -> None:
    """Give back the memory that torch has cached, so that the next measurement can use it."""
    if device != "cpu":
        torch.cuda.empty_cache()


class Mark:
    """A moment in the work of a device. On a GPU this is an event in its stream: the host does not wait for it."""

    def __init__(self, device: str) -> None:
        self._event = None if device == "cpu" else torch.cuda.Event(enable_timing=True)
        if self._event is not None:
            self._event.record()
        self._time = time.perf_counter()

    def since(self, start: "Mark") -> float:
        """The seconds from `start` to this mark. On a GPU call `synchronize` before."""
        if self._event is None or start._event is None:
            return self._time - start._time
        return start._event.elapsed_time(self._event) / 1000


def peak_bytes(device: str, function: Callable[[], object]) -> int:
    """The peak of the bytes that torch has allocated while a function runs, less those allocated before it."""
    if device == "cpu":
        return allocated(function).peak_bytes
    synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    function()
    synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


class Kernel(NamedTuple):
    """All launches of one kernel in a call. Copies and fills of memory count as kernels too."""

    name: str
    launches: int
    seconds: float


class Profile(NamedTuple):
    """What the profiler found in one call.

    `kernels`: what ran on the GPU, the longest first; empty on a CPU. `attention_ops`: torch's attention ops that were
    called, by name.
    """

    kernels: tuple[Kernel, ...]
    attention_ops: tuple[str, ...]

    @property
    def launches(self) -> int:
        return sum(kernel.launches for kernel in self.kernels)


def profiled(device: str, function: Callable[[], object]) -> Profile:
    # Without this the profiler writes to stderr when it starts and stops.
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
    """Wait for all ranks, so that they go on together. A waiting rank does not use its core."""
    parallel.ranks.handshake(0, {"call": "start together"})


def timed(
    device: str, parallel: ContextParallel, action: Callable[[], object], *, repeats: int = 5
) -> float:
    """The median seconds of `repeats` runs of an action, after one to warm up. All ranks begin each run together."""
    seconds = []
    for _ in range(1 + repeats):
        meet(parallel)
        began = time.perf_counter()
        action()
        synchronize(device)
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds[1:])


def exposed(device: str, parallel: ContextParallel, step: Callable[[], object]) -> dict[str, float]:
    """The seconds of a step, and its "exposed" seconds: those in which this rank only exchanged messages.

    With gloo the process itself waits for messages, and these waits are the exposed seconds. With NCCL the process does
    not wait. There exposed seconds are those in which the device ran kernels of NCCL and no others, by the profiler.
    Handshakes go over gloo in both cases, and are exposed too.
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
        # The profilers of the ranks start at different times. Begin the step together.
        meet(parallel)
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
    """The total time that is within a span, and within no cover. Both are (begin, end), and may overlap.

    Example: the span (0, 10) and the cover (4, 6) leave 8.
    """
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
    """The highest rates measured on this device: FLOPs of a matrix product, and bytes read plus written of a copy."""

    flops_per_second: float
    bytes_per_second: float


def ceilings(device: str, dtype: torch.dtype, *, rows: int = 8192, repeats: int = 10) -> Ceilings:
    """Measure a product of two rows x rows matrices, and a copy of 16 such matrices. The best of `repeats` counts.

    With 8,192 rows of 16-bit numbers the copy has 2 GiB.
    """
    x, y = (torch.randn(rows, rows, device=device, dtype=dtype) for _ in range(2))
    source = torch.randn(16, rows, rows, device=device, dtype=dtype)
    target = torch.empty_like(source)
    product = min(_times(device, lambda: torch.matmul(x, y), repeats))
    copy = min(_times(device, lambda: target.copy_(source), repeats))
    return Ceilings(2 * rows**3 / product, 2 * source.nbytes / copy)


def _times(device: str, function: Callable[[], object], repeats: int) -> list[float]:
    marks = []
    for _ in range(1 + repeats):  # the first run warms up
        marks.append(Mark(device))
        function()
    marks.append(Mark(device))
    synchronize(device)
    return [end.since(start) for start, end in pairwise(marks[1:])]


def describe() -> dict[str, Any]:
    """The name and properties of the GPU, its driver and its libraries, for a record."""
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
