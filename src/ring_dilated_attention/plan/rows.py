"""Where rows lie: the rows that heads read in a piece of a segment, as strided views. Pure integers, no torch.

A shard is the positions that one rank owns, and a *span* is a run of consecutive positions of a shard. A *piece* is the
part of a segment that lies in one span. One head reads every r-th row of a piece, where r is the dilation rate. A
*band* is a run of neighbouring heads. Its rows in a piece form one strided view.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import pairwise, product
from typing import NamedTuple

from ..pattern import Branch, HeadGroup
from .sharding import Span


class Rows(NamedTuple):
    """A strided view (B, segments, heads, num_rows, D) of a (B, N, H, D) tensor.

    Row j of segment i of the k-th head is local position first + i * segment_step + k * shift + j * step.
    """

    heads: range
    first: int
    shift: int
    step: int
    num_rows: int
    segments: int = 1
    segment_step: int = 0

    def __str__(self) -> str:
        again = f", {self.segments} segments {self.segment_step} apart" if self.segments > 1 else ""
        stop = self.first + self.num_rows * self.step
        heads = self.heads
        if not self.shift:
            return f"rows {_few(range(self.first, stop, self.step))} of heads {_few(heads)}{again}"
        rows = [
            range(self.first + k * self.shift, stop + k * self.shift, self.step)
            for k in range(len(heads))
        ]
        return f"rows {_few([f'{_few(x)} of head {head}' for x, head in zip(rows, heads, strict=True)], ', ')}{again}"

    def again(self, segments: int, step: int) -> "Rows":
        return self if segments == 1 else self._replace(segments=segments, segment_step=step)

    def of_heads(self, lo: int, hi: int) -> "Rows":
        return self._replace(heads=self.heads[lo:hi], first=self.first + lo * self.shift)

    def of_segments(self, lo: int, hi: int) -> "Rows":
        return self._replace(first=self.first + lo * self.segment_step, segments=hi - lo)


class Block(NamedTuple):
    """The keys and values of heads start..stop-1 in a block of a flat buffer.

    The whole block begins at unit `offset` of the buffer. A unit is B * D elements. The block holds the keys of
    all heads (B, num_heads, num_rows, D), and after them the values in the same shape.
    """

    offset: int
    num_heads: int
    num_rows: int
    start: int
    stop: int

    def __str__(self) -> str:
        return f"{self.num_rows} rows of heads {_few(self.heads)} of a block at {self.offset}"

    @property
    def heads(self) -> range:
        return range(self.start, self.stop)

    def of_heads(self, lo: int, hi: int) -> "Block":
        return self._replace(start=self.start + lo, stop=self.start + hi)


class Piece(NamedTuple):
    """Positions start..stop-1 of a segment, all in one span of a shard. Position `start` is local row `row` of the
    rank."""

    start: int
    stop: int
    row: int

    @property
    def length(self) -> int:
        return self.stop - self.start

    def slice(self, start: int, stop: int) -> "Piece":
        """Positions start..stop-1 of the piece."""
        return Piece(start, stop, self.row + start - self.start)

    def cut(self, borders: Iterable[int]) -> "list[Piece]":
        """The piece, cut at the borders that lie inside it."""
        inside = {x for x in borders if self.start < x < self.stop}
        return [self.slice(a, b) for a, b in pairwise([self.start, *sorted(inside), self.stop])]


class Band(NamedTuple):
    """The heads lo..hi-1 of a head group, counted from 0 in the group. Their rows in a piece form one strided view.

    Each head has num_rows rows in the piece. The first row of head lo is the rank's local row `first`.
    """

    group: HeadGroup
    lo: int
    hi: int
    first: int
    num_rows: int

    @property
    def kv_heads(self) -> range:
        """The key/value heads of the band. On a diagonal each query head has a key/value head of its own.

        In any other group the band has all key/value heads of the group. (`pattern.HeadGroup` explains diagonals.)
        """
        if self.group.phase_step:
            return self.group.kv_heads[self.lo : self.hi]
        return self.group.kv_heads

    def query_rows(self, rate: int) -> Rows:
        return Rows(
            self.group.query_heads[self.lo : self.hi],
            self.first,
            self.group.phase_step,
            rate,
            self.num_rows,
        )

    def kv_rows(self, rate: int) -> Rows:
        return Rows(self.kv_heads, self.first, self.group.phase_step, rate, self.num_rows)

    def of_heads(self, lo: int, hi: int) -> "Band":
        if (lo, hi) == (self.lo, self.hi):
            return self
        return self._replace(
            lo=lo, hi=hi, first=self.first + (lo - self.lo) * self.group.phase_step
        )


class Section(NamedTuple):
    """Positions start..stop-1 of one document in a span of a shard: either whole segments, or a piece of a segment."""

    start: int
    stop: int
    # Where the whole segment begins and ends, if the section is only a part of it. None if the section is one or more
    # whole segments.
    segment: Span | None = None


def own_sections(span: Span, borders: Sequence[int], branch: Branch) -> Iterator[Section]:
    """Cut a span into sections, at the borders of documents and segments. Whole segments of a document stay together.

    An example: if segments have 8 positions, and the span has positions 5 to 27 of one document, the sections are 5 to
    7 (a piece), 8 to 23 (two whole segments) and 24 to 27 (a piece). A window has no segments: the span's part of each
    document is one section.

    borders: the borders (0, ..., n) of packed documents.
    """
    for i in range(bisect_right(borders, span.start) - 1, bisect_left(borders, span.stop)):
        document = borders[i]
        end = borders[i + 1]
        start = max(span.start, document)
        stop = min(span.stop, end)
        if branch.is_window:
            yield Section(start, stop)
            continue
        length = branch.segment_length
        # the first position at or after `start` at which a segment begins
        whole = document - (document - start) // length * length
        if start < whole:
            yield Section(start, min(whole, stop), Span(whole - length, min(whole, end)))
        if whole >= stop:
            continue
        last = stop - (stop - whole) % length if stop < end else stop
        if whole < last:
            yield Section(whole, last)
        if last < stop:
            yield Section(last, stop, Span(last, min(last + length, end)))


# Cached, because the planner asks for the bands of the same queries again with each received chunk.
@lru_cache(maxsize=1024)
def make_bands(group: HeadGroup, piece: Piece, origin: int, rate: int) -> tuple[Band, ...]:
    """Cut a head group into bands for a piece. Heads without rows in the piece are left out.

    origin: where the segment starts. rate: the dilation rate of the branch.
    """
    bands: list[Band] = []
    # If all heads of the group read the same phase, add them to a band together. On a diagonal each head reads a phase
    # of its own: add the heads one by one.
    heads_at_once = 1 if group.phase_step else len(group.query_heads)
    for j, phase in enumerate(group.phases):
        # `ahead`: how many positions of the piece come before its first row of the phase.
        ahead = (origin + phase - piece.start) % rate
        num_rows = -(-(piece.length - ahead) // rate)
        row = piece.row + ahead
        if num_rows <= 0:
            continue

        # Add the head to the previous head's band, if both heads have equally many rows and the first row of this head
        # comes one position after the first row of the previous head.
        last = bands[-1] if bands else None
        if last and (last.hi, last.num_rows, last.first + j - last.lo) == (j, num_rows, row):
            bands[-1] = last._replace(hi=j + 1)
        else:
            bands.append(Band(group, j, j + heads_at_once, row, num_rows))
    return tuple(bands)


def cut_apart(
    keys: Iterable[Piece], queries: Iterable[tuple[Piece, int]]
) -> tuple[list[Piece], list[list[Piece]]]:
    """Cut the keys and queries of a sliding window into pieces, so that each pair (queries, keys) has a simple mask.

    After the cuts, each pair is one of three cases: every query attends to every key, no query attends to any key, or
    the two pieces are equally long and the mask is a triangle (`sight.mask_between`).

    queries: (piece, reach) pairs. If the queries come after the keys, the last query that attends to a key lies `reach`
    positions after the key. If the queries come before the keys, reach is negative: the first query that attends to a
    key lies `-reach` positions before the key.

    Returns the pieces of the keys after the cuts, and for each entry of `queries` a list of its pieces after the cuts.
    """
    queries = list(queries)
    cuts = {x - reach for piece, reach in queries for x in (piece.start, piece.stop)}
    cut_keys = [cut_key for key in keys for cut_key in key.cut(cuts)]
    borders = {x for key in cut_keys for x in (key.start, key.stop)}
    return cut_keys, [piece.cut(x + reach for x in borders) for piece, reach in queries]


def heads_between(group: HeadGroup, lo: int, hi: int) -> HeadGroup:
    """If the group is a diagonal (`pattern.HeadGroup`), its heads lo..hi-1, counted from 0. Else the whole group."""
    if not group.phase_step:
        return group
    return HeadGroup(
        group.query_heads[lo:hi], group.kv_heads[lo:hi], group.phase + lo * group.phase_step, 1
    )


def matches(queries: Sequence[Band], keys: Sequence[Band]) -> Iterator[tuple[Band, Band]]:
    """Yield each pair of a query band and a key band, cut to the heads that both bands have.

    Pairs without a common head are left out. All bands are of the same head group.
    """
    for q, k in product(queries, keys):
        lo = max(q.lo, k.lo)
        hi = min(q.hi, k.hi)
        if lo < hi:
            yield q.of_heads(lo, hi), k.of_heads(lo, hi)


def _few(entries: Sequence[object], between: str = " ") -> str:
    """A list as text. A list of more than four entries becomes the first two, "..." and the last."""
    return between.join(
        map(str, entries if len(entries) <= 4 else [*entries[:2], "...", entries[-1]])
    )
