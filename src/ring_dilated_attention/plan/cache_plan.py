"""What a cache keeps: the rows that the current or a later query can still see, and where they lie. No torch.

In a branch (w, r) a query at position t sees rows of its own segment only. So after t positions the cache keeps the
rows from the start of segment t // w on, and drops those of earlier segments.

    w = 8, r = 2, phase 1     position     8  9 10 11 12 13 14 15 | 16
                              row number      4     5     6    7  |
                              slot            0     1     2    3  |     capacity 4: row 8 will take slot 0 again

The rows of a phase have numbers 0, 1, ... through all segments. Row c is in slot c mod capacity of a *rolling buffer*.
A sliding window of w positions has a buffer of w rows.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from typing import NamedTuple

from ..pattern import Branch, DilatedPattern, is_integer
from .job import Job
from .plan import Plan, Tile
from .planner import make_plan
from .rows import Piece, Rows, cut_apart
from .sharding import Shard, Span, make_shards
from .sight import mask_between


class Buffers(NamedTuple):
    """The rolling buffers of one branch and phase, one for each K/V head. Equally many query heads share each."""

    number: int  # the number of the branch
    segment_length: int
    rate: int
    phase: int
    query_heads: range
    kv_heads: range
    capacity: int
    offset: int  # the buffer of kv_heads[k] is `capacity` rows of the cache from offset + k * capacity on
    is_window: bool = False

    @property
    def branch(self) -> Branch:
        return Branch(self.segment_length, self.rate, self.is_window)

    @property
    def rows_per_segment(self) -> int:
        return -(-(self.segment_length - self.phase) // self.rate)

    def before(self, position: int) -> int:
        """How many rows of the phase lie before a position. The next row has this number."""
        segment, rest = divmod(position, self.segment_length)
        return segment * self.rows_per_segment + max(0, -(-(rest - self.phase) // self.rate))

    def position_of(self, number: int) -> int:
        segment, row = divmod(number, self.rows_per_segment)
        return segment * self.segment_length + self.phase + row * self.rate

    def seen(self, position: int) -> range:
        """The numbers of the earlier rows that a query at a position sees. The query must have this phase."""
        if self.is_window:
            return range(max(position - self.branch.window_reach(is_causal=True), 0), position)
        return range(self.before(position - position % self.segment_length), self.before(position))

    def slots(self, numbers: range) -> Iterator[range]:
        """The slots of rows: one run, or two if the rows wrap around the end of the buffer."""
        assert len(numbers) <= self.capacity
        if numbers:
            first = numbers.start % self.capacity
            stop = first + len(numbers)
            yield range(first, min(stop, self.capacity))
            if stop > self.capacity:
                yield range(stop - self.capacity)


@dataclass(frozen=True, eq=False)
class CachePlan:
    """All rolling buffers of a pattern, and which rows they must hold at a position."""

    pattern: DilatedPattern
    num_heads: int  # this, num_kv_heads and held are as in `job.Job`
    num_kv_heads: int
    held: range | None
    max_len: int | None  # the most positions that a sequence may have
    keep: int  # how many positions can always be taken back, even into a segment that has ended
    buffers: tuple[Buffers, ...]
    of_phase: dict[tuple[int, int], list[Buffers]]  # `buffers` again, by branch and phase
    lengths: tuple[int, ...]  # of segments that have buffers; without the window

    @property
    def heads(self) -> range:
        return range(self.num_heads) if self.held is None else self.held

    @property
    def num_kv_held(self) -> int:
        heads = self.heads  # torch.compile cannot take the len of a range of variables
        return (heads.stop - heads.start) * self.num_kv_heads // self.num_heads

    @property
    def num_rows(self) -> int:
        """Rows that are allocated for one sequence."""
        return sum(len(x.kv_heads) * x.capacity for x in self.buffers)

    def of_position(self, position: int) -> Iterator[Buffers]:
        """The buffers that have the phase of a position, in the order of branches."""
        for number, (length, rate, _) in enumerate(self.pattern.branches):
            yield from self.of_phase.get((number, position % length % rate), ())

    def kept(self, buffers: Buffers, position: int, floor: int = 0) -> range:
        """The numbers of the rows that are kept after `position` positions, if nobody goes back below `floor`.

        They are the rows of the segment at `position`, and of the segments that can be reached by going back up to
        `keep` positions.
        """
        return range(buffers.seen(max(position - self.keep, floor)).start, buffers.before(position))

    def floor(self, position: int) -> int:
        """The lowest position to which one can go back from `position`.

        That is the latest start of any branch's current segment, or `position - keep` if this is lower. A window has no
        segments: once `position - keep` reaches the window's length, the lowest position is `position - keep`.
        """
        # 0 if there are no buffers
        youngest = max((position - position % length for length in self.lengths), default=0)
        if self.pattern.window is not None and position - self.keep >= self.pattern.window:
            youngest = position
        return max(0, min(youngest, position - self.keep))

    def kept_of(self, shard: Shard, position: int) -> Iterator[tuple[Buffers, range, Span]]:
        """The kept rows that lie in each span of a shard."""
        for buffers in self.buffers:
            kept = self.kept(buffers, position)
            for span in shard:
                numbers = range(
                    max(kept.start, buffers.before(span.start)), buffers.before(span.stop)
                )
                if numbers:
                    yield buffers, numbers, span


# typed: otherwise the plan kept for 1 would be returned for 1.0 and True, which must be refused
@lru_cache(maxsize=64, typed=True)
def plan_cache(
    pattern: DilatedPattern,
    num_heads: int,
    num_kv_heads: int,
    max_len: int | None = None,
    keep: int = 0,
    held: range | None = None,
) -> CachePlan:
    """Plan the rolling buffers of a pattern; ValueError if it is not causal, or if heads or sizes are impossible.

    A buffer has room for the most rows that it must hold at any one time: those among the first
    segment_length + max(keep, 1) - 1 positions. With keep = 0, all buffers together have `pattern.cache_rows` rows.
    """
    if max_len is not None and (not is_integer(max_len) or max_len < 1):
        raise ValueError(
            f"max_len={max_len!r} must be an integer of at least 1, or None for sequences of any length."
        )
    if not is_integer(keep) or keep < 0:
        raise ValueError(
            f"keep={keep!r} must be an integer of at least 0, the positions that can be taken back."
        )
    pattern.cache_rows(num_heads, num_kv_heads)  # raises ValueError for what no cache can serve
    all_buffers: list[Buffers] = []
    of_phase: dict[tuple[int, int], list[Buffers]] = {}
    offset = 0
    for number, (length, rate, is_window) in enumerate(pattern.branches):
        longest = length + max(keep, 1) - 1
        if max_len is not None:
            longest = min(longest, max_len)
        for group in pattern.phase_groups(number, num_heads, num_kv_heads, held):
            empty = Buffers(
                number,
                length,
                rate,
                group.phase,
                group.query_heads,
                group.kv_heads,
                capacity=0,
                offset=offset,
                is_window=is_window,
            )
            buffers = empty._replace(capacity=empty.before(longest))
            # a segment has no row of a phase >= its length
            if group.phase < length and buffers.capacity:
                all_buffers.append(buffers)
                of_phase.setdefault((number, group.phase), []).append(buffers)
                offset += len(group.kv_heads) * buffers.capacity
    lengths = tuple(sorted({x.segment_length for x in all_buffers if not x.is_window}))
    return CachePlan(
        pattern,
        num_heads,
        num_kv_heads,
        held,
        max_len,
        keep,
        tuple(all_buffers),
        of_phase,
        lengths,
    )


@lru_cache(maxsize=16)  # the layers of a model share the plan, and so its program
def plan_append(plan: CachePlan, position: int, num_new: int) -> Plan:
    """The work of `num_new` rows from a position on, planned as rank 1 of two: rank 0 owns all rows before.

    The planner makes the tiles among the new rows. The cached rows take the place of rank 0's chunks.
    """
    period = math.lcm(*plan.lengths)  # the plan among new rows depends on position mod period only
    shards = make_shards("contiguous", (position % period, num_new))
    whole = make_plan(
        Job(plan.pattern, shards, plan.num_heads, plan.num_kv_heads, None, plan.held), 1
    )
    local = tuple(tile._replace(packed=None) for tile in whole.local)
    cached: list[Tile] = []
    for buffers in plan.buffers:
        cached += _cached_tiles(buffers, position, num_new)
    return replace(whole, local=local, packs=(), hops=(), cached=tuple(cached))


def _cached_tiles(buffers: Buffers, position: int, num_new: int) -> Iterator[Tile]:
    """The tiles of new rows times all cached rows that they see, in the segment at `position` or in a window."""
    # These pieces count row numbers. `Piece.row` is the slot of a cached row, or the index of a new row in the call.
    seen = buffers.seen(position)
    keys: list[Piece] = []
    number = seen.start
    for slots in buffers.slots(seen):
        keys.append(Piece(number, number + len(slots), slots.start))
        number += len(slots)

    if buffers.is_window:
        query = Piece(position, position + num_new, 0)
        reach = buffers.branch.window_reach(is_causal=True)
        keys, [queries] = cut_apart(keys, [(query, reach)])
    else:
        # the new rows that lie in the segment at `position`
        left = buffers.segment_length - position % buffers.segment_length
        num_queries = buffers.before(position + min(left, num_new)) - seen.stop
        row = buffers.position_of(seen.stop) - position
        queries = [Piece(seen.stop, seen.stop + num_queries, row)] if num_queries else []

    for query, key in product(queries, keys):
        # in a segment all new rows come after all cached rows, so every query sees every key
        mask = mask_between(buffers.branch, query.start, key.start, is_causal=True)
        if mask is None:
            continue
        rows = Rows(buffers.query_heads, query.row, 0, buffers.rate, query.length)
        # The buffer of the next key/value head lies `capacity` rows further.
        heads = range(len(buffers.kv_heads))
        cached = Rows(heads, buffers.offset + key.row, buffers.capacity, 1, key.length)
        yield Tile(rows, cached, mask, first_query=False, first_key=False)


def check_append(plan: CachePlan, positions: Sequence[int], counts: Sequence[int]) -> None:
    """Raise ValueError if a sequence would become longer than the cache was made for."""
    for row, (position, count) in enumerate(zip(positions, counts, strict=True)):
        if plan.max_len is not None and position + count > plan.max_len:
            raise ValueError(
                f"the cache holds max_len={plan.max_len} positions, and row {row} of the batch has {position}: with "
                f"{count} more there would be {position + count}. Make the cache with max_len={position + count} or "
                "more, or reset the row."
            )


def check_crop(
    plan: CachePlan, positions: Sequence[int], floors: Sequence[int], counts: Sequence[int]
) -> None:
    """Raise ValueError if `counts` cannot be taken back: a sequence has fewer positions, or would need dropped rows."""
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
