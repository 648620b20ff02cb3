"""Which exchange a call uses under "auto", from the plan's bytes, memory and number of messages. Pure, no torch."""

from collections.abc import Sequence
from typing import NamedTuple

from ..pattern import DilatedPattern

# One round of small chunks costs less than several hops of them.
SMALL_CHUNK_BYTES = 64 * 1024
# The ring's bytes hide behind its computation, those of an all-to-all do not: it must save this factor.
ALL_TO_ALL_SAVING = 4


class Choice(NamedTuple):
    """An exchange and the reason for it."""

    exchange: str
    reason: str


def choose_exchange(
    pattern: DilatedPattern,
    lengths: Sequence[int],
    num_heads: int,
    num_kv_heads: int,
    batch: int,
    head_dim: int,
    itemsize: int,
) -> Choice:
    """The exchange for shards of these lengths; the same on every rank, as it depends on nothing else."""
    world_size, local = len(lengths), max(max(lengths), 1)
    element = 2 * batch * head_dim * itemsize  # one row of K and V of one head
    phases_per_kv_head = num_heads // num_kv_heads
    hops, chunk_bytes, ring_bytes = 0, 0, 0
    for w, r in pattern.branches:
        others = min(world_size, -(-min(w, sum(lengths)) // local)) - 1
        chunk = -(-local // r) * num_kv_heads * min(r, phases_per_kv_head) * element
        hops = max(hops, others)
        chunk_bytes += chunk if others else 0
        ring_bytes += others * chunk
    if hops == 0:
        return Choice("ring", "shards and segments align: next to nothing is sent")
    if hops > 1 and chunk_bytes <= SMALL_CHUNK_BYTES:
        return Choice("all_gather", f"chunks of {chunk_bytes:,} bytes are small: one round instead of {hops} hops")
    moved = (num_heads + num_kv_heads) * element * local * (world_size - 1) // world_size
    if num_kv_heads % world_size == 0 and moved * ALL_TO_ALL_SAVING <= ring_bytes:
        return Choice(
            "all_to_all",
            f"moves about {moved:,} bytes, the ring {ring_bytes:,}: at least {ALL_TO_ALL_SAVING} times as many",
        )
    return Choice(
        "ring", f"about {ring_bytes:,} bytes in {hops} hops that hide behind computation; memory of two chunks"
    )
