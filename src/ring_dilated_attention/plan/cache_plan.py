"""What a cache keeps: the rows that the current or a later query can still see, and where they lie. No torch.

A query at position t sees, of a branch (w, r), rows of its own segment alone. So once t rows were appended, all that a
later query can see of a phase are the rows from the start of segment t // w on: those of earlier segments are dropped.

    w = 8, r = 2, phase 1     position     8  9 10 11 12 13 14 15 | 16
                              row number      4     5     6    7  |
                              slot            0     1     2    3  |     capacity 4: row 8 will take slot 0 again

The rows of a phase are numbered through, over all segments. Row number c lies in slot c mod capacity of its *ring*.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from ..pattern import DilatedPattern, HeadGroup, is_integer
from .job import Job
from .plan import Plan, Tile
from .planner import make_plan
from .rows import Rows
from .sharding import Shard, Span, make_shards


class Buffers(NamedTuple):
    """The rings of one branch and phase, of key/value heads that serve equally many of its query heads.

    The ring of kv_heads[k] is `capacity` rows of the cache from `offset + k * capacity` on.
    """

    segment_length: int
    rate: int
    phase: int
    query_heads: range
    kv_heads: range
    capacity: int
    offset: int

    @property
    def rows_per_segment(self) -> int:
        return -(-(self.segment_length - self.phase) // self.rate)

    def has(self, position: int) -> bool:
        """Whether the row at a position is of this phase."""
        return position % self.segment_length % self.rate == self.phase

    def before(self, position: int) -> int:
        """How many rows of the phase lie before a position: the number of the next."""
        segment, rest = divmod(position, self.segment_length)
        return segment * self.rows_per_segment + max(0, -(-(rest - self.phase) // self.rate))

    def start_of_segment(self, position: int) -> int:
        return position - position % self.segment_length

    def position_of(self, number: int) -> int:
        segment, row = divmod(number, self.rows_per_segment)
        return segment * self.segment_length + self.phase + row * self.rate

    def seen(self, position: int) -> range:
        """The numbers of the rows before a position that a query there can see, if it has the phase."""
        return range(self.before(self.start_of_segment(position)), self.before(position))

    def slots(self, numbers: range) -> Iterator[range]:
        """Where rows lie: one run of slots, or two where they go around the end of the ring."""
        assert len(numbers) <= self.capacity
        if numbers:
            first = numbers.start % self.capacity
            stop = first + len(numbers)
            yield range(first, min(stop, self.capacity))
            if stop > self.capacity:
                yield range(stop - self.capacity)


@dataclass(frozen=True)
class CachePlan:
    """All rings of a pattern, and what must be in them after so many positions.

    num_heads, num_kv_heads: of the layer. held: the query heads of them that the tensors hold, if not all.
    max_len: the most positions of a sequence; None for any number.
    keep: how many positions can be taken back across the borders of segments.
    """

    pattern: DilatedPattern
    num_heads: int
    num_kv_heads: int
    held: range | None
    max_len: int | None
    keep: int
    buffers: tuple[Buffers, ...]
    of_phase: tuple[dict[int, tuple[Buffers, ...]], ...]  # the same by branch and phase
    lengths: tuple[int, ...]  # of segments that have rings

    @property
    def heads(self) -> range:
        """The query heads that the tensors hold."""
        return range(self.num_heads) if self.held is None else self.held

    @property
    def num_kv_held(self) -> int:
        """Key/value heads that the tensors hold."""
        heads = self.heads
        return (heads.stop - heads.start) * self.num_kv_heads // self.num_heads

    @property
    def by_branch(self) -> Iterator[tuple[int, Buffers]]:
        """All rings in their order, with their branch."""
        for branch, of_phase in enumerate(self.of_phase):
            yield from ((branch, rings) for several in of_phase.values() for rings in several)

    @property
    def num_rows(self) -> int:
        """Rows that are allocated for one sequence."""
        return sum(len(rings.kv_heads) * rings.capacity for rings in self.buffers)

    def of_position(self, position: int) -> Iterator[tuple[int, Buffers]]:
        """Those to which the row at a position belongs, with their branch: it attends there, and is written there."""
        for branch, (length, rate) in enumerate(self.pattern.branches):
            for rings in self.of_phase[branch].get(position % length % rate, ()):
                yield branch, rings

    def kept(self, rings: Buffers, position: int, floor: int = 0) -> range:
        """The numbers of the rows that are kept after `position` positions, if nobody goes back to one below `floor`.

        Those of the segment that is open, and of all that are opened again if up to `keep` positions are taken back.
        """
        return range(rings.seen(max(position - self.keep, floor)).start, rings.before(position))

    def floor(self, position: int) -> int:
        """The lowest position to which one can go back from `position`.

        Back to the start of the youngest open segment every branch has all of its rows; beyond it to the last `keep`.
        """
        youngest = max((position - position % length for length in self.lengths), default=0)  # of no rings all is there
        return max(0, min(youngest, position - self.keep))

    def kept_of(self, shard: Shard, position: int) -> Iterator[tuple[Buffers, range, Span]]:
        """Of these, the rows that lie in each span of a shard."""
        for rings in self.buffers:
            kept = self.kept(rings, position)
            for span in shard:
                numbers = range(max(kept.start, rings.before(span.start)), rings.before(span.stop))
                if numbers:
                    yield rings, numbers, span

    def live(self, rings: Buffers, position: int) -> range:
        """The numbers of the rows that the last query before `position`, or one from there on, sees.

        Fewer than are kept where no position is left in the segment that has the phase: the rows could only be seen
        again by going back.
        """
        stop = rings.before(position)
        number = stop - 1 if position and rings.has(position - 1) else stop  # of the first query to come that has it
        return range(number - number % rings.rows_per_segment, stop)

    def live_rows(self, position: int) -> int:
        """How many these are in all rings. At no position more than num_rows."""
        return sum(len(rings.kv_heads) * len(self.live(rings, position)) for rings in self.buffers)

    def distinct_rows(self, position: int) -> int:
        """The same, counting once what several branches hold: what a cache that stored each row once would hold."""
        rows: dict[int, set[int]] = {}
        for rings in self.buffers:
            positions = set(map(rings.position_of, self.live(rings, position)))
            for head in rings.kv_heads:
                rows.setdefault(head, set()).update(positions)
        return sum(map(len, rows.values()))


@lru_cache(maxsize=64)
def plan_cache(
    pattern: DilatedPattern,
    num_heads: int,
    num_kv_heads: int,
    max_len: int | None = None,
    keep: int = 0,
    held: range | None = None,
) -> CachePlan:
    """Lay out the rings of a pattern.

    A ring holds the most rows that must be in it at any one time: those of a whole segment, or of a segment less its
    last position and the `keep` positions from there on. (With keep = 0 and all heads their sum is
    `pattern.cache_rows`.)

    Args:
        held: as of `pattern.head_groups`.

    Raises:
        ValueError: if the pattern is not causal or cannot run on these heads, or for sizes that cannot be.
    """
    if max_len is not None and (not is_integer(max_len) or max_len < 1):
        raise ValueError(f"max_len={max_len!r} must be an integer of at least 1, or None for sequences of any length.")
    if not is_integer(keep) or keep < 0:
        raise ValueError(f"keep={keep!r} must be an integer of at least 0, the positions that can be taken back.")
    pattern.cache_rows(num_heads, num_kv_heads)  # refuses what no cache can serve
    found: list[Buffers] = []
    of_phase: list[dict[int, tuple[Buffers, ...]]] = []
    offset = 0
    for branch in range(len(pattern.branches)):
        of_phase.append({})
        for group in pattern.phase_groups(branch, num_heads, num_kv_heads, held):
            rings = _rings(pattern, branch, group, max_len, keep, offset)
            if rings.capacity > 0:
                found.append(rings)
                of_phase[branch][group.phase] = (*of_phase[branch].get(group.phase, ()), rings)
                offset += len(rings.kv_heads) * rings.capacity
    lengths = tuple(sorted({rings.segment_length for rings in found}))
    return CachePlan(pattern, num_heads, num_kv_heads, held, max_len, keep, tuple(found), tuple(of_phase), lengths)


def _rings(
    pattern: DilatedPattern, branch: int, group: HeadGroup, max_len: int | None, keep: int, offset: int
) -> Buffers:
    length, rate = pattern.branches[branch]
    rings = Buffers(length, rate, group.phase, group.query_heads, group.kv_heads, 0, offset)
    if group.phase >= length:  # no position of a segment has it
        return rings
    longest = length + max(keep, 1) - 1
    return rings._replace(capacity=rings.before(longest if max_len is None else min(longest, max_len)))


def plan_chunk(plan: CachePlan, position: int, num_new: int) -> Plan:
    """The work of so many new rows from a position on: that of the second of two ranks with shards (position, num_new).

    Its own rows meet by the planner's tiles. What the first rank would send are the cached rows of the segments that
    are open, read where they lie.
    """
    period = math.lcm(*plan.lengths)  # plans are kept, and depend on nothing else of the position
    shards = make_shards("contiguous", (position % period, num_new))
    whole = make_plan(Job(plan.pattern, shards, plan.num_heads, plan.num_kv_heads, None, plan.held), 1)
    local = tuple(tile._replace(packed=None) for tile in whole.local)
    cached = tuple(tile for rings in plan.buffers for tile in _cached_tiles(rings, position, num_new))
    return replace(whole, local=local, packs=(), hops=(), chunk_size=0, received_size=0, home_size=0, cached=cached)


def _cached_tiles(rings: Buffers, position: int, num_new: int) -> Iterator[Tile]:
    """The new rows of the segment that is open at a position, times the rows of it that are cached: all before them."""
    seen = rings.seen(position)
    stop = min(rings.start_of_segment(position) + rings.segment_length, position + num_new)
    num_queries = rings.before(stop) - seen.stop
    if seen and num_queries:
        queries = Rows(rings.query_heads, rings.position_of(seen.stop) - position, 0, rings.rate, num_queries)
        for slots in rings.slots(seen):
            # The ring of the next key/value head lies `capacity` rows further.
            keys = Rows(range(len(rings.kv_heads)), rings.offset + slots.start, rings.capacity, 1, len(slots))
            yield Tile(queries, keys, is_causal=False, first_query=False, first_key=False)


def check_append(plan: CachePlan, positions: Sequence[int], counts: Sequence[int]) -> None:
    """Raise ValueError if a sequence would become longer than the cache was made for."""
    for row, (position, count) in enumerate(zip(positions, counts, strict=True)):
        if plan.max_len is not None and position + count > plan.max_len:
            raise ValueError(
                f"the cache holds max_len={plan.max_len} positions, and row {row} of the batch has {position}: with "
                f"{count} more there would be {position + count}. Make the cache with max_len={position + count} or "
                "more, or reset the row."
            )


def check_crop(plan: CachePlan, positions: Sequence[int], floors: Sequence[int], counts: Sequence[int]) -> None:
    """Raise ValueError if positions cannot be taken back: there are fewer, or rows that they need were dropped."""
    for row, (position, floor, count) in enumerate(zip(positions, floors, counts, strict=True)):
        if count < 0 or count > position:
            raise ValueError(
                f"crop({count}): row {row} of the batch has {position} positions. Take back between 0 and {position}."
            )
        if position - count < floor:
            raise ValueError(
                f"crop({count}) would take row {row} of the batch from {position} positions back to "
                f"{position - count}, into segments that have ended and whose rows were dropped. It can go back to "
                f"{floor}: take back {position - floor} or fewer, or make the cache with keep={count} (it has "
                f"keep={plan.keep})."
            )
