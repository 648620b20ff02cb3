"""Rings: which ranks share a straddling segment, what a chunk holds, and when it is needed. Pure integers, no torch.

A *ring* is the ranks that share a segment, in order. A rank's number in this order is its *place*. A *chunk* is one
rank's key and value rows of the segment. At hop s the chunk of place c is *due* at place c + s (modulo the number of
places). The chunk is sent to a place only if the rank there needs it.

So a chunk travels during *ranges* of hops. Say that a chunk is needed at hops 1, 2, 3 and 6. Its owner sends it at hop
1. The rank that receives it passes it on at hop 2, and the next rank at hop 3. At hop 6 the owner sends it again.

If the pattern is causal and shards are contiguous, only later ranks need a chunk. So no chunk goes from the last place
to the first: the ring is a line. Under zigzag each rank owns two pieces, an early and a late one. Only ranks with a
lower number than the owner need the late piece. So the owner sends it straight to rank 0, at the hop at which the early
piece is due there.

In backward the gradient of a chunk travels one hop behind the chunk. The gradient starts from zero at the first rank of
each range, and the last rank of the range sends it to the owner.

If a rank owns fewer positions of a segment than the dilation rate, it has no rows of some phases. Heads share a ring
only if the same ranks have rows of their phases. So a rank has queries for every row that it receives.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from ..pattern import HeadGroup
from .rows import Band, Block, Piece, make_bands


@dataclass(frozen=True, eq=False)
class Entry:
    """Some of the rows in a chunk: the rows of one piece, for some neighbouring heads (`band`).

    piece: the index of the piece among the rank's pieces in `Ring.keys`. block: where the rows lie in the chunk.
    """

    piece: int
    band: Band
    block: Block


@dataclass(frozen=True, eq=False)
class Chunk:
    """One rank's key and value rows of a segment that several ranks share, packed without gaps.

    If the rows of two ranks lie at the same offsets in their chunks, the ranks have the same Chunk object.
    """

    size: int
    entries: tuple[Entry, ...]


Hops = tuple[tuple[int, int], ...]  # ranges of hops: (first, last)


@dataclass(frozen=True, eq=False)
class Ring:
    """The ranks that share a segment (for some of its heads), in order, and the chunks that they send each other.

    A sliding window has rings too. In such a ring, one rank sends some of its rows, and the other ranks have queries
    that attend to these rows (`window_maker.py`).
    """

    branch: int
    origin: int  # the first position of the segment; for a window, the first position of which a row is sent
    lane: int  # the number of this ring among the rings of the same branch and origin
    ranks: tuple[int, ...]
    # The four fields below have an entry for each rank of the ring, in the order of places.
    queries: tuple[tuple[Piece, ...], ...]
    keys: tuple[tuple[Piece, ...], ...]
    chunks: tuple[Chunk, ...]
    # For each place: the ranges of hops at which other ranks need the chunk of the rank there.
    needed: tuple[Hops, ...]

    def meets(self, chunk: int, s: int) -> bool:
        """Whether the chunk of the rank at place `chunk` is needed at hop s.

        At hop s this chunk is due at place chunk + s (modulo the number of places). Only the rank there can need the
        chunk.
        """
        for first, last in self.needed[chunk]:  # noqa: SIM110 (`any` takes three times as long)
            if first <= s <= last:
                return True
        return False

    def place_of(self, rank: int) -> int:
        return bisect_left(self.ranks, rank)


def make_chunk(
    groups: Sequence[HeadGroup], pieces: Sequence[Piece], first: int, origin: int, rate: int
) -> Chunk:
    """The chunk of a rank that owns these pieces of a segment, with a block for each piece and band of heads.

    first: the index of the first of these pieces in `Ring.keys`. origin: where the segment starts.
    """
    entries: list[Entry] = []
    size = 0
    for (number, piece), group in product(enumerate(pieces, first), groups):
        for band in make_bands(group, piece, origin, rate):
            num_heads = len(band.kv_heads)
            block = Block(size, num_heads, band.num_rows, 0, num_heads)
            entries.append(Entry(number, band, block))
            size += 2 * num_heads * band.num_rows
    return Chunk(size, tuple(entries))


def causal_hops(starts: Sequence[Sequence[int]]) -> list[list[Hops]]:
    """The ranges of hops at which other ranks need each piece of a segment, in a causal pattern.

    Rank p needs a piece of rank q if the piece starts before the last piece of p. If p is s places after q in the ring,
    p needs the piece at hop s.

    starts: for each place of the ring, the starts of the pieces there, ascending. The returned lists are in the same
        order.
    """
    num_places = len(starts)
    hops: list[list[Hops]] = [[()] * len(of_place) for of_place in starts]
    # List every piece as (start, place, index of the piece in starts[place]). The loop below goes from the latest piece
    # to the earliest, because the earlier a piece starts, the more places need it.
    pieces = [
        (start, place, i)
        for place, of_place in enumerate(starts)
        for i, start in enumerate(of_place)
    ]
    # `waiting`: the places that are not in `needed_by`, sorted by the start of their last piece.
    waiting = sorted(range(num_places), key=lambda place: starts[place][-1])
    needed_by: list[tuple[int, int]] = []  # the ranges of places that need the current piece
    for start, place, i in sorted(pieces, reverse=True):
        while waiting and starts[waiting[-1]][-1] > start:
            _add_place(needed_by, waiting.pop())
        hops[place][i] = _hops(needed_by, place, num_places)
    return hops


def all_hops(num_places: int) -> Hops:
    """The range of hops at which a chunk is needed, if all other ranks of the ring need it."""
    return ((1, num_places - 1),)


def _add_place(ranges: list[tuple[int, int]], place: int) -> None:
    """Add a place to a sorted list of ranges of places, (first, last). If no gap remains between two ranges, join
    them."""
    i = bisect_left(ranges, (place, place))
    first = last = place
    if i < len(ranges) and ranges[i][0] == place + 1:
        last = ranges.pop(i)[1]
    if i > 0 and ranges[i - 1][1] == place - 1:
        i -= 1
        first = ranges.pop(i)[0]
    ranges.insert(i, (first, last))


def _hops(ranges: Sequence[tuple[int, int]], place: int, num_places: int) -> Hops:
    """Turn ranges of places into the ranges of hops at which the chunk of `place` is due at these places.

    An example with 8 places: the chunk of place 2 is due at place 3 at hop 1, at place 4 at hop 2, and at place 0 at
    hop 6. So the ranges (0, 0) and (3, 4) of places give the ranges (1, 2) and (6, 6) of hops.
    """
    above: list[tuple[int, int]] = []
    below: list[tuple[int, int]] = []
    for first, last in ranges:
        if last > place:
            above.append((max(first, place + 1) - place, last - place))
        if first < place:
            below.append((first - place + num_places, min(last, place - 1) - place + num_places))
    return (*above, *below)
