"""Which patterns for a length and a budget of pairs. Pure integers, no torch.

The rule: branches of LongNet's form, with segment lengths w_0 * a**i and rates a**i up to the whole length, for the
ratios a of 2, 4 and 8; and two branches alone, every key near and one row in r far away. In each, w_0 is the largest
power of two with which the pairs stay in the budget.

Rates, and all lengths but the whole, are powers of two, so that `reach` can follow what a stack of layers carries.
"""

from typing import NamedTuple

from ..pattern import DilatedPattern
from ..plan.counts import pairs
from .reach import phases_read

RATIOS = (2, 4, 8)
SHORTEST = 64


class Suggestion(NamedTuple):
    """A pattern, and the rule that made it."""

    pattern: DilatedPattern
    rule: str


def suggestions(seq_len: int, num_heads: int, most_pairs: float, *, is_causal: bool) -> list[Suggestion]:
    """The patterns of the rule whose pairs, over all heads, are at most `most_pairs`; those with most pairs first."""
    dense = DilatedPattern.dense(is_causal=is_causal)
    if pairs(dense, seq_len, num_heads) <= most_pairs:
        return [Suggestion(dense, "the budget allows dense attention")]
    found: dict[DilatedPattern, Suggestion] = {}
    lengths = [SHORTEST * 2**k for k in range(seq_len.bit_length()) if SHORTEST * 2**k < seq_len]
    for ratio in (*RATIOS, None):
        for first in reversed(lengths):
            pattern = _pattern(first, seq_len, ratio, is_causal=is_causal)
            if pairs(pattern, seq_len, num_heads) <= most_pairs:
                rule = "two branches" if ratio is None else f"LongNet's rule, ratio {ratio}"
                found.setdefault(pattern, Suggestion(pattern, rule))
                break
    return sorted(found.values(), key=lambda x: -pairs(x.pattern, seq_len, num_heads))


def _pattern(first: int, seq_len: int, ratio: int | None, *, is_causal: bool) -> DilatedPattern:
    """Branches of LongNet's form from a first length on, or without a ratio that length and the whole sequence."""
    if ratio is not None:
        return DilatedPattern.longnet(seq_len, first_length=first, ratio=ratio, is_causal=is_causal)
    # As many rows of the whole sequence as of a near segment, or half as many, since the rate is a power of two.
    return DilatedPattern((first, seq_len), (1, 2 ** ((seq_len - 1) // first).bit_length()), is_causal=is_causal)


def unread_phases(pattern: DilatedPattern, num_heads: int) -> list[tuple[int, int]]:
    """For each branch how many phases no head reads, and how many phases there are."""
    there = [min(w, r) for w, r in pattern.branches]
    read = [phases_read(pattern, branch, num_heads) for branch in range(len(there))]
    return [(num - len(phases & set(range(num))), num) for num, phases in zip(there, read, strict=True)]
