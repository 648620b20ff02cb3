"""The share of the FLOP-bound speed-up over dense attention that is kept on a GPU, forward, and forward + backward.

It is taken against the same kernel run dense, and against the fastest dense attention that torch can run on the card.
Beyond `dense_at_most` positions dense attention takes too long to repeat: its time there is that of the longest
measured length, scaled by FLOPs, and the row says so.

On an H100 the case should take about 4 minutes: 2 of measuring, half of it dense attention, and 2 of gates and of
starting 12 processes. No group begins or goes on after `budget` seconds; its rows say so.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ring_dilated_attention.commands.local_ranks import Launch, Worker, run_ranks
from ring_dilated_attention.pattern import DilatedPattern

from .apart import Budget, refuse_empty
from .candidates import Candidate
from .device import Ceilings, ceilings, resolve
from .measure import Sizes
from .record import branches, markdown, not_measured, tensors
from .shares import FASTEST_DENSE_TARGETS, OWN_DENSE_TARGET, DenseTimes, dense_times, row_of
from .side_by_side import Group, measure_group

SUMMARY = "share of the FLOP-bound speed-up on a GPU, beside torch's ops and a peer"
MINUTES = 4
NEEDS_GPU = True
DENSE = tuple(Candidate("torch", op) for op in ("flash", "flash 3", "flash 4", "cuDNN"))
# The first of each pattern is what the others must agree with.
HOW = (("sdpa", "flash"), ("sdpa", "flash 3"), ("sdpa", "cuDNN"), ("torchscale", ""))


class Settings(NamedTuple):
    device: str | None = "cuda"
    dtype: torch.dtype = torch.bfloat16
    num_heads: int = 12
    head_dims: tuple[int, ...] = (64, 128)
    branches: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...] = (
        ((2048, 4096), (1, 2)),
        ((2048, 4096, 8192, 16_384), (1, 2, 4, 8)),
        ((2048, 4096, 8192, 16_384, 32_768), (1, 2, 4, 6, 12)),
    )
    repeats: Mapping[int, int] = {32_768: 15, 131_072: 5, 1_048_576: 3}
    dense_at_most: int = 131_072
    ceiling_rows: int = 8192
    seconds: float = 120  # of a group's process
    budget: float = 420  # seconds of the case


FULL = Settings()
QUICK = Settings(
    None, torch.bfloat16, 4, (16,), (((128, 256), (1, 2)),), {512: 2, 1024: 1}, 512, 128
)


def groups(settings: Settings) -> list[Group]:
    """Shorter sequences first, so that dense attention is known when a length needs it."""
    return [
        _group(settings, Sizes(n, settings.num_heads, head_dim, settings.dtype), repeats, is_causal)
        for n, repeats in sorted(settings.repeats.items())
        for head_dim in settings.head_dims
        for is_causal in (False, True)
    ]


def _group(settings: Settings, sizes: Sizes, repeats: int, is_causal: bool) -> Group:
    has_dense = sizes.seq_len <= settings.dense_at_most
    candidates = list(DENSE) if has_dense else []
    for pair in settings.branches:
        for how, op in HOW:
            phase = "blocked" if how == "torchscale" else "modulo"
            candidates.append(
                Candidate(how, op, DilatedPattern(*pair, is_causal=is_causal, phase=phase))
            )
    return Group(
        sizes, is_causal, tuple(candidates), repeats, resolve(settings.device), compares=has_dense
    )


def run(settings: Settings, step: Callable[[str], None]) -> list[dict[str, Any]]:
    budget = Budget(settings.budget)
    step("ceilings")
    [most] = run_ranks(Launch(1, seconds=settings.seconds), _ceilings, settings)
    dense: dict[tuple[int, bool], DenseTimes] = {}
    rows: list[dict[str, Any]] = []
    for group in groups(settings):
        found = measure_group(group, step, seconds=settings.seconds, budget=budget)
        key = (group.sizes.head_dim, group.is_causal)
        dense[key] = dense_times(group, found) or dense.get(key, {})
        for candidate, result in zip(group.candidates, found, strict=True):
            rows.append(row_of(group, candidate, result, dense[key], most))
    refuse_empty(rows)
    return rows


def _ceilings(worker: Worker, settings: Settings) -> Ceilings:
    return ceilings(resolve(settings.device), settings.dtype, rows=settings.ceiling_rows)


def table(rows: list[dict[str, Any]]) -> str:
    measured = [row for row in rows if "reason" not in row]
    most = measured[0]["ceilings"]
    texts = [
        f"On {measured[0]['device']}. Median milliseconds (TFLOP/s) of forward, and of both ways; after each "
        "the share kept of the speed-up over dense attention that FLOPs allow, against the same kernel run dense "
        f"(target {OWN_DENSE_TARGET:.0%}) and against torch's fastest (targets "
        f"{' and '.join(f'{target:.0%}' for target in FASTEST_DENSE_TARGETS.values())}). After a star, dense attention "
        "was measured at a shorter length and scaled by FLOPs. Peaks are beside query, key, value and dout. The "
        f"card's own ceilings: {most['flops_per_second'] / 1e12:.0f} TFLOP/s in a product of matrices, "
        f"{most['bytes_per_second'] / 1e12:.2f} TB/s in a copy."
    ]
    titles = {(row["head_dim"], row["is_causal"]): tensors(row) for row in measured}
    for (head_dim, is_causal), title in titles.items():
        of_size = [
            row for row in measured if (row["head_dim"], row["is_causal"]) == (head_dim, is_causal)
        ]
        texts += [f"{title}{', causal' if is_causal else ''}:", _table(of_size)]
    return "\n\n".join([*texts, *not_measured(rows)])


def _table(rows: Sequence[dict[str, Any]]) -> str:
    headers: tuple[str, ...] = ("pattern", "positions", "candidate", "peak, GB")
    for stage in ("forward", "both"):
        headers += (f"{stage}, ms", "of own dense", "of fastest")
    lines = []
    for row in rows:
        pattern = "dense" if row["is_dense"] else branches(row | {"is_causal": False})
        line: tuple[str, ...] = (
            pattern,
            f"{row['seq_len']:,}",
            row["candidate"],
            f"{row['peak_bytes'] / 1e9:.2f}",
        )
        for found in row["stages"].values():
            line += (
                f"{found['seconds']['median'] * 1e3:.3g} ({found['flops_per_second'] / 1e12:.3g})",
            )
            line += tuple(_percent(row, found.get(name)) for name in ("own_dense", "fastest_dense"))
        lines.append(line)
    return markdown(headers, lines)


def _percent(row: dict[str, Any], found: dict[str, Any] | None) -> str:
    if found is None:
        return ""
    return f"{found['share']['median']:.1%}{'' if found['measured_at'] == row['seq_len'] else '*'}"
