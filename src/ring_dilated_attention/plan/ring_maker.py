"""Find the rings of a straddling segment: which ranks share which of its heads. Pure integers, no torch."""

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from functools import cache
from itertools import groupby

from ..pattern import DilatedPattern, HeadGroup
from .job import Job
from .rings import Chunk, Hops, Ring, causal_hops, make_chunk
from .rows import Piece, heads_between
from .sharding import Shard, Span, first_rows

PiecesOfRanks = dict[int, list[Piece]]  # by rank, in the order of positions


class ShardIndex:
    """Finds which rank owns a position, and at which local row it lies there."""

    def __init__(self, shards: tuple[Shard, ...]) -> None:
        self.shards = shards
        self.first_row: dict[Span, int] = {}
        owners: list[tuple[Span, int]] = []
        for rank, shard in enumerate(shards):
            for span, row in zip(shard, first_rows(shard), strict=False):
                self.first_row[span] = row
                owners.append((span, rank))
        self.owners = sorted(owners, key=lambda owner: owner[0].start)
        self.starts = [span.start for span, _ in self.owners]
        self.spans_of = cache(lambda rank: sorted(shards[rank]))

    def owner(self, position: int) -> tuple[Span, int]:
        """The span that holds a position, and its rank."""
        return self.owners[bisect_right(self.starts, position) - 1]

    def piece(self, span: Span, start: int, stop: int) -> Piece:
        """Positions start..stop-1 of a span."""
        return Piece(start, stop, self.first_row[span] + start - span.start)

    def pieces(self, rank: int, start: int, stop: int) -> list[Piece]:
        """A rank's pieces of positions start..stop-1, in the order of positions."""
        spans = self.spans_of(rank)
        first = max(bisect_right(spans, Span(start, 0)) - 1, 0)
        last = bisect_right(spans, Span(stop, 0))
        pieces = []
        for span in spans[first:last]:
            clipped_start = max(span.start, start)
            clipped_stop = min(span.stop, stop)
            if clipped_start < clipped_stop:
                pieces.append(self.piece(span, clipped_start, clipped_stop))
        return pieces


class RingMaker:
    """Makes the rings of the segments of a job."""

    def __init__(self, job: Job, index: ShardIndex, groups: list[tuple[HeadGroup, ...]]) -> None:
        self.pattern: DilatedPattern = job.pattern
        self.index = index
        self.groups = groups  # of each branch

    def rings(self, branch: int, origin: int, stop: int) -> tuple[Ring, ...]:
        """The rings of segment origin..stop-1."""
        rings: list[Ring] = []
        for pieces_of_ranks, groups in self.members(branch, origin, stop):
            ranks = tuple(pieces_of_ranks)
            pieces = tuple(tuple(pieces) for pieces in pieces_of_ranks.values())
            chunk_of: dict[tuple, Chunk] = {}
            for first, hops in self._carried_together(pieces):
                chunks = []
                for all_pieces in pieces:
                    # If causal, the pieces of a rank may be needed at other hops: each then travels in its own ring.
                    carried = all_pieces if first is None else all_pieces[first : first + 1]
                    chunks.append(
                        self._chunk(chunk_of, groups, carried, first or 0, branch, origin)
                    )
                rings.append(
                    Ring(branch, origin, len(rings), ranks, pieces, pieces, tuple(chunks), hops)
                )
        return tuple(rings)

    def _carried_together(
        self, pieces: tuple[tuple[Piece, ...], ...]
    ) -> Iterator[tuple[int | None, tuple[Hops, ...]]]:
        """Which pieces of each place travel together: all (None), or the i-th alone; and the hops of each place."""
        everywhere: Hops = ((1, len(pieces) - 1),)
        if self.pattern.is_causal:
            needed = causal_hops([[piece.start for piece in of_place] for of_place in pieces])
        else:
            needed = [[everywhere] * len(of_place) for of_place in pieces]
        if all(len(set(of_place)) == 1 for of_place in needed):
            hops = tuple(of_place[0] for of_place in needed)
            if any(hops):
                yield None, hops
            return
        for i in range(max(len(of_place) for of_place in needed)):
            hops = tuple(of_place[i] if i < len(of_place) else () for of_place in needed)
            if any(hops):
                yield i, hops

    def _chunk(
        self,
        chunk_of: dict[tuple, Chunk],
        groups: list[HeadGroup],
        pieces: tuple[Piece, ...],
        first: int,
        branch: int,
        origin: int,
    ) -> Chunk:
        """The chunk of these pieces; one object for all in which rows lie alike."""
        rate = self.pattern.branches[branch].dilation_rate
        places = [
            (piece.stop - piece.start, (piece.start - origin) % rate, piece.row) for piece in pieces
        ]
        arrangement = (first, *places)
        if arrangement not in chunk_of:
            chunk_of[arrangement] = make_chunk(groups, pieces, first, origin, rate)
        return chunk_of[arrangement]

    def members(
        self, branch: int, origin: int, stop: int
    ) -> Iterator[tuple[PiecesOfRanks, list[HeadGroup]]]:
        """Group the heads whose rows the same ranks need: yield these ranks, each with its pieces, and the heads.
        A rank needs all rows of the phases of which it has rows; if causal, only those before its last piece."""
        rate = self.pattern.branches[branch].dilation_rate
        pieces_of_ranks = self.candidates(branch, origin, stop)

        def has_row(piece: Piece, phases: Iterable[int]) -> bool:
            if piece.stop - piece.start >= rate:
                return True
            return any(
                piece.start + (origin + phase - piece.start) % rate < piece.stop for phase in phases
            )

        @cache
        def sharers(phase: int) -> tuple:
            """The ranks with rows of a phase. If causal, each with its last piece that has one."""
            last_pieces: dict[int, Piece] = {}
            for rank, pieces in pieces_of_ranks.items():
                for piece in pieces:
                    if has_row(piece, (phase,)):
                        last_pieces[rank] = piece
            return tuple(last_pieces.items()) if self.pattern.is_causal else tuple(last_pieces)

        groups_of_sharers: dict[tuple, list[HeadGroup]] = {}
        for group in self.groups[branch]:
            sharers_of_heads = [sharers(phase) for phase in group.phases]
            for same_sharers, indices in groupby(
                range(len(sharers_of_heads)), key=sharers_of_heads.__getitem__
            ):
                heads = list(indices)
                groups_of_sharers.setdefault(same_sharers, []).append(
                    heads_between(group, heads[0], heads[-1] + 1)
                )
        for same_sharers, groups in groups_of_sharers.items():
            ranks = [rank for rank, _ in same_sharers] if self.pattern.is_causal else same_sharers
            if len(ranks) > 1:
                phases = {phase for group in groups for phase in group.phases}
                yield (
                    {
                        rank: [x for x in pieces_of_ranks[rank] if has_row(x, phases)]
                        for rank in ranks
                    },
                    groups,
                )

    def candidates(self, branch: int, origin: int, stop: int) -> PiecesOfRanks:
        """The pieces of a segment that may hold rows, by rank, in the order of positions. Spans without rows are
        skipped: at high rates most have none."""
        rate = self.pattern.branches[branch].dilation_rate
        phases = [phase for group in self.groups[branch] for phase in group.phases]
        lowest = min(phases, default=0)
        highest = max(phases, default=0)
        pieces_of_ranks: PiecesOfRanks = {}
        position = origin + lowest
        while position < stop:
            span, rank = self.index.owner(position)
            piece = self.index.piece(span, max(span.start, origin), min(span.stop, stop))
            pieces_of_ranks.setdefault(rank, []).append(piece)
            next_phase = (span.stop - origin) % rate
            if next_phase <= highest:
                position = span.stop + max(lowest - next_phase, 0)
            else:
                position = span.stop + rate - next_phase + lowest
        return dict(sorted(pieces_of_ranks.items()))
