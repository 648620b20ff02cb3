"""The shape of the strips of a pass, by the work that it computes: all branches at once, or one at a time.

Integers only, no torch and no triton.
"""

from bisect import bisect
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import NamedTuple

from ...pattern import DilatedPattern
from ...plan.job import Job
from ...plan.planner import make_plan
from ...plan.sharding import make_shards
from .strips import bundle_size, bundles_of, fused_strips, heads_of_bundle, phases_of_heads, step_of, visits

# Fused strips cost their masked work; branches one at a time cost passes over the accumulators instead, counted as if
# nothing hid them. So many operations take as long as moving one byte: bfloat16 on an H100 SXM, 989 TFLOP/s over
# 3.35 TB/s by its data sheet (an A100: 156).
FLOPS_PER_BYTE = 295
# A count of more is an estimate from so many, evenly spread ones.
_MOST_VISITORS = 1024  # (strip, heads) of one document
_MOST_DOCUMENTS = 8
# 1/x and 1/x^2 with x^3 = x + 1: their multiples modulo 1 fill a square evenly (as the golden ratio's fill a line).
_ACROSS, _ALONG = 0.5698402909980532, 0.7548776662466927


class Shape(NamedTuple):
    """kind: "fused" (all branches, rows R apart) or "branches" (one branch at a time, in place).

    block: query rows of the forward's strips. share: useful pairs over computed ones. reason: of all candidates.
    """

    kind: str
    block: int
    share: float
    reason: str


class Cost(NamedTuple):
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


def costs_of(blocks: tuple[tuple[int, int], ...]) -> tuple[Cost, ...]:
    """The kernels of a pass, from their (BM, BN): one of the forward, or those of dq and of dk with dv."""
    if len(blocks) == 1:
        return (Cost(*blocks[0], 2, 1, False),)
    return Cost(*blocks[0], 3, 1, False), Cost(*blocks[1], 4, 2, True)


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
    pattern: DilatedPattern, borders: tuple[int, ...], num_heads: int, num_kv_heads: int, kernel: Cost
) -> float:
    """(query, key) pairs that a fused kernel computes for one batch entry, masked ones included. Within 3 % if many."""
    documents = documents_that_stand_for_all(borders)
    return sum(
        number * fused_document(pattern, length, num_heads, num_kv_heads, kernel)
        for length, number in documents.items()
    )


@lru_cache(maxsize=4096)
def fused_document(pattern: DilatedPattern, length: int, num_heads: int, num_kv_heads: int, kernel: Cost) -> float:
    bundles = bundles_of(pattern, num_heads, num_kv_heads, kernel.block_m)
    phases = phases_of_heads(pattern, num_heads)
    firsts = (heads_of_bundle(bundles, num_heads, num_kv_heads, i).start for i in range(num_heads // bundles.size))
    kinds = list(Counter(phases[h] for h in firsts).items())
    positions = kernel.block_n if kernel.of_keys else kernel.block_m // bundles.size
    strips = fused_strips((0, length), step_of(pattern), positions)
    block = kernel.block_m if kernel.of_keys else kernel.block_n
    blocks, counted = 0, spread(len(strips) * len(kinds), step_of(pattern) * len(kinds), _MOST_VISITORS)
    for i in counted:
        strip, (kind, number) = strips[i // len(kinds)], kinds[i % len(kinds)]
        for visit in visits(pattern, strip, kind, block, of_keys=kernel.of_keys, heads=bundles.size):
            seen = visit.end - visit.begin_or_full if kernel.of_keys else visit.end
            blocks += number * -(-seen // block)
    return blocks * kernel.block_m * kernel.block_n * len(strips) * len(kinds) / len(counted)


def branches_work(
    pattern: DilatedPattern, borders: tuple[int, ...], num_heads: int, num_kv_heads: int, kernel: Cost
) -> Work:
    """What tiles of one branch at a time make a kernel do for one batch entry."""
    documents = documents_that_stand_for_all(borders)
    works = [
        [number * x for x in branches_document(pattern, length, num_heads, num_kv_heads, kernel)]
        for length, number in documents.items()
    ]
    return Work(*(sum(column) for column in zip(*works, strict=True)))


@lru_cache(maxsize=4096)
def branches_document(pattern: DilatedPattern, length: int, num_heads: int, num_kv_heads: int, kernel: Cost) -> Work:
    plan = make_plan(Job(pattern, make_shards("contiguous", (length,)), num_heads, num_kv_heads), 0)
    computed, merged = 0, 0
    for tile in plan.local:
        heads, kv_heads = len(tile.query.heads), len(tile.key.heads)
        together = bundle_size(heads // kv_heads, kernel.block_m)
        blocks = _blocks(kernel, together, tile.query.num_rows, tile.key.num_rows, tile.is_causal)
        computed += blocks * kernel.block_m * kernel.block_n * heads // together * tile.query.segments
        if kernel.of_keys:
            merged += 0 if tile.first_key else tile.key.num_rows * kv_heads * tile.query.segments
        else:
            merged += 0 if tile.first_query else tile.query.num_rows * heads * tile.query.segments
    return Work(plan.pairs, computed, merged)


def _blocks(kernel: Cost, heads: int, num_rows: int, num_keys: int, is_causal: bool) -> int:
    """Blocks that a kernel computes of one bundle of heads in one segment."""
    if kernel.of_keys:
        queries, strips = num_rows * heads, range(0, num_keys, kernel.block_n)
        firsts = (first * heads // kernel.block_m * kernel.block_m if is_causal else 0 for first in strips)
        return sum(-(-(queries - first) // kernel.block_m) for first in firsts)
    positions = kernel.block_m // heads
    lasts = (min(first + positions, num_keys) if is_causal else num_keys for first in range(0, num_rows, positions))
    return sum(-(-last // kernel.block_n) for last in lasts)


@lru_cache(maxsize=256)
def choose_shape(
    pattern: DilatedPattern,
    borders: tuple[int, ...],
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    candidates: tuple[tuple[Cost, ...], ...],
    *,
    prefers_fused: bool = False,
) -> Shape:
    """The cheapest shape of the strips of a pass on one device. `candidates` are the kernels that could carry it out.

    prefers_fused: the cheapest fused one, if there is any.
    A matrix product costs 2 * D operations per pair; a row that is merged is read and written in float32.
    """
    step = step_of(pattern)
    longest = min(max(pattern.segment_lengths), max(stop - start for start, stop in pairwise(borders)))
    call = (pattern, borders, num_heads, num_kv_heads)
    found: list[tuple[float, Shape]] = []
    reasons = []
    for kernels in candidates:
        rows = kernels[0].block_m
        works = [branches_work(*call, kernel) for kernel in kernels]
        useful = sum(work.pairs * kernel.products for work, kernel in zip(works, kernels, strict=True))
        computed = sum(work.computed * kernel.products for work, kernel in zip(works, kernels, strict=True))
        merged = sum(work.merged * kernel.sums for work, kernel in zip(works, kernels, strict=True))
        cost = computed * 2 * head_dim + merged * 8 * head_dim * FLOPS_PER_BYTE
        found.append((cost, Shape("branches", rows, useful / max(computed, 1), "")))
        reasons.append(f"branches, {rows} rows: {found[-1][1].share:.0%} useful, {merged:.0f} rows merged")
        if step >= longest:
            reasons.append(f"fused, {rows} rows: R = {step} is no less than the longest segment, {longest}")
            continue
        fused = sum(fused_work(*call, kernel) * kernel.products for kernel in kernels)
        found.append((fused * 2 * head_dim, Shape("fused", rows, useful / max(fused, 1), "")))
        reasons.append(f"fused, {rows} rows {step} apart: {found[-1][1].share:.0%} useful")
    if prefers_fused:
        found = [candidate for candidate in found if candidate[1].kind == "fused"] or found
    _, best = min(found, key=lambda candidate: candidate[0])
    return best._replace(reason="; ".join(reasons))
