"""Computes which positions can influence a query ("it has heard of them") after some layers, exactly.

Heads are mixed between layers, so a layer reads the phases of all its heads. Some queries are followed back through the
layers. A set of positions is an integer with a bit for each position, so a step for all positions is a few shifts.
"""

from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

from ..pattern import DilatedPattern

LONGEST = 10**8  # positions
# positions; in a longer sequence fewer of the late queries are followed, since each takes long
MANY = 2**20


class Reach(NamedTuple):
    """How far a stack of layers carries."""

    # A query has heard of a share of the positions that it may see. For each layer, the share of the query that has
    # heard least by then.
    shares: tuple[float, ...]
    worst: int  # the query with the least share after the last layer
    num_followed: int  # queries

    def layers_for(self, share: float) -> int | None:
        """The least number of layers after which every followed query has heard of `share`, or None."""
        for layers, reached in enumerate(self.shares, start=1):
            if reached >= share:
                return layers
        return None


def reach(pattern: DilatedPattern, seq_len: int, num_heads: int, num_layers: int) -> Reach:
    """Follow some queries, those of `queries_to_follow`, through the layers. ValueError beyond LONGEST positions."""
    if seq_len > LONGEST:
        raise ValueError(f"up to {LONGEST:,} positions can be followed, got {seq_len:,}")
    queries = queries_to_follow(pattern, seq_len, num_heads)
    shares_by_query = [_shares(pattern, seq_len, num_heads, num_layers, query) for query in queries]
    by_layer = [min(shares) for shares in zip(*shares_by_query, strict=True)]
    last = [shares[-1] for shares in shares_by_query]
    return Reach(tuple(by_layer), queries[last.index(min(last))], len(queries))


def _shares(
    pattern: DilatedPattern, seq_len: int, num_heads: int, num_layers: int, query: int
) -> list[float]:
    num_visible = query + 1 if pattern.is_causal else seq_len
    heard = 1 << query
    shares: list[float] = []
    for _ in range(num_layers):
        before, heard = heard, heard_in_a_layer(pattern, num_visible, num_heads, heard)
        shares.append(heard.bit_count() / num_visible)
        if heard == before:
            break
    return shares + [shares[-1]] * (num_layers - len(shares))  # further layers add nothing


def heard_in_a_layer(
    pattern: DilatedPattern, num_positions: int, num_heads: int, queries: int
) -> int:
    """The queries themselves, and the keys that they see in some branch: sets of the first `num_positions`."""
    found = queries
    for branch, (length, rate) in enumerate(pattern.branches):
        length = min(length, num_positions)
        phases = phases_read(pattern, branch, num_heads)
        rows = queries & _rows_read(frozenset(phases), length, rate, num_positions)
        # Each query sees the rows of its phase that lie before it in its segment; if not causal, those behind it too.
        found |= _spread(rows, length, rate, num_positions, is_back=True)
        if not pattern.is_causal:
            found |= _spread(rows, length, rate, num_positions, is_back=False)
    return found


def _spread(rows: int, length: int, rate: int, num_positions: int, *, is_back: bool) -> int:
    """All positions of the rows' segments that lie whole multiples of `rate` before (or behind) one of the rows."""
    distance = rate
    while distance < length:
        # those with room before them for `distance`
        places = _places(length, distance, num_positions)
        if is_back:
            rows |= (rows & places) >> distance
        else:
            rows |= rows << distance & places
        distance *= 2
    return rows


@lru_cache(maxsize=64)
def _rows_read(phases: frozenset[int], length: int, rate: int, num_positions: int) -> int:
    """The positions of these phases. A phase counts from the start of its segment, which the rate need not divide."""
    in_segment = _periodic(_bits(phases), rate, length)
    return _periodic(in_segment, length, num_positions)


@lru_cache(maxsize=64)
def _places(length: int, distance: int, num_positions: int) -> int:
    """The positions that lie at least `distance` behind the start of their segment."""
    return _periodic((1 << length) - (1 << distance), length, num_positions)


def _periodic(positions: int, period: int, num_positions: int) -> int:
    """A set within one period, repeated up to `num_positions`."""
    while period < num_positions:
        positions |= positions << period
        period *= 2
    return positions & ((1 << num_positions) - 1)


def _bits(positions: Iterable[int]) -> int:
    return sum(1 << position for position in positions)


def queries_to_follow(pattern: DilatedPattern, seq_len: int, num_heads: int) -> list[int]:
    """The queries that may have heard of least: those at places 0 and `num_heads` of the first and the last segments.

    A query at place 0 hears of earlier segments only by wider branches. Place `num_heads` may be in a phase that no
    head reads. For an early query each missing position is a larger share. The last segments may be shorter.
    """
    shortest = min(pattern.segment_lengths)
    starts = {0, max(0, (seq_len - 1) // shortest - 1) * shortest}
    for length in pattern.segment_lengths:
        starts.add(length)
        if seq_len <= MANY:
            last = (seq_len - 1) // length * length
            starts |= {last, last + shortest}
    queries = {start + place for start in starts for place in (0, num_heads)} | {seq_len - 1}
    return sorted(query for query in queries if query < seq_len)


def phases_read(pattern: DilatedPattern, branch: int, num_heads: int) -> set[int]:
    phases = {
        pattern.phase_of(branch, head, num_heads) for head in pattern.heads_of(branch, num_heads)
    }
    return {phase for phase in phases if phase is not None}
