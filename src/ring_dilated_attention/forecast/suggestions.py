"""Suggests patterns for a sequence length and a budget of (query, key) pairs. Computes with integers only.

In a branch (w, r) of a pattern, only every r-th position of each segment of w positions takes part in attention. Four
patterns are tried:

- Three follow LongNet's rule, with the ratio a = 2, 4 or 8. w is w_0, w_0 * a, w_0 * a**2, ... up to the whole
  sequence, and r is 1, a, a**2, ...
- One has two branches. The first has segments of w_0 and r = 1. The second is the whole sequence. Its r is chosen so
  that a query attends to about equally many keys in both branches. But r is at most the number of heads, so that every
  position is read by some head.

In an experiment, a pattern with two such branches recalled most of the facts that dense attention recalled
(docs/learning.md, "Recall at a distance").

In each pattern, w_0 is the largest power of two that keeps the pairs within the budget. A sliding window of w_0
positions may replace the segments of w_0.

All r are powers of two. So are all w, except the w of the whole sequence.
"""

from ..pattern import DilatedPattern
from .call_cost import pairs

RATIOS = {"LongNet, ratio 2": 2, "LongNet, ratio 4": 4, "LongNet, ratio 8": 8, "two branches": None}
SHORTEST = 64


def suggestions(
    seq_len: int, num_heads: int, most_pairs: float, *, is_causal: bool, window: bool = False
) -> list[tuple[DilatedPattern, str]]:
    """Patterns that have at most `most_pairs` (query, key) pairs over all heads, each with the name of its rule.

    The pattern with most pairs is first. If dense attention has at most `most_pairs`, it is the only pattern. The list
    is empty if no pattern has so few pairs.

    window: whether a sliding window replaces the segments of rate 1.
    """
    dense = DilatedPattern((seq_len,), (1,), is_causal=is_causal)
    if pairs(dense, seq_len, num_heads) <= most_pairs:
        return [(dense, "dense attention")]
    rule_of: dict[DilatedPattern, str] = {}
    lengths = [SHORTEST * 2**k for k in range(seq_len.bit_length()) if SHORTEST * 2**k < seq_len]
    for rule, ratio in RATIOS.items():
        for first in reversed(lengths):
            pattern = _pattern(ratio, first, seq_len, num_heads, is_causal=is_causal)
            if window:
                pattern = DilatedPattern(
                    pattern.segment_lengths[1:],
                    pattern.dilation_rates[1:],
                    window=first,
                    is_causal=is_causal,
                )
            if pairs(pattern, seq_len, num_heads) <= most_pairs:
                rule_of.setdefault(pattern, rule)
                break
    return sorted(rule_of.items(), key=lambda each: -pairs(each[0], seq_len, num_heads))


def _pattern(
    ratio: int | None, first: int, seq_len: int, num_heads: int, *, is_causal: bool
) -> DilatedPattern:
    """The pattern of LongNet's rule with this ratio. If `ratio` is None, the pattern with two branches.

    first: the length of the shortest segments.
    """
    if ratio is not None:
        return DilatedPattern.longnet(seq_len, first_length=first, ratio=ratio, is_causal=is_causal)
    # Choose the rate so that a query attends to 0.5 to 1 times as many keys in the whole sequence as in its segment of
    # `first` positions. The next line lowers the rate if there are few heads.
    rate = 2 ** ((seq_len - 1) // first).bit_length()
    rate = min(rate, 2 ** (num_heads.bit_length() - 1))
    return DilatedPattern((first, seq_len), (1, rate), is_causal=is_causal)
