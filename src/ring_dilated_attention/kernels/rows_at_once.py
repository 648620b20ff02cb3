"""Launches the Triton kernels of `row_kernels.py`. They merge the partials of many tiles, add up the gradients of many
tiles, and copy the rows that a backward reads. `run/merge.py` defines what each function computes, in plain torch.

A tile is some query rows and the key rows that they attend to. Its partial is the out and lse of its queries.

Unverified: no GPU has run it. B batch, N positions, H query heads, G key/value heads, D head dim.
"""

import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor

from ..plan.rows import Rows
from .contract import GradientSum, TileRows

# One launch of `write_kernel` writes this many integers to the table. Twelve tiles of a forward need 240. GPUs allow 4
# KB of arguments.
NUMBERS = 256
# A number x is passed as 2 x + ODD, which is odd and has more than 32 bits. Otherwise Triton would compile
# `write_kernel` again for each kind of number: 1, multiples of 16, numbers of at most 32 bits.
ODD = 2**41 + 1


@cache
def why_not(device: torch.device) -> str | None:
    """The reason why the kernels do not run on a device, or None. The first call for a device compiles one
    of the kernels, and warns if that fails."""
    if device.type != "cuda":
        return f"serves CUDA tensors, got {device}"
    try:
        _write([ODD], device)
    except Exception as error:  # noqa: BLE001  whatever a compiler raises
        reason = f"Triton does not work here ({type(error).__name__}: {error})"
        warnings.warn(f"Results are merged one by one, which is slower: {reason}.", stacklevel=2)
        return reason
    return None


def merge_rows(
    out: Tensor, lse: Tensor, partials: Sequence[TileRows], heads: range, *, adds: bool
) -> None:
    from .row_kernels import merge_kernel

    _check(out, lse)
    _, num_rows, num_heads, _ = out.shape  # (B, N, H, D)
    sizes = (len(partials), num_rows, num_heads, heads.start, len(heads))
    _launch(merge_kernel, (out, lse), partials, len(heads), 1, *sizes, ADDS=adds)


def add_rows(sums: Sequence[GradientSum], factor: float, *, adds: bool) -> None:
    from .row_kernels import add_kernel

    targets = [x.total for x in sums]
    _check(*targets)
    _, num_rows, num_heads, _ = targets[0].shape  # (B, N, H, D)
    num_block_heads = len(sums[0].heads)
    kv_heads = sums[-1].heads
    num_kv_heads = targets[-1].shape[2]

    # List the tiles of dq, then the tiles of dk, then the tiles of dv.
    tiles = [tile for x in sums for tile in x.gradients]
    counts = [len(x.gradients) for x in sums]

    # Pass three tensors, because the kernel always takes three. If dq is the only sum, the kernel touches neither the
    # second nor the third tensor.
    num_missing = 3 - len(sums)
    targets += targets[:1] * num_missing
    counts += [0] * num_missing
    sizes = (num_rows, num_heads, num_kv_heads, kv_heads.start, num_block_heads)
    _launch(
        add_kernel,
        targets,
        tiles,
        num_block_heads,
        len(sums),
        *counts,
        *sizes,
        float(factor),
        ADDS=adds,
    )


def lay_out_rows(
    dout: Tensor, out: Tensor, lse: Tensor, tiles: Sequence[TileRows], heads: range
) -> None:
    from .row_kernels import lay_out_kernel

    if not tiles:
        return
    sizes = (len(tiles), out.shape[1], heads.start, len(heads))
    strides = (*dout.stride()[:3], *out.stride()[:3], *lse.stride())
    _launch(lay_out_kernel, (dout, out, lse), tiles, len(heads), 1, *sizes, *strides)


def _launch(
    kernel: Any,
    tensors: Sequence[Tensor],
    tiles: Sequence[TileRows],
    num_heads: int,
    num_targets: int,
    *args: Any,
    **constants: Any,
) -> None:
    """Launch one program for each target (such as dq), batch entry, head and block of rows.

    The kernel takes the tensors, the table of the tiles, and `args`. The first tensor is (B, N, H, D).
    """
    from .row_kernels import DTYPES

    x = tensors[0]
    batch, num_rows, _, head_dim = x.shape
    if x.numel() == 0:
        return

    dtype = tiles[0].tensors[0].dtype if tiles else x.dtype
    odd_numbers, is_aligned = _described(tiles, dtype.itemsize)
    num_block_rows = _block_rows(head_dim)
    num_programs = batch * -(-num_rows // num_block_rows) * num_heads
    with _on_device(x):
        kernel[(num_programs, num_targets)](
            *tensors,
            _write(odd_numbers, x.device),
            *args,
            D=head_dim,
            BD=_padded(head_dim),
            BN=num_block_rows,
            DTYPE=DTYPES[dtype],
            ALIGNED=16 // dtype.itemsize if is_aligned else 1,
            **constants,
        )


def _on_device(x: Tensor) -> AbstractContextManager[Any]:
    """A context manager that makes the tensor's GPU the current one, since Triton launches on the current GPU."""
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()


def _check(*targets: Tensor) -> None:
    for x in targets:
        assert x.is_contiguous()
        assert x.shape[1] < 2**31  # because the kernels count rows in 32 bits


def _block_rows(head_dim: int) -> int:
    """The number of rows that one program computes. These rows have about 4,096 elements in total, 32 for each of 128
    threads."""
    return max(1, min(128, 4096 // _padded(head_dim)))


def _padded(head_dim: int) -> int:
    return max(16, 1 << (head_dim - 1).bit_length())


def _described(tiles: Sequence[TileRows], itemsize: int) -> tuple[list[int], bool]:
    """The numbers of all tiles for the table, as `write_kernel` takes them, and whether all rows of D elements begin at
    multiples of 16 bytes."""
    odd_numbers: list[int] = []
    bits = 0
    for rows, entry, tensors in tiles:
        odd_numbers += _geometry(rows, entry)
        # Append each tensor's pointer and the strides of its first three dims.
        for x in tensors:
            pointer = x.data_ptr()
            odd_strides, bits_of_strides = _strides(x.stride(), itemsize)
            odd_numbers.append(2 * pointer + ODD)
            odd_numbers += odd_strides
            if x.dim() == 4:  # not lse
                bits |= pointer | bits_of_strides
    return odd_numbers, bits % 16 == 0


@lru_cache(maxsize=4096)
def _geometry(rows: Rows, entry: int | None) -> tuple[int, ...]:
    """The first numbers of a tile in the table, as `write_kernel` takes them. `row_kernels.py` reads the numbers."""
    heads, first, shift, step, num_rows, segments, segment_step = rows
    # `entries`: start and stop of the tile's batch entries. If `entry` is None, the tile has all entries, and `stop` is
    # larger than any batch.
    entries = (0, 2**31 - 1) if entry is None else (entry, entry + 1)
    last = first + (len(heads) - 1) * shift + (segments - 1) * segment_step + (num_rows - 1) * step
    if segments == 1:  # with a step larger than every row index, all rows are in segment 0
        segment_step = 2**31 - 1
    numbers = (
        *entries,
        first,
        last + 1,
        heads.start,
        heads.step,
        len(heads),
        shift,
        step,
        num_rows,
        segments,
        segment_step,
    )
    return tuple(2 * number + ODD for number in numbers)


@lru_cache(maxsize=4096)
def _strides(strides: tuple[int, ...], itemsize: int) -> tuple[tuple[int, ...], int]:
    """The strides of a tensor's first three dims, as `write_kernel` takes them, and all bits that are set in any of the
    strides in bytes."""
    stride_b, stride_h, stride_m, *last = strides
    assert last in ([], [1])
    odd_strides = tuple(2 * stride + ODD for stride in strides[:3])
    return odd_strides, (stride_b | stride_h | stride_m) * itemsize


def _write(odd_numbers: list[int], device: torch.device) -> Tensor:
    """A flat int64 tensor on the device with the numbers, which `write_kernel` writes."""
    from .row_kernels import write_kernel

    padded = (*odd_numbers, *[ODD] * (-len(odd_numbers) % NUMBERS))
    table = torch.empty(len(padded), dtype=torch.int64, device=device)
    with _on_device(table):
        for start in range(0, len(padded), NUMBERS):
            some_numbers = padded[start : start + NUMBERS]
            write_kernel[(1,)](table[start:], some_numbers, NUM=NUMBERS, OFFSET=ODD >> 1)
    return table
