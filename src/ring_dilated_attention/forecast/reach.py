"""Computes which positions can influence a query ("it has heard of them") after some layers, exactly. No torch.

Heads are mixed between layers, so a layer reads the phases of all its heads. In a sequence of up to MOST_FOLLOWED
positions, every query is followed forward through the layers. A set of positions is an integer: a bit per position.

In a longer sequence, some queries are followed back through the layers. A set of positions is a binary tree: its halves
are sets of half as many positions, and equal sets are the same node. If lengths and rates are powers of two, most
segments look alike. So a trillion positions need hardly more nodes than a million. No node is computed twice.
"""

from collections.abc import Collection, Iterator
from functools import cache, reduce
from typing import NamedTuple

from ..pattern import DilatedPattern

MOST_FOLLOWED = 8192  # positions; to follow each of them as a query takes about a second
NONE, ALL = 0, 1  # the nodes of no positions and of all positions, at every height


class Reach(NamedTuple):
    """How far a stack of layers carries."""

    # For each layer, the least share of its visible positions that any followed query has heard of by then.
    shares: tuple[float, ...]
    worst: int  # the query with the least share after the last layer
    num_followed: int  # queries

    def layers_for(self, share: float) -> int | None:
        """The least number of layers after which every followed query has heard of `share`, or None."""
        return next((i + 1 for i, reached in enumerate(self.shares) if reached >= share), None)


class _Sets:
    """Sets of 2**height positions as nodes. A node does not know its height; the caller gives it."""

    def __init__(self) -> None:
        self.halves = [(NONE, NONE), (ALL, ALL)]
        self.nodes = {pair: node for node, pair in enumerate(self.halves)}
        self.union, self.common, self.count = cache(self._union), cache(self._common), cache(self._count)

    def join(self, first: int, second: int) -> int:
        node = self.nodes.setdefault((first, second), len(self.halves))
        if node == len(self.halves):
            self.halves.append((first, second))
        return node

    def of(self, positions: range, height: int) -> int:
        """The set of consecutive positions."""
        if not positions or positions == range(2**height):
            return ALL if positions else NONE
        half = 2 ** (height - 1)
        first = range(positions.start, min(positions.stop, half))
        second = range(max(positions.start - half, 0), positions.stop - half)
        return self.join(self.of(first, height - 1), self.of(second, height - 1))

    def _union(self, a: int, b: int) -> int:
        if a == b or NONE in (a, b) or ALL in (a, b):
            return ALL if ALL in (a, b) else a or b
        (first, second), (third, fourth) = self.halves[a], self.halves[b]
        return self.join(self.union(first, third), self.union(second, fourth))

    def _common(self, a: int, b: int) -> int:
        if a == b or NONE in (a, b):
            return a if a == b else NONE
        if ALL in (a, b):
            return b if a == ALL else a
        (first, second), (third, fourth) = self.halves[a], self.halves[b]
        return self.join(self.common(first, third), self.common(second, fourth))

    def _count(self, a: int, height: int) -> int:
        if a in (NONE, ALL):
            return a * 2**height
        first, second = self.halves[a]
        return self.count(first, height - 1) + self.count(second, height - 1)


class _Branch:
    """A branch, followed back: from the positions of queries to the positions of the keys that they see.

    segment, rate: the heights of trees of w and of r positions. read: the set of phases that heads read.
    """

    def __init__(self, sets: _Sets, segment: int, rate: int, read: int, *, is_causal: bool) -> None:
        self.sets, self.segment, self.rate, self.read, self.is_causal = sets, segment, rate, read, is_causal
        self.heard, self.phases, self.filled = cache(self._heard), cache(self._phases), cache(self._filled)

    def _heard(self, a: int, height: int) -> int:
        """The keys that the queries in `a` see through this branch. `a` covers one segment or more."""
        if height == self.segment:
            return self.filled(a, height, NONE if self.is_causal else self.phases(a, height))
        first, second = self.sets.halves[a]
        return self.sets.join(self.heard(first, height - 1), self.heard(second, height - 1))

    def _phases(self, a: int, height: int) -> int:
        """The phases of the positions in `a`, if a head reads them. `a` lies within one segment."""
        if height == self.rate:
            return self.sets.common(a, self.read)
        first, second = self.sets.halves[a]
        return self.sets.union(self.phases(first, height - 1), self.phases(second, height - 1))

    def _filled(self, a: int, height: int, later: int) -> int:
        """The positions that are seen in a part of a segment. later: phases whose rows in this part are all seen."""
        if height == self.rate:
            return self.sets.union(self.sets.common(a, self.read), later)
        first, second = self.sets.halves[a]
        before = self.sets.union(later, self.phases(second, height - 1))
        return self.sets.join(self.filled(first, height - 1, before), self.filled(second, height - 1, later))


def reach(pattern: DilatedPattern, seq_len: int, num_heads: int, num_layers: int) -> Reach:
    """Follow all queries of a short sequence, or some of a longer one, through the layers. Raises ValueError if a rate,
    or the length of a segment shorter than the sequence, is no power of two."""
    for w, r in pattern.branches:
        if (w < seq_len and w.bit_count() > 1) or r.bit_count() > 1:
            raise ValueError(f"only powers of two can be followed, got w={w}, r={r}; the longest w may be the sequence")
    queries: Collection[int] = range(seq_len)
    if seq_len > MOST_FOLLOWED:
        queries = queries_to_follow(pattern, seq_len, num_heads)
        layers = some_queries(pattern, seq_len, num_heads, queries)
    else:
        layers = ([positions.bit_count() for positions in sets] for sets in every_query(pattern, seq_len, num_heads))
    shares: list[float] = []
    for _, counts in zip(range(num_layers), layers, strict=False):
        found = [c / (q + 1 if pattern.is_causal else seq_len) for q, c in zip(queries, counts, strict=True)]
        shares.append(min(found))
    shares += [shares[-1]] * (num_layers - len(shares))  # further layers add nothing
    return Reach(tuple(shares), list(queries)[found.index(shares[-1])], len(queries))


def queries_to_follow(pattern: DilatedPattern, seq_len: int, num_heads: int) -> list[int]:
    """The queries that may have heard of least: those at places 0 and `num_heads` of the first and the last segments.

    A query at place 0 hears of earlier segments only by wider branches. Place `num_heads` may be in a phase that no
    head reads. For an early query each missing position is a larger share. The last segments may be shorter.
    """
    shortest = min(pattern.segment_lengths)
    starts = {0, max(0, (seq_len - 1) // shortest - 1) * shortest}
    for w in pattern.segment_lengths:
        last = (seq_len - 1) // w * w
        starts |= {w, last, last + shortest}
    found = {start + k for start in starts for k in (0, num_heads)} | {seq_len - 1}
    return sorted(query for query in found if query < seq_len)


def every_query(pattern: DilatedPattern, seq_len: int, num_heads: int) -> Iterator[list[int]]:
    """Yield, after each layer, the set of positions that each query has heard of. End when layers add nothing."""
    heard, before = [1 << query for query in range(seq_len)], None
    while heard != before:
        before, heard = heard, list(heard)
        for branch, (w, r) in enumerate(pattern.branches):
            for start in range(0, seq_len, w):
                for phase in phases_read(pattern, branch, num_heads):
                    rows, known = range(start + phase, min(start + w, seq_len), r), 0
                    for query in rows:
                        known |= before[query]
                        heard[query] |= known
                    for query in () if pattern.is_causal else rows:
                        heard[query] |= known
        yield heard


def some_queries(
    pattern: DilatedPattern, seq_len: int, num_heads: int, queries: Collection[int]
) -> Iterator[list[int]]:
    """The same as `every_query`, for these queries only, as the number of positions in each set."""
    sets, height = _Sets(), (seq_len - 1).bit_length()
    branches, there = _branches(sets, pattern, seq_len, num_heads), sets.of(range(seq_len), height)
    heard, before = [sets.of(range(query, query + 1), height) for query in queries], None
    while heard != before:
        before, heard = heard, []
        for node in before:
            sets_heard = (sets.common(branch.heard(node, height), there) for branch in branches)
            heard.append(reduce(sets.union, sets_heard, node))
        yield [sets.count(node, height) for node in heard]


def phases_read(pattern: DilatedPattern, branch: int, num_heads: int) -> set[int]:
    found = {pattern.phase_of(branch, head, num_heads) for head in pattern.heads_of(branch, num_heads)}
    return {phase for phase in found if phase is not None}


def _branches(sets: _Sets, pattern: DilatedPattern, n: int, num_heads: int) -> list[_Branch]:
    """The branches that connect positions. A rate of at least w connects none: no phase has two rows."""
    found = []
    for branch, (w, r) in enumerate(pattern.branches):
        segment, rate = (min(w, n) - 1).bit_length(), (r - 1).bit_length()
        if rate < segment:
            phases = phases_read(pattern, branch, num_heads)
            read = sets.of(range(min(phases), max(phases) + 1), rate)  # no rule leaves out a phase in between
            found.append(_Branch(sets, segment, rate, read, is_causal=pattern.is_causal))
    return found
