"""Describes the card, and checks its results: by the tests, in a very long call, and with one rank of NCCL."""

import math
import re
import subprocess
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from threading import Timer

import torch
import torch.distributed as dist
from torch import Tensor

from ring_dilated_attention import ContextParallel, DilatedPattern, dilated_attention, explain
from ring_dilated_attention.commands.errors import relative, squares, tolerances
from ring_dilated_attention.commands.local_ranks import Worker
from ring_dilated_attention.kernels import rows_at_once

from ..device import ceilings, describe, release
from ..gate import small_case
from ..measure import Sizes, make_tensors
from ..parts import Row
from .settings import PAPER, TWO, Settings

QUANTITIES = ("out", "dq", "dk", "dv")
CLONE = Path(__file__).parents[2]


def card(worker: Worker, settings: Settings) -> None:
    """Report the card, its measured ceilings, and the kernel that backend="auto" chooses."""
    facts = {"name": "a CPU in its place"} if settings.is_quick else describe()
    facts["triton"] = triton_version()
    most = ceilings(settings.device, settings.dtype, rows=settings.ceiling_rows)
    words = [
        facts["name"],
        f"torch {torch.__version__}",
        f"Triton {facts['triton']}",
        f"{most.flops_per_second / 1e12:.3g} TFLOP/s in a product of matrices",
        f"{most.bytes_per_second / 1e12:.3g} TB/s in a copy",
    ]
    worker.report(
        {
            "what": "the card",
            "passed": None,
            "found": ", ".join(words),
            "cards": [facts],
            "ceilings": most._asdict(),
        }
    )
    for head_dim in settings.head_dims:
        shape = (1, 64, settings.num_heads, head_dim)
        query = torch.empty(shape, device=settings.device, dtype=settings.dtype)
        said = explain(query, query, query, DilatedPattern(*TWO))
        worker.report(
            {
                "what": f"auto, head dim {head_dim}",
                "passed": None,
                "found": said.kernel,
            }
        )
    reason = rows_at_once.why_not(torch.device(settings.device))
    worker.report(
        {
            "what": "one merge of a call, in Triton",
            "passed": None if settings.is_quick else reason is None,
            "found": reason or "compiles",
        }
    )


def triton_version() -> str:
    """The version of Triton, which torch installs on some machines alone."""
    try:
        return str(import_module("triton").__version__)
    except ImportError:
        return "missing"


def run_tests(settings: Settings, seconds: float, tests: Sequence[str]) -> list[Row]:
    """Run tests by pytest, for so many seconds at most. Returns a row for each failed test, and one for all tests."""
    options = ["-v", "--tb=line", "-p", "no:cacheprovider", "-p", "no:xdist", "-o", "addopts="]
    command = [sys.executable, "-m", "pytest", *options, *tests]
    rows: list[Row] = []
    counts = {"PASSED": 0, "FAILED": 0, "ERROR": 0, "SKIPPED": 0}
    last = ""
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=CLONE
    ) as process:
        limit = Timer(seconds, process.kill)
        limit.start()
        assert process.stdout is not None
        for line in process.stdout:
            last = line.strip() or last
            said = re.match(r"(tests/\S+::.*?) (PASSED|FAILED|ERROR|SKIPPED)", line)
            if said is None:
                continue
            counts[said[2]] += 1
            if said[2] in ("FAILED", "ERROR"):
                rows.append({"what": said[1], "passed": False, "found": said[2].lower()})
        limit.cancel()
    if process.returncode < 0:
        last = f"ended after {seconds:.0f} s, at: {last}"
    words = []
    for what, number in counts.items():
        if number > 0:
            words.append(f"{number} {what.lower()}")
    numbers = ", ".join(words) or "none ran"
    rows.append(
        {
            "what": "tests",
            "passed": process.returncode == 0,
            "found": f"{numbers}: {last.strip('= ')}",
            **counts,
        }
    )
    return rows


def beyond(worker: Worker, settings: Settings) -> None:
    """Compare the last segments of a very long call with a call of these segments alone.

    In the long call every tensor has more than 2**31 elements, so that 32-bit indices would overflow.
    """
    sizes = settings.beyond
    branches = settings.branches[0] if settings.is_quick else TWO
    pattern = DilatedPattern(*branches)
    unit = math.lcm(*pattern.segment_lengths)
    start = (sizes.seq_len - 1) // unit * unit
    inputs, dout = make_tensors(sizes, device=settings.device)
    whole = [x[:, start:].clone() for x in both_ways(inputs, dout, pattern)]
    tails = []
    for x in inputs:
        tail = x.detach()[:, start:].clone()
        tails.append(tail.requires_grad_())
    alone = both_ways(tails, dout[:, start:].clone(), pattern)
    allowed = tolerances(small_case(sizes, pattern), sizes.dtype, settings.device)
    size = f"{sizes.seq_len:,} positions, {sizes.num_heads} heads of {sizes.head_dim}"
    for name, x, y in zip(QUANTITIES, whole, alone, strict=True):
        error = relative(squares(x, y.cpu().double()))
        at_most = 2 * allowed[name]
        worker.report(
            {
                "what": f"{name} at the end of {size}",
                "passed": error <= at_most,
                "found": f"differs by {error:.1e} of at most {at_most:.1e}",
            }
        )
    release(settings.device)


def both_ways(inputs: list[Tensor], dout: Tensor, pattern: DilatedPattern) -> list[Tensor]:
    """The results of a forward and backward: out, dq, dk, dv."""
    query, key, value = inputs
    out = dilated_attention(query, key, value, pattern)
    assert isinstance(out, Tensor)
    return [out.detach(), *torch.autograd.grad(out, inputs, dout)]


def one_rank(worker: Worker, settings: Settings) -> None:
    """Compare a call over an NCCL group of one rank with a call without a group. They must be equal to the bit."""
    if not settings.is_quick:
        dist.destroy_process_group()
        dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    sizes = Sizes(1000, 4, 64, settings.dtype)
    pattern = DilatedPattern(*PAPER, is_causal=True)
    inputs, dout = make_tensors(sizes, device=settings.device)
    expected = both_ways(inputs, dout, pattern)
    parallel = ContextParallel()
    query, key, value = inputs
    out = dilated_attention(query, key, value, pattern, parallel=parallel)
    assert isinstance(out, Tensor)
    found = [out.detach(), *torch.autograd.grad(out, inputs, dout)]
    is_equal = all(map(torch.equal, found, expected))
    worker.report(
        {
            "what": f"one rank over {dist.get_backend()}",
            "passed": is_equal,
            "found": "equal to a call without a group, to the bit, if it passed",
        }
    )
