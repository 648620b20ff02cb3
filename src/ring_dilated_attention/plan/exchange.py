"""How chunks travel: a rank's plan under each exchange, and which of them a call uses under "auto". Pure, no torch."""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from .dealing import Dealing, check_dealing, deal, dealt_bytes
from .job import Job
from .memory import Sizes
from .plan import Plan, gathered
from .planner import make_plan
from .sharding import shard_length

EXCHANGES = ("ring", "all_gather", "all_to_all")

# One round of small chunks costs less than several hops of them.
SMALL_CHUNK_BYTES = 64 * 1024
# The ring's bytes hide behind its computation, those of an all-to-all do not: it must save this factor.
ALL_TO_ALL_SAVING = 3
# Ranks whose plans are looked at; of more, some. The same on every rank, so that all choose alike.
MOST_PLANS = 16


class RankPlan(NamedTuple):
    """What a rank does under an exchange. dealing: of heads for positions; the plan is then of the dealt heads."""

    plan: Plan
    dealing: Dealing | None

    @property
    def num_rows(self) -> int:
        """Positions of this rank."""
        return self.plan.num_rows if self.dealing is None else self.dealing.lengths[self.dealing.place]

    def bytes_sent(self, sizes: Sizes, *, backward: bool = False, has_dlse: bool = False) -> int:
        """Bytes that this rank sends in one forward, or in one backward."""
        plan, dealing = self
        sent = plan.bytes_sent(sizes.batch, sizes.head_dim, sizes.itemsize, backward=backward)
        if dealing is None:
            return sent
        heads = (plan.num_heads * dealing.size, plan.num_kv_heads * dealing.size)
        shape = (*heads, sizes.batch, sizes.head_dim, sizes.itemsize)
        return sent + dealt_bytes(dealing.lengths, dealing.place, *shape, backward=backward, has_dlse=has_dlse)


@lru_cache(maxsize=256)
def plan_exchange(exchange: str, job: Job, rank: int, inner: int = 1) -> RankPlan:
    """A rank's plan under one of EXCHANGES.

    Args:
        inner: groups of so many neighbouring ranks deal heads among them (the last axis of a 2-D mesh).

    Raises:
        ValueError: if heads cannot be dealt.
    """
    size = job.num_ranks if exchange == "all_to_all" else inner
    dealing = None
    if size > 1:
        check_dealing(job.num_kv_held, size)
        outer, place = divmod(rank, size)
        share = len(job.held_heads) // size
        held = job.held_heads[place * share : (place + 1) * share]
        rows = [deal(job.shards[i : i + size], place) for i in range(0, job.num_ranks, size)]
        job, rank, dealing = job._replace(shards=tuple(x for _, x in rows), held=held), outer, rows[outer][0]
    plan = make_plan(job, rank)
    return RankPlan(gathered(plan) if exchange == "all_gather" else plan, dealing)


class Choice(NamedTuple):
    """An exchange and the reason for it."""

    exchange: str
    reason: str


class Traffic(NamedTuple):
    """What an exchange is chosen by: of the ranks of a ring, that which has most. Bytes, but of hops and calls.

    sent: in a forward. largest: of all messages. two_chunks: that a ring holds. together: of all chunks that a rank
    meets. calls: of the kernel.
    """

    sent: int
    hops: int
    largest: int
    two_chunks: int
    together: int
    calls: int


def traffic_of(plans: Sequence[Plan], sizes: Sizes) -> Traffic:
    """Of plans of a ring."""
    unit = sizes.unit * sizes.itemsize
    return Traffic(
        sent=unit * max(plan.sent()[0] for plan in plans),
        hops=max(len(plan.hops) for plan in plans),
        largest=unit * max((m.size for plan in plans for hop in plan.hops for m in hop.receives), default=0),
        two_chunks=2 * unit * max(plan.chunk_size for plan in plans),
        together=unit * max(sum(m.size for hop in plan.hops for m in hop.receives) for plan in plans),
        calls=max(plan.num_tiles for plan in plans),
    )


def looked_at(num_ranks: int) -> list[int]:
    """The ranks whose traffic decides: the first, the last, and some between at growing distances, since equal ones
    would find them all at the same place of their segments."""
    if num_ranks <= MOST_PLANS:
        return list(range(num_ranks))
    step = num_ranks // (2 * MOST_PLANS)
    return sorted({(i * step + i * (i + 1) // 2) % num_ranks for i in range(MOST_PLANS - 1)} | {num_ranks - 1})


@lru_cache(maxsize=256)
def choose_exchange(job: Job, sizes: Sizes, traffic: Traffic | None = None) -> Choice:
    """The exchange for a forward.

    By bytes, by the memory that they take, and by the number of kernel calls: an exchange that saves bytes and cuts the
    work into smaller tiles saves nothing.

    Args:
        sizes: of the tensors.
        traffic: where it is known without plans.
    """
    ranks = looked_at(job.num_ranks)
    if traffic is None:
        traffic = traffic_of([make_plan(job, rank) for rank in ranks], sizes)
    sent, hops, largest, two_chunks, together, calls = traffic
    if not sent:
        return Choice("ring", "nothing is sent: every segment lies in one shard")
    num_kv_held, lengths = job.num_kv_held, tuple(map(shard_length, job.shards))
    local = 2 * num_kv_held * sizes.unit * sizes.itemsize * max(lengths)
    seen = "" if job.num_ranks <= MOST_PLANS else f" (of {MOST_PLANS} ranks looked at)"
    ring = f"the ring sends {sent:,} bytes{seen} in {hops} hops and holds {two_chunks:,} (two chunks)"
    if hops > 1 and largest <= SMALL_CHUNK_BYTES and together <= max(two_chunks, local):
        return Choice(
            "all_gather",
            f"chunks of {largest:,} bytes are small, and all that a rank meets are {together:,}, "
            f"no more than its own keys and values: one round instead of {hops} hops; {ring}",
        )
    if num_kv_held % job.num_ranks:
        return Choice("ring", f"{ring}; {num_kv_held} key/value heads cannot be dealt to {job.num_ranks} ranks")
    dealt = max(dealt_bytes(lengths, rank, len(job.held_heads), num_kv_held, *sizes[:3]) for rank in ranks)
    of_heads = plan_exchange("all_to_all", job, 0).plan
    ring += f", in {calls} kernel calls"
    if dealt * ALL_TO_ALL_SAVING > sent:
        return Choice("ring", f"{ring}, behind computation; dealing heads would send {dealt:,}, hidden by nothing")
    if of_heads.num_tiles > 2 * calls:
        return Choice("ring", f"{ring}; dealing heads would send {dealt:,}, but takes {of_heads.num_tiles} calls")
    return Choice(
        "all_to_all",
        f"sends {dealt:,} bytes, less than the ring by {ALL_TO_ALL_SAVING} times or more (its bytes hide behind "
        f"computation, these do not), in {of_heads.num_tiles} kernel calls, and holds them beside the inputs; {ring}",
    )
