"""Finds which queries see the zero rows of torchscale's padding, and where it moves output rows. Integers only.

torchscale (microsoft/torchscale, component/dilated_attention.py) cuts a sequence of L positions into segments of
w = min(segment_length, L). It fills up the last segment to w with zero rows, and then each segment to a multiple of r.
So a query sees m = ceil(w / r) rows of its phase. A zero row has score 0 and value 0, and takes part in the softmax.
(Causal patterns hide zero rows: they come last.)

A branch is called *misaligned* here if r does not divide w and there are several segments. Each segment then has w
positions but takes m * r places in the output. The rows of segment i come out i * (m * r - w) positions later; rows
beyond L are lost. The places between hold the output of a query of zeros: the sum of its phase's values, divided by m.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ...pattern import Branch
from ...plan.sharding import Shard, Span, first_rows


class ZeroKeys(NamedTuple):
    """The queries at these positions see `num_zeros` zero rows in these heads."""

    queries: range
    heads: range
    num_zeros: int


class ZeroQuery(NamedTuple):
    """A place of a misaligned branch's output that has no query. It holds the sum of the values at `rows`, over m."""

    position: int
    rows: range
    heads: range


class Move(NamedTuple):
    """Local rows of one rank that come out as local rows of another rank, or of the same."""

    source_rank: int
    source_row: int
    target_rank: int
    target_row: int
    num_rows: int

    def back(self) -> "Move":
        return Move(
            self.target_rank, self.target_row, self.source_rank, self.source_row, self.num_rows
        )


def is_misaligned(branch: Branch, length: int) -> bool:
    """Whether rows of a sequence of this length come out at other positions."""
    return branch.segment_length % branch.dilation_rate != 0 and length > branch.segment_length


def heads_of_phases(num_heads: int, rate: int) -> list[range]:
    """The query heads that read each phase under the blocked rule; the last phases may have none."""
    block = -(-num_heads // rate)
    return [range(min(s * block, num_heads), min((s + 1) * block, num_heads)) for s in range(rate)]


def zero_keys(branch: Branch, num_heads: int, length: int, positions: range) -> Iterator[ZeroKeys]:
    """The zero keys that queries at consecutive positions see. The branch is not causal."""
    w, r = min(branch.segment_length, length), branch.dilation_rate
    num_seen = -(-w // r)
    segment = positions.start // w
    if w % r == 0:  # only the last segment can have zero rows
        segment = max(segment, length // w)
    for start in range(segment * w, positions.stop, w):
        num_rows = min(w, length - start)
        stop = min(start + num_rows, positions.stop)
        for s, heads in enumerate(heads_of_phases(num_heads, r)[:num_rows]):
            num_zeros = num_seen - -(-(num_rows - s) // r)
            # queries before these positions
            num_before = max(0, -(-(positions.start - start - s) // r))
            queries = range(start + s + num_before * r, stop, r)
            if num_zeros and heads and queries:
                yield ZeroKeys(queries, heads, num_zeros)


def zero_queries(branch: Branch, num_heads: int, length: int) -> Iterator[ZeroQuery]:
    """The zero queries of a misaligned branch, in order. There are none if m = 1: those places stay empty."""
    w, r, _ = branch
    num_seen = -(-w // r)
    # lse = log 1 = 0, which torchscale takes for "no key"
    if not is_misaligned(branch, length) or num_seen == 1:
        return
    heads_of_phase = heads_of_phases(num_heads, r)
    for segment, start in enumerate(range(0, length, num_seen * r)):
        segment_stop = min((segment + 1) * w, length)
        for s in range(w % r, r):
            position = start + (num_seen - 1) * r + s
            if heads_of_phase[s] and position < length:
                yield ZeroQuery(
                    position, range(segment * w + s, segment_stop, r), heads_of_phase[s]
                )


def moves(branch: Branch, shards: Sequence[Shard], length: int) -> list[Move]:
    """Where the rows of a misaligned branch come out, for all ranks. Every rank makes the same list."""
    spans = []  # of all ranks
    for rank, shard in enumerate(shards):
        for row, span in zip(first_rows(shard), shard, strict=False):
            spans.append((span, rank, row))
    spans.sort()
    starts = [span.start for span, _, _ in spans]
    all_moves = []
    for target_span, target_rank, target_row in spans:
        for place, source, num_rows in _sources(branch, target_span, length):
            row = target_row + place - target_span.start
            while num_rows:
                source_span, source_rank, source_row = spans[bisect_right(starts, source) - 1]
                num_here = min(num_rows, source_span.stop - source)
                source_first = source_row + source - source_span.start
                all_moves.append(Move(source_rank, source_first, target_rank, row, num_here))
                source += num_here
                row += num_here
                num_rows -= num_here
    return all_moves


def _sources(branch: Branch, span: Span, length: int) -> Iterator[tuple[int, int, int]]:
    """(target, source, number) of the rows that come out in a span."""
    w, r = min(branch.segment_length, length), branch.dilation_rate
    num_places = -(-w // r) * r  # that a segment takes in the output
    for segment in range(span.start // num_places, -(-span.stop // num_places)):
        segment_start = segment * num_places
        start = max(span.start, segment_start)
        stop = min(span.stop, segment_start + w)
        if start < stop:
            yield start, segment * w + start - segment_start, stop - start
