"""Launching the kernels of one token with a cache: the tables they read, grids, and moving the sequences on.

Unverified: no GPU was at hand (see `in_place.py`). Nothing here asks the device anything: where the sequences stand
stays there, so that calls follow each other without waiting and can be captured in a CUDA graph.

B batch, H query heads, G key/value heads, D head dim.
"""

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from ...pattern import DilatedPattern
from ...plan.cache_plan import CachePlan, plan_cache
from .block_sizes import padded
from .blocks import IS_INTERPRETED
from .launch import check, on_device, precision
from .token_kernels import merge_kernel, token_kernel

# Query heads that share keys fill the rows of a tile, of which a matrix product needs 16.
FEWEST_HEADS, MOST_HEADS = 16, 32
# Parts of the cached rows of one token, each with a program of its own; and the fewest rows that are worth one.
MOST_SPLITS, ROWS_OF_A_SPLIT = 16, 32 if IS_INTERPRETED else 128


class Tables(NamedTuple):
    """See the kernels; `widths` are the segment lengths that decide how far one can go back."""

    units: Tensor
    branches: Tensor
    phases: Tensor
    widths: Tensor
    block_m: int
    num_splits: int


def block_n(head_dim: int, itemsize: int) -> int:
    """Rows of a block: fewer where a row has many bytes, so that blocks of keys and values fit into shared memory."""
    return 16 if IS_INTERPRETED else max(16, min(64, 16_384 // (padded(head_dim) * itemsize)))


def units_of(plan: CachePlan) -> list[tuple[int, ...]]:
    """The rows of the table of units: rings, those with many query heads once for every MOST_HEADS of them."""
    units: list[tuple[int, ...]] = []
    for branch, rings in plan.by_branch:
        shared = len(rings.query_heads) // len(rings.kv_heads)
        for k, kv_head in enumerate(rings.kv_heads):
            for start in range(0, shared, MOST_HEADS):
                heads = rings.query_heads[k * shared :][start : min(start + MOST_HEADS, shared)]
                ring = (rings.capacity, rings.offset + k * rings.capacity)
                own = (heads.start, heads.step, len(heads), kv_head, branch, int(start == 0))
                segment = (rings.segment_length, rings.rate, rings.phase, rings.rows_per_segment)
                units.append((*segment, *ring, *own))
    return units


@lru_cache(maxsize=64)
def _tables(
    pattern: DilatedPattern,
    num_heads: int,
    num_kv_heads: int,
    max_len: int | None,
    keep: int,
    held: range | None,
    device: torch.device,
) -> Tables:
    plan = plan_cache(pattern, num_heads, num_kv_heads, max_len, keep, held)
    units = units_of(plan)
    phases = [[-1] * len(plan.heads) for _ in pattern.branches]
    for *segment, _, _, first, step, count, _, branch, _ in units:
        for head in range(first, first + count * step, step):
            phases[branch][head] = segment[2]
    found = [torch.tensor(x, dtype=torch.int64, device=device) for x in (units, pattern.branches, phases, plan.lengths)]
    most_shared = max(unit[8] for unit in units)
    most_rows = max(unit[4] for unit in units)
    block_m = max(FEWEST_HEADS, 1 << (most_shared - 1).bit_length())
    num_splits = min(MOST_SPLITS, 1 << (-(-most_rows // ROWS_OF_A_SPLIT) - 1).bit_length())
    return Tables(found[0], found[1], found[2], found[3], block_m, num_splits)


_captured: list[Tables] = []  # what CUDA graphs read whenever they are replayed: kept for good


def append_one(
    plan: CachePlan,
    scale: float,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    memory: Tensor,
    progress: Tensor,
    lengths: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """out (B, 1, H, D) and lse (B, 1, H) of one new row for each batch entry, or none where `lengths` is 0.

    Nothing is raised for a sequence that would become too long, since nobody asks where it stands: its out and lse are
    NaN, and its part of the cache stays as it was.
    """
    check(query, key, value, memory)
    batch, _, num_heads, head_dim = query.shape
    sizes = (plan.num_heads, plan.num_kv_heads, plan.max_len, plan.keep, plan.held)
    tables = _tables(plan.pattern, *sizes, query.device)
    if query.is_cuda and torch.cuda.is_current_stream_capturing():
        _captured.append(tables)
    num_branches, splits = len(plan.of_phase), tables.num_splits
    lengths = None if lengths is None else lengths.to(query.device, torch.int64).clamp(0, 1)
    is_too_long = None
    if plan.max_len is not None:
        lengths = progress.new_ones(batch) if lengths is None else lengths
        is_too_long = progress[0] + lengths > plan.max_len
        lengths = lengths.masked_fill(is_too_long, 0)
    part_lse = query.new_empty((batch, num_heads, num_branches, splits), dtype=torch.float32)
    part_out = query.new_empty((*part_lse.shape, head_dim), dtype=torch.float32)
    out = query.new_empty((batch, 1, num_heads, head_dim))
    lse = query.new_empty((batch, 1, num_heads), dtype=torch.float32)
    counts = progress if lengths is None else lengths
    has_lengths = lengths is not None
    with on_device(query):
        token_kernel[len(tables.units) * splits * batch,](
            *(query, key, value, memory, progress, counts, tables.units, part_out, part_lse, scale),
            *(len(tables.units), num_heads, num_branches),
            *(query.stride(0), query.stride(2), key.stride(0), key.stride(2), value.stride(0), value.stride(2)),
            *memory.stride()[:2],
            HAS_LENGTHS=has_lengths,
            SPLITS=splits,
            PRECISION=precision(),
            D=head_dim,
            BD=padded(head_dim),
            BM=tables.block_m,
            BN=block_n(head_dim, query.element_size()),
        )
        merge_kernel[batch * num_heads,](
            *(part_out, part_lse, progress, counts, tables.branches, tables.phases, out, lse),
            *(num_heads, num_branches),
            HAS_LENGTHS=has_lengths,
            SPLITS=splits,
            D=head_dim,
            BD=padded(head_dim),
        )
    if is_too_long is not None:
        lse.masked_fill_(is_too_long[:, None, None], torch.nan)
        out.masked_fill_(is_too_long[:, None, None, None], torch.nan)
    _move_on(plan, tables, progress, lengths)
    return out, lse


def _move_on(plan: CachePlan, tables: Tables, progress: Tensor, lengths: Tensor | None) -> None:
    """As `CachePlan.floor`, on the device."""
    position, floor = progress
    position += 1 if lengths is None else lengths
    youngest = (position - position % tables.widths[:, None]).amax(0)
    torch.maximum(floor, torch.minimum(youngest, position - plan.keep), out=floor)
