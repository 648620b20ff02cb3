"""Which exchange a call uses under "auto", from the plans' bytes, memory and number of hops. Pure, no torch."""

from functools import lru_cache
from typing import NamedTuple

from ..pattern import DilatedPattern
from .plan import dealt_bytes
from .planner import make_plan
from .sharding import Shard, shard_length

# How chunks travel.
EXCHANGES = ("ring", "all_gather", "all_to_all", "simulated")

# One round of small chunks costs less than several hops of them.
SMALL_CHUNK_BYTES = 64 * 1024
# The ring's bytes hide behind its computation, those of an all-to-all do not: it must save this factor.
ALL_TO_ALL_SAVING = 3
# Ranks whose plans are looked at; of more, evenly spaced ones. The same on every rank, so that all choose alike.
MOST_PLANS = 16


class Choice(NamedTuple):
    """An exchange and the reason for it."""

    exchange: str
    reason: str


def check_dealing(num_kv_heads: int, world_size: int) -> None:
    """Raise ValueError unless heads can be dealt to so many ranks."""
    if num_kv_heads % world_size:
        raise ValueError(
            f"all_to_all deals heads to ranks, and {num_kv_heads} key/value heads do not divide among {world_size} "
            f"ranks: {num_kv_heads} mod {world_size} = {num_kv_heads % world_size}. Use exchange='ring', which takes "
            "any number."
        )


@lru_cache(maxsize=256)
def choose_exchange(
    pattern: DilatedPattern,
    shards: tuple[Shard, ...],
    num_heads: int,
    num_kv_heads: int,
    documents: tuple[int, ...] | None,
    batch: int,
    head_dim: int,
    itemsize: int,
) -> Choice:
    """The exchange for a forward over these shards; arguments as of `make_plan`, and the sizes of a row."""
    ranks = range(0, len(shards), -(-len(shards) // MOST_PLANS))
    plans = [make_plan(pattern, shards, rank, num_heads, num_kv_heads, documents) for rank in ranks]
    unit = batch * head_dim * itemsize
    sent = unit * max(plan.sent()[0] for plan in plans)
    hops = max(len(plan.hops) for plan in plans)
    if not sent:
        return Choice("ring", "nothing is sent: every segment lies in one shard")
    messages = [message.size for plan in plans for hop in plan.hops for message in hop.receives]
    largest = unit * max(messages, default=0)
    two_chunks = 2 * unit * max(plan.chunk_size for plan in plans)
    gathered = unit * max(sum(m.size for hop in plan.hops for m in hop.receives) for plan in plans)
    local = 2 * num_kv_heads * unit * max(map(shard_length, shards))
    ring = f"the ring sends {sent:,} bytes in {hops} hops and holds {two_chunks:,} (two chunks)"
    if hops > 1 and largest <= SMALL_CHUNK_BYTES and gathered <= max(two_chunks, local):
        return Choice(
            "all_gather",
            f"chunks of {largest:,} bytes are small, and all that a rank meets are {gathered:,}, "
            f"no more than its own keys and values: one round instead of {hops} hops; {ring}",
        )
    if num_kv_heads % len(shards):
        return Choice("ring", f"{ring}; {num_kv_heads} key/value heads cannot be dealt to {len(shards)} ranks")
    lengths = tuple(map(shard_length, shards))
    sizes = (num_heads, num_kv_heads, batch, head_dim, itemsize)
    dealt = max(dealt_bytes(lengths, rank, *sizes) for rank in ranks)
    if dealt * ALL_TO_ALL_SAVING <= sent:
        return Choice(
            "all_to_all",
            f"sends {dealt:,} bytes, less than the ring by {ALL_TO_ALL_SAVING} times or more (its bytes hide behind "
            f"computation, these do not), and holds them beside the inputs; {ring}",
        )
    return Choice("ring", f"{ring}, behind computation; dealing heads would send {dealt:,}, hidden by nothing")
