"""Launches the Triton kernels of `row_kernels.py`. They merge the partials of many tiles, add up the gradients of many
tiles, and copy the rows that a backward reads. `run/merge.py` defines what each function computes, in plain torch.

A tile is some query rows and the key rows that they attend to. Its partial is the out and lse of its queries.

Unverified: no GPU has run it. B batch, N positions, H query heads, G key/value heads, D head dim.
"""

import warnings
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor

from ..plan.rows import Rows
from .contract import GradientSum, TileRows

# In the table each tile has this many integers, followed by the pointers and strides of the tile's tensors.
FIELDS = 12
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
        _table([[0]], device)
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
    batch, num_rows, num_heads, head_dim = out.shape  # (B, N, H, D)
    if out.numel() == 0:
        return

    numbers = list(map(_numbers, partials))
    _launch(
        merge_kernel,
        batch,
        num_rows,
        len(heads),
        1,
        # the kernel's arguments
        out,
        lse,
        _table(numbers, out.device),
        len(partials),
        num_rows,
        num_heads,
        heads.start,
        len(heads),
        ADDS=adds,
        **_constants(head_dim, _dtype(partials, out), numbers, num_large=1),
    )


def add_rows(sums: Sequence[GradientSum], factor: float, *, adds: bool) -> None:
    from .row_kernels import add_kernel

    targets = [x.total for x in sums]
    _check(*targets)
    batch, num_rows, num_heads, head_dim = targets[0].shape  # (B, N, H, D)
    if targets[0].numel() == 0:
        return

    num_block_heads = len(sums[0].heads)
    kv_heads = sums[-1].heads
    num_kv_heads = targets[-1].shape[2]

    # List the tiles of dq, then the tiles of dk, then the tiles of dv.
    tiles: list[TileRows] = []
    counts: list[int] = []
    for x in sums:
        tiles += x.gradients
        counts.append(len(x.gradients))
    numbers = list(map(_numbers, tiles))

    # Pass three tensors, because the kernel always takes three. If dq is the only sum, the kernel touches neither the
    # second nor the third tensor.
    num_missing = 3 - len(sums)
    targets += targets[:1] * num_missing
    counts += [0] * num_missing
    _launch(
        add_kernel,
        batch,
        num_rows,
        num_block_heads,
        len(sums),
        # the kernel's arguments
        *targets,
        _table(numbers, targets[0].device),
        *counts,
        num_rows,
        num_heads,
        num_kv_heads,
        kv_heads.start,
        num_block_heads,
        float(factor),
        ADDS=adds,
        **_constants(head_dim, _dtype(tiles, targets[0]), numbers, num_large=1),
    )


def lay_out_rows(
    dout: Tensor, out: Tensor, lse: Tensor, tiles: Sequence[TileRows], heads: range
) -> None:
    from .row_kernels import lay_out_kernel

    batch, num_rows, _, head_dim = out.shape  # (B, N, H, D)
    if out.numel() == 0 or not tiles:
        return

    numbers = list(map(_numbers, tiles))
    _launch(
        lay_out_kernel,
        batch,
        num_rows,
        len(heads),
        1,
        # the kernel's arguments
        dout,
        out,
        lse,
        _table(numbers, out.device),
        len(tiles),
        num_rows,
        heads.start,
        len(heads),
        *dout.stride()[:3],
        *out.stride()[:3],
        *lse.stride(),
        **_constants(head_dim, out.dtype, numbers, num_large=2),
    )


def _launch(
    kernel: Any,
    batch: int,
    num_rows: int,
    num_heads: int,
    num_targets: int,
    *args: Any,
    **constants: Any,
) -> None:
    """Launch one program for each target (such as dq), batch entry, head and block of rows."""
    num_blocks = -(-num_rows // constants["BN"])
    with _on_device(args[0]):
        kernel[(batch * num_blocks * num_heads, num_targets)](*args, **constants)


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


def _dtype(tiles: Sequence[TileRows], total: Tensor) -> torch.dtype:
    return tiles[0].tensors[0].dtype if tiles else total.dtype


def _constants(
    head_dim: int, dtype: torch.dtype, numbers_of_tiles: Sequence[Sequence[int]], num_large: int
) -> dict[str, Any]:
    """The constants that a kernel is compiled with.

    num_large: how many of a tile's tensors have the dim D. These tensors come first. If all their rows begin at
    multiples of 16 bytes, ALIGNED in the result is the number of elements in 16 bytes. Otherwise ALIGNED is 1.
    """
    from .row_kernels import DTYPES

    bits = 0
    for numbers in numbers_of_tiles:
        for i in range(FIELDS, FIELDS + 4 * num_large, 4):
            pointer, stride_b, stride_h, stride_m = numbers[i : i + 4]
            bits |= pointer | (stride_b | stride_h | stride_m) * dtype.itemsize

    return {
        "D": head_dim,
        "BD": _padded(head_dim),
        "BN": _block_rows(head_dim),
        "DTYPE": DTYPES[dtype],
        "ALIGNED": 1 if bits % 16 else 16 // dtype.itemsize,
    }


def _numbers(tile: TileRows) -> list[int]:
    """The integers that describe a tile in the table, as `row_kernels.py` reads them."""
    rows, entry, tensors = tile
    # `entries`: start and stop of the tile's batch entries. If `entry` is None, the tile has all entries, and `stop` is
    # larger than any batch.
    entries = (0, 2**31 - 1) if entry is None else (entry, entry + 1)
    numbers = [*entries, *_geometry(rows)]

    # Append each tensor's pointer and the strides of its first three dims.
    for x in tensors:
        strides = x.stride()
        assert len(strides) == 3 or strides[3] == 1
        numbers += (x.data_ptr(), *strides[:3])
    return numbers


@lru_cache(maxsize=4096)
def _geometry(rows: Rows) -> tuple[int, ...]:
    heads, first, shift, step, num_rows, segments, segment_step = rows
    last = first + (len(heads) - 1) * shift + (segments - 1) * segment_step + (num_rows - 1) * step
    if segments == 1:  # with a step larger than every row index, all rows are in segment 0
        segment_step = 2**31 - 1
    return (
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


def _table(numbers_of_tiles: Iterable[Iterable[int]], device: torch.device) -> Tensor:
    """A flat int64 tensor on the device with the numbers of all tiles, which `write_kernel` writes."""
    from .row_kernels import write_kernel

    odd_numbers = [2 * number + ODD for tile in numbers_of_tiles for number in tile]
    odd_numbers += [ODD] * (-len(odd_numbers) % NUMBERS)

    table = torch.empty(len(odd_numbers), dtype=torch.int64, device=device)
    with _on_device(table):
        for start in range(0, len(odd_numbers), NUMBERS):
            some_numbers = tuple(odd_numbers[start : start + NUMBERS])
            write_kernel[(1,)](table[start:], some_numbers, NUM=NUMBERS, OFFSET=ODD >> 1)
    return table
