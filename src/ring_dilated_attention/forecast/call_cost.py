"""Predicts what an attention call computes, sends and holds over all ranks, and how long the call takes.

(query, key) pairs and received bytes are counted exactly, for every rank.

Sent bytes and held bytes are computed for `picked_ranks`: all ranks if there are at most a dozen. Otherwise they are
the first, middle and last ranks, and the ranks that compute, receive or hold most.

The time is predicted only for at most MOST_TIMED ranks.

In the exchange all_to_all, ranks "deal heads". Before the exchange, each rank has some positions of all heads. After
it, each rank has all positions of some heads.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

from ..pattern import DilatedPattern
from ..plan.collection import without_collection
from ..plan.counts import Counter, JobCount, Phases, count_ranks
from ..plan.exchange import dealers, dealt, plan_exchange
from ..plan.sharded_call import ShardedCall
from ..plan.sharding import Borders, ShardSpec, shard_length
from ..plan.step import Sizes
from ..simulate.weighing import AttentionWeight, weigh_attention
from .clock import Hardware, StepTime, model_step

MOST_TIMED = 64  # the time of a call is modelled up to this number of ranks
DOZEN = 12
FLOPS_PER_PAIR = 7 * 2  # 7 matrix products (2 forward, 5 backward), 2 FLOPs per feature of a head


class PlannedCall(NamedTuple):
    """The pattern and sizes of an attention call on several ranks. `sharded_call` chooses the sharding."""

    pattern: DilatedPattern
    seq_len: int
    num_ranks: int
    num_heads: int
    num_kv_heads: int
    sizes: Sizes

    def sharded_call(
        self,
        sharding: str = "contiguous",
        inner: int = 1,
        documents: Borders = None,
    ) -> ShardedCall:
        cut = ShardSpec(sharding, self.num_ranks, inner=inner)
        shards = cut.shards_of(cut.default_lengths(self.seq_len, documents), documents)
        return ShardedCall(self.pattern, shards, self.num_heads, self.num_kv_heads, documents)


class Exchange(NamedTuple):
    """How rows of queries, keys and values travel between ranks.

    inner: on a mesh with two dimensions, the number of ranks in a group; otherwise 1. The ranks of a group use
    all_to_all among themselves, and `name` is the exchange between groups.
    """

    name: str = "ring"
    inner: int = 1

    def __str__(self) -> str:
        return f"2-D, {self.inner} deal heads" if self.inner > 1 else self.name


class Counted(NamedTuple):
    """What every rank of a sharded call computes and receives.

    places: a list of counts. Without all_to_all the list has one entry, with the counts of all ranks. If groups of
    ranks use all_to_all, entry i has the counts of the i-th rank of every group. With groups of 2 ranks, entry 0 has
    the counts of ranks 0, 2, 4, ...
    """

    sharded_call: ShardedCall
    places: list[JobCount]

    def by_rank(self, column: Callable[[JobCount], Sequence[int]]) -> list[int]:
        """Returns a number for each rank, in the order of ranks. column: a function that reads these numbers from a
        `JobCount`."""
        size = len(self.places)
        return [
            column(self.places[rank % size])[rank // size]
            for rank in range(self.sharded_call.num_ranks)
        ]

    def sent_by_branch(self, sizes: Sizes) -> list[int]:
        """For each branch, the bytes of keys and values that all ranks together send in a forward.

        The bytes that ranks send by all_to_all are not included.
        """
        sent = [0] * len(self.sharded_call.pattern.branches)
        for place in self.places:
            for (branch, _), segment in place.segments.items():
                sent[branch] += segment.received * sizes.unit * sizes.itemsize
        return sent


def count(sharded_call: ShardedCall, exchange: Exchange) -> Counted:
    """Count what every rank computes and receives. Raises ValueError if all_to_all cannot give each rank the same
    number of heads."""
    return _count(sharded_call, dealers(exchange.name, sharded_call, exchange.inner))


@lru_cache(maxsize=4)
def _count(sharded_call: ShardedCall, num_dealers: int) -> Counted:
    sharded_calls = [sharded_call]
    if num_dealers > 1:
        sharded_calls = [dealt(sharded_call, num_dealers, place)[0] for place in range(num_dealers)]
    return Counted(sharded_call, [count_ranks(Counter(each)) for each in sharded_calls])


def picked_ranks(counted: Counted) -> list[int]:
    """The ranks whose sent and held bytes are computed: all ranks if there are at most a dozen.

    Otherwise they are the first two, the middle one and the last two, the two ranks that compute most, the two that
    receive most, and the two that hold most.
    """
    num_ranks, sharded_call = counted.sharded_call.num_ranks, counted.sharded_call
    if num_ranks <= DOZEN:
        return list(range(num_ranks))
    held_bytes = []
    buffers = counted.by_rank(lambda place: place.buffers)
    for shard, buffer in zip(sharded_call.shards, buffers, strict=True):
        held_bytes.append(2 * sharded_call.num_kv_held * shard_length(shard) + buffer)
    computed = counted.by_rank(lambda place: place.pairs)
    received = counted.by_rank(lambda place: place.received)
    picked = {0, 1, num_ranks // 2, num_ranks - 2, num_ranks - 1}
    for column in (computed, received, held_bytes):
        ranks = sorted(range(num_ranks), key=column.__getitem__, reverse=True)
        picked.update(ranks[:2])
    return sorted(picked)


class RankFigures(NamedTuple):
    """What one of the `picked_ranks` owns, computes and sends.

    weight: the memory that the rank needs; None if no kernel is given.
    """

    rank: int
    num_rows: int
    flops: int
    forward_sent: int  # bytes that the rank sends in a forward
    sent: int  # bytes that the rank sends in a forward and its backward
    weight: AttentionWeight | None


class Figures(NamedTuple):
    """What all ranks compute, send and hold in a forward and backward of a call, and how long that takes."""

    flops: int  # the FLOPs of all ranks together
    balance: float  # the mean FLOPs of a rank, divided by the FLOPs of the busiest rank
    sent_by_branch: list[int]  # bytes of keys and values that all ranks send in a forward
    ranks: tuple[RankFigures, ...]  # figures of the `picked_ranks`
    num_ranks: int
    step: StepTime | None  # None if no hardware is given, or for more than MOST_TIMED ranks
    peak_bytes: int  # the most bytes that one of `ranks` holds; 0 if no kernel is given

    @property
    def most_sent(self) -> int:
        """The largest number of bytes that any of `ranks` sends in a forward and its backward."""
        return max(rank.sent for rank in self.ranks)

    @property
    def seconds(self) -> float:
        assert self.step is not None, "no hardware was given"
        return self.step.step_seconds

    @property
    def exposed(self) -> float:
        """The fraction of a step's time, from 0 to 1, in which the rank that computes longest only waits."""
        assert self.step is not None, "no hardware was given"
        computing = max(rank.computing_seconds for rank in self.step.ranks)
        return 1 - computing / self.seconds if self.seconds else 0.0


@without_collection()
def forecast(
    sharded_call: ShardedCall,
    exchange: Exchange,
    sizes: Sizes,
    *,
    kernel: str | None = None,
    hardware: Hardware | None = None,
) -> Figures:
    """Predict the figures of a call over all ranks.

    kernel: the name of the kernel that computes; None leaves out the bytes that ranks hold. hardware: the rates of a
    rank and its network; None leaves out the time.
    """
    counted = count(sharded_call, exchange)
    pairs_of_ranks = counted.by_rank(lambda place: place.pairs)
    flops_of_ranks = [FLOPS_PER_PAIR * sizes.unit * num_pairs for num_pairs in pairs_of_ranks]
    mean_flops = sum(flops_of_ranks) / sharded_call.num_ranks
    most_flops = max(flops_of_ranks)
    balance = 1.0
    if most_flops:
        balance = mean_flops / most_flops
    picked = picked_ranks(counted)
    planned: Sequence[int] = picked
    is_timed = hardware is not None and sharded_call.num_ranks <= MOST_TIMED
    if is_timed:
        planned = range(sharded_call.num_ranks)
    plans = {
        rank: plan_exchange(exchange.name, sharded_call, rank, exchange.inner) for rank in planned
    }
    step = None
    if hardware is not None and is_timed:
        step = model_step(list(plans.values()), sizes, hardware)
    ranks = []
    for rank in picked:
        rank_plan = plans[rank]
        forward_sent = rank_plan.bytes_sent(sizes)
        sent = forward_sent + rank_plan.bytes_sent(sizes, backward=True)
        weight = None
        if kernel is not None:
            weight = weigh_attention(rank_plan, sizes, kernel)
        ranks.append(
            RankFigures(rank, rank_plan.num_rows, flops_of_ranks[rank], forward_sent, sent, weight)
        )
    return Figures(
        flops=sum(flops_of_ranks),
        balance=balance,
        sent_by_branch=counted.sent_by_branch(sizes),
        ranks=tuple(ranks),
        num_ranks=sharded_call.num_ranks,
        step=step,
        peak_bytes=max(0 if rank.weight is None else rank.weight.peak for rank in ranks),
    )


def pairs(pattern: DilatedPattern, seq_len: int, num_heads: int) -> int:
    """The number of (query, key) pairs that attention computes over one document, summed over all heads and branches.

    A pair in two branches counts twice. The number is for one batch entry.
    """
    total = 0
    for number, branch in enumerate(pattern.branches):
        heads = pattern.heads_of(number, num_heads)
        read = [pattern.phase_of(number, head, num_heads) or 0 for head in heads]
        phases = Phases(read, branch.dilation_rate)
        total += phases.pairs_within(branch, seq_len, is_causal=pattern.is_causal)
    return total
