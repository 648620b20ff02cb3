"""The traits of each kernel. No torch, so that planning needs none."""

from ..plan.sizes import Sizes, Traits
from ..plan.step import Compute, Packing

KEY_BLOCK = 512


def query_block(num_rows: int) -> int:
    """Query rows that torch's CPU flash attention takes at a time."""
    return 256 if num_rows >= 768 else 64 if num_rows >= 192 else 32


def cpu_scratch(step: Compute, sizes: Sizes, num_heads: int) -> int:
    """Torch's CPU flash attention holds a block of scores for each thread. Backward also holds a block of the scores'
    gradients. It copies dout too, but not for a tile that has all heads of consecutive rows."""
    tile, rows, itemsize = step.tile, step.tile.query, sizes.sum_itemsize  # 16-bit rows were copied in float32
    queries = min(query_block(rows.num_rows), rows.num_rows)
    scores = queries * min(KEY_BLOCK, tile.key.num_rows)
    if step.what == "partial":
        return sizes.num_threads * (scores + queries * (sizes.head_dim + 2)) * itemsize
    lie_together = rows.step == 1 and rows.shift == 0 and len(rows.heads) == num_heads
    lie_together = lie_together and (rows.segments == 1 or rows.segment_step == rows.num_rows)
    if sizes.itemsize < itemsize:
        lie_together = len(rows.heads) == 1  # the rows of each head lie side by side in the float32 copy
    entries = 0 if lie_together else sizes.batch if step.entry is None else 1
    dout = entries * rows.segments * len(rows.heads) * rows.num_rows * sizes.head_dim
    return (sizes.num_threads * 2 * scores + dout) * itemsize


def no_scratch(step: Compute, sizes: Sizes, num_heads: int) -> int:
    return 0


# Measured for torch's CPU flash attention (benchmarks/results/packing.json): a copy pays where each row lies on another
# page of memory, and segments are so long that several blocks of queries read the same keys.
CPU_PACKING = Packing(distance=4096, num_bytes=4096, max_rows=2**16)

TRAITS = {
    "cpu": Traits(scratch=cpu_scratch, packing=CPU_PACKING),
    "sdpa": Traits(scratch=no_scratch),  # what torch's CUDA ops take was not measured
}
