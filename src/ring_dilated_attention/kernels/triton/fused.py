"""Compute all branches of a pattern at once on one device, without partials, merges, copies or float32 accumulators.

Unverified: no GPU was at hand (see `in_place.py`). Rows of a strip lie R = lcm(rates) positions apart (`strips.py`).
"""

from collections.abc import Iterable, Sequence
from functools import lru_cache, partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...pattern import DilatedPattern
from ..contract import BackwardRows, WholePasses
from . import launch
from .block_sizes import Config
from .in_place import delta
from .strips import Bundles, bundles_of, crosses, fused_strips, heads_of_bundle, phases_of_heads, step_of


class _Tables(NamedTuple):
    """What the kernels read beside the tensors (`blocks.Tables`), and what decides how they are launched."""

    strips: Tensor
    branches: Tensor
    phases: Tensor
    bundles: Bundles
    crosses: bool


class FusedPass(NamedTuple):
    """All branches of a pattern at once, as `contract.Pass`."""

    pattern: DilatedPattern
    borders: tuple[int, ...]

    def forward(self, scale: float, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        from .forward import fused_forward_kernel

        launch.check(query, key, value)
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
        lse = torch.empty(query.shape[:3], dtype=torch.float32, device=query.device)
        tensors = (query, key, value, out, lse)
        # If causal, each row of a strip computes all keys that the last row sees. So it has half the rows of "forward".
        self._launch(fused_forward_kernel, "forward_half", tensors, launch.strides(*tensors), scale)
        return out, lse

    def backward(self, scale: float, rows: BackwardRows) -> tuple[Tensor, Tensor, Tensor]:
        from .backward import fused_key_gradient_kernel, fused_query_gradient_kernel

        given = (rows.query, rows.key, rows.value)
        launch.check(rows.dout, *given, rows.out)
        delta_BNH = delta(rows.dout, rows.dlse, rows.out)
        inputs = (*given, rows.dout, rows.lse.contiguous())
        dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in given)
        for kernel, name, results in (
            (fused_query_gradient_kernel, "query_gradient", (dq,)),
            (fused_key_gradient_kernel, "key_gradient", (dk, dv)),
        ):
            self._launch(kernel, name, (*inputs, delta_BNH, *results), launch.strides(*inputs, *results), scale)
        return dq, dk, dv

    def _launch(self, kernel: Any, name: str, tensors: Sequence[Tensor], strides: Iterable[int], scale: float) -> None:
        """tensors: query, key and the rest in the kernel's order."""
        query, key = tensors[:2]
        (batch, _, num_heads, head_dim), num_kv_heads = query.shape, key.shape[2]
        blocks, of_keys = launch.config_for(name, query), name == "key_gradient"
        tables = _tables(self, num_heads, num_kv_heads, blocks, of_keys, query.device)
        launch.keep_for_graphs(tables, query)
        bundles, num_strips = tables.bundles, len(tables.strips)
        with launch.on_device(query):
            kernel[batch * num_strips * (num_kv_heads if of_keys else num_heads // bundles.size),](
                *(*tensors, tables.strips, tables.branches, tables.phases, scale),
                *(num_strips, num_heads // num_kv_heads // bundles.size, num_kv_heads, len(self.pattern.branches)),
                *(step_of(self.pattern), bundles.stride, bundles.head_step),
                *strides,
                IS_CAUSAL=self.pattern.is_causal,
                CROSSES=tables.crosses,
                **launch.constants(blocks, head_dim, bundles.size),
            )


@lru_cache(maxsize=64)
def _tables(
    whole: FusedPass, num_heads: int, num_kv_heads: int, blocks: Config, of_keys: bool, device: torch.device
) -> _Tables:
    pattern, borders = whole
    bundles = bundles_of(pattern, num_heads, num_kv_heads, blocks.block_m)
    positions = blocks.block_n if of_keys else blocks.block_m // bundles.size
    heads = phases_of_heads(pattern, num_heads)
    firsts = [heads_of_bundle(bundles, num_heads, num_kv_heads, i).start for i in range(num_heads // bundles.size)]
    phases = [[heads[h][i] for h in firsts] for i in range(len(pattern.branches))]
    longest = max(stop - start for start, stop in pairwise(borders))
    # Segments end with their document. A longer segment length changes nothing, and may not fit into 32 bits.
    branches = [(min(width, longest), rate) for width, rate in pattern.branches]
    table = partial(torch.tensor, dtype=torch.int32, device=device)
    strips = table(fused_strips(borders, step_of(pattern), positions))
    return _Tables(strips, table(branches), table(phases), bundles, crosses(pattern, borders, positions))


def choose_pass(pattern: DilatedPattern, borders: tuple[int, ...]) -> WholePasses:
    """All branches at once, unless each strip has at most one row of a segment: then nearly all work is masked."""
    step = step_of(pattern)
    longest = min(max(pattern.segment_lengths), max(stop - start for start, stop in pairwise(borders)))
    if step >= longest:
        reason = f"branch by branch: in one pass rows lie {step} positions apart, and the longest segment has {longest}"
        return WholePasses(None, reason)
    return WholePasses(FusedPass(pattern, borders), f"all branches at once, with rows {step} apart")
