"""The types of a plan: one rank's tiles, messages and hops. Pure integers, no torch; `planner.py` makes plans.

A *tile* is one call of a kernel: some query rows times some key rows. Both are strided views.
A segment inside one span of a shard is local: its tile has the same rows on both sides. A segment that straddles shards
has a *ring*, the ranks that share it. Each rank packs its dilated rows of the segment, its *chunk*, into a flat
buffer, and the chunks travel along the ring. At hop s the rank at place i of g
places meets the chunk of place (i - s) mod g.

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
    """Query rows times key rows, by one kernel call."""

    query: Rows
    key: Rows | Block
    mask: str  # which of the keys a query row sees (`sight.py`)
    # no earlier tile has results for the query rows, so results are written, not added
    first_query: bool
    first_key: bool  # the same for the key rows
    # a copy of the key rows in the buffer of own chunks, which kernels read faster
    packed: Block | None = None

    def __str__(self) -> str:
        mask = "" if self.mask == FULL else f", {self.mask}"
        return f"queries in {self.query} x keys in {self.key}{mask}"

    @property
    def pairs(self) -> int:
        """Number of (query, key) pairs that contribute, over heads and segments (for one batch entry)."""
        of_one = pairs_under(self.mask, self.query.num_rows, self.key.num_rows)
        return of_one * len(self.query.heads) * self.query.segments

    def split(self, max_rows: int, fewest_heads: int) -> Iterator["Tile"]:
        """Split the tile into tiles of at most max_rows query rows and at most max_rows key rows, over all heads and
        segments. But each has at least `fewest_heads` key/value heads, counted over segments, even if it then has more
        rows. Query heads that share keys stay together."""
        query = self.query
        key = self.key
        num_heads = len(query.heads)
        num_kv_heads = len(key.heads)

        # how many query heads, counted over segments, have max_rows rows together
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

    def of_heads(self, lo: int, hi: int) -> "Tile":
        """Key/value heads lo..hi-1, with the query heads that share them."""
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
    packed: int = 0  # where an own chunk lies in the buffer of own chunks


class Hop(NamedTuple):
    """What one rank does at one hop. Peers are ranks of the group. The chunks arrive before the tiles are computed.
    An own chunk that is sent after hop 1 is packed again, because its buffer then holds chunks of other ranks. Finished
    gradients go home to the chunk's owner, and unfinished ones to the rank that meets the chunk at the next hop."""

    sends: tuple[Message, ...] = ()  # chunks
    receives: tuple[Message, ...] = ()
    tiles: tuple[Tile, ...] = ()  # own queries times received chunks
    grad_starts: tuple[Message, ...] = ()  # where gradients of received chunks start from zero
    grad_sends: tuple[Message, ...] = ()  # gradients of received chunks
    # gradients of the chunks of the next hop, and finished ones of own chunks
    grad_receives: tuple[Message, ...] = ()
    # own chunks, each with the rank that meets it at this hop; only `gathered` uses them
    targets: tuple[Message, ...] = ()


@dataclass(frozen=True, eq=False)
class Plan:
    """One rank's work. Every hop but the last swaps the buffers of own and received chunks: both have one size."""

    rank: int
    num_rows: int
    num_heads: int
    num_kv_heads: int
    local: tuple[Tile, ...]
    # own key/value rows, each with its block in the buffer of own chunks
    packs: tuple[tuple[Rows, Block], ...]
    hops: tuple[Hop, ...]
    # sizes, in units of B * D elements, of the buffers of this rank's chunks, received chunks and returned gradients
    chunk_size: int
    received_size: int
    home_size: int
    # whether the tiles that write (and do not add) cover every query row, and every key row
    query_covered: bool
    key_covered: bool
    cached: tuple[Tile, ...] = ()  # own queries times rows of a cache (one rank, forward only)

    @property
    def tiles(self) -> Iterator[Tile]:
        return chain(self.local, self.cached, (tile for hop in self.hops for tile in hop.tiles))

    @cached_property
    def num_tiles(self) -> int:
        return sum(1 for _ in self.tiles)

    @property
    def pairs(self) -> int:
        """(query, key) pairs of all tiles, per batch entry."""
        return sum(tile.pairs for tile in self.tiles)

    def packs_of(self, message: Message) -> Iterator[tuple[Rows, Block]]:
        """The own rows in the chunk of a message, each with its block. Offsets count from the start of the chunk."""
        stop = message.packed + message.size
        for rows, block in self.packs:
            if message.packed <= block.offset < stop:
                yield rows, block._replace(offset=block.offset - message.packed)

    def sent(self, *, backward: bool = False) -> tuple[int, int]:
        """(K and V, dK and dV) that this rank sends, in units of B * D elements."""
        chunks = sum(m.size for hop in self.hops for m in hop.sends)
        grads = sum(m.size for hop in self.hops for m in hop.grad_sends)
        return chunks, grads if backward else 0


@lru_cache(maxsize=256)
def gathered(plan: Plan) -> Plan:
    """The plan of the same work with one hop (all_gather): an owner sends its chunk to all ranks that meet it, and they
    send its gradients back.

    This sends as many bytes as a ring, and waits once instead of g - 1 times. But a rank holds all chunks that it
    meets, and their gradients. Chunks lie in the order of their owners, then of hops.
    """
    if not plan.hops:
        return plan

    received = [(m, s) for s, hop in enumerate(plan.hops) for m in hop.receives]
    received.sort(key=lambda x: x[0].owner)
    targets = sorted((m for hop in plan.hops for m in hop.targets), key=lambda m: m.peer)

    # Where each chunk lies: all are held at the same time.
    chunks: list[Message] = []
    received_size = 0
    # by hop: each message with its new offset
    moved: list[list[tuple[Message, int]]] = [[] for _ in plan.hops]
    for message, s in received:
        chunks.append(Message(message.owner, received_size, message.size, message.owner))
        moved[s].append((message, received_size))
        received_size += message.size

    # The gradients of own chunks, which come home from the ranks that met them.
    gradients: list[Message] = []
    home_size = 0
    for target in targets:
        gradients.append(target._replace(offset=home_size, is_gradient=True))
        home_size += target.size

    # A tile reads the chunk in which its block lies.
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
