"""What ranks compute and must receive, counted from the positions that they own. Pure integers, no torch.

A phase s of rate r has B(x) = ceil((x - s) / r) rows before position x of a segment. Let a rank own the positions a to
b - 1 of a segment of n positions, with a row of a head's phase among them. For this head the rank

    computes    B(b) (B(b) + 1) / 2 - B(a) (B(a) + 1) / 2 pairs if the pattern is causal, else (B(b) - B(a)) B(n)
    receives    the rows of others before its own last one if the pattern is causal, else those of all others

B(x) of two phases differs by at most one row. So a sum over phases needs two numbers: how many phases there are, and
how many of them have the additional row. Bisecting the sorted phases gives the second.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, pairwise, zip_longest
from typing import Any, NamedTuple

from ..pattern import Branch
from .collection import without_collection
from .job import Job
from .rows import own_sections
from .sharding import Span
from .sight import meetings, pairs_under
from .window_maker import WindowMaker, windows_of

Pieces = Sequence[tuple[int, int]]  # (start, stop), counted from the start of the segment


class SegmentShare(NamedTuple):
    """A rank's work on a segment of which it has rows, and what it receives for that. Others may have rows too."""

    place: tuple[int, int]  # the branch, and the position at which the segment starts
    starts: tuple[int, ...]  # where the rank's pieces start in it
    pairs: int
    # the size of each chunk that the rank may send of this segment, in units of B * D elements
    rows: tuple[int, ...]
    received: (
        int  # the size of the keys and values that the rank receives from others, in the same units
    )


class RankCount(NamedTuple):
    """What one rank computes and receives in a forward. A backward receives the same, and sends its gradients."""

    pairs: int
    received: int
    shares: tuple[SegmentShare, ...]


class Phases:
    """Sums over phases of one rate. A phase counts as often as it is given."""

    def __init__(self, phases: Sequence[int], rate: int) -> None:
        self.phases, self.rate, self.num = sorted(phases), rate, len(phases)

    def rows(self, x: int) -> int:
        """The sum over the phases of B(x), the number of rows before position x."""
        rows, rest = divmod(x, self.rate)
        return self.num * rows + bisect_left(self.phases, rest)

    def triangles(self, x: int) -> int:
        """The sum of B(x) (B(x) + 1) / 2."""
        rows, rest = divmod(x, self.rate)
        return self.num * (rows * (rows + 1) // 2) + bisect_left(self.phases, rest) * (rows + 1)

    def products(self, x: int, y: int) -> int:
        """The sum of B(x) B(y)."""
        (a, rest_a), (b, rest_b) = divmod(x, self.rate), divmod(y, self.rate)
        more_a, more_b = bisect_left(self.phases, rest_a), bisect_left(self.phases, rest_b)
        return self.num * a * b + a * more_b + b * more_a + min(more_a, more_b)

    def pairs(self, pieces: Pieces, length: int, *, is_causal: bool) -> int:
        """(query, key) pairs of the queries in pieces of a segment."""
        if is_causal:
            return sum([self.triangles(stop) - self.triangles(start) for start, stop in pieces])
        return sum(
            [self.products(stop, length) - self.products(start, length) for start, stop in pieces]
        )

    def pairs_within(self, branch: Branch, length: int, *, is_causal: bool) -> int:
        """(query, key) pairs of a section of whole segments, or of a document that a window slides over."""
        total = 0
        for meeting in meetings(branch, length, is_causal=is_causal):
            size = len(meeting.queries)
            if branch.is_window:
                total += self.num * meeting.pairs
            elif is_causal:
                total += meeting.number * self.triangles(size)
            else:
                total += meeting.number * self.products(size, size)
        return total

    def own_and_foreign(
        self, pieces: Pieces, length: int, *, is_causal: bool
    ) -> tuple[list[int], int]:
        """Rows of each piece of a segment, and the rows of others that queries in the pieces need."""
        before = [(self.rows(start), self.rows(stop)) for start, stop in pieces]
        rows = [b - a for a, b in before]
        # the piece has a row of every phase
        if len(pieces) == 1 and pieces[0][1] - pieces[0][0] >= self.rate:
            return rows, before[0][0] if is_causal else self.rows(length) - rows[0]
        total = 0
        for num, phase in self._alike(chain((length,), *pieces)):
            own = [
                (rows_before(a, phase, self.rate), rows_before(b, phase, self.rate))
                for a, b in pieces
            ]
            there = [(a, b) for a, b in own if a < b]
            if there:
                seen = there[-1][1] if is_causal else rows_before(length, phase, self.rate)
                total += num * (seen - sum([b - a for a, b in there]))
        return rows, total

    def _alike(self, positions: Iterable[int]) -> Iterator[tuple[int, int]]:
        """Group phases with equally many rows before each of these positions: (number of phases, one of them)."""
        marks = {0, self.num, *(bisect_left(self.phases, x % self.rate) for x in positions)}
        for lo, hi in pairwise(sorted(marks)):
            yield hi - lo, self.phases[lo]


def rows_before(position: int, phase: int, rate: int) -> int:
    """B(x) of one phase."""
    return max(0, -((phase - position) // rate))


class Counter:
    """Counts what each rank of a job computes and receives, one rank at a time."""

    def __init__(self, job: Job) -> None:
        job.pattern.check_heads(job.num_heads, job.num_kv_heads)
        self.job, self.pattern, self.borders = job, job.pattern, job.borders
        self.queries, self.keys = [], []
        for branch, (_, rate, _) in enumerate(self.pattern.branches):
            groups = self.pattern.phase_groups(branch, job.num_heads, job.num_kv_heads, job.held)
            self.queries.append(
                Phases([group.phase for group in groups for _ in group.query_heads], rate)
            )
            self.keys.append(
                Phases([group.phase for group in groups for _ in group.kv_heads], rate)
            )
        self._windows = windows_of(job)

    def of(self, rank: int) -> RankCount:
        pairs = 0
        shares: list[SegmentShare] = []
        for number, branch in enumerate(self.pattern.branches):
            cut: dict[Span, list[tuple[int, int]]] = {}
            for span in sorted(self.job.shards[rank]):
                for section in own_sections(span, self.borders, branch):
                    if section.segment is None:
                        length = section.stop - section.start
                        pairs += self.queries[number].pairs_within(
                            branch, length, is_causal=self.pattern.is_causal
                        )
                    else:
                        origin = section.segment.start
                        piece = (section.start - origin, section.stop - origin)
                        cut.setdefault(section.segment, []).append(piece)
            found = [self._share(number, *segment, pieces) for segment, pieces in cut.items()]
            shares += [share for share in found if any(share.rows)]
            if branch.is_window:
                window = self._windows[number]
                for query, key, mask, _ in window.crossings(rank):
                    of_head = pairs_under(mask, query.length, key.length)
                    pairs += self.queries[number].num * of_head
                shares += _shares_of_window(window, rank)
        return RankCount(
            pairs + sum([x.pairs for x in shares]), sum([x.received for x in shares]), tuple(shares)
        )

    def _share(self, branch: int, origin: int, stop: int, pieces: Pieces) -> SegmentShare:
        length, keys, is_causal = stop - origin, self.keys[branch], self.pattern.is_causal
        pairs = self.queries[branch].pairs(pieces, length, is_causal=is_causal)
        own, foreign = keys.own_and_foreign(pieces, length, is_causal=is_causal)
        # If causal, other ranks need the later piece at other hops, so each piece is a chunk of its own.
        rows = tuple([2 * x for x in own]) if is_causal else (2 * sum(own),)
        return SegmentShare(
            (branch, origin), tuple([start for start, _ in pieces]), pairs, rows, 2 * foreign
        )


def _shares_of_window(window: WindowMaker, rank: int) -> Iterator[SegmentShare]:
    """A rank's rows that others see, and those of others that it sees. Their pairs are not counted here."""
    for (branch, _), rings in dict(window.rings(rank)).items():
        for ring in rings:
            if rank in ring.ranks:
                [(keys, chunk)] = [
                    (keys, chunk)
                    for keys, chunk in zip(ring.keys, ring.chunks, strict=True)
                    if keys
                ]
                is_owner = bool(ring.keys[ring.place_of(rank)])
                received = 0 if is_owner else chunk.size
                yield SegmentShare((branch, keys[0].start), (0,), 0, (chunk.size,), received)


class Segment(NamedTuple):
    """A segment that ranks share, or rows that a window sees on other ranks."""

    sharers: int  # the number of ranks with rows of it, from rank `first` to `last`
    # the size of the largest first chunk of all ranks; of the largest second, if any
    largest: tuple[int, ...]
    received: int  # what they receive together
    first: int
    last: int


class JobCount(NamedTuple):
    """Counts by rank, and segments by (branch, start). buffers: about the size of each rank's buffer of chunks. The
    chunks of a plan may be smaller or larger, where a ring has only some heads, or only a part, of a segment."""

    pairs: list[int]
    received: list[int]
    buffers: list[int]
    segments: dict[tuple[int, int], Segment]
    shares: list[tuple[SegmentShare, ...]]


@without_collection()
def count_ranks(counter: Counter, step: Callable[[], object] = lambda: None) -> JobCount:
    """Count all ranks. `step` is called after each rank."""
    ranks: list[RankCount] = []
    found: dict[tuple[int, int], list[Any]] = {}  # the fields of a Segment
    for rank in range(counter.job.num_ranks):
        ranks.append(counter.of(rank))
        for place, _, _, rows, received in ranks[-1].shares:
            segment = found.setdefault(place, [0, rows, 0, rank, rank])
            segment[0] += 1
            if rows != segment[1]:
                segment[1] = tuple(map(max, zip_longest(segment[1], rows, fillvalue=0)))
            segment[2] += received
            segment[4] = rank
        step()
    segments = {place: Segment(*segment) for place, segment in found.items()}
    chunks = {place: sum(x.largest) for place, x in segments.items() if x.received}
    buffers = [sum([chunks.get(share.place, 0) for share in rank.shares]) for rank in ranks]
    return JobCount(
        [x.pairs for x in ranks],
        [x.received for x in ranks],
        buffers,
        segments,
        [x.shares for x in ranks],
    )
