"""The costs in a fresh process: CPU seconds of the import and of the first call, and the time of a later small call."""

import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ring_dilated_attention.pattern import DilatedPattern

from .gate import gate
from .measure import Sizes, call_json, quantiles
from .record import branches, markdown, tensors

SUMMARY = "CPU seconds of the import and of the first call; a small call's time"
MINUTES = 1
# A user's smallest script. It has one thread, so that the time of a small call is the time of Python and torch around
# the kernels.
SCRIPT = """
import json, sys, time
seq_len, num_heads, head_dim, lengths, rates, num_calls = json.loads(sys.argv[1])
began = time.process_time()
import torch
torch.set_num_threads(1)
with_torch = time.process_time()
from ring_dilated_attention import DilatedPattern, dilated_attention
imported = time.process_time()
pattern = DilatedPattern(lengths, rates, is_causal=True)
query, key, value = (torch.randn(1, seq_len, num_heads, head_dim, requires_grad=True) for _ in range(3))
made = time.process_time()
dilated_attention(query, key, value, pattern).sum().backward()
first = time.process_time()
forward = []
for _ in range(num_calls):
    start = time.perf_counter()
    dilated_attention(query.detach(), key.detach(), value.detach(), pattern)
    forward.append(time.perf_counter() - start)
times = [with_torch - began, imported - with_torch, first - made, sorted(forward)[num_calls // 2]]
print(json.dumps(times))
"""
NAMES = ("import_torch", "import", "first_call", "small_forward")


class Settings(NamedTuple):
    processes: int = 9
    num_calls: int = 101
    # So short that a call is mostly preparing, dispatching and merging, not attention.
    sizes: Sizes = Sizes(64, 4, 16)
    branches: tuple[tuple[int, ...], tuple[int, ...]] = ((32, 64), (1, 2))


FULL = Settings()
QUICK = Settings(1, 3)


def run(settings: Settings, step: Callable[[str], None]) -> list[dict[str, Any]]:
    pattern = DilatedPattern(*settings.branches, is_causal=True)
    passed = gate(settings.sizes, pattern)
    seq_len, num_heads, head_dim = settings.sizes[:3]
    arguments = json.dumps([seq_len, num_heads, head_dim, *settings.branches, settings.num_calls])
    found: list[list[float]] = []
    for i in range(settings.processes):
        step(f"process {i + 1} of {settings.processes}")
        said = subprocess.run(
            [sys.executable, "-c", SCRIPT, arguments], check=True, capture_output=True, text=True
        )
        found.append(json.loads(said.stdout))
    seconds = {
        name: quantiles(values)
        for name, values in zip(NAMES, zip(*found, strict=True), strict=True)
    }
    row = call_json(settings.sizes, pattern) | {"torch": torch.__version__}
    return [row | {"seconds": seconds, "gate": passed}]


def table(rows: list[dict[str, Any]]) -> str:
    [row] = rows
    words = {
        "import_torch": "import torch, CPU s",
        "import": "import dilated_attention after it, CPU s",
        "first_call": "the first forward and backward, CPU s",
        "small_forward": "a later forward, ms",
    }
    lines = []
    for name, text in words.items():
        factor = 1e3 if name == "small_forward" else 1
        found = row["seconds"][name]
        spread = f"{found['min'] * factor:.3g} to {found['max'] * factor:.3g}"
        lines.append((text, f"{found['median'] * factor:.3g} ({spread})"))
    title = f"{branches(row)}, {row['seq_len']} positions, {tensors(row)}, one thread."
    return f"{title}\n\n{markdown(('in a fresh process', 'median (spread)'), lines)}"
