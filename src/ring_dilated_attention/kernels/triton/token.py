"""Launch the kernels that compute one token with a cache: tables, grids, and the positions of the sequences.

Unverified: no GPU was at hand (see `in_place.py`). The positions stay on the device and nothing here reads them back,
so that calls follow each other without waiting and can be captured in a CUDA graph.
"""

from functools import lru_cache, partial
from typing import NamedTuple

import torch
from torch import Tensor

from ...plan.cache_plan import CachePlan
from . import launch
from .block_sizes import padded

# Query heads that share keys are the rows of a matrix product, which needs at least 16.
FEWEST_HEADS, MOST_HEADS = 16, 32
# The most Triton programs that share the cached rows of a token, and the fewest rows that are worth a program.
MOST_SPLITS, ROWS_OF_A_SPLIT = 16, 32 if launch.is_interpreted() else 128


class TokenTables(NamedTuple):
    """As `token_kernels` describes them. widths: the segment lengths, which decide how far one can go back."""

    units: Tensor
    branches: Tensor
    phases: Tensor
    widths: Tensor
    block_m: int
    num_splits: int


def block_n(head_dim: int, itemsize: int) -> int:
    """Rows of a block: fewer where a row has many bytes, so that blocks of keys and values fit into shared memory."""
    return 16 if launch.is_interpreted() else max(16, min(64, 16_384 // (padded(head_dim) * itemsize)))


def units_of(plan: CachePlan) -> list[tuple[int, ...]]:
    """The table of units: a rolling buffer, with up to MOST_HEADS of the query heads that share it."""
    units: list[tuple[int, ...]] = []
    for branch, buffers in plan.by_branch:
        shared = len(buffers.query_heads) // len(buffers.kv_heads)
        segment = (buffers.segment_length, buffers.rate, buffers.phase, buffers.rows_per_segment)
        for k, kv_head in enumerate(buffers.kv_heads):
            rolling = (buffers.capacity, buffers.offset + k * buffers.capacity)
            for start in range(0, shared, MOST_HEADS):
                heads = buffers.query_heads[k * shared :][start : min(start + MOST_HEADS, shared)]
                own = (heads.start, heads.step, len(heads), kv_head, branch, int(start == 0))
                units.append((*segment, *rolling, *own))
    return units


@lru_cache(maxsize=64)
def _tables(plan: CachePlan, device: torch.device) -> TokenTables:
    units = units_of(plan)
    phases = [[-1] * len(plan.heads) for _ in plan.pattern.branches]
    for *segment, _, _, first, step, count, _, branch, _ in units:
        for head in range(first, first + count * step, step):
            phases[branch][head] = segment[2]
    most_shared = max(unit[8] for unit in units)
    most_rows = max(unit[4] for unit in units)
    block_m = max(FEWEST_HEADS, 1 << (most_shared - 1).bit_length())
    num_splits = min(MOST_SPLITS, 1 << (-(-most_rows // ROWS_OF_A_SPLIT) - 1).bit_length())
    table = partial(torch.tensor, dtype=torch.int64, device=device)
    return TokenTables(
        table(units), table(plan.pattern.branches), table(phases), table(plan.lengths), block_m, num_splits
    )


def append_one(
    plan: CachePlan, scale: float, query: Tensor, key: Tensor, value: Tensor,
    memory: Tensor, progress: Tensor, lengths: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """out (B, 1, H, D) and lse (B, 1, H) of one new row for each batch entry, or none where `lengths` is 0.

    A sequence that would become too long raises nothing, since its position is on the device: its out and lse are NaN,
    and its rows of the cache stay as they were.
    """
    from .token_kernels import merge_kernel, token_kernel

    launch.check(query, key, value, memory)
    batch, _, num_heads, head_dim = query.shape
    tables = _tables(plan, query.device)
    launch.keep_for_graphs(tables, query)
    num_branches, splits = len(plan.pattern.branches), tables.num_splits
    lengths = None if lengths is None else lengths.to(query.device, torch.int64).clamp(0, 1)
    is_too_long = None
    if plan.max_len is not None:
        lengths = progress.new_ones(batch) if lengths is None else lengths
        is_too_long = progress[0] + lengths > plan.max_len
        lengths = lengths.masked_fill(is_too_long, 0)
    partial_lse = query.new_empty((batch, num_heads, num_branches, splits), dtype=torch.float32)
    partial_out = query.new_empty((*partial_lse.shape, head_dim), dtype=torch.float32)
    out = query.new_empty((batch, 1, num_heads, head_dim))
    lse = query.new_empty((batch, 1, num_heads), dtype=torch.float32)
    counts, has_lengths = (progress, False) if lengths is None else (lengths, True)
    sizes = {"HAS_LENGTHS": has_lengths, "SPLITS": splits, "D": head_dim, "BD": padded(head_dim)}
    with launch.on_device(query):
        token_kernel[len(tables.units) * splits * batch,](
            *(query, key, value, memory, progress, counts, tables.units, partial_out, partial_lse, scale),
            *(len(tables.units), num_heads, num_branches),
            *(query.stride(0), query.stride(2), key.stride(0), key.stride(2), value.stride(0), value.stride(2)),
            *memory.stride()[:2],
            PRECISION=launch.precision(),
            BM=tables.block_m,
            BN=block_n(head_dim, query.element_size()),
            **sizes,
        )
        merge_kernel[batch * num_heads,](
            *(partial_out, partial_lse, progress, counts, tables.branches, tables.phases, out, lse),
            *(num_heads, num_branches),
            **sizes,
        )
    if is_too_long is not None:
        lse.masked_fill_(is_too_long[:, None, None], torch.nan)
        out.masked_fill_(is_too_long[:, None, None, None], torch.nan)
    position, floor = progress
    position += 1 if lengths is None else lengths
    youngest = (position - position % tables.widths[:, None]).amax(0)
    torch.maximum(floor, torch.minimum(youngest, position - plan.keep), out=floor)  # as `CachePlan.floor`
    return out, lse
