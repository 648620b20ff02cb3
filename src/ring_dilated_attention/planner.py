"""(pattern, shards, rank) -> plan: local tiles, rings and hops. Pure integers, no torch.

A chunk goes no further than the last rank that needs it (`reach`): under causality with contiguous shards none wraps,
and the ring is a line. Under zigzag the later part of a shard is needed by lower ranks alone, so it goes the other way
around, in a ring of its own: nothing passes through a rank that sees nothing of it. In backward the gradient of a chunk
follows it one hop behind; where the chunk stops, its gradient goes straight home.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import accumulate, pairwise, product
from typing import NamedTuple

from .pattern import DilatedPattern
from .plan import Chunk, Hop, Message, Plan, Tile
from .rows import (
    Block,
    Piece,
    Rows,
    Run,
    first_rows,
    kv_heads,
    kv_rows,
    make_runs,
    matches,
    own_pieces,
    query_rows,
    segment_of,
)
from .sharding import Shard, shard_length


class _Entry(NamedTuple):
    """A run of a chunk, the block that holds it, and the last hop at which a rank needs it."""

    group: int
    piece: Piece
    run: Run
    block: Block
    reach: int


class _Chunk(NamedTuple):
    """One rank's packed rows of a straddling segment."""

    size: int
    entries: tuple[_Entry, ...]


class _Ring(NamedTuple):
    """A straddling segment of a branch and a way around: where it starts, and of each rank that holds rows of it: the
    rank, its pieces, its chunk, and how many hops the chunk travels. Places are numbered by rank; a hop is +1 or -1."""

    branch: int
    origin: int
    direction: int
    ranks: tuple[int, ...]
    pieces: tuple[tuple[Piece, ...], ...]
    chunks: tuple[_Chunk, ...]
    reach: tuple[int, ...]

    def place_of(self, rank: int) -> int:
        return bisect_left(self.ranks, rank)


@lru_cache(maxsize=256)
def make_plan(
    pattern: DilatedPattern,
    shards: tuple[Shard, ...],
    rank: int,
    num_heads: int,
    num_kv_heads: int,
    documents: tuple[int, ...] | None = None,
    held: range | None = None,
) -> Plan:
    """Plan one rank's work.

    Args:
        shards: the spans of every rank (`sharding.make_shards`).
        documents: global borders (0, ..., n) of packed documents; None is one document.
        held: the query heads that the ranks of this plan hold, if not all.
    """
    pattern.check_heads(num_heads, num_kv_heads)
    planner = _planner(pattern, shards, num_heads, num_kv_heads, documents, held)
    local, rings = planner.local_and_rings(rank)
    offsets = _offsets(rings)
    hops = [planner.hop(s, rank, rings, offsets) for s in range(1, max((max(r.reach) for r in rings), default=0) + 1)]
    while hops and not any(hops[-1]):
        hops.pop()
    first_rates = pattern.dilation_rates[:1] if pattern.heads == "all" else pattern.dilation_rates
    covered = all(rate == 1 for rate in first_rates)
    return Plan(
        rank=rank,
        num_rows=shard_length(shards[rank]),
        num_heads=planner.num_heads,
        num_kv_heads=planner.num_heads * num_kv_heads // num_heads,
        local=tuple(part for tile in local for part in planner.cut(tile, rank)),
        packs=tuple(
            pack for ring, offset in zip(rings, offsets, strict=False) for pack in planner.packs(ring, rank, offset)
        ),
        hops=tuple(hops),
        chunk_size=offsets[-1],
        query_covered=covered,
        key_covered=covered and (pattern.heads == "all" or num_heads == num_kv_heads),
    )


def chunk_finder(
    pattern: DilatedPattern,
    shards: tuple[Shard, ...],
    rank: int,
    num_heads: int,
    num_kv_heads: int,
    documents: tuple[int, ...] | None = None,
    held: range | None = None,
) -> Callable[[Message], Chunk]:
    """What the messages of a rank's plan carry. Takes the arguments of `make_plan`."""
    planner = _planner(pattern, shards, num_heads, num_kv_heads, documents, held)
    _, rings = planner.local_and_rings(rank)
    ring_at = dict(zip(_offsets(rings), rings, strict=False))

    def find(message: Message) -> Chunk:
        ring = ring_at[message.offset]
        chunk = ring.chunks[ring.place_of(message.owner)]
        rows = tuple(planner.global_rows(ring, chunk))
        return Chunk(message.owner, ring.branch, ring.origin, ring.direction, chunk.size, rows)

    return find


@lru_cache(maxsize=4)
def _planner(
    pattern: DilatedPattern,
    shards: tuple[Shard, ...],
    num_heads: int,
    num_kv_heads: int,
    documents: tuple[int, ...] | None,
    held: range | None,
) -> "_Planner":
    borders = documents if documents is not None else (0, sum(map(shard_length, shards)))
    return _Planner(pattern, shards, num_heads, num_kv_heads, borders, held)


class _Planner:
    """What the plans of all ranks share, and the steps of making one."""

    def __init__(
        self,
        pattern: DilatedPattern,
        shards: tuple[Shard, ...],
        num_heads: int,
        num_kv_heads: int,
        borders: Sequence[int],
        held: range | None,
    ) -> None:
        self.pattern, self.shards, self.borders = pattern, shards, borders
        self.num_heads = num_heads if held is None else len(held)
        self.shares_kv = num_heads != num_kv_heads
        self.groups = [pattern.head_groups(i, num_heads, num_kv_heads, held) for i in range(len(pattern.branches))]
        self.owners = sorted((span, rank) for rank, shard in enumerate(shards) for span in shard)
        self.starts = [span.start for span, _ in self.owners]
        self.row_of = {s: row for shard in shards for s, row in zip(shard, first_rows(shard), strict=False)}
        self.rings: dict[tuple[int, int], tuple[_Ring, ...]] = {}  # made so far; all their ranks share them

    def local_and_rings(self, rank: int) -> tuple[list[Tile], list[_Ring]]:
        """Tiles of all branches with own rows on both sides, and the rings of this rank."""
        tiles: list[Tile] = []
        rings: dict[tuple[int, int], tuple[_Ring, ...]] = {}
        for branch, (length, _) in enumerate(self.pattern.branches):
            for span in self.shards[rank]:
                for piece, segments in own_pieces(span, self.row_of[span], self.borders, length):
                    origin, stop = segment_of(piece.start, self.borders, length)
                    if segments:
                        tiles += self.own_tiles(branch, origin, piece, piece, segments)
                    elif (branch, origin) not in rings:
                        rings[branch, origin] = self.rings_of(branch, origin, stop)
                        own = self.pieces(rank, origin, stop)
                        # Each piece with itself first: these tiles write where the others add.
                        for query, key in sorted(product(own, own), key=lambda pair: pair[0] != pair[1]):
                            tiles += self.own_tiles(branch, origin, query, key, 1)
        return tiles, [ring for _, both in sorted(rings.items()) for ring in both if rank in ring.ranks]

    def own_tiles(self, branch: int, origin: int, query: Piece, key: Piece, segments: int) -> Iterator[Tile]:
        """Own queries of one piece times own keys of one piece of the same segment (and the `segments - 1` after)."""
        length, rate = self.pattern.branches[branch]
        same, is_causal, split = query == key, self.pattern.is_causal, self.pattern.heads == "split"
        if is_causal and key.start > query.start:
            return
        for group in self.groups[branch]:
            for q, k in matches(group, make_runs(group, query, origin, rate), make_runs(group, key, origin, rate)):
                yield Tile(
                    query_rows(group, q, rate)._replace(segments=segments, segment_step=length),
                    kv_rows(group, k, rate)._replace(segments=segments, segment_step=length),
                    is_causal=is_causal and same,
                    first_query=same and (branch == 0 or split),
                    first_key=same and (branch == 0 or (split and not self.shares_kv)),
                )

    def pieces(self, rank: int, start: int, stop: int) -> list[Piece]:
        """A rank's pieces of positions start..stop-1, in the order of positions."""
        clipped = ((span, max(span.start, start), min(span.stop, stop)) for span in sorted(self.shards[rank]))
        return [Piece(a, b, self.row_of[span] + a - span.start) for span, a, b in clipped if a < b]

    def rings_of(self, branch: int, origin: int, stop: int) -> tuple[_Ring, ...]:
        """The rings of segment origin..stop-1: one for each way around that some chunk takes."""
        if (branch, origin) not in self.rings:
            self.rings[branch, origin] = tuple(self.make_rings(branch, origin, stop))
        return self.rings[branch, origin]

    def make_rings(self, branch: int, origin: int, stop: int) -> Iterator[_Ring]:
        members: dict[int, list[Piece]] = {}
        for rank in self.candidates(branch, origin, stop):
            pieces = [x for x in self.pieces(rank, origin, stop) if self.chunk(branch, origin, [x]).size]
            if pieces:
                members[rank] = pieces
        firsts = [[piece.start for piece in pieces] for pieces in members.values()]
        routes = (
            _causal_routes(firsts) if self.pattern.is_causal else [[(len(members) - 1, 0)] * len(f) for f in firsts]
        )
        for way, direction in enumerate((1, -1)):
            reach = [[hops[way] for hops in route] for route in routes]
            if any(map(any, reach)):
                yield _Ring(
                    branch=branch,
                    origin=origin,
                    direction=direction,
                    ranks=tuple(members),
                    pieces=tuple(map(tuple, members.values())),
                    chunks=tuple(
                        self.chunk(branch, origin, *zip(*travelling, strict=True)) if travelling else _Chunk(0, ())
                        for travelling in (
                            [(piece, hops) for piece, hops in zip(pieces, all_hops, strict=True) if hops]
                            for pieces, all_hops in zip(members.values(), reach, strict=True)
                        )
                    ),
                    reach=tuple(map(max, reach)),
                )

    def candidates(self, branch: int, origin: int, stop: int) -> list[int]:
        """The ranks that may hold rows of a segment. Goes from row to row: few ranks have any where rates are high."""
        rate = self.pattern.dilation_rates[branch]
        groups = self.groups[branch]
        lowest = min((group.phase for group in groups), default=0)
        highest = max((g.phase + (len(g.query_heads) - 1) * g.phase_step for g in groups), default=0)
        ranks: set[int] = set()
        position = origin + lowest
        while position < stop:
            span, rank = self.owners[bisect_right(self.starts, position) - 1]
            ranks.add(rank)
            phase = (span.stop - origin) % rate
            position = span.stop + (max(lowest - phase, 0) if phase <= highest else rate - phase + lowest)
        return sorted(ranks)

    def chunk(self, branch: int, origin: int, pieces: Sequence[Piece], reach: Sequence[int] | None = None) -> _Chunk:
        """The layout of one rank's rows of a segment: a block for each piece, head group and run."""
        entries, size = [], 0
        for piece, hops in zip(pieces, reach or [0] * len(pieces), strict=True):
            for g, group in enumerate(self.groups[branch]):
                for run in make_runs(group, piece, origin, self.pattern.dilation_rates[branch]):
                    num_heads = len(kv_heads(group, run))
                    entries.append(_Entry(g, piece, run, Block(size, num_heads, run.num_rows, 0, num_heads), hops))
                    size += 2 * num_heads * run.num_rows
        return _Chunk(size, tuple(entries))

    def packs(self, ring: _Ring, rank: int, offset: int) -> Iterator[tuple[Rows, Block]]:
        """Which of the rank's own key/value rows go where in the buffer."""
        rate = self.pattern.dilation_rates[ring.branch]
        for entry in ring.chunks[ring.place_of(rank)].entries:
            rows = kv_rows(self.groups[ring.branch][entry.group], entry.run, rate)
            yield rows, entry.block._replace(offset=offset + entry.block.offset)

    def global_rows(self, ring: _Ring, chunk: _Chunk) -> Iterator[tuple[Rows, Block]]:
        """Which key/value rows of the whole sequence go where in a chunk."""
        rate = self.pattern.dilation_rates[ring.branch]
        for group, piece, run, block, _ in chunk.entries:
            rows = kv_rows(self.groups[ring.branch][group], run, rate)
            yield rows._replace(first=rows.first + piece.start - piece.row), block

    def remote_tiles(self, ring: _Ring, i: int, s: int, chunk: int, offset: int) -> Iterator[Tile]:
        """Queries of the ring's i-th rank times the chunk that it meets at hop s, which lies from `offset` on."""
        rate = self.pattern.dilation_rates[ring.branch]
        for query in ring.pieces[i]:
            for entry in ring.chunks[chunk].entries:
                if s > entry.reach or (self.pattern.is_causal and entry.piece.start > query.start):
                    continue
                group = self.groups[ring.branch][entry.group]
                for q, k in matches(group, make_runs(group, query, ring.origin, rate), [entry.run]):
                    start = k.lo - entry.run.lo if group.phase_step else 0
                    block = entry.block._replace(
                        offset=offset + entry.block.offset, start=start, stop=start + len(kv_heads(group, k))
                    )
                    yield Tile(query_rows(group, q, rate), block, is_causal=False, first_query=False, first_key=False)

    def cut(self, tile: Tile, rank: int) -> Iterator[Tile]:
        """Cut a tile into head blocks, so that a kernel's results stay small beside the tensors they are added to.

        A result is kept below a third of one local tensor, but no block gets fewer than 4 key/value heads, which a
        backend's threads share. A first tile that covers everything stays whole: it becomes the accumulator.
        """
        local_size = shard_length(self.shards[rank]) * self.num_heads
        size = len(tile.query.heads) * tile.query.num_rows * tile.query.segments
        num_kv = len(tile.key.heads)
        num_blocks = min(-(-3 * size // local_size), max(num_kv // 4, 1))
        if num_blocks == 1 or (tile.first_query and size == local_size):
            yield tile
            return
        ratio = len(tile.query.heads) // num_kv
        for lo, hi in pairwise(num_kv * i // num_blocks for i in range(num_blocks + 1)):
            query = tile.query.of_heads(lo * ratio, hi * ratio)
            yield tile._replace(query=query, key=tile.key.of_heads(lo, hi))

    def hop(self, s: int, rank: int, rings: Sequence[_Ring], offsets: Sequence[int]) -> Hop:
        """What the rank sends, receives and computes at hop s, over all its rings, in the order of the rings."""
        hop: dict[str, list] = {field: [] for field in Hop._fields}
        for ring, offset in zip(rings, offsets, strict=False):
            g, i, d, reach = len(ring.ranks), ring.place_of(rank), ring.direction, ring.reach
            onward, back = ring.ranks[(i + d) % g], ring.ranks[(i - d) % g]
            leaving, here, coming = ((i - d * t) % g for t in (s - 1, s, s + 1))  # chunks

            def message(peer: int, chunk: int, ring: _Ring = ring, offset: int = offset) -> Message:
                return Message(peer, offset, ring.chunks[chunk].size, ring.ranks[chunk])

            def gradient(peer: int, chunk: int, ring: _Ring = ring, offset: int = offset) -> Message:
                return Message(peer, offset, ring.chunks[chunk].size, ring.ranks[chunk], is_gradient=True)

            if s <= reach[leaving]:
                hop["sends"].append(message(onward, leaving))
            if s <= reach[here]:
                hop["receives"].append(message(back, here))
                for tile in self.remote_tiles(ring, i, s, here, offset):
                    hop["tiles"].extend(self.cut(tile, rank))
                hop["grad_sends"].append(gradient(ring.ranks[here] if s == reach[here] else onward, here))
            if s <= reach[i]:
                hop["targets"].append(message(ring.ranks[(i + d * s) % g], i))
            if s == reach[i]:
                hop["grad_receives"].append(gradient(ring.ranks[(i + d * s) % g], i))
            if s + 1 <= reach[coming]:
                hop["grad_receives"].append(gradient(back, coming))
        return Hop(**{field: tuple(entries) for field, entries in hop.items()})


def _causal_routes(starts: Sequence[Sequence[int]]) -> list[list[tuple[int, int]]]:
    """How many hops each piece of each place of a ring travels upwards and downwards, so that all who need it meet it.

    A place needs a piece if one of its own starts later. The three ways to go are all upwards around the ring, all
    downwards, and to higher places upwards and to lower ones downwards; the shortest is taken. Of equals it is upwards
    for the first piece of a place and downwards for others, so that no ring has to hold both at a time.

    Args:
        starts: of the pieces of each place, in ascending order.
    """
    g = len(starts)
    latest = [place[-1] for place in starts]
    below = _nearest_later(starts, latest)  # the next place downwards that needs a piece
    above = [[g - 1 - k for k in place] for place in _nearest_later(starts[::-1], latest[::-1])[::-1]]
    ranked = sorted(range(g), key=lambda k: latest[k])
    lowest = list(accumulate(reversed(ranked), min))[::-1]  # of the places from one in this order on
    highest = list(accumulate(reversed(ranked), max))[::-1]
    keys = [latest[k] for k in ranked]
    routes: list[list[tuple[int, int]]] = []
    for c, place in enumerate(starts):
        routes.append([])
        for start, lower, higher in zip(place, below[c], above[c], strict=True):
            i = bisect_right(keys, start)
            up = max(highest[i] - c, 0) if i < g else 0
            down = max(c - lowest[i], 0) if i < g else 0
            ways = [(up if lower < 0 else lower - c + g, 0), (0, down if higher >= g else c - higher + g), (up, down)]
            is_first = start == place[0]
            routes[-1].append(min((sum(way), way[is_first], way) for way in ways)[2])
    return routes


def _nearest_later(starts: Sequence[Sequence[int]], latest: Sequence[int]) -> list[list[int]]:
    """For each piece of each place the nearest place before it with a piece that starts later; -1 if there is none."""
    stack: list[tuple[int, int]] = []  # (minus the latest start, place): whoever comes after an earlier one hides it
    found = []
    for c, place in enumerate(starts):
        found.append([stack[i - 1][1] if (i := bisect_left(stack, (-start, -1))) else -1 for start in place])
        while stack and -stack[-1][0] <= latest[c]:
            stack.pop()
        stack.append((-latest[c], c))
    return found


def _offsets(rings: Sequence[_Ring]) -> list[int]:
    """Where each ring's chunks lie in a rank's buffer, and the size of the buffer."""
    return list(accumulate((max(chunk.size for chunk in ring.chunks) for ring in rings), initial=0))
