"""Rings: which ranks share a straddling segment, what a chunk holds, and when it is needed. Pure integers, no torch.

At hop s the chunk of the rank at place c of a ring is due at place c + s. It is sent there only if the rank at that
place needs it, so a chunk travels during *ranges* of hops. The owner sends it to the first rank of a range, and inside
the range each rank passes it on. If the pattern is causal and shards are contiguous, no chunk goes from the last place
to the first: the ring is a line. Under zigzag only the ranks below the owner need the later piece of its shard. The
owner sends this piece straight to rank 0, at the hop at which the earlier piece arrives there.

In backward the gradient of a chunk follows one hop behind. The gradient starts from zero at the first rank of each
range, and the last rank of the range sends it to the owner.

Where pieces are shorter than the rate, a rank may have rows of some phases only. Heads then share a ring only if the
same ranks hold their phases, so that a rank has queries for every row that it receives.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from ..pattern import HeadGroup
from .rows import Band, Block, Piece, make_bands


@dataclass(frozen=True, eq=False)
class Entry:
    """A band of heads in a chunk, and the block that holds its rows. piece: the index of the band's piece among the
    rank's pieces in `Ring.keys`."""

    piece: int
    band: Band
    block: Block


@dataclass(frozen=True, eq=False)
class Chunk:
    """One rank's packed rows of a straddling segment. Chunks in which rows lie alike are one object."""

    size: int
    entries: tuple[Entry, ...]


Hops = tuple[tuple[int, int], ...]  # ranges of hops: (first, last)


@dataclass(frozen=True, eq=False)
class Ring:
    """Some heads of a straddling segment of a branch, and the ranks that hold rows of these heads, in order. For a
    window: some rows of one rank, and that rank with the ranks whose queries see them (`window_maker.py`)."""

    branch: int
    origin: int  # the position where the segment starts, or the rows that a window sees
    lane: int  # the number of this ring among those with this origin
    ranks: tuple[int, ...]
    queries: tuple[tuple[Piece, ...], ...]  # of each rank
    keys: tuple[tuple[Piece, ...], ...]  # of each rank; `Entry.piece` is an index of these
    chunks: tuple[Chunk, ...]  # of each rank
    needed: tuple[Hops, ...]  # for each rank, the hops at which its chunk is needed

    def meets(self, chunk: int, s: int) -> bool:
        """Whether a chunk is needed by the rank at which it is due at hop s."""
        for first, last in self.needed[chunk]:  # noqa: SIM110 (`any` takes three times as long)
            if first <= s <= last:
                return True
        return False

    def place_of(self, rank: int) -> int:
        return bisect_left(self.ranks, rank)


def make_chunk(
    groups: Sequence[HeadGroup], pieces: Sequence[Piece], first: int, origin: int, rate: int
) -> Chunk:
    """One rank's rows of a segment, packed: a block for each piece, head group and band. first: the number of the
    first piece."""
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
    """The hops at which each piece is needed where it is due, by place of the ring and piece.

    A place needs the pieces that start before its own last piece. starts: where each place's pieces start, ascending.
    """
    num_places = len(starts)
    hops: list[list[Hops]] = [[()] * len(of_place) for of_place in starts]
    # Later pieces come first: a place that needs a piece also needs all earlier pieces, so places are only added.
    pieces = [
        (start, place, i)
        for place, of_place in enumerate(starts)
        for i, start in enumerate(of_place)
    ]
    # places that need none of the pieces so far
    waiting = sorted(range(num_places), key=lambda place: starts[place][-1])
    needed_by: list[tuple[int, int]] = []  # ranges of places that need the piece
    for start, place, i in sorted(pieces, reverse=True):
        while waiting and starts[waiting[-1]][-1] > start:
            _add_place(needed_by, waiting.pop())
        hops[place][i] = _hops(needed_by, place, num_places)
    return hops


def all_hops(num_places: int) -> Hops:
    """The hops at which a chunk is due at the other places of a ring, if all of them need it."""
    return ((1, num_places - 1),)


def _add_place(ranges: list[tuple[int, int]], place: int) -> None:
    """Add a place to ranges of places, (first, last) in ascending order."""
    i = bisect_left(ranges, (place, place))
    first = last = place
    if i < len(ranges) and ranges[i][0] == place + 1:
        last = ranges.pop(i)[1]
    if i > 0 and ranges[i - 1][1] == place - 1:
        i -= 1
        first = ranges.pop(i)[0]
    ranges.insert(i, (first, last))


def _hops(ranges: Sequence[tuple[int, int]], place: int, num_places: int) -> Hops:
    """The hops at which a place's chunk is due in these ranges of places: first at places above it, then below it."""
    above: list[tuple[int, int]] = []
    below: list[tuple[int, int]] = []
    for first, last in ranges:
        if last > place:
            above.append((max(first, place + 1) - place, last - place))
        if first < place:
            below.append((first - place + num_places, min(last, place - 1) - place + num_places))
    return (*above, *below)
