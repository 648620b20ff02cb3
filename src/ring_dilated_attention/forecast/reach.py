"""Computes exactly which positions can influence a query after some layers: those that the query "has heard of".

In one layer a query hears of the keys that it attends to. In the next layer it also hears of what those keys have heard
of. So each query is followed back through the layers. Its set of positions begins with the query itself. Each layer
adds the keys that the positions in the set attend to.

Each head reads only every r-th position of a segment (r is the dilation rate), and heads begin at different positions.
But heads are mixed between layers, so a layer adds what any head reads.

A set is stored as a binary tree. A node is a set of 2**h positions, and its two children are its halves. Equal sets
share one node. If lengths and rates are powers of two, most segments look alike. So a trillion positions need hardly
more nodes than a million.

To find the keys that a set of queries attends to in a branch, the set is moved by 1, 2, 4, ... times the dilation rate,
one move after the other. After each move the moved set is united with the set before the move. Nothing moves over the
border of a segment. A sliding window has no borders. Its moves in one direction add up to the distance from a query to
the farthest key in the window.
"""

from collections.abc import Iterator, Sequence
from functools import cache
from itertools import islice
from typing import NamedTuple

from ..pattern import DilatedPattern
from ..plan.sight import block_length

NONE, ALL = 0, 1  # the nodes of the empty set and of the set of all positions, at every height


class _Sets:
    """Sets of 2**height positions, as nodes of binary trees. A node does not know its height; the caller gives it."""

    def __init__(self) -> None:
        self.halves = [(NONE, NONE), (ALL, ALL)]
        self.nodes = {pair: node for node, pair in enumerate(self.halves)}
        self.merged = cache(self._merged)
        self.count = cache(self._count)
        self.moved = cache(self._moved)

    def join(self, first: int, second: int) -> int:
        """The node whose two halves are the nodes `first` and `second`."""
        node = self.nodes.setdefault((first, second), len(self.halves))
        if node == len(self.halves):
            self.halves.append((first, second))
        return node

    def of(self, start: int, stop: int, height: int) -> int:
        """The set of the positions from `start` to `stop` - 1. Positions outside 0 to 2**height - 1 are left out."""
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
        return self.count(first, height - 1) + self.count(second, height - 1)

    def _moved(self, a: int, neighbour: int, height: int, move: "_Move") -> int:
        """Move two adjacent sets, `a` and `neighbour`. Returns the positions that then lie where `a` was.

        neighbour: the set of the next 2**height positions, on the side from which positions move towards `a`.
        """
        if height >= move.segment:
            neighbour = NONE  # nothing moves over the border of a segment
        if a == neighbour and a in (NONE, ALL):
            return a
        if height <= move.distance:
            return neighbour
        first, second = self.halves[a]
        before, after = self.halves[neighbour]
        # Find the neighbour of each half of `a`.
        neighbours = second, before
        if move.is_up:
            neighbours = after, first
        return self.join(
            self.moved(first, neighbours[0], height - 1, move),
            self.moved(second, neighbours[1], height - 1, move),
        )


class _Move(NamedTuple):
    """A move of all positions of a set by 2**distance, up or down. Segments have 2**segment positions. A position that
    would leave its segment is dropped."""

    distance: int
    segment: int
    is_up: bool


class _Branch(NamedTuple):
    """A branch: the positions that its heads read, and the moves that turn a set of queries into the set of keys that
    the queries attend to."""

    read: int  # the set of positions that heads read
    moves: list[_Move]


def reach(
    pattern: DilatedPattern, seq_len: int, num_heads: int, num_layers: int
) -> tuple[float, ...]:
    """For each layer, the smallest share of positions that any query has heard of.

    A share of 0.25 means: some query has heard of only a quarter of all positions, or, if the pattern is causal, of the
    positions up to the query. Only the queries from `queries_to_follow` are examined.

    Raises ValueError if a rate is not a power of two, or if a segment or window is shorter than the sequence and its
    length is not a power of two. For a window that is not causal, half its length is checked.
    """
    for branch in pattern.branches:
        length = block_length(branch, is_causal=pattern.is_causal)
        if (length < seq_len and length.bit_count() > 1) or branch.dilation_rate.bit_count() > 1:
            raise ValueError(
                f"lengths and rates must be powers of two, got {branch}; only a segment of the whole sequence may "
                "have any length"
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
    """Yield, after each layer, how many positions each query has heard of. End when a layer adds nothing."""
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
            # A head reads at most one position of a segment, so a query attends only to itself.
            return _Branch(NONE, [])
        farthest = 2**segment - 2**rate
        heads = pattern.heads_of(number, num_heads)
        phases = [pattern.phase_of(number, head, num_heads) or 0 for head in heads]
        # A phase is a position modulo the dilation rate 2**rate. Under every phase rule, heads read consecutive phases.
        # So make the set of these phases, and repeat the set every 2**rate positions.
        read = sets.of(min(phases), max(phases) + 1, rate)
        for _ in range(rate, height):
            read = sets.join(read, read)
    # Collect the moves. Moves by 1, 2, 4, ... times the dilation rate, one after the other, reach every multiple of the
    # dilation rate up to `farthest`.
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
    """Candidates for the query that has heard of the smallest share of positions. A place is an index in a segment,
    from 0.

    - Places 0 and `num_heads` of several segments. A query at place 0 hears of earlier segments only by wider branches.
      The position at place `num_heads` may be one that no head reads.
    - The first segments are tried, because a causal query there can hear of few positions. So each position that it
      misses lowers its share by more than in later segments. The last segments are tried, because they may be shorter.
    - With a window of w positions, also places w - 2 and w - 1 of the same segments. Through a causal window,
      only the first w - 1 queries of a segment attend to keys before the segment.
    - With a window, also the last positions of the sequence, because one of them may be read by no head.
    """
    shortest = min(branch.segment_length for branch in pattern.branches)
    starts = {0, max(0, (seq_len - 1) // shortest - 1) * shortest}
    for length in pattern.segment_lengths:
        last = (seq_len - 1) // length * length
        starts |= {length, last, last + shortest}
    queries = {start + place for start in starts for place in (0, num_heads)} | {seq_len - 1}
    if pattern.window is not None:
        queries |= {start + pattern.window - place for start in starts for place in (1, 2)}
        queries |= set(range(max(seq_len - num_heads - 2, 0), seq_len))  # the last queries
    return sorted(query for query in queries if query < seq_len)
