"""Rows of tensors and of flat buffers as strided views.

B batch, N positions, S segments, M rows of one segment and phase, H query heads, G key/value heads, D head dim.
"""

from functools import lru_cache

import torch
from torch import Tensor

from ..plan.rows import Block, Rows


def accumulator_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which results of tiles are added up: float32, or float64 if the inputs are float64."""
    return torch.promote_types(dtype, torch.float32)


def on_device(x: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor to a device. A copy to a GPU goes through pinned memory, so that the host need not wait for the GPU
    to finish its earlier work."""
    if device.type == "cuda" and x.device.type == "cpu" and not torch.compiler.is_compiling():
        x = x.pin_memory()
    return x.to(device, non_blocking=True)


def with_unit_stride(x: Tensor) -> Tensor:
    """x itself if its last stride is 1, as kernels need it, else a contiguous copy.

    `x.contiguous()` is not enough: if the last dim has size 1, it may return x unchanged, with a last stride that is
    not 1.
    """
    return x if x.stride(-1) == 1 else x.clone(memory_format=torch.contiguous_format)


def rows_view(x_BNHD: Tensor, rows: Rows, entry: int | None = None) -> Tensor:
    """The rows as a view (B·S, heads, M, D), or (B·S, heads, M) if the tensor is (B, N, H).

    entry: a batch entry, or None for all.

    Nothing is copied. So a single stride must lead from each segment to the next, even from the last segment of a batch
    entry to the first segment of the next entry (`folds`).
    """
    sizes, strides, offset = _layout(rows, entry, x_BNHD.shape, x_BNHD.stride())
    return x_BNHD.as_strided(sizes, strides, x_BNHD.storage_offset() + offset)


@lru_cache(maxsize=4096)
def _layout(
    rows: Rows, entry: int | None, shape: tuple[int, ...], strides: tuple[int, ...]
) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    """The sizes and strides of the rows' view, and the offset at which it begins in a tensor of this shape and these
    strides."""
    heads, first, shift, step, num_rows, segments, segment_step = rows
    batch, _, _, *head_dim = shape
    stride, position, head, *last = strides
    offset = first * position + heads.start * head
    if entry is not None:
        batch = 1
        offset += entry * stride

    # Set the stride of the view's first dim, even if that dim has size 1, because torch may have any stride there and
    # kernels compare strides.
    if segments > 1 or batch == 1:
        assert batch == 1 or stride == segments * segment_step * position, (
            "no single stride leads through batch entries and segments"
        )
        stride = segment_step * position

    sizes = (batch * segments, len(heads), num_rows, *head_dim)
    strides = (stride, heads.step * head + shift * position, step * position, *last)
    return sizes, strides, offset


def folds(x_BN: Tensor) -> bool:
    """Whether each batch entry begins in memory where the previous entry ends.

    If each entry also consists of whole segments, a single stride leads from each segment to the next, even into the
    next entry.
    """
    return x_BN.shape[0] == 1 or x_BN.stride(0) == x_BN.shape[1] * x_BN.stride(1)


def block_views(buffer: Tensor, block: Block, batch: int, head_dim: int) -> tuple[Tensor, Tensor]:
    """Keys and values (or their gradients) of a block of a flat buffer, each (B, heads, M, D)."""
    unit = batch * head_dim
    start = block.offset * unit
    size = 2 * block.num_heads * block.num_rows * unit  # size of the keys and values together

    both = buffer[start : start + size]
    both_2BGMD = both.view(2, batch, block.num_heads, block.num_rows, head_dim)
    key, value = both_2BGMD[:, :, block.start : block.stop]
    return key, value
