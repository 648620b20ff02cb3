"""All branches of a pattern at once, on one device: no partials, no merges, no copies, no float32 accumulators.

Unverified: no GPU was at hand (see `in_place.py`). `choose` says when it is worth more than tiles of one branch at a
time: rows of a tile lie R = lcm(rates) positions apart, and under causality a tile computes what its last row sees.

B batch, N positions, H query heads, G key/value heads, D head dim. Borders (0, ..., N) are those of packed documents.
"""

from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...pattern import DilatedPattern
from ..contract import BackwardRows, WholePasses
from .tiles import (
    Choice,
    Kernel,
    Packs,
    choose_tile,
    crosses,
    fused_tiles,
    kernels_of,
    pack_heads,
    packs_of,
    phases_of_heads,
    stride_of,
)


class _Tables(NamedTuple):
    """What the kernels read beside the tensors, and the numbers they are launched with."""

    tiles: Tensor
    branches: Tensor
    phases: Tensor
    packs: Packs
    crosses: bool


@lru_cache(maxsize=64)
def _tables(
    pattern: DilatedPattern,
    borders: tuple[int, ...],
    num_heads: int,
    num_kv_heads: int,
    block_m: int,
    block_n: int,
    of_keys: bool,
    device: torch.device,
) -> _Tables:
    packs = packs_of(pattern, num_heads, num_kv_heads, block_m)
    positions = block_n if of_keys else block_m // packs.size
    heads = phases_of_heads(pattern, num_heads)
    firsts = [pack_heads(packs, num_heads, num_kv_heads, i).start for i in range(num_heads // packs.size)]
    phases = [[heads[h][i] for h in firsts] for i in range(len(pattern.branches))]
    longest = max(stop - start for start, stop in pairwise(borders))
    # A longer segment ends with its document, and may not fit into 32 bits.
    branches_here = [(min(width, longest), rate) for width, rate in pattern.branches]
    tiles, branches, phase = (
        torch.tensor(x, dtype=torch.int32, device=device)
        for x in (fused_tiles(borders, stride_of(pattern), positions), branches_here, phases)
    )
    return _Tables(tiles, branches, phase, packs, crosses(pattern, borders, positions))


_captured: list[_Tables] = []  # what CUDA graphs read whenever they are replayed: kept for good


def _kept_tables(pattern: DilatedPattern, borders: tuple[int, ...], query: Tensor, *others: Any) -> _Tables:
    tables = _tables(pattern, borders, query.shape[2], *others, query.device)
    if query.is_cuda and torch.cuda.is_current_stream_capturing():
        _captured.append(tables)
    return tables


class FusedPass(NamedTuple):
    """All branches of a pattern at once. block: query rows of the forward's tile."""

    pattern: DilatedPattern
    borders: tuple[int, ...]
    block: int

    def forward(self, scale: float, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        return forward(self.pattern, self.borders, scale, query, key, value, block_m=self.block)

    def backward(self, scale: float, rows: BackwardRows) -> tuple[Tensor, Tensor, Tensor]:
        return backward(self.pattern, self.borders, scale, rows)


def whole_passes(
    pattern: DilatedPattern,
    borders: tuple[int, ...],
    query: Tensor,
    num_kv_heads: int,
    backward: bool,
    *,
    prefers_fused: bool = False,
) -> WholePasses:
    """How a call on one device is best computed, by counted work: all branches at once, or tile by tile; and why."""
    choice = choose(pattern, borders, query, num_kv_heads, backward=backward, prefers_fused=prefers_fused)
    found = FusedPass(pattern, borders, choice.block) if choice.kind == "fused" else None
    return WholePasses(found, f"{choice.kind}, of {choice.reason}")


def candidates_for(query: Tensor, *, backward: bool) -> tuple[tuple[Kernel, ...], ...]:
    """The kernels that there are for a pass. Half as many rows span half as many positions."""
    from .launch import config_for

    passes = (("query_gradient", "key_gradient"),) if backward else (("forward",), ("forward_half",))
    return tuple(kernels_of(tuple(config_for(name, query)[:2] for name in names)) for names in passes)


def choose(
    pattern: DilatedPattern,
    borders: tuple[int, ...],
    query_BNHD: Tensor,
    num_kv_heads: int,
    *,
    backward: bool = False,
    prefers_fused: bool = False,
) -> Choice:
    """Fused, or branches one at a time, by counted work. The reason lists all candidates."""
    num_heads, head_dim = query_BNHD.shape[2:]
    candidates = candidates_for(query_BNHD, backward=backward)
    return choose_tile(pattern, borders, num_heads, num_kv_heads, head_dim, candidates, prefers_fused=prefers_fused)


def forward(
    pattern: DilatedPattern,
    borders: tuple[int, ...],
    scale: float,
    query_BNHD: Tensor,
    key_BNGD: Tensor,
    value_BNGD: Tensor,
    *,
    block_m: int | None = None,
) -> tuple[Tensor, Tensor]:
    """out (B, N, H, D) in the input's dtype and lse (B, N, H) in float32. block_m: of the choice."""
    from .config import padded
    from .forward import fused_forward_kernel
    from .launch import check, config_for, on_device, precision

    check(query_BNHD, key_BNGD, value_BNGD)
    batch, seq_len, num_heads, head_dim = query_BNHD.shape
    num_kv_heads = key_BNGD.shape[2]
    configs = [config_for(name, query_BNHD) for name in ("forward", "forward_half")]
    config = next(c for c in configs if block_m in (None, c.block_m))
    size = (config.block_m, config.block_n)
    tables = _kept_tables(pattern, borders, query_BNHD, num_kv_heads, *size, False)
    out = torch.empty((batch, seq_len, num_heads, head_dim), dtype=query_BNHD.dtype, device=query_BNHD.device)
    lse = torch.empty((batch, seq_len, num_heads), dtype=torch.float32, device=query_BNHD.device)
    tensors = (query_BNHD, key_BNGD, value_BNGD, out, lse)
    with on_device(query_BNHD):
        fused_forward_kernel[batch * num_heads // tables.packs.size * len(tables.tiles),](
            *tensors,
            *_table_arguments(tables, pattern, scale, num_heads, num_kv_heads),
            *(stride for x in tensors for stride in x.stride()[:3]),
            CROSSES=tables.crosses,
            IS_CAUSAL=pattern.is_causal,
            PRECISION=precision(),
            D=head_dim,
            BD=padded(head_dim),
            PACK=tables.packs.size,
            BM=config.block_m,
            BN=config.block_n,
            num_warps=config.num_warps,
            num_stages=config.num_stages,
        )
    return out, lse


def backward(
    pattern: DilatedPattern, borders: tuple[int, ...], scale: float, rows: BackwardRows
) -> tuple[Tensor, Tensor, Tensor]:
    """dq (B, N, H, D), dk and dv (B, N, G, D), in the input's dtype."""
    from .backward_fused import fused_key_gradient_kernel, fused_query_gradient_kernel
    from .config import padded
    from .launch import check, config_for, launch_delta, on_device, precision

    query_BNHD, key_BNGD, value_BNGD = rows.query, rows.key, rows.value
    check(rows.dout, query_BNHD, key_BNGD, value_BNGD, rows.out)
    batch, _, num_heads, head_dim = query_BNHD.shape
    num_kv_heads = key_BNGD.shape[2]
    lse = rows.lse.contiguous()
    delta = torch.empty_like(lse)
    launch_delta(rows.dout, rows.dlse, rows.out, delta)
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (query_BNHD, key_BNGD, value_BNGD))
    inputs = (query_BNHD, key_BNGD, value_BNGD, rows.dout, lse)
    for kernel, name, results in (
        (fused_query_gradient_kernel, "query_gradient", (dq,)),
        (fused_key_gradient_kernel, "key_gradient", (dk, dv)),
    ):
        config, of_keys = config_for(name, query_BNHD), name == "key_gradient"
        size = (config.block_m, config.block_n)
        tables = _kept_tables(pattern, borders, query_BNHD, num_kv_heads, *size, of_keys)
        num_programs = batch * (num_kv_heads if of_keys else num_heads // tables.packs.size) * len(tables.tiles)
        with on_device(query_BNHD):
            kernel[num_programs,](
                *(*inputs, delta, *results),
                *_table_arguments(tables, pattern, scale, num_heads, num_kv_heads),
                *(stride for x in (*inputs, *results) for stride in x.stride()[:3]),
                CROSSES=tables.crosses,
                IS_CAUSAL=pattern.is_causal,
                PRECISION=precision(),
                D=head_dim,
                BD=padded(head_dim),
                PACK=tables.packs.size,
                BM=config.block_m,
                BN=config.block_n,
                num_warps=config.num_warps,
                num_stages=config.num_stages,
            )
    return dq, dk, dv


def _table_arguments(
    tables: _Tables, pattern: DilatedPattern, scale: float, num_heads: int, num_kv_heads: int
) -> tuple[Tensor | float, ...]:
    packs = tables.packs
    return (
        *(tables.tiles, tables.branches, tables.phases, scale),
        *(len(tables.tiles), num_heads // num_kv_heads // packs.size, num_kv_heads, len(pattern.branches)),
        *(stride_of(pattern), packs.stride, packs.head_step),
    )
