"""Finds which queries see the zero rows of torchscale's padding, and where it moves output rows. Integers only.

torchscale (microsoft/torchscale, component/dilated_attention.py) cuts a document of L positions into segments of
w = min(segment_length, L). It fills up the last segment to w with zero rows, and then each segment to a multiple of r.
So a query sees m = ceil(w / r) rows of its phase. A zero row has score 0 and value 0, and takes part in the softmax.
(Causal patterns hide zero rows: they come last.)

A branch is called *misaligned* here if r does not divide w and there are several segments. Each segment then has w
positions but takes m * r places in the output. The rows of segment i come out i * (m * r - w) positions later; rows
beyond L are lost. The places between hold the output of a query of zeros: the sum of its phase's values, divided by m.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from ...pattern import Branch
from ...plan.sharding import Shard, Span, first_rows


class ZeroKeys(NamedTuple):
    """These queries of these heads see `num_zeros` zero rows. A query is a position in its document."""

    queries: range
    heads: range
    num_zeros: int


class ZeroQuery(NamedTuple):
    """A place of a misaligned branch's output that has no query. It holds the sum of the values at `rows`, over m."""

    position: int  # this and `rows` count from the start of the document
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
        return Move(self.target_rank, self.target_row, self.source_rank, self.source_row, self.num_rows)


def is_misaligned(branch: Branch, length: int) -> bool:
    """Whether rows of a document of this length come out at other positions."""
    return branch.segment_length % branch.dilation_rate != 0 and length > branch.segment_length


def heads_of_phases(num_heads: int, rate: int) -> list[range]:
    """The query heads that read each phase under the blocked rule; the last phases may have none."""
    block = -(-num_heads // rate)
    return [range(min(s * block, num_heads), min((s + 1) * block, num_heads)) for s in range(rate)]


def zero_keys(branch: Branch, num_heads: int, length: int, own: range) -> Iterator[ZeroKeys]:
    """The zero keys that the consecutive queries `own` of a document see in one branch that is not causal."""
    w, r = min(branch.segment_length, length), branch.dilation_rate
    num_seen = -(-w // r)
    # Where r divides w only the last segment can have zero rows.
    first = own.start // w if w % r else max(own.start // w, length // w)
    for start in range(first * w, own.stop, w):
        num_rows = min(w, length - start)
        for s, heads in enumerate(heads_of_phases(num_heads, r)[:num_rows]):
            num_zeros = num_seen - -(-(num_rows - s) // r)
            lo = start + s + max(0, -(-(own.start - start - s) // r)) * r
            queries = range(lo, min(start + num_rows, own.stop), r)
            if num_zeros and heads and queries:
                yield ZeroKeys(queries, heads, num_zeros)


def zero_queries(branch: Branch, num_heads: int, length: int) -> Iterator[ZeroQuery]:
    """The zero queries of a misaligned branch, in order. There are none if m = 1: those places stay empty."""
    w, r = branch
    num_seen = -(-w // r)
    if not is_misaligned(branch, length) or num_seen == 1:  # lse = log 1 = 0, which torchscale takes for "no key"
        return
    for i, start in enumerate(range(0, length, num_seen * r)):
        for s, heads in enumerate(heads_of_phases(num_heads, r)[w % r :], start=w % r):
            position = start + (num_seen - 1) * r + s
            if heads and position < length:
                yield ZeroQuery(position, range(i * w + s, min((i + 1) * w, length), r), heads)


def moves(branch: Branch, shards: Sequence[Shard], documents: Sequence[int]) -> list[Move]:
    """Where the rows of a misaligned branch come out, for all ranks. Every rank makes the same list.

    Args:
        documents: global borders of the packed documents, (0, ..., n).
    """
    owners = sorted(
        (start, stop, rank, row)
        for rank, shard in enumerate(shards)
        for row, (start, stop) in zip(first_rows(shard), shard, strict=False)
    )
    starts = [owner[0] for owner in owners]
    found = []
    for target_start, target_stop, target_rank, target_row in owners:
        for place, source, num_rows in _sources(branch, Span(target_start, target_stop), documents):
            row = target_row + place - target_start
            while num_rows:
                start, stop, rank, first = owners[bisect_right(starts, source) - 1]
                here = min(num_rows, stop - source)
                found.append(Move(rank, first + source - start, target_rank, row, here))
                source, row, num_rows = source + here, row + here, num_rows - here
    return found


def _sources(branch: Branch, span: Span, documents: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """(target, source, number) of the rows that come out in a span, in global positions."""
    for begin, end in pairwise(documents):
        lo, hi = max(begin, span.start) - begin, min(end, span.stop) - begin
        if lo >= hi:
            continue
        w, r = min(branch.segment_length, end - begin), branch.dilation_rate
        places = -(-w // r) * r  # that a segment takes in the output
        for i in range(lo // places, -(-hi // places)):
            start, stop = max(lo, i * places), min(hi, i * places + w)
            if start < stop:
                yield begin + start, begin + i * w + start - i * places, stop - start
