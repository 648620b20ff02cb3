"""Computes which positions can influence a query ("it has heard of them") after some layers, exactly.

Heads are mixed between layers, so a layer reads the phases of all its heads. Some queries are followed back through the
layers. A set of positions is a binary tree: the halves of a node are sets of half as many positions, and equal sets are
one node. If lengths and rates are powers of two, most segments look alike. So a trillion positions need hardly more
nodes than a million, and no node is computed twice. (Sets as integers with a bit for each position took a minute and
more from 16 million positions on.)

A branch takes a set of queries to the set of keys that they see. To do so it moves the set by 1, 2, 4, ... times the
rate, one move after the other, and joins the moved set to the set before the move. Nothing moves over the border of a
segment. A window has no borders; its moves add up to its width.
"""

from collections.abc import Iterator, Sequence
from functools import cache
from itertools import islice
from typing import NamedTuple

from ..pattern import DilatedPattern
from ..plan.sight import block_length

NONE, ALL = 0, 1  # the nodes of no positions and of all positions, at every height


class _Sets:
    """Sets of 2**height positions as nodes. A node does not know its height; the caller gives it."""

    def __init__(self) -> None:
        self.halves = [(NONE, NONE), (ALL, ALL)]
        self.nodes = {pair: node for node, pair in enumerate(self.halves)}
        self.merged = cache(self._merged)
        self.count = cache(self._count)
        self.moved = cache(self._moved)

    def join(self, first: int, second: int) -> int:
        """The node with these halves."""
        node = self.nodes.setdefault((first, second), len(self.halves))
        if node == len(self.halves):
            self.halves.append((first, second))
        return node

    def of(self, start: int, stop: int, height: int) -> int:
        """The set of the positions from `start` to `stop` - 1. Those outside 0 to 2**height - 1 are left out."""
        size = 2**height
        if stop <= 0 or start >= size:
            return NONE
        if start <= 0 and stop >= size:
            return ALL
        half = size // 2
        return self.join(
            self.of(start, stop, height - 1), self.of(start - half, stop - half, height - 1)
        )

    def _merged(self, a: int, b: int, stronger: int) -> int:
        """The union of two sets if `stronger` is ALL, or their intersection if it is NONE."""
        if stronger in (a, b):
            return stronger
        if a == b or b in (NONE, ALL):
            return a
        if a in (NONE, ALL):
            return b
        first, second = self.halves[a]
        third, fourth = self.halves[b]
        return self.join(self.merged(first, third, stronger), self.merged(second, fourth, stronger))

    def _count(self, a: int, height: int) -> int:
        if a in (NONE, ALL):
            return a * 2**height
        first, second = self.halves[a]
        in_first = self.count(first, height - 1)
        in_second = self.count(second, height - 1)
        return in_first + in_second

    def _moved(self, a: int, neighbour: int, height: int, move: "_Move") -> int:
        """The positions that a move brings into the range of `a`, from `a` itself and from `neighbour`.

        neighbour: the set of the positions beside this range, on the side from which positions come.
        """
        if height >= move.segment:
            neighbour = NONE  # nothing moves over the border of a segment
        if a == neighbour and a in (NONE, ALL):
            return a
        if height <= move.distance:
            return neighbour
        first, second = self.halves[a]
        before, after = self.halves[neighbour]
        # the neighbour of each half
        neighbours = second, before
        if move.is_up:
            neighbours = after, first
        return self.join(
            self.moved(first, neighbours[0], height - 1, move),
            self.moved(second, neighbours[1], height - 1, move),
        )


class _Move(NamedTuple):
    """Every position goes 2**distance up or down, if it stays within its segment of 2**segment positions."""

    distance: int
    segment: int
    is_up: bool


class _Branch(NamedTuple):
    """A branch as moves: they take the queries that heads read to all keys that these queries see."""

    read: int  # the set of positions that heads read
    moves: list[_Move]


def reach(
    pattern: DilatedPattern, seq_len: int, num_heads: int, num_layers: int
) -> tuple[float, ...]:
    """For each layer, the least share of its visible positions that a query of `queries_to_follow` has heard of.

    Raises ValueError if a rate is no power of two, or the length of a segment or window shorter than the sequence.
    """
    for branch in pattern.branches:
        length = block_length(branch, is_causal=pattern.is_causal)
        if (length < seq_len and length.bit_count() > 1) or branch.dilation_rate.bit_count() > 1:
            raise ValueError(
                f"only powers of two can be followed, got {branch}; a w of the whole sequence may be any number"
            )
    queries = queries_to_follow(pattern, seq_len, num_heads)
    least: list[float] = []
    for counts in islice(heard_by_layer(pattern, seq_len, num_heads, queries), num_layers):
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
    whole = sets.of(0, seq_len, height)
    branches = [
        _branch(sets, pattern, number, seq_len, num_heads)
        for number in range(len(pattern.branches))
    ]
    heard = [sets.of(query, query + 1, height) for query in queries]
    before: list[int] = []
    while heard != before:
        before = heard
        heard = []
        for node in before:
            reached = node
            for branch in branches:
                seen = sets.merged(node, branch.read, NONE)
                for move in branch.moves:
                    seen = sets.merged(seen, sets.moved(seen, NONE, height, move), ALL)
                reached = sets.merged(reached, sets.merged(seen, whole, NONE), ALL)
            heard.append(reached)
        yield [sets.count(node, height) for node in heard]


def _branch(
    sets: _Sets, pattern: DilatedPattern, number: int, seq_len: int, num_heads: int
) -> _Branch:
    branch = pattern.branches[number]
    height = (seq_len - 1).bit_length()
    if branch.is_window:
        segment = height
        rate = 0
        read = ALL
        farthest = branch.window_reach(is_causal=pattern.is_causal)
        if farthest >= seq_len:
            farthest = 2**height - 1
    else:
        segment = (min(branch.segment_length, seq_len) - 1).bit_length()
        rate = (branch.dilation_rate - 1).bit_length()
        if rate >= segment:
            return _Branch(NONE, [])  # each phase has at most one row of a segment
        farthest = 2**segment - 2**rate
        heads = pattern.heads_of(number, num_heads)
        phases = [pattern.phase_of(number, head, num_heads) or 0 for head in heads]
        # Under every phase rule the phases that heads read are consecutive.
        read = sets.of(min(phases), max(phases) + 1, rate)
        for _ in range(rate, height):
            read = sets.join(read, read)
    # Moves by 1, 2, 4, ... times the rate, one after the other, reach every multiple of the rate.
    distances = []
    covered = 0
    while covered < farthest:
        distance = min(covered + 2**rate, farthest - covered)
        distances.append(distance.bit_length() - 1)
        covered += distance
    moves = [_Move(distance, segment, is_up=False) for distance in distances]
    if not pattern.is_causal:
        moves += [move._replace(is_up=True) for move in moves]
    return _Branch(read, moves)


def queries_to_follow(pattern: DilatedPattern, seq_len: int, num_heads: int) -> list[int]:
    """The queries that may have heard of least: those at places 0 and `num_heads` of the first and the last segments.

    A query at place 0 hears of earlier segments only by wider branches. Place `num_heads` may be in a phase that no
    head reads. For an early query each missing position is a larger share. The last segments may be shorter.

    A window shows keys before a segment's start to queries less than the window's length after it. The last of these
    queries are followed too. So are the last queries of the sequence, of which one is in no phase that heads read.
    """
    shortest = min(branch.segment_length for branch in pattern.branches)
    starts = {0, max(0, (seq_len - 1) // shortest - 1) * shortest}
    for length in pattern.segment_lengths:
        last = (seq_len - 1) // length * length
        starts |= {length, last, last + shortest}
    queries = {start + place for start in starts for place in (0, num_heads)} | {seq_len - 1}
    if pattern.window is not None:
        queries |= {start + pattern.window - place for start in starts for place in (1, 2)}
        queries |= set(range(max(seq_len - num_heads - 2, 0), seq_len))  # see above
    return sorted(query for query in queries if query < seq_len)
