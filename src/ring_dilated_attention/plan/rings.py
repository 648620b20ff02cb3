"""Rings: who shares rows of a straddling segment, what a chunk holds, and at which hops it is needed.

Pure integers, no torch.

At hop s the chunk of the rank at place c of a ring is due at place c + s. It is sent there only if the rank needs it,
so it travels during *ranges* of hops. Inside a range each rank passes it on; the first rank of a range has it from the
owner. Under causality with contiguous shards no range wraps, and the ring is a line. Under zigzag only lower ranks need
the later piece of a shard: it goes straight to rank 0 when the earlier piece gets there too. In backward the gradient
of a chunk follows it one hop behind, starts from zero with each range, and goes straight home at its end.

Where a rate is higher than a piece is long, a rank may have rows of some phases only. Heads whose phases other ranks
share have rings of their own then, so that no chunk comes to a rank without queries for all of it.
"""

from bisect import bisect_left
from collections.abc import Sequence
from itertools import product
from typing import NamedTuple

from ..pattern import HeadGroup
from .rows import Band, Block, Piece, make_bands


class Entry(NamedTuple):
    """A band of heads in a chunk and the block that holds it."""

    piece: Piece
    band: Band
    block: Block


class Chunk(NamedTuple):
    """One rank's packed rows of a straddling segment."""

    size: int
    entries: tuple[Entry, ...]


Hops = tuple[tuple[int, int], ...]  # ranges of hops, first and last


class Ring(NamedTuple):
    """Heads of a straddling segment of a branch, and the ranks that hold rows of them.

    origin: where the segment starts.
    lane: rows that other ranks need, or that are needed at other hops, are in chunks of other rings, with other lanes.
    ranks, pieces, chunks, needed: each rank in order, its pieces, its chunk, and the hops at which the chunk is needed.
    """

    branch: int
    origin: int
    lane: int
    ranks: tuple[int, ...]
    pieces: tuple[tuple[Piece, ...], ...]
    chunks: tuple[Chunk, ...]
    needed: tuple[Hops, ...]

    def meets(self, chunk: int, s: int) -> bool:
        """Whether the rank to which a chunk comes at hop s needs it."""
        return any(first <= s <= last for first, last in self.needed[chunk])

    def place_of(self, rank: int) -> int:
        return bisect_left(self.ranks, rank)


def make_chunk(groups: Sequence[HeadGroup], pieces: Sequence[Piece], origin: int, rate: int) -> Chunk:
    """One rank's rows of a segment, packed: a block for each piece, head group and band."""
    entries, size = [], 0
    for piece, group in product(pieces, groups):
        for band in make_bands(group, piece, origin, rate):
            num_heads = len(band.kv_heads)
            entries.append(Entry(piece, band, Block(size, num_heads, band.num_rows, 0, num_heads)))
            size += 2 * num_heads * band.num_rows
    return Chunk(size, tuple(entries))


def causal_hops(starts: Sequence[Sequence[int]]) -> list[list[Hops]]:
    """For each piece of each place of a ring the hops at which it comes to a place that needs it.

    A place needs a piece if one of its own starts later. Places are added as the start that is asked for falls, and
    kept as ranges of neighbours.

    Args:
        starts: of the pieces of each place, in ascending order.
    """
    g = len(starts)
    falling = sorted(range(g), key=lambda k: starts[k][-1])  # taken from the end
    ranges: list[tuple[int, int]] = []
    found: list[list[Hops]] = [[()] * len(place) for place in starts]
    for start, c, j in sorted(((x, c, j) for c, place in enumerate(starts) for j, x in enumerate(place)), reverse=True):
        while falling and starts[falling[-1]][-1] > start:
            _add_place(ranges, falling.pop())
        found[c][j] = _hops(ranges, c, g)
    return found


def _add_place(ranges: list[tuple[int, int]], k: int) -> None:
    """Add place k to ranges of places, (first, last) in ascending order."""
    i = bisect_left(ranges, (k, k))
    lo = hi = k
    if i < len(ranges) and ranges[i][0] == k + 1:
        hi = ranges.pop(i)[1]
    if i and ranges[i - 1][1] == k - 1:
        i -= 1
        lo = ranges.pop(i)[0]
    ranges.insert(i, (lo, hi))


def _hops(ranges: Sequence[tuple[int, int]], c: int, g: int) -> Hops:
    """The hops at which a chunk of place c comes to some range of the g places: those above c, then those below."""
    above = [(max(lo, c + 1) - c, hi - c) for lo, hi in ranges if hi > c]
    below = [(lo - c + g, min(hi, c - 1) - c + g) for lo, hi in ranges if lo < c]
    if above and below and above[-1][1] + 1 == below[0][0]:
        (first, _), (_, last) = above.pop(), below.pop(0)
        above.append((first, last))
    return (*above, *below)
