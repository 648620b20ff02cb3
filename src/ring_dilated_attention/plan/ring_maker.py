"""Find the rings of a segment that straddles shards: which ranks exchange rows of which heads. Pure integers, no torch.

An example: a segment of 8 positions at rate 4. Rank 0 owns two positions, and rank 1 six. There are 4 heads, and head h
reads phase h:

    position    0  1 | 2  3  4  5  6  7
    head 0      x    |       x              rows on both ranks
    head 1         x |          x           rows on both ranks
    head 2           | x           x        rows on rank 1 only
    head 3           |    x           x     rows on rank 1 only

Heads 0 and 1 have a ring of both ranks. Heads 2 and 3 have no ring: none of their rows is sent.
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from functools import cache
from itertools import groupby

from ..pattern import HeadGroup, HeadGroups
from .rings import Chunk, Hops, Ring, all_hops, causal_hops, make_chunk
from .rows import Piece, heads_between
from .sharded_call import ShardedCall
from .sharding import Shard, Span, first_rows


class ShardIndex:
    """Finds the rank that owns a position, and the position's local row on that rank."""

    def __init__(self, shards: tuple[Shard, ...]) -> None:
        self.first_row: dict[Span, int] = {}
        owners: list[tuple[Span, int]] = []
        for rank, shard in enumerate(shards):
            for span, row in zip(shard, first_rows(shard), strict=False):
                self.first_row[span] = row
                owners.append((span, rank))

        self.owners = sorted(owners)  # in the order of positions
        self.starts = [span.start for span, _ in self.owners]

    def owner(self, position: int) -> tuple[Span, int]:
        """The span that holds a position, and the rank that owns the span."""
        return self.owners[bisect_right(self.starts, position) - 1]

    def piece(self, span: Span, start: int, stop: int) -> Piece:
        """Positions start..stop-1 of a span."""
        return Piece(start, stop, self.first_row[span] + start - span.start)

    def pieces(self, start: int, stop: int) -> dict[int, list[Piece]]:
        """Split the range start..stop-1 into pieces that lie in one span each. Returns each rank's pieces, in order."""
        pieces_of_ranks: dict[int, list[Piece]] = {}
        position = start
        while position < stop:
            span, rank = self.owner(position)
            piece = self.piece(span, max(span.start, start), min(span.stop, stop))
            pieces_of_ranks.setdefault(rank, []).append(piece)
            position = span.stop
        return dict(sorted(pieces_of_ranks.items()))


class RingMaker:
    """Makes the rings of the segments of a call. (`window_maker.py` makes the rings of a sliding window.)"""

    def __init__(
        self, sharded_call: ShardedCall, index: ShardIndex, groups: list[HeadGroups]
    ) -> None:
        self.pattern = sharded_call.pattern
        self.index = index
        self.groups = groups  # the head groups of each branch

    def rings(self, branch: int, origin: int, stop: int) -> tuple[Ring, ...]:
        """The rings of one segment, which has the positions origin..stop-1."""
        rate = self.pattern.branches[branch].dilation_rate
        rings: list[Ring] = []
        for pieces_of_ranks, groups in self.members(branch, origin, stop):
            ranks = tuple(pieces_of_ranks)
            pieces = tuple(map(tuple, pieces_of_ranks.values()))

            # `chunk_of`: the chunks that have been made. Two ranks get the same Chunk object if their rows lie at the
            # same offsets in their chunks.
            chunk_of: dict[tuple, Chunk] = {}
            for together, hops in self._carried_together(pieces):
                chunks: list[Chunk] = []
                for of_place in pieces:
                    carried = of_place[together]
                    arrangement: list[object] = [together.start]
                    for piece in carried:
                        phase = (piece.start - origin) % rate
                        arrangement.append((piece.length, phase, piece.row))
                    alike = tuple(arrangement)
                    if alike not in chunk_of:
                        chunk_of[alike] = make_chunk(groups, carried, together.start, origin, rate)
                    chunks.append(chunk_of[alike])

                ring = Ring(
                    branch,
                    origin,
                    lane=len(rings),
                    ranks=ranks,
                    queries=pieces,
                    keys=pieces,
                    chunks=tuple(chunks),
                    needed=hops,
                )
                rings.append(ring)
        return tuple(rings)

    def _carried_together(
        self, pieces: tuple[tuple[Piece, ...], ...]
    ) -> Iterator[tuple[slice, tuple[Hops, ...]]]:
        """Decide which pieces of a rank travel together, in one chunk.

        Usually all pieces of a rank travel together, in a single ring. But in a causal pattern other ranks may need the
        pieces of a rank at different hops. Then there are several rings: one for the first pieces of all ranks, one for
        the second pieces, and so on.

        pieces: for each place of the ring, the pieces of the rank there. Yields (slice, needed) for each ring: which of
        a rank's pieces travel in it, and the ranges of hops at which the chunk of each place is needed.
        """
        if self.pattern.is_causal:
            needed = causal_hops([[piece.start for piece in of_place] for of_place in pieces])
        else:
            needed = [[all_hops(len(pieces))] * len(of_place) for of_place in pieces]

        # Make a single ring if each rank's pieces are all needed at the same hops.
        if all(len(set(of_place)) == 1 for of_place in needed):
            hops = tuple(of_place[0] for of_place in needed)
            if any(hops):
                yield slice(0, None), hops
            return

        for i in range(max(len(of_place) for of_place in needed)):
            hops = tuple(of_place[i] if i < len(of_place) else () for of_place in needed)
            if any(hops):
                yield slice(i, i + 1), hops

    def members(
        self, branch: int, origin: int, stop: int
    ) -> Iterator[tuple[dict[int, list[Piece]], list[HeadGroup]]]:
        """Find the heads of a segment that can share a ring, because the same ranks need their rows.

        A rank that has rows of a phase needs all other rows of this phase. In a causal pattern the rank needs only the
        rows before its last piece. So heads can share a ring if the same ranks have rows of their phases.

        Yields a pair for each such set of heads: the pieces of each rank that has rows, and the heads.
        """
        rate = self.pattern.branches[branch].dilation_rate
        pieces_of_ranks = self.index.pieces(origin, stop)

        def has_row(piece: Piece, phases: Iterable[int]) -> bool:
            if piece.length >= rate:
                return True
            return any((origin + phase - piece.start) % rate < piece.length for phase in phases)

        @cache
        def sharers(phase: int) -> tuple[tuple[int, Piece | None], ...]:
            """The ranks that have rows of a phase. In a causal pattern, each rank comes with its last piece that has
            a row of the phase."""
            last_pieces: dict[int, Piece | None] = {}
            for rank, pieces in pieces_of_ranks.items():
                for piece in pieces:
                    if has_row(piece, (phase,)):
                        last_pieces[rank] = piece if self.pattern.is_causal else None
            return tuple(last_pieces.items())

        groups_of_sharers: dict[tuple, list[HeadGroup]] = {}
        for group in self.groups[branch]:
            # Split the group into runs of neighbouring heads whose phases have the same sharers.
            first = 0
            for same_sharers, phases_alike in groupby(group.phases, key=sharers):
                stop = first + len(list(phases_alike))
                heads = heads_between(group, first, stop)
                groups_of_sharers.setdefault(same_sharers, []).append(heads)
                first = stop

        for same_sharers, groups in groups_of_sharers.items():
            if len(same_sharers) < 2:  # a single rank has all rows, so no row is sent
                continue

            phases = {phase for group in groups for phase in group.phases}
            members: dict[int, list[Piece]] = {}
            for rank, _ in same_sharers:
                members[rank] = [x for x in pieces_of_ranks[rank] if has_row(x, phases)]
            yield members, groups
