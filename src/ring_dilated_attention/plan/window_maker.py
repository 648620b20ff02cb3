"""Find which rows of other spans a sliding window needs, and the rings that carry them. Pure integers, no torch.

A span is a run of consecutive positions that one rank owns. A *portion* is the part of a document in one span. Most
queries of a portion attend to rows of the same portion only (`sight.meetings`). Its first queries also attend to the
last rows of earlier portions. If the window is not causal, its last queries also attend to the first rows of later
portions.

A rank sends only the rows to which queries of other ranks attend. A ring carries these rows. Its members are the rank
that owns the rows and the ranks with queries that attend to the rows. In most calls a ring has two ranks, and all its
rows travel at hop 1.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import groupby, product
from typing import NamedTuple

from .ring_maker import ShardIndex
from .rings import Chunk, Ring, all_hops, make_chunk
from .rows import Piece, cut_apart
from .sharded_call import ShardedCall
from .sharding import Span
from .sight import mask_between


class Portion(NamedTuple):
    """The positions of a document that lie in one span of a rank."""

    rank: int
    piece: Piece
    document: Span


# The keys of one portion, and a list. The list has a pair (other portion, its queries) for every other portion with
# queries that attend to some of the keys. `rows.cut_apart` has cut keys and queries into pieces.
Sight = tuple[list[Piece], list[tuple[Portion, list[Piece]]]]


class Crossing(NamedTuple):
    """Queries of one portion times keys of another portion, under a mask. owner: the rank that owns the keys."""

    query: Piece
    key: Piece
    mask: str
    owner: int


class WindowMaker:
    """Makes the rings of a window, and finds the rows of other spans to which a rank's queries attend."""

    def __init__(self, sharded_call: ShardedCall, index: ShardIndex) -> None:
        self.sharded_call = sharded_call
        self.index = index
        self.number = len(sharded_call.pattern.branches) - 1  # the window is the last branch
        self.branch = sharded_call.pattern.branches[-1]
        self.groups = sharded_call.pattern.head_groups(
            self.number, sharded_call.num_heads, sharded_call.num_kv_heads, sharded_call.held
        )
        self.is_causal = sharded_call.pattern.is_causal
        self.reach = self.branch.window_reach(is_causal=self.is_causal)
        # cached, because all ranks of a ring ask for the same portions
        self.rings_of = cache(self._rings)
        self.sight_of = cache(self._sight)

    def portions(self, rank: int) -> Iterator[Portion]:
        """The portions (parts of documents) at both ends of each span of a rank.

        Only these portions can form (query, key) pairs with other portions.
        """
        borders = self.sharded_call.borders
        for span in self.sharded_call.shards[rank]:
            # the numbers of the documents in which the span begins and ends
            first = bisect_right(borders, span.start) - 1
            last = bisect_left(borders, span.stop) - 1
            for i in sorted({first, last}):
                yield self._portion(rank, span, Span(borders[i], borders[i + 1]))

    def _portion(self, rank: int, span: Span, document: Span) -> Portion:
        start = max(span.start, document.start)
        stop = min(span.stop, document.stop)
        return Portion(rank, self.index.piece(span, start, stop), document)

    def before(self, portion: Portion) -> Iterator[Portion]:
        """The earlier portions of the document that have a position at most `reach` before the start of `portion`."""
        if portion.piece.start == portion.document.start:
            return
        least = max(portion.document.start, portion.piece.start - self.reach)
        i = bisect_left(self.index.starts, portion.piece.start) - 1
        while i >= 0 and self.index.owners[i][0].stop > least:
            span, rank = self.index.owners[i]
            yield self._portion(rank, span, portion.document)
            i -= 1

    def after(self, portion: Portion) -> Iterator[Portion]:
        """The later portions of the document that have a position at most `reach` after the end of `portion`."""
        stop = min(portion.document.stop, portion.piece.stop + self.reach)
        i = bisect_left(self.index.starts, portion.piece.stop)
        while i < len(self.index.owners) and self.index.starts[i] < stop:
            span, rank = self.index.owners[i]
            yield self._portion(rank, span, portion.document)
            i += 1

    def _sight(self, portion: Portion) -> Sight:
        # `others`: the other portions with queries that attend to rows of `portion`, as pairs (other portion, reach).
        # The reach is as in `rows.cut_apart`: negative if the other portion comes before `portion`.
        others = [(other, self.reach) for other in self.after(portion)]
        if not self.is_causal:
            others += [(other, -self.reach) for other in self.before(portion)]
        pieces = [(other.piece, reach) for other, reach in others]
        keys, queries = cut_apart([portion.piece], pieces)

        portions = [other for other, _ in others]
        return keys, list(zip(portions, queries, strict=True))

    def mask(self, query: Piece, key: Piece) -> str | None:
        return mask_between(self.branch, query.start, key.start, is_causal=self.is_causal)

    def seen_from(self, portion: Portion) -> list[Portion]:
        """The other portions that contain rows to which queries of this portion attend."""
        seen = list(self.before(portion))
        return seen if self.is_causal else [*seen, *self.after(portion)]

    def crossings(self, rank: int) -> Iterator[Crossing]:
        """All crossings with queries of this rank. Any rank may own the keys."""
        for portion in self.portions(rank):
            for seen in self.seen_from(portion):
                keys, queries = self.sight_of(seen)
                pieces = next(pieces for other, pieces in queries if other == portion)
                for query, key in product(pieces, keys):
                    mask = self.mask(query, key)
                    if mask is not None:
                        yield Crossing(query, key, mask, seen.rank)

    def rings(self, rank: int) -> Iterator[tuple[tuple[int, int], tuple[Ring, ...]]]:
        """The rings that carry rows of a rank's portions, or of portions to which its queries attend.

        Yields ((branch, start of the portion), rings). Some of these rings do not include `rank`.
        """
        for portion in self.portions(rank):
            for other in (portion, *self.seen_from(portion)):
                yield (self.number, other.piece.start), self.rings_of(other)

    def _rings(self, portion: Portion) -> tuple[Ring, ...]:
        """The rings that carry rows of a portion: one for each run of neighbouring rows that the same ranks need."""
        keys, queries = self.sight_of(portion)

        def seers(key: Piece) -> tuple[int, ...]:
            ranks = {x.rank for x, pieces in queries if any(self.mask(q, key) for q in pieces)}
            return tuple(sorted(ranks - {portion.rank}))

        rings: list[Ring] = []
        for ranks_that_see, some in groupby(keys, key=seers):
            if ranks_that_see:
                rings.append(self._ring(portion, tuple(some), ranks_that_see))
        return tuple(rings)

    def _ring(
        self, portion: Portion, keys: tuple[Piece, ...], ranks_that_see: Sequence[int]
    ) -> Ring:
        """The ring that carries some rows (`keys`) of a portion to the ranks that need these rows."""
        ranks = sorted((portion.rank, *ranks_that_see))

        # `seeing`: for each rank of the ring, the pieces of its queries that attend to `keys`. The owner of the rows
        # has no such pieces.
        seeing: dict[int, list[Piece]] = {rank: [] for rank in ranks}
        _, queries = self.sight_of(portion)
        for other, pieces in queries:
            if other.rank not in ranks_that_see:
                continue
            for query in pieces:
                if any(self.mask(query, key) for key in keys):
                    seeing[other.rank].append(query)

        # Give keys, and a chunk with rows, to the owner of the rows only. The other ranks get no keys and an empty
        # chunk.
        is_owner = [rank == portion.rank for rank in ranks]
        chunk = make_chunk(self.groups, keys, 0, portion.piece.start, 1)
        hops = all_hops(len(ranks))
        return Ring(
            self.number,
            keys[0].start,
            0,
            tuple(ranks),
            queries=tuple(map(tuple, seeing.values())),
            keys=tuple(keys if owns else () for owns in is_owner),
            chunks=tuple(chunk if owns else Chunk(0, ()) for owns in is_owner),
            needed=tuple(hops if owns else () for owns in is_owner),
        )


def window_of(sharded_call: ShardedCall, index: ShardIndex) -> WindowMaker | None:
    """The maker of a window's rings, or None if the call's pattern has no window."""
    return None if sharded_call.pattern.window is None else WindowMaker(sharded_call, index)
