"""Which rows a Triton program of the fused kernels holds, and which it meets. Integers only, no torch and no triton.

A *strip* is `num_rows` positions first, first + step, ... of one document. A strip of keys has one head. A strip of
queries has a *bundle* of heads, which share a key/value head and have equal phases. The step is a multiple of each
branch's rate, so inside one segment all rows of a strip have one phase: a branch covers all of them or none.

`keys_seen` and `queries_seeing` are compiled into the kernels as they stand (`blocks.py`), so that what the tests
enumerate is what runs. So both use only integers, min, max and if, and no negative dividends, on which Python and
Triton differ.
"""

from itertools import pairwise
from math import lcm
from typing import NamedTuple

from ...pattern import DilatedPattern


class Strip(NamedTuple):
    """A strip of the document of `length` positions that begins at `document`."""

    document: int
    length: int
    first: int
    num_rows: int


def keys_seen(
    strip: Strip, step: int, start: int, stop: int, phase: int, rate: int, is_causal: int, block: int
) -> tuple[int, int]:
    """(num_full, num_keys): queries of the strip see the first num_keys keys with this phase of segment start..stop-1.

    All rows see the first num_full of these, which are whole blocks. Both are 0 if the branch does not cover the strip
    here. The strip must begin before `stop`. `phase` is -1 if the heads do not run the branch.
    """
    lo = (max(start - strip.first, 0) + step - 1) // step  # rows lo..hi lie in the segment
    hi = min(strip.num_rows - 1, (stop - 1 - strip.first) // step)
    num_keys = (max(stop - start - phase, 0) + rate - 1) // rate
    num_full = num_keys
    if is_causal:
        num_keys = max(strip.first + step * hi - start - phase, 0) // rate + 1
        num_full = max(strip.first + step * lo - start - phase, 0) // rate + 1
    num_full = num_full // block * block
    if (lo > 0) | (hi < strip.num_rows - 1):  # rows of other segments see nothing here
        num_full = 0
    if ((strip.first + rate - start % rate) % rate != phase) | (lo > hi):
        num_full = 0
        num_keys = 0
    return num_full, num_keys


def queries_seeing(
    strip: Strip, step: int, start: int, stop: int, phase: int, rate: int, is_causal: int, heads: int, block: int
) -> tuple[int, int]:
    """(begin, end): keys of the strip are seen by queries begin..end-1 with this phase of segment start..stop-1. A
    position counts as `heads` queries, and `begin` is the first of a block. Both are 0 if the branch covers no row."""
    lo = (max(start - strip.first, 0) + step - 1) // step  # rows lo..hi lie in the segment
    hi = min(strip.num_rows - 1, (stop - 1 - strip.first) // step)
    end = (max(stop - start - phase, 0) + rate - 1) // rate * heads
    begin = 0
    if is_causal:
        begin = max(strip.first + step * lo - start - phase, 0) // rate * heads // block * block
    if ((strip.first + rate - start % rate) % rate != phase) | (lo > hi):
        begin = 0
        end = 0
    return begin, end


class Bundles(NamedTuple):
    """Bundles of `size` query heads, which share a key/value head and have equal phases in every branch.

    Bundle c of key/value head g has query heads g * ratio + c * stride + j * head_step, j < size.
    """

    size: int
    stride: int
    head_step: int


def step_of(pattern: DilatedPattern) -> int:
    """R, the least common multiple of the rates."""
    return lcm(*pattern.dilation_rates)


def bundle_size(ratio: int, most: int) -> int:
    """The size of a bundle of the `ratio` query heads that share a key/value head: the largest divisor up to `most`."""
    return max(size for size in range(1, min(ratio, most) + 1) if ratio % size == 0)


def bundles_of(pattern: DilatedPattern, num_heads: int, num_kv_heads: int, most: int) -> Bundles:
    """The largest bundles of at most `most` heads: neighbours, or evenly spaced over the heads that share keys."""
    ratio = num_heads // num_kv_heads
    phases = phases_of_heads(pattern, num_heads)
    for size in (p for p in range(min(ratio, most), 1, -1) if ratio % p == 0):
        for bundles in (Bundles(size, size, 1), Bundles(size, 1, ratio // size)):
            heads = (heads_of_bundle(bundles, num_heads, num_kv_heads, i) for i in range(num_heads // size))
            if all(len({phases[h] for h in bundle}) == 1 for bundle in heads):
                return bundles
    return Bundles(1, 1, 1)


def heads_of_bundle(bundles: Bundles, num_heads: int, num_kv_heads: int, i: int) -> range:
    """The query heads of the i-th bundle."""
    ratio = num_heads // num_kv_heads
    g, c = divmod(i, ratio // bundles.size)
    first = g * ratio + c * bundles.stride
    return range(first, first + bundles.size * bundles.head_step, bundles.head_step)


def phases_of_heads(pattern: DilatedPattern, num_heads: int) -> list[tuple[int, ...]]:
    """For each head the phase that it reads in each branch; -1 if it does not run the branch."""
    read = ((pattern.phase_of(i, h, num_heads) for i in range(len(pattern.branches))) for h in range(num_heads))
    return [tuple(-1 if s is None else s for s in phases) for phases in read]


def fused_strips(borders: tuple[int, ...], step: int, positions: int) -> list[Strip]:
    """Strips of up to `positions` rows: each position is in one. The last comes first: if causal, it sees most."""
    strips = [
        Strip(document, stop - document, first, min(positions, -(-(stop - document - first) // step)))
        for document, stop in pairwise(borders)
        for row in range(0, -(-(stop - document) // step), positions)
        for first in range(step * row, min(step * (row + 1), stop - document))
    ]
    return strips[::-1]


def crosses(pattern: DilatedPattern, borders: tuple[int, ...], positions: int) -> bool:
    """Whether a strip can have rows of two segments of a branch."""
    longest = max(stop - start for start, stop in pairwise(borders))
    return any(w < longest and w % (positions * step_of(pattern)) for w in pattern.segment_lengths)
