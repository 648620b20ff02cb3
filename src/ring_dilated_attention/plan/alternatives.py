"""The same attention by other means, side by side, and which of them to take. Pure numbers, no torch."""

from typing import NamedTuple

from ..pattern import DilatedPattern
from .advice import BOUND_BY_COMMUNICATION, Waiting, advice, exposed_of
from .clock import Hardware, model_step
from .exchange import RankPlan, plan_exchange
from .lockstep import Bounds
from .memory import Sizes, Traits, attention_memory
from .sharding import SHARDINGS, Cut
from .sharing import branch_shares

# Two steps whose times differ by less are alike: what sends less, then what holds less, is better.
ALIKE = 1.02


class Alternative(NamedTuple):
    """One way to compute it. inner: ranks that deal heads inside a ring of groups (a 2-D mesh); 1 for none.

    sent_bytes, peak_bytes: of the rank that sends, or holds, most. exposed: share of a step in which the busiest rank
        waits.
    why_not: instead of figures.
    """

    function: str
    exchange: str
    sharding: str
    inner: int
    balance: float = 0.0
    sent_bytes: int = 0
    peak_bytes: int = 0
    step_seconds: float = 0.0
    exposed: float = 0.0
    why_not: str = ""

    @property
    def name(self) -> str:
        return f"2-D, {self.inner} deal heads" if self.inner > 1 else self.exchange.replace("_", "-")


class Job(NamedTuple):
    """An attention call on ranks."""

    pattern: DilatedPattern
    seq_len: int
    num_ranks: int
    num_heads: int
    num_kv_heads: int
    sizes: Sizes


def alternatives(job: Job, hardware: Hardware, traits: Traits) -> list[Alternative]:
    """The pattern by every exchange and sharding, and dense attention by the same."""
    found = []
    inner = max((d for d in range(2, job.num_ranks) if job.num_ranks % d == 0 and job.num_kv_heads % d == 0), default=1)
    ways = [("ring", 1), ("all_gather", 1), ("all_to_all", 1)] + ([("ring", inner)] if inner > 1 else [])
    for function in ("dilated", "dense"):
        pattern = job.pattern if function == "dilated" else DilatedPattern.dense(is_causal=job.pattern.is_causal)
        for exchange, size in ways:
            for sharding in SHARDINGS if exchange != "all_to_all" else SHARDINGS[:1]:
                one = Alternative(function, exchange, sharding, size)
                found.append(_weighed(one, job._replace(pattern=pattern), hardware, traits))
    return found


def _weighed(one: Alternative, job: Job, hardware: Hardware, traits: Traits) -> Alternative:
    try:
        plans = _plans(one, job)
    except ValueError as error:
        return one._replace(why_not=str(error).split(":")[0])
    dealings = [x.dealing for x in plans if x.dealing is not None]
    step = model_step([x.plan for x in plans], job.sizes, hardware, dealings or None)
    peaks = [attention_memory(x.plan, job.sizes, traits, x.dealing).forward_backward.num_bytes for x in plans]
    sent = [sum(x.bytes_sent(job.sizes, backward=b) for b in (False, True)) for x in plans]
    return one._replace(
        balance=step.balance,
        sent_bytes=max(sent),
        peak_bytes=max(peaks),
        step_seconds=step.step_seconds,
        exposed=exposed_of(step),
    )


def _plans(one: Alternative, job: Job) -> list[RankPlan]:
    cut = Cut(one.sharding, job.num_ranks, inner=one.inner)
    shards = cut.shards_of(cut.default_lengths(job.seq_len))
    heads = (job.num_heads, job.num_kv_heads)
    return [
        plan_exchange(one.exchange, job.pattern, shards, rank, *heads, inner=one.inner) for rank in range(job.num_ranks)
    ]


def recommended(found: list[Alternative], memory_bytes: int | None) -> tuple[Alternative | None, str]:
    """The fastest that fits and computes the pattern, and the reason in a sentence."""
    ways = [x for x in found if x.function == "dilated" and not x.why_not]
    fitting = [x for x in ways if memory_bytes is None or x.peak_bytes <= memory_bytes]
    if not fitting:
        least = min(ways, key=lambda x: x.peak_bytes)
        return None, f"none fits: the least, {least.name} {least.sharding}, holds {least.peak_bytes / 1e9:,.1f} GB"
    fastest = min(x.step_seconds for x in fitting)
    alike = [x for x in fitting if x.step_seconds <= ALIKE * fastest]
    best = min(alike, key=lambda x: (x.sent_bytes, x.peak_bytes, x.inner))
    others = [x for x in fitting if x.step_seconds > ALIKE * fastest]
    if len(alike) > 1:
        ways_alike = "another way, and of the two" if len(alike) == 2 else f"{len(alike) - 1} other ways, and of these"
        holds = " and holds" if best.peak_bytes == min(x.peak_bytes for x in alike) else ""
        why = f"as fast as {ways_alike} it sends{holds} least"
    else:
        why = "the fastest"
    if others:
        second = min(others, key=lambda x: x.step_seconds)
        slower = second.step_seconds / best.step_seconds - 1
        why += f"; {second.name} {second.sharding} would take {slower:.0%} longer"
        why += " (its work is less balanced)" if second.balance < 0.95 * best.balance else ""
    return best, why


def advice_on(job: Job, best: Alternative, hardware: Hardware) -> str | None:
    """What `advice` says of one of `alternatives`."""
    is_dealt = best.exchange == "all_to_all" or best.inner > 1
    sent = [0] * len(job.pattern.branches)
    if not is_dealt and best.exposed >= BOUND_BY_COMMUNICATION:
        plans = [x.plan for x in _plans(best, job)]
        cut = Cut(best.sharding, job.num_ranks)
        shards = cut.shards_of(cut.default_lengths(job.seq_len))
        shares = branch_shares(job.pattern, shards, plans, job.num_heads, job.num_kv_heads)
        sent = [share.sent * job.sizes.unit * job.sizes.itemsize for share in shares]

    def again(pattern: DilatedPattern) -> Bounds:
        return Bounds.exactly(_weighed(best, job._replace(pattern=pattern), hardware, _NO_KERNEL).step_seconds)

    step = Waiting(best.exposed, Bounds.exactly(best.step_seconds), sent, is_dealt=is_dealt)
    return advice(job.pattern, job.num_heads, (0, job.seq_len), step, again)


_NO_KERNEL = Traits(in_place=False, is_whole=False, scratch=lambda step, sizes, num_heads: 0)
