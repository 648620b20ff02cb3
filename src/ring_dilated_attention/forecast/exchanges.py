"""Compares all exchanges and shardings for one attention call, and recommends one; and advises on a step that is bound
by communication: which branch sends most, and what would help. Pure numbers, no torch."""

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

from ..pattern import DilatedPattern
from ..plan.dealing import check_dealing
from ..plan.job import Job
from ..plan.sharding import WITHOUT_DOCUMENTS, Borders, Cut
from ..plan.sizes import Sizes, Traits
from .call_cost import MOST_COMPARED, Figures, Way, branch_pairs, count, forecast
from .clock import Hardware

# Ways that take at most ALIKE times the least time are alike. The best of them sends least; if equal, it holds least.
ALIKE = 1.02
# If the busiest rank waits for at least this share of a step, the step counts as bound by communication.
BOUND_BY_COMMUNICATION = 0.2
SPARSER = 4
WORTH_IT = 0.95  # advise a higher rate only if it brings a step's time down to this share or less
OTHERWISE = "fewer ranks, or a network that is faster or has less latency, would help"


class UncutJob(NamedTuple):
    """An attention call over one document on several ranks. The sharding is left open."""

    pattern: DilatedPattern
    seq_len: int
    num_ranks: int
    num_heads: int
    num_kv_heads: int
    sizes: Sizes

    def job(self, sharding: str = "contiguous", inner: int = 1, align: int = 1, documents: Borders = None) -> Job:
        cut = Cut(sharding, self.num_ranks, align, inner=inner)
        shards = cut.shards_of(cut.default_lengths(self.seq_len, documents), documents)
        return Job(self.pattern, shards, self.num_heads, self.num_kv_heads, documents)


class Alternative(NamedTuple):
    """One way to compute a call. figures: None if the way is impossible; `why_not` then gives the reason."""

    function: str
    way: Way
    sharding: str
    figures: Figures | None = None
    why_not: str = ""

    @property
    def name(self) -> str:
        return f"2-D, {self.way.inner} deal" if self.way.inner > 1 else self.way.exchange.replace("_", "-")

    @property
    def known(self) -> Figures:
        assert self.figures is not None, self.why_not
        return self.figures


def ways_of(call: UncutJob, hardware: Hardware) -> list[Alternative]:
    """Every exchange with every sharding, for the call's pattern and for dense attention; without figures."""
    ways = [Way("ring"), Way("all_gather"), Way("all_to_all")]
    sizes = [d for d in range(2, call.num_ranks) if call.num_ranks % d == 0 and call.num_kv_heads % d == 0]
    sizes = [d for d in sizes if (hardware.gpus_per_host or d) % d == 0]  # heads are dealt within a host
    ways += [Way("ring", d) for d in sizes[-1:]]
    return [
        Alternative(function, way, sharding)
        for function in ("dilated", "dense")
        for way in ways
        for sharding in (WITHOUT_DOCUMENTS if way.exchange != "all_to_all" else ["contiguous"])
    ]


def alternatives(
    call: UncutJob, hardware: Hardware, traits: Traits, step: Callable[[], object] = lambda: None
) -> list[Alternative]:
    """All ways with their figures. step: called after each way."""
    dense = call._replace(pattern=DilatedPattern.dense(is_causal=call.pattern.is_causal))
    counts = lru_cache(maxsize=len(WITHOUT_DOCUMENTS))(count)  # a count is large

    def with_figures(one: Alternative) -> Alternative:
        if one.way.exchange == "all_to_all":
            try:
                check_dealing(call.num_kv_heads, call.num_ranks)
            except ValueError as error:
                return one._replace(why_not=str(error).split(":")[0])
        job = (call if one.function == "dilated" else dense).job(one.sharding, one.way.inner)
        counted = counts(job, one.way if one.way.is_dealt else Way())._replace(way=one.way)  # all_gather is as ring
        figures = forecast(job, one.way, call.sizes, traits=traits, hardware=hardware, counted=counted)
        return one._replace(figures=figures)

    found = []
    for one in ways_of(call, hardware):
        found.append(with_figures(one))
        step()
    return found


def recommended(found: list[Alternative], memory_bytes: int | None) -> tuple[Alternative | None, str]:
    """The best of the ways that compute the pattern, fit the memory and were timed (see ALIKE); and the reason."""
    ways = [one for one in found if one.function == "dilated" and not one.why_not]
    fitting = [one for one in ways if memory_bytes is None or one.known.peak_bytes <= memory_bytes]
    if not fitting:
        least = min(ways, key=lambda one: one.known.peak_bytes)
        held = f"{least.known.peak_bytes / 1e6:,.1f} MB"
        return None, f"none fits: the least, {least.name} {least.sharding}, holds {held}"
    timed = [one for one in fitting if one.known.time is not None]
    if not timed:
        return None, "none: no way that fits was timed"
    fastest = min(one.known.seconds for one in timed)
    alike = [one for one in timed if one.known.seconds <= ALIKE * fastest]
    best = min(alike, key=lambda one: (one.known.sent_bytes, one.known.peak_bytes, one.way.inner))
    others = " (of the ways that were timed)" if len(timed) < len(fitting) else ""
    return best, _reason(best, alike, timed) + others


def _reason(best: Alternative, alike: list[Alternative], timed: list[Alternative]) -> str:
    """Why `best` is recommended among those that are `alike`, and how much longer the fastest other way takes."""
    why = "the fastest"
    if len(alike) > 1:
        ways_alike = "another way, and of the two" if len(alike) == 2 else f"{len(alike) - 1} other ways, and of these"
        holds = " and holds" if best.known.peak_bytes == min(one.known.peak_bytes for one in alike) else ""
        why = f"as fast as {ways_alike} it sends{holds} least"
    others = [one for one in timed if one not in alike]
    if not others:
        return why
    second = min(others, key=lambda one: one.known.seconds)
    longer = second.known.seconds / best.known.seconds - 1
    less_balanced = " (its work is less balanced)" if second.known.balance < 0.95 * best.known.balance else ""
    return f"{why}; {second.name} {second.sharding} would take {longer:.0%} longer{less_balanced}"


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
    megabytes = sent * sizes.unit * sizes.itemsize / 1e6
    sends = f"Branch {branch} sends {megabytes:,.1f} MB in a forward (all ranks together)"
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
