"""Rows of tensors and of flat buffers as strided views.

B batch, N positions, S segments, M rows of one segment and phase, H query heads, G key/value heads, D head dim.
"""

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


def rows_view(x_BNHD: Tensor, rows: Rows) -> Tensor:
    """The rows as a view (B·S, heads, M, D), or (B·S, heads, M) if the tensor is (B, N, H).

    Nothing is copied. So a single stride must lead from each segment to the next, even from the last segment of a batch
    entry to the first segment of the next entry (`folds`).
    """
    heads, first, shift, step, num_rows, segments, segment_step = rows
    batch = x_BNHD.shape[0]
    # the strides of the tensor's dims B, N and H
    entry, position, head, *_ = x_BNHD.stride()

    # Set the stride of the view's first dim, even if that dim has size 1, because torch may have any stride there and
    # kernels compare strides.
    if segments > 1 or batch == 1:
        assert batch == 1 or entry == segments * segment_step * position, (
            "no single stride leads through batch entries and segments"
        )
        entry = segment_step * position

    # The strides of (B·S, heads, M, D). If the tensor is (B, N, H), the stride of D is dropped below.
    strides = (entry, heads.step * head + shift * position, step * position, 1)
    offset = x_BNHD.storage_offset() + first * position + heads.start * head
    sizes = (batch * segments, len(heads), num_rows, *x_BNHD.shape[3:])
    return x_BNHD.as_strided(sizes, strides[: x_BNHD.dim()], offset)


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
