"""The same attention by other means, side by side, and which of them to take. Pure numbers, no torch."""

from math import inf
from typing import NamedTuple

from ..pattern import DilatedPattern
from .advice import BOUND_BY_COMMUNICATION, Waiting, advice, exposed_of
from .clock import Bounds, Hardware, model_step, time_text
from .dealing import check_dealing
from .exchange import RankPlan, plan_exchange
from .forms import closed_form, why_not_by
from .job import Job
from .lockstep import EqualJob, Form, all_hops, why_not
from .memory import Traits, attention_memory
from .pace import work_seconds
from .parts import places_counted
from .sharding import SHARDINGS, Cut, Shard
from .sharing import branch_shares
from .totals import pairs

# Every rank of every way is planned where all have so few hops, which takes a moment, or of one without a closed form;
# and, where none has any, of so many ranks at most. Of more some are sampled, if they have no more hops than that.
MOST_HOPS, MOST_HOPS_OF_ONE, MOST_RANKS, MOST_SAMPLED_HOPS = 256, 512, 64, 8192
# Two steps whose times differ by less are alike: what sends less, then what holds less, is better.
ALIKE = 1.02


class Alternative(NamedTuple):
    """One way to compute it. inner: ranks that deal heads inside a ring of groups (a 2-D mesh); 1 for none.

    sent_bytes, peak_bytes: of the rank that sends, or holds, most. exposed: share of a step in which the busiest rank
        waits; at least so much, where the time is bounds.
    found_by: "plans", which are exact; "forms": peak_bytes may be off by a row of each head; "samples" of ranks:
        balance is at most, all else at least so much.
    step_seconds: bounds where it is by closed forms; at least so much where ranks are sampled.
    why_not: instead of figures.
    """

    function: str
    exchange: str
    sharding: str
    inner: int
    balance: float = 0.0
    sent_bytes: int = 0
    peak_bytes: int = 0
    step_seconds: Bounds = Bounds(0.0, 0.0)
    exposed: float = 0.0
    found_by: str = "plans"
    why_not: str = ""

    @property
    def name(self) -> str:
        return f"2-D, {self.inner} deal heads" if self.inner > 1 else self.exchange.replace("_", "-")


def alternatives(job: EqualJob, hardware: Hardware, traits: Traits, *, every_rank: bool = False) -> list[Alternative]:
    """The pattern by every exchange and sharding, and dense attention by the same.

    Args:
        every_rank: to be planned, also where closed forms answer at once.
    """
    weigh = _weighed if every_rank or is_planned(job) else _by_form if has_forms(job) else _by_sample
    found = []
    inner = _inner(job)
    ways = [("ring", 1), ("all_gather", 1), ("all_to_all", 1)] + ([("ring", inner)] if inner > 1 else [])
    try:
        check_dealing(job.num_kv_heads, job.num_ranks)
        cannot_deal = ""
    except ValueError as error:
        cannot_deal = str(error).split(":")[0]
    for function in ("dilated", "dense"):
        pattern = job.pattern if function == "dilated" else dense_of(job)
        for exchange, size in ways:
            for sharding in SHARDINGS if exchange != "all_to_all" else SHARDINGS[:1]:
                one = Alternative(function, exchange, sharding, size)
                if exchange == "all_to_all" and cannot_deal:
                    found.append(one._replace(why_not=cannot_deal))
                else:
                    found.append(weigh(one, job._replace(pattern=pattern), hardware, traits))
    return found


def has_forms(job: EqualJob) -> bool:
    """Whether closed forms answer for contiguous shards; zigzag ones may still lack them."""
    return why_not(job, "contiguous") is None


def is_planned(job: EqualJob) -> bool:
    """Whether every rank of every way is planned: if that takes a moment, or nothing else can be had."""
    hops = all_hops(job) + all_hops(job._replace(pattern=dense_of(job)))
    return hops <= MOST_HOPS or (job.num_ranks <= MOST_RANKS and not has_forms(job))


def places_of_forms(job: EqualJob) -> int:
    """That closed forms count one by one: of rings and 2-D meshes, of both shardings."""
    inner = _inner(job)
    rings = [(1, job.num_ranks)] + [(inner, job.num_ranks // inner)] * (inner > 1)
    return sum(
        places * places_counted(job.pattern, max(1, job.seq_len // num), num)
        for places, ranks in rings
        for num in (ranks, 2 * ranks)
    )


def _inner(job: EqualJob) -> int:
    """Ranks that deal heads in a 2-D mesh; 1 where none can."""
    sizes = (d for d in range(2, job.num_ranks) if job.num_ranks % d == 0 and job.num_kv_heads % d == 0)
    return max(sizes, default=1)


def dense_of(job: EqualJob) -> DilatedPattern:
    return DilatedPattern.dense(is_causal=job.pattern.is_causal)


def _by_form(one: Alternative, job: EqualJob, hardware: Hardware, traits: Traits) -> Alternative:
    if (found := why_not_by(one.exchange, job, one.sharding, one.inner)) is not None:
        if all_hops(job) <= MOST_HOPS_OF_ONE:
            return _weighed(one, job, hardware, traits)
        return one._replace(why_not=f"{one.sharding} has no closed form: {found}")
    form = _form(one, job)
    seconds = form.step_seconds(hardware)
    return one._replace(
        balance=form.balance,
        sent_bytes=form.largest_sent[1],
        peak_bytes=form.memory(traits).forward_backward.num_bytes,
        step_seconds=seconds,
        exposed=form.exposed(hardware, seconds),
        found_by="forms",
    )


def _by_sample(one: Alternative, job: EqualJob, hardware: Hardware, traits: Traits) -> Alternative:
    """At least what one of the last two ranks computes, sends, holds and takes."""
    if all_hops(job) > MOST_SAMPLED_HOPS * job.num_ranks:
        return one._replace(why_not="planning one rank takes too long; equal shards have closed forms")
    shards, ranks = _shards(one, job), (job.num_ranks - 1, job.num_ranks - 2)
    plans = [_plan(one, job, shards, rank) for rank in ranks]
    work, sent = max(x.plan.pairs for x in plans), max(map(job.bytes_sent, plans))
    busy = work_seconds(work, job.sizes, hardware)
    least = max(busy, sent / hardware.bytes_per_second) + 2 * hardware.handshake
    peaks = [attention_memory(x.plan, job.sizes, traits, x.dealing).forward_backward.num_bytes for x in plans]
    balance = min(1.0, pairs(job.pattern, job.seq_len, job.num_heads) / (job.num_ranks * work))
    return one._replace(
        balance=balance,
        sent_bytes=sent,
        peak_bytes=max(peaks),
        step_seconds=Bounds(least, inf),
        exposed=1 - busy / least,
        found_by="samples",
    )


def _weighed(one: Alternative, job: EqualJob, hardware: Hardware, traits: Traits) -> Alternative:
    plans = _plans(one, job)
    dealings = [x.dealing for x in plans if x.dealing is not None]
    step = model_step([x.plan for x in plans], job.sizes, hardware, dealings or None)
    peaks = [attention_memory(x.plan, job.sizes, traits, x.dealing).forward_backward.num_bytes for x in plans]
    return one._replace(
        balance=step.balance,
        sent_bytes=max(map(job.bytes_sent, plans)),
        peak_bytes=max(peaks),
        step_seconds=Bounds.exactly(step.step_seconds),
        exposed=exposed_of(step),
    )


def _form(one: Alternative, job: EqualJob) -> Form:
    return closed_form(one.exchange, job, one.sharding, one.inner)


def _plans(one: Alternative, job: EqualJob) -> list[RankPlan]:
    shards = _shards(one, job)
    return [_plan(one, job, shards, rank) for rank in range(job.num_ranks)]


def _plan(one: Alternative, job: EqualJob, shards: tuple[Shard, ...], rank: int) -> RankPlan:
    return plan_exchange(one.exchange, Job(job.pattern, shards, *job.heads), rank, inner=one.inner)


def _shards(one: Alternative, job: EqualJob) -> tuple[Shard, ...]:
    cut = Cut(one.sharding, job.num_ranks, inner=one.inner)
    return cut.shards_of(cut.default_lengths(job.seq_len))


def recommended(found: list[Alternative], memory_bytes: int | None) -> tuple[Alternative | None, str]:
    """The fastest that fits and computes the pattern, and the reason in a sentence. Of bounds the most counts: what is
    recommended takes no longer than that."""
    ways = [x for x in found if x.function == "dilated" and not x.why_not]
    fitting = [x for x in ways if memory_bytes is None or x.peak_bytes <= memory_bytes]
    if not fitting:
        least = min(ways, key=lambda x: x.peak_bytes, default=None)
        if least is None:
            return None, "none: no way could be planned"
        holds = "holds at least" if least.found_by == "samples" else "holds"
        return None, f"none fits: the least, {least.name} {least.sharding}, {holds} {least.peak_bytes / 1e6:,.1f} MB"
    if any(x.found_by == "samples" for x in fitting):
        return None, "none: what ranks that were sampled take at least recommends nothing"
    fastest = min(x.step_seconds.most for x in fitting)
    alike = [x for x in fitting if x.step_seconds.most <= ALIKE * fastest]
    best = min(alike, key=lambda x: (x.sent_bytes, x.peak_bytes, x.inner))
    is_partial = any("closed form" in x.why_not for x in found if x.function == "dilated")
    return best, _reason(best, alike, fitting) + " (of the ways compared)" * is_partial


def _reason(best: Alternative, alike: list[Alternative], fitting: list[Alternative]) -> str:
    """Why it is the best of those that are alike, and of what is known of the others."""
    if len(alike) > 1:
        ways_alike = "another way, and of the two" if len(alike) == 2 else f"{len(alike) - 1} other ways, and of these"
        holds = " and holds" if best.peak_bytes == min(x.peak_bytes for x in alike) else ""
        why = f"as fast as {ways_alike} it sends{holds} least"
    else:
        why = "the fastest"
    most = best.step_seconds.most
    if not all(x.step_seconds.is_exact for x in fitting):
        why = f"at most {time_text(most)}; by the most that each may take {why}"
        faster = [f"{x.name} {x.sharding}" for x in fitting if x is not best and x.step_seconds.least < most / ALIKE]
        return why + (f"; {', '.join(faster)} may be faster" if faster else "")
    others = [x for x in fitting if x not in alike]
    if others:
        second = min(others, key=lambda x: x.step_seconds.most)
        why += f"; {second.name} {second.sharding} would take {second.step_seconds.most / most - 1:.0%} longer"
        why += " (its work is less balanced)" if second.balance < 0.95 * best.balance else ""
    return why


def advice_on(job: EqualJob, best: Alternative, hardware: Hardware) -> str | None:
    """What `advice` says of one of `alternatives`."""
    is_dealt = best.exchange == "all_to_all" or best.inner > 1
    sent = [0] * len(job.pattern.branches)
    if not is_dealt and best.exposed >= BOUND_BY_COMMUNICATION:
        if best.found_by == "forms":
            sent = _form(best, job).sent_of_branches()
        else:
            plans = [x.plan for x in _plans(best, job)]
            shares = branch_shares(Job(job.pattern, _shards(best, job), *job.heads), plans)
            sent = [share.sent * job.sizes.unit * job.sizes.itemsize for share in shares]

    def again(pattern: DilatedPattern) -> Bounds | None:
        weigh = _by_form if best.found_by == "forms" else _weighed
        other = weigh(best, job._replace(pattern=pattern), hardware, _NO_KERNEL)
        return None if other.why_not else other.step_seconds

    step = Waiting(best.exposed, best.step_seconds, sent, is_dealt=is_dealt)
    return advice(job.pattern, job.num_heads, (0, job.seq_len), step, again)


_NO_KERNEL = Traits(in_place=False, is_whole=False, scratch=lambda step, sizes, num_heads: 0)
