"""What a job computes and sends, in closed form, without a plan: for any number of ranks. Pure integers, no torch.

For contiguous shards of equal length L = n / p and one document. In a segment that starts at o, the phase s of a branch
(w, r) has ceil((x - o - s) / r) rows before position x; everything below is sums and differences of such counts.

Each phase of a segment that crosses a border of shards is shared by the ranks with rows of it. What one of them sends
in a forward is, if causal (a line), the rows from o to the end of its own, unless it is the last; and all rows but the
next one's otherwise. In backward the same again, and the gradients of the rows before its own, or of all others. Where
r divides L and L divides w this is, not causal, the (g - 1) * 2 * B * L/r * H * D * itemsize per branch of g = w/L
ranks.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

from ..pattern import DilatedPattern


@dataclass(frozen=True)
class Sent:
    """What ranks send, in units of B * D elements."""

    chunks: int
    gradients: int

    def __add__(self, other: "Sent") -> "Sent":
        return Sent(self.chunks + other.chunks, self.gradients + other.gradients)

    def num_bytes(self, batch: int, head_dim: int, itemsize: int) -> tuple[int, int]:
        """Bytes of a forward and of its backward, which sends the chunks again. Gradients have at least 4 bytes."""
        forward = batch * head_dim * self.chunks * itemsize
        return forward, forward + batch * head_dim * self.gradients * max(itemsize, 4)


def pairs(pattern: DilatedPattern, seq_len: int, num_heads: int) -> int:
    """(query, key) pairs of all heads and branches, with multiplicity, for one batch entry."""
    return sum(branch_pairs(pattern, branch, seq_len, num_heads) for branch in range(len(pattern.branches)))


def branch_pairs(pattern: DilatedPattern, branch: int, seq_len: int, num_heads: int) -> int:
    """Those of one branch, of the heads that run it and the phases that they read."""
    total, (length, rate) = 0, pattern.branches[branch]
    whole, rest = divmod(seq_len, length)
    for head in pattern.heads_of(branch, num_heads):
        phase = pattern.phase_of(branch, head, num_heads)
        assert phase is not None
        for segments, stop in ((whole, length), (1, rest)):
            rows = rows_before(stop, phase, rate)
            total += segments * (rows * (rows + 1) // 2 if pattern.is_causal else rows * rows)
    return total


def sent_by_rank(
    pattern: DilatedPattern, seq_len: int, num_ranks: int, rank: int, num_heads: int, num_kv_heads: int
) -> Sent:
    """What one rank sends."""
    length = _shard_length(seq_len, num_ranks)
    start, stop = rank * length, (rank + 1) * length
    sent = Sent(0, 0)
    for branch in range(len(pattern.branches)):
        for origin, end in straddling_segments(pattern.segment_lengths[branch], seq_len, start, stop):
            segment = Segment(pattern, branch, num_heads, num_kv_heads, origin, end, length)
            sent += segment.sent_from(max(start, origin), min(stop, end), is_causal=pattern.is_causal)
    return sent


def sent_by_all(pattern: DilatedPattern, seq_len: int, num_ranks: int, num_heads: int, num_kv_heads: int) -> Sent:
    """What all ranks send together. Segments of a branch are alike where shards and segments align: one is counted."""
    length = _shard_length(seq_len, num_ranks)
    sent = Sent(0, 0)
    for branch, (w, _) in enumerate(pattern.branches):
        repeats = seq_len // w if w % length == 0 and seq_len % w == 0 else 1
        for start in range(0, seq_len // repeats, length):
            for origin, end in straddling_segments(w, seq_len, start, start + length):
                segment = Segment(pattern, branch, num_heads, num_kv_heads, origin, end, length)
                part = segment.sent_from(max(start, origin), min(start + length, end), is_causal=pattern.is_causal)
                sent += Sent(repeats * part.chunks, repeats * part.gradients)
    return sent


class Segment:
    """Positions origin..end-1 of a branch. Its rows are two for each key/value head and phase that is sent, K and V."""

    def __init__(
        self,
        pattern: DilatedPattern,
        branch: int,
        num_heads: int,
        num_kv_heads: int,
        origin: int,
        end: int,
        shard_length: int,
    ) -> None:
        self.origin, self.end, self.shard_length = origin, end, shard_length
        self.rate = pattern.dilation_rates[branch]
        self.phases = sent_phases(pattern, branch, num_heads, num_kv_heads)

    def rows(self, start: int, stop: int) -> int:
        return sum(2 * heads * self._count(start, stop, phase) for phase, heads in self.phases)

    def shares(self, start: int, stop: int) -> tuple[int, int, int]:
        """Rows before start, from start to stop, and from stop on."""
        return self.rows(self.origin, start), self.rows(start, stop), self.rows(stop, self.end)

    def sent_from(self, start: int, stop: int, *, is_causal: bool) -> Sent:
        """What the rank that owns start..stop-1 sends of this segment."""
        chunks = gradients = 0
        for phase, heads in self.phases:
            before, own, after = (
                2 * heads * self._count(a, b, phase) for a, b in ((self.origin, start), (start, stop), (stop, self.end))
            )
            if not own or not before + after:
                continue
            if is_causal:
                chunks += before + own if after else 0
                gradients += before
            else:
                next_rows = self._next(stop if after else self.origin, phase)
                chunks += before + own + after - 2 * heads * next_rows
                gradients += before + after
        return Sent(chunks, gradients)

    def _next(self, position: int, phase: int) -> int:
        """How many rows of a phase the first rank has that has any from a position on."""
        first = position + (self.origin + phase - position) % self.rate
        shard = first // self.shard_length * self.shard_length
        return self._count(max(shard, self.origin), min(shard + self.shard_length, self.end), phase)

    def _count(self, start: int, stop: int, phase: int) -> int:
        before_stop, before_start = (rows_before(x - self.origin, phase, self.rate) for x in (stop, start))
        return before_stop - before_start


@lru_cache(maxsize=256)
def sent_phases(
    pattern: DilatedPattern, branch: int, num_heads: int, num_kv_heads: int, held: range | None = None
) -> tuple[tuple[int, int], ...]:
    """The phases that are sent, each with the number of key/value heads of which it is."""
    return tuple(
        (group.phase + j * group.phase_step, 1 if group.phase_step else len(group.kv_heads))
        for group in pattern.head_groups(branch, num_heads, num_kv_heads, held)
        for j in range(len(group.query_heads) if group.phase_step else 1)
    )


def rows_before(position: int, phase: int, rate: int) -> int:
    return max(0, -((phase - position) // rate))


def classes(phases: Sequence[int], rate: int, *positions: int) -> Iterator[tuple[int, list[int]]]:
    """Phases that have as many rows before each of these positions: how many phases, and these rows.

    Before x a phase s has x // r rows, and one more if s < x mod r: phases differ only in which of these places they
    stand before.

    Args:
        phases: in ascending order.
    """
    marks = [0, *sorted(bisect_left(phases, x % rate) for x in positions), len(phases)]
    for lo, hi in pairwise(marks):
        if lo < hi:
            yield hi - lo, [rows_before(x, phases[lo], rate) for x in positions]


def straddling_segments(length: int, seq_len: int, start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Segments (start, stop) that hold some of start..stop-1 and other positions: at most the first and the last."""
    for origin in sorted({start - start % length, stop - 1 - (stop - 1) % length}):
        end = min(origin + length, seq_len)
        if origin < start or end > stop:
            yield origin, end


def _shard_length(seq_len: int, num_ranks: int) -> int:
    if seq_len % num_ranks:
        raise ValueError(
            f"{seq_len} positions do not divide among {num_ranks} ranks: {seq_len} mod {num_ranks} = "
            f"{seq_len % num_ranks}. Choose a number of ranks that divides the sequence."
        )
    return seq_len // num_ranks
