"""Computes which positions can influence a query ("it has heard of them") after some layers, exactly.

Heads are mixed between layers, so a layer reads the phases of all its heads. Some queries are followed back through the
layers. A set of positions is a binary tree: its halves are sets of half as many positions, and equal sets are the same
node. If lengths and rates are powers of two, most segments look alike. So a trillion positions need hardly more nodes
than a million, and no node is computed twice. (Sets as integers with a bit for each position took a minute and more
from 16 million positions on.)
"""

from collections.abc import Iterator, Sequence
from functools import cache

from ..pattern import DilatedPattern
from ..plan.sight import block_length

NONE, ALL = 0, 1  # the nodes of no positions and of all positions, at every height


class _Sets:
    """Sets of 2**height positions as nodes. A node does not know its height; the caller gives it."""

    def __init__(self) -> None:
        self.halves = [(NONE, NONE), (ALL, ALL)]
        self.nodes = {pair: node for node, pair in enumerate(self.halves)}
        self.union = cache(self._union)
        self.common = cache(self._common)
        self.count = cache(self._count)

    def join(self, first: int, second: int) -> int:
        """The node with these halves."""
        node = self.nodes.setdefault((first, second), len(self.halves))
        if node == len(self.halves):
            self.halves.append((first, second))
        return node

    def of(self, positions: range, height: int) -> int:
        """The set of consecutive positions."""
        if not positions:
            return NONE
        if positions == range(2**height):
            return ALL
        half = 2 ** (height - 1)
        first = range(positions.start, min(positions.stop, half))
        second = range(max(positions.start - half, 0), positions.stop - half)
        return self.join(self.of(first, height - 1), self.of(second, height - 1))

    def _union(self, a: int, b: int) -> int:
        if ALL in (a, b):
            return ALL
        if a == b or b == NONE:
            return a
        if a == NONE:
            return b
        (first, second), (third, fourth) = self.halves[a], self.halves[b]
        return self.join(self.union(first, third), self.union(second, fourth))

    def _common(self, a: int, b: int) -> int:
        if NONE in (a, b):
            return NONE
        if a == b or b == ALL:
            return a
        if a == ALL:
            return b
        (first, second), (third, fourth) = self.halves[a], self.halves[b]
        return self.join(self.common(first, third), self.common(second, fourth))

    def _count(self, a: int, height: int) -> int:
        if a in (NONE, ALL):
            return a * 2**height
        first, second = self.halves[a]
        return self.count(first, height - 1) + self.count(second, height - 1)


class _Branch:
    """A branch of segments, followed back: from the positions of queries to the positions of the keys that they see.

    segment, rate: the heights of trees of w and of r positions. read: the set of phases that heads read.
    """

    def __init__(self, sets: _Sets, segment: int, rate: int, read: int, *, is_causal: bool) -> None:
        self.sets = sets
        self.segment = segment
        self.rate = rate
        self.read = read
        self.is_causal = is_causal
        self.heard = cache(self._heard)
        self.phases = cache(self._phases)
        self.filled = cache(self._filled)

    def _heard(self, a: int, height: int) -> int:
        """The keys that the queries in `a` see through this branch. `a` covers one segment or more."""
        if height == self.segment:
            later = NONE if self.is_causal else self.phases(a, height)
            return self.filled(a, height, later)
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
        return self.sets.join(
            self.filled(first, height - 1, before), self.filled(second, height - 1, later)
        )


class _Window:
    """A sliding window, followed back. It is cut into blocks, as in `plan/sight.py`: of each block are seen its own
    queries' window, that of the queries in the block after, and, if it is centred, of those in the block before.

    block: the height of a tree of a block's positions.
    """

    def __init__(self, sets: _Sets, block: int, *, is_causal: bool) -> None:
        self.sets = sets
        self.block = block
        self.is_causal = is_causal
        self.seen = cache(self._seen)
        self.ends = cache(self._ends)

    def heard(self, a: int, height: int) -> int:
        """The keys that the queries in `a` see."""
        return self.seen(NONE, a, NONE, height)

    def _seen(self, before: int, a: int, after: int, height: int) -> int:
        """The keys at the places of `a` that are seen by queries there, and in the sets before and after it."""
        if before == a == after == NONE:
            return NONE
        if height > self.block:
            (_, last), (first, second), (following, _) = (
                self.sets.halves[node] for node in (before, a, after)
            )
            return self.sets.join(
                self.seen(last, first, second, height - 1),
                self.seen(first, second, following, height - 1),
            )
        size = 2**self.block
        lowest, highest = self.ends(after, height)[0], self.ends(a, height)[1]
        if self.is_causal:
            keys = self.sets.of(range(highest + 1), height)
            return self.sets.union(keys, self.sets.of(range(lowest + 1, size), height))
        if a != NONE:
            return ALL
        keys = self.sets.of(range(self.ends(before, height)[1] + 1), height)
        return self.sets.union(keys, self.sets.of(range(lowest, size), height))

    def _ends(self, a: int, height: int) -> tuple[int, int]:
        """The lowest and the highest position in `a`; beyond all positions if there is none."""
        size = 2**height
        if a == NONE:
            return size, -1
        if a == ALL:
            return 0, size - 1
        first, second = (self.ends(node, height - 1) for node in self.sets.halves[a])
        half = size // 2
        lowest = first[0] if first[1] >= 0 else half + second[0]
        highest = half + second[1] if second[1] >= 0 else first[1]
        return lowest, highest


def reach(
    pattern: DilatedPattern, seq_len: int, num_heads: int, num_layers: int
) -> tuple[float, ...]:
    """For each layer, the least share of its visible positions that any followed query has heard of by then. Followed
    are those of `queries_to_follow`. Raises ValueError if a rate, or the length
    of a segment or a window shorter than the sequence, is no power of two."""
    for branch in pattern.branches:
        length = block_length(branch, is_causal=pattern.is_causal)
        if (length < seq_len and length.bit_count() > 1) or branch.dilation_rate.bit_count() > 1:
            raise ValueError(
                f"only powers of two can be followed, got {branch}; the longest w may be the sequence"
            )
    queries = queries_to_follow(pattern, seq_len, num_heads)
    layers = heard_by_layer(pattern, seq_len, num_heads, queries)
    least: list[float] = []
    for _, counts in zip(range(num_layers), layers, strict=False):
        shares = []
        for query, count in zip(queries, counts, strict=True):
            num_visible = query + 1 if pattern.is_causal else seq_len
            shares.append(count / num_visible)
        least.append(min(shares))
    least += [least[-1]] * (num_layers - len(least))  # further layers add nothing
    return tuple(least)


def heard_by_layer(
    pattern: DilatedPattern, seq_len: int, num_heads: int, queries: Sequence[int]
) -> Iterator[list[int]]:
    """Yield, after each layer, how many positions each query has heard of. End when layers add nothing."""
    sets = _Sets()
    height = (seq_len - 1).bit_length()
    whole = sets.of(range(seq_len), height)
    branches = _branches(sets, pattern, seq_len, num_heads)
    heard = [sets.of(range(query, query + 1), height) for query in queries]
    before: list[int] = []
    while heard != before:
        before, heard = heard, []
        for node in before:
            reached = node
            for branch in branches:
                keys = sets.common(branch.heard(node, height), whole)
                reached = sets.union(reached, keys)
            heard.append(reached)
        yield [sets.count(node, height) for node in heard]


def _branches(
    sets: _Sets, pattern: DilatedPattern, seq_len: int, num_heads: int
) -> list[_Branch | _Window]:
    """The branches that connect positions. A rate of at least w connects none: no phase has two rows."""
    branches: list[_Branch | _Window] = []
    for number, (length, rate, is_window) in enumerate(pattern.branches):
        if is_window:
            size = block_length(pattern.branches[number], is_causal=pattern.is_causal)
            height = (min(size, seq_len) - 1).bit_length()
            if length > 1:
                branches.append(_Window(sets, height, is_causal=pattern.is_causal))
            continue
        segment_height = (min(length, seq_len) - 1).bit_length()
        rate_height = (rate - 1).bit_length()
        if rate_height < segment_height:
            phases = phases_read(pattern, number, num_heads)
            # No rule leaves out a phase in between.
            read = sets.of(range(min(phases), max(phases) + 1), rate_height)
            branch = _Branch(sets, segment_height, rate_height, read, is_causal=pattern.is_causal)
            branches.append(branch)
    return branches


def queries_to_follow(pattern: DilatedPattern, seq_len: int, num_heads: int) -> list[int]:
    """The queries that may have heard of least: those at places 0 and `num_heads` of the first and the last segments.

    A query at place 0 hears of earlier segments only by wider branches. Place `num_heads` may be in a phase that no
    head reads. For an early query each missing position is a larger share. The last segments may be shorter. A window
    hides how little a segment shows up to the window's length after the segment's start, and off the phases at the end.
    """
    shortest = min(branch.segment_length for branch in pattern.branches)
    starts = {0, max(0, (seq_len - 1) // shortest - 1) * shortest}
    for length in pattern.segment_lengths:
        last = (seq_len - 1) // length * length
        starts |= {length, last, last + shortest}
    queries = {start + place for start in starts for place in (0, num_heads)} | {seq_len - 1}
    if pattern.window is not None:
        queries |= {start + pattern.window - place for start in starts for place in (1, 2)}
        queries |= set(range(max(seq_len - num_heads - 2, 0), seq_len))  # one is off the phases
    return sorted(query for query in queries if query < seq_len)


def phases_read(pattern: DilatedPattern, branch: int, num_heads: int) -> set[int]:
    phases = {
        pattern.phase_of(branch, head, num_heads) for head in pattern.heads_of(branch, num_heads)
    }
    return {phase for phase in phases if phase is not None}
