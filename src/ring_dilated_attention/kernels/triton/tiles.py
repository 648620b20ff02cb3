"""Where the tiles of the kernels lie: integers only, no torch and no triton.

A *query tile* is `count` positions first, first + step, ... of one document, times `pack` query heads of equal phases
that share a key/value head. A *key tile* is the same of keys, with one head. The step is a multiple of a branch's rate,
so inside one segment of the branch all rows of a tile have one phase: the branch covers all of them or none.

`visit_query_tile` and `visit_key_tile` are compiled into the kernels as they stand (`blocks.py`), so that what the
tests enumerate is what runs. They therefore use nothing but integers, min, max and if, and no negative dividends, for
which the languages differ.
"""

from bisect import bisect
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from math import lcm
from typing import NamedTuple

from ...pattern import DilatedPattern
from ...plan.planner import make_plan
from ...plan.sharding import make_shards


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
# A count of more is an estimate from so many, evenly spread ones.
_MOST_VISITORS = 1024  # (tile, heads) of one document
_MOST_DOCUMENTS = 8
# 1/x and 1/x^2 with x^3 = x + 1: their multiples modulo 1 fill a square evenly (as the golden ratio's fill a line).
_ACROSS, _ALONG = 0.5698402909980532, 0.7548776662466927


class Choice(NamedTuple):
    """kind: "fused" (all branches, rows R apart) or "branches" (one branch at a time, in place).

    block: query rows of the forward's tile. share: useful pairs over computed ones. reason: of all candidates.
    """

    kind: str
    block: int
    share: float
    reason: str


class Kernel(NamedTuple):
    """What a kernel costs: its blocks, matrix products per pair, accumulators that a later branch reads and writes."""

    block_m: int
    block_n: int
    products: int
    sums: int
    of_keys: bool


class Work(NamedTuple):
    """(query, key) pairs that count, pairs that a kernel computes, and rows that later branches read and write."""

    pairs: float
    computed: float
    merged: float


def kernels_of(blocks: tuple[tuple[int, int], ...]) -> tuple[Kernel, ...]:
    """The kernels of a pass, from their (BM, BN): one of the forward, or those of dq and of dk with dv."""
    if len(blocks) == 1:
        return (Kernel(*blocks[0], 2, 1, False),)
    return Kernel(*blocks[0], 3, 1, False), Kernel(*blocks[1], 4, 2, True)


def documents_that_stand_for_all(borders: tuple[int, ...]) -> dict[int, float]:
    """Lengths of documents, and how many of each: what a document costs depends on its length alone.

    Lengths of several are rounded to five bits, so that those of the next batch have been counted before. If there are
    more than _MOST_DOCUMENTS, so many positions, evenly spaced in the order of their documents' length, stand for all.
    """
    lengths = sorted(stop - start for start, stop in pairwise(borders))
    if len(lengths) == 1:
        return {lengths[0]: 1.0}
    positions: Counter[int] = Counter()
    for length in lengths:
        positions[_rounded(length)] += length
    if len(positions) > _MOST_DOCUMENTS:
        ends = list(accumulate(positions.values()))
        middles = ((i + 0.5) * ends[-1] / _MOST_DOCUMENTS for i in range(_MOST_DOCUMENTS))
        drawn = Counter(list(positions)[bisect(ends, middle)] for middle in middles)
        return {length: number * ends[-1] / _MOST_DOCUMENTS / length for length, number in drawn.items()}
    return {length: number / length for length, number in positions.items()}


def _rounded(length: int) -> int:
    shift = max(length.bit_length() - 5, 0)
    return (length + (1 << shift >> 1)) >> shift << shift


def spread(number: int, period: int, most: int) -> Sequence[int]:
    """0 .. number - 1 or, if these are more, one from each of `most` stretches, at all places of a period in turn.

    Evenly spaced ones would fall at the same places of every segment, whose length is often a multiple of their step.
    """
    if number <= most:
        return range(number)
    periods = -(-number // period)
    starts = (int((i + i * _ALONG % 1) / most * periods) * period for i in range(most))
    return [min(start + int(i * _ACROSS % 1 * period), number - 1) for i, start in enumerate(starts)]


def fused_work(
    pattern: DilatedPattern, borders: tuple[int, ...], num_heads: int, num_kv_heads: int, kernel: Kernel
) -> float:
    """(query, key) pairs that a fused kernel computes for one batch entry, masked ones included. Within 3 % if many."""
    documents = documents_that_stand_for_all(borders)
    return sum(
        number * fused_document(pattern, length, num_heads, num_kv_heads, kernel)
        for length, number in documents.items()
    )


@lru_cache(maxsize=4096)
def fused_document(pattern: DilatedPattern, length: int, num_heads: int, num_kv_heads: int, kernel: Kernel) -> float:
    packs = packs_of(pattern, num_heads, num_kv_heads, kernel.block_m)
    phases = phases_of_heads(pattern, num_heads)
    firsts = (pack_heads(packs, num_heads, num_kv_heads, i).start for i in range(num_heads // packs.size))
    kinds = list(Counter(phases[h] for h in firsts).items())
    positions = kernel.block_n if kernel.of_keys else kernel.block_m // packs.size
    tiles = fused_tiles((0, length), stride_of(pattern), positions)
    block = kernel.block_m if kernel.of_keys else kernel.block_n
    blocks, counted = 0, spread(len(tiles) * len(kinds), stride_of(pattern) * len(kinds), _MOST_VISITORS)
    for i in counted:
        tile, (kind, number) = tiles[i // len(kinds)], kinds[i % len(kinds)]
        for visit in visits(pattern, tile, kind, block, of_keys=kernel.of_keys, pack=packs.size):
            seen = visit.end - visit.begin_or_full if kernel.of_keys else visit.end
            blocks += number * -(-seen // block)
    return blocks * kernel.block_m * kernel.block_n * len(tiles) * len(kinds) / len(counted)


def branches_work(
    pattern: DilatedPattern, borders: tuple[int, ...], num_heads: int, num_kv_heads: int, kernel: Kernel
) -> Work:
    """What tiles of one branch at a time make a kernel do for one batch entry."""
    documents = documents_that_stand_for_all(borders)
    works = [
        [number * x for x in branches_document(pattern, length, num_heads, num_kv_heads, kernel)]
        for length, number in documents.items()
    ]
    return Work(*(sum(column) for column in zip(*works, strict=True)))


@lru_cache(maxsize=4096)
def branches_document(pattern: DilatedPattern, length: int, num_heads: int, num_kv_heads: int, kernel: Kernel) -> Work:
    plan = make_plan(pattern, make_shards("contiguous", (length,)), 0, num_heads, num_kv_heads)
    computed, merged = 0, 0
    for tile in plan.local:
        heads, kv_heads = len(tile.query.heads), len(tile.key.heads)
        pack = max(p for p in range(1, kernel.block_m + 1) if heads // kv_heads % p == 0)
        blocks = _blocks(kernel, pack, tile.query.num_rows, tile.key.num_rows, tile.is_causal)
        computed += blocks * kernel.block_m * kernel.block_n * heads // pack * tile.query.segments
        if kernel.of_keys:
            merged += 0 if tile.first_key else tile.key.num_rows * kv_heads * tile.query.segments
        else:
            merged += 0 if tile.first_query else tile.query.num_rows * heads * tile.query.segments
    return Work(plan.pairs, computed, merged)


def _blocks(kernel: Kernel, pack: int, num_rows: int, num_keys: int, is_causal: bool) -> int:
    """Blocks that a kernel computes of one pack of heads in one segment."""
    if kernel.of_keys:
        queries, tiles = num_rows * pack, range(0, num_keys, kernel.block_n)
        firsts = (first * pack // kernel.block_m * kernel.block_m if is_causal else 0 for first in tiles)
        return sum(-(-(queries - first) // kernel.block_m) for first in firsts)
    positions = kernel.block_m // pack
    lasts = (min(first + positions, num_keys) if is_causal else num_keys for first in range(0, num_rows, positions))
    return sum(-(-last // kernel.block_n) for last in lasts)


@lru_cache(maxsize=256)
def choose_tile(
    pattern: DilatedPattern,
    borders: tuple[int, ...],
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    candidates: tuple[tuple[Kernel, ...], ...],
    *,
    prefers_fused: bool = False,
) -> Choice:
    """The cheapest shape of the tiles of a pass on one device. `candidates` are the kernels that could carry it out.

    prefers_fused: the cheapest fused one, if there is any.
    A matrix product costs 2 * D operations per pair; a row that is merged is read and written in float32.
    """
    step = stride_of(pattern)
    longest = min(max(pattern.segment_lengths), max(stop - start for start, stop in pairwise(borders)))
    call = (pattern, borders, num_heads, num_kv_heads)
    found: list[tuple[float, Choice]] = []
    reasons = []
    for kernels in candidates:
        rows = kernels[0].block_m
        works = [branches_work(*call, kernel) for kernel in kernels]
        useful = sum(work.pairs * kernel.products for work, kernel in zip(works, kernels, strict=True))
        computed = sum(work.computed * kernel.products for work, kernel in zip(works, kernels, strict=True))
        merged = sum(work.merged * kernel.sums for work, kernel in zip(works, kernels, strict=True))
        cost = computed * 2 * head_dim + merged * 8 * head_dim * FLOPS_PER_BYTE
        found.append((cost, Choice("branches", rows, useful / max(computed, 1), "")))
        reasons.append(f"branches, {rows} rows: {found[-1][1].share:.0%} useful, {merged:.0f} rows merged")
        if step >= longest:
            reasons.append(f"fused, {rows} rows: R = {step} is no less than the longest segment, {longest}")
            continue
        fused = sum(fused_work(*call, kernel) * kernel.products for kernel in kernels)
        found.append((fused * 2 * head_dim, Choice("fused", rows, useful / max(fused, 1), "")))
        reasons.append(f"fused, {rows} rows {step} apart: {found[-1][1].share:.0%} useful")
    if prefers_fused:
        found = [candidate for candidate in found if candidate[1].kind == "fused"] or found
    _, best = min(found, key=lambda candidate: candidate[0])
    return best._replace(reason="; ".join(reasons))
