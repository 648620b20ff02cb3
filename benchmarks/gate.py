"""The gate: before a call is timed, the same branches, heads and dtype are checked at a small size.

The result is compared with the definition of dilated attention. If the error is too large, nothing is timed.
"""

from collections.abc import Sequence
from typing import Any

import torch

from ring_dilated_attention.commands.errors import Case, Squares, measure, worst
from ring_dilated_attention.pattern import DilatedPattern
from ring_dilated_attention.ranks.context import ContextParallel

from .measure import Sizes
from .scaled import scaled_down

SMALL = 256


class GateError(AssertionError):
    """A call that was to be timed gives wrong results, or a case misses a target that it must reach."""


def small_case(sizes: Sizes, pattern: DilatedPattern) -> Case:
    """The same call at about SMALL positions. Sequence and segments are divided by the same number."""
    small, seq_len = scaled_down(pattern, sizes.seq_len, SMALL)
    heads = sizes.num_heads
    return Case("the gate", small, seq_len, sizes.batch, heads, heads, sizes.head_dim)


def gate_squares(
    sizes: Sizes,
    pattern: DilatedPattern,
    parallel: ContextParallel | None = None,
    *,
    backend: str = "auto",
    device: str = "cpu",
    through_lse: bool = True,
) -> Squares:
    """One rank's part of the gate: sums of squares of its errors and of the expected values."""
    return measure(
        small_case(sizes, pattern), sizes.dtype, backend, device, parallel, through_lse=through_lse
    )


def gate(
    sizes: Sizes,
    pattern: DilatedPattern,
    ranks: Sequence[Squares] | None = None,
    *,
    device: str = "cpu",
) -> dict[str, Any]:
    """Check a call at a small size. Returns the entry "gate" of a record's row.

    ranks: the parts of all ranks, from `gate_squares`. None computes the call in this process, on the CPU.

    Raises:
        GateError: if the tolerance is exceeded.
    """
    if ranks is None:
        ranks = [gate_squares(sizes, pattern)]
    return judged(small_case(sizes, pattern), sizes.dtype, ranks, device=device)


def judged(
    case: Case, dtype: torch.dtype, ranks: Sequence[Squares], *, device: str = "cpu"
) -> dict[str, Any]:
    """The entry "gate" of a row, from the parts of all ranks. Raises GateError if the tolerance is exceeded."""
    result = worst([case], dtype, [[squares] for squares in ranks], device)
    if not result.passed:
        raise GateError(
            f"{case.pattern} at {case.seq_len} positions on {len(ranks)} ranks: relative L2 error {result.error:.2e} "
            f"of {result.where} exceeds {result.tolerance:.2e}. Nothing was timed; `rda check` says more."
        )
    return {
        "passed": True,
        "ranks": len(ranks),
        "seq_len": case.seq_len,
        "segment_lengths": case.pattern.segment_lengths,
        "error": result.error,
        "tolerance": result.tolerance,
    }
