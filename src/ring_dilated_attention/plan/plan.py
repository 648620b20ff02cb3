"""The types of a plan: one rank's tiles, messages and hops. Pure integers, no torch; `planner.py` makes plans.

A *tile* is one call of a kernel: some query rows times some key rows. Both are strided views. If a segment lies inside
one span of a shard, it is local: the queries and the keys of its tile are the same rows.

A segment that straddles shards has a *ring*: the ranks that share it, in order. A rank's number in this order is its
*place*. The dilation selects some of a rank's key and value rows. The rank packs the selected rows into a flat buffer,
as its *chunk*. The chunks travel along the ring. At hop 1 a rank gets the chunk of the rank one place before it, at hop
2 the chunk of the rank two places before it, and so on. But a rank gets a chunk only if it needs the chunk's rows.

Sizes and offsets of buffers are in units of B * D elements, so that a plan holds for any batch and head dim.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import chain
from typing import NamedTuple

from .rows import Block, Rows
from .sight import FULL, pairs_under


class Tile(NamedTuple):
    """Some query rows times some key rows, computed by one kernel call."""

    query: Rows
    key: Rows | Block
    mask: str  # which of the tile's keys each query row attends to (`sight.py`)
    # If set, no earlier tile has results for these query rows: this tile's results are written. If not set, this tile's
    # results are added.
    first_query: bool
    # If set, no earlier tile has gradients for these key rows: this tile's gradients are written. If not set, this
    # tile's gradients are added.
    first_key: bool
    # The block of this rank's chunks that holds a copy of the key rows, or None. Kernels read the copy faster.
    packed: Block | None = None

    def __str__(self) -> str:
        mask = "" if self.mask == FULL else f", {self.mask}"
        return f"queries in {self.query} x keys in {self.key}{mask}"

    @property
    def pairs(self) -> int:
        """Number of (query, key) pairs in which the query attends to the key, summed over heads and segments (for one
        batch entry)."""
        of_one = pairs_under(self.mask, self.query.num_rows, self.key.num_rows)
        return of_one * len(self.query.heads) * self.query.segments

    def split(self, max_rows: int, fewest_heads: int) -> Iterator["Tile"]:
        """Split the tile into smaller tiles, along segments and heads.

        Each smaller tile has at most max_rows query rows and max_rows key rows, summed over its heads and segments. But
        no tile is cut to fewer than about `fewest_heads` key/value heads, even if it then has more rows. (A head in n
        segments counts as n heads here.) Query heads that share a key/value head stay together.
        """
        query = self.query
        key = self.key
        num_heads = len(query.heads)
        num_kv_heads = len(key.heads)

        # `most`: how many query heads fit into a tile of `max_rows` rows. A head in n segments counts as n heads.
        most = max_rows // max(query.num_rows, key.num_rows)
        heads = max(fewest_heads, most * num_kv_heads // num_heads)
        segments = query.segments
        if isinstance(key, Rows):
            segments = max(fewest_heads // num_kv_heads, most // num_heads, 1)

        for i in range(0, query.segments, segments):
            j = min(i + segments, query.segments)
            q = query.of_segments(i, j)
            k = key.of_segments(i, j) if isinstance(key, Rows) else key
            for lo in range(0, num_kv_heads, heads):
                yield self._replace(query=q, key=k).of_heads(lo, min(lo + heads, num_kv_heads))

    def split_shared(self, most: int) -> Iterator["Tile"]:
        """Split the tile so that in each part at most `most` query heads share a key/value head."""
        num_kv_heads = len(self.key.heads)
        ratio = len(self.query.heads) // num_kv_heads
        if ratio <= most:
            yield self
            return
        for head in range(num_kv_heads):
            of_head = self.of_heads(head, head + 1)
            for lo in range(0, ratio, most):
                query = of_head.query.of_heads(lo, min(lo + most, ratio))
                # Only the first part writes the gradients of the keys. The others add to them.
                yield of_head._replace(query=query, first_key=self.first_key and lo == 0)

    def of_heads(self, lo: int, hi: int) -> "Tile":
        """The part of the tile with key/value heads lo..hi-1 and the query heads that share them."""
        ratio = len(self.query.heads) // len(self.key.heads)
        query = self.query.of_heads(lo * ratio, hi * ratio)
        packed = self.packed and self.packed.of_heads(lo, hi)
        return self._replace(query=query, key=self.key.of_heads(lo, hi), packed=packed)


class Message(NamedTuple):
    """A slice of a flat buffer that is sent to, or received from, `peer`."""

    peer: int
    offset: int
    size: int
    owner: int  # the rank that packed the chunk
    is_gradient: bool = False
    # For a chunk of this rank: where the chunk lies in the buffer of this rank's chunks.
    packed: int = 0


class Hop(NamedTuple):
    """What one rank does at one hop.

    The rank first receives chunks, then computes the tiles of its queries times these chunks. If the rank sends a chunk
    of its own later than at hop 1, it packs this chunk again, because both buffers then hold chunks of other ranks.

    In backward each rank adds its part to the gradient of a received chunk. If the next rank needs the chunk too, the
    sum goes to that rank. Otherwise the sum is finished and goes to the chunk's owner.
    """

    sends: tuple[Message, ...] = ()  # chunks
    receives: tuple[Message, ...] = ()  # chunks
    tiles: tuple[Tile, ...] = ()  # this rank's queries times received chunks
    # Received chunks for which this rank starts the gradient, from zero.
    grad_starts: tuple[Message, ...] = ()
    grad_sends: tuple[Message, ...] = ()  # gradients of received chunks
    # Finished gradients of this rank's own chunks, and unfinished gradients of chunks that this rank receives at the
    # next hop.
    grad_receives: tuple[Message, ...] = ()
    # This rank's chunks that another rank (`Message.peer`) needs at this hop. Only `gathered` uses this field.
    targets: tuple[Message, ...] = ()


@dataclass(frozen=True, eq=False)
class Plan:
    """The work of one rank in one attention call.

    There are two buffers of chunks. A hop sends chunks from one buffer and receives chunks into the other. If there are
    several hops, the two buffers change roles at every hop, so they have the same size.
    """

    rank: int
    num_rows: int
    num_heads: int
    num_kv_heads: int
    local: tuple[Tile, ...]
    # This rank's key/value rows that are packed, each with its block in the buffer of this rank's chunks.
    packs: tuple[tuple[Rows, Block], ...]
    hops: tuple[Hop, ...]
    # The sizes of three buffers, in units of B * D elements. `chunk_size`: this rank's chunks. `received_size`:
    # received chunks. `home_size`: gradients that other ranks send.
    chunk_size: int
    received_size: int
    home_size: int
    # Whether every query row is in a tile with `first_query` set, and every key row in a tile with `first_key` set. If
    # so, the accumulators need not be filled with zeros.
    query_covered: bool
    key_covered: bool
    cached: tuple[Tile, ...] = ()  # queries times rows of a cache (one rank, forward only)

    @property
    def tiles(self) -> Iterator[Tile]:
        return chain(self.local, self.cached, (tile for hop in self.hops for tile in hop.tiles))

    @cached_property
    def num_tiles(self) -> int:
        return sum(1 for _ in self.tiles)

    @property
    def pairs(self) -> int:
        """Number of (query, key) pairs of all tiles (for one batch entry)."""
        return sum(tile.pairs for tile in self.tiles)

    def packs_of(self, message: Message) -> Iterator[tuple[Rows, Block]]:
        """The rows that this rank packed into the chunk of a message, each with its block in the chunk.

        The offset of a block counts from the start of the chunk.
        """
        stop = message.packed + message.size
        for rows, block in self.packs:
            if message.packed <= block.offset < stop:
                yield rows, block._replace(offset=block.offset - message.packed)

    def sent(self, *, backward: bool = False) -> tuple[int, int]:
        """How much this rank sends: (keys and values, their gradients), in units of B * D elements."""
        chunks = sum(m.size for hop in self.hops for m in hop.sends)
        grads = sum(m.size for hop in self.hops for m in hop.grad_sends)
        return chunks, grads if backward else 0


@lru_cache(maxsize=256)
def gathered(plan: Plan) -> Plan:
    """Make a plan that does the work of `plan` in a single hop (all_gather).

    The owner of a chunk sends it to all ranks that need it, and each of these ranks sends back a gradient of the chunk.
    All ranks together send as many bytes as in a ring. A rank waits only once; in a ring of g ranks it would wait up to
    g - 1 times. But a rank holds all chunks that it needs, and their gradients, at the same time.

    In the buffer, chunks are sorted by owner. Chunks of the same owner keep the order of the hops.
    """
    if not plan.hops:
        return plan

    received = [(m, s) for s, hop in enumerate(plan.hops) for m in hop.receives]
    received.sort(key=lambda x: x[0].owner)
    targets = sorted((m for hop in plan.hops for m in hop.targets), key=lambda m: m.peer)

    # Give each received chunk its own offset in the buffer, because the buffer holds all chunks at the same time.
    chunks: list[Message] = []
    received_size = 0
    # `moved`: for each hop of the ring, (received message, its new offset in the buffer).
    moved: list[list[tuple[Message, int]]] = [[] for _ in plan.hops]
    for message, s in received:
        chunks.append(Message(message.owner, received_size, message.size, message.owner))
        moved[s].append((message, received_size))
        received_size += message.size

    # Each rank that received this rank's chunk sends a gradient of the chunk back.
    gradients: list[Message] = []
    home_size = 0
    for target in targets:
        gradients.append(target._replace(offset=home_size, is_gradient=True))
        home_size += target.size

    # Give each tile's keys their new offset in the buffer. To find the chunk that contains the keys, compare the old
    # offsets.
    tiles: list[Tile] = []
    for hop, moved_chunks in zip(plan.hops, moved, strict=True):
        for tile in hop.tiles:
            assert isinstance(tile.key, Block)
            for message, place in moved_chunks:
                within = tile.key.offset - message.offset
                if 0 <= within < message.size:
                    key = tile.key._replace(offset=place + within)
                    tiles.append(tile._replace(key=key))

    only = Hop(
        sends=tuple(targets),
        receives=tuple(chunks),
        tiles=tuple(tiles),
        grad_starts=tuple(chunks),
        grad_sends=tuple(chunk._replace(is_gradient=True) for chunk in chunks),
        grad_receives=tuple(gradients),
    )
    return replace(plan, hops=(only,), received_size=received_size, home_size=home_size)
