# mypy: ignore-errors
"""Small Triton kernels that read or write the rows of many tiles in one pass over a tensor. No other file contains
Triton kernels.

Unverified: no GPU has run these kernels. They were run in Triton's interpreter, and compiled for NVIDIA GPUs.

A tile is some query rows and the key rows that they attend to. A table of int64 says where the rows of each tile lie.
For each tile the table has FIELDS integers, then a pointer and three strides for each tensor of the tile
(`rows_at_once.py`).

A tile's tensors are (B, H, M, D), where each segment counts as a batch entry. Tensors that are not cut into tiles are
(B, N, H, D). A program computes BN rows of one head.
"""

import torch
import triton
import triton.language as tl

FIELDS = tl.constexpr(12)
DTYPES = {
    torch.float32: tl.float32,
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
}


@triton.jit
def write_kernel(table, numbers, NUM: tl.constexpr, OFFSET: tl.constexpr):
    """Write the numbers to the table on the GPU. The numbers are kernel arguments, and are not copied from the host.
    The host would wait for such a copy. And a CUDA graph would repeat the copy at each replay, when the host's memory
    may have changed."""
    for i in tl.static_range(NUM):
        tl.store(table + i, (numbers[i] >> 1) - OFFSET)


@triton.jit
def _has_rows(tile, entry, head, start, stop):
    """Whether range(start, stop) may include rows of the tile, in this batch entry and head."""
    first_head, head_step = tl.load(tile + 4), tl.load(tile + 5)
    k = (head - first_head) // head_step
    is_head = (head >= first_head) & (first_head + k * head_step == head) & (k < tl.load(tile + 6))
    is_entry = (entry >= tl.load(tile)) & (entry < tl.load(tile + 1))
    return is_head & is_entry & (tl.load(tile + 2) < stop) & (tl.load(tile + 3) > start)


@triton.jit
def _indices(tile, entry, head, row_N):
    """For each row in row_N: whether the tile has the row, and the row's indices in the first three dims of the tile's
    tensors."""
    k = (head - tl.load(tile + 4)) // tl.load(tile + 5)
    ahead_N = row_N - (tl.load(tile + 2) + k * tl.load(tile + 7)).to(tl.int32)
    step = tl.load(tile + 8).to(tl.int32)
    segments, segment_step = tl.load(tile + 10), tl.load(tile + 11).to(tl.int32)
    segment_N = ahead_N // segment_step
    within_N = ahead_N - segment_N * segment_step
    m_N = within_N // step
    is_there_N = (ahead_N >= 0) & (segment_N < segments) & (m_N * step == within_N)
    is_there_N = is_there_N & (m_N < tl.load(tile + 9))
    b_N = (entry - tl.load(tile)) * segments + segment_N
    return is_there_N, b_N.to(tl.int64), k, m_N.to(tl.int64)


@triton.jit
def _pointers(fields, b_N, k, m_N, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """Pointers to the rows (b_N, k, m_N) of one tensor of a tile. fields: the place in the table that holds four
    integers: the tensor's pointer and its three strides."""
    pointer = tl.load(fields).to(tl.pointer_type(DTYPE))
    stride_b, stride_h, stride_m = tl.load(fields + 1), tl.load(fields + 2), tl.load(fields + 3)
    # If ALIGNED > 1, every row begins at a multiple of 16 bytes, and 16 bytes hold ALIGNED elements. Tell the compiler.
    if ALIGNED > 1:
        pointer = tl.multiple_of(pointer, 16)
        stride_b = tl.multiple_of(stride_b, ALIGNED)
        stride_h = tl.multiple_of(stride_h, ALIGNED)
        stride_m = tl.multiple_of(stride_m, ALIGNED)
    return pointer + b_N * stride_b + k * stride_h + m_N * stride_m


@triton.jit
def _block(num_rows, first_head, num_block_heads, BN: tl.constexpr):
    """The batch entry, the head and the first row of this program. Neighbouring programs compute the same rows of
    neighbouring heads."""
    program = tl.program_id(0)
    head = first_head + program % num_block_heads
    num_blocks = (num_rows + BN - 1) // BN
    start = program // num_block_heads % num_blocks * BN
    entry = program // num_block_heads // num_blocks
    return entry.to(tl.int64), head, start


@triton.jit(
    do_not_specialize=["num_tiles", "num_rows", "num_heads", "first_head", "num_block_heads"]
)
def merge_kernel(
    out, lse, table, num_tiles, num_rows, num_heads, first_head, num_block_heads,
    D: tl.constexpr, BD: tl.constexpr, BN: tl.constexpr, DTYPE: tl.constexpr, ALIGNED: tl.constexpr,
    ADDS: tl.constexpr,
):  # fmt: skip
    """Merge all partials (out and lse of a tile) of each row, and write the row's out and lse. If ADDS is set, the
    values that out and lse already hold are merged too.

    The formulas are lse = log(sum over partials of exp(lse_p)) and out = sum of exp(lse_p - lse) out_p. The largest
    lse_p so far is subtracted before exp, so that exp does not overflow. If ADDS is set, the weights are float64, as in
    `run/merge.py`.
    """
    entry, head, start = _block(num_rows, first_head, num_block_heads, BN)
    row_N, column_D = start + tl.arange(0, BN), tl.arange(0, BD)
    is_row_N, is_column_D = row_N < num_rows, column_D < D
    place_N = (entry * num_rows + row_N) * num_heads + head
    place_ND = place_N[:, None] * D + column_D[None, :]
    is_place_ND = is_row_N[:, None] & is_column_D[None, :]
    if ADDS:
        largest_N = tl.load(lse + place_N, mask=is_row_N, other=-float("inf"))
        sum_N = tl.where(largest_N == -float("inf"), 0.0, 1.0).to(tl.float64)
        sum_ND = tl.load(out + place_ND, mask=is_place_ND, other=0.0)
    else:
        largest_N = tl.full([BN], -float("inf"), tl.float32)
        sum_N = tl.zeros([BN], tl.float32)
        sum_ND = tl.zeros([BN, BD], tl.float32)
    for i in range(num_tiles):
        tile = table + i * (FIELDS + 8)
        if _has_rows(tile, entry, head, start, start + BN):
            is_there_N, b_N, k, m_N = _indices(tile, entry, head, row_N)
            partial_N = _pointers(tile + FIELDS, b_N, k, m_N, DTYPE, ALIGNED)
            lse_N = _pointers(tile + FIELDS + 4, b_N, k, m_N, tl.float32, 1)
            is_there_ND = is_there_N[:, None] & is_column_D[None, :]
            partial_ND = tl.load(
                partial_N[:, None] + column_D[None, :], mask=is_there_ND, other=0.0
            )
            its_N = tl.load(lse_N, mask=is_there_N, other=-float("inf")).to(largest_N.dtype)
            larger_N = tl.maximum(largest_N, its_N)
            # Subtract 0 instead of -inf, because (-inf) - (-inf) is NaN.
            subtracted_N = tl.where(larger_N == -float("inf"), 0.0, larger_N)
            before_N = tl.exp(largest_N - subtracted_N)
            weight_N = tl.exp(its_N - subtracted_N)
            sum_N = sum_N * before_N + weight_N
            sum_ND = sum_ND * before_N.to(tl.float32)[:, None]
            sum_ND += partial_ND.to(tl.float32) * weight_N.to(tl.float32)[:, None]
            largest_N = larger_N
    # Divide by 1 instead of 0, so that a row without partials gets out = 0 and lse = -inf.
    divisor_N = tl.where(sum_N == 0, 1.0, sum_N)
    result_ND = sum_ND / divisor_N.to(tl.float32)[:, None]
    tl.store(out + place_ND, result_ND.to(out.dtype.element_ty), mask=is_place_ND)
    tl.store(lse + place_N, largest_N + tl.log(divisor_N), mask=is_row_N)


@triton.jit(do_not_specialize=["num_dq", "num_dk", "num_dv", "num_rows", "num_heads", "num_kv_heads", "first_kv_head",
                               "num_block_heads", "factor"])  # fmt: skip
def add_kernel(
    dq, dk, dv, table, num_dq, num_dk, num_dv, num_rows, num_heads, num_kv_heads, first_kv_head, num_block_heads,
    factor, D: tl.constexpr, BD: tl.constexpr, BN: tl.constexpr, DTYPE: tl.constexpr, ALIGNED: tl.constexpr,
    ADDS: tl.constexpr,
):  # fmt: skip
    """Add up the tiles' gradients of each row, and write the sums to dq, dk and dv. The sum for dq is multiplied by
    `factor`. If ADDS is set, the sums are added to the values that dq, dk and dv already hold.

    The program id along the second dimension of the grid selects dq, dk or dv. num_block_heads: the number of query
    heads that this launch computes.
    """
    which, ratio = tl.program_id(1), num_heads // num_kv_heads
    first_head = first_kv_head * ratio
    entry, head, start = _block(num_rows, first_head, num_block_heads, BN)
    target, first_tile, num_tiles = dq, 0, num_dq
    is_needed = True
    if which > 0:
        # The grid has a program for each query head. For dk and dv one program per key/value head is enough: the
        # program of the first query head that uses this key/value head.
        is_needed = head % ratio == 0
        head = head // ratio
        num_heads = num_kv_heads
        factor = 1.0
        target, first_tile, num_tiles = dk, num_dq, num_dk
    if which > 1:
        target, first_tile, num_tiles = dv, num_dq + num_dk, num_dv
    if is_needed:
        row_N, column_D = start + tl.arange(0, BN), tl.arange(0, BD)
        is_row_N, is_column_D = row_N < num_rows, column_D < D
        place_N = (entry * num_rows + row_N) * num_heads + head
        place_ND = place_N[:, None] * D + column_D[None, :]
        is_place_ND = is_row_N[:, None] & is_column_D[None, :]
        sum_ND = tl.zeros([BN, BD], tl.float32)
        for i in range(first_tile, first_tile + num_tiles):
            tile = table + i * (FIELDS + 4)
            if _has_rows(tile, entry, head, start, start + BN):
                is_there_N, b_N, k, m_N = _indices(tile, entry, head, row_N)
                result_N = _pointers(tile + FIELDS, b_N, k, m_N, DTYPE, ALIGNED)
                is_there_ND = is_there_N[:, None] & is_column_D[None, :]
                sum_ND += tl.load(
                    result_N[:, None] + column_D[None, :], mask=is_there_ND, other=0.0
                ).to(tl.float32)
        sum_ND = sum_ND * factor
        if ADDS:
            sum_ND += tl.load(target + place_ND, mask=is_place_ND, other=0.0)
        tl.store(target + place_ND, sum_ND.to(target.dtype.element_ty), mask=is_place_ND)


@triton.jit(
    do_not_specialize=[
        "num_tiles",
        "num_rows",
        "num_block_heads",
        "first_head",
        "lse_b",
        "lse_n",
        "lse_h",
    ]
)
def lay_out_kernel(
    dout, out, lse, table, num_tiles, num_rows, first_head, num_block_heads,
    dout_b, dout_n, dout_h, out_b, out_n, out_h, lse_b, lse_n, lse_h,
    D: tl.constexpr, BD: tl.constexpr, BN: tl.constexpr, DTYPE: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Copy the rows of dout, out and lse to every tile that has them."""
    entry, head, start = _block(num_rows, first_head, num_block_heads, BN)
    row_N, column_D = start + tl.arange(0, BN), tl.arange(0, BD)
    is_row_N, is_column_D = row_N < num_rows, column_D < D
    long_N, long_head = row_N.to(tl.int64), head.to(tl.int64)
    is_place_ND = is_row_N[:, None] & is_column_D[None, :]
    dout_N = dout + entry * dout_b + long_N * dout_n + long_head * dout_h
    out_N = out + entry * out_b + long_N * out_n + long_head * out_h
    lse_N = lse + entry * lse_b + long_N * lse_n + long_head * lse_h
    dout_ND = tl.load(dout_N[:, None] + column_D[None, :], mask=is_place_ND, other=0.0)
    out_ND = tl.load(out_N[:, None] + column_D[None, :], mask=is_place_ND, other=0.0)
    its_lse_N = tl.load(lse_N, mask=is_row_N, other=0.0)
    for i in range(num_tiles):
        tile = table + i * (FIELDS + 12)
        if _has_rows(tile, entry, head, start, start + BN):
            is_there_N, b_N, k, m_N = _indices(tile, entry, head, row_N)
            is_there_N = is_there_N & is_row_N
            is_there_ND = is_there_N[:, None] & is_column_D[None, :]
            to_dout_N = _pointers(tile + FIELDS, b_N, k, m_N, DTYPE, ALIGNED)
            to_out_N = _pointers(tile + FIELDS + 4, b_N, k, m_N, DTYPE, ALIGNED)
            to_lse_N = _pointers(tile + FIELDS + 8, b_N, k, m_N, tl.float32, 1)
            tl.store(to_dout_N[:, None] + column_D[None, :], dout_ND, mask=is_there_ND)
            tl.store(to_out_N[:, None] + column_D[None, :], out_ND, mask=is_there_ND)
            tl.store(to_lse_N, its_lse_N, mask=is_there_N)
