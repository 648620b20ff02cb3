"""What a rank does, step by step, in one forward or backward. Pure integers, no torch.

    plan -> program -> {carried out (run/executor.py), weighed (simulate/weighing.py), timed (forecast/clock.py)}

This file alone decides the order of steps: on one device, in a ring (arXiv 2310.01889), with all chunks in one round
(`plan.gathered`) and with heads dealt to ranks (`dealing.py`). A whole program is made before its first step is carried
out. `print(program)` shows it, with one step on each line (docs/how_it_works.md).

A *tile* is one kernel call: a block of queries times keys. A *chunk* is the keys and values of one rank that travel
along a ring of ranks, one *hop* at a time. An *accumulator* is out, lse, dq, dk or dv before it has its final dtype.

A rank holds two buffers of chunks, BUFFERS. In this file hops count from 0. Hop 0 sends from BUFFERS[0] and receives
into BUFFERS[1], hop 1 the other way round, and so on. Backward has two more buffers, GRADIENTS, for the gradients of
chunks. All that a rank receives goes into these buffers, except the heads that are dealt to it.

A kernel may *keep* its results: it writes the results of many tiles first, and then gathers them into the accumulator
in one pass over the accumulator's rows. Otherwise each result is merged or added as soon as it is computed.
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache

from . import step as steps
from .plan import Message, Plan, Tile
from .rows import Rows
from .sight import FROM_END
from .step import (
    BUFFERS,
    CACHED_ROWS,
    GRADIENTS,
    OWN_CHUNKS,
    OWN_ROWS,
    RECEIVED,
    BufferSlice,
    CallFacts,
    Step,
)

_INPUTS = {
    "forward": ("query", "key", "value"),
    "backward": ("dout", "query", "key", "value", "out", "lse"),
}
# Pairs (tile, place of its keys). The place is the name of a buffer, or OWN_ROWS or CACHED_ROWS, as in `Compute.keys`.
Tiles = Sequence[tuple[Tile, str]]
_RESULTS = {"forward": ("out", "lse"), "backward": ("dq", "dk", "dv")}

# Programs are cached only if they have at most this many tiles (times batch entries). A larger program would take much
# memory, and making it again for each call takes less time than computing its tiles.
MOST_KEPT_TILES = 1000

# A tile with the mask FROM_END is computed from copies of its rows in reverse order. At most this many rows are copied
# at a time, if the kernel does not set `Packing.max_rows`.
MOST_TURNED_ROWS = 2**18


class Program(tuple[Step, ...]):
    """The steps of one rank in one stage (forward or backward)."""

    __slots__ = ()

    def __str__(self) -> str:
        return "\n".join(map(steps.text_of, self))


def program_of(plan: Plan, stage: str, facts: CallFacts) -> Program:
    """Make a program, or take it from a cache if it has been made before. Large programs are not cached."""
    if plan.num_tiles * facts.batch > MOST_KEPT_TILES:
        return make_program(plan, stage, facts)
    return _kept(plan, stage, facts)


def make_program(plan: Plan, stage: str, facts: CallFacts) -> Program:
    """The program by which a rank carries out its plan. stage: one of STAGES."""
    maker = _Maker(plan, stage, facts)
    make_steps = maker.forward if stage == "forward" else maker.backward
    if facts.dealing is None:
        make_steps()
        return Program(maker.made)

    # Exchange heads for positions between the ranks before the work, and back after the work.
    inputs = _INPUTS[stage]
    if facts.has_dlse:
        inputs += ("dlse",)
    for name in inputs:
        maker.put(steps.Deal(name, to_heads=True))
    make_steps()
    maker.put(steps.Free(inputs))
    for name in _RESULTS[stage]:
        maker.put(steps.Deal(name, to_heads=False))
    return Program(maker.made)


_kept = lru_cache(maxsize=64)(make_program)


class _Maker:
    """Makes the list of steps of a stage. Attributes record the accumulators made so far and the messages under way."""

    def __init__(self, plan: Plan, stage: str, facts: CallFacts) -> None:
        self.plan = plan
        self.stage = stage
        self.facts = facts
        self.made: list[Step] = []

        # `started`: the names of the accumulators that exist. `gathered`: the names of the accumulators into which kept
        # results have been gathered.
        self.started: set[str] = set()
        self.gathered: set[str] = set()

        # `late`: the names of buffers that exist only at the current hop. Each has a chunk of this rank, which this hop
        # packs a second time, because the first copy was freed.
        self.late: list[str] = []

        # `arriving`: the steps that wait for unfinished gradients of this hop's chunks. The previous rank of each ring
        # sends these gradients.
        self.arriving: list[steps.Wait] = []

    def put(self, *new_steps: Step) -> None:
        self.made += new_steps

    def forward(self) -> None:
        """List the steps that compute out and lse of this rank's queries.

        While the first chunks travel, the rank computes its own queries times its own keys. Then, at each hop, it
        computes its queries times the chunks that have arrived, while the next chunks travel.
        """
        plan = self.plan
        self.start_hop(0)
        cached = [(tile, CACHED_ROWS) for tile in plan.cached]
        self.partials(self.own_tiles() + cached)

        for s, hop in enumerate(plan.hops):
            self.arrive(s)
            self.start_hop(s + 1)
            arrived = BUFFERS[(s + 1) % 2]
            self.partials([(tile, arrived) for tile in hop.tiles])

        self.put(steps.Free((BUFFERS[len(plan.hops) % 2],)))
        self.finish("out", "lse")

    def backward(self) -> None:
        """List the steps that compute dq, dk and dv of this rank's rows.

        `out` and `lse` from forward cover all keys. So the weights p = exp(score - lse) of each tile are final, and the
        gradients of tiles only need to be added.

        The chunks travel again, and their gradients travel one hop behind them (`rings.py`). When the gradient of a
        chunk returns to the chunk's owner, the owner adds it to the gradients from its own queries.
        """
        plan = self.plan
        self.start_hop(0)
        self.all_gradients(self.own_tiles(), ("dq", "dk", "dv"))

        leaving: list[steps.Wait] = []
        for s, hop in enumerate(plan.hops):
            self.arrive(s)
            self.start_hop(s + 1)
            arrived = BUFFERS[(s + 1) % 2]

            # `sums`: the buffer in which the gradients of this hop's chunks add up. `other`: the buffer into which
            # gradients are received meanwhile.
            sums = GRADIENTS[s % 2]
            other = GRADIENTS[(s + 1) % 2]
            if s == 0:
                self.put(steps.Take(sums, plan.received_size, is_sum=True))

            self.put(*map(steps.Zero, _slices(sums, hop.grad_starts)))
            self.all_gradients([(tile, arrived) for tile in hop.tiles], ("dq",), sums)
            self.await_gradients()
            if s + 1 == len(plan.hops):
                self.put(steps.Free((arrived,)))

            # Wait until the previous hop's gradients have been sent from `other`, so that `other` may be overwritten.
            self.put(*leaving)
            if s == 0:
                self.put(steps.Take(other, plan.home_size, is_sum=True))
            leaving = self.send_gradients(s, sums, other)

        self.put(*leaving, steps.Free(GRADIENTS))
        self.finish("dq", "dk", "dv")

    def own_tiles(self) -> list[tuple[Tile, str]]:
        """The tiles of this rank's queries times this rank's keys, each with the place of its keys (as in `Tiles`)."""
        return [(tile, OWN_CHUNKS if tile.packed else OWN_ROWS) for tile in self.plan.local]

    def start_hop(self, s: int) -> None:
        """Start to send and to receive the chunks of hop s, from one buffer into the other.

        Before hop 0 this rank's chunks are packed. If there is no hop s, all chunks have been sent. Then the buffer
        from which the last chunks were sent is freed.
        """
        plan = self.plan
        sent_from = BUFFERS[s % 2]
        received_in = BUFFERS[(s + 1) % 2]
        if s == len(plan.hops):
            if s > 0:
                self.put(steps.Free((received_in,)))
            return

        if s == 0:
            self.put(steps.Pack(OWN_CHUNKS, plan.chunk_size, plan.packs))
            self.put(steps.Take(RECEIVED, plan.received_size, is_sum=False))

        hop = plan.hops[s]
        self.late = []
        sends: list[BufferSlice] = []
        for message in hop.sends:
            if s > 0 and message.owner == plan.rank:
                # Pack this rank's chunk again, because both buffers now hold chunks of other ranks.
                name = f"own chunk sent late at hop {s + 1}, {message.packed}"
                self.put(steps.Pack(name, message.size, tuple(plan.packs_of(message))))
                self.late.append(name)
                sends.append(BufferSlice(name, 0, message))
            else:
                sends.append(BufferSlice(sent_from, message.offset, message))

        receives = _slices(received_in, hop.receives)
        if sends or receives:
            moment = self.moment(s)
            self.put(steps.Post(moment, moment, tuple(sends), receives))

    def arrive(self, s: int) -> None:
        """Wait until the chunks of hop s have been sent and received."""
        hop = self.plan.hops[s]
        if hop.sends or hop.receives:
            self.put(steps.Wait(self.moment(s)))
        if self.late:
            self.put(steps.Free(tuple(self.late)))

    def moment(self, s: int) -> str:
        return f"{self.stage}, hop {s + 1}, keys and values"

    def send_gradients(self, s: int, sums: str, other: str) -> list[steps.Wait]:
        """Start to send the gradients of hop s. Returns the `Wait` steps that wait until the gradients have been sent.

        A finished gradient goes to the owner of its chunk. An unfinished gradient goes to the next rank, which adds to
        it.

        Finished and unfinished gradients are sent in two `Post` steps, finished gradients first. A rank receives both
        kinds into the same slice of a buffer. So the rank adds the finished gradient to dk and dv before it receives
        the unfinished gradient. All ranks start the two `Post` steps in the same order. Otherwise two ranks could each
        wait for a message that the other has not started.
        """
        hop = self.plan.hops[s]
        moment = f"backward, hop {s + 1}, gradients"
        leaving: list[steps.Wait] = []
        for which, is_finished in (("finished", True), ("onward", False)):
            sends = [m for m in hop.grad_sends if (m.peer == m.owner) == is_finished]
            receives = [m for m in hop.grad_receives if (m.owner == self.plan.rank) == is_finished]
            if not sends and not receives:
                continue

            ticket = f"{moment}, {which}"
            leave = _slices(sums, sends)
            arrive = _slices(other, receives)
            self.put(steps.Post(ticket, moment, leave, arrive, is_apart=True))

            leaving.append(steps.Wait(ticket, received=False))
            arrival = steps.Wait(ticket, sent=False)
            if not is_finished:
                self.arriving = [arrival]
            elif arrive:
                self.put(arrival)
                self.start("dk", "dv")
                self.put(*map(steps.Unpack, arrive))
        return leaving

    def await_gradients(self) -> None:
        self.put(*self.arriving)
        self.arriving = []

    def start(self, *names: str) -> None:
        """Make each named accumulator that does not exist yet."""
        for name in names:
            if name in self.started:
                continue
            self.started.add(name)
            is_covered = self.plan.query_covered
            if name in ("dk", "dv"):
                is_covered = self.plan.key_covered
            self.put(steps.Start(name, is_covered))

    def finish(self, *names: str) -> None:
        """Round accumulators to the dtype of the results. If `gathers_once` is True, they have this dtype already."""
        if self.gathers_once:
            return
        for name in names:
            if name != "lse":
                self.start(name)
            self.put(steps.Finish(name))

    @property
    def gathers_once(self) -> bool:
        """Whether each row of the accumulators is written only once: all results of the row are kept, and merged
        together.

        With hops this is False, because each hop merges its results into the accumulators.
        """
        return self.facts.kept_rows is not None and not self.plan.hops

    def partials(self, tiles: Tiles) -> None:
        """Compute tiles' partials (out and lse over a tile's keys), and merge them: one by one, or all together if
        results are kept."""
        for kv_heads, block in self.head_blocks(tiles, ("out",)):
            for call, entry, keys in block:
                self.put(steps.Compute(call, entry, "partial", keys, self.copied(call, keys)))
                how = self.how("out", call.query, call.first_query, entry, "merge")
                self.put(steps.Merge(call, entry, how))

            self.gather(("out",), kv_heads)
        self.gathered.add("out")

    def all_gradients(self, tiles: Tiles, names: tuple[str, ...], sums: str = OWN_ROWS) -> None:
        """Compute the gradients of tiles and add them up: one by one, or all together if results are kept.

        names: the gradients that are added to this rank's accumulators. For this rank's own keys these are dq, dk and
        dv. For the keys of a received chunk this is only dq: dk and dv are added one by one to the buffer `sums`, which
        is sent to another rank.
        """
        for kv_heads, block in self.head_blocks(tiles, names):
            if block and self.facts.kept_rows is not None:
                calls = tuple((call, entry) for call, entry, _ in block)
                self.put(steps.Copy(calls, kv_heads))

            for call, entry, keys in block:
                self.put(steps.Compute(call, entry, "gradients", keys, self.copied(call, keys)))
                how = self.how("dq", call.query, call.first_query, entry, "add")
                self.put(steps.Add("dq", call, entry, how))

                for name in ("dk", "dv"):
                    if name in names:
                        assert isinstance(call.key, Rows)
                        how = self.how(name, call.key, call.first_key, entry, "add")
                        self.put(steps.Add(name, call, entry, how))
                    else:
                        # Wait for the sums of other ranks only now, because the kernel's call above does not need them.
                        self.await_gradients()
                        self.put(steps.Add(name, call, entry, "add", sums))

            self.gather(names, kv_heads)
        self.gathered.update(names)

    def gather(self, names: tuple[str, ...], kv_heads: range) -> None:
        """If results are kept, merge or add all results that have been kept so far."""
        if self.facts.kept_rows is not None:
            self.put(steps.Gather(names, kv_heads, adds=names[0] in self.gathered))

    def head_blocks(
        self, tiles: Tiles, names: tuple[str, ...]
    ) -> Iterator[tuple[range, list[tuple[Tile, int | None, str]]]]:
        """Cut the work of tiles into blocks of key/value heads.

        Yields the heads of each block, and the kernel's calls for these heads: (call, batch entry, where the keys are).

        If results are kept until they are gathered, all results of a block have at most about `kept_rows` rows. (But a
        block has at least one head.) If results are not kept, there is a single block.

        If results are kept, the accumulators must be filled even if there are no tiles. So without tiles, and if
        nothing has been gathered yet, this method yields a block without calls. The `Gather` step of this block fills
        the accumulators with 0 (lse: -inf).
        """
        num_heads = self.plan.num_kv_heads
        num_blocks = 1
        if self.facts.kept_rows is not None:
            for name in names:
                if name not in self.started:
                    self.started.add(name)
                    self.put(steps.Start(name, is_covered=True, is_result=self.gathers_once))
            if not tiles and self.gathered:
                return

            num_rows = self.facts.batch * sum(self.rows_kept(tile) for tile, _ in tiles)
            num_blocks = max(1, min(-(-num_rows // self.facts.kept_rows), num_heads))

        for i in range(num_blocks):
            lo = num_heads * i // num_blocks
            hi = num_heads * (i + 1) // num_blocks
            block: list[tuple[Tile, int | None, str]] = []
            for tile, keys in tiles:
                of_block = tile if num_blocks == 1 else self.of_heads(tile, lo, hi)
                if of_block is None:
                    continue
                for call, entry in self.calls(of_block, keys):
                    block.append((call, entry, keys))
            yield range(lo, hi), block

    def rows_kept(self, tile: Tile) -> int:
        """How many rows of D elements are kept for a tile, in all its tensors together, for one batch entry."""
        query = tile.query.num_rows * len(tile.query.heads)
        if self.stage == "forward":
            return query * tile.query.segments
        # dq and the copies of dout and out have a row for each query row, and dk and dv have a row for each key row.
        key = tile.key.num_rows * len(tile.key.heads)
        return (3 * query + 2 * key) * tile.query.segments

    def of_heads(self, tile: Tile, lo: int, hi: int) -> Tile | None:
        """The part of a tile that has key/value heads lo..hi-1. None if the tile has none of these heads."""
        ratio = self.plan.num_heads // self.plan.num_kv_heads
        heads = tile.query.heads
        first = bisect_left(heads, lo * ratio)
        last = bisect_left(heads, hi * ratio)
        if first == last:
            return None
        share = len(heads) // len(tile.key.heads)
        return tile.of_heads(first // share, last // share)

    def calls(self, tile: Tile, keys: str) -> Iterator[tuple[Tile, int | None]]:
        """The kernel's calls for a tile, each with its batch entry. None: one call takes all batch entries.

        A large tile is split into several calls if its rows are copied, or if it has more rows than one call of the
        kernel's backward takes.
        """
        facts = self.facts
        if tile.mask == FROM_END or self.copied(tile, keys):
            max_rows = facts.packing.max_rows if facts.packing else MOST_TURNED_ROWS
            # In backward give each call several heads, because each thread of the kernel computes whole heads.
            fewest_heads = 4 if self.stage == "backward" else 1
            calls = tile.split(max_rows // facts.batch, fewest_heads)
        else:
            calls = self.calls_of_size(tile)

        for call in calls:
            rows = call.query
            # One call can take all batch entries if all segments are equally far apart in memory, across batch entries
            # too. This is so if the call's segments fill an entry.
            fills = self.plan.num_rows == rows.segments * rows.segment_step
            is_one_stride = rows.segments == 1 or (facts.folds and fills)
            if facts.batch == 1 or (is_one_stride and self.takes(call, facts.batch)):
                yield call, None
            else:
                for entry in range(facts.batch):
                    yield call, entry

    def calls_of_size(self, tile: Tile) -> Iterator[Tile]:
        """Split a tile into calls of at most `CallFacts.most_rows` query rows: along segments and key/value heads, and
        if that is not enough, along batch entries (`calls`) and then along query heads that share a key/value head."""
        batch = self.facts.batch
        most_rows = self.facts.most_rows
        if most_rows is None or self.takes(tile, batch):
            yield tile
            return

        # `most_heads`: how many query heads a call may have. A head in n segments counts as n heads.
        most_heads = most_rows // (padded_rows(tile) * batch)
        if most_heads < len(tile.query.heads) // len(tile.key.heads):
            most_heads = max(most_rows // padded_rows(tile), 1)
        for part in tile.split_shared(most_heads):
            yield from part.split(most_heads * max(part.query.num_rows, part.key.num_rows), 1)

    def takes(self, tile: Tile, batch: int) -> bool:
        """Whether one call takes this tile of `batch` batch entries (`CallFacts.most_rows`)."""
        most_rows = self.facts.most_rows
        if most_rows is None or self.stage == "forward":
            return True
        num_heads = len(tile.query.heads) * tile.query.segments
        return num_heads * padded_rows(tile) * batch <= most_rows

    def copied(self, tile: Tile, keys: str) -> tuple[str, ...]:
        """The names of the tensors whose rows are copied before the kernel reads them. `step.Packing` says when."""
        packing = self.facts.packing
        if packing is None:
            return ()

        if self.facts.itemsize < 4:
            # Do not copy rows of a cache, because the new queries read each row only once, and a copy would take longer
            # than reading the row in place.
            if keys == CACHED_ROWS:
                return ()
            return tuple(name for name in _INPUTS[self.stage] if name != "lse")

        fewer_rows, more_rows = sorted((tile.query.num_rows, tile.key.num_rows))
        is_short = fewer_rows * self.facts.itemsize < packing.num_bytes
        if self.stage == "backward" or is_short or more_rows * self.facts.batch > packing.max_rows:
            return ()

        # Copy rows of query, key and value that lie far apart in memory. Rows of a buffer of chunks already lie side by
        # side.
        query_distance, key_distance = self.facts.distances
        names: list[str] = []
        if tile.query.step * query_distance >= packing.distance:
            names.append("query")
        if (
            keys == OWN_ROWS
            and isinstance(tile.key, Rows)
            and tile.key.step * key_distance >= packing.distance
        ):
            names += ["key", "value"]
        return tuple(names)

    def how(self, name: str, rows: Rows, is_first: bool, entry: int | None, otherwise: str) -> str:
        """How a tile's result gets into its accumulator: "keep", "adopt", "write", or else `otherwise`.

        `step.Merge` explains these words. name: the accumulator. rows: the rows of the result. is_first: the tile's
        `first_query` or `first_key`. otherwise: "merge" or "add", for a result that is not the first.
        """
        if self.facts.kept_rows is not None:
            return "keep"

        num_heads = self.plan.num_kv_heads if name in ("dk", "dv") else self.plan.num_heads
        num_rows = rows.segments * len(rows.heads) * rows.num_rows
        is_all = entry is None and num_rows == self.plan.num_rows * num_heads
        if is_first and is_all and name not in self.started and not self.facts.rounds_results:
            self.started.add(name)
            return "adopt"
        self.start(name)
        return "write" if is_first else otherwise


def _slices(name: str, messages: Iterable[Message]) -> tuple[BufferSlice, ...]:
    """The slices of the buffer `name` in which messages lie, each at the message's offset."""
    return tuple(BufferSlice(name, message.offset, message) for message in messages)


def padded_rows(tile: Tile) -> int:
    """The query rows of one head and segment, rounded up to a multiple of ROW_BLOCK."""
    num_rows = tile.query.num_rows
    return num_rows + -num_rows % steps.ROW_BLOCK
