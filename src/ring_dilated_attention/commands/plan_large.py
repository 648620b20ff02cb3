"""`rda plan` of more ranks than it plans one by one: closed forms where they hold, else bounds from sampled ranks."""

import argparse
import sys
import time
from functools import lru_cache
from itertools import pairwise
from math import inf
from typing import Any, NamedTuple

from ..kernels.traits import TRAITS
from ..pattern import DilatedPattern
from ..plan.advice import Waiting, advice
from ..plan.clock import Bounds, Hardware, time_text
from ..plan.exchange import Choice, RankPlan, choose_exchange, plan_exchange, traffic_of
from ..plan.forms import Dealt, closed_form, why_not_by
from ..plan.job import Job
from ..plan.lockstep import MOST_HOPS, EqualJob, Form, Lockstep, all_hops, why_not
from ..plan.memory import attention_memory
from ..plan.pace import work_seconds
from ..plan.parts import places_counted
from ..plan.sharding import SHARDINGS, Shard, shard_length
from ..plan.sharing import branch_shares
from ..plan.totals import pairs
from .numbers import scaled, size_text
from .output import aligned

# Seconds that planning every rank may take; of a job that takes longer ranks are sampled for half as long.
MOST_SECONDS = 10
# Ranks whose shardings are compared too, and whose step is modelled for each.
MOST_COMPARED = 64
# Of a plan's own time, what all that is printed takes; where shardings are compared; and of rings that take long too.
PASSES, PASSES_COMPARED, SECONDS_PER_HOP, MANY_HOPS = 2, 10, 1.5e-4, 10_000
SECONDS_A_PLACE = 4e-6  # that a closed form counts: measured
FLOPS_PER_PAIR = 7 * 2  # of each number of a head: 2 products forward, 5 backward, 2 operations each


class Large(NamedTuple):
    """A job of many ranks, as `rda plan` takes it. exchange: by which chunks travel."""

    job: EqualJob
    shards: tuple[Shard, ...]
    sharding: str
    documents: tuple[int, ...] | None
    kernel: str
    exchange: str = "ring"

    @property
    def borders(self) -> tuple[int, ...]:
        """Of documents."""
        return self.documents or (0, self.job.seq_len)

    @property
    def call(self) -> Job:
        """What an exchange is chosen for."""
        return Job(self.job.pattern, self.shards, *self.job.heads, self.documents)

    @property
    def form(self) -> Form:
        return closed_form(self.exchange, self.job, self.sharding)

    def obstacle(self) -> str | None:
        """What keeps it from closed forms."""
        if len(self.borders) > 2:
            return "documents are packed"
        found = why_not_by(self.exchange, self.job, self.sharding)
        if found is None and len(set(map(shard_length, self.shards))) > 1:
            return "shards are not of one length"
        return found

    def answers_at_once(self) -> bool:
        """Whether closed forms do, and planning every rank would take longer than a moment."""
        return all_hops(self.job) > MOST_HOPS and self.obstacle() is None

    def balance(self) -> float | None:
        """Of equal shards; None where no closed form tells it."""
        is_closed = len(self.borders) == 2 and why_not(self.job, self.sharding) is None
        return self.form.balance if is_closed else None


def with_exchange(large: Large, exchange: str) -> tuple[Large, Choice]:
    """The job with the exchange that was asked for; of "auto" the one that a call takes, where closed forms tell."""
    if exchange != "auto":
        return large._replace(exchange=exchange), Choice(exchange, "asked for")
    if large.obstacle() is not None:
        return large, Choice("ring", "")
    form = large.form
    assert isinstance(form, Lockstep)
    choice = choose_exchange(large.call, large.job.sizes, form.traffic())
    return large._replace(exchange=choice.exchange), choice


def closed(large: Large, hardware: Hardware | None) -> dict[str, Any]:
    """All figures, exact but for memory (`Form.is_memory_exact`) and the time, which may be two bounds."""
    job = large.job

    def again(pattern: DilatedPattern) -> Bounds | None:
        assert hardware is not None
        other = large._replace(job=job._replace(pattern=pattern))
        return other.form.step_seconds(hardware) if other.obstacle() is None else None

    form = large.form
    forward, both = form.largest_sent
    flops = FLOPS_PER_PAIR * job.sizes.head_dim * job.sizes.batch
    memory = form.memory(TRAITS[large.kernel]).forward_backward
    found: dict[str, Any] = {
        "method": "closed forms, exact" + ("" if form.is_memory_exact else " but for memory: to a row of each head"),
        "positions_per_rank": job.seq_len // job.num_ranks,
        "flops": flops * sum(form.pairs_of_ranks),
        "largest_flops": flops * form.pairs_of_ranks[form.busiest],
        "busiest_rank": form.busiest,
        "balance": form.balance,
        "balance_of_rings": {name: large._replace(exchange="ring", sharding=name).balance() for name in SHARDINGS},
        "hops": form.num_hops,
        "largest_forward_sent_bytes": forward,
        "largest_sent_bytes": both,
        "peak_bytes": memory.num_bytes,
        "peak_items": [item._asdict() for item in memory.items],
        "ranks_that_share": form.sharing,
    }
    if hardware is not None:
        seconds = form.step_seconds(hardware)
        found["step_seconds"] = seconds._asdict()
        exposed, is_dealt = form.exposed(hardware, seconds), isinstance(form, Dealt)
        waiting = Waiting(exposed, seconds, form.sent_of_branches(), is_dealt=is_dealt)
        found["advice"] = advice(job.pattern, job.num_heads, (0, job.seq_len), waiting, again)
    return found


def sampled(large: Large, hardware: Hardware | None) -> dict[str, Any]:
    """Bounds: totals are exact where one document is planned, the largest figures those of the ranks looked at."""
    job = large.job
    flops = FLOPS_PER_PAIR * job.sizes.head_dim * job.sizes.batch
    ranks, plans, peaks = [], [], []
    began = time.monotonic()
    for rank in _order(job.num_ranks):
        ranks.append(rank)
        plans.append(plan_of(large, rank))
        memory = attention_memory(plans[-1].plan, job.sizes, TRAITS[large.kernel], plans[-1].dealing)
        peaks.append(memory.forward_backward)
        # The last two at least: of a causal pattern one computes most, and the other sends most chunks.
        if len(ranks) > 1 and time.monotonic() - began > MOST_SECONDS / 2:
            break
    work = [x.plan.pairs for x in plans]
    sender = max(plans, key=job.bytes_sent)
    total = sum(pairs(job.pattern, b - a, job.num_heads) for a, b in pairwise(large.borders))
    peak = max(peaks, key=lambda x: x.num_bytes)
    found: dict[str, Any] = {
        "method": f"bounds from {len(ranks)} sampled ranks of {job.num_ranks:,} ({large.obstacle()})",
        "sampled_ranks": sorted(ranks),
        "flops": flops * total,
        "largest_flops": flops * max(work),
        "busiest_rank": ranks[work.index(max(work))],
        "balance": min(1.0, total / (job.num_ranks * max(work))) if max(work) else 1.0,
        "largest_forward_sent_bytes": max(x.bytes_sent(job.sizes) for x in plans),
        "largest_sent_bytes": job.bytes_sent(sender),
        "peak_bytes": peak.num_bytes,
        "peak_items": [item._asdict() for item in peak.items],
    }
    if large.exchange == "ring":
        traffic = traffic_of([x.plan for x in plans], job.sizes)
        choice = choose_exchange(large.call, job.sizes, traffic)
        found["auto"] = {"exchange": choice.exchange, "reason": f"by the ranks sampled, {choice.reason}"}
    return found if hardware is None else found | _times_of_sample(large, max(work), sender, hardware)


def _order(num: int) -> list[int]:
    """Ranks to look at: the last two, then ever finer halves; few of them reach the extremes of most patterns."""
    halves = (round((num - 1) * (2 * i + 1) / 2**k) for k in range(1, 8) for i in range(2 ** (k - 1)))
    return list(dict.fromkeys([num - 1, num - 2, 0, *halves]))


def _times_of_sample(large: Large, num_pairs: int, sender: RankPlan, hardware: Hardware) -> dict[str, Any]:
    """A step takes what its busiest rank computes, or what the `sender` sends, at least."""
    job = large.job
    busy = work_seconds(num_pairs, job.sizes, hardware)
    least = max(busy, job.bytes_sent(sender) / hardware.bytes_per_second) + 2 * hardware.handshake
    is_dealt = sender.dealing is not None
    shares = branch_shares(large.call, [sender.plan])
    bytes_sent = [share.sent * job.sizes.unit * job.sizes.itemsize for share in shares]
    waiting = Waiting(1 - busy / least, Bounds(least, inf), bytes_sent, senders="one rank", is_dealt=is_dealt)
    said = advice(job.pattern, job.num_heads, large.borders, waiting, lambda pattern: None)
    return {"step_seconds": {"least": least, "most": None}, "advice": said}


@lru_cache(maxsize=1)  # the rank that was timed is the first that is sampled
def plan_of(large: Large, rank: int) -> RankPlan:
    make = plan_exchange.__wrapped__  # one that is kept already would take no time
    return make(large.exchange, large.call, rank)


def seconds_of_planning(large: Large) -> float:
    """About how long the plans of all ranks would take: by that of the last one, or where that would take long too, by
    its hops."""
    job = large.job
    length = max(map(shard_length, large.shards))
    num_hops = sum(min(job.num_ranks, -(-w // length)) for w in job.pattern.segment_lengths if w > length)
    if num_hops > MANY_HOPS:
        return PASSES * SECONDS_PER_HOP * num_hops * job.num_ranks * max(1, job.num_heads // 8)
    began = time.monotonic()
    plan_of(large, job.num_ranks - 1)
    passes = PASSES_COMPARED if job.num_ranks <= MOST_COMPARED else PASSES
    return passes * (time.monotonic() - began) * job.num_ranks


def seconds_of_counting(large: Large) -> float:
    """About how long closed forms of both shardings take."""
    job = large.job
    parts = (job.num_ranks, 2 * job.num_ranks)
    return SECONDS_A_PLACE * sum(places_counted(job.pattern, max(1, job.seq_len // num), num) for num in parts)


def say_before(seconds: float, large: Large, *, is_sampled: bool) -> None:
    """Nobody should wait without knowing for what."""
    if seconds <= 2:
        return
    sample = max(MOST_SECONDS / 2, 2 * seconds / large.job.num_ranks)  # two plans, and their memory
    how = f"about {time_text(seconds)}"
    if is_sampled:
        how = f"up to {time_text(sample)}, for a sample: {large.obstacle()}"
    print(f"planning {large.job.num_ranks:,} ranks takes {how}", file=sys.stderr)


def text(large: Large, found: dict[str, Any]) -> str:
    is_bound = "sampled_ranks" in found
    at_least, at_most = ("at least ", "at most ") if is_bound else ("", "")
    rows = [
        ("work of all ranks", scaled(found["flops"], "FLOP")),
        (f"largest work, rank {found['busiest_rank']:,}", at_least + scaled(found["largest_flops"], "FLOP")),
        ("balance (mean work over the largest)", f"{at_most}{found['balance']:.1%}"),
        ("sent by a rank in a forward, at most", at_least + size_text(found["largest_forward_sent_bytes"])),
        ("sent by a rank in all, at most", at_least + size_text(found["largest_sent_bytes"])),
        ("peak memory of a rank", at_least + size_text(found["peak_bytes"])),
    ]
    if "step_seconds" in found:
        least, most = found["step_seconds"]["least"], found["step_seconds"]["most"]
        span = time_text(least) if least == most else f"{time_text(least)} to {time_text(most)}" if most else ""
        rows.append(("modelled step", span or f"at least {time_text(least)}"))
    taken, reason = found["exchange"].values()
    other = f" (the figures are those of {large.exchange}: --exchange {taken} has others)"
    other = "" if taken == large.exchange else other
    lines = [f"{large.job.num_ranks:,} ranks, by {found['method']}", f"exchange: {taken}{other}: {reason}"]
    lines += [aligned(("", "forward and backward"), rows)]
    lines += [f"  {item['num_bytes'] / 1e6:>12,.1f} MB  {item['name']}" for item in found["peak_items"]]
    for i, sharing in enumerate(found.get("ranks_that_share", ())):
        what = f"travels among {sharing:,} ranks" if sharing > 1 else "stays at home"
        what = "is computed by heads: each rank has all positions of some" if large.exchange == "all_to_all" else what
        lines.append(f"branch {i} ({large.job.pattern.branches[i]}) {what}")
    by_sharding = found.get("balance_of_rings", {})
    if by_sharding:
        words = (f"{name} {'not known' if x is None else format(x, '.1%')}" for name, x in by_sharding.items())
        lines.append("balance by sharding: " + ", ".join(words))
    return "\n".join(lines)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--every-rank", action="store_true", help="plan each rank, however long it takes")
