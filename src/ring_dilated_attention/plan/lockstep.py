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
from itertools import pairwise
from math import lcm
from typing import ClassVar

from ..pattern import DilatedPattern
from .clock import Bounds, Hardware
from .dealing import check_dealing, dealt_bytes
from .exchange import RankPlan, Traffic, looked_at, plan_exchange
from .memory import AttentionMemory, Sizes, Traits, attention_memory
from .pace import Flow, Pace, stage_seconds
from .parts import Counts, Parts, parts_of
from .plan import Plan, Tile, gathered
from .sharding import Cut

# Ranks of a small job that tells what chunks, buffers and kernel calls are; and the longest period of places that one
# goes through, which takes as many more.
FEWEST, LONGEST_PERIOD = 4, 13
# Hops of all ranks and branches up to which every rank is planned although closed forms hold: half a second's work.
MOST_HOPS = 1024
STAGES_OF_DEALING = 14  # tensors that are dealt, there and back, in a forward and its backward


def why_not(
    pattern: DilatedPattern, seq_len: int, num_ranks: int, sharding: str, documents: tuple[int, ...] | None
) -> str | None:
    """What keeps a job from closed forms, or None."""
    if documents is not None and len(documents) > 2:
        return "documents are packed"
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


class Form(ABC):
    """What all closed forms tell by the pairs of each rank."""

    @property
    @abstractmethod
    def pairs_of_ranks(self) -> list[int]:
        """Pairs that each rank computes."""

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

    pattern: DilatedPattern
    seq_len: int
    num_ranks: int
    num_heads: int
    num_kv_heads: int
    sizes: Sizes
    sharding: str = "contiguous"
    held: range | None = None

    @property
    def length(self) -> int:
        return self.seq_len // self.num_ranks

    @property
    def folds(self) -> bool:
        """A rank has two parts, as far from the middle of the sequence as each other."""
        return self.sharding == "zigzag" and self.num_ranks > 1

    @cached_property
    def parts(self) -> list[Parts]:
        """By branch."""
        num = 2 * self.num_ranks if self.folds else self.num_ranks
        return parts_of(self.pattern, self.num_heads, self.num_kv_heads, self.held, self.seq_len // num, num)

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
        """Pairs that each rank computes."""
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
        """By branch, ranks that share a segment."""
        return [max(1, min(self.num_ranks, branch.sharing)) for branch in self.parts]

    def sent_of_branches(self) -> list[int]:
        """Bytes of keys and values that all ranks together send of each branch in a forward."""
        return [self.sizes.unit * self.sizes.itemsize * sum(counts.passed) for counts in self.counts]

    @cached_property
    def largest_sent(self) -> tuple[int, int]:
        """Bytes of a forward, and of a forward with its backward, of the ranks that send most."""
        unit, gradient = self.sizes.unit * self.sizes.itemsize, self.sizes.unit * self.sizes.sum_itemsize
        chunks, gradients = self.sent_of_ranks
        both = map(operator.add, map((2 * unit).__mul__, chunks), map(gradient.__mul__, gradients))
        return max(chunks) * unit, max(both)

    def traffic(self) -> Traffic:
        """What `choose_exchange` sees of the plans; of rates that do not divide a part about that."""
        unit, ranks = self.sizes.unit * self.sizes.itemsize, looked_at(self.num_ranks)
        passed, met = self.sent_of_ranks[0], self.of_ranks("met")
        travel = [(branch, branch.load(max).rows) for branch in self.parts if branch.members]
        # Two parts are one message where the same ranks need both.
        messages = [
            2 * rows if self.folds and x.group == x.num and not self.pattern.is_causal else rows for x, rows in travel
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
            size = min(flow.group, self.num_ranks - first)
            is_line = self.pattern.is_causal and not self.folds
            calls += len(flow.tiles) * (rank - first if is_line else size - 1)
        return calls

    def exposed(self, hardware: Hardware, seconds: Bounds) -> float:
        """The share of a step in which the busiest rank waits: at least so much, where the time is two bounds."""
        return max(0.0, 1 - self.work_seconds(hardware, self.all_calls) / seconds.least)

    @property
    def all_calls(self) -> int:
        return self.home_calls(max) + sum(len(flow.tiles) * (flow.group - 1) for flow in self.flows(max))

    def work_seconds(self, hardware: Hardware, calls: int = 0) -> float:
        """Of the busiest rank, both stages."""
        return sum(stage_seconds(self.pairs_of_ranks[self.busiest], k, self.sizes, hardware, calls) for k in (2, 5))

    @property
    def is_memory_exact(self) -> bool:
        """Rows of some head may be one more on other ranks than on those that tell the memory."""
        return all(branch.period == 1 for branch in self.parts if branch.group > 1)

    def memory(self, traits: Traits) -> AttentionMemory:
        """Of the rank that holds most: buffers and tiles are the same at every hop, so a few shards tell it."""
        found = (attention_memory(plan, self.sizes, traits) for plan in self.few_plans())
        return max(found, key=lambda x: x.forward_backward.num_bytes)

    def step_seconds(self, hardware: Hardware) -> Bounds:
        """Of one forward and its backward, under the rules of `clock.py`."""
        most = sum(self.at_most(hardware))
        return Bounds.exactly(most) if self.is_alike else Bounds(min(self.at_least(hardware), most), most)

    def at_least(self, hardware: Hardware) -> float:
        ways = self.largest_sent[1] / hardware.bytes_per_second
        handshakes = 2 * hardware.handshake if self.num_ranks > 1 else 0.0
        least = handshakes + max(self.work_seconds(hardware), ways, self.first_chunk_arrives(hardware))
        if self.pattern.is_causal or self.folds:
            return least
        return max(least, sum(self._pace(min, hardware).seconds()))

    def first_chunk_arrives(self, hardware: Hardware) -> float:
        """Hop by hop at the last rank of its ring, in both stages."""
        unit = self.sizes.unit * self.sizes.itemsize / hardware.bytes_per_second
        hops = [
            (2 * (min(branch.members[-1], self.num_ranks) - 1), 2 if branch.is_sparse else branch.load(min).rows)
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
        is_exact = self.is_ring and are_even and not self.pattern.is_causal and not self.folds
        return not straddling or is_exact

    def _pace(self, pick: Callable[..., int], hardware: Hardware) -> Pace:
        home = self.home_pairs(pick), self.home_calls(pick)
        return Pace(self.flows(pick), *home, self.pattern.is_causal, self.num_ranks, self.sizes, hardware)

    def flows(self, pick: Callable[..., int]) -> list[Flow]:
        """What ranks pass on at a hop, at most (`max`) or at least (`min`), by branch."""
        travel = (x for x in self.parts if x.members and not (x.is_sparse and pick is min))
        return [self._flow(branch, pick) for branch in travel]

    def _flow(self, branch: Parts, pick: Callable[..., int]) -> Flow:
        members = branch.members if pick is max else branch.members[:1]
        times, rows = 1, branch.load(pick).rows
        if (
            branch.is_sparse
        ):  # rings of other phases are of other ranks: messages of all of them may wait for one another
            rows = 2 * len(branch.sent)
        if self.folds:
            # Two parts. At any hop of a causal pattern one of their two segments has work for a rank, if all its ranks
            # are in one ring. Where they are in one segment, the early part of another rank meets both, or both of its
            # parts the late one.
            is_one = branch.group == branch.num
            times = (1 if self.pattern.is_causal and not branch.is_sparse else 2) * (2 if is_one else 1)
            rows *= 2
            members = (self.num_ranks,) if is_one else members
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
        return 2 * own + (1 if self.pattern.is_causal else 2) * branch.load(pick).hop_pairs * are_together

    def home_calls(self, pick: Callable[..., int]) -> int:
        # Where rows are not alike, of few ranks, and as many more or less as there can be.
        odd = [branch for branch in self.parts if branch.group > 1 and branch.period > 1]
        times = {
            x.branch: 1 if not self.folds else 4 if x.group == x.num else 2 for x in odd
        }  # of two parts, each pair
        spread = sum(times[branch.branch] * branch.most_calls() for branch in odd)

        def calls(tile: Tile, plan: Plan) -> int:
            """As in `program.py`: one, or one for each batch entry."""
            rows = tile.query
            is_one = rows.segments == 1 or rows.segments * rows.segment_step == plan.num_rows
            return 1 if is_one else self.sizes.batch

        found = pick(sum(calls(tile, plan) for tile in plan.local) for plan in self.few_plans())
        return max(0, found + (spread if pick is max else -spread))

    def few_plans(self, branch: int | None = None) -> Sequence[Plan]:
        """Of ranks of a small job; of one branch alone."""
        pattern, num_ranks = self.small if branch is None else self.smaller(FEWEST)
        ranks = range(num_ranks)
        if branch is not None:
            pattern = _alone(pattern, branch)
        elif not self.is_memory_exact:
            ranks = ranks[-FEWEST:]  # buffers are of one size on all ranks of a ring
        heads = (self.num_heads, self.num_kv_heads)
        return [x.plan for x in _plans(pattern, num_ranks, self.length, self.sharding, *heads, self.held, 1, ranks)]

    @cached_property
    def small(self) -> tuple[DilatedPattern, int]:
        """The pattern and the number of ranks of a job whose ranks hold at a hop what they hold in this one: so many
        that all places of a short period are among them."""
        period = max((branch.period for branch in self.parts if branch.group > 1), default=1)
        return self.smaller(FEWEST - 1 + period if period <= LONGEST_PERIOD else FEWEST)

    def smaller(self, places: int) -> tuple[DilatedPattern, int]:
        """A job of so many ranks, or of some more, whose rings are as long as they can be in it."""
        if not self.folds:
            num_ranks = min(self.num_ranks, places)
            groups = [min(branch.group, num_ranks) for branch in self.parts]
        else:
            halves = [min(branch.group, 4) for branch in self.parts if branch.group < branch.num]
            unit = lcm(*halves)
            num_ranks = unit * -(-places // unit)
            if num_ranks >= self.num_ranks:
                return self.pattern, self.num_ranks
            groups = [2 * num_ranks if x.group == x.num else min(x.group, 4) for x in self.parts]
        lengths = [
            group * branch.length if group > 1 else w
            for w, group, branch in zip(self.pattern.segment_lengths, groups, self.parts, strict=True)
        ]
        return replace(self.pattern, segment_lengths=lengths), num_ranks


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
        return [self.sizes.unit * self.sizes.itemsize * sum(counts.straight) for counts in self.counts]

    def at_least(self, hardware: Hardware) -> float:
        handshakes = 2 * hardware.handshake if self.num_ranks > 1 else 0.0
        return handshakes + max(self.work_seconds(hardware), self.largest_sent[1] / hardware.bytes_per_second)

    def memory(self, traits: Traits) -> AttentionMemory:
        """Of the rank to which most comes."""
        home, met = self.sent_of_ranks
        wide = self.sizes.itemsize + self.sizes.sum_itemsize
        both = [*map(operator.add, map(wide.__mul__, met), map(self.sizes.sum_itemsize.__mul__, home))]
        k = both.index(max(both))
        plans = (replace(gathered(plan), received_size=met[k], home_size=home[k]) for plan in self.few_plans())
        found = (attention_memory(plan, self.sizes, traits) for plan in plans)
        return max(found, key=lambda x: x.forward_backward.num_bytes)

    def at_most(self, hardware: Hardware) -> tuple[float, float]:
        """Messages leave a rank in the order of peers, and come in in that order. So of those that wait for one another
        each is of another pair of places, farther down the ranks than the one before."""
        unit, flows = self.sizes.unit / hardware.bytes_per_second, self.flows(max)
        groups = [min(branch.group, self.num_ranks) for branch in self.parts if branch.members]
        are_nested = all(b % a == 0 for a, b in pairwise(sorted(groups)))
        widest = max(groups, default=1) if are_nested else self.num_ranks
        turns = (min(2 * widest - 3, -(-widest // g) * (2 * g - 3)) for g in groups)
        rows = sum(number * flow.rows for number, flow in zip(turns, flows, strict=True))
        passes = [rows * unit * itemsize for itemsize in (self.sizes.itemsize, self.sizes.sum_itemsize)]
        home, calls = self.home_pairs(max), self.home_calls(max)
        met = max(self.pairs_of_ranks) - self.home_pairs(min), self.all_calls - calls
        seconds = [hardware.handshake if self.num_ranks > 1 else 0.0] * 2
        for stage, products in enumerate((2, 5)):
            at_home = stage_seconds(home, products, self.sizes, hardware, calls)
            comes = passes[0] + hardware.latency_seconds if rows else 0.0
            seconds[stage] += max(at_home, comes) + stage_seconds(met[0], products, self.sizes, hardware, met[1])
        seconds[1] += passes[1] + hardware.latency_seconds if rows else 0.0
        return seconds[0], seconds[1]


@dataclass(frozen=True)
class Dealt(Form):
    """Groups of `inner` neighbours deal heads among them, around a ring of groups: each place in them has a ring of its
    own, of ranks with its share of the heads and the group's positions. One group is an all-to-all."""

    pattern: DilatedPattern
    seq_len: int
    num_ranks: int
    num_heads: int
    num_kv_heads: int
    sizes: Sizes
    sharding: str
    inner: int

    @cached_property
    def rings(self) -> list[Lockstep]:
        """By place; one and the same where places have as many rows of each branch."""
        share = self.num_heads // self.inner
        found: dict[tuple, Lockstep] = {}
        job = (self.pattern, self.seq_len, self.num_ranks // self.inner, self.num_heads, self.num_kv_heads, self.sizes)
        rings = [Lockstep(*job, self.sharding, range(k * share, (k + 1) * share)) for k in range(self.inner)]
        return [found.setdefault(tuple(branch.kind for branch in ring.parts), ring) for ring in rings]

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
        """By branch, groups that share a segment, where they are several."""
        return [max(found) for found in zip(*(ring.sharing for ring in self.kinds), strict=True)]

    def sent_of_branches(self) -> list[int]:
        """Beside what is dealt."""
        return [sum(found) for found in zip(*(ring.sent_of_branches() for ring in self.rings), strict=True)]

    @property
    def dealt_bytes(self) -> tuple[int, int]:
        """What a rank sends to deal in a forward, and in its backward."""
        lengths, heads = (self.seq_len // self.num_ranks,) * self.inner, (self.num_heads, self.num_kv_heads)
        forward, backward = (dealt_bytes(lengths, 0, *heads, *self.sizes[:3], backward=b) for b in (False, True))
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
        heads, length = (self.num_heads, self.num_kv_heads), self.seq_len // self.num_ranks
        places = [self.rings.index(ring) for ring in self.kinds]
        if not self.is_memory_exact:
            places = places[:2]
        groups = range(num_ranks) if self.is_memory_exact else range(num_ranks)[-FEWEST:]
        ranks = tuple(group * self.inner + k for group in groups for k in places)
        plans = _plans(pattern, num_ranks * self.inner, length, self.sharding, *heads, None, self.inner, ranks)
        found = (attention_memory(x.plan, self.sizes, traits, x.dealing) for x in plans)
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
        """As that of a ring."""
        work = max(ring.work_seconds(hardware, ring.all_calls) for ring in self.kinds)
        return max(0.0, 1 - work / seconds.least)


def all_hops(pattern: DilatedPattern, seq_len: int, num_ranks: int) -> int:
    """Of all ranks and branches together: what planning them takes goes by it."""
    length = max(1, seq_len // num_ranks)
    return num_ranks * sum(min(num_ranks, -(-w // length)) - 1 for w in pattern.segment_lengths if w > length)


def why_not_by(
    exchange: str, pattern: DilatedPattern, seq_len: int, num_ranks: int, sharding: str, inner: int = 1
) -> str | None:
    """What keeps a job of one document from closed forms, by its exchange: `why_not` of its rings."""
    if seq_len % num_ranks:
        return why_not(pattern, seq_len, num_ranks, sharding, None)
    return why_not(pattern, seq_len, 1 if exchange == "all_to_all" else num_ranks // inner, sharding, None)


def closed_form(
    exchange: str,
    pattern: DilatedPattern,
    seq_len: int,
    num_ranks: int,
    num_heads: int,
    num_kv_heads: int,
    sizes: Sizes,
    sharding: str = "contiguous",
    inner: int = 1,
) -> Lockstep | Dealt:
    """The form of a job that has one (`why_not_by`), of a call as `plan_exchange` takes it.

    Raises:
        ValueError: if heads cannot be dealt.
    """
    job = (pattern, seq_len, num_ranks, num_heads, num_kv_heads, sizes, sharding)
    if (size := num_ranks if exchange == "all_to_all" else inner) > 1:
        check_dealing(num_kv_heads, size)
        return Dealt(*job, size)
    return Gathered(*job) if exchange == "all_gather" else Lockstep(*job)


@lru_cache(maxsize=64)
def _plans(
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
    return [plan_exchange("ring", pattern, shards, k, *heads, held=held, inner=inner) for k in ranks]


def _alone(pattern: DilatedPattern, branch: int) -> DilatedPattern:
    """One branch of a pattern, which all heads run, or those of its group."""
    w, r = pattern.branches[branch]
    if pattern.heads == "all":
        return replace(pattern, segment_lengths=[w], dilation_rates=[r])
    lengths = [w if i == branch else 1 for i in range(len(pattern.branches))]
    return replace(pattern, segment_lengths=lengths)
