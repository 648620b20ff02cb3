"""Advises on a step that is bound by communication: which branch sends most, and what would help. No torch."""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

from ..plan.job import Job
from ..plan.sizes import Sizes
from .call_cost import MOST_COMPARED, Figures, Way, branch_pairs, forecast
from .clock import Hardware

# If the busiest rank waits for at least this share of a step, the step counts as bound by communication.
BOUND_BY_COMMUNICATION = 0.2
SPARSER = 4
WORTH_IT = 0.95  # advise a higher rate only if it brings a step's time down to this share or less
OTHERWISE = "fewer ranks, or a network that is faster or has less latency, would help"


def advice(
    job: Job, way: Way, sizes: Sizes, figures: Figures, hardware: Hardware, step: Callable[[], object] = lambda: None
) -> str | None:
    """One or two sentences; or None, if a step is not bound by communication or was not timed. With at most
    MOST_COMPARED ranks a sparser branch is timed: `step` is called for each rank."""
    if figures.time is None or figures.exposed < BOUND_BY_COMMUNICATION:
        return None
    # A rank never waits for the whole step, so the text does not say 100 %. An estimate is too rough for a percentage.
    waits = f"bound by communication: a rank waits {min(figures.exposed, 0.99):.0%} of the step"
    bound = "may be bound by communication" if figures.time.is_about else waits
    if way.is_dealt:
        remedy = "fewer key/value heads (grouped queries) or a faster network would help, and dilation rates would not"
        everything = "every position of queries, keys, values and outputs, whatever the pattern"
        return f"{bound}. Dealing heads sends {everything}: {remedy}"
    sent, branch = max((share.sent, i) for i, share in enumerate(figures.branches))
    if not sent:
        return f"{bound}, in handshakes alone: fewer ranks, or a network with less latency, would help"
    lengths, heads = [stop - start for start, stop in pairwise(job.borders)], job.num_heads
    work = [branch_pairs(job.pattern, i, lengths, heads) for i in range(len(job.pattern.branches))]
    gigabytes = sent * sizes.unit * sizes.itemsize / 1e9
    sends = f"Branch {branch} sends {gigabytes:,.2f} GB in a forward (all ranks together)"
    said = f"{bound}. {sends} for {work[branch] / sum(work):.0%} of the pairs: "
    rates = list(job.pattern.dilation_rates)
    rate, rates[branch] = rates[branch], SPARSER * rates[branch]
    if rates[branch] > job.pattern.segment_lengths[branch] or job.num_ranks > MOST_COMPARED:
        return f"{said}{OTHERWISE}"
    sparser = job._replace(pattern=replace(job.pattern, dilation_rates=rates))
    then = forecast(sparser, way, sizes, hardware=hardware, step=step).time
    assert then is not None
    if then.seconds > WORTH_IT * figures.time.seconds:
        return f"{said}a higher rate would gain less than {1 - WORTH_IT:.0%}; {OTHERWISE}"
    times = f"{then.text} instead of {figures.time.text}"
    return f"{said}at rate {rates[branch]:,} instead of {rate:,} a step would take {times}"
