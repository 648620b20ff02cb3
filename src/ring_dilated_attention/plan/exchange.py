"""How chunks travel: a rank's plan under each exchange, and which of them a call uses under "auto". Pure, no torch."""

from functools import lru_cache
from typing import NamedTuple

from ..pattern import DilatedPattern
from .dealing import Dealing, check_dealing, deal, dealt_bytes
from .memory import Sizes
from .plan import Plan, gathered
from .planner import make_plan
from .sharding import Shard, shard_length

EXCHANGES = ("ring", "all_gather", "all_to_all", "simulated")

# One round of small chunks costs less than several hops of them.
SMALL_CHUNK_BYTES = 64 * 1024
# The ring's bytes hide behind its computation, those of an all-to-all do not: it must save this factor.
ALL_TO_ALL_SAVING = 3
# Ranks whose plans are looked at; of more, evenly spaced ones. The same on every rank, so that all choose alike.
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
def plan_exchange(
    exchange: str,
    pattern: DilatedPattern,
    shards: tuple[Shard, ...],
    rank: int,
    num_heads: int,
    num_kv_heads: int,
    documents: tuple[int, ...] | None = None,
    held: range | None = None,
    inner: int = 1,
) -> RankPlan:
    """A rank's plan under one of EXCHANGES; other arguments as of `make_plan`.

    Args:
        inner: groups of so many neighbouring ranks deal heads among them (the last axis of a 2-D mesh).

    Raises:
        ValueError: if heads cannot be dealt.
    """
    size = len(shards) if exchange == "all_to_all" else inner
    dealing = None
    if size > 1:
        heads = held if held is not None else range(num_heads)
        check_dealing(len(heads) * num_kv_heads // num_heads, size)
        outer, place = divmod(rank, size)
        share = len(heads) // size
        held = heads[place * share : (place + 1) * share]
        rows = [deal(shards[i : i + size], place) for i in range(0, len(shards), size)]
        shards, rank, dealing = tuple(shard for _, shard in rows), outer, rows[outer][0]
    plan = make_plan(pattern, shards, rank, num_heads, num_kv_heads, documents, held)
    return RankPlan(gathered(plan) if exchange == "all_gather" else plan, dealing)


class Choice(NamedTuple):
    """An exchange and the reason for it."""

    exchange: str
    reason: str


@lru_cache(maxsize=256)
def choose_exchange(
    pattern: DilatedPattern,
    shards: tuple[Shard, ...],
    num_heads: int,
    num_kv_heads: int,
    documents: tuple[int, ...] | None,
    sizes: Sizes,
    held: range | None = None,
) -> Choice:
    """The exchange for a forward over these shards; arguments as of `make_plan`, and the sizes of the tensors.

    By bytes, by the memory that they take, and by the number of kernel calls: an exchange that saves bytes and cuts the
    work into smaller tiles saves nothing.
    """
    ranks = range(0, len(shards), -(-len(shards) // MOST_PLANS))
    plans = [make_plan(pattern, shards, rank, num_heads, num_kv_heads, documents, held) for rank in ranks]
    unit = sizes.unit * sizes.itemsize
    sent = unit * max(plan.sent()[0] for plan in plans)
    hops = max(len(plan.hops) for plan in plans)
    if not sent:
        return Choice("ring", "nothing is sent: every segment lies in one shard")
    largest = unit * max((m.size for plan in plans for hop in plan.hops for m in hop.receives), default=0)
    two_chunks = 2 * unit * max(plan.chunk_size for plan in plans)
    together = unit * max(gathered(plan).received_size for plan in plans)
    num_kv_held = num_kv_heads if held is None else len(held) * num_kv_heads // num_heads
    local = 2 * num_kv_held * unit * max(map(shard_length, shards))
    ring = f"the ring sends {sent:,} bytes in {hops} hops and holds {two_chunks:,} (two chunks)"
    if hops > 1 and largest <= SMALL_CHUNK_BYTES and together <= max(two_chunks, local):
        return Choice(
            "all_gather",
            f"chunks of {largest:,} bytes are small, and all that a rank meets are {together:,}, "
            f"no more than its own keys and values: one round instead of {hops} hops; {ring}",
        )
    if num_kv_held % len(shards):
        return Choice("ring", f"{ring}; {num_kv_held} key/value heads cannot be dealt to {len(shards)} ranks")
    lengths = tuple(map(shard_length, shards))
    num_held = num_heads if held is None else len(held)
    dealt = max(dealt_bytes(lengths, rank, num_held, num_kv_held, *sizes[:3]) for rank in ranks)
    calls = max(plan.num_tiles for plan in plans)
    of_heads = plan_exchange("all_to_all", pattern, shards, 0, num_heads, num_kv_heads, documents, held).plan
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
