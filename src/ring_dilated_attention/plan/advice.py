"""Where a step is bound by communication: which branch sends for how little work, and what would help. No torch."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

from ..pattern import DilatedPattern
from .clock import Bounds, StepTime, time_text
from .totals import branch_pairs

# A part of a step that is only waiting; above it, more is gained on the way than in the kernel.
BOUND_BY_COMMUNICATION = 0.2
SPARSER = 4
# Of a step's time; a remedy that leaves more is none. So it is where latency binds, and bytes do not count.
WORTH_IT = 0.95
OTHERWISE = "fewer ranks, or a link that is faster or has less latency, would help"


class Waiting(NamedTuple):
    """A step as advice reads it.

    exposed: the share of it in which its busiest rank waits; that others wait for that rank is balance. At least so
        much, where the step's seconds are bounds.
    sent_bytes: of each branch in a forward; of `senders`.
    is_dealt: heads are dealt for positions, on all ranks or inside groups of them.
    """

    exposed: float
    seconds: Bounds
    sent_bytes: Sequence[int]
    senders: str = "all ranks together"
    is_dealt: bool = False


def exposed_of(step: StepTime) -> float:
    """That of the busiest rank."""
    return 1 - step.efficiency / step.balance if step.balance else 0.0


def advice(
    pattern: DilatedPattern,
    num_heads: int,
    borders: Sequence[int],
    step: Waiting,
    again: Callable[[DilatedPattern], Bounds | None],
) -> str | None:
    """One or two sentences, or None where a step is not bound by communication.

    Args:
        borders: of documents, the first 0 and the last the length.
        again: the time of the same step under another pattern, None where it is not known.
    """
    if step.exposed < BOUND_BY_COMMUNICATION:
        return None
    bound = f"bound by communication: a rank waits {'' if step.seconds.is_exact else 'at least '}{_share(step.exposed)}"
    if step.is_dealt:
        return (
            f"{bound} of the step. Dealing heads sends every position of queries, keys, values and outputs, whatever "
            "the pattern: fewer key/value heads (grouped queries) or a faster link would help, and rates would not"
        )
    size, branch = max((size, i) for i, size in enumerate(step.sent_bytes))
    if not size:
        return f"{bound} of the step, in handshakes alone: fewer ranks, or a link with less latency, would help"
    rate, sparser = _sparser(pattern, branch)
    said = (
        f"{bound} of the step. Branch {branch} sends {size / 1e9:,.2f} GB in a forward ({step.senders}) for "
        f"{_share_of_pairs(pattern, branch, num_heads, borders):.0%} of the pairs: "
    )
    if sparser is None:
        return f"{said}{OTHERWISE}"
    then = again(sparser)
    if then is None:
        return f"{said}at rate {SPARSER * rate:,} instead of {rate:,} it would send {1 / SPARSER:.0%} of that"
    if any(after > WORTH_IT * now for after, now in zip(then, step.seconds, strict=True)):
        return f"{said}a higher rate would gain less than {1 - WORTH_IT:.0%}; {OTHERWISE}"
    return (
        f"{said}at rate {SPARSER * rate:,} instead of {rate:,} a step would take {_span(then)} instead of "
        f"{_span(step.seconds)}"
    )


def _sparser(pattern: DilatedPattern, branch: int) -> tuple[int, DilatedPattern | None]:
    """The branch's rate, and the pattern with a higher one; None where segments are too short for it."""
    rate = pattern.dilation_rates[branch]
    if SPARSER * rate > pattern.segment_lengths[branch]:
        return rate, None
    rates = [SPARSER * x if i == branch else x for i, x in enumerate(pattern.dilation_rates)]
    return rate, replace(pattern, dilation_rates=rates)


def _share_of_pairs(pattern: DilatedPattern, branch: int, num_heads: int, borders: Sequence[int]) -> float:
    work = [
        sum(branch_pairs(pattern, i, stop - start, num_heads) for start, stop in pairwise(borders))
        for i in range(len(pattern.branches))
    ]
    return work[branch] / sum(work)


def _share(part: float) -> str:
    """What is not the whole should not be called so."""
    return f"{part:.0%}" if part < 0.99 else "99%"


def _span(seconds: Bounds) -> str:
    least, most = map(time_text, seconds)
    return least if least == most else f"{least} to {most}"
