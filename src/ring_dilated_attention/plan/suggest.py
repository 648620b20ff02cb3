"""Which pattern for a length and a budget, and what each would do. Pure integers but for shares, no torch.

The rule: branches of LongNet's form, segment lengths w_0 * a**i and rates a**i up to the whole length, for ratios a of
2, 4 and 8, and two branches alone (near everything, far one row in r). For each ratio w_0 is the largest power of two
with which the pairs stay in the budget. So near keys are dense and far ones thin out, at one price in pairs.

Rates, and all lengths but the whole, are powers of two: so `reach` can follow what a stack of layers carries.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from ..pattern import DilatedPattern
from .job import Job
from .lockstep import EqualJob, Lockstep, why_not
from .planner import make_plan
from .sharding import default_lengths, make_shards
from .totals import pairs, sent_by_rank

RATIOS = (2, 4, 8)
SHORTEST = 64
MOST_UNEVEN = 16  # ranks of different lengths; of more, shards are taken to be equal
MOST_COUNTED = 2**17  # phases of branches and ranks, counted one by one: half a second's work


class Suggestion(NamedTuple):
    """A pattern, and what was the rule for it."""

    pattern: DilatedPattern
    rule: str


def suggestions(seq_len: int, num_heads: int, most_pairs: float, *, is_causal: bool) -> list[Suggestion]:
    """The patterns of the rule whose pairs, over all heads, are at most `most_pairs`; those with most pairs first."""
    found: dict[DilatedPattern, Suggestion] = {}
    rules = [*((_longnet(ratio), f"LongNet's rule, ratio {ratio}") for ratio in RATIOS), (_two, "two branches")]
    for make, rule in rules:
        lengths = [SHORTEST * 2**k for k in range(seq_len.bit_length()) if SHORTEST * 2**k < seq_len]
        for first in reversed(lengths):
            pattern = make(first, seq_len, is_causal)
            if pairs(pattern, seq_len, num_heads) <= most_pairs:
                found.setdefault(pattern, Suggestion(pattern, rule))
                break
    if pairs(DilatedPattern.dense(is_causal=is_causal), seq_len, num_heads) <= most_pairs:
        return [Suggestion(DilatedPattern.dense(is_causal=is_causal), "the budget allows dense attention")]
    return sorted(found.values(), key=lambda x: -pairs(x.pattern, seq_len, num_heads))


def _longnet(ratio: int) -> Callable[[int, int, bool], DilatedPattern]:
    def make(first: int, seq_len: int, is_causal: bool) -> DilatedPattern:
        return DilatedPattern.longnet(seq_len, first_length=first, ratio=ratio, is_causal=is_causal)

    return make


def _two(first: int, seq_len: int, is_causal: bool) -> DilatedPattern:
    """As many rows of the whole sequence as of a near segment, or, since the rate is a power of two, half as many."""
    return DilatedPattern((first, seq_len), (1, 2 ** ((seq_len - 1) // first).bit_length()), is_causal=is_causal)


def unread_phases(pattern: DilatedPattern, num_heads: int) -> list[tuple[int, int]]:
    """For each branch how many phases no head reads, and how many there are."""
    found = []
    for branch, (w, r) in enumerate(pattern.branches):
        read = {pattern.phase_of(branch, head, num_heads) for head in pattern.heads_of(branch, num_heads)}
        there = min(w, r)
        found.append((there - len({x for x in read if x is not None and x < there}), there))
    return found


def most_sent(job: EqualJob) -> tuple[int, bool]:
    """Bytes that the rank which sends most sends in a forward and its backward around the ring, and whether they are
    exact: else of the ranks that are looked at, where they are many, over shards cut to one length."""
    pattern, seq_len, num_ranks, num_heads, _, sizes = job
    even = job._replace(seq_len=seq_len - seq_len % num_ranks)
    if even != job and num_ranks <= MOST_UNEVEN:  # their borders are none that another length has
        shards = make_shards("contiguous", default_lengths("contiguous", seq_len, num_ranks))
        plans = [make_plan(Job(pattern, shards, *job.heads), rank) for rank in range(num_ranks)]
        return max(sum(x.bytes_sent(*sizes[:3], backward=b) for b in (False, True)) for x in plans), True
    if why_not(even, "contiguous") is None:
        return Lockstep(even).largest_sent[1], even == job
    ranks = _ranks_to_look_at(pattern, even.seq_len, num_ranks, MOST_COUNTED // (len(pattern.branches) * num_heads))
    sent = (sent_by_rank(pattern, even.seq_len, num_ranks, rank, *job.heads) for rank in ranks)
    return max(sum(x.num_bytes(*sizes[:3])) for x in sent), even == job and len(ranks) == num_ranks


def _ranks_to_look_at(pattern: DilatedPattern, seq_len: int, num_ranks: int, most: int) -> Sequence[int]:
    """All, or else at the ends of the first and last segments: of a causal pattern ranks before them send most, of
    others those of two segments, also of phases that not every rank has; and evenly spaced ones."""
    most = max(most, 2)
    if num_ranks <= most:
        return range(num_ranks)
    length, ends = seq_len // num_ranks, [seq_len]
    for w in reversed([w for w in pattern.segment_lengths if w < seq_len]):
        ends += [seq_len // w * w, w, seq_len // w * w - w]
    before = dict.fromkeys((1, *(k * r for r in pattern.dilation_rates for k in (1, 2) if r > length)))
    found = ((end - x) // length - k for end in ends for x in before for k in (0, 1))
    last = dict.fromkeys(rank for rank in found if rank >= 0)
    return list(last | dict.fromkeys(range(0, num_ranks, 2 * num_ranks // most)))[:most]
