"""Which key and value rows a cache keeps for later queries, and where these rows lie in memory. No torch.

In a branch with segments of w positions, a query at position t attends to rows of its own segment only. So after t
positions the cache keeps the rows of segment t // w, and drops the rows of earlier segments. (If `keep` is set, the
cache drops rows later: see `CachePlan.kept`.)

At dilation rate r, the positions t with the same (t mod w) mod r form a phase. A *rolling buffer* holds the rows of one
phase. The rows of a phase are numbered 0, 1, ... through all segments. Row c is in slot c mod capacity, so a new row
overwrites the oldest row. An example, with a capacity of 4:

    w = 8, r = 2, phase 1     position     8  9 10 11 12 13 14 15 | 16 17
                              row number      4     5     6    7  |     8
                              slot            0     1     2    3  |     0

A sliding window of w positions has a buffer of w rows.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from typing import NamedTuple

from ..pattern import Branch, DilatedPattern, is_integer
from .plan import Plan, Tile
from .planner import make_plan
from .rows import Piece, Rows, cut_apart
from .sharded_call import ShardedCall
from .sharding import Shard, Span, make_shards
from .sight import mask_between


class Buffers(NamedTuple):
    """The rolling buffers of one branch and phase, one for each of `kv_heads`.

    `query_heads` are the heads that read these buffers. Equally many of them share each key/value head.
    """

    number: int  # the number of the branch
    segment_length: int
    rate: int
    phase: int
    query_heads: range
    kv_heads: range
    capacity: int
    offset: int  # the buffer of kv_heads[k] begins at row offset + k * capacity of the cache
    is_window: bool = False

    @property
    def branch(self) -> Branch:
        return Branch(self.segment_length, self.rate, self.is_window)

    @property
    def rows_per_segment(self) -> int:
        return -(-(self.segment_length - self.phase) // self.rate)

    def before(self, position: int) -> int:
        """How many rows of the phase lie before a position. The next row of the phase has this number."""
        segment, rest = divmod(position, self.segment_length)
        return segment * self.rows_per_segment + max(0, -(-(rest - self.phase) // self.rate))

    def position_of(self, number: int) -> int:
        segment, row = divmod(number, self.rows_per_segment)
        return segment * self.segment_length + self.phase + row * self.rate

    def seen(self, position: int) -> range:
        """The numbers of the earlier rows to which a query at `position` attends.

        `position` must have the phase of these buffers.
        """
        if self.is_window:
            return range(max(position - self.branch.window_reach(is_causal=True), 0), position)
        return range(self.before(position - position % self.segment_length), self.before(position))

    def slots(self, numbers: range) -> Iterator[range]:
        """The slots of the rows with these numbers: one range, or two if the rows wrap around the buffer's end."""
        assert len(numbers) <= self.capacity
        if numbers:
            first = numbers.start % self.capacity
            stop = first + len(numbers)
            yield range(first, min(stop, self.capacity))
            if stop > self.capacity:
                yield range(stop - self.capacity)


@dataclass(frozen=True, eq=False)
class CachePlan:
    """All rolling buffers of a pattern. The methods say which rows a buffer holds once a sequence has t positions."""

    pattern: DilatedPattern
    num_heads: int  # `num_heads`, `num_kv_heads` and `held` are as in `sharded_call.ShardedCall`
    num_kv_heads: int
    held: range | None
    max_len: int | None  # the most positions that a sequence may have
    # `crop` can always remove this many of the last positions, even if some of them lie in an earlier segment
    keep: int
    buffers: tuple[Buffers, ...]
    of_phase: dict[tuple[int, int], list[Buffers]]  # the entries of `buffers`, by (branch, phase)
    # the segment lengths of the branches that have buffers; the window is not one of these branches
    lengths: tuple[int, ...]

    @property
    def heads(self) -> range:
        return range(self.num_heads) if self.held is None else self.held

    @property
    def num_kv_held(self) -> int:
        # Subtract the bounds, because torch.compile cannot take `len` of a range with variable bounds.
        heads = self.heads
        return (heads.stop - heads.start) * self.num_kv_heads // self.num_heads

    @property
    def num_rows(self) -> int:
        """Rows that are allocated for one sequence."""
        return sum(len(x.kv_heads) * x.capacity for x in self.buffers)

    def of_position(self, position: int) -> Iterator[Buffers]:
        """The buffers to which the row at a position belongs, in the order of branches."""
        for number, (length, rate, _) in enumerate(self.pattern.branches):
            yield from self.of_phase.get((number, position % length % rate), ())

    def kept(self, buffers: Buffers, position: int, floor: int = 0) -> range:
        """The numbers of the rows that a buffer keeps once the sequence has `position` positions.

        A buffer keeps the rows to which the next query attends. It also keeps the rows to which the next query would
        attend after a `crop`. A crop may remove up to `keep` positions, as long as `floor` positions remain.
        """
        return range(buffers.seen(max(position - self.keep, floor)).start, buffers.before(position))

    def floor(self, position: int) -> int:
        """The shortest length to which `crop` can shorten a sequence of `position` positions.

        `crop` can always remove the last `keep` positions. It can remove more if all branches still have the rows that
        the next query needs:

        - A branch with segments has the rows from the start of the segment that holds `position`. So `crop` can go back
          to the latest of these starts.
        - A window has the rows of all positions while `position - keep` is below the window's length. In a longer
          sequence the window has too few rows, and `crop` can remove only the last `keep` positions.
        """
        # The default 0 is for a pattern without segments: `lengths` is then empty.
        youngest = max((position - position % length for length in self.lengths), default=0)
        if self.pattern.window is not None and position - self.keep >= self.pattern.window:
            youngest = position
        return max(0, min(youngest, position - self.keep))

    def kept_of(self, shard: Shard, position: int) -> Iterator[tuple[Buffers, range, Span]]:
        """For each buffer and each span of a shard: the numbers of the buffer's kept rows that lie in the span.

        (buffer, span) pairs without such rows are left out. position: the number of positions of the sequence.
        """
        for buffers in self.buffers:
            kept = self.kept(buffers, position)
            for span in shard:
                numbers = range(
                    max(kept.start, buffers.before(span.start)), buffers.before(span.stop)
                )
                if numbers:
                    yield buffers, numbers, span


# With `typed`, max_len=True raises ValueError. Otherwise it would get the plan cached for max_len=1, as True == 1.
@lru_cache(maxsize=64, typed=True)
def plan_cache(
    pattern: DilatedPattern,
    num_heads: int,
    num_kv_heads: int,
    max_len: int | None = None,
    keep: int = 0,
    held: range | None = None,
) -> CachePlan:
    """Plan the rolling buffers of a pattern. ValueError if the pattern is not causal, or heads or sizes do not fit.

    With keep = 0 or 1 a buffer has room for the rows of segment_length positions, and all buffers together have
    `pattern.cache_rows` rows. With a larger keep a buffer has room for the rows of segment_length + keep - 1 positions.
    """
    if max_len is not None and (not is_integer(max_len) or max_len < 1):
        raise ValueError(
            f"max_len={max_len!r} must be an integer of at least 1, or None for sequences of any length."
        )
    if not is_integer(keep) or keep < 0:
        raise ValueError(
            f"keep={keep!r} must be an integer of at least 0: how many of the last positions `crop` can always remove."
        )
    # Call `cache_rows` only to raise its ValueError if the pattern is not causal or cannot run on these heads.
    pattern.cache_rows(num_heads, num_kv_heads)
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
            # Skip a phase that no segment has: a segment of 2 positions has only the phases 0 and 1, however large the
            # rate is.
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


# Cached, so that all layers of a model share one plan, and the program that is made from the plan.
@lru_cache(maxsize=16)
def plan_append(plan: CachePlan, position: int, num_new: int) -> Plan:
    """The plan for appending `num_new` rows at a position. A tile is a block of queries times keys.

    `make_plan` makes the tiles of new queries times new keys. It is called as if there were two ranks: rank 0 owns the
    earlier positions, and rank 1 the new positions. This function then adds the tiles of new queries times cached keys.
    """
    # Borders of segments repeat after `period` positions, so the tiles of new rows depend only on position mod
    # `period`.
    period = math.lcm(*plan.lengths)
    shards = make_shards("contiguous", (position % period, num_new))
    whole = make_plan(
        ShardedCall(plan.pattern, shards, plan.num_heads, plan.num_kv_heads, None, plan.held), 1
    )
    local = tuple(tile._replace(packed=None) for tile in whole.local)
    cached: list[Tile] = []
    for buffers in plan.buffers:
        cached += _cached_tiles(buffers, position, num_new)
    return replace(whole, local=local, packs=(), hops=(), cached=tuple(cached))


def _cached_tiles(buffers: Buffers, position: int, num_new: int) -> Iterator[Tile]:
    """Yield the tiles of new queries times the cached keys in `buffers`.

    In a branch with segments, a new query attends to cached keys only if the query lies in the segment of `position`.
    """
    # In the pieces below, `start` and `stop` are row numbers (see the top of this file), not positions. `row` is the
    # slot of a cached row, or the index of a new row in the call.
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
        # `num_queries`: how many new rows of the phase lie in the segment that holds `position`.
        left = buffers.segment_length - position % buffers.segment_length
        num_queries = buffers.before(position + min(left, num_new)) - seen.stop
        row = buffers.position_of(seen.stop) - position
        queries = [Piece(seen.stop, seen.stop + num_queries, row)] if num_queries else []

    for query, key in product(queries, keys):
        # In a segment every new query attends to every cached key, because all new rows come later. In a window some
        # cached keys are too far from some new queries.
        mask = mask_between(buffers.branch, query.start, key.start, is_causal=True)
        if mask is None:
            continue
        rows = Rows(buffers.query_heads, query.row, 0, buffers.rate, query.length)
        # The buffer of each key/value head lies `capacity` rows after the buffer of the previous head.
        heads = range(len(buffers.kv_heads))
        cached = Rows(heads, buffers.offset + key.row, buffers.capacity, 1, key.length)
        yield Tile(rows, cached, mask, first_query=False, first_key=False)


def check_append(plan: CachePlan, positions: Sequence[int], counts: Sequence[int]) -> None:
    """Raise ValueError if a sequence would get longer than max_len. Sequence i has positions[i] positions, and gets
    counts[i] more."""
    for row, (position, count) in enumerate(zip(positions, counts, strict=True)):
        if plan.max_len is not None and position + count > plan.max_len:
            raise ValueError(
                f"the cache holds max_len={plan.max_len} positions, and sequence {row} of the batch has {position}: "
                f"with {count} more there would be {position + count}. Make the cache with max_len={position + count} "
                "or more, or reset the sequence."
            )


def check_crop(
    plan: CachePlan, positions: Sequence[int], floors: Sequence[int], counts: Sequence[int]
) -> None:
    """Raise ValueError if `crop` cannot remove the last counts[i] positions of sequence i.

    Sequence i has positions[i] positions, and at least floors[i] of them must remain. Otherwise the next query would
    need rows that the cache has dropped.
    """
    for row, (position, floor, count) in enumerate(zip(positions, floors, counts, strict=True)):
        if count < 0 or count > position:
            raise ValueError(
                f"crop({count}): sequence {row} of the batch has {position} positions. Crop 0 to {position} of them."
            )
        if position - count < floor:
            raise ValueError(
                f"crop({count}) would shorten sequence {row} of the batch from {position} to {position - count} "
                "positions, but the cache has dropped keys and values that the next query would then see. Crop at "
                f"most {position - floor} positions, or make the cache with keep={count} (it has keep={plan.keep})."
            )
