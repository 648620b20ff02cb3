"""What equal parts of a sequence compute and send, in closed form: 65,536 of them in a moment. Pure integers, no torch.

A part is a rank's shard or, under zigzag, half of one. Where each segment length divides a part's length m or is a
multiple of it, a segment that straddles parts is a line of whole ones, and a part is known by its place in the line.
Places repeat with a period of r / gcd(r, m), but that what they count grows by the same number from one period to the
next: a few are counted one by one, and the others follow.
"""

import operator
from bisect import bisect_left
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from itertools import accumulate, pairwise
from math import gcd
from typing import NamedTuple

from ..pattern import DilatedPattern
from .totals import classes, sent_phases

FEW_PERIODS = 8  # of places: so few are all counted one by one


class Counts(NamedTuple):
    """Of every part, in order. All but pairs are in units of B * D elements, K and V.

    rows: its own. passed: what its rank sends in a ring of ranks in the order of parts. returned: in one of ranks in
    the opposite order, where a chunk that lower ranks need goes straight to the first of them. straight: what it sends
    if each chunk goes straight to all that meet it. met: what it receives, and so the gradients that it sends.
    """

    pairs: list[int]
    rows: list[int]
    passed: list[int]
    returned: list[int]
    straight: list[int]
    met: list[int]


class Load(NamedTuple):
    """What a part does of a branch, at most or at least. own_pairs, hop_pairs: of its rows with themselves, and with
    those of another part. rows: K and V."""

    own_pairs: int
    hop_pairs: int
    rows: int


@dataclass(frozen=True)
class Parts:
    """A branch of a pattern on equal parts of a sequence. held: as in `make_plan`."""

    pattern: DilatedPattern
    branch: int
    num_heads: int
    num_kv_heads: int
    held: range | None
    length: int
    num: int

    @property
    def group(self) -> int:
        """Parts of a whole segment."""
        return max(1, min(self.num, self.pattern.segment_lengths[self.branch] // self.length))

    @property
    def rate(self) -> int:
        return self.pattern.dilation_rates[self.branch]

    @property
    def period(self) -> int:
        return self.rate // gcd(self.rate, self.length)

    @property
    def is_sparse(self) -> bool:
        """A part may have no row of some phase."""
        return self.rate > self.length

    @cached_property
    def phases(self) -> list[int]:
        """Of the query heads that run the branch, in ascending order."""
        heads = self.pattern.heads_of(self.branch, self.num_heads)
        held = heads if self.held is None else [h for h in heads if h in self.held]
        return sorted(self.pattern.phase_of(self.branch, h, self.num_heads) or 0 for h in held)

    @cached_property
    def sent(self) -> list[int]:
        """The phases of the key/value rows that travel, in ascending order."""
        found = sent_phases(self.pattern, self.branch, self.num_heads, self.num_kv_heads, self.held)
        return sorted(phase for phase, count in found for _ in range(count))

    @property
    def kind(self) -> tuple:
        """What counts and kernel calls go by: where rates divide segments and parts, phases make no difference."""
        w, r = self.pattern.branches[self.branch]
        if self.length % r or (w % r and w < self.length * self.num):
            return tuple(self.phases), tuple(self.sent)
        groups = self.pattern.head_groups(self.branch, self.num_heads, self.num_kv_heads, self.held)
        return tuple((len(group.query_heads), len(group.kv_heads), group.phase_step) for group in groups)

    def most_calls(self) -> int:
        """Kernel calls of a hop at most, where rows of heads are not alike: the planner cuts a diagonal of heads where
        a phase begins anew and where rows are one more, of queries and of keys, and blocks of 4 heads or more."""
        calls = 0
        for group in self.pattern.head_groups(self.branch, self.num_heads, self.num_kv_heads, self.held):
            num = len(group.query_heads)
            blocks = max(1, len(group.kv_heads) // 4)
            calls += (num if self.is_sparse else min(num, 5 + blocks)) if group.phase_step else blocks
        return calls

    @cached_property
    def members(self) -> tuple[int, ...]:
        """The numbers of parts that share rows of some segment, of each kind of segment and ring; ascending."""
        if self.group == 1 or not self.phases:
            return ()
        sizes = {size for size in (self.group, self.num % self.group) if size > 1}
        if self.is_sparse:
            sizes = {
                rows for size in sizes for _, [rows] in classes(self.phases, self.rate, size * self.length) if rows > 1
            }
        return tuple(sorted(sizes))

    @cached_property
    def counts(self) -> Counts:
        if self.group == 1:
            return self._at_home(self.num, self.local_pairs)
        whole, rest = divmod(self.num, self.group)
        first = along(partial(self._columns, size=self.group), self.group, self.period)
        last = along(partial(self._columns, size=rest), rest, self.period) if rest else [[]] * len(first)
        return Counts(*(column * whole + end for column, end in zip(first, last, strict=True)))

    def _at_home(self, num: int, num_pairs: int) -> Counts:
        nothing = [0] * num
        return Counts([num_pairs] * num, *[nothing] * 5)

    @cached_property
    def folded(self) -> Counts:
        """Of ranks with two parts each, which are as far from the middle of the sequence as each other (zigzag)."""
        p = self.num // 2
        if self.group == 1:
            return self._at_home(p, 2 * self.local_pairs)
        early, late = Counts(*(x[:p] for x in self.counts)), Counts(*(x[: p - 1 : -1] for x in self.counts))
        both = Counts(*(list(map(operator.add, *x)) for x in zip(early, late, strict=True)))
        if self.group < self.num:  # in two segments; in the late one ranks come in the opposite order
            return both._replace(passed=list(map(operator.add, early.passed, late.returned)))
        if not self.pattern.is_causal:
            every, rows = sum(both.rows), both.rows
            passed, met = ([every - x for x in column] for column in (rows[1:] + rows[:1], rows))
            return both._replace(passed=passed, straight=[(p - 1) * x for x in rows], met=met)
        # All meet an early part. A late one is met by the ranks below alone: it goes to the first, and from there up.
        every, above = sum(early.rows), [*list(accumulate(reversed(late.rows)))[::-1], 0, 0]  # of ranks k, k + 1, ...
        following = zip(early.rows[1:] + early.rows[:1], [0, *late.rows[1:]], above[2:], strict=True)
        return both._replace(
            passed=[every - onward + own + later for onward, own, later in following],
            straight=[(p - 1) * a + k * b for k, (a, b) in enumerate(zip(early.rows, late.rows, strict=True))],
            met=[every - own + later for own, later in zip(early.rows, above[1:-1], strict=True)],
        )

    @property
    def sharing(self) -> int:
        """Parts of a whole segment that send or receive rows of it."""
        sends, meets = (column[: self.group] for column in (self.counts.passed, self.counts.met))
        return sum(a > 0 or b > 0 for a, b in zip(sends, meets, strict=True))

    @cached_property
    def local_pairs(self) -> int:
        """Pairs of a part in which whole segments lie."""
        w = self.pattern.segment_lengths[self.branch]
        segments, rest = divmod(self.length, w)
        return sum(number * self._pairs_before([size], size)[0] for number, size in ((segments, w), (1, rest)))

    def load(self, pick: Callable[..., int]) -> Load:
        """Of the parts of a segment, by `max` or `min`."""
        each = -(-self.length // self.rate) if pick is max else self.length // self.rate
        own, queries, rows = map(pick, self._loads)
        return Load(own, queries * each, rows)

    @cached_property
    def _loads(self) -> list[tuple[int, ...]]:
        return list(zip(*map(self._load_at, range(min(self.group, self.period))), strict=True))

    def _load_at(self, place: int) -> tuple[int, int, int]:
        """Pairs of own rows with themselves, rows of queries, and rows of keys and values."""
        start, stop = place * self.length, (place + 1) * self.length
        own = [(num, after - before) for num, (before, after) in classes(self.phases, self.rate, start, stop)]
        is_causal = self.pattern.is_causal
        pairs = sum(num * (rows * (rows + 1) // 2 if is_causal else rows * rows) for num, rows in own)
        return pairs, sum(num * rows for num, rows in own), self._rows_of(place)

    def _columns(self, places: range, size: int) -> list[list[int]]:
        """The counts of neighbouring parts of a segment of `size` parts."""
        borders = range(places.start * self.length, (places.stop + 1) * self.length, self.length)
        pairs = self._pairs_before(borders, size * self.length)
        columns = self._sparse(places, size) if self.is_sparse else self._dense(places, size, borders)
        return [[b - a for a, b in pairwise(pairs)], *columns]

    def _pairs_before(self, borders: Iterable[int], end: int) -> list[int]:
        """Pairs of the queries before each border of a segment that ends at `end`: of y rows of a phase the last sees y
        if causal, and else all there are."""
        num, every, longer = len(self.phases), end // self.rate, bisect_left(self.phases, end % self.rate)
        found = []
        for border in borders:
            rows, place = divmod(border, self.rate)
            more = bisect_left(self.phases, place)  # phases with one row more
            if self.pattern.is_causal:
                found.append(num * rows * (rows + 1) // 2 + more * (rows + 1))
            else:
                found.append(rows * (num * every + longer) + more * every + min(more, longer))
        return found

    def _dense(self, places: range, size: int, borders: Iterable[int]) -> list[list[int]]:
        """All parts have rows of all phases: one ring."""
        before = [self._rows_before(border) for border in borders]
        rows, every = [b - a for a, b in pairwise(before)], self._rows_before(size * self.length)
        behind, ahead = (self._rows_of(place % size) for place in (places.start - 1, places.stop))
        onward, back = [*rows[1:], ahead], [behind, *rows[:-1]]
        if not self.pattern.is_causal:
            passed, returned, met = ([every - x for x in column] for column in (onward, back, rows))
            return [rows, passed, returned, [(size - 1) * x for x in rows], met]
        # The last part of a segment is met by nobody, and the first meets none.
        met, passed = before[:-1], before[1:]
        returned = [own + earlier - last for own, earlier, last in zip(rows, met, back, strict=True)]
        if places.start == 0:
            returned[0] = rows[0]
        if places.stop == size:
            passed[-1], returned[-1] = 0, returned[-1] - rows[-1]
        straight = [own * (size - 1 - place) for place, own in zip(places, rows, strict=True)]
        return [rows, passed, returned, straight, met]

    def _rows_before(self, border: int) -> int:
        """Of keys and values, which travel."""
        rows, place = divmod(border, self.rate)
        return 2 * (len(self.sent) * rows + bisect_left(self.sent, place))

    def _rows_of(self, place: int) -> int:
        return self._rows_before((place + 1) * self.length) - self._rows_before(place * self.length)

    def _sparse(self, places: range, size: int) -> list[list[int]]:
        """Of each phase a part has one row or none, and those with one are its ring."""
        end, is_causal, found = size * self.length, self.pattern.is_causal, []
        for start in range(places.start * self.length, places.stop * self.length, self.length):
            rows = passed = returned = straight = met = 0
            for num, (before, after, every) in classes(self.sent, self.rate, start, start + self.length, end):
                if after == before:
                    continue
                rows += 2 * num
                if every > 1:
                    above = every - after
                    passed += 2 * num * ((after if above else 0) if is_causal else every - 1)
                    returned += 2 * num * ((before - (before > 0) + (above > 0)) if is_causal else every - 1)
                    straight += 2 * num * (above if is_causal else every - 1)
                    met += 2 * num * (before if is_causal else every - 1)
            found.append((rows, passed, returned, straight, met))
        return [list(column) for column in zip(*found, strict=True)]


@lru_cache(maxsize=64)  # forms of the same job by other exchanges count the same
def parts_of(
    pattern: DilatedPattern, num_heads: int, num_kv_heads: int, held: range | None, length: int, num: int
) -> list[Parts]:
    """By branch."""
    heads = (num_heads, num_kv_heads, held)
    return [Parts(pattern, branch, *heads, length, num) for branch in range(len(pattern.branches))]


def places_counted(pattern: DilatedPattern, length: int, num: int) -> int:
    """Of parts, one by one, by all branches, about: as `along` counts a whole sequence's."""
    periods = [r // gcd(r, length) for w, r in pattern.branches if w > length]
    return sum(num if num <= FEW_PERIODS * period else 4 * period for period in periods)


def along(columns: Callable[[range], list[list[int]]], num: int, period: int) -> list[list[int]]:
    """Columns of `num` places, which grow by the same from one period to the next but at both ends."""
    if num <= FEW_PERIODS * period:
        return columns(range(num))
    found = []
    starts, ends = columns(range(3 * period)), columns(range(num - period, num))
    for column, end in zip(starts, ends, strict=True):
        places = column[:period] + [0] * (num - period)
        for k in range(period, 2 * period):
            count, first, step = -(-(num - k) // period), column[k], column[k + period] - column[k]
            places[k::period] = range(first, first + step * count, step) if step else [first] * count
        places[-period:] = end
        found.append(places)
    return found
