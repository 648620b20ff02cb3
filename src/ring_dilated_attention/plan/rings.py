"""Rings: who shares rows of a straddling segment, how a chunk is laid out, and at which hops it is needed.

Pure integers, no torch.

A chunk is at place c + s of its ring at hop s, but only while someone needs it there: at *stretches* of hops. Inside a
stretch each rank passes it on; the first of a stretch has it from the owner. Under causality with contiguous shards no
stretch wraps, and the ring is a line; under zigzag the later part of a shard, needed by lower ranks alone, goes
straight to rank 0 when the earlier part gets there too. In backward the gradient of a chunk follows it one hop behind,
starts from zero with each stretch, and goes straight home at its end.

Where a rate is higher than a piece is long, a rank may have rows of some phases only. Heads whose phases other ranks
share have rings of their own then, so that no chunk comes to a rank without queries for all of it.
"""

from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

from ..pattern import HeadGroup
from .rows import Band, Block, Piece, kv_heads, make_bands


class Entry(NamedTuple):
    """A band of heads in a chunk and the block that holds it."""

    group: HeadGroup
    piece: Piece
    band: Band
    block: Block


class Layout(NamedTuple):
    """One rank's packed rows of a straddling segment."""

    size: int
    entries: tuple[Entry, ...]


Hops = tuple[tuple[int, int], ...]  # stretches of hops, first and last


class Ring(NamedTuple):
    """Heads of a straddling segment of a branch: where it starts, and of each rank that holds rows of them, in order:
    the rank, its pieces, its chunk, and the hops at which the chunk is needed. Rows that other ranks need, or at other
    hops, are in chunks of other rings, one for each `lane`."""

    branch: int
    origin: int
    lane: int
    ranks: tuple[int, ...]
    pieces: tuple[tuple[Piece, ...], ...]
    chunks: tuple[Layout, ...]
    needed: tuple[Hops, ...]

    def meets(self, chunk: int, s: int) -> bool:
        """Whether the rank to which a chunk comes at hop s needs it."""
        return any(first <= s <= last for first, last in self.needed[chunk])

    @property
    def last_hop(self) -> int:
        return max((hops[-1][1] for hops in self.needed if hops), default=0)

    def place_of(self, rank: int) -> int:
        return bisect_left(self.ranks, rank)


def lay_out(groups: Sequence[HeadGroup], pieces: Sequence[Piece], origin: int, rate: int) -> Layout:
    """The layout of one rank's rows of a segment: a block for each piece, head group and band."""
    entries, size = [], 0
    for piece in pieces:
        for group in groups:
            for band in make_bands(group, piece, origin, rate):
                num_heads = len(kv_heads(group, band))
                entries.append(Entry(group, piece, band, Block(size, num_heads, band.num_rows, 0, num_heads)))
                size += 2 * num_heads * band.num_rows
    return Layout(size, tuple(entries))


def causal_hops(starts: Sequence[Sequence[int]]) -> list[list[Hops]]:
    """For each piece of each place of a ring the hops at which it comes to a place that needs it.

    A place needs a piece if one of its own starts later. Places are taken up as the start that is asked for falls, and
    kept as stretches of neighbours.

    Args:
        starts: of the pieces of each place, in ascending order.
    """
    g = len(starts)
    falling = sorted(range(g), key=lambda k: starts[k][-1])  # taken from the end
    stretches: list[tuple[int, int]] = []
    found: list[list[Hops]] = [[()] * len(place) for place in starts]
    for start, c, j in sorted(((x, c, j) for c, place in enumerate(starts) for j, x in enumerate(place)), reverse=True):
        while falling and starts[falling[-1]][-1] > start:
            _take_up(stretches, falling.pop())
        found[c][j] = _hops(stretches, c, g)
    return found


def _take_up(stretches: list[tuple[int, int]], k: int) -> None:
    """Add a place to stretches of places, (first, last) in ascending order."""
    i = bisect_left(stretches, (k, k))
    lo = hi = k
    if i < len(stretches) and stretches[i][0] == k + 1:
        hi = stretches.pop(i)[1]
    if i and stretches[i - 1][1] == k - 1:
        i -= 1
        lo = stretches.pop(i)[0]
    stretches.insert(i, (lo, hi))


def _hops(stretches: Sequence[tuple[int, int]], c: int, g: int) -> Hops:
    """The hops at which a chunk of place c comes to some stretch of the g places: those above c, then those below."""
    above = [(max(lo, c + 1) - c, hi - c) for lo, hi in stretches if hi > c]
    below = [(lo - c + g, min(hi, c - 1) - c + g) for lo, hi in stretches if lo < c]
    if above and below and above[-1][1] + 1 == below[0][0]:
        (first, _), (_, last) = above.pop(), below.pop(0)
        above.append((first, last))
    return (*above, *below)
