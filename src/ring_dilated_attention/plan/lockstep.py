"""What a job of many ranks computes, sends, holds and takes, without a plan for each: up to 65,536 ranks in a moment.

For one document in equal shards, where each segment length divides a part of the sequence (`parts.py`) or is a multiple
of it (`why_not` says what else keeps a job from it). Then all chunks of a branch are alike, but for a row of each head
where a rate does not divide a part, and at a hop the ranks that take part do the same: they go in lockstep. Pure
integers but for seconds, no torch.

Work and bytes are exact. So is the time of a pattern that is not causal, on contiguous ranks that are all alike: one
rank's ways carry what it sends, at the moments of the one that sends to it. Other times are between two bounds. At
most, that of a rank that takes part in every hop, with the most that any rank has there, and also sends and receives
each gradient that goes home. At least, the work of the busiest rank, the ways of the one that sends most, or the way of
the first chunk; not causal, that of a rank that always has the least (bounds by test against the clock, not by proof).
"""

import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial, reduce
from math import lcm
from typing import ClassVar, NamedTuple

from ..pattern import DilatedPattern
from .clock import Bounds, Hardware
from .exchange import RankPlan, Traffic, looked_at, plan_exchange
from .job import Job
from .memory import AttentionMemory, Sizes, Traits, attention_memory
from .pace import Flow, Pace, work_seconds
from .parts import Counts, Parts, parts_of
from .plan import Plan, Tile
from .sharding import Cut

# Ranks of a small job that tells what chunks, buffers and kernel calls are.
FEWEST = 4
# Hops of all ranks and branches up to which every rank is planned although closed forms hold: half a second's work.
MOST_HOPS = 1024


class EqualJob(NamedTuple):
    """An attention call on ranks, of one document."""

    pattern: DilatedPattern
    seq_len: int
    num_ranks: int
    num_heads: int
    num_kv_heads: int
    sizes: Sizes

    @property
    def heads(self) -> tuple[int, int]:
        """Of queries, and of keys and values."""
        return self.num_heads, self.num_kv_heads

    def bytes_sent(self, rank_plan: RankPlan) -> int:
        return sum(rank_plan.bytes_sent(self.sizes, backward=backward) for backward in (False, True))


def why_not(job: EqualJob, sharding: str) -> str | None:
    """What keeps a job from closed forms, or None."""
    pattern, seq_len, num_ranks = job[:3]
    folds = sharding == "zigzag" and num_ranks > 1
    num_parts = 2 * num_ranks if folds else num_ranks
    length, rest = divmod(seq_len, num_parts)
    if rest:
        return f"{seq_len:,} positions do not divide among {num_ranks:,} ranks" + (", in two parts each" * folds)
    if num_ranks == 1:
        return None
    for w, r in pattern.branches:
        if w < seq_len and length % w and w % length:
            return f"segments of {w:,} neither divide nor are multiples of {length:,} positions of a " + (
                "rank's part" if folds else "rank"
            )
        if folds and length < w < seq_len and num_ranks % (w // length):
            return f"a segment of {w:,} reaches over the middle of the sequence, and does not hold all of it"
        if folds and w >= seq_len and r > length:
            return f"rate {r:,} is higher than the {length:,} positions of a rank's part"
    return None


@dataclass(frozen=True)
class Form(ABC):
    """What a closed form tells of a job.

    pairs_of_ranks: that each rank computes. largest_sent: bytes of a forward, and of a forward with its backward, of
        the ranks that send most. sharing: by branch, ranks (or groups that deal heads) that share a segment.
    is_memory_exact: or rows of some head may be one more on other ranks than on those that tell the memory.
    """

    job: EqualJob
    sharding: str = "contiguous"

    @property
    @abstractmethod
    def pairs_of_ranks(self) -> list[int]: ...

    @property
    @abstractmethod
    def largest_sent(self) -> tuple[int, int]: ...

    @property
    @abstractmethod
    def num_hops(self) -> int: ...

    @property
    @abstractmethod
    def sharing(self) -> list[int]: ...

    @property
    @abstractmethod
    def is_memory_exact(self) -> bool: ...

    @abstractmethod
    def sent_of_branches(self) -> list[int]:
        """Bytes of keys and values that all ranks together send of each branch in a forward, beside what is dealt."""

    @abstractmethod
    def memory(self, traits: Traits) -> AttentionMemory:
        """Of the rank that holds most."""

    @abstractmethod
    def step_seconds(self, hardware: Hardware) -> Bounds:
        """Of one forward and its backward, under the rules of `clock.py`."""

    @abstractmethod
    def exposed(self, hardware: Hardware, seconds: Bounds) -> float:
        """The share of a step in which the busiest rank waits: at least so much, where the time is two bounds."""

    @cached_property
    def busiest(self) -> int:
        """The rank with the most pairs."""
        return self.pairs_of_ranks.index(max(self.pairs_of_ranks))

    @property
    def balance(self) -> float:
        """Mean work over the largest."""
        largest = self.pairs_of_ranks[self.busiest]
        return sum(self.pairs_of_ranks) / (len(self.pairs_of_ranks) * largest) if largest else 1.0


@dataclass(frozen=True)
class Lockstep(Form):
    """A ring for which `why_not` has nothing to say. held: as in `make_plan`."""

    is_ring: ClassVar[bool] = True

    held: range | None = None

    @property
    def length(self) -> int:
        return self.job.seq_len // self.job.num_ranks

    @property
    def folds(self) -> bool:
        """A rank has two parts, as far from the middle of the sequence as each other."""
        return self.sharding == "zigzag" and self.job.num_ranks > 1

    @cached_property
    def parts(self) -> list[Parts]:
        """By branch."""
        num = 2 * self.job.num_ranks if self.folds else self.job.num_ranks
        return parts_of(self.job.pattern, *self.job.heads, self.held, self.job.seq_len // num, num)

    @cached_property
    def counts(self) -> list[Counts]:
        """Of every rank, by branch."""
        return [branch.folded if self.folds else branch.counts for branch in self.parts]

    def of_ranks(self, name: str) -> list[int]:
        """For every rank the sum over branches of one of the counts."""
        columns = [getattr(counts, name) for counts in self.counts]
        counting = [column for column, x in zip(columns, self.parts, strict=True) if x.group > 1 or name == "pairs"]
        return [*reduce(partial(map, operator.add), counting or columns[:1])]

    @cached_property
    def pairs_of_ranks(self) -> list[int]:
        return self.of_ranks("pairs")

    @cached_property
    def sent_of_ranks(self) -> tuple[list[int], list[int]]:
        """Elements of K‖V in a forward, and of dK‖dV, that each rank sends, in units of B * D."""
        return self.of_ranks("passed"), self.of_ranks("met")

    @property
    def num_hops(self) -> int:
        return max((flow.group - 1 for flow in self.flows(max)), default=0)

    @property
    def sharing(self) -> list[int]:
        return [max(1, min(self.job.num_ranks, branch.sharing)) for branch in self.parts]

    def sent_of_branches(self) -> list[int]:
        return [self.job.sizes.unit * self.job.sizes.itemsize * sum(counts.passed) for counts in self.counts]

    @cached_property
    def largest_sent(self) -> tuple[int, int]:
        unit, gradient = (
            self.job.sizes.unit * self.job.sizes.itemsize,
            self.job.sizes.unit * self.job.sizes.sum_itemsize,
        )
        chunks, gradients = self.sent_of_ranks
        both = map(operator.add, map((2 * unit).__mul__, chunks), map(gradient.__mul__, gradients))
        return max(chunks) * unit, max(both)

    def traffic(self) -> Traffic:
        """What `choose_exchange` sees of the plans; of rates that do not divide a part about that."""
        unit, ranks = self.job.sizes.unit * self.job.sizes.itemsize, looked_at(self.job.num_ranks)
        passed, met = self.sent_of_ranks[0], self.of_ranks("met")
        travel = [(branch, branch.load(max).rows) for branch in self.parts if branch.members]
        # Two parts are one message where the same ranks need both.
        messages = [
            2 * rows if self.folds and x.group == x.num and not self.job.pattern.is_causal else rows
            for x, rows in travel
        ]
        return Traffic(
            sent=unit * max(passed[rank] for rank in ranks),
            hops=self.num_hops,
            largest=unit * max(messages, default=0),
            two_chunks=2 * unit * sum(rows for _, rows in travel) * (2 if self.folds else 1),
            together=unit * max(met[rank] for rank in ranks),
            calls=self.home_calls(max) + max(self._hop_calls(rank) for rank in ranks),
        )

    def _hop_calls(self, rank: int) -> int:
        calls = 0
        for flow in self.flows(max):
            first = rank - rank % flow.group
            size = min(flow.group, self.job.num_ranks - first)
            is_line = self.job.pattern.is_causal and not self.folds
            calls += len(flow.tiles) * (rank - first if is_line else size - 1)
        return calls

    def exposed(self, hardware: Hardware, seconds: Bounds) -> float:
        return max(0.0, 1 - self.work_seconds(hardware, self.all_calls) / seconds.least)

    @property
    def all_calls(self) -> int:
        return self.home_calls(max) + sum(len(flow.tiles) * (flow.group - 1) for flow in self.flows(max))

    def work_seconds(self, hardware: Hardware, calls: int = 0) -> float:
        """Of the busiest rank, both stages."""
        return work_seconds(self.pairs_of_ranks[self.busiest], self.job.sizes, hardware, calls)

    @property
    def is_memory_exact(self) -> bool:
        return all(branch.period == 1 for branch in self.parts if branch.group > 1)

    def memory(self, traits: Traits) -> AttentionMemory:
        """Of the rank that holds most: buffers and tiles are the same at every hop, so a few shards tell it."""
        found = (attention_memory(plan, self.job.sizes, traits) for plan in self.few_plans())
        return max(found, key=lambda x: x.forward_backward.num_bytes)

    def step_seconds(self, hardware: Hardware) -> Bounds:
        most = sum(self.at_most(hardware))
        return Bounds.exactly(most) if self.is_alike else Bounds(min(self.at_least(hardware), most), most)

    def at_least(self, hardware: Hardware) -> float:
        ways = self.largest_sent[1] / hardware.bytes_per_second
        handshakes = 2 * hardware.handshake if self.job.num_ranks > 1 else 0.0
        least = handshakes + max(self.work_seconds(hardware), ways, self.first_chunk_arrives(hardware))
        if self.job.pattern.is_causal or self.folds:
            return least
        return max(least, sum(self._pace(min, hardware).seconds()))

    def first_chunk_arrives(self, hardware: Hardware) -> float:
        """Hop by hop at the last rank of its ring, in both stages."""
        unit = self.job.sizes.unit * self.job.sizes.itemsize / hardware.bytes_per_second
        hops = [
            (2 * (min(branch.members[-1], self.job.num_ranks) - 1), 2 if branch.is_sparse else branch.load(min).rows)
            for branch in self.parts
            if branch.members
        ]
        return max((num * (rows * unit + hardware.latency_seconds) for num, rows in hops), default=0.0)

    def at_most(self, hardware: Hardware) -> tuple[float, float]:
        """Seconds of a forward, and of its backward."""
        return self._pace(max, hardware).seconds()

    @cached_property
    def is_alike(self) -> bool:
        """All ranks do the same at all times."""
        straddling = [branch for branch in self.parts if branch.group > 1]
        are_even = all(branch.period == 1 and len(branch.members) == 1 for branch in straddling)
        is_exact = self.is_ring and are_even and not self.job.pattern.is_causal and not self.folds
        return not straddling or is_exact

    def _pace(self, pick: Callable[..., int], hardware: Hardware) -> Pace:
        home = self.home_pairs(pick), self.home_calls(pick)
        return Pace(self.flows(pick), *home, self.job.pattern.is_causal, self.job.num_ranks, self.job.sizes, hardware)

    def flows(self, pick: Callable[..., int]) -> list[Flow]:
        """What ranks pass on at a hop, at most (`max`) or at least (`min`), by branch."""
        travel = (x for x in self.parts if x.members and not (x.is_sparse and pick is min))
        return [self._flow(branch, pick) for branch in travel]

    def _flow(self, branch: Parts, pick: Callable[..., int]) -> Flow:
        members = branch.members if pick is max else branch.members[:1]
        times, rows = 1, branch.load(pick).rows
        if branch.is_sparse:
            # Rings of other phases are of other ranks: messages of all of them may wait for one another.
            rows = 2 * len(branch.sent)
        if self.folds:
            # Two parts. At any hop of a causal pattern one of their two segments has work for a rank, if all its ranks
            # are in one ring. Where they are in one segment, the early part of another rank meets both, or both of its
            # parts the late one.
            is_one = branch.group == branch.num
            times = (1 if self.job.pattern.is_causal and not branch.is_sparse else 2) * (2 if is_one else 1)
            rows *= 2
            members = (self.job.num_ranks,) if is_one else members
        return Flow(members, rows, self._tiles(branch, times, pick))

    def _tiles(self, branch: Parts, times: int, pick: Callable[..., int]) -> tuple[int, ...]:
        """Of which the first matters beside their sum: what it takes, gradients on their way have time for."""
        num_pairs = times * branch.load(pick).hop_pairs
        if branch.period > 1:
            calls = times * branch.most_calls() if pick is max else 1
        else:
            hops = [hop.tiles for plan in self.few_plans(branch.branch) for hop in plan.hops if hop.tiles]
            if hops and not self.folds:
                return tuple(tile.pairs for tile in hops[0])
            calls = pick((len(tiles) for tiles in hops), default=1)
        return (*(0,) * (calls - 1), num_pairs) if pick is max else (num_pairs, *(0,) * (calls - 1))

    def home_pairs(self, pick: Callable[..., int]) -> int:
        return sum(self._home_pairs(branch, pick) for branch in self.parts)

    def _home_pairs(self, branch: Parts, pick: Callable[..., int]) -> int:
        own = branch.local_pairs if branch.group == 1 else branch.load(pick).own_pairs
        if not self.folds:
            return own
        # Of two parts in one segment the late one sees the early one too; not causal, each sees the other.
        are_together = 1 < branch.group == branch.num
        return 2 * own + (1 if self.job.pattern.is_causal else 2) * branch.load(pick).hop_pairs * are_together

    def home_calls(self, pick: Callable[..., int]) -> int:
        """Those of few ranks; where rows are not alike, with as many more or less as there can be on others."""
        odd = (branch for branch in self.parts if branch.group > 1 and branch.period > 1)
        spread = sum(self._pairs_of_parts(branch) * branch.most_calls() for branch in odd)

        def calls(tile: Tile, plan: Plan) -> int:
            """As in `program.py`: one, or one for each batch entry."""
            rows = tile.query
            is_one = rows.segments == 1 or rows.segments * rows.segment_step == plan.num_rows
            return 1 if is_one else self.job.sizes.batch

        found = pick(sum(calls(tile, plan) for tile in plan.local) for plan in self.few_plans())
        return max(0, found + (spread if pick is max else -spread))

    def _pairs_of_parts(self, branch: Parts) -> int:
        """Of a rank's own parts, each with itself and, in one segment, with the other."""
        return 1 if not self.folds else 4 if branch.group == branch.num else 2

    def few_plans(self, branch: int | None = None) -> Sequence[Plan]:
        """Of ranks of a small job; of one branch alone."""
        pattern, num_ranks = self.small
        if branch is not None:
            pattern = _alone(pattern, branch)
        ranks, others = range(num_ranks), (*self.job.heads, self.held, 1)
        return [x.plan for x in ring_plans(pattern, num_ranks, self.length, self.sharding, *others, ranks)]

    @cached_property
    def small(self) -> tuple[DilatedPattern, int]:
        """The pattern and the number of ranks of a job whose ranks hold at a hop what they hold in this one, but for a
        row of each head where places differ: FEWEST of them, or some more. Its rings are as long as they can be."""
        if not self.folds:
            num_ranks = min(self.job.num_ranks, FEWEST)
            groups = [min(branch.group, num_ranks) for branch in self.parts]
        else:
            halves = [min(branch.group, 4) for branch in self.parts if branch.group < branch.num]
            unit = lcm(*halves)
            num_ranks = unit * -(-FEWEST // unit)
            num_ranks += unit * (
                (self.job.num_ranks - num_ranks) % 2
            )  # what is dealt joins the two parts in the middle
            if num_ranks >= self.job.num_ranks:
                return self.job.pattern, self.job.num_ranks
            groups = [2 * num_ranks if x.group == x.num else min(x.group, 4) for x in self.parts]
        lengths = [
            group * branch.length if group > 1 else w
            for w, group, branch in zip(self.job.pattern.segment_lengths, groups, self.parts, strict=True)
        ]
        return replace(self.job.pattern, segment_lengths=lengths), num_ranks


def all_hops(job: EqualJob) -> int:
    """Of all ranks and branches together, and more of many heads: what planning them takes goes by it."""
    length = max(1, job.seq_len // job.num_ranks)
    hops = sum(min(job.num_ranks, -(-w // length)) - 1 for w in job.pattern.segment_lengths if w > length)
    return job.num_ranks * hops * max(1, job.num_heads // 16)


@lru_cache(maxsize=64)
def ring_plans(
    pattern: DilatedPattern,
    num_ranks: int,
    length: int,
    sharding: str,
    num_heads: int,
    num_kv_heads: int,
    held: range | None,
    inner: int,
    ranks: Sequence[int],
) -> list[RankPlan]:
    """Of these of the ranks of a ring, which have so many positions each."""
    cut = Cut(sharding, num_ranks, inner=inner)
    shards = cut.shards_of(cut.default_lengths(num_ranks * length))
    heads = (num_heads, num_kv_heads)
    return [plan_exchange("ring", Job(pattern, shards, *heads, held=held), k, inner=inner) for k in ranks]


def _alone(pattern: DilatedPattern, branch: int) -> DilatedPattern:
    """One branch of a pattern, which all heads run, or those of its group."""
    w, r = pattern.branches[branch]
    if pattern.heads == "all":
        return replace(pattern, segment_lengths=[w], dilation_rates=[r])
    lengths = [w if i == branch else 1 for i in range(len(pattern.branches))]
    return replace(pattern, segment_lengths=lengths)
