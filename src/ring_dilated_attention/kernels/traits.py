"""The traits of each kernel. No torch, so that planning needs none."""

from typing import Any

from ..plan.step import ROW_BLOCK, Packing, Traits

KEY_BLOCK = 512


def query_block(num_rows: int) -> int:
    """Query rows that torch's CPU flash attention takes at a time."""
    if num_rows >= 768:
        return 256
    return 64 if num_rows >= 192 else 32


def cpu_scratch(query: Any, key: Any, dout: Any, num_threads: int) -> int:
    """Bytes that torch's CPU flash attention takes and frees, for a tile's tensors (B, H, M, D). dout: None in forward.

    Each thread holds a block of scores. Backward also holds a block of the scores' gradients, and copies dout unless
    the heads of each row, and the rows, lie side by side."""
    *_, num_rows, head_dim = query.shape
    queries = min(query_block(num_rows), num_rows)
    scores = queries * min(KEY_BLOCK, key.shape[2])
    if dout is None:
        return num_threads * (scores + queries * (head_dim + 2)) * query.itemsize
    copied = 0 if dout.transpose(1, 2).is_contiguous() else dout.numel()
    return (num_threads * 2 * scores + copied) * query.itemsize


def cuda_scratch(query: Any, key: Any, dout: Any, num_threads: int) -> int:
    """Bytes that torch's CUDA ops take and free, by their sources: flash's backward sums up dq, and a number for each
    row, in float32 and padded. cuDNN takes about as much, which is not documented. Nothing was measured."""
    if dout is None:
        return 0
    batch, num_heads, num_rows, head_dim = query.shape
    num_rows += -num_rows % ROW_BLOCK
    return batch * num_heads * num_rows * (padded_head_dim(head_dim) + 1) * 4


# Flash's backward counts the numbers of its accumulator of dq in 32 bits, with rows and head dims padded. Beyond that
# it writes out of bounds. A longer tile is cut. Other ops have no such limit, and lose nothing by calls of this size.
MOST_PADDED = 2**31


def padded_head_dim(head_dim: int) -> int:
    return head_dim + -head_dim % (32 if head_dim <= 128 else 64)


def most_flash_rows(head_dim: int, has_dlse: bool) -> int:
    # the columns for dlse, aligned (`lse_gradient.py`)
    width = head_dim + 3 if has_dlse else head_dim
    return MOST_PADDED // padded_head_dim(width + -width % 8)


# Measured for torch's CPU flash attention (benchmarks/results/packing.json): a copy pays where each row lies on another
# page of memory, and segments are so long that several blocks of queries read the same keys.
CPU_PACKING = Packing(distance=4096, num_bytes=4096, max_rows=2**16)

TRAITS = {
    "cpu": Traits(scratch=cpu_scratch, packing=CPU_PACKING),
    "sdpa": Traits(scratch=cuda_scratch, most_rows=most_flash_rows),
}
