"""What the planner needs to know about each kernel: its scratch memory, the most rows of a tile, and when copies of
rows save time.

This file does not import torch, so that planning needs no torch. A tile is some query rows and the key rows that they
attend to.
"""

from typing import Any

from ..plan.step import ROW_BLOCK, Packing, Traits

KEY_BLOCK = 512


def query_block(num_rows: int) -> int:
    """The number of query rows that torch's CPU flash attention takes at a time."""
    if num_rows >= 768:
        return 256
    return 64 if num_rows >= 192 else 32


def cpu_scratch(query: Any, key: Any, dout: Any, num_threads: int) -> int:
    """Bytes that torch's CPU flash attention allocates and frees within a call, for a tile's tensors (B, H, M, D).
    dout: None in forward.

    Each thread holds a block of scores. Backward also holds a block of the scores' gradients, and copies dout unless
    dout is contiguous as (B, M, H, D)."""
    *_, num_rows, head_dim = query.shape
    queries = min(query_block(num_rows), num_rows)
    scores = queries * min(KEY_BLOCK, key.shape[2])
    if dout is None:
        return num_threads * (scores + queries * (head_dim + 2)) * query.itemsize
    copied = 0 if dout.transpose(1, 2).is_contiguous() else dout.numel()
    return (num_threads * 2 * scores + copied) * query.itemsize


def cuda_scratch(query: Any, key: Any, dout: Any, num_threads: int) -> int:
    """Bytes that torch's CUDA ops allocate and free within a call, for a tile's tensors (B, H, M, D). dout: None in
    forward.

    In torch's sources, the backward of flash allocates two float32 tensors: dq with padded rows and head dims, and a
    tensor with one number for each row. cuDNN is assumed to need about as much, since its needs are not documented.
    Nothing was measured.
    """
    if dout is None:
        return 0
    batch, num_heads, num_rows, head_dim = query.shape
    num_rows += -num_rows % ROW_BLOCK
    return batch * num_heads * num_rows * (padded_head_dim(head_dim) + 1) * 4


# In flash's backward the accumulator of dq may have at most this many elements, including the padding of rows and head
# dim. Flash has 32-bit indices, and with more elements it would write out of bounds. So larger tiles are split.
# This is done for all ops, because the ops without this limit are not slower with tiles of this size.
MOST_PADDED = 2**31


def padded_head_dim(head_dim: int) -> int:
    return head_dim + -head_dim % (32 if head_dim <= 128 else 64)


def most_flash_rows(head_dim: int, has_dlse: bool) -> int:
    # Count three more columns if lse has a gradient (`lse_gradient.py`). Then pad the columns to a multiple of 8.
    width = head_dim + 3 if has_dlse else head_dim
    return MOST_PADDED // padded_head_dim(width + -width % 8)


# The conditions under which rows are copied side by side before torch's CPU flash attention reads them. A copy saves
# time if every row lies on a memory page of its own, and if segments are so long that several blocks of queries read
# the same keys. Measured in benchmarks/results/packing.json.
CPU_PACKING = Packing(distance=4096, num_bytes=4096, max_rows=2**16)

TRAITS = {
    "cpu": Traits(scratch=cpu_scratch, packing=CPU_PACKING),
    "sdpa": Traits(scratch=cuda_scratch, most_rows=most_flash_rows),
}
