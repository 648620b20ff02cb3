"""What a rank does, step by step, in one forward or backward. Pure integers, no torch.

    plan -> program -> {carried out (run/executor.py), weighed (forecast/ledger.py), timed (forecast/clock.py)}

Nothing else knows what happens when: what is made, sent, awaited, computed, merged and let go stands here, once, for
one device, for a ring (arXiv 2310.01889), for all chunks in one round (`plan.gathered`) and for heads dealt to ranks.

A rank holds its shards, two K‖V buffers and, in backward, two dK‖dV buffers; nothing else that it receives is kept.
"""

from collections.abc import Iterator, Sequence
from itertools import islice

from .plan import Hop, Message, Plan, Tile
from .rows import Rows
from .step import (
    BUFFERS,
    CACHED_ROWS,
    GRADIENTS,
    OWN_CHUNKS,
    OWN_ROWS,
    RECEIVED,
    Add,
    Compute,
    Copy,
    Deal,
    Finish,
    Free,
    Home,
    Merge,
    Pack,
    Part,
    Post,
    Prepare,
    Start,
    Step,
    Take,
    Terms,
    Wait,
    Whole,
    Zero,
    packed,
)

_GIVEN = {"forward": ("query", "key", "value"), "backward": ("dout", "query", "key", "value", "out", "lse")}
_RESULTS = {"forward": ("out", "lse"), "backward": ("dq", "dk", "dv")}


def steps(plan: Plan, stage: str, terms: Terms) -> Iterator[Step]:
    """The program of a plan's rank for one of STAGES."""
    given, results = _GIVEN[stage] + (("dlse",) if terms.has_dlse else ()), _RESULTS[stage]
    if terms.dealing is not None:
        yield from (Deal(name, to_heads=True) for name in given)
    if terms.is_whole:
        yield Whole(stage)
    else:
        yield from _forward(plan, terms) if stage == "forward" else _backward(plan, terms)
    if terms.dealing is not None:
        yield Free(given)
        yield from (Deal(name, to_heads=False) for name in results)


def _forward(plan: Plan, terms: Terms) -> Iterator[Step]:
    """out and lse of this rank's queries: own tiles while the first chunks fly, then those of each hop's chunks."""
    tiles = _Tiles(plan, terms)
    yield from _dilate(plan)
    yield from (moving := _start(plan, "forward", 0))
    for tile in plan.local:
        yield from tiles.partial(tile, OWN_CHUNKS if tile.packed else OWN_ROWS)
    for tile in plan.cached:
        yield from tiles.partial(tile, CACHED_ROWS)
    for s, hop in enumerate(plan.hops):
        yield from _arrive(moving)
        yield from (moving := _start(plan, "forward", s + 1))
        for tile in hop.tiles:
            yield from tiles.partial(tile, _received_at(s))
    yield Free(BUFFERS)
    yield from tiles.start("out")
    yield Finish("out")
    yield Finish("lse")


def _backward(plan: Plan, terms: Terms) -> Iterator[Step]:
    """dq, dk, dv of this rank's rows. `out` and `lse` are the merged ones, so every tile's p is the global weight.

    The chunks make their way again. The gradient of a chunk starts where a stretch of ranks that meet it does, follows
    one hop behind and goes home at the end of the stretch; the own part is added at home.
    """
    tiles = _Tiles(plan, terms)
    yield from _dilate(plan)
    yield from (moving := _start(plan, "backward", 0))
    if terms.in_place and plan.num_rows:
        yield Prepare()
    for tile in plan.local:
        yield from tiles.gradients(tile, OWN_CHUNKS if tile.packed else OWN_ROWS)
    leaving: list[Wait] = []
    arriving: list[Wait] = []  # what earlier ranks added to the gradients of the chunks at hand
    for s, hop in enumerate(plan.hops):
        yield from _arrive(moving)
        yield from (moving := _start(plan, "backward", s + 1))
        sums, other = GRADIENTS[s % 2], GRADIENTS[(s + 1) % 2]
        if s == 0:
            yield Take(sums, plan.received_size, is_sum=True)
        yield from (Zero(Part(sums, m.offset, m)) for m in hop.grad_starts)
        for tile in hop.tiles:
            yield from tiles.gradients(tile, _received_at(s), sums, arriving)
        yield from arriving
        if s + 1 == len(plan.hops):
            yield Free(BUFFERS)
        yield from leaving  # `other` is free from here on
        if s == 0:
            yield Take(other, plan.home_size, is_sum=True)
        leaving, arriving = [], []
        # Finished gradients go to the owners of their chunks. They come in where those that go on to the next hop will,
        # so they are two batches. All ranks have them in this order, and each holds both sides of its messages: no
        # batch waits for one that stands behind it in another rank's stream.
        finished, onward = _gradient_posts(plan, s, sums, other)
        if finished:
            yield finished
            leaving.append(Wait(finished.ticket, received=False))
            if finished.receives:
                yield Wait(finished.ticket, sent=False)
                yield from (*tiles.start("dk"), *tiles.start("dv"))
                yield from map(Home, finished.receives)
        if onward:
            yield onward
            leaving.append(Wait(onward.ticket, received=False))
            arriving.append(Wait(onward.ticket, sent=False))
    yield from leaving
    yield Free(GRADIENTS)
    for name in ("dq", "dk", "dv"):
        yield from tiles.start(name)
        yield Finish(name)


def _dilate(plan: Plan) -> Iterator[Step]:
    """The own chunks, and where others will be received."""
    if plan.hops:
        yield Pack(OWN_CHUNKS, plan.chunk_size, plan.packs)
        yield Take(RECEIVED, plan.received_size, is_sum=False)


def _start(plan: Plan, stage: str, s: int) -> list[Step]:
    """Start the exchange of hop s (from 0): send chunks on from one buffer, receive others into the other. After the
    last hop nothing does: what was sent from can go."""
    if s == len(plan.hops):
        return [Free((BUFFERS[(s + 1) % 2],))] if s else []
    hop, here, free = plan.hops[s], BUFFERS[s % 2], _received_at(s)
    found: list[Step] = []
    sends = []
    for m in hop.sends:
        if s and m.owner == plan.rank:  # the buffer holds others' by now: it is dilated once more
            late = f"own chunk sent late at hop {s + 1}, {m.packed}"
            found.append(Pack(late, m.size, tuple(plan.packs_of(m))))
            sends.append(Part(late, 0, m))
        else:
            sends.append(Part(here, m.offset, m))
    if sends or hop.receives:
        moment = f"{stage}, hop {s + 1}, keys and values"
        receives = tuple([Part(free, m.offset, m) for m in hop.receives])
        found.append(Post(moment, moment, tuple(sends), receives))
    return found


def _arrive(moving: Sequence[Step]) -> Iterator[Step]:
    """Wait for the chunks of a hop, given what started its exchange."""
    if moving:
        post = moving[-1]
        assert isinstance(post, Post)
        yield Wait(post.ticket)
        if len(moving) > 1:
            yield Free(tuple(pack.name for pack in moving[:-1] if isinstance(pack, Pack)))


def _received_at(s: int) -> str:
    """The buffer that holds the chunks of hop s: the two change places at every hop."""
    return BUFFERS[(s + 1) % 2]


def _gradient_posts(plan: Plan, s: int, sums: str, other: str) -> tuple[Post | None, Post | None]:
    """Of hop s: the gradients that are finished, and those that go on to the next hop."""
    hop: Hop = plan.hops[s]

    def post(which: str, sends: Sequence[Message], receives: Sequence[Message]) -> Post | None:
        if not sends and not receives:
            return None
        moment = f"backward, hop {s + 1}, gradients"
        leave = tuple(Part(sums, m.offset, m) for m in sends)
        come = tuple(Part(other, m.offset, m) for m in receives)
        return Post(f"{moment}, {which}", moment, leave, come, is_apart=True)

    sends, receives = hop.grad_sends, hop.grad_receives
    return (
        post("finished", [m for m in sends if m.peer == m.owner], [m for m in receives if m.owner == plan.rank]),
        post("onward", [m for m in sends if m.peer != m.owner], [m for m in receives if m.owner != plan.rank]),
    )


class _Tiles:
    """The steps of tiles. Knows which accumulators there are: a first result that covers everything is adopted."""

    def __init__(self, plan: Plan, terms: Terms) -> None:
        self.plan, self.terms = plan, terms
        self.started: set[str] = set()

    def start(self, name: str) -> Iterator[Step]:
        """The accumulator, if there is none."""
        if name not in self.started:
            self.started.add(name)
            yield Start(name, self.plan.key_covered if name in ("dk", "dv") else self.plan.query_covered)

    def partial(self, tile: Tile, keys: str) -> Iterator[Step]:
        names = self._names_to_copy(tile, keys)
        packing = self.terms.packing
        pieces = tile.pieces(packing.max_rows // self.terms.batch) if packing and names else (tile,)
        for piece in islice(pieces, 2) if self.terms.is_brief else pieces:
            for entry in self._entries(piece):
                yield from self._partial(piece, entry, keys, names)

    def _partial(self, tile: Tile, entry: int | None, keys: str, names: Sequence[str]) -> Iterator[Step]:
        if self.terms.in_place:
            yield from self.start("out")
            yield Compute(tile, entry, "partial", keys)
            return
        for name in names:
            rows = tile.query if name == "query" else tile.key
            assert isinstance(rows, Rows)
            yield Copy(name, rows, entry)
        yield Compute(tile, entry, "partial", keys)
        if names:
            yield Free(tuple(map(packed, names)))
        how = self._how("out", tile.query, tile.first_query, entry, "merge")
        if how != "adopt":
            yield from self.start("out")
        yield Merge(tile, entry, how)

    def _names_to_copy(self, tile: Tile, keys: str) -> list[str]:
        """Which rows pay for a copy: all are read once for each block of queries."""
        packing, (query, key) = self.terms.packing, self.terms.distances
        num_rows = min(tile.query.num_rows, tile.key.num_rows)
        if packing is None or self.terms.in_place or num_rows * self.terms.itemsize < packing.num_bytes:
            return []
        if max(tile.query.num_rows, tile.key.num_rows) * self.terms.batch > packing.max_rows:
            return []
        names = ["query"] if tile.query.step * query >= packing.distance else []
        if keys == OWN_ROWS and isinstance(tile.key, Rows) and tile.key.step * key >= packing.distance:
            names += ["key", "value"]
        return names

    def gradients(self, tile: Tile, keys: str, sums: str = OWN_ROWS, arriving: Sequence[Wait] = ()) -> Iterator[Step]:
        """`arriving` is awaited when everything else is under way."""
        for entry in self._entries(tile):
            if self.terms.in_place:
                yield from self.start("dq")
                yield Compute(tile, entry, "dq", keys)
                yield from arriving
                if sums == OWN_ROWS:
                    yield from (*self.start("dk"), *self.start("dv"))
                yield Compute(tile, entry, "dk and dv", keys, sums)
                continue
            yield Compute(tile, entry, "gradients", keys)
            yield from self._add("dq", tile, entry, tile.query, tile.first_query)
            yield from arriving
            for name in ("dk", "dv"):
                if isinstance(tile.key, Rows):
                    yield from self._add(name, tile, entry, tile.key, tile.first_key)
                else:
                    yield Add(name, tile, entry, "add", sums)

    def _add(self, name: str, tile: Tile, entry: int | None, rows: Rows, is_first: bool) -> Iterator[Step]:
        how = self._how(name, rows, is_first, entry, "add")
        if how != "adopt":
            yield from self.start(name)
        yield Add(name, tile, entry, how)

    def _how(self, name: str, rows: Rows, is_first: bool, entry: int | None, otherwise: str) -> str:
        if not is_first:
            return otherwise
        num_heads = self.plan.num_kv_heads if name in ("dk", "dv") else self.plan.num_heads
        is_all = entry is None and rows.segments * len(rows.heads) * rows.num_rows == self.plan.num_rows * num_heads
        if is_all and name not in self.started and not self.terms.widens:
            self.started.add(name)
            return "adopt"
        return "write"

    def _entries(self, tile: Tile) -> Iterator[int | None]:
        """One call for the whole batch if batch and segments fold into one stride, else one for each entry."""
        rows = tile.query
        folds = self.terms.folds and self.plan.num_rows == rows.segments * rows.segment_step
        if self.terms.batch == 1 or rows.segments == 1 or folds:
            yield None
        else:
            yield from range(min(self.terms.batch, 2) if self.terms.is_brief else self.terms.batch)
