"""Make a rank's plan from pattern and shards: local tiles, rings (see `rings.py`) and hops. Pure integers, no torch."""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from functools import cache, lru_cache
from itertools import accumulate, groupby, pairwise, product

from ..pattern import HeadGroup
from .collection import without_collection
from .job import Job
from .plan import Hop, Message, Plan, Tile
from .rings import Chunk, Entry, Hops, Met, Ring, causal_hops, make_chunk
from .rows import Block, Piece, Rows, heads_between, make_bands, matches, own_pieces
from .sharding import Span, first_rows, shard_length


@lru_cache(maxsize=256)
@without_collection()
def make_plan(job: Job, rank: int) -> Plan:
    """Plan one rank's work."""
    pattern = job.pattern
    pattern.check_heads(job.num_heads, job.num_kv_heads)
    planner = planner_of(job)
    local, rings = planner.local_and_rings(rank)
    offsets = offsets_of(rings)
    packs = [
        (rows, block._replace(offset=offset + block.offset))
        for ring, offset in zip(rings, offsets, strict=False)
        for _, rows, block in planner.rows_of(ring, ring.place_of(rank))
    ]
    hops = planner.hops(rank, rings, offsets)
    places: dict[Rows | Block, Block] = dict(packs) if hops else {}  # without hops nothing is packed
    if places:
        local = [tile._replace(packed=places.get(tile.key)) for tile in local]
    first_rates = pattern.dilation_rates[:1] if pattern.heads == "all" else pattern.dilation_rates
    covered = set(first_rates) == {1}
    return Plan(
        rank=rank,
        num_rows=shard_length(job.shards[rank]),
        num_heads=planner.num_heads,
        num_kv_heads=job.num_kv_held,
        local=tuple(x for tile in local for x in planner.cut(tile, rank)),
        packs=tuple(packs),
        hops=tuple(hops),
        chunk_size=offsets[-1],
        received_size=offsets[-1],
        home_size=offsets[-1],
        query_covered=covered,
        key_covered=covered and (pattern.heads == "all" or not planner.shares_kv),
    )


class _Planner:
    """What the plans of all ranks of a job share, and the methods that make one."""

    def __init__(self, job: Job) -> None:
        self.pattern, self.shards, self.borders = job.pattern, job.shards, job.borders
        self.num_heads = len(job.held_heads)
        self.shares_kv = job.num_heads != job.num_kv_heads
        heads = (job.num_heads, job.num_kv_heads, job.held)
        self.groups = [job.pattern.head_groups(i, *heads) for i in range(len(job.pattern.branches))]
        owners = ((span, rank) for rank, shard in enumerate(job.shards) for span in shard)
        self.owners = sorted(owners, key=lambda owner: owner[0].start)
        self.starts = [span.start for span, _ in self.owners]
        self.row_of = {s: row for shard in job.shards for s, row in zip(shard, first_rows(shard), strict=False)}
        self.spans_of = cache(lambda rank: sorted(self.shards[rank]))
        self.rings_of = cache(self.make_rings)  # all ranks of a ring ask for it
        self.tiles_of = lru_cache(maxsize=1024)(self.make_tiles)  # rows lie alike in one chunk after another

    def local_and_rings(self, rank: int) -> tuple[list[Tile], list[Ring]]:
        """Tiles of all branches with own rows on both sides, and the rings of this rank."""
        tiles: list[Tile] = []
        rings: dict[tuple[int, int], tuple[Ring, ...]] = {}
        for branch, (length, _) in enumerate(self.pattern.branches):
            for span in self.shards[rank]:
                for first, last, segments, origin, stop in own_pieces(span, self.borders, length):
                    if segments:
                        piece = Piece(first, last, self.row_of[span] + first - span.start)
                        tiles += self.own_tiles(branch, origin, piece, piece, segments)
                    elif (branch, origin) not in rings:
                        rings[branch, origin] = self.rings_of(branch, origin, stop)
                        own = self.pieces(rank, origin, stop)
                        # Each piece times itself comes first: these tiles write where the others add.
                        for query, key in sorted(product(own, own), key=lambda pair: pair[0] != pair[1]):
                            tiles += self.own_tiles(branch, origin, query, key, 1)
        return tiles, [ring for _, both in sorted(rings.items()) for ring in both if rank in ring.ranks]

    def own_tiles(self, branch: int, origin: int, query: Piece, key: Piece, segments: int) -> Iterator[Tile]:
        """Own queries of one piece times own keys of the same or another piece, for `segments` equal segments."""
        length, rate = self.pattern.branches[branch]
        same, is_causal, split = query == key, self.pattern.is_causal, self.pattern.heads == "split"
        if is_causal and key.start > query.start:
            return
        for group in self.groups[branch]:
            for q, k in matches(make_bands(group, query, origin, rate), make_bands(group, key, origin, rate)):
                yield Tile(
                    q.query_rows(rate).again(segments, length),
                    k.kv_rows(rate).again(segments, length),
                    is_causal=is_causal and same,
                    first_query=same and (branch == 0 or split),
                    first_key=same and (branch == 0 or (split and not self.shares_kv)),
                )

    def pieces(self, rank: int, start: int, stop: int) -> list[Piece]:
        """A rank's pieces of positions start..stop-1, in the order of positions."""
        spans = self.spans_of(rank)
        near = spans[max(bisect_right(spans, Span(start, 0)) - 1, 0) : bisect_right(spans, Span(stop, 0))]
        clipped = ((span, max(span.start, start), min(span.stop, stop)) for span in near)
        return [Piece(a, b, self.row_of[span] + a - span.start) for span, a, b in clipped if a < b]

    def make_rings(self, branch: int, origin: int, stop: int) -> tuple[Ring, ...]:
        """The rings of segment origin..stop-1."""
        rings: list[Ring] = []
        rate = self.pattern.dilation_rates[branch]
        for members, groups in self.members(branch, origin, stop):
            everywhere: Hops = ((1, len(members) - 1),)
            starts = [[piece.start for piece in pieces] for pieces in members.values()]
            needed = causal_hops(starts) if self.pattern.is_causal else [[everywhere] * len(place) for place in starts]
            alike = all(len(set(place)) == 1 for place in needed)
            chunk_of: dict[tuple, Chunk] = {}
            for i in range(1 if alike else max(map(len, needed))):
                hops = tuple(found[i] if i < len(found) else () for found in needed)
                if not any(hops):
                    continue
                chunks = []
                for pieces in members.values():
                    carried = pieces if alike else pieces[i : i + 1]
                    arrangement = (i, *[(x.stop - x.start, (x.start - origin) % rate, x.row) for x in carried])
                    if arrangement not in chunk_of:
                        chunk_of[arrangement] = make_chunk(groups, carried, i, origin, rate)
                    chunks.append(chunk_of[arrangement])
                all_pieces = tuple(map(tuple, members.values()))
                rings.append(Ring(branch, origin, len(rings), tuple(members), all_pieces, tuple(chunks), hops))
        return tuple(rings)

    def members(self, branch: int, origin: int, stop: int) -> Iterator[tuple[dict[int, list[Piece]], list[HeadGroup]]]:
        """Group the heads whose rows the same ranks need: yield these ranks, each with its pieces, and the heads.
        A rank needs all rows of the phases of which it has rows; if causal, only those before its last piece."""
        rate = self.pattern.dilation_rates[branch]
        pieces = self.candidates(branch, origin, stop)

        def has_row(x: Piece, phases: Iterable[int]) -> bool:
            return x.stop - x.start >= rate or any(x.start + (origin + s - x.start) % rate < x.stop for s in phases)

        @cache
        def sharers(phase: int) -> tuple:
            last = {k: x for k, own in pieces.items() for x in own if has_row(x, (phase,))}
            return tuple(last.items() if self.pattern.is_causal else last)

        heads: dict[tuple, list[HeadGroup]] = {}
        for group in self.groups[branch]:
            found = [sharers(group.phase + j) for j in range(len(group.query_heads) if group.phase_step else 1)]
            for key, same in groupby(range(len(found)), key=found.__getitem__):
                lo, *more = same
                heads.setdefault(key, []).append(heads_between(group, lo, lo + 1 + len(more)))
        for key, groups in heads.items():
            ranks = [rank for rank, _ in key] if self.pattern.is_causal else key
            if len(ranks) > 1:
                phases = {g.phase + j for g in groups for j in range(len(g.query_heads) if g.phase_step else 1)}
                yield {k: [x for x in pieces[k] if has_row(x, phases)] for k in ranks}, groups

    def candidates(self, branch: int, origin: int, stop: int) -> dict[int, list[Piece]]:
        """The pieces of a segment that may hold rows, by rank, in the order of positions. Spans without rows are
        skipped: at high rates most have none."""
        rate, groups = self.pattern.dilation_rates[branch], self.groups[branch]
        lowest = min((group.phase for group in groups), default=0)
        highest = max((g.phase + (len(g.query_heads) - 1) * g.phase_step for g in groups), default=0)
        found: dict[int, list[Piece]] = {}
        position = origin + lowest
        while position < stop:
            span, rank = self.owners[bisect_right(self.starts, position) - 1]
            start = max(span.start, origin)
            piece = Piece(start, min(span.stop, stop), self.row_of[span] + start - span.start)
            found.setdefault(rank, []).append(piece)
            phase = (span.stop - origin) % rate
            position = span.stop + (max(lowest - phase, 0) if phase <= highest else rate - phase + lowest)
        return dict(sorted(found.items()))

    def rows_of(self, ring: Ring, place: int) -> Iterator[tuple[Piece, Rows, Block]]:
        """The key/value rows that the rank at a place packs into its chunk, each with its piece and block."""
        for entry in ring.chunks[place].entries:
            rows = entry.band.kv_rows(self.pattern.dilation_rates[ring.branch])
            yield ring.pieces[place][entry.piece], rows, entry.block

    def remote_tiles(self, ring: Ring, i: int, chunk: int, offset: int, rank: int) -> Iterator[Tile]:
        """Queries of the ring's i-th rank times another's chunk, which lies in the buffer from `offset` on."""
        for query in ring.pieces[i]:
            for entry in ring.chunks[chunk].entries:
                if not (self.pattern.is_causal and ring.pieces[chunk][entry.piece].start > query.start):
                    yield from self.tiles_of(ring.branch, ring.origin, query, entry, offset, rank)

    def make_tiles(
        self, branch: int, origin: int, query: Piece, entry: Entry, offset: int, rank: int
    ) -> tuple[Tile, ...]:
        """Queries of a piece times the keys of an entry, whose chunk lies in the buffer from `offset` on."""
        rate, tiles = self.pattern.dilation_rates[branch], []
        for q, k in matches(make_bands(entry.band.group, query, origin, rate), [entry.band]):
            start = k.lo - entry.band.lo if k.group.phase_step else 0
            block = entry.block._replace(offset=offset + entry.block.offset, start=start, stop=start + len(k.kv_heads))
            tiles.append(Tile(q.query_rows(rate), block, is_causal=False, first_query=False, first_key=False))
        return tuple(x for tile in tiles for x in self.cut(tile, rank))

    def cut(self, tile: Tile, rank: int) -> Iterator[Tile]:
        """Cut a tile into blocks of heads. So a kernel's result is small beside the tensor to which it is added.

        A result takes at most a third of one local tensor, unless blocks would then have fewer than 4 key/value heads,
        too few for the kernel's threads. A first tile of all rows stays whole: its result becomes the accumulator.
        """
        local_size = shard_length(self.shards[rank]) * self.num_heads
        size = len(tile.query.heads) * tile.query.num_rows * tile.query.segments
        num_kv = len(tile.key.heads)
        num_blocks = min(-(-3 * size // local_size), max(num_kv // 4, 1))
        if num_blocks == 1 or (tile.first_query and size == local_size):
            yield tile
            return
        for lo, hi in pairwise(num_kv * i // num_blocks for i in range(num_blocks + 1)):
            yield tile.of_heads(lo, hi)

    def hops(self, rank: int, rings: Sequence[Ring], offsets: Sequence[int]) -> list[Hop]:
        """What the rank sends, receives and computes at every hop, over all its rings, in the order of the rings."""
        last = max((hops[-1][1] for ring in rings for hops in ring.needed if hops), default=0)
        met = [ring.met_by(rank, last) for ring in rings]
        all_rings = list(zip(rings, offsets, met, strict=False))
        hops = [self.hop(s, rank, all_rings) for s in range(1, last + 1)]
        while hops and not any(hops[-1]):
            hops.pop()
        return hops

    def hop(self, s: int, rank: int, rings: Sequence[tuple[Ring, int, Met]]) -> Hop:
        """What the rank sends, receives and computes at hop s."""
        hop: dict[str, list] = {field: [] for field in Hop._fields}
        for ring, offset, (i, own, here, after, before) in rings:
            ranks, chunks, g = ring.ranks, ring.chunks, len(ring.ranks)
            onward, back = ranks[(i + 1) % g], ranks[i - 1]
            if after[s] and (s == 1 or here[s - 1]):
                leaving = (i + 1 - s) % g
                hop["sends"].append(Message(onward, offset, chunks[leaving].size, ranks[leaving], False, offset))
            if own[s]:
                target = ranks[(i + s) % g]  # the rank that meets this rank's chunk
                chunk = Message(target, offset, chunks[i].size, rank, False, offset)
                hop["targets"].append(chunk)
                if s > 1 and not own[s - 1]:
                    hop["sends"].append(chunk)
                if not own[s + 1]:
                    hop["grad_receives"].append(chunk._replace(is_gradient=True))
            if here[s]:
                k = (i - s) % g
                size, owner, is_first = chunks[k].size, ranks[k], s == 1 or not before[s - 1]
                hop["receives"].append(Message(owner if is_first else back, offset, size, owner, False, offset))
                if is_first:
                    hop["grad_starts"].append(Message(rank, offset, size, owner, True, offset))
                hop["tiles"] += self.remote_tiles(ring, i, k, offset, rank)
                home = onward if after[s + 1] else owner
                hop["grad_sends"].append(Message(home, offset, size, owner, True, offset))
            if before[s] and here[s + 1]:
                coming = (i - s - 1) % g
                hop["grad_receives"].append(Message(back, offset, chunks[coming].size, ranks[coming], True, offset))
        return Hop(*map(tuple, hop.values()))


def offsets_of(rings: Sequence[Ring]) -> list[int]:
    """Where each ring's chunks lie in a rank's buffer, and the size of the buffer."""
    return list(accumulate((max(chunk.size for chunk in ring.chunks) for ring in rings), initial=0))


planner_of = lru_cache(maxsize=4)(_Planner)
