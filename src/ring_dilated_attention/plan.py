"""(pattern, shards, rank) -> local tiles, rings, hops, bytes and FLOPs. Pure integers, no torch.

A *tile* is one call of a kernel: some query rows times some key rows. Both are strided views, so a plan is numbers.
A segment inside one span of a shard is local: its tile has the same rows on both sides. A segment that straddles shards
has a *ring*, the ranks that share it. Each of them packs its dilated rows of the segment, its *chunk*, into a flat
buffer, and the chunks travel along the ring. At hop s the i-th rank of a ring of g meets chunk (i - s) mod g.

A chunk goes no further than the last rank that needs it (`reach`): under causality with contiguous shards none wraps,
and the ring is a line. In backward the gradient of a chunk follows it one hop behind; where the chunk stops, its
gradient goes straight home.

Sizes and offsets of buffers are in units of B * D elements, so that a plan holds for any batch and head dim.

Planning one rank costs as much as its rings have members with rows, not as many as there are ranks.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise, product
from typing import NamedTuple

from .pattern import DilatedPattern, HeadGroup
from .sharding import Shard, Span, shard_length


class Rows(NamedTuple):
    """A strided view (B, segments, heads, num_rows, D) of a (B, N, H, D) tensor.

    Row j of segment i of the k-th head is local position first + i * segment_step + k * shift + j * step.
    """

    heads: range
    first: int
    shift: int
    step: int
    num_rows: int
    segments: int = 1
    segment_step: int = 0

    def of_heads(self, lo: int, hi: int) -> "Rows":
        return self._replace(heads=self.heads[lo:hi], first=self.first + lo * self.shift)


class Block(NamedTuple):
    """Rows of a received chunk: keys (B, num_heads, num_rows, D) at `offset`, values after; heads start to stop."""

    offset: int
    num_heads: int
    num_rows: int
    start: int
    stop: int

    @property
    def heads(self) -> range:
        return range(self.start, self.stop)

    def of_heads(self, lo: int, hi: int) -> "Block":
        return self._replace(start=self.start + lo, stop=self.start + hi)


class Tile(NamedTuple):
    """Query rows times key rows, by one kernel call.

    is_causal: both sides are the same rows of the sequence, and row j sees keys 0..j.
    first_query, first_key: nothing was added to these rows before, so results are written, not added.
    """

    query: Rows
    key: Rows | Block
    is_causal: bool
    first_query: bool
    first_key: bool

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

    sends, receives: chunks, so that afterwards the received ones can be met.
    tiles: own queries times received chunks.
    grad_sends: gradients of chunks, to the rank of the next hop or, finished, home.
    grad_receives: gradients that come along for the next hop, and this rank's own that come home, by ring.
    targets: own chunks, to the ranks that meet them at this hop (for exchanges that send them straight there).
    """

    sends: tuple[Message, ...]
    receives: tuple[Message, ...]
    tiles: tuple[Tile, ...]
    grad_sends: tuple[Message, ...]
    grad_receives: tuple[Message, ...]
    targets: tuple[Message, ...]


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
    rows: where the key/value rows lie in the message. Unlike elsewhere, they are rows of the whole sequence: global
        positions take the place of local ones.
    """

    owner: int
    branch: int
    origin: int
    size: int
    rows: tuple[tuple[Rows, Block], ...]


class _Piece(NamedTuple):
    """Positions start..stop-1 of one segment that lie in one span of a shard, from local row `row` on."""

    start: int
    stop: int
    row: int


class _Run(NamedTuple):
    """Heads lo..hi-1 of a head group whose rows in a piece form one strided view."""

    lo: int
    hi: int
    first: int
    num_rows: int


class _Entry(NamedTuple):
    """A run of a chunk and the block that holds it."""

    group: int
    piece: _Piece
    run: _Run
    block: Block


class _Chunk(NamedTuple):
    """One rank's packed rows of a straddling segment."""

    size: int
    entries: tuple[_Entry, ...]


class _Ring(NamedTuple):
    """A straddling segment of a branch: where it starts, and of each rank that holds rows of it, in order: the rank,
    its pieces, its chunk, and how many hops the chunk travels."""

    branch: int
    origin: int
    ranks: tuple[int, ...]
    pieces: tuple[tuple[_Piece, ...], ...]
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
        return Chunk(message.owner, ring.branch, ring.origin, chunk.size, tuple(planner.global_rows(ring, chunk)))

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
        self.row_of = {s: row for shard in shards for s, row in zip(shard, _first_rows(shard), strict=False)}
        self.rings: dict[tuple[int, int], _Ring] = {}  # made so far; all their ranks share them

    def local_and_rings(self, rank: int) -> tuple[list[Tile], list[_Ring]]:
        """Tiles of all branches with own rows on both sides, and the rings of this rank."""
        tiles: list[Tile] = []
        rings: dict[tuple[int, int], _Ring] = {}
        for branch, (length, _) in enumerate(self.pattern.branches):
            for span in self.shards[rank]:
                for piece, segments in _own_pieces(span, self.row_of[span], self.borders, length):
                    origin, stop = _segment_of(piece.start, self.borders, length)
                    if segments:
                        tiles += self.own_tiles(branch, origin, piece, piece, segments)
                    elif (branch, origin) not in rings:
                        rings[branch, origin] = self.ring(branch, origin, stop)
                        own = self.pieces(rank, origin, stop)
                        # Each piece with itself first: these tiles write where the others add.
                        for query, key in sorted(product(own, own), key=lambda pair: pair[0] != pair[1]):
                            tiles += self.own_tiles(branch, origin, query, key, 1)
        shared = (ring for _, ring in sorted(rings.items()))
        return tiles, [ring for ring in shared if rank in ring.ranks and len(ring.ranks) > 1]

    def own_tiles(self, branch: int, origin: int, query: _Piece, key: _Piece, segments: int) -> Iterator[Tile]:
        """Own queries of one piece times own keys of one piece of the same segment (and the `segments - 1` after)."""
        length, rate = self.pattern.branches[branch]
        same, is_causal, split = query == key, self.pattern.is_causal, self.pattern.heads == "split"
        if is_causal and key.start > query.start:
            return
        for group in self.groups[branch]:
            for q, k in _matches(group, _runs(group, query, origin, rate), _runs(group, key, origin, rate)):
                yield Tile(
                    _query_rows(group, q, rate)._replace(segments=segments, segment_step=length),
                    _kv_rows(group, k, rate)._replace(segments=segments, segment_step=length),
                    is_causal=is_causal and same,
                    first_query=same and (branch == 0 or split),
                    first_key=same and (branch == 0 or (split and not self.shares_kv)),
                )

    def pieces(self, rank: int, start: int, stop: int) -> list[_Piece]:
        """A rank's pieces of positions start..stop-1, in the order of positions."""
        clipped = ((span, max(span.start, start), min(span.stop, stop)) for span in sorted(self.shards[rank]))
        return [_Piece(a, b, self.row_of[span] + a - span.start) for span, a, b in clipped if a < b]

    def ring(self, branch: int, origin: int, stop: int) -> _Ring:
        """The ring of segment origin..stop-1: its ranks, and how far each chunk must travel."""
        if (branch, origin) not in self.rings:
            self.rings[branch, origin] = self.make_ring(branch, origin, stop)
        return self.rings[branch, origin]

    def make_ring(self, branch: int, origin: int, stop: int) -> _Ring:
        members: dict[int, tuple[list[_Piece], _Chunk]] = {}
        for rank in self.candidates(branch, origin, stop):
            pieces = self.pieces(rank, origin, stop)
            chunk = self.chunk(branch, origin, pieces)
            if chunk.size:
                members[rank] = pieces, chunk
        first_key = [min(piece.start for piece in pieces) for pieces, _ in members.values()]
        last_query = [max(piece.stop for piece in pieces) for pieces, _ in members.values()]
        everyone = [len(members) - 1] * len(members)
        return _Ring(
            branch=branch,
            origin=origin,
            ranks=tuple(members),
            pieces=tuple(tuple(pieces) for pieces, _ in members.values()),
            chunks=tuple(chunk for _, chunk in members.values()),
            reach=tuple(_causal_reach(first_key, last_query) if self.pattern.is_causal else everyone),
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

    def chunk(self, branch: int, origin: int, pieces: Sequence[_Piece]) -> _Chunk:
        """The layout of one rank's rows of a segment: a block for each piece, head group and run."""
        entries, size = [], 0
        for piece in pieces:
            for g, group in enumerate(self.groups[branch]):
                for run in _runs(group, piece, origin, self.pattern.dilation_rates[branch]):
                    num_heads = len(_kv_heads(group, run))
                    entries.append(_Entry(g, piece, run, Block(size, num_heads, run.num_rows, 0, num_heads)))
                    size += 2 * num_heads * run.num_rows
        return _Chunk(size, tuple(entries))

    def packs(self, ring: _Ring, rank: int, offset: int) -> Iterator[tuple[Rows, Block]]:
        """Which of the rank's own key/value rows go where in the buffer."""
        rate = self.pattern.dilation_rates[ring.branch]
        for entry in ring.chunks[ring.place_of(rank)].entries:
            rows = _kv_rows(self.groups[ring.branch][entry.group], entry.run, rate)
            yield rows, entry.block._replace(offset=offset + entry.block.offset)

    def global_rows(self, ring: _Ring, chunk: _Chunk) -> Iterator[tuple[Rows, Block]]:
        """Which key/value rows of the whole sequence go where in a chunk."""
        rate = self.pattern.dilation_rates[ring.branch]
        for group, piece, run, block in chunk.entries:
            rows = _kv_rows(self.groups[ring.branch][group], run, rate)
            yield rows._replace(first=rows.first + piece.start - piece.row), block

    def remote_tiles(self, ring: _Ring, i: int, chunk: int, offset: int) -> Iterator[Tile]:
        """Queries of the ring's i-th rank times another's chunk, which lies in the buffer from `offset` on."""
        rate = self.pattern.dilation_rates[ring.branch]
        for query in ring.pieces[i]:
            for entry in ring.chunks[chunk].entries:
                if self.pattern.is_causal and entry.piece.start > query.start:
                    continue
                group = self.groups[ring.branch][entry.group]
                for q, k in _matches(group, _runs(group, query, ring.origin, rate), [entry.run]):
                    start = k.lo - entry.run.lo if group.phase_step else 0
                    block = entry.block._replace(
                        offset=offset + entry.block.offset, start=start, stop=start + len(_kv_heads(group, k))
                    )
                    yield Tile(_query_rows(group, q, rate), block, is_causal=False, first_query=False, first_key=False)

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
            g, i, reach = len(ring.ranks), ring.place_of(rank), ring.reach
            onward, back = ring.ranks[(i + 1) % g], ring.ranks[i - 1]
            leaving, here, coming = (i + 1 - s) % g, (i - s) % g, (i - s - 1) % g  # chunks

            def message(peer: int, chunk: int, ring: _Ring = ring, offset: int = offset) -> Message:
                return Message(peer, offset, ring.chunks[chunk].size, ring.ranks[chunk])

            def gradient(peer: int, chunk: int, ring: _Ring = ring, offset: int = offset) -> Message:
                return Message(peer, offset, ring.chunks[chunk].size, ring.ranks[chunk], is_gradient=True)

            if s <= reach[leaving]:
                hop["sends"].append(message(onward, leaving))
            if s <= reach[here]:
                hop["receives"].append(message(back, here))
                for tile in self.remote_tiles(ring, i, here, offset):
                    hop["tiles"].extend(self.cut(tile, rank))
                hop["grad_sends"].append(gradient(ring.ranks[here] if s == reach[here] else onward, here))
            if s <= reach[i]:
                hop["targets"].append(message(ring.ranks[(i + s) % g], i))
            if s == reach[i]:
                hop["grad_receives"].append(gradient(ring.ranks[(i + s) % g], i))
            if s + 1 <= reach[coming]:
                hop["grad_receives"].append(gradient(back, coming))
        return Hop(**{field: tuple(entries) for field, entries in hop.items()})


def _causal_reach(first_key: Sequence[int], last_query: Sequence[int]) -> list[int]:
    """For each place c of a ring the last hop s at which a query of place (c + s) mod g comes after the first key of c.

    That is the last such place before c or, if there is none (contiguous shards), the last one of all.
    """
    g = len(first_key)
    # Places that may be the last with a query after some position: whoever comes later in the ring has earlier queries.
    last: list[tuple[int, int]] = []
    wrapped: list[int | None] = []
    for c in range(g):
        wrapped.append(_last_after(last, first_key[c]))
        while last and -last[-1][0] <= last_query[c]:
            last.pop()
        last.append((-last_query[c], c))
    reach = []
    for c in range(g):
        before, latest = wrapped[c], _last_after(last, first_key[c])
        assert latest is not None  # c itself, if nobody else
        reach.append(before - c + g if before is not None else latest - c)
    return reach


def _last_after(places: Sequence[tuple[int, int]], position: int) -> int | None:
    """The last place with a query after a position, of (minus its last query, place) in ascending order."""
    i = bisect_left(places, (-position, -1))
    return places[i - 1][1] if i else None


def _offsets(rings: Sequence[_Ring]) -> list[int]:
    """Where each ring's chunks lie in a rank's buffer, and the size of the buffer."""
    return list(accumulate((max(chunk.size for chunk in ring.chunks) for ring in rings), initial=0))


def _first_rows(shard: Shard) -> Iterator[int]:
    return accumulate((span.stop - span.start for span in shard), initial=0)


def _segment_of(position: int, borders: Sequence[int], length: int) -> tuple[int, int]:
    """Start and stop of the segment that holds a position. The last segment of a document may be shorter."""
    i = bisect_right(borders, position) - 1
    start = position - (position - borders[i]) % length
    return start, min(start + length, borders[i + 1])


def _own_pieces(span: Span, row: int, borders: Sequence[int], length: int) -> Iterator[tuple[_Piece, int]]:
    """Cut a span into pieces by segment, each with the number of whole segments from there on that are alike.

    0 stands for a piece of a segment that does not lie in the span as a whole.
    """

    def piece(start: int, stop: int) -> _Piece:
        return _Piece(start, stop, row + start - span.start)

    for i in range(bisect_right(borders, span.start) - 1, bisect_left(borders, span.stop)):
        document, end = borders[i], borders[i + 1]
        start, stop = max(span.start, document), min(span.stop, end)
        whole = document - (document - start) // length * length  # first border of a segment at or after start
        if start < whole:
            yield piece(start, min(whole, stop)), 0
        if whole >= stop:
            continue
        segments, rest = divmod(stop - whole, length)
        if segments:
            yield piece(whole, whole + length), segments
        if rest:
            yield piece(stop - rest, stop), 1 if stop == end else 0


def _runs(group: HeadGroup, piece: _Piece, origin: int, rate: int) -> list[_Run]:
    """Cut the heads of a group where their rows in a piece stop being one strided view. Heads without rows drop out."""
    start, stop = piece.start - origin, piece.stop - origin
    runs: list[_Run] = []
    for j in range(len(group.query_heads) if group.phase_step else 1):
        first = start + (group.phase + j * group.phase_step - start) % rate
        num_rows = max(0, -(-(stop - first) // rate))
        row = piece.row + first - start
        last = runs[-1] if runs else None
        if num_rows and last and last.hi == j and last.num_rows == num_rows and row == last.first + (j - last.lo):
            runs[-1] = last._replace(hi=j + 1)
        elif num_rows:
            runs.append(_Run(j, j + 1 if group.phase_step else len(group.query_heads), row, num_rows))
    return runs


def _matches(group: HeadGroup, queries: Sequence[_Run], keys: Sequence[_Run]) -> Iterator[tuple[_Run, _Run]]:
    """The common heads of each run of queries and each run of keys."""
    for q in queries:
        for k in keys:
            lo, hi = max(q.lo, k.lo), min(q.hi, k.hi)
            if lo < hi:
                a, b = (r._replace(lo=lo, hi=hi, first=r.first + (lo - r.lo) * group.phase_step) for r in (q, k))
                yield a, b


def _query_rows(group: HeadGroup, run: _Run, rate: int) -> Rows:
    return Rows(group.query_heads[run.lo : run.hi], run.first, group.phase_step, rate, run.num_rows)


def _kv_rows(group: HeadGroup, run: _Run, rate: int) -> Rows:
    return Rows(_kv_heads(group, run), run.first, group.phase_step, rate, run.num_rows)


def _kv_heads(group: HeadGroup, run: _Run) -> range:
    """A diagonal has a key/value head for each query head; heads of one phase may share them, and are never cut."""
    return group.kv_heads[run.lo : run.hi] if group.phase_step else group.kv_heads
