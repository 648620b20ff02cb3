"""What a query can have heard of after some layers: followed exactly, at any length. Pure integers, no torch.

From a query back through the branches, layer by layer. Heads are mixed between layers, so a layer has the phases of all
heads. A set of positions is a binary tree: its halves are sets of half as many positions, and equal ones are the same
node. Where lengths and rates are powers of two most segments look alike, so that a trillion positions need hardly more
nodes than a million, and what was done to a node once need not be done again.
"""

from functools import cache
from typing import NamedTuple

from ..pattern import DilatedPattern

QUERIES = 4
NONE, ALL = 0, 1  # the nodes of no positions, and of all, whatever the number


class Reach(NamedTuple):
    """How far a stack carries.

    shares: after each layer, the share of positions that the worst of some queries has heard of, of those that it may.
    """

    shares: tuple[float, ...]

    def layers_for(self, share: float) -> int | None:
        """After how many layers at least so much is in reach, or None."""
        return next((i + 1 for i, reached in enumerate(self.shares) if reached >= share), None)


class _Sets:
    """Sets of 2**height positions as nodes; the height goes with the call."""

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
    """A branch, as it hands on what is heard in each of its segments.

    segment, rate: heights of a segment and of the rows between two of a phase. read: the phases that heads read.
    """

    def __init__(self, sets: _Sets, segment: int, rate: int, read: int, *, is_causal: bool) -> None:
        self.sets, self.segment, self.rate, self.read, self.is_causal = sets, segment, rate, read, is_causal
        self.heard, self.phases, self.filled = cache(self._heard), cache(self._phases), cache(self._filled)

    def _heard(self, a: int, height: int) -> int:
        """What is heard one layer on, of a set of one or more segments."""
        if height == self.segment:
            return self.filled(a, height, NONE if self.is_causal else self.phases(a, height))
        first, second = self.sets.halves[a]
        return self.sets.join(self.heard(first, height - 1), self.heard(second, height - 1))

    def _phases(self, a: int, height: int) -> int:
        """The phases in which a part of a segment hears anything."""
        if height == self.rate:
            return self.sets.common(a, self.read)
        first, second = self.sets.halves[a]
        return self.sets.union(self.phases(first, height - 1), self.phases(second, height - 1))

    def _filled(self, a: int, height: int, later: int) -> int:
        """A part of a segment, of which these phases are heard anywhere behind it too."""
        if height == self.rate:
            return self.sets.union(self.sets.common(a, self.read), later)
        first, second = self.sets.halves[a]
        before = self.sets.union(later, self.phases(second, height - 1))
        return self.sets.join(self.filled(first, height - 1, before), self.filled(second, height - 1, later))


def reach(pattern: DilatedPattern, seq_len: int, num_heads: int, num_layers: int) -> Reach:
    """Follow some queries back through the layers.

    Raises:
        ValueError: for a rate, or a segment shorter than the sequence, that is no power of two.
    """
    n, sets = seq_len, _Sets()
    height = (n - 1).bit_length()
    branches = _branches(sets, pattern, n, num_heads)
    there = sets.of(range(n), height)
    # The last query, and some that stand at odd places of all segments.
    queries = {n - 1 - (i * n) // (2 * QUERIES) - 3 * i for i in range(QUERIES)}
    shares = [1.0] * num_layers
    for query in sorted(x for x in queries if x >= 0):
        heard = sets.of(range(query, query + 1), height)
        for layer in range(num_layers):
            before = heard
            for branch in branches:
                heard = sets.union(heard, sets.common(branch.heard(before, height), there))
            share = sets.count(heard, height) / (query + 1 if pattern.is_causal else n)
            if heard == before:  # further layers add nothing
                shares[layer:] = [min(x, share) for x in shares[layer:]]
                break
            shares[layer] = min(shares[layer], share)
    return Reach(tuple(shares))


def _branches(sets: _Sets, pattern: DilatedPattern, n: int, num_heads: int) -> list[_Branch]:
    """Those that connect positions: of a rate that is a whole segment no phase has two rows."""
    found = []
    for branch, (w, r) in enumerate(pattern.branches):
        segment, rate = (min(w, n) - 1).bit_length(), (r - 1).bit_length()
        if (w < n and w != 2**segment) or r != 2**rate:
            raise ValueError(f"only powers of two can be followed, got w={w}, r={r}; the longest w may be the sequence")
        if rate < segment:
            phases = [pattern.phase_of(branch, head, num_heads) for head in pattern.heads_of(branch, num_heads)]
            there = [phase for phase in phases if phase is not None]
            read = sets.of(range(min(there), max(there) + 1), rate)  # no rule leaves one out in between
            found.append(_Branch(sets, segment, rate, read, is_causal=pattern.is_causal))
    return found
