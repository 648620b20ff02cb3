"""What a plan is: one rank's tiles, messages and hops. Pure integers, no torch; `planner.py` makes it.

A *tile* is one call of a kernel: some query rows times some key rows. Both are strided views, so a plan is numbers.
A segment inside one span of a shard is local: its tile has the same rows on both sides. A segment that straddles shards
has a *ring*, the ranks that share it. Each of them packs its dilated rows of the segment, its *chunk*, into a flat
buffer, and the chunks travel along the ring. At hop s the i-th rank of a ring of g meets chunk (i - s) mod g.

Sizes and offsets of buffers are in units of B * D elements, so that a plan holds for any batch and head dim.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from .rows import Block, Rows


class Tile(NamedTuple):
    """Query rows times key rows, by one kernel call.

    is_causal: both sides are the same rows of the sequence, and row j sees keys 0..j.
    first_query, first_key: nothing was added to these rows before, so results are written, not added.
    packed: where own key rows lie in the buffer of own chunks too, side by side: kernels read them faster there.
    """

    query: Rows
    key: Rows | Block
    is_causal: bool
    first_query: bool
    first_key: bool
    packed: Block | None = None

    @property
    def pairs(self) -> int:
        """Number of (query, key) pairs that contribute, over heads and segments (for one batch entry)."""
        q, k = self.query.num_rows, self.key.num_rows
        return (q * (q + 1) // 2 if self.is_causal else q * k) * len(self.query.heads) * self.query.segments


class Message(NamedTuple):
    """A slice of the flat buffer that is sent to, or received from, `peer`.

    owner: the rank whose chunk, or whose chunk's gradient, it is.
    """

    peer: int
    offset: int
    size: int
    owner: int
    is_gradient: bool = False


class Hop(NamedTuple):
    """What one rank does at one hop. Peers are ranks of the group.

    sends, receives: chunks, so that afterwards the received ones can be met. Later than at the first hop an own chunk
        is sent from the rank's rows, since the buffer holds others by then.
    tiles: own queries times received chunks.
    grad_starts: where gradients of received chunks start from zero.
    grad_sends: gradients of chunks, to the rank of the next hop or, finished, home.
    grad_receives: gradients that come along for the next hop, and this rank's own that come home, by ring.
    targets: own chunks, to the ranks that meet them at this hop (for exchanges that send them straight there).
    """

    sends: tuple[Message, ...] = ()
    receives: tuple[Message, ...] = ()
    tiles: tuple[Tile, ...] = ()
    grad_starts: tuple[Message, ...] = ()
    grad_sends: tuple[Message, ...] = ()
    grad_receives: tuple[Message, ...] = ()
    targets: tuple[Message, ...] = ()


@dataclass(frozen=True)
class Plan:
    """One rank's work. `packs` says which rows of its own key/value go where in the buffer of its own chunks."""

    rank: int
    num_rows: int
    num_heads: int
    num_kv_heads: int
    local: tuple[Tile, ...]
    packs: tuple[tuple[Rows, Block], ...]
    hops: tuple[Hop, ...]
    chunk_size: int
    query_covered: bool
    key_covered: bool

    @property
    def pairs(self) -> int:
        """(query, key) pairs that this rank computes, per batch entry."""
        return sum(tile.pairs for tile in self.local) + sum(tile.pairs for hop in self.hops for tile in hop.tiles)

    def flops(self, batch: int, head_dim: int, *, backward: bool = False) -> int:
        """Floating-point operations: 2 matrix products forward, 5 backward, 2 * D operations per pair each."""
        return (5 if backward else 2) * 2 * head_dim * batch * self.pairs

    def sent(self, *, backward: bool = False, straight: bool = False) -> tuple[int, int]:
        """(elements of K‖V, elements of dK‖dV) that this rank sends, in units of B * D.

        straight: chunks go straight to the ranks that meet them and gradients straight back (all_gather), instead of
            along the ring.
        """
        chunks = sum(m.size for hop in self.hops for m in (hop.targets if straight else hop.sends))
        grads = sum(m.size for hop in self.hops for m in (hop.receives if straight else hop.grad_sends))
        return chunks, grads if backward else 0

    def bytes_sent(
        self, batch: int, head_dim: int, itemsize: int, *, backward: bool = False, straight: bool = False
    ) -> int:
        """Bytes that this rank sends in one forward, or in one backward (chunks again, and their gradients).

        Gradients travel in the accumulator's type: float32, or float64 for float64 inputs.
        """
        chunks, grads = self.sent(backward=backward, straight=straight)
        return batch * head_dim * (chunks * itemsize + grads * max(itemsize, 4))


class Chunk(NamedTuple):
    """What a message carries: rows of a segment of a branch that one rank owns.

    origin: the first position of the segment.
    lane: which of the segment's rings: chunks of others are needed by other ranks or at other hops.
    rows: where the key/value rows lie in the message. Unlike elsewhere, they are rows of the whole sequence: global
        positions take the place of local ones.
    """

    owner: int
    branch: int
    origin: int
    lane: int
    size: int
    rows: tuple[tuple[Rows, Block], ...]


def dealt_bytes(
    lengths: Sequence[int],
    rank: int,
    num_heads: int,
    num_kv_heads: int,
    batch: int,
    head_dim: int,
    itemsize: int,
    *,
    backward: bool = False,
    has_dlse: bool = False,
) -> int:
    """Bytes that a rank sends where heads are dealt for positions (all_to_all, or the inner axis of a 2-D mesh).

    Forward: its rows of query, key and value for others' heads, and others' rows of out and lse for its own. Backward:
    dout, query, key, value, out, lse (and dlse) there, and dq, dk, dv back.

    Args:
        lengths: the number of positions of every rank of the group that deals.
    """
    size, own = len(lengths), lengths[rank]
    share, kv_share = num_heads // size, num_kv_heads // size
    row, number = head_dim * itemsize, max(itemsize, 4)
    if backward:
        there = (3 * share + 2 * kv_share) * row + share * number * (1 + has_dlse)
        back = (share + 2 * kv_share) * row
    else:
        there, back = (share + 2 * kv_share) * row, share * (row + number)
    return batch * (own * (size - 1) * there + (sum(lengths) - own) * back)
