"""Where a step is bound by communication: which branch sends for how little work, and what would help. No torch."""

from dataclasses import replace
from itertools import pairwise

from ..pattern import DilatedPattern
from ..plan.counts import branch_pairs
from ..plan.job import Job
from ..plan.sizes import Sizes
from .call import Figures, Way, forecast
from .clock import Hardware

# A part of a step that is only waiting; above it, more is gained on the way than in the kernel.
BOUND_BY_COMMUNICATION = 0.2
SPARSER = 4
# Of a step's time; a remedy that leaves more is none. So it is where latency binds, and bytes do not count.
WORTH_IT = 0.95
OTHERWISE = "fewer ranks, or a link that is faster or has less latency, would help"


def advice(job: Job, way: Way, sizes: Sizes, figures: Figures, hardware: Hardware) -> str | None:
    """One or two sentences, or None where a step is not bound by communication or was not timed."""
    if figures.time is None or figures.exposed < BOUND_BY_COMMUNICATION:
        return None
    bound = f"bound by communication: a rank waits {_share(figures.exposed)} of the step"
    if way.is_dealt:
        return (
            f"{bound}. Dealing heads sends every position of queries, keys, values and outputs, whatever the pattern: "
            "fewer key/value heads (grouped queries) or a faster link would help, and rates would not"
        )
    sent, branch = max((share.sent, i) for i, share in enumerate(figures.branches))
    if not sent:
        return f"{bound}, in handshakes alone: fewer ranks, or a link with less latency, would help"
    rate, sparser = _sparser(job.pattern, branch)
    said = (
        f"{bound}. Branch {branch} sends {sent * sizes.unit * sizes.itemsize / 1e9:,.2f} GB in a forward (all ranks "
        f"together) for {_share_of_pairs(job, branch):.0%} of the pairs: "
    )
    if sparser is None:
        return f"{said}{OTHERWISE}"
    then = forecast(job._replace(pattern=sparser), way, sizes, hardware=hardware).time
    assert then is not None
    if then.seconds > WORTH_IT * figures.time.seconds:
        return f"{said}a higher rate would gain less than {1 - WORTH_IT:.0%}; {OTHERWISE}"
    return (
        f"{said}at rate {SPARSER * rate:,} instead of {rate:,} a step would take {then.text} instead of "
        f"{figures.time.text}"
    )


def _sparser(pattern: DilatedPattern, branch: int) -> tuple[int, DilatedPattern | None]:
    """The branch's rate, and the pattern with a higher one; None where segments are too short for it."""
    rate = pattern.dilation_rates[branch]
    if SPARSER * rate > pattern.segment_lengths[branch]:
        return rate, None
    rates = [SPARSER * x if i == branch else x for i, x in enumerate(pattern.dilation_rates)]
    return rate, replace(pattern, dilation_rates=rates)


def _share_of_pairs(job: Job, branch: int) -> float:
    work = [
        sum(branch_pairs(job.pattern, i, stop - start, job.num_heads) for start, stop in pairwise(job.borders))
        for i in range(len(job.pattern.branches))
    ]
    return work[branch] / sum(work)


def _share(part: float) -> str:
    """What is not the whole should not be called so."""
    return f"{part:.0%}" if part < 0.99 else "99%"
