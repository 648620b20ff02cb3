"""All ranks' plans carried out on position numbers instead of tensors: what would be computed, sent and added where.

Every tile becomes the (query head, query position, key position) triples that it computes. Messages are matched as a
transport would (in order, per pair of ranks) and must agree on their size; buffers hold what was really sent.
"""

from collections import Counter, deque
from itertools import pairwise

from ring_dilated_attention.pattern import DilatedPattern
from ring_dilated_attention.plan.plan import Tile
from ring_dilated_attention.plan.planner import make_plan
from ring_dilated_attention.plan.rows import Block, Rows
from ring_dilated_attention.plan.sharded_call import ShardedCall
from ring_dilated_attention.plan.sharding import Shard
from ring_dilated_attention.plan.sight import FROM_END, FULL

Triples = Counter[tuple[int, int, int]]


def dense_triples(pattern: DilatedPattern, borders: tuple[int, ...], num_heads: int) -> Triples:
    """The definition, counted: how often query i of head h sees key j."""
    triples: Triples = Counter()
    for start, stop in pairwise(borders):
        for b, branch in enumerate(pattern.branches):
            w, r, _ = branch
            for h in pattern.heads_of(b, num_heads):
                s = pattern.phase_of(b, h, num_heads)
                for i in range(stop - start):
                    for j in range(stop - start):
                        has_phase = (i % w) % r == s == (j % w) % r
                        if has_phase and branch.in_reach(i, j, is_causal=pattern.is_causal):
                            triples[h, start + i, start + j] += 1
    return triples


class Simulation:
    """Runs forward and backward of every rank, hop by hop. `computed` and `home` are what the tests compare."""

    def __init__(
        self,
        pattern: DilatedPattern,
        shards: tuple[Shard, ...],
        num_heads: int,
        num_kv_heads: int,
        borders: tuple[int, ...],
        held: range | None = None,
    ) -> None:
        sharded_call = ShardedCall(pattern, shards, num_heads, num_kv_heads, borders, held)
        self.plans = [make_plan(sharded_call, k) for k in range(len(shards))]
        self.positions = [[t for span in shard for t in range(*span)] for shard in shards]
        self.ratio = num_heads // num_kv_heads
        self.computed: Triples = Counter()
        # gradient contributions that reached the key's owner
        self.home: list[Triples] = [Counter() for _ in shards]
        self.owner = {t: k for k, positions in enumerate(self.positions) for t in positions}
        self.run()

    def run(self) -> None:
        for k, plan in enumerate(self.plans):
            self.check_first_tiles(k)
            for tile in plan.local:
                triples = self.triples(k, tile, None)
                self.computed += triples
                self.home[k] += triples
        # chunk buffers: {unit: (kv head, position)}
        own = [self.packed(k) for k in range(len(self.plans))]
        held = own
        grads: list[dict[int, Triples]] = [{} for _ in self.plans]  # ring offset -> contributions
        for s in range(max(len(plan.hops) for plan in self.plans)):
            hops = [plan.hops[s] if s < len(plan.hops) else None for plan in self.plans]
            arrived = self.deliver(
                [hop.sends if hop else () for hop in hops],
                [hop.receives if hop else () for hop in hops],
                # An own chunk is sent from the rank's own rows, also when the buffer holds others by then.
                lambda k, m, held=held: {
                    u: x
                    for u, x in (own if m.owner == k else held)[k].items()
                    if m.offset <= u < m.offset + m.size
                },
            )
            held = [{u: x for _, units in several for u, x in units.items()} for several in arrived]
            for k, hop in enumerate(hops):
                for message in hop.grad_starts if hop else ():
                    assert message.offset not in grads[k], "a sum that came along is set to zero"
                    grads[k][message.offset] = Counter()
                for tile in hop.tiles if hop else ():
                    triples = self.triples(k, tile, held[k])
                    self.computed += triples
                    (message,) = [
                        m for m in hop.grad_sends if m.offset <= tile.key.offset < m.offset + m.size
                    ]
                    # else on uninitialised memory
                    grads[k][message.offset] = grads[k][message.offset] + triples
            sent = [hop.grad_sends if hop else () for hop in hops]
            kept = [hop.grad_receives if hop else () for hop in hops]
            arrived = self.deliver(sent, kept, lambda k, m, grads=grads: grads[k].get(m.offset))
            grads = [{} for _ in self.plans]
            for k, several in enumerate(arrived):
                for message, units in several:
                    if message.owner == k:
                        self.home[k] += units
                    else:
                        grads[k][message.offset] = units
        assert not any(grads), "a gradient was left on the way"

    def check_first_tiles(self, k: int) -> None:
        """A first tile writes, and any other adds: to rows that were written, or, if not all are, to the identity."""
        plan = self.plans[k]
        for side, covered, num_heads in [
            ("query", plan.query_covered, plan.num_heads),
            ("key", plan.key_covered, plan.num_kv_heads),
        ]:
            touched: set[tuple[int, int]] = set()
            for tile in plan.local:
                rows = {
                    (h, t)
                    for heads in self.view(k, getattr(tile, side))
                    for h, positions in heads
                    for t in positions
                }
                if getattr(tile, f"first_{side}"):
                    assert not rows & touched, (
                        f"a first tile writes over what is there already ({side} rows)"
                    )
                elif covered:
                    assert rows <= touched, f"a tile adds to uninitialised memory ({side} rows)"
                touched |= rows
            if covered:
                assert len(touched) == num_heads * len(self.positions[k]), (
                    f"not all {side} rows are covered"
                )

    def deliver(self, sends, receives, content):
        """Match the sends of all ranks with the receives of all ranks; everything must be taken, and sizes agree."""
        wires: dict[tuple[int, int], deque] = {}
        for k, messages in enumerate(sends):
            for m in messages:
                assert m.peer != k
                assert m.size > 0
                wires.setdefault((k, m.peer), deque()).append((m.size, content(k, m), m.offset))
        arrived = []
        for k, messages in enumerate(receives):
            several = []
            for m in messages:
                size, units, offset = wires[m.peer, k].popleft()
                assert size == m.size, f"rank {m.peer} sends {size}, rank {k} expects {m.size}"
                assert units is not None, "a sum is sent that nobody started"
                is_gradient = isinstance(units, Counter)
                several.append(
                    (
                        m,
                        units
                        if is_gradient
                        else {u - offset + m.offset: x for u, x in units.items()},
                    )
                )
            arrived.append(several)
        assert not any(wires.values()), "a message nobody received"
        return arrived

    def packed(self, k: int) -> dict[int, tuple[int, int]]:
        buffer: dict[int, tuple[int, int]] = {}
        for rows, block in self.plans[k].packs:
            unit = block.offset
            for head, positions in self.view(k, rows)[0]:
                for t in positions:
                    assert unit not in buffer
                    buffer[unit] = (head, t)
                    unit += 1
            assert unit == block.offset + block.num_heads * block.num_rows
        return buffer

    def view(self, k: int, rows: Rows) -> list[list[tuple[int, list[int]]]]:
        """Per segment, per head: the head and the global positions of its rows."""
        return [
            [
                (
                    h,
                    [
                        self.positions[k][
                            rows.first + i * rows.segment_step + j * rows.shift + m * rows.step
                        ]
                        for m in range(rows.num_rows)
                    ],
                )
                for j, h in enumerate(rows.heads)
            ]
            for i in range(rows.segments)
        ]

    def triples(self, k: int, tile: Tile, buffer: dict[int, tuple[int, int]] | None) -> Triples:
        triples: Triples = Counter()
        queries = self.view(k, tile.query)
        if isinstance(tile.key, Block):
            units = [
                range(
                    tile.key.offset + h * tile.key.num_rows,
                    tile.key.offset + (h + 1) * tile.key.num_rows,
                )
                for h in range(tile.key.start, tile.key.stop)
            ]
            keys = [[(buffer[u[0]][0], [buffer[i][1] for i in u]) for u in units]]
            assert all(buffer[i][0] == buffer[u[0]][0] for u in units for i in u)
        else:
            keys = self.view(k, tile.key)
        for q_heads, k_heads in zip(queries, keys, strict=True):
            share = len(q_heads) // len(k_heads)
            assert share * len(k_heads) == len(q_heads)
            for j, (h, q_positions) in enumerate(q_heads):
                kv, k_positions = k_heads[j // share]
                assert kv == h // self.ratio, f"query head {h} reads key/value head {kv}"
                for a, i in enumerate(q_positions):
                    for b, t in enumerate(k_positions):
                        if tile.mask == FULL or (b >= a if tile.mask == FROM_END else b <= a):
                            triples[h, i, t] += 1
        assert sum(triples.values()) == tile.pairs
        return triples
