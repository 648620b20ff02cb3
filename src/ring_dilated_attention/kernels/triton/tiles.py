"""Where the tiles of the kernels lie: integers only, no torch and no triton.

A *query tile* is `count` positions first, first + step, ... of one document, times `pack` query heads of equal phases
that share a key/value head. A *key tile* is the same of keys, with one head. The step is a multiple of a branch's rate,
so inside one segment of the branch all rows of a tile have one phase: the branch covers all of them or none.

`visit_query_tile` and `visit_key_tile` are compiled into the kernels as they stand (`blocks.py`), so that what the
tests enumerate is what runs. They therefore use nothing but integers, min, max and if, and no negative dividends, for
which the languages differ.
"""

from collections import Counter
from collections.abc import Iterator
from functools import lru_cache
from itertools import pairwise
from math import lcm
from typing import NamedTuple

from ...pattern import DilatedPattern
from ...planner import make_plan
from ...sharding import make_shards


def visit_query_tile(
    first: int,
    step: int,
    count: int,
    start: int,
    stop: int,
    phase: int,
    rate: int,
    is_causal: int,
    block: int,
) -> tuple[int, int]:
    """(num_full, num_keys): rows of the tile see the first num_keys keys with this phase of segment start..stop-1.

    All rows see the first num_full of them, whole blocks. Both are 0 if the branch does not cover the tile here. The
    tile must begin before `stop`; `phase` is -1 if the heads do not run the branch.
    """
    lo = (max(start - first, 0) + step - 1) // step  # rows lo..hi lie in the segment
    hi = min(count - 1, (stop - 1 - first) // step)
    num_keys = (max(stop - start - phase, 0) + rate - 1) // rate
    num_full = num_keys
    if is_causal:
        num_keys = max(first + step * hi - start - phase, 0) // rate + 1
        num_full = max(first + step * lo - start - phase, 0) // rate + 1
    num_full = num_full // block * block
    if (lo > 0) | (hi < count - 1):  # rows of other segments see nothing here
        num_full = 0
    if ((first + rate - start % rate) % rate != phase) | (lo > hi):
        num_full = 0
        num_keys = 0
    return num_full, num_keys


def visit_key_tile(
    first: int,
    step: int,
    count: int,
    start: int,
    stop: int,
    phase: int,
    rate: int,
    is_causal: int,
    pack: int,
    block: int,
) -> tuple[int, int]:
    """(begin, end): keys of the tile are seen by queries begin..end-1 with this phase of segment start..stop-1.

    Queries count `pack` for each position; `begin` is a whole block. Both are 0 if the branch does not cover the tile.
    """
    lo = (max(start - first, 0) + step - 1) // step  # rows lo..hi lie in the segment
    hi = min(count - 1, (stop - 1 - first) // step)
    end = (max(stop - start - phase, 0) + rate - 1) // rate * pack
    begin = 0
    if is_causal:
        begin = max(first + step * lo - start - phase, 0) // rate * pack // block * block
    if ((first + rate - start % rate) % rate != phase) | (lo > hi):
        begin = 0
        end = 0
    return begin, end


class TileRows(NamedTuple):
    """`num_rows` positions first, first + step, ... of the document of `length` positions that begins at `document`."""

    document: int
    length: int
    first: int
    num_rows: int


class Packs(NamedTuple):
    """Query heads of equal phases in every branch that share a key/value head, `size` in a tile.

    Pack c of key/value head g has query heads g * ratio + c * stride + j * head_step, j < size.
    """

    size: int
    stride: int
    head_step: int


class Visit(NamedTuple):
    """A tile meets a segment of a branch: (full, end) as visit_query_tile, or (begin, end) as visit_key_tile says."""

    branch: int
    start: int
    phase: int
    begin_or_full: int
    end: int


def stride_of(pattern: DilatedPattern) -> int:
    """R, the least common multiple of the rates: rows of a fused tile are R positions apart."""
    return lcm(*pattern.dilation_rates)


def packs_of(pattern: DilatedPattern, num_heads: int, num_kv_heads: int, most: int) -> Packs:
    """The largest packs of at most `most` heads: neighbours, or evenly spaced over the heads that share keys."""
    ratio = num_heads // num_kv_heads
    phases = phases_of_heads(pattern, num_heads)
    for size in (p for p in range(min(ratio, most), 1, -1) if ratio % p == 0):
        for packs in (Packs(size, size, 1), Packs(size, 1, ratio // size)):
            heads = (pack_heads(packs, num_heads, num_kv_heads, i) for i in range(num_heads // size))
            if all(len({phases[h] for h in pack}) == 1 for pack in heads):
                return packs
    return Packs(1, 1, 1)


def pack_heads(packs: Packs, num_heads: int, num_kv_heads: int, i: int) -> range:
    """The query heads of the i-th pack."""
    ratio = num_heads // num_kv_heads
    g, c = divmod(i, ratio // packs.size)
    first = g * ratio + c * packs.stride
    return range(first, first + packs.size * packs.head_step, packs.head_step)


def phases_of_heads(pattern: DilatedPattern, num_heads: int) -> list[tuple[int, ...]]:
    """For each head the phase that it reads in each branch; -1 if it does not run the branch."""
    found = []
    for h in range(num_heads):
        phases = (pattern.phase_of(i, h, num_heads) for i in range(len(pattern.branches)))
        found.append(tuple(-1 if s is None else s for s in phases))
    return found


def fused_tiles(borders: tuple[int, ...], step: int, positions: int) -> list[TileRows]:
    """Tiles of `positions` rows over all documents, every position once. The last first: if causal, it sees most."""
    tiles = []
    for document, stop in pairwise(borders):
        length = stop - document
        for row in range(0, -(-length // step), positions):
            for first in range(step * row, min(step * (row + 1), length)):
                tiles.append(TileRows(document, length, first, min(positions, -(-(length - first) // step))))
    return tiles[::-1]


def crosses(pattern: DilatedPattern, borders: tuple[int, ...], positions: int) -> bool:
    """Whether a fused tile can have rows of two segments of a branch."""
    longest = max(stop - start for start, stop in pairwise(borders))
    return any(w < longest and w % (positions * stride_of(pattern)) for w in pattern.segment_lengths)


def visits(
    pattern: DilatedPattern,
    tile: TileRows,
    phases: tuple[int, ...],
    block: int,
    *,
    of_keys: bool = False,
    pack: int = 1,
) -> Iterator[Visit]:
    """What the fused kernels do for one tile and one pack: their loops, in their order, without visits of nothing."""
    step = stride_of(pattern)
    for branch, ((width, rate), phase) in enumerate(zip(pattern.branches, phases, strict=True)):
        for i in range(tile.first // width, (tile.first + (tile.num_rows - 1) * step) // width + 1):
            start, stop = i * width, min((i + 1) * width, tile.length)
            place = (tile.first, step, tile.num_rows, start, stop, phase, rate, pattern.is_causal)
            met = visit_key_tile(*place, pack, block) if of_keys else visit_query_tile(*place, block)
            if met[1]:
                yield Visit(branch, start, phase, *met)


# The choice of the tile's shape, by the work that it computes.

# A fused tile costs its masked work; per-branch tiles cost passes over the accumulators instead, counted as if nothing
# hid them. So many operations take as long as moving one byte: bfloat16 on an H100 SXM, 989 TFLOP/s over 3.35 TB/s by
# its data sheet (an A100: 156).
FLOPS_PER_BYTE = 295
_MOST_TILES = 1024  # counted; of more, evenly spaced ones


class Choice(NamedTuple):
    """kind: "fused" (all branches, rows R apart) or "branches" (one branch at a time, in place).

    block: query rows of the tile. share: useful pairs over computed ones. reason: of all candidates.
    """

    kind: str
    block: int
    share: float
    reason: str


def fused_work(
    pattern: DilatedPattern, borders: tuple[int, ...], num_heads: int, num_kv_heads: int, block_m: int, block_n: int
) -> float:
    """(query, key) pairs that the fused forward computes for one batch entry, masked ones included."""
    packs = packs_of(pattern, num_heads, num_kv_heads, block_m)
    phases = phases_of_heads(pattern, num_heads)
    firsts = (pack_heads(packs, num_heads, num_kv_heads, i).start for i in range(num_heads // packs.size))
    kinds = Counter(phases[h] for h in firsts)
    step = stride_of(pattern)
    tiles = fused_tiles(borders, step, block_m // packs.size)
    groups = [tiles[i : i + step] for i in range(0, len(tiles), step)]  # all phases of a stretch
    counted = groups[:: max(1, len(tiles) // _MOST_TILES)]
    blocks = sum(
        number * -(-visit.end // block_n)
        for group in counted
        for tile in group
        for kind, number in kinds.items()
        for visit in visits(pattern, tile, kind, block_n)
    )
    return blocks * block_m * block_n * len(groups) / len(counted)


def branches_work(
    pattern: DilatedPattern, borders: tuple[int, ...], num_heads: int, num_kv_heads: int, block_m: int, block_n: int
) -> tuple[int, int, int]:
    """Pairs that count, pairs that per-branch tiles compute, and rows that they merge, for one batch entry."""
    plan = make_plan(pattern, make_shards("contiguous", borders[-1:]), 0, num_heads, num_kv_heads, borders)
    computed, merged = 0, 0
    for tile in plan.local:
        heads, rows, keys = len(tile.query.heads), tile.query.num_rows, tile.key.num_rows
        pack = max(p for p in range(1, block_m + 1) if heads // len(tile.key.heads) % p == 0)
        positions = block_m // pack
        if tile.is_causal:
            blocks = sum(-(-min(first + positions, keys) // block_n) for first in range(0, rows, positions))
        else:
            blocks = -(-rows // positions) * -(-keys // block_n)
        computed += blocks * block_m * block_n * heads // pack * tile.query.segments
        merged += 0 if tile.first_query else rows * heads * tile.query.segments
    return plan.pairs, computed, merged


@lru_cache(maxsize=256)
def choose_tile(
    pattern: DilatedPattern,
    borders: tuple[int, ...],
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    blocks: tuple[tuple[int, int], ...],
) -> Choice:
    """The cheapest shape of the tiles of one device's forward. `blocks` are the (BM, BN) that there are kernels for.

    A pair costs 4 * D operations, and a row that is merged is read and written in float32.
    """
    step, longest = stride_of(pattern), max(pattern.segment_lengths)
    candidates: list[tuple[float, Choice]] = []
    reasons = []
    for block_m, block_n in blocks:
        pairs, computed, merged = branches_work(pattern, borders, num_heads, num_kv_heads, block_m, block_n)
        share = pairs / max(computed, 1)
        cost = computed * 4 * head_dim + merged * 8 * head_dim * FLOPS_PER_BYTE
        candidates.append((cost, Choice("branches", block_m, share, "")))
        reasons.append(f"branches, {block_m} rows: {share:.0%} useful, {merged} rows merged")
        if step >= longest:
            reasons.append(f"fused, {block_m} rows: R = {step} is no less than the longest segment, {longest}")
            continue
        computed_fused = fused_work(pattern, borders, num_heads, num_kv_heads, block_m, block_n)
        share = pairs / max(computed_fused, 1)
        candidates.append((computed_fused * 4 * head_dim, Choice("fused", block_m, share, "")))
        reasons.append(f"fused, {block_m} rows {step} apart: {share:.0%} useful")
    _, best = min(candidates, key=lambda candidate: candidate[0])
    return best._replace(reason="; ".join(reasons))
