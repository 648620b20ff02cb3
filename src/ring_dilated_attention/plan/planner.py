"""Make a rank's plan from pattern and shards. Pure integers, no torch.

A *tile* is a block of queries times keys. The plan lists the tiles of the rank's queries times the rank's keys. For
segments that several ranks share, the plan also lists what the rank sends, receives and computes at each hop of a ring
(`rings.py`). `plan.py` has the types.
"""

from collections.abc import Iterator, Sequence
from functools import cache, lru_cache
from itertools import accumulate, product

from ..pattern import HeadGroups
from .collection import without_collection
from .plan import Hop, Message, Plan, Tile
from .ring_maker import RingMaker, ShardIndex
from .rings import Entry, Ring
from .rows import Block, Piece, Rows, make_bands, matches, own_sections
from .sharded_call import ShardedCall
from .sharding import Span, shard_length
from .sight import mask_between, meetings
from .window_maker import window_of


@lru_cache(maxsize=256)
@without_collection()
def make_plan(sharded_call: ShardedCall, rank: int) -> Plan:
    """The plan of a rank: the tiles that it computes, and the chunks that it packs, sends and receives."""
    sharded_call.pattern.check_heads(sharded_call.num_heads, sharded_call.num_kv_heads)
    planner = planner_of(sharded_call)
    local, rings = planner.local_and_rings(rank)
    offsets = offsets_of(rings)
    packs = planner.packs(rank, rings, offsets)
    hops = planner.hops(rank, rings, offsets)

    packed_rows: dict[Rows | Block, Block] = dict(packs)
    blocks: list[Tile] = []
    for tile in local:
        if hops:  # without hops no chunk is packed
            tile = tile._replace(packed=packed_rows.get(tile.key))
        blocks += planner.blocks_of(tile, rank)

    covers_queries, covers_keys = planner.covers()
    return Plan(
        rank=rank,
        num_rows=shard_length(sharded_call.shards[rank]),
        num_heads=planner.num_heads,
        num_kv_heads=sharded_call.num_kv_held,
        local=tuple(blocks),
        packs=tuple(packs),
        hops=tuple(hops),
        chunk_size=offsets[-1],
        received_size=offsets[-1],
        home_size=offsets[-1],
        query_covered=covers_queries,
        key_covered=covers_keys,
    )


class _Planner:
    """Makes the parts of every rank's plan, and caches what the plans of several ranks have in common."""

    def __init__(self, sharded_call: ShardedCall) -> None:
        self.pattern = sharded_call.pattern
        self.shards = sharded_call.shards
        self.borders = sharded_call.borders
        self.num_heads = len(sharded_call.held_heads)
        self.shares_kv = sharded_call.num_heads != sharded_call.num_kv_heads
        self.groups: list[HeadGroups] = []  # the head groups of each branch
        for branch in range(len(sharded_call.pattern.branches)):
            self.groups.append(
                sharded_call.pattern.head_groups(
                    branch, sharded_call.num_heads, sharded_call.num_kv_heads, sharded_call.held
                )
            )
        self.index = ShardIndex(sharded_call.shards)
        # cached, because all ranks of a ring ask for the same rings
        self.rings_of = cache(RingMaker(sharded_call, self.index, self.groups).rings)
        self.window = window_of(sharded_call, self.index)
        # Cached, because two ranks may have the same Chunk object (`rings.py`). The tiles with these ranks' chunks are
        # then equal.
        self.tiles_of = lru_cache(maxsize=1024)(self.make_tiles)

    def covers(self) -> tuple[bool, bool]:
        """Whether every query row is in a tile with `first_query` set, and whether every key row is in a tile with
        `first_key` set.

        At rate 1 every row is in a tile of the branch. At a higher rate some rows are in no tile of the branch.
        """
        # `first_rates`: the rates of the branches that have tiles with `first_query` set. Under "all"
        # only branch 0 has such tiles. Under "split" every branch has them, because it has query heads of its own.
        rates = [branch.dilation_rate for branch in self.pattern.branches]
        first_rates = rates[:1] if self.pattern.heads == "all" else rates
        is_covered = set(first_rates) == {1}
        return is_covered, is_covered and (self.pattern.heads == "all" or not self.shares_kv)

    def local_and_rings(self, rank: int) -> tuple[list[Tile], list[Ring]]:
        """Two lists for a rank, over all branches: the tiles of its queries times its own keys, and its rings."""
        tiles: list[Tile] = []
        rings: dict[tuple[int, int], tuple[Ring, ...]] = {}  # by (branch, origin)
        for number, branch in enumerate(self.pattern.branches):
            # `sections`: (piece, segment) for each piece of the sequence that the rank owns. `segment` is the segment
            # of which the piece is a part, or None if the piece is one or more whole segments.
            sections: list[tuple[Piece, Span | None]] = []
            # `own_pieces`: for each segment that is cut into pieces, the pieces that the rank owns.
            own_pieces: dict[Span, list[Piece]] = {}
            for span in self.shards[rank]:
                for start, stop, segment in own_sections(span, self.borders, branch):
                    piece = self.index.piece(span, start, stop)
                    sections.append((piece, segment))
                    if segment is not None:
                        own_pieces.setdefault(segment, []).append(piece)

            for piece, segment in sections:
                if segment is None:
                    tiles += self.section_tiles(number, piece)
                elif segment in own_pieces:
                    rings[number, segment.start] = self.rings_of(number, *segment)
                    # Pop the segment from `own_pieces`: it must be handled only once, even if the rank has two pieces
                    # of it.
                    pieces = sorted(own_pieces.pop(segment))
                    # Put pairs (piece, same piece) first: the tiles of such a pair may write the first results for the
                    # rows of the piece. Tiles of two different pieces always add to earlier results.
                    pairs = sorted(product(pieces, pieces), key=lambda pair: pair[0] != pair[1])
                    for query, key in pairs:
                        mask = self.mask(number, query, key)
                        if mask is not None:
                            tiles += self.tiles_under(number, mask, segment.start, query, key)

        if self.window is not None:
            rings |= self.window.rings(rank)
            for query, key, mask, owner in self.window.crossings(rank):
                if owner == rank:
                    tiles += self.tiles_under(self.window.number, mask, query.start, query, key)

        own_rings: list[Ring] = []
        for _, rings_of_origin in sorted(rings.items()):
            own_rings += [ring for ring in rings_of_origin if rank in ring.ranks]
        return tiles, own_rings

    def section_tiles(self, number: int, piece: Piece) -> Iterator[Tile]:
        """Yield the tiles of queries times keys within one piece of this rank's shard.

        The piece is one or more whole segments. For a window, it is all positions of a document that lie in one span.
        """
        branch = self.pattern.branches[number]
        for meeting in meetings(branch, piece.length, is_causal=self.pattern.is_causal):
            start = piece.start
            query = piece.slice(start + meeting.queries.start, start + meeting.queries.stop)
            key = piece.slice(start + meeting.keys.start, start + meeting.keys.stop)
            again = (meeting.number, meeting.step)
            yield from self.tiles_under(number, meeting.mask, query.start, query, key, again)

    def mask(self, number: int, query: Piece, key: Piece) -> str | None:
        branch = self.pattern.branches[number]
        return mask_between(branch, query.start, key.start, is_causal=self.pattern.is_causal)

    def tiles_under(
        self,
        number: int,
        mask: str,
        origin: int,
        query: Piece,
        key: Piece,
        again: tuple[int, int] = (1, 0),
    ) -> Iterator[Tile]:
        """The tiles of this rank's queries times this rank's keys under a mask, for all heads.

        number: the branch. origin: where the segment starts. again: (n, step) repeats each tile in n segments, whose
        starts are `step` positions apart. With (1, 0) nothing is repeated.
        """
        rate = self.pattern.branches[number].dilation_rate

        # Tiles of branch 0 write their results, and tiles of later branches add results. Under "split" tiles of every
        # branch write, because each branch has query heads of its own. But if query heads share key/value heads, two
        # branches may read the same key/value head. Then only branch 0 writes gradients of keys, and later branches add
        # them.
        is_split = self.pattern.heads == "split"
        first_query = query == key and (number == 0 or is_split)
        first_key = query == key and (number == 0 or (is_split and not self.shares_kv))

        for group in self.groups[number]:
            query_bands = make_bands(group, query, origin, rate)
            key_bands = make_bands(group, key, origin, rate)
            for query_band, key_band in matches(query_bands, key_bands):
                queries = query_band.query_rows(rate).again(*again)
                keys = key_band.kv_rows(rate).again(*again)
                yield Tile(queries, keys, mask, first_query=first_query, first_key=first_key)

    def rows_of(self, ring: Ring, place: int) -> Iterator[tuple[Piece, Rows, Block]]:
        """The key/value rows in the chunk of one rank: the rank at `place` in the ring.

        Yields (piece, rows, block) for each block of the chunk. The rank packs these rows of the piece into the block.
        """
        rate = self.pattern.branches[ring.branch].dilation_rate
        for entry in ring.chunks[place].entries:
            yield ring.keys[place][entry.piece], entry.band.kv_rows(rate), entry.block

    def packs(
        self, rank: int, rings: Sequence[Ring], offsets: Sequence[int]
    ) -> list[tuple[Rows, Block]]:
        """The rows that a rank packs for all its rings, each with its block in the rank's buffer of chunks."""
        packs: list[tuple[Rows, Block]] = []
        for ring, offset in zip(rings, offsets, strict=False):
            for _, rows, block in self.rows_of(ring, ring.place_of(rank)):
                packs.append((rows, block._replace(offset=offset + block.offset)))
        return packs

    def make_tiles(
        self,
        number: int,
        mask: str,
        origin: int,
        query: Piece,
        entry: Entry,
        offset: int,
        rank: int,
    ) -> tuple[Tile, ...]:
        """The tiles of this rank's queries in one piece times a part of another rank's chunk.

        number: the branch. query: the piece. entry: the part of the chunk. offset: where the chunk begins in the
        buffer.
        """
        rate = self.pattern.branches[number].dilation_rate
        query_bands = make_bands(entry.band.group, query, origin, rate)

        tiles: list[Tile] = []
        for query_band, key_band in matches(query_bands, [entry.band]):
            # The block may have more heads than the tile. `start`: the index, in the block, of the first head that the
            # tile reads.
            start = key_band.lo - entry.band.lo if key_band.group.phase_step else 0
            block = entry.block._replace(
                offset=offset + entry.block.offset,
                start=start,
                stop=start + len(key_band.kv_heads),
            )
            rows = query_band.query_rows(rate)

            # Set neither flag: the rank has computed its local tiles before, and adds the results of this tile.
            tile = Tile(rows, block, mask, first_query=False, first_key=False)
            tiles += self.blocks_of(tile, rank)
        return tuple(tiles)

    def blocks_of(self, tile: Tile, rank: int) -> Iterator[Tile]:
        """Cut a tile into blocks of heads, so that the kernel's result for a block takes little memory.

        The result of a block is at most about a third as large as the rank's query. But a block has at least 4
        key/value heads, so that several threads of the kernel have work. (A tile of fewer than 8 such heads stays
        whole.) A tile that has all rows of the rank and `first_query` set stays whole too, because its result becomes
        the accumulator.
        """
        # `local_size` and `size` count a row for each head: a position with 8 heads counts as 8 rows.
        local_size = shard_length(self.shards[rank]) * self.num_heads
        size = len(tile.query.heads) * tile.query.num_rows * tile.query.segments
        num_kv_heads = len(tile.key.heads)
        num_blocks = min(-(-3 * size // local_size), max(num_kv_heads // 4, 1))
        if num_blocks == 1 or (tile.first_query and size == local_size):
            yield tile
            return

        for i in range(num_blocks):
            lo = num_kv_heads * i // num_blocks
            hi = num_kv_heads * (i + 1) // num_blocks
            yield tile.of_heads(lo, hi)

    def hops(self, rank: int, rings: Sequence[Ring], offsets: Sequence[int]) -> list[Hop]:
        """What the rank sends, receives and computes at every hop, in all its rings together."""
        last = 0
        for ring in rings:
            for ranges in ring.needed:
                if ranges:
                    last = max(last, ranges[-1][1])

        places: list[_PlaceInRing] = []
        for ring, offset in zip(rings, offsets, strict=False):
            places.append(_PlaceInRing(self, ring, rank, offset, last))

        hops: list[Hop] = []
        for s in range(1, last + 1):
            lists: dict[str, list] = {field: [] for field in Hop._fields}
            for place in places:
                place.add_hop(s, lists)
            hops.append(Hop(*map(tuple, lists.values())))

        # Other ranks of the rings may exchange chunks at later hops than this rank. Drop the hops at which this rank
        # does nothing.
        while hops and not any(hops[-1]):
            hops.pop()
        return hops


class _PlaceInRing:
    """What a rank does at its place of one ring, hop by hop.

    At hop s the chunk of place c is *due* at place c + s: the rank there receives the chunk if it needs the chunk's
    rows (`rings.py`).

    offset: where the ring's chunks begin in the buffers. last: the last hop of all rings of the rank.
    """

    def __init__(self, planner: _Planner, ring: Ring, rank: int, offset: int, last: int) -> None:
        self.planner = planner
        self.ring = ring
        self.rank = rank
        self.offset = offset
        self.place = ring.place_of(rank)

        # Each list has an entry for each hop s from 0 to last + 1: whether a chunk is needed at hop s. In `own` this is
        # the chunk of this rank. In `here`, `after` and `before` it is the chunk that is due at this place, at the next
        # place and at the previous place.
        self.own = [ring.meets(self.place, s) for s in range(last + 2)]
        self.here = self._needed_at(self.place, last)
        self.after = self._needed_at(self.place + 1, last)
        self.before = self._needed_at(self.place - 1, last)

    def _needed_at(self, place: int, last: int) -> list[bool]:
        num_places = len(self.ring.ranks)
        return [self.ring.meets((place - s) % num_places, s) for s in range(last + 2)]

    def message(self, peer: int, place: int, *, is_gradient: bool = False) -> Message:
        """The message that carries a chunk, or the chunk's gradient, to or from a peer.

        place: the place of the chunk's owner in the ring.
        """
        place %= len(self.ring.ranks)
        return Message(
            peer,
            self.offset,
            self.ring.chunks[place].size,
            owner=self.ring.ranks[place],
            is_gradient=is_gradient,
            packed=self.offset,
        )

    def tiles_with(self, owner: int) -> Iterator[Tile]:
        """The tiles of this rank's queries times the chunk of the rank at place `owner` of the ring."""
        ring = self.ring
        for query in ring.queries[self.place]:
            for entry in ring.chunks[owner].entries:
                mask = self.planner.mask(ring.branch, query, ring.keys[owner][entry.piece])
                if mask is not None:
                    yield from self.planner.tiles_of(
                        ring.branch, mask, ring.origin, query, entry, self.offset, self.rank
                    )

    def add_hop(self, s: int, lists: dict[str, list]) -> None:
        """Extend `lists` by what the rank does at hop s in this ring. There is a list for each field of `Hop`."""
        place = self.place
        own = self.own
        here = self.here
        after = self.after
        before = self.before
        ranks = self.ring.ranks
        following = ranks[(place + 1) % len(ranks)]
        previous = ranks[place - 1]

        if after[s] and (s == 1 or here[s - 1]):
            # Send to the next place: at hop 1 this rank's own chunk, later the chunk that was received at hop s - 1.
            lists["sends"].append(self.message(following, place + 1 - s))

        if own[s]:
            # `target`: the rank that needs this rank's chunk at hop s. If the rank before `target` needed the chunk at
            # hop s - 1, that rank passes the chunk on. If not, this rank sends the chunk. (At hop 1 the code above does
            # so.) If the rank after `target` needs the chunk at hop s + 1, `target` sends the gradient to that rank. If
            # not, `target` returns the gradient to this rank.
            target = ranks[(place + s) % len(ranks)]
            lists["targets"].append(self.message(target, place))
            if s > 1 and not own[s - 1]:
                lists["sends"].append(self.message(target, place))
            if not own[s + 1]:
                lists["grad_receives"].append(self.message(target, place, is_gradient=True))

        if here[s]:
            # This rank needs the chunk that is due at its place: it receives the chunk, computes with it, and sends the
            # chunk's gradient on.
            due = (place - s) % len(ranks)
            owner = ranks[due]
            is_first = s == 1 or not before[s - 1]
            lists["receives"].append(self.message(owner if is_first else previous, due))
            if is_first:
                lists["grad_starts"].append(self.message(self.rank, due, is_gradient=True))
            lists["tiles"] += self.tiles_with(due)
            home = following if after[s + 1] else owner
            lists["grad_sends"].append(self.message(home, due, is_gradient=True))

        if before[s] and here[s + 1]:
            # At hop s the previous rank adds to the gradient of the chunk that this rank gets at hop s + 1. Then the
            # previous rank sends the unfinished gradient to this rank.
            lists["grad_receives"].append(self.message(previous, place - s - 1, is_gradient=True))


def offsets_of(rings: Sequence[Ring]) -> list[int]:
    """Return the offset of each ring's chunks in a rank's buffer, followed by the size of the buffer.

    Each ring has room for its largest chunk.
    """
    largest = [max(chunk.size for chunk in ring.chunks) for ring in rings]
    return list(accumulate(largest, initial=0))


planner_of = lru_cache(maxsize=4)(_Planner)
