"""Error against the number of ranks. The same call runs on 1 to 64 simulated ranks, and on one device in float64.

Both calls get the same inputs, rounded to the dtype of the ranks. Simulated ranks run in one process: their plans,
merges and messages are those of real ranks. All calls, also the one in float64, are compared with the definition at a
small size (the gate).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ring_dilated_attention import simulate
from ring_dilated_attention.attention import dilated_attention
from ring_dilated_attention.commands.errors import QUANTITIES, Case, make_inputs, relative, squares
from ring_dilated_attention.pattern import DilatedPattern
from ring_dilated_attention.ranks.context import ContextParallel

from .gate import gate, gate_squares
from .measure import Sizes, call_json
from .record import branches, markdown

SUMMARY = "error of 1 to 64 ranks against one device in float64"
MINUTES = 3


class Setup(NamedTuple):
    pattern: DilatedPattern
    sharding: str = "contiguous"


class Settings(NamedTuple):
    seq_len: int = 4096
    num_heads: int = 4
    head_dim: int = 64
    setups: tuple[Setup, ...] = (
        Setup(DilatedPattern.dense()),
        Setup(DilatedPattern.dense(is_causal=True), "zigzag"),
        Setup(DilatedPattern((512, 2048, 4096), (1, 2, 4))),
        Setup(DilatedPattern((512, 2048, 4096), (1, 2, 4), is_causal=True)),
    )
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16)
    num_ranks: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)


FULL = Settings()
QUICK = Settings(
    256, 2, 16, (Setup(DilatedPattern((64, 256), (1, 4), is_causal=True)),), num_ranks=(1, 4)
)


def run(settings: Settings, step: Callable[[str], None]) -> list[dict[str, Any]]:
    rows = []
    for setup in settings.setups:
        exact = Sizes(settings.seq_len, settings.num_heads, settings.head_dim, torch.float64)
        passed = gate(exact, setup.pattern)
        for dtype in settings.dtypes:
            row = _row(settings, setup, exact._replace(dtype=dtype), step)
            rows.append(row | {"float64_gate": passed})
    return rows


def _row(
    settings: Settings, setup: Setup, sizes: Sizes, step: Callable[[str], None]
) -> dict[str, Any]:
    pattern, sharding = setup
    row = call_json(sizes, pattern)
    heads, dtype = sizes.num_heads, sizes.dtype
    case = Case("error", pattern, sizes.seq_len, 1, heads, heads, sizes.head_dim)
    step(f"{branches(row)}, {dtype}, one device in float64")
    expected = _call(case, dtype, torch.float64, None)
    errors: dict[str, list[float]] = {name: [] for name in QUANTITIES}
    for num_ranks in settings.num_ranks:
        step(f"{branches(row)}, {dtype}, p = {num_ranks}")
        results = _call(case, dtype, dtype, simulate.all_ranks(num_ranks, sharding=sharding))
        for name in QUANTITIES:
            errors[name].append(relative(squares(results[name], expected[name])))
    most = simulate.all_ranks(settings.num_ranks[-1], sharding=sharding)
    passed = gate(sizes, pattern, [gate_squares(sizes, pattern, most)])
    return row | {
        "sharding": sharding,
        "ranks": settings.num_ranks,
        "errors": errors,
        "gate": passed,
    }


def _call(
    case: Case, rounded: torch.dtype, dtype: torch.dtype, parallel: ContextParallel | None
) -> dict[str, Tensor]:
    """Compute out, lse and gradients in `dtype`, from inputs that were first rounded to the dtype `rounded`."""
    inputs, dout, _ = make_inputs(case, rounded)
    query, key, value = leaves = [x.to(dtype).requires_grad_() for x in inputs]
    out, lse = dilated_attention(
        query, key, value, case.pattern, parallel=parallel, return_lse=True
    )
    grads = torch.autograd.grad(out, leaves, dout.to(dtype))
    return dict(zip(QUANTITIES, (out.detach(), lse.detach(), *grads), strict=True))


def table(rows: list[dict[str, Any]]) -> str:
    ranks = rows[0]["ranks"]
    lines = []
    for row in rows:
        for i, (name, errors) in enumerate(row["errors"].items()):
            ratios = [error / errors[0] for error in errors[1:]]
            call = f"{branches(row)}, {row['sharding']}, {row['dtype']}" if i == 0 else ""
            lines.append((call, name, f"{errors[0]:.1e}", *(f"{ratio:.2f}" for ratio in ratios)))
    first = rows[0]
    headers = ("call", "of", f"p = {ranks[0]}", *(f"p = {p} / p = {ranks[0]}" for p in ranks[1:]))
    return (
        f"{first['seq_len']:,} positions, {first['num_heads']} heads of {first['head_dim']}: relative L2 error of "
        "one rank against one device in float64 on the same rounded inputs, then that of p simulated ranks over it.\n\n"
        f"{markdown(headers, lines)}"
    )
