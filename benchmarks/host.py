"""The time that the host takes for a call on a GPU. No GPU is needed: attention and Triton's kernels are stubs that do
nothing.

All else runs as on an H100 with cuDNN: plans, views, tables for the kernels, new tensors, autograd. Left out are the
launches themselves.
"""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor

from ring_dilated_attention.attention import dilated_attention
from ring_dilated_attention.kernels import rows_at_once, sdpa
from ring_dilated_attention.pattern import DilatedPattern

from .gate import gate
from .measure import Sizes, call_json, make_tensors, quantiles
from .record import branches, markdown

SUMMARY = "what the host does for a call on a GPU, without the GPU's work"
MINUTES = 1
STAGES = ("forward", "backward")


class Settings(NamedTuple):
    sizes: Sizes = Sizes(32_768, 12, 64, torch.bfloat16)
    patterns: tuple[DilatedPattern, ...] = (
        DilatedPattern((2048, 4096, 8192, 16_384, 32_768), (1, 2, 4, 6, 12), is_causal=True),
        DilatedPattern((2048, 4096), (1, 2), is_causal=True),
    )
    repeats: int = 100
    warm_up: int = 20


FULL = Settings()
QUICK = Settings(
    Sizes(64, 2, 16, torch.bfloat16), (DilatedPattern((16, 64), (1, 4), is_causal=True),), 2, 1
)


def run(settings: Settings, step: Callable[[str], None]) -> list[dict[str, Any]]:
    rows = []
    for pattern in settings.patterns:
        step(str(pattern.segment_lengths))
        passed = gate(settings.sizes, pattern)
        rows.append(
            {**call_json(settings.sizes, pattern), **_times(settings, pattern), "gate": passed}
        )
    return rows


def _times(settings: Settings, pattern: DilatedPattern) -> dict[str, Any]:
    """For each stage the seconds by the clock, and the CPU seconds of this thread."""
    (query, key, value), dout = make_tensors(settings.sizes)
    marks = []
    with stubs() as calls:
        for _ in range(settings.warm_up + settings.repeats):
            began = (time.perf_counter(), time.thread_time())
            out = dilated_attention(query, key, value, pattern, backend="sdpa")
            middle = (time.perf_counter(), time.thread_time())
            assert isinstance(out, Tensor)
            torch.autograd.grad(out, (query, key, value), dout)
            marks.append((began, middle, (time.perf_counter(), time.thread_time())))
    found: dict[str, Any] = {"ops": len(calls) // len(marks)}
    for i, clock in enumerate(("seconds", "cpu_seconds")):
        found[clock] = {}
        for stage, (start, stop) in zip(STAGES, ((0, 1), (1, 2)), strict=True):
            taken = [mark[stop][i] - mark[start][i] for mark in marks[settings.warm_up :]]
            found[clock][stage] = quantiles(taken)
    return found


class _Kernel:
    """In the place of a kernel in Triton."""

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return lambda *arguments, **constants: None


@contextmanager
def stubs() -> Iterator[list[str]]:
    """A context in which CPU tensors take the steps of CUDA tensors on an H100. Yields the list of the ops called."""
    calls: list[str] = []

    def empty(x: Tensor) -> Tensor:
        batch, heads, rows, head_dim = x.shape
        return torch.empty((batch, rows, heads, head_dim), dtype=x.dtype).transpose(1, 2)

    # What a tile gives is made once for all tiles of its shapes: an op's own time is not the host's.
    partials: dict[Any, tuple[Tensor, ...]] = {}
    gradients: dict[Any, tuple[Tensor, ...]] = {}

    def forward(q: Tensor, k: Tensor, v: Tensor, *rest: Any, **options: Any) -> tuple[Tensor, ...]:
        calls.append("forward")
        if q.shape not in partials:
            partials[q.shape] = empty(q), torch.empty((*q.shape[:3], 1))
        return partials[q.shape]

    def backward(
        dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any, **options: Any
    ) -> tuple[Tensor, ...]:
        calls.append("backward")
        shapes = q.shape, k.shape
        if shapes not in gradients:
            gradients[shapes] = empty(q), empty(k), empty(v)
        return gradients[shapes]

    names = ("write_kernel", "merge_kernel", "add_kernel", "lay_out_kernel")
    kernels = dict.fromkeys(names, _Kernel())
    dtypes = dict.fromkeys((torch.float32, torch.float16, torch.bfloat16))
    ops = {
        "_scaled_dot_product_cudnn_attention": forward,
        "_scaled_dot_product_cudnn_attention_backward": backward,
    }
    with ExitStack() as stack:
        for target, name, stub in (
            (torch.cuda, "get_device_capability", lambda device=None: (9, 0)),
            (torch.backends.cuda, "is_flash_attention_available", lambda: True),
            (torch.backends.cudnn, "version", lambda: 92_000),
            (rows_at_once, "why_not", lambda device: None),
            (rows_at_once, "_on_device", lambda x: nullcontext()),
            (sdpa, "why_not", lambda query: None),
            (sdpa, "aten", SimpleNamespace(**ops)),
            # A GPU fills memory beside the host.
            (Tensor, "new_full", lambda x, size, value: x.new_empty(size)),
        ):
            stack.enter_context(mock.patch.object(target, name, stub))
        module = f"{rows_at_once.__package__}.row_kernels"
        of_module = SimpleNamespace(**kernels, DTYPES=dtypes)
        stack.enter_context(mock.patch.dict(sys.modules, {module: of_module}))
        yield calls


def table(rows: list[dict[str, Any]]) -> str:
    headers = ("pattern", "heads", "positions", "ops", *(f"{stage}, ms" for stage in STAGES))
    lines = []
    for row in rows:
        times = []
        for stage in STAGES:
            wall, cpu = (row[clock][stage]["median"] for clock in ("seconds", "cpu_seconds"))
            times.append(f"{1e3 * wall:.2f} ({1e3 * cpu:.2f})")
        heads = f"{row['num_heads']} of {row['head_dim']}"
        lines.append((branches(row), heads, f"{row['seq_len']:,}", str(row["ops"]), *times))
    repeats = rows[0]["seconds"]["forward"]["repeats"]
    return (
        f"Medians of {repeats} calls by the clock, and in brackets the CPU time of the calling thread. Attention and "
        f"Triton's kernels are stubs, and launches are left out.\n\n{markdown(headers, lines)}"
    )
