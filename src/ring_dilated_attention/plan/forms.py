"""The closed form of a job by its exchange: a ring (`lockstep.py`), all chunks in one round, or heads dealt. No torch.

What chunks of a round and heads take on their way is between two bounds: at least their own bytes, at most those of all
messages that may wait for one another.
"""

import operator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

from .clock import Bounds, Hardware
from .dealing import check_dealing, dealt_bytes
from .lockstep import EqualJob, Form, Lockstep, ring_plans, why_not
from .memory import AttentionMemory, Traits, attention_memory
from .pace import stage_seconds
from .plan import gathered

MOST_KINDS = 8  # of places that deal heads and differ in a row of each
STAGES_OF_DEALING = 14  # tensors that are dealt, there and back, in a forward and its backward


def why_not_by(exchange: str, job: EqualJob, sharding: str, inner: int = 1) -> str | None:
    """What keeps a job from closed forms, by its exchange: `why_not` of its rings."""
    if job.seq_len % job.num_ranks:
        return why_not(job, sharding)
    return why_not(job._replace(num_ranks=1 if exchange == "all_to_all" else job.num_ranks // inner), sharding)


def closed_form(exchange: str, job: EqualJob, sharding: str = "contiguous", inner: int = 1) -> Form:
    """The form of a job that has one (`why_not_by`), of a call as `plan_exchange` takes it.

    Raises:
        ValueError: if heads cannot be dealt.
    """
    if (size := job.num_ranks if exchange == "all_to_all" else inner) > 1:
        check_dealing(job.num_kv_heads, size)
        return Dealt(job, sharding, size)
    return Gathered(job, sharding) if exchange == "all_gather" else Lockstep(job, sharding)


class Gathered(Lockstep):
    """The same in one round: every chunk goes straight to every rank that meets it (`plan.gathered`)."""

    is_ring = False

    @cached_property
    def sent_of_ranks(self) -> tuple[list[int], list[int]]:
        return self.of_ranks("straight"), self.of_ranks("met")

    @property
    def num_hops(self) -> int:
        return min(1, super().num_hops)

    def sent_of_branches(self) -> list[int]:
        return [self.job.sizes.unit * self.job.sizes.itemsize * sum(counts.straight) for counts in self.counts]

    def at_least(self, hardware: Hardware) -> float:
        handshakes = 2 * hardware.handshake if self.job.num_ranks > 1 else 0.0
        return handshakes + max(self.work_seconds(hardware), self.largest_sent[1] / hardware.bytes_per_second)

    def memory(self, traits: Traits) -> AttentionMemory:
        """Of the ranks to which most comes: chunks with their gradients, or gradients of its own as well."""
        home, met = self.sent_of_ranks
        both = [*map(operator.add, met, home)]
        plans = [
            replace(gathered(plan), received_size=met[k], home_size=home[k])
            for k in {met.index(max(met)), both.index(max(both))}
            for plan in self.few_plans()
        ]
        found = (attention_memory(plan, self.job.sizes, traits) for plan in plans)
        return max(found, key=lambda x: x.forward_backward.num_bytes)

    def at_most(self, hardware: Hardware) -> tuple[float, float]:
        """Messages leave a rank in the order of peers, and come in in that order. So of those that wait for one another
        each is of another pair of places, farther down the ranks than the one before."""
        unit, flows = self.job.sizes.unit / hardware.bytes_per_second, self.flows(max)
        groups = [min(branch.group, self.job.num_ranks) for branch in self.parts if branch.members]
        are_nested = all(b % a == 0 for a, b in pairwise(sorted(groups)))
        widest = max(groups, default=1) if are_nested else self.job.num_ranks
        turns = (min(2 * widest - 3, -(-widest // g) * (2 * g - 3)) for g in groups)
        rows = sum(number * flow.rows for number, flow in zip(turns, flows, strict=True))
        passes = [rows * unit * itemsize for itemsize in (self.job.sizes.itemsize, self.job.sizes.sum_itemsize)]
        home, calls = self.home_pairs(max), self.home_calls(max)
        met = max(self.pairs_of_ranks) - self.home_pairs(min), self.all_calls - calls
        seconds = [hardware.handshake if self.job.num_ranks > 1 else 0.0] * 2
        for stage, products in enumerate((2, 5)):
            at_home = stage_seconds(home, products, self.job.sizes, hardware, calls)
            comes = passes[0] + hardware.latency_seconds if rows else 0.0
            seconds[stage] += max(at_home, comes) + stage_seconds(met[0], products, self.job.sizes, hardware, met[1])
        seconds[1] += passes[1] + hardware.latency_seconds if rows else 0.0
        return seconds[0], seconds[1]


@dataclass(frozen=True)
class Dealt(Form):
    """Groups of `inner` neighbours deal heads among them, around a ring of groups: each place in them has a ring of its
    own, of ranks with its share of the heads and the group's positions. One group is an all-to-all. Work and bytes are
    exact unless more than MOST_KINDS places differ, by a row of each head."""

    inner: int = 1

    @cached_property
    def rings(self) -> list[Lockstep]:
        """By place; one and the same where places have as many rows of each branch, or are so many that some stand for
        their neighbours."""
        share = self.job.num_heads // self.inner
        found: dict[tuple, Lockstep] = {}
        job = self.job._replace(num_ranks=self.job.num_ranks // self.inner)
        rings = [Lockstep(job, self.sharding, range(k * share, (k + 1) * share)) for k in range(self.inner)]
        rings = [found.setdefault(tuple(branch.kind for branch in ring.parts), ring) for ring in rings]
        if len(found) <= MOST_KINDS or self.job.pattern.heads == "split":
            return rings
        return [rings[k - k % -(-self.inner // MOST_KINDS)] for k in range(self.inner)]

    @property
    def kinds(self) -> list[Lockstep]:
        return list({id(ring): ring for ring in self.rings}.values())

    @cached_property
    def pairs_of_ranks(self) -> list[int]:
        """As ranks are numbered, those of a group one after the other."""
        return [work for group in zip(*(ring.pairs_of_ranks for ring in self.rings), strict=True) for work in group]

    @property
    def num_hops(self) -> int:
        return max(ring.num_hops for ring in self.kinds)

    @property
    def sharing(self) -> list[int]:
        return [max(found) for found in zip(*(ring.sharing for ring in self.kinds), strict=True)]

    def sent_of_branches(self) -> list[int]:
        return [sum(found) for found in zip(*(ring.sent_of_branches() for ring in self.rings), strict=True)]

    @property
    def dealt_bytes(self) -> tuple[int, int]:
        """What a rank sends to deal in a forward, and in its backward."""
        lengths = (self.job.seq_len // self.job.num_ranks,) * self.inner
        others = (0, *self.job.heads, *self.job.sizes[:3])
        forward, backward = (dealt_bytes(lengths, *others, backward=b) for b in (False, True))
        return forward, backward

    @cached_property
    def largest_sent(self) -> tuple[int, int]:
        sent = [ring.largest_sent for ring in self.kinds]
        forward, both = (max(column) for column in zip(*sent, strict=True))
        return forward + self.dealt_bytes[0], both + sum(self.dealt_bytes)

    @property
    def is_memory_exact(self) -> bool:
        return all(ring.is_memory_exact for ring in self.kinds)

    def memory(self, traits: Traits) -> AttentionMemory:
        pattern, num_ranks = self.rings[0].small
        heads, length = self.job.heads, self.job.seq_len // self.job.num_ranks
        places = [self.rings.index(ring) for ring in self.kinds]
        if not self.is_memory_exact:  # of each set of branches one
            places = list({tuple(bool(x.phases) for x in self.rings[k].parts): k for k in places}.values())
        ranks = tuple(group * self.inner + k for group in range(num_ranks) for k in places)
        plans = ring_plans(pattern, num_ranks * self.inner, length, self.sharding, *heads, None, self.inner, ranks)
        found = (attention_memory(x.plan, self.job.sizes, traits, x.dealing) for x in plans)
        return max(found, key=lambda x: x.forward_backward.num_bytes)

    def step_seconds(self, hardware: Hardware) -> Bounds:
        """What is dealt comes to a rank of each peer in turn, at most after all that other ranks send one another."""
        # A stage begins when the slowest ring has ended the one before.
        most = sum(max(seconds) for seconds in zip(*(ring.at_most(hardware) for ring in self.kinds), strict=True))
        least = max(ring.step_seconds(hardware).least for ring in self.kinds)
        passes = sum(self.dealt_bytes) / hardware.bytes_per_second
        turns = (2 * self.inner - 3) / (self.inner - 1)
        waits = STAGES_OF_DEALING * hardware.latency_seconds
        alone = 2 * hardware.handshake if len(self.rings[0].pairs_of_ranks) == 1 else 0.0
        return Bounds(least + passes + waits + alone, max(least, most) + turns * passes + waits + alone)

    def exposed(self, hardware: Hardware, seconds: Bounds) -> float:
        work = max(ring.work_seconds(hardware, ring.all_calls) for ring in self.kinds)
        return max(0.0, 1 - work / seconds.least)
