"""Which pattern for a length and a budget, and what each would do. Pure integers but for shares, no torch.

The rule: branches of LongNet's form, segment lengths w_0 * a**i and rates a**i up to the whole length, for ratios a of
2, 4 and 8, and two branches alone (near everything, far one row in r). For each ratio w_0 is the largest power of two
with which the pairs stay in the budget. So near keys are dense and far ones thin out, at one price in pairs.

Rates, and all lengths but the whole, are powers of two: so `reach` can follow what a stack of layers carries.
"""

from collections.abc import Callable
from typing import NamedTuple

from ..pattern import DilatedPattern
from ..plan.counts import pairs

RATIOS = (2, 4, 8)
SHORTEST = 64


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
