"""Predicts what an attention call computes, sends and holds over all ranks, and its time. Numbers only, no torch.

Pairs and received bytes are always counted exactly. For up to MOST_PLANNED ranks, memory and time follow from the plan
of every rank. For more ranks, they are estimated (`large.py`).
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

from ..pattern import DilatedPattern
from ..plan.collection import without_collection
from ..plan.counts import Counter, JobCount, Phases, count_ranks
from ..plan.dealing import Dealing
from ..plan.exchange import RankPlan, dealers, dealt, most_dealt, plan_exchange
from ..plan.job import Job
from ..plan.sharding import shard_length
from ..plan.sizes import Sizes, Traits
from . import large
from .clock import Hardware, StepTime, model_step, time_text
from .ledger import AttentionMemory, Peak, attention_memory

# If there are at most so many ranks, every rank is planned and timed.
MOST_PLANNED = 64
# With more ranks, only the job that was asked for is counted: no other sharding, and no sparser pattern.
MOST_COMPARED = 4096
FLOPS_PER_PAIR = 7 * 2  # times the head dim: 2 products forward and 5 backward, 2 operations each


class Way(NamedTuple):
    """How rows travel. inner: with 2-D meshes, the number of ranks in a group that deals heads; otherwise 1."""

    exchange: str = "ring"
    inner: int = 1

    @property
    def is_dealt(self) -> bool:
        return self.exchange == "all_to_all" or self.inner > 1


class Time(NamedTuple):
    """The time of a forward and its backward. is_about: an estimate, not modelled rank by rank."""

    seconds: float
    is_about: bool = False

    @property
    def text(self) -> str:
        return f"{'about ' * self.is_about}{time_text(self.seconds)}"


class BranchShare(NamedTuple):
    """A branch over all ranks."""

    segment_length: int
    dilation_rate: int
    num_sharing: int  # the most ranks that exchange rows of one segment; 1 if no row travels
    num_rows: int  # of phase 0 in the longest segment
    num_positions: int  # of the longest segment
    sent: int  # the size of the chunks that all ranks together send in a forward, in units, without dealt heads

    @property
    def travels(self) -> bool:
        return self.num_sharing > 1


class PlaceCount(NamedTuple):
    """Heads are dealt within groups of ranks. The counts of all ranks that are, say, second in their groups; or of all
    ranks, if no heads are dealt."""

    counter: Counter
    counted: JobCount


class Counted(NamedTuple):
    """What all ranks compute and receive. places: of the first ranks of groups, the second, ..."""

    job: Job
    way: Way
    places: list[PlaceCount]

    @property
    def pairs(self) -> list[int]:
        """Pairs that each rank computes."""
        size = len(self.places)
        return [self.places[rank % size].counted.pairs[rank // size] for rank in range(self.job.num_ranks)]

    @property
    def branches(self) -> list[BranchShare]:
        longest = max(b - a for a, b in pairwise(self.job.borders))
        sharing, sent = [large.most_sharing(place.counted) for place in self.places], defaultdict[int, int](int)
        for place in self.places:
            for (branch, _), segment in place.counted.segments.items():
                sent[branch] += segment.received
        return [
            BranchShare(
                w,
                r,
                num_sharing=max(by_branch.get(branch, 1) for by_branch in sharing),
                num_rows=-(-min(w, longest) // r),
                num_positions=min(w, longest),
                sent=sent[branch],
            )
            for branch, (w, r) in enumerate(self.job.pattern.branches)
        ]

    @property
    def num_hops(self) -> int:
        """The hops of the longest ring. An all-gather counts as one hop."""
        shared = [x for place in self.places for x in place.counted.segments.values() if x.received]
        hops = max((x.sharers - 1 for x in shared), default=0)
        return min(1, hops) if self.way.exchange == "all_gather" else hops

    def most_moved(self, sizes: Sizes) -> tuple[int, int]:
        """The most bytes received as chunks plus the most dealt as heads: in a forward, and in both stages."""
        received = sizes.unit * max(max(place.counted.received) for place in self.places)
        forward, gradients = received * sizes.itemsize, received * sizes.sum_itemsize
        size, lengths = len(self.places), list(map(shard_length, self.job.shards))
        if size == 1:
            return forward, 2 * forward + gradients
        groups = {tuple(lengths[i : i + size]) for i in range(0, len(lengths), size)}
        heads = len(self.job.held_heads), self.job.num_kv_held
        dealt_forward, dealt_backward = (
            max(most_dealt(group, *heads, sizes, backward=backward) for group in groups) for backward in (False, True)
        )
        return forward + dealt_forward, 2 * forward + gradients + dealt_forward + dealt_backward


def count(job: Job, way: Way, step: Callable[[], object] = lambda: None) -> Counted:
    """Count what every rank computes and receives. ValueError if heads cannot be dealt. step: called for each rank."""
    size = dealers(way.exchange, job, way.inner)
    counters = [Counter(job if size == 1 else dealt(job, size, place)[0]) for place in range(size)]
    return Counted(job, way, [PlaceCount(counter, count_ranks(counter, step)) for counter in counters])


class RankFigures(NamedTuple):
    """What one planned rank owns, computes, sends and, if a kernel is given, holds."""

    num_rows: int
    pairs: int
    forward_bytes: int
    sent_bytes: int
    memory: AttentionMemory | None


class Figures(NamedTuple):
    """The figures of a call over all ranks. Without a kernel there is no peak, and without hardware no time."""

    pairs: int  # of all ranks together
    most_pairs: int  # of the rank that computes most
    busiest: int  # that rank's number
    balance: float  # mean pairs over most_pairs
    num_hops: int
    branches: list[BranchShare]
    forward_bytes: int = 0  # the most that a rank sends in a forward, or receives if ranks are not planned
    sent_bytes: int = 0  # the same of a forward with its backward
    peak: Peak | None = None  # of the rank that holds most, in a forward with its backward
    time: Time | None = None  # if ranks are not planned, only "ring" without dealt heads has one
    exposed: float = 0.0  # the share of time in which the busiest rank waits; not shown if it is estimated
    ranks: tuple[RankFigures, ...] = ()  # empty if ranks are not planned
    step: StepTime | None = None  # the times of planned ranks

    @property
    def is_planned(self) -> bool:
        return bool(self.ranks)

    @property
    def peak_bytes(self) -> int:
        assert self.peak is not None, "no kernel is given"
        return self.peak.num_bytes

    @property
    def seconds(self) -> float:
        assert self.time is not None, "there is no time"
        return self.time.seconds


@without_collection()
def forecast(
    job: Job,
    way: Way,
    sizes: Sizes,
    *,
    traits: Traits | None = None,
    hardware: Hardware | None = None,
    counted: Counted | None = None,
    step: Callable[[], object] = lambda: None,
) -> Figures:
    """The figures of a call over all ranks. counted: the result of `count`, which is called if this is None."""
    counted = count(job, way, step) if counted is None else counted
    pairs = counted.pairs
    most = max(pairs)
    found = Figures(
        pairs=sum(pairs),
        most_pairs=most,
        busiest=pairs.index(most),
        balance=sum(pairs) / (len(pairs) * most) if most else 1.0,
        num_hops=counted.num_hops,
        branches=counted.branches,
    )
    if job.num_ranks <= MOST_PLANNED:
        return _of_plans(found, all_plans(job, way), sizes, traits, hardware)
    return _of_counts(found, counted, sizes, traits, hardware)


def all_plans(job: Job, way: Way) -> list[RankPlan]:
    return [plan_exchange(way.exchange, job, rank, way.inner) for rank in range(job.num_ranks)]


def _of_plans(
    found: Figures, plans: list[RankPlan], sizes: Sizes, traits: Traits | None, hardware: Hardware | None
) -> Figures:
    ranks = []
    for x in plans:
        forward, backward = (x.bytes_sent(sizes, backward=backward) for backward in (False, True))
        memory = None if traits is None else attention_memory(x.plan, sizes, traits, x.dealing)
        ranks.append(RankFigures(x.num_rows, x.plan.pairs, forward, forward + backward, memory))
    found = found._replace(
        forward_bytes=max(rank.forward_bytes for rank in ranks),
        sent_bytes=max(rank.sent_bytes for rank in ranks),
        peak=_largest(rank.memory.forward_backward for rank in ranks if rank.memory is not None),
        ranks=tuple(ranks),
    )
    if hardware is None:
        return found
    dealings = [x.dealing for x in plans if x.dealing is not None]
    step = model_step([x.plan for x in plans], sizes, hardware, dealings or None)
    exposed = 1 - step.efficiency / step.balance if step.balance else 0.0
    return found._replace(time=Time(step.step_seconds), exposed=exposed, step=step)


def _of_counts(
    found: Figures, counted: Counted, sizes: Sizes, traits: Traits | None, hardware: Hardware | None
) -> Figures:
    forward, both = counted.most_moved(sizes)
    found = found._replace(forward_bytes=forward, sent_bytes=both)
    if traits is not None:
        found = found._replace(peak=_peak_of_counts(counted, sizes, traits))
    if hardware is not None and counted.way == Way():
        seconds, computing = large.step_seconds(*counted.places[0], sizes, hardware)
        exposed = max(0.0, 1 - computing / seconds)
        found = found._replace(time=Time(seconds, is_about=True), exposed=exposed)
    return found


def _peak_of_counts(counted: Counted, sizes: Sizes, traits: Traits) -> Peak | None:
    """The largest peak of all places. If places have the same largest counts, one of them stands for all."""
    size = len(counted.places)
    dealing = None if size == 1 else Dealing(0, (max(map(shard_length, counted.job.shards)),) * size, ())
    kinds = {(max(place.counted.buffers), max(place.counted.pairs)): place for place in counted.places}
    is_gathered = counted.way.exchange == "all_gather"
    return _largest(
        large.peak_memory(*place, sizes, traits, dealing=dealing, is_gathered=is_gathered) for place in kinds.values()
    )


def _largest(peaks: Iterable[Peak]) -> Peak | None:
    return max(peaks, key=lambda peak: peak.num_bytes, default=None)


def pairs(pattern: DilatedPattern, seq_len: int, num_heads: int) -> int:
    """(query, key) pairs of all heads and branches over one document, with multiplicity, for one batch entry."""
    return sum(branch_pairs(pattern, branch, [seq_len], num_heads) for branch in range(len(pattern.branches)))


def branch_pairs(pattern: DilatedPattern, branch: int, lengths: Sequence[int], num_heads: int) -> int:
    """The pairs of one branch over documents of these lengths."""
    length, rate = pattern.branches[branch]
    phases = Phases([pattern.phase_of(branch, h, num_heads) or 0 for h in pattern.heads_of(branch, num_heads)], rate)
    num_whole, rests = sum(n // length for n in lengths), [n % length for n in lengths]
    segments = {x: phases.pairs([(0, x)], x, is_causal=pattern.is_causal) for x in {length, *rests}}
    return num_whole * segments[length] + sum(map(segments.__getitem__, rests))
