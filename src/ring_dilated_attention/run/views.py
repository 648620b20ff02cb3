"""Rows of tensors and of buffers as strided views: what a plan's numbers mean.

B batch, N positions, S segments, M rows of one segment and phase, H query heads, G key/value heads, D head dim.
"""

import torch
from torch import Tensor

from ..plan.rows import Block, Rows


def accumulator_dtype(dtype: torch.dtype) -> torch.dtype:
    """float32, or float64 for float64."""
    return torch.promote_types(dtype, torch.float32)


def with_unit_stride(x: Tensor) -> Tensor:
    """The same with neighbours in the last dim side by side, which kernels rely on. (`contiguous` leaves a tensor of
    one number as it is, whatever its strides.)"""
    return x if x.stride(-1) == 1 else x.clone(memory_format=torch.contiguous_format)


def rows_view(x_BNHD: Tensor, rows: Rows) -> Tensor:
    """The rows as a view (B·S, heads, M, D). No copy: batch and segments must be one stride (`folds`), or one be 1."""
    sizes, strides, offset = _view(x_BNHD, rows)
    return x_BNHD.as_strided((*sizes, x_BNHD.shape[3]), (*strides, 1), offset)


def row_numbers(x_BNH: Tensor, rows: Rows) -> Tensor:
    """The same of a tensor with one number per row and head: (B·S, heads, M)."""
    return x_BNH.as_strided(*_view(x_BNH, rows))


def _view(x_BNH: Tensor, rows: Rows) -> tuple[tuple[int, int, int], tuple[int, int, int], int | torch.SymInt]:
    """Sizes and strides of (B·S, heads, M), and where the view begins."""
    (heads, first, shift, step, num_rows, segments, segment_step), batch = rows, x_BNH.shape[0]
    entry, position, head = x_BNH.stride()[:3]
    if segments > 1 or batch == 1:  # of one entry, torch may say any stride; kernels compare them
        assert batch == 1 or entry == segments * segment_step * position, "batch and segments are two strides"
        entry = segment_step * position
    strides = (entry, heads.step * head + shift * position, step * position)
    offset = x_BNH.storage_offset() + first * position + heads.start * head
    return (batch * segments, len(heads), num_rows), strides, offset


def folds(x_BN: Tensor) -> bool:
    """Whether segments that fill the positions are one stride together with the batch."""
    return x_BN.shape[0] == 1 or x_BN.stride(0) == x_BN.shape[1] * x_BN.stride(1)


def block_views(buffer: Tensor, block: Block, batch: int, head_dim: int) -> tuple[Tensor, Tensor]:
    """Keys and values (or their gradients) of a block of a flat buffer, each (B, heads, M, D)."""
    unit = batch * head_dim
    size = block.num_heads * block.num_rows * unit
    both = buffer[block.offset * unit : block.offset * unit + 2 * size]
    key, value = both.view(2, batch, block.num_heads, block.num_rows, head_dim)[:, :, block.start : block.stop]
    return key, value
