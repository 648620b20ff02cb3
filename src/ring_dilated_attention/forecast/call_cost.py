"""Predicts what an attention call computes, sends and holds over all ranks, and its time.

Pairs and received bytes are counted exactly, for all ranks. `picked_ranks` are planned and weighed: all ranks up to a
dozen, otherwise about a dozen that stand out. With up to MOST_TIMED ranks the clock runs all of them.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import NamedTuple

from ..pattern import DilatedPattern
from ..plan.collection import without_collection
from ..plan.counts import Counter, JobCount, Phases, count_ranks
from ..plan.exchange import RankPlan, dealers, dealt, most_dealt, plan_exchange
from ..plan.job import Job
from ..plan.sharding import Borders, ShardSpec, shard_length
from ..plan.step import Sizes
from ..simulate.weighing import AttentionWeight, weigh_attention
from .clock import Hardware, StepTime, estimate_step, model_step, time_text

MOST_TIMED = 64  # the most ranks whose programs the clock runs together
DOZEN = 12
FLOPS_PER_PAIR = 7 * 2  # times the head dim: 2 products forward and 5 backward, 2 operations each
# In 9 of 10 random jobs the estimated time of a ring, divided by that of the clock, lay between these.
TIME_ERRORS = (0.5, 1.0)
ERRORS_TEXT = (
    "about: with more than {} ranks only the ranks that stand out are weighed and timed. In 24 random jobs the memory "
    "was that of all ranks. In 9 of 10 jobs the time of a ring was {} to {} times that of all ranks."
).format(MOST_TIMED, *TIME_ERRORS)


class PlannedCall(NamedTuple):
    """An attention call on several ranks, whatever the sharding."""

    pattern: DilatedPattern
    seq_len: int
    num_ranks: int
    num_heads: int
    num_kv_heads: int
    sizes: Sizes

    def job(
        self,
        sharding: str = "contiguous",
        inner: int = 1,
        documents: Borders = None,
    ) -> Job:
        cut = ShardSpec(sharding, self.num_ranks, inner=inner)
        shards = cut.shards_of(cut.default_lengths(self.seq_len, documents), documents)
        return Job(self.pattern, shards, self.num_heads, self.num_kv_heads, documents)


class Exchange(NamedTuple):
    """How rows travel. inner: with 2-D meshes, the number of ranks in a group that deals heads; otherwise 1."""

    name: str = "ring"
    inner: int = 1

    @property
    def is_dealt(self) -> bool:
        return self.name == "all_to_all" or self.inner > 1

    def __str__(self) -> str:
        return f"2-D, {self.inner} deal heads" if self.inner > 1 else self.name


class BranchShare(NamedTuple):
    """A branch over all ranks."""

    segment_length: int
    dilation_rate: int
    is_window: bool
    num_sharing: int  # the most ranks that exchange rows of one segment; 1 if no row travels
    sent: int  # bytes of the chunks that all ranks together send in a forward, without dealt heads


class Counted(NamedTuple):
    """What all ranks compute and receive. places: heads are dealt within groups of ranks, so there is a count of the
    first ranks of all groups, one of the second ranks, and so on. If no heads are dealt there is one count."""

    job: Job
    exchange: Exchange
    places: list[JobCount]

    def by_rank(self, column: Callable[[JobCount], Sequence[int]]) -> list[int]:
        """A column of the counts, in the order of ranks."""
        size = len(self.places)
        return [
            column(self.places[rank % size])[rank // size] for rank in range(self.job.num_ranks)
        ]

    def branches(self, sizes: Sizes) -> list[BranchShare]:
        num_sharing = defaultdict[int, int](lambda: 1)
        sent = defaultdict[int, int](int)
        for place in self.places:
            for (branch, _), segment in place.segments.items():
                if segment.received:
                    sent[branch] += segment.received * sizes.unit * sizes.itemsize
                    num_sharing[branch] = max(num_sharing[branch], segment.sharers)
        return [
            BranchShare(*branch, num_sharing[i], sent[i])
            for i, branch in enumerate(self.job.pattern.branches)
        ]

    def most_moved(self, sizes: Sizes) -> tuple[int, int]:
        """The most bytes received as chunks plus the most dealt as heads: in a forward, and in both stages.

        If different ranks receive most and deal most, this is a little more than any rank moves.
        """
        received = sizes.unit * max(max(place.received) for place in self.places)
        forward, gradients = received * sizes.itemsize, received * sizes.sum_itemsize
        size = len(self.places)
        if size == 1:
            return forward, 2 * forward + gradients
        lengths = [shard_length(shard) for shard in self.job.shards]
        groups = {tuple(lengths[i : i + size]) for i in range(0, len(lengths), size)}
        heads = len(self.job.held_heads), self.job.num_kv_held
        dealt_forward = max(most_dealt(group, *heads, sizes) for group in groups)
        dealt_backward = max(most_dealt(group, *heads, sizes, backward=True) for group in groups)
        return forward + dealt_forward, 2 * forward + gradients + dealt_forward + dealt_backward


def count(job: Job, exchange: Exchange, step: Callable[[], object] = lambda: None) -> Counted:
    """Count what every rank computes and receives. ValueError if heads cannot be dealt. step: called for each rank."""
    size = dealers(exchange.name, job, exchange.inner)
    jobs = [job] if size == 1 else [dealt(job, size, place)[0] for place in range(size)]
    return Counted(job, exchange, [count_ranks(Counter(each), step) for each in jobs])


def picked_ranks(counted: Counted) -> list[int]:
    """All ranks up to a dozen; else the first, middle and last, and those that compute, receive and own most."""
    num_ranks, job = counted.job.num_ranks, counted.job
    if num_ranks <= DOZEN:
        return list(range(num_ranks))
    rows = [shard_length(shard) for shard in job.shards]
    buffers = counted.by_rank(lambda place: place.buffers)
    held = [
        2 * job.num_kv_held * num_rows + buffer
        for num_rows, buffer in zip(rows, buffers, strict=True)
    ]
    pairs_of_ranks = counted.by_rank(lambda place: place.pairs)
    received = counted.by_rank(lambda place: place.received)
    picked = {0, 1, num_ranks // 2, num_ranks - 2, num_ranks - 1}
    for column in (pairs_of_ranks, received, buffers, rows, held):
        ranks = sorted(range(num_ranks), key=column.__getitem__, reverse=True)
        picked.update(ranks[:2])
    return sorted(picked)


class RankFigures(NamedTuple):
    """What one planned rank owns, computes, sends and, if a kernel is given, holds."""

    rank: int
    num_rows: int
    flops: int
    forward_sent: int
    sent: int
    weight: AttentionWeight | None


class Figures(NamedTuple):
    """The figures of a call over all ranks. Bytes are of a forward, and of a forward with its backward."""

    flops: int  # of all ranks together
    busiest: int  # the rank that computes most
    balance: float  # the mean FLOPs over those of the busiest rank
    branches: list[BranchShare]
    most_moved: tuple[int, int]  # the most that a rank receives as chunks, and deals as heads
    ranks: tuple[RankFigures, ...]  # the picked ranks
    num_ranks: int
    # None without hardware. Of all ranks up to MOST_TIMED; else an estimate from the picked ones, for a ring alone.
    step: StepTime | None
    peak_bytes: int  # the most that a picked rank holds; 0 if no kernel is given

    @property
    def is_about(self) -> bool:
        """Whether the time comes from some of the ranks. The memory does so beyond a dozen."""
        return self.num_ranks > MOST_TIMED

    @property
    def seconds(self) -> float:
        assert self.step is not None, "no hardware was given"
        return self.step.step_seconds

    @property
    def exposed(self) -> float:
        """The share of the step in which the rank that computes most waits."""
        assert self.step is not None, "no hardware was given"
        computing = max(rank.computing_seconds for rank in self.step.ranks)
        return 1 - computing / self.seconds if self.seconds else 0.0

    @property
    def time_text(self) -> str:
        about = "about " if self.is_about else ""
        return about + time_text(self.seconds)


@without_collection()
def forecast(
    job: Job,
    exchange: Exchange,
    sizes: Sizes,
    *,
    kernel: str | None = None,
    hardware: Hardware | None = None,
    counted: Counted | None = None,
) -> Figures:
    """The figures of a call over all ranks. counted: the result of `count`, which is called if this is None.

    kernel: its name, to weigh what ranks hold. hardware: to time a step.
    """
    if counted is None:
        counted = count(job, exchange)
    pairs_of_ranks = counted.by_rank(lambda place: place.pairs)
    flops_of_ranks = [FLOPS_PER_PAIR * sizes.unit * num_pairs for num_pairs in pairs_of_ranks]
    most_flops = max(flops_of_ranks)
    plans = {
        rank: plan_exchange(exchange.name, job, rank, exchange.inner)
        for rank in picked_ranks(counted)
    }
    ranks = []
    for rank, rank_plan in plans.items():
        forward_sent = rank_plan.bytes_sent(sizes)
        sent = forward_sent + rank_plan.bytes_sent(sizes, backward=True)
        weight = None if kernel is None else weigh_attention(rank_plan, sizes, kernel)
        ranks.append(
            RankFigures(rank, rank_plan.num_rows, flops_of_ranks[rank], forward_sent, sent, weight)
        )
    return Figures(
        flops=sum(flops_of_ranks),
        busiest=flops_of_ranks.index(most_flops),
        balance=sum(flops_of_ranks) / (len(flops_of_ranks) * most_flops) if most_flops else 1.0,
        branches=counted.branches(sizes),
        most_moved=counted.most_moved(sizes),
        ranks=tuple(ranks),
        num_ranks=job.num_ranks,
        step=None if hardware is None else _time(job, exchange, plans, sizes, hardware),
        peak_bytes=max(0 if rank.weight is None else rank.weight.peak for rank in ranks),
    )


def _time(
    job: Job, exchange: Exchange, plans: dict[int, RankPlan], sizes: Sizes, hardware: Hardware
) -> StepTime | None:
    if job.num_ranks > MOST_TIMED:
        if exchange != Exchange():
            return None
        return estimate_step(plans, job.num_ranks, sizes, hardware)
    all_plans = [
        plan_exchange(exchange.name, job, rank, exchange.inner) for rank in range(job.num_ranks)
    ]
    dealings = [rank_plan.dealing for rank_plan in all_plans if rank_plan.dealing is not None]
    return model_step(
        [rank_plan.plan for rank_plan in all_plans], sizes, hardware, dealings or None
    )


def pairs(pattern: DilatedPattern, seq_len: int, num_heads: int) -> int:
    """(query, key) pairs of all heads and branches over one document, with multiplicity, for one batch entry."""
    total = 0
    for number, branch in enumerate(pattern.branches):
        heads = pattern.heads_of(number, num_heads)
        read = [pattern.phase_of(number, head, num_heads) or 0 for head in heads]
        phases = Phases(read, branch.dilation_rate)
        total += phases.pairs_within(branch, seq_len, is_causal=pattern.is_causal)
    return total
