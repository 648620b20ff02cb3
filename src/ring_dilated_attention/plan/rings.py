"""Rings: which ranks share a straddling segment, what a chunk holds, and when it is needed. Pure integers, no torch.

At hop s the chunk of the rank at place c of a ring is due at place c + s. It is sent there only if that rank needs it,
so a chunk travels during *ranges* of hops. The owner sends it to the first rank of a range, and inside the range each
rank passes it on. If the pattern is causal and shards are contiguous, no range wraps, and the ring is a line. Under
zigzag only the ranks below the owner need the later piece of its shard. The owner sends this piece straight to rank 0,
at the hop at which the earlier piece arrives there. In backward the gradient of a chunk follows one hop behind. It
starts from zero at the first rank of each range, and the last rank of the range sends it to the owner.

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
    """A band of heads in a chunk and the block that holds it. piece: the number of its piece among the rank's."""

    piece: int
    band: Band
    block: Block


@dataclass(frozen=True, eq=False)
class Chunk:
    """One rank's packed rows of a straddling segment. Chunks in which rows lie alike are one object."""

    size: int
    entries: tuple[Entry, ...]


Hops = tuple[tuple[int, int], ...]  # ranges of hops: (first, last)


# Place i of a ring, then four lists by hop (0 to last + 1). The first: is place i's chunk needed where it is due? The
# others: is the chunk that is due at place i needed there? The same of i + 1, and of i - 1.
Met = tuple[int, list[bool], list[bool], list[bool], list[bool]]


@dataclass(frozen=True, eq=False)
class Ring:
    """Heads of a straddling segment of a branch, and the ranks that hold rows of them, in order."""

    branch: int
    origin: int  # where the segment starts
    lane: int  # the number of this ring among those of the segment
    ranks: tuple[int, ...]
    pieces: tuple[tuple[Piece, ...], ...]  # of each rank
    chunks: tuple[Chunk, ...]  # of each rank
    needed: tuple[Hops, ...]  # for each rank, the hops at which its chunk is needed

    def meets(self, chunk: int, s: int) -> bool:
        """Whether a chunk is needed by the rank at which it is due at hop s."""
        for first, last in self.needed[chunk]:  # noqa: SIM110 (`any` takes three times as long)
            if first <= s <= last:
                return True
        return False

    def met_by(self, rank: int, last: int) -> Met:
        i, g = self.place_of(rank), len(self.ranks)

        def at(place: int) -> list[bool]:
            return [self.meets((place - s) % g, s) for s in range(last + 2)]

        return i, [self.meets(i, s) for s in range(last + 2)], at(i), at(i + 1), at(i - 1)

    def place_of(self, rank: int) -> int:
        return bisect_left(self.ranks, rank)


def make_chunk(groups: Sequence[HeadGroup], pieces: Sequence[Piece], first: int, origin: int, rate: int) -> Chunk:
    """One rank's rows of a segment, packed: a block for each piece, head group and band. first: the number of the
    first piece."""
    entries, size = [], 0
    for (number, piece), group in product(enumerate(pieces, first), groups):
        for band in make_bands(group, piece, origin, rate):
            num_heads = len(band.kv_heads)
            entries.append(Entry(number, band, Block(size, num_heads, band.num_rows, 0, num_heads)))
            size += 2 * num_heads * band.num_rows
    return Chunk(size, tuple(entries))


def causal_hops(starts: Sequence[Sequence[int]]) -> list[list[Hops]]:
    """For each place of a ring and each of its pieces, the hops at which this piece is due at a place that needs it.

    A place needs the pieces that start before its own last piece. starts: where each place's pieces start, ascending.
    """
    g = len(starts)
    falling = sorted(range(g), key=lambda k: starts[k][-1])  # places that do not need the piece at hand yet
    ranges: list[tuple[int, int]] = []  # of neighbouring places that need it
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
    """The hops at which place c's chunk is due at a place of `ranges`: first the places above c, then those below."""
    above = [(max(lo, c + 1) - c, hi - c) for lo, hi in ranges if hi > c]
    below = [(lo - c + g, min(hi, c - 1) - c + g) for lo, hi in ranges if lo < c]
    if above and below and above[-1][1] + 1 == below[0][0]:
        (first, _), (_, last) = above.pop(), below.pop(0)
        above.append((first, last))
    return (*above, *below)
