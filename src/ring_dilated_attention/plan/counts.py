"""Counts what each rank computes and receives, from the positions that ranks own. Pure integers, no torch.

At dilation rate r, phase s has B(x) = ceil((x - s) / r) rows before position x of a segment. A head reads one phase.
Let a rank own positions a to b - 1 of a segment of n positions, with at least one row of this phase. Then for this head
the rank computes

    causal          B(b) (B(b) + 1) / 2 - B(a) (B(a) + 1) / 2 (query, key) pairs
    not causal      (B(b) - B(a)) B(n) pairs

and receives the key and value rows of this phase that other ranks own:

    causal          the rows before the rank's own last row
    not causal      all of these rows

B(x) of two phases differs by at most one row. At rate 4 and x = 6, phases 0 and 1 have two rows, and phases 2 and 3
have one. So a sum over phases needs two numbers: how many phases there are, and how many of these phases have the
additional row. The second number is found by bisection, as the phases are sorted.

A *chunk* is the key and value rows of a segment that one rank sends to the others.
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, pairwise, zip_longest
from typing import NamedTuple

from ..pattern import Branch
from .collection import without_collection
from .ring_maker import ShardIndex
from .rows import own_sections
from .sharded_call import ShardedCall
from .sharding import Span
from .sight import meetings, pairs_under
from .window_maker import window_of

Pieces = Sequence[tuple[int, int]]  # (start, stop), counted from the start of the segment


class SegmentShare(NamedTuple):
    """How much a rank sends and receives for one segment of which it owns a part.

    The rank's chunks are its rows of the segment. If no other rank has rows of the segment, nothing is sent.
    """

    place: tuple[int, int]  # the branch, and the position at which the segment starts
    # The sizes of the rank's chunks of this segment, in units of B * D elements. For a window: the size of the only
    # chunk that the ring carries, even if another rank owns this chunk (`window_maker.py`).
    rows: tuple[int, ...]
    # the size of the keys and values that the rank receives from other ranks, in units of B * D elements
    received: int


class Phases:
    """Sums over the phases that the heads of a branch read. A phase that three heads read counts three times."""

    def __init__(self, phases: Sequence[int], rate: int) -> None:
        self.phases = sorted(phases)
        self.rate = rate
        self.num = len(phases)

    def rows(self, x: int) -> int:
        """B(x) summed over the phases, where B(x) is the number of rows before position x."""
        rows, rest = divmod(x, self.rate)
        return self.num * rows + bisect_left(self.phases, rest)

    def triangles(self, x: int) -> int:
        """B(x) (B(x) + 1) / 2 summed over the phases."""
        rows, rest = divmod(x, self.rate)
        of_all = self.num * (rows * (rows + 1) // 2)
        return of_all + bisect_left(self.phases, rest) * (rows + 1)

    def products(self, x: int, y: int) -> int:
        """B(x) B(y) summed over the phases."""
        a, rest_a = divmod(x, self.rate)
        b, rest_b = divmod(y, self.rate)
        # B(x) is a + 1 for the first `more_a` of the sorted phases, and a for the other phases. B(y) is b + 1 for the
        # first `more_b` phases, and b for the other phases.
        more_a = bisect_left(self.phases, rest_a)
        more_b = bisect_left(self.phases, rest_b)
        # So the product is (a + 1) (b + 1) for the first min(more_a, more_b) of the sorted phases.
        return self.num * a * b + a * more_b + b * more_a + min(more_a, more_b)

    def pairs(self, pieces: Pieces, length: int, *, is_causal: bool) -> int:
        """The number of (query, key) pairs for the queries in `pieces` of a segment. length: the segment's length."""
        total = 0
        for start, stop in pieces:
            if is_causal:
                total += self.triangles(stop) - self.triangles(start)
            else:
                total += self.products(stop, length) - self.products(start, length)
        return total

    def pairs_within(self, branch: Branch, length: int, *, is_causal: bool) -> int:
        """The number of (query, key) pairs among `length` consecutive positions of a rank.

        In a branch with segments, the positions are one or more whole segments. In a window, they are a part of one
        document.
        """
        total = 0
        for meeting in meetings(branch, length, is_causal=is_causal):
            size = len(meeting.queries)
            if branch.is_window:
                pairs = pairs_under(meeting.mask, size, len(meeting.keys))
                total += self.num * meeting.number * pairs
            elif is_causal:
                total += meeting.number * self.triangles(size)
            else:
                total += meeting.number * self.products(size, size)
        return total

    def own_and_foreign(
        self, pieces: Pieces, length: int, *, is_causal: bool
    ) -> tuple[list[int], int]:
        """Count a rank's own rows in each of its pieces of a segment, and the rows that it needs from other ranks.

        All counts are summed over the phases.
        """
        rows = [self.rows(stop) - self.rows(start) for start, stop in pieces]
        first, end = pieces[0]
        # Use a short formula for a single piece that is at least as long as the rate: it has a row of every phase.
        if len(pieces) == 1 and end - first >= self.rate:
            return rows, self.rows(first) if is_causal else self.rows(length) - rows[0]

        foreign = 0
        for num_phases, phase in self._alike(chain((length,), *pieces)):
            # `num_own`: how many rows of the phase this rank owns. `last`: how many rows of the phase come before the
            # end of this rank's last piece, rows of other ranks included. (Pieces without a row of the phase are
            # ignored.)
            num_own = 0
            last = 0
            for start, stop in pieces:
                before = rows_before(start, phase, self.rate)
                up_to = rows_before(stop, phase, self.rate)
                if before < up_to:
                    num_own += up_to - before
                    last = up_to
            if num_own:
                seen = last if is_causal else rows_before(length, phase, self.rate)
                foreign += num_phases * (seen - num_own)
        return rows, foreign

    def _alike(self, positions: Iterable[int]) -> Iterator[tuple[int, int]]:
        """Group the phases that have equally many rows before x, for every x in `positions`.

        Yields for each group: (number of its phases, one of its phases).
        """
        marks = {0, self.num, *(bisect_left(self.phases, x % self.rate) for x in positions)}
        for lo, hi in pairwise(sorted(marks)):
            yield hi - lo, self.phases[lo]


def rows_before(position: int, phase: int, rate: int) -> int:
    """How many rows of a phase lie before a position: B(x)."""
    return max(0, -((phase - position) // rate))


class Counter:
    """Counts what each rank of a call computes and receives, one rank at a time."""

    def __init__(self, sharded_call: ShardedCall) -> None:
        sharded_call.pattern.check_heads(sharded_call.num_heads, sharded_call.num_kv_heads)
        self.sharded_call = sharded_call
        self.pattern = sharded_call.pattern
        self.borders = sharded_call.borders

        # Both lists have an entry for each branch. `queries`: the phase of each query head. `keys`: for each key/value
        # head, the phases of the query heads that attend to it.
        self.queries: list[Phases] = []
        self.keys: list[Phases] = []
        for branch, (_, rate, _) in enumerate(self.pattern.branches):
            groups = self.pattern.phase_groups(
                branch, sharded_call.num_heads, sharded_call.num_kv_heads, sharded_call.held
            )

            query_phases: list[int] = []
            key_phases: list[int] = []
            for group in groups:
                query_phases += [group.phase] * len(group.query_heads)
                key_phases += [group.phase] * len(group.kv_heads)

            self.queries.append(Phases(query_phases, rate))
            self.keys.append(Phases(key_phases, rate))
        self.window = window_of(sharded_call, ShardIndex(sharded_call.shards))

    def of(self, rank: int) -> tuple[int, list[SegmentShare]]:
        """The number of (query, key) pairs that a rank computes, and what it sends and receives for each segment."""
        pairs = 0
        shares: list[SegmentShare] = []
        is_causal = self.pattern.is_causal
        for number, branch in enumerate(self.pattern.branches):
            queries = self.queries[number]
            # `own_pieces`: for each segment that is cut into pieces, the pieces that the rank owns.
            own_pieces: dict[Span, list[tuple[int, int]]] = {}
            for span in sorted(self.sharded_call.shards[rank]):
                for start, stop, segment in own_sections(span, self.borders, branch):
                    if segment is None:
                        pairs += queries.pairs_within(branch, stop - start, is_causal=is_causal)
                    else:
                        piece = (start - segment.start, stop - segment.start)
                        own_pieces.setdefault(segment, []).append(piece)

            for segment, pieces in own_pieces.items():
                length = segment.stop - segment.start
                pairs += queries.pairs(pieces, length, is_causal=is_causal)
                own, foreign = self.keys[number].own_and_foreign(
                    pieces, length, is_causal=is_causal
                )
                # If causal, count each piece as a separate chunk, because other ranks need the pieces at different
                # hops.
                rows = tuple([2 * x for x in own]) if is_causal else (2 * sum(own),)
                if any(rows):
                    shares.append(SegmentShare((number, segment.start), rows, 2 * foreign))

        window = self.window
        if window is not None:
            num_heads = self.queries[window.number].num
            for query, key, mask, _ in window.crossings(rank):
                pairs += num_heads * pairs_under(mask, query.length, key.length)
            for rings in dict(window.rings(rank)).values():
                for ring in rings:
                    if rank in ring.ranks:
                        place = (window.number, ring.origin)
                        # Only the rank that owns the rows has a chunk with rows. All other chunks are empty.
                        size = sum(chunk.size for chunk in ring.chunks)
                        is_owner = bool(ring.keys[ring.place_of(rank)])
                        shares.append(SegmentShare(place, (size,), 0 if is_owner else size))
        return pairs, shares


class Segment(NamedTuple):
    """The counts of one segment over all ranks.

    A window has no segments. Its rows travel in rings (`window_maker.py`), and a `Segment` has the counts of one ring.

    Sizes are in units of B * D elements.
    """

    sharers: int  # the number of ranks that share the segment
    # A rank has one or two chunks of the segment. largest[0] is the size of the largest first chunk of any rank, and
    # largest[1] the size of the largest second chunk.
    largest: tuple[int, ...]
    received: int  # the size of all keys and values that ranks receive


NO_SEGMENT = Segment(0, (), 0)


class JobCount(NamedTuple):
    """The counts of a call. `pairs`, `received` and `buffers` have an entry for each rank.

    pairs: the (query, key) pairs that the rank computes.
    received: the size of the keys and values that the rank receives.
    buffers: an estimate of the size of the rank's buffer of chunks. A plan may need a smaller or a larger buffer,
        because a plan splits the heads of a segment among several rings.
    segments: the counts of each segment, by (branch, start of the segment).
    """

    pairs: list[int]
    received: list[int]
    buffers: list[int]
    segments: dict[tuple[int, int], Segment]


@without_collection()
def count_ranks(counter: Counter) -> JobCount:
    """Count all ranks and segments of a call."""
    pairs: list[int] = []
    received: list[int] = []
    shares_of_ranks: list[list[SegmentShare]] = []
    segments: dict[tuple[int, int], Segment] = {}
    for rank in range(counter.sharded_call.num_ranks):
        num_pairs, shares = counter.of(rank)
        pairs.append(num_pairs)
        received.append(sum([share.received for share in shares]))
        shares_of_ranks.append(shares)
        for share in shares:
            sharers, largest, received_by_all = segments.get(share.place, NO_SEGMENT)
            if share.rows != largest:
                largest = tuple(map(max, zip_longest(largest, share.rows, fillvalue=0)))
            received_by_all += share.received
            segments[share.place] = Segment(sharers + 1, largest, received_by_all)

    buffers: list[int] = []
    for shares in shares_of_ranks:
        shared = [segments[share.place] for share in shares]
        buffers.append(sum([sum(segment.largest) for segment in shared if segment.received]))
    return JobCount(pairs, received, buffers, segments)
