"""Measures the errors of an attention call, and computes how large they may be.

The errors are those of out, lse and the gradients dq, dk and dv. They are measured against the definition: the
unoptimised attention of `reference.py`, in float64.

B batch, N positions, H query heads, G key/value heads, D head dim.
"""

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from ..attention import dilated_attention
from ..kernels.cpu import short_rows_fail
from ..pattern import DilatedPattern
from ..ranks.context import ContextParallel
from ..reference import dilated_attention_reference, multiplicity
from ..run.dilated_cache import DTYPES, DilatedCache

QUANTITIES = ("out", "lse", "dq", "dk", "dv")
# A floor that is added to every tolerance, because rounding a result once costs about eps / 4 in relative L2. In
# float64 the floor is larger, because the definition is computed in float64 too, and has rounding errors itself.
FLOOR = {
    dtype: torch.finfo(dtype).eps * (8 if dtype == torch.float64 else 0.25) for dtype in DTYPES
}
# On a GPU the floor of float32 is larger, for two reasons. exp2 and log2 are approximate (2 ulp each, PTX ISA). And
# torch's memory-efficient op computes one float32 product from three tf32 products. An op with a single tf32 product
# would be off by 1e-4 or more, far beyond this floor.
FLOOR_ON_GPU = FLOOR | {torch.float32: 4 * torch.finfo(torch.float32).eps}


class Case(NamedTuple):
    """One attention call: its pattern and its sizes.

    documents: the borders of packed documents, such as (0, 40, 97) for two documents of 40 and 57 positions.
    None: the sequence is one document.
    """

    name: str
    pattern: DilatedPattern
    seq_len: int
    batch: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    documents: tuple[int, ...] | None = None
    sharding: str = "contiguous"


# Two sums for each quantity (out, lse, dq, dk, dv), by its name: sum((result - expected)**2) and sum(expected**2). Both
# are over this rank's rows only. `expected` is what the definition gives.
Squares = dict[str, tuple[float, float]]


def make_inputs(case: Case, dtype: torch.dtype) -> tuple[list[Tensor], Tensor, Tensor]:
    """Random [query, key, value], dout and dlse in float64, the same on all ranks. The numbers are rounded to `dtype`,
    so that a conversion to `dtype` is exact."""
    generator = torch.Generator().manual_seed(case.seq_len)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).double()

    heads = (case.num_heads, case.num_kv_heads, case.num_kv_heads)
    inputs = [draw(case.batch, case.seq_len, h, case.head_dim) for h in heads]
    dout = draw(case.batch, case.seq_len, case.num_heads, case.head_dim)
    return inputs, dout, draw(case.batch, case.seq_len, case.num_heads)


def defined(
    case: Case, inputs: Sequence[Tensor], dout: Tensor, dlse: Tensor | None
) -> dict[str, Tensor]:
    """Compute out, lse, dq, dk and dv by the definition (`reference.py`). Returns them by name.

    dlse: the gradient of lse; None for a loss that does not use lse.
    """
    query, key, value = leaves = [x.clone().requires_grad_() for x in inputs]
    out, lse = dilated_attention_reference(
        query, key, value, case.pattern, cu_seqlens=case.documents
    )
    grads = torch.autograd.grad(_loss(out, lse, dout, dlse), leaves)
    return dict(zip(QUANTITIES, (out.detach(), lse.detach(), *grads), strict=True))


@lru_cache(maxsize=64)
def tolerances(case: Case, dtype: torch.dtype, device: str = "cpu") -> dict[str, float]:
    """The largest relative L2 error that each of out, lse, dq, dk and dv may have, by name.

    It is twice the error of torch's CPU attention in this dtype under the same mask, plus the floor in `FLOOR` or, on a
    GPU, in `FLOOR_ON_GPU`.
    """
    inputs, dout, _ = make_inputs(case, dtype)
    expected = defined(case, inputs, dout, None)
    leaves = [x.to(dtype).requires_grad_() for x in inputs]
    count = multiplicity(case.pattern, case.seq_len, case.num_heads, case.documents)
    # Make the mask that is added to the scores: log M for a query and a key to which the query attends M times. Use
    # float32 at least, because log 2 is not exact in bfloat16.
    bias = count.to(torch.promote_types(dtype, torch.float32)).log().unsqueeze(0)
    rows = [x.transpose(1, 2) for x in leaves]
    if dtype.itemsize == 2 and short_rows_fail():
        rows = [x.float() for x in rows]
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*rows, attn_mask=bias)
    out, lse = out.transpose(1, 2).to(dtype), lse.transpose(1, 2)
    covered = torch.isfinite(expected["lse"])
    grads = torch.autograd.grad(out, leaves, (dout * covered.unsqueeze(-1)).to(dtype))
    lse = lse.where(covered, -torch.inf)  # for a query without keys torch's op gives 0
    computed = dict(zip(QUANTITIES, (out * covered.unsqueeze(-1), lse, *grads), strict=True))
    floor = (FLOOR if device == "cpu" else FLOOR_ON_GPU)[dtype]
    return {
        name: 2 * relative(squares(computed[name], expected[name])) + floor for name in QUANTITIES
    }


def measure(
    case: Case,
    dtype: torch.dtype,
    backend: str,
    device: str,
    parallel: ContextParallel | None,
    *,
    through_lse: bool = True,
) -> Squares:
    """Run the attention call `case` on this rank, and compare the results with the definition. Every rank of `parallel`
    must call this function.

    through_lse: whether the loss uses lse too. If so, some kernels compute the backward differently (see
    `kernels/lse_gradient.py`).

    Returns the `Squares` of out, lse, dq, dk and dv.
    """
    inputs, dout, dlse = make_inputs(case, dtype)
    expected = defined(case, inputs, dout, dlse if through_lse else None)
    take: Callable[[Tensor], Tensor] = torch.clone if parallel is None else parallel.shard
    query, key, value = leaves = [take(x).to(device, dtype).requires_grad_() for x in inputs]
    cu_seqlens = None if case.documents is None else torch.tensor(case.documents, dtype=torch.int32)
    out, lse = dilated_attention(
        query,
        key,
        value,
        case.pattern,
        parallel=parallel,
        cu_seqlens=cu_seqlens,
        backend=backend,
        return_lse=True,
    )
    loss = _loss(out, lse, take(dout).to(out), take(dlse).to(lse) if through_lse else None)
    gradients = torch.autograd.grad(loss, leaves)
    results = (out.detach(), lse.detach(), *gradients)
    named = zip(QUANTITIES, results, strict=True)
    return {name: squares(result, take(expected[name])) for name, result in named}


def measure_cached(case: Case, dtype: torch.dtype, backend: str, device: str) -> Squares:
    """Like `measure`, but one device appends the sequence to a cache. Only out and lse are compared.

    The first half of the sequence is appended 20 tokens at a time, the second half one by one.
    """
    inputs, dout, _ = make_inputs(case, dtype)
    expected = defined(case, inputs, dout, None)
    cache = DilatedCache(
        case.pattern,
        case.batch,
        case.num_heads,
        case.num_kv_heads,
        case.head_dim,
        dtype=dtype,
        device=device,
    )
    half = case.seq_len // 2
    borders = [*range(0, half, 20), *range(half, case.seq_len + 1)]
    outs, lses = [], []
    for start, stop in pairwise(borders):
        query, key, value = (x[:, start:stop].to(device, dtype) for x in inputs)
        out, lse = dilated_attention(
            query, key, value, case.pattern, cache=cache, backend=backend, return_lse=True
        )
        outs.append(out)
        lses.append(lse)
    return {
        "out": squares(torch.cat(outs, dim=1), expected["out"]),
        "lse": squares(torch.cat(lses, dim=1), expected["lse"]),
    }


def _loss(out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None) -> Tensor:
    loss = (out * dout).sum()
    if dlse is None:
        return loss
    return loss + (lse.masked_fill(lse == -torch.inf, 0) * dlse).sum()


def squares(result: Tensor, expected: Tensor) -> tuple[float, float]:
    """Returns sum((result - expected)**2) and sum(expected**2). Entries that are -inf in both tensors are left out.

    The first sum is infinite if an entry is -inf in only one of the tensors.
    """
    result = result.detach().cpu().double()
    is_empty = expected == -torch.inf
    if not torch.equal(result == -torch.inf, is_empty):
        return math.inf, 1.0
    result, expected = result.masked_fill(is_empty, 0), expected.masked_fill(is_empty, 0)
    return float((result - expected).square().sum()), float(expected.square().sum())


def relative(sums: tuple[float, float]) -> float:
    """The relative L2 error from `squares`. It is infinite if there is a NaN, or if `expected` is all zeros and
    `result` is not."""
    difference, size = sums
    if math.isnan(difference) or size == 0:
        return 0.0 if difference == 0 else math.inf
    return math.sqrt(difference / size)


class Worst(NamedTuple):
    """The result with the largest ratio of error to tolerance."""

    error: float
    tolerance: float
    where: str

    @property
    def passed(self) -> bool:
        return self.error <= self.tolerance


def worst(
    cases: Sequence[Case],
    dtype: torch.dtype,
    ranks: Sequence[Sequence[Squares]],
    device: str = "cpu",
) -> Worst:
    """The result whose error is largest in relation to its tolerance, over all cases and quantities.

    ranks: one list for each rank, with the `Squares` that the rank found for each case.
    """
    results = []
    for i, case in enumerate(cases):
        allowed = tolerances(case, dtype, device)
        for name in ranks[0][i]:
            differences, sizes = zip(*(rank[i][name] for rank in ranks), strict=True)
            error = relative((sum(differences), sum(sizes)))
            results.append(Worst(error, allowed[name], f"{name} of {case.name!r}"))
    return max(results, key=lambda result: result.error / result.tolerance)
