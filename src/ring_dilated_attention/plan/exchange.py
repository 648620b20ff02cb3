"""A rank's plan under each exchange, and which exchange a call uses under "auto". Pure integers, no torch.

An exchange is a way in which ranks get keys and values from each other. A chunk is one rank's key and value rows of a
segment that several ranks share.

    ring            chunks travel from rank to rank, one hop at a time, while ranks compute
    all_gather      every rank sends its chunks to all ranks that need them, in one round
    all_to_all      ranks deal heads: each gets all positions of some heads (`dealing.py`)
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from .counts import Counter, count_ranks
from .dealing import Dealing, check_dealing, deal
from .plan import Plan, gathered
from .planner import make_plan
from .sharded_call import ShardedCall
from .sharding import Shard, shard_length
from .step import Sizes

EXCHANGES = ("ring", "all_gather", "all_to_all")

# Chunks up to this size take less time in one round (all_gather) than in several hops (ring).
SMALL_CHUNK_BYTES = 64 * 1024
# In a ring, ranks send while they compute. In all_to_all, ranks wait until all tensors have been sent. So all_to_all is
# chosen only if its bytes per rank are at most 1 / ALL_TO_ALL_SAVING of the ring's bytes per rank.
ALL_TO_ALL_SAVING = 3


class RankPlan(NamedTuple):
    """What a rank does under an exchange.

    plan: the tiles that the rank computes and the chunks that it sends, for the heads that it has after dealing.
    dealing: how the rank deals heads before and after the attention; None if heads are not dealt.
    """

    plan: Plan
    dealing: Dealing | None

    @property
    def num_rows(self) -> int:
        """The number of positions that the rank owns (before heads are dealt)."""
        if self.dealing is None:
            return self.plan.num_rows
        return self.dealing.lengths[self.dealing.place]

    def bytes_sent(self, sizes: Sizes, *, backward: bool = False, has_dlse: bool = False) -> int:
        """Bytes that this rank sends in one forward, or in one backward. has_dlse: lse has a gradient.

        In backward the chunks are sent again, and their gradients too. Gradients are sent in float32, or in float64
        for float64 inputs.
        """
        plan, dealing = self
        chunks, grads = plan.sent(backward=backward)
        sent = sizes.unit * (chunks * sizes.itemsize + grads * sizes.sum_itemsize)
        if dealing is None:
            return sent
        heads = (plan.num_heads * dealing.size, plan.num_kv_heads * dealing.size)
        return sent + dealt_bytes(
            dealing.lengths, dealing.place, heads, sizes, backward=backward, has_dlse=has_dlse
        )


@lru_cache(maxsize=256)
def plan_exchange(exchange: str, sharded_call: ShardedCall, rank: int, inner: int = 1) -> RankPlan:
    """A rank's plan under one of EXCHANGES; ValueError if heads cannot be dealt.

    inner: how many neighbouring ranks exchange heads for positions (the last axis of a 2-D mesh); 1 for none.
    """
    size = dealers(exchange, sharded_call, inner)
    dealing = None
    if size > 1:
        sharded_call, dealings = dealt(sharded_call, size, rank % size)
        dealing = dealings[rank // size]

    plan = make_plan(sharded_call, rank // size)
    if exchange == "all_gather":
        plan = gathered(plan)
    return RankPlan(plan, dealing)


def dealers(exchange: str, sharded_call: ShardedCall, inner: int) -> int:
    """How many neighbouring ranks deal heads (exchange heads for positions); 1 if heads are not dealt."""
    return sharded_call.num_ranks if exchange == "all_to_all" else inner


def dealt(sharded_call: ShardedCall, size: int, place: int) -> tuple[ShardedCall, list[Dealing]]:
    """Plan how groups of `size` neighbouring ranks deal heads. ValueError if heads cannot be dealt.

    After the exchange a rank has all positions of its group, but only some heads. Consider the rank at `place` of every
    group. These ranks have the same heads, and together all positions. So they run a call of their own on these heads.
    In this call, each shard has the positions of one group.

    Returns this call, and one Dealing for each group: how the group's rank at `place` deals heads.
    """
    check_dealing(sharded_call.num_kv_held, size)
    share = len(sharded_call.held_heads) // size
    held = sharded_call.held_heads[place * share : (place + 1) * share]
    dealings: list[Dealing] = []
    shards: list[Shard] = []
    for first in range(0, sharded_call.num_ranks, size):
        dealing, shard = deal(sharded_call.shards[first : first + size], place)
        dealings.append(dealing)
        shards.append(shard)
    return sharded_call._replace(shards=tuple(shards), held=held), dealings


class Choice(NamedTuple):
    exchange: str
    reason: str


@lru_cache(maxsize=256)
def choose_exchange(sharded_call: ShardedCall, sizes: Sizes) -> Choice:
    """Choose the exchange for a forward, with the reason as text.

    The choice weighs bytes, memory, hops and kernel calls. Kernel calls matter: all_to_all may send fewer bytes than
    the ring, but need many more kernel calls. These calls may cost more time than all_to_all saves.
    """
    counted = count_ranks(Counter(sharded_call))
    unit = sizes.unit * sizes.itemsize
    received = unit * max(counted.received)
    two_chunks = 2 * unit * max(counted.buffers)
    if not received:
        return Choice("ring", "nothing is sent: every segment lies in one shard")

    shared = [segment for segment in counted.segments.values() if segment.received]
    hops = max(segment.sharers for segment in shared) - 1
    largest = unit * max(max(segment.largest) for segment in shared)
    num_kv_held = sharded_call.num_kv_held
    lengths = tuple(map(shard_length, sharded_call.shards))
    num_hops = "1 hop" if hops == 1 else f"{hops} hops"
    ring = f"in the ring a rank receives up to {received:,} bytes in {num_hops}; two chunks have about {two_chunks:,}"
    if (
        hops > 1
        and largest <= SMALL_CHUNK_BYTES
        and received <= max(two_chunks, 2 * num_kv_held * unit * max(lengths))
    ):
        return Choice(
            "all_gather",
            f"chunks of {largest:,} bytes are small, and a rank receives {received:,}, no more than two chunks or its "
            f"own keys and values: one round instead of {hops} hops; {ring}",
        )
    if num_kv_held % sharded_call.num_ranks:
        return Choice(
            "ring",
            f"{ring}; {num_kv_held} key/value heads cannot be dealt to {sharded_call.num_ranks} ranks",
        )
    # The bytes that a rank sends to deal heads are linear in its number of positions. So the rank with the most or with
    # the fewest positions sends the most bytes. Take the larger number.
    heads = (len(sharded_call.held_heads), num_kv_held)
    by_longest = dealt_bytes(lengths, lengths.index(max(lengths)), heads, sizes, backward=False)
    by_shortest = dealt_bytes(lengths, lengths.index(min(lengths)), heads, sizes, backward=False)
    moved = max(by_longest, by_shortest)
    if moved * ALL_TO_ALL_SAVING > received:
        return Choice("ring", f"{ring}; dealing heads would send {moved:,} bytes while ranks wait")
    dealt_calls = plan_exchange("all_to_all", sharded_call, 0).plan.num_tiles
    calls = make_plan(sharded_call, counted.received.index(max(counted.received))).num_tiles
    ring += f", and makes {calls} kernel calls meanwhile"
    if dealt_calls > 2 * calls:
        return Choice(
            "ring", f"{ring}; dealing heads would send {moved:,} bytes, but in {dealt_calls} calls"
        )
    return Choice(
        "all_to_all",
        f"a rank sends up to {moved:,} bytes, at most 1/{ALL_TO_ALL_SAVING} of the ring's, and waits for them, holds "
        f"them beside the inputs and makes {dealt_calls} kernel calls; {ring}",
    )


def dealt_bytes(
    lengths: Sequence[int],
    rank: int,
    heads: tuple[int, int],
    sizes: Sizes,
    *,
    backward: bool,
    has_dlse: bool = False,
) -> int:
    """Bytes that a rank sends to deal heads (all_to_all, or the inner axis of a 2-D mesh).

    In a forward the rank sends query, key and value of its own positions, then out and lse of the other ranks'
    positions. In a backward the rank sends dout, query, key, value, out, lse (and dlse) of its own positions, then dq,
    dk, dv of the other ranks' positions.

    Args:
        lengths: how many positions each rank of the group owns.
        rank: the place of the sending rank in the group.
        heads: the numbers of (query heads, key/value heads) before heads are dealt.
        has_dlse: whether lse has a gradient.
    """
    size = len(lengths)
    num_own = lengths[rank]
    share, kv_share = (num // size for num in heads)
    row = sizes.head_dim * sizes.itemsize
    number = sizes.sum_itemsize
    if backward:
        there = (3 * share + 2 * kv_share) * row + share * number * (1 + has_dlse)
        back = (share + 2 * kv_share) * row
    else:
        there = (share + 2 * kv_share) * row
        back = share * (row + number)
    return sizes.batch * (num_own * (size - 1) * there + (sum(lengths) - num_own) * back)
