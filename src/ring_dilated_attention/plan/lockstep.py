"""What a job of many ranks computes, sends, holds and takes, without a plan for each: up to 65,536 ranks in a moment.

For one document in contiguous shards of equal length L = n / p, where each segment length divides L or is a multiple
of it, and rates of the segments that straddle shards divide L (`why_not` says which of this does not hold). Then all
chunks of a branch are alike, and at a hop every rank that takes part does the same: ranks go in lockstep. Pure integers
but for seconds, no torch.

Work and bytes are exact. So is the time of a pattern that is not causal, on ranks that are all alike: one rank's ways
carry what it sends, at the moments of the one that sends to it. Of a causal pattern, in which ranks stop at different
hops, the time is between two bounds: the work of the busiest rank, and a rank that takes part in every hop while it
also sends and receives each gradient that goes home (a bound by test against the clock, not by proof).
"""

import operator
from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import cycle, pairwise, repeat
from math import comb, lcm
from typing import NamedTuple

from ..pattern import DilatedPattern
from .clock import Hardware
from .exchange import Traffic, looked_at
from .memory import AttentionMemory, Sizes, Traits, attention_memory
from .plan import Plan
from .planner import make_plan
from .sharding import make_shards
from .totals import pairs, rows_before


class Bounds(NamedTuple):
    """Seconds of a step; the same number twice where it is exact."""

    least: float
    most: float

    @classmethod
    def exactly(cls, seconds: float) -> "Bounds":
        return cls(seconds, seconds)

    @property
    def is_exact(self) -> bool:
        return self.least == self.most


class Straddling(NamedTuple):
    """A branch whose segments lie in several shards.

    group: ranks that share a whole segment. rows: of all key/value heads in one chunk, K and V.
    own_pairs, hop_pairs: of a rank with its own rows, and with one chunk. tiles: pairs of each kernel call of a hop.
    """

    group: int
    rows: int
    own_pairs: int
    hop_pairs: int
    tiles: tuple[int, ...]


def why_not(
    pattern: DilatedPattern, seq_len: int, num_ranks: int, sharding: str, documents: tuple[int, ...] | None
) -> str | None:
    """What keeps a job from closed forms, or None."""
    length, rest = divmod(seq_len, num_ranks)
    if sharding != "contiguous":
        return f"shards are {sharding}"
    if documents is not None and len(documents) > 2:
        return "documents are packed"
    if rest:
        return f"{seq_len:,} positions do not divide among {num_ranks:,} ranks"
    for w, r in pattern.branches:
        if w < seq_len and length % w and w % length:
            return f"segments of {w:,} neither divide nor are multiples of {length:,} positions of a rank"
        if w > length and length % r:
            return f"rate {r:,} does not divide {length:,} positions of a rank"
        if not pattern.is_causal and w < seq_len and seq_len % w and w > length:
            return f"the last segment of {w:,} is shorter, so that its ranks do less"
    return None


@dataclass(frozen=True)
class Lockstep:
    """A job for which `why_not` has nothing to say."""

    pattern: DilatedPattern
    seq_len: int
    num_ranks: int
    num_heads: int
    num_kv_heads: int
    sizes: Sizes

    @property
    def length(self) -> int:
        return self.seq_len // self.num_ranks

    @cached_property
    def straddling(self) -> dict[int, Straddling]:
        """By branch. Chunks and tiles are those of a plan for two shards of the branch alone."""
        found = {}
        for branch, (w, _) in enumerate(self.pattern.branches):
            group = min(self.num_ranks, -(-w // self.length))
            if group > 1:
                own, other = (self._alone(branch, rank) for rank in (0, 1))
                tiles = tuple(tile.pairs for hop in other.hops for tile in hop.tiles)
                found[branch] = Straddling(group, own.chunk_size, self._home_work(branch, other), sum(tiles), tiles)
        return found

    @cached_property
    def local_pairs(self) -> int:
        """Pairs of a rank in segments that lie in its shard."""
        own = [i for i in range(len(self.pattern.branches)) if i not in self.straddling]
        return sum(self._home_work(i, self._alone(i, 0)) for i in own)

    @cached_property
    def pairs_of_ranks(self) -> list[int]:
        """Pairs that each rank computes."""

        def at(branch: Straddling, place: int) -> int:
            return branch.own_pairs + branch.hop_pairs * (place if self.pattern.is_causal else branch.group - 1)

        return [self.local_pairs + found for found in self._of_ranks(at)]

    @cached_property
    def sent_of_ranks(self) -> tuple[list[int], list[int]]:
        """Elements of K‖V in a forward, and of dK‖dV, that each rank sends, in units of B * D."""
        if not self.pattern.is_causal:
            all_round = self._of_ranks(lambda branch, place: branch.rows * (branch.group - 1))
            return all_round, all_round
        chunks = self._of_ranks(lambda branch, place: branch.rows * (place + 1) if place < branch.group - 1 else 0)
        chunks[-1] = 0  # the last rank is the last of its segments, also of those that the sequence cuts off
        return chunks, self._of_ranks(lambda branch, place: branch.rows * place)

    def _of_ranks(self, at: Callable[[Straddling, int], int]) -> list[int]:
        """For every rank the sum over branches of what holds at its place among the ranks that share a segment."""
        totals = [0] * self.num_ranks
        for branch in self.straddling.values():
            places = [at(branch, place) for place in range(branch.group)]
            totals = list(map(operator.add, totals, cycle(places)))
        return totals

    @cached_property
    def busiest(self) -> int:
        """The rank with the most pairs."""
        return self.pairs_of_ranks.index(max(self.pairs_of_ranks))

    @cached_property
    def total_pairs(self) -> int:
        return pairs(self.pattern, self.seq_len, self.num_heads)

    @property
    def balance(self) -> float:
        """Mean work over the largest."""
        return self.total_pairs / (self.num_ranks * self.pairs_of_ranks[self.busiest])

    @property
    def num_hops(self) -> int:
        return max((branch.group - 1 for branch in self.straddling.values()), default=0)

    def sent_of_branches(self) -> list[int]:
        """Bytes of keys and values that all ranks together send of each branch in a forward."""
        unit, found = self.sizes.unit * self.sizes.itemsize, [0] * len(self.pattern.branches)
        for i, branch in self.straddling.items():
            whole, rest = divmod(self.num_ranks, branch.group)
            # Along a line of g ranks 1, 2, ... g - 1 chunks leave; around a ring g - 1 leave each.
            chunks = whole * comb(branch.group, 2) + comb(rest, 2)
            found[i] = unit * branch.rows * (chunks if self.pattern.is_causal else self.num_ranks * (branch.group - 1))
        return found

    def exposed(self, hardware: Hardware, seconds: Bounds) -> float:
        """The share of a step in which the busiest rank waits: at least so much, where the time is two bounds."""
        calls = self._home_calls + sum(len(branch.tiles) * (branch.group - 1) for branch in self.straddling.values())
        work = sum(self._seconds(self.pairs_of_ranks[self.busiest], k, hardware, calls) for k in (2, 5))
        return max(0.0, 1 - work / seconds.least)

    def largest_sent(self) -> tuple[int, int]:
        """Bytes of a forward, and of a forward with its backward, of the ranks that send most."""
        unit, gradient = self.sizes.unit * self.sizes.itemsize, self.sizes.unit * self.sizes.sum_itemsize
        chunks, gradients = self.sent_of_ranks
        return max(chunks) * unit, max(2 * c * unit + g * gradient for c, g in zip(chunks, gradients, strict=True))

    def traffic(self) -> Traffic:
        """What `choose_exchange` sees of the plans."""
        unit, ranks = self.sizes.unit * self.sizes.itemsize, looked_at(self.num_ranks)
        sizes = [branch.rows for branch in self.straddling.values()]
        is_causal = self.pattern.is_causal
        places = [
            [(rank % branch.group if is_causal else branch.group - 1, branch) for branch in self.straddling.values()]
            for rank in ranks
        ]
        return Traffic(
            sent=unit * max(self.sent_of_ranks[0][rank] for rank in ranks),
            hops=self.num_hops,  # rank 0 has all of them
            largest=unit * max((b.rows for found in places for place, b in found if place), default=0),
            two_chunks=2 * unit * sum(sizes),
            together=unit * max(sum(place * branch.rows for place, branch in found) for found in places),
            calls=self._home_calls + max(sum(place * len(b.tiles) for place, b in found) for found in places),
        )

    def memory(self, traits: Traits) -> AttentionMemory:
        """Of a rank in the middle of its rings: buffers and tiles are the same at every hop, so four shards tell it."""
        lengths = [min(w, 4 * self.length) if w > self.length else w for w in self.pattern.segment_lengths]
        small = replace(self.pattern, segment_lengths=lengths)
        num_ranks = min(4, self.num_ranks)
        shards = make_shards("contiguous", (self.length,) * num_ranks)
        plans = [make_plan(small, shards, k, self.num_heads, self.num_kv_heads) for k in range(num_ranks)]
        return max((attention_memory(p, self.sizes, traits) for p in plans), key=lambda x: x.forward_backward.num_bytes)

    def step_seconds(self, hardware: Hardware) -> Bounds:
        """Of one forward and its backward, under the rules of `clock.py`."""
        most = self._forward(hardware) + self._backward(hardware)
        if not self.pattern.is_causal or not self.straddling:
            return Bounds.exactly(most)
        handshakes = 2 * hardware.handshake
        busiest = self.pairs_of_ranks[self.busiest]
        work = self._seconds(busiest, 2, hardware, 0) + self._seconds(busiest, 5, hardware, 0)
        ways = self.largest_sent()[1] / hardware.bytes_per_second
        # The first chunk of a ring reaches its last rank hop by hop, in both stages.
        unit = self.sizes.unit * self.sizes.itemsize / hardware.bytes_per_second
        chains = (2 * (b.group - 1) * (b.rows * unit + hardware.latency_seconds) for b in self.straddling.values())
        least = max(work, ways, *chains) + handshakes
        return Bounds(least, max(most, least))

    def _forward(self, hardware: Hardware) -> float:
        now, way, arrives = self._begin(hardware, products=2)
        for hop in self._hops(hardware):
            now = max(now, arrives)
            arrives = way.carry(now, hop.chunks)
            now += hop.forward
        return now

    def _backward(self, hardware: Hardware) -> float:
        """As `program.py` orders it: gradients leave one hop behind the chunks, finished ones first."""
        now, way, arrives = self._begin(hardware, products=5)
        onward = left = 0.0
        for hop in self._hops(hardware):
            now = max(now, arrives)
            arrives = way.carry(now, hop.chunks)
            now = max(now + hop.first, onward) + hop.others
            now = max(now, left)
            left = 0.0
            if hop.finished:
                left = now = way.carry(now, hop.finished)
            onward = way.carry(now, hop.onward)
            left = max(left, onward)
        return max(now, left)

    def _begin(self, hardware: Hardware, products: int) -> tuple[float, "_Way", float]:
        """Of a stage: when own tiles are done, and when the first chunks are there."""
        now = hardware.handshake if self.num_ranks > 1 else 0.0
        way, unit = _Way(hardware), self.sizes.unit * self.sizes.itemsize
        arrives = way.carry(now, sum(b.rows for b in self.straddling.values()) * unit / hardware.bytes_per_second)
        pairs_at_home = self.local_pairs + sum(branch.own_pairs for branch in self.straddling.values())
        return now + self._seconds(pairs_at_home, products, hardware, self._home_calls), way, arrives

    def _hops(self, hardware: Hardware) -> Iterator["_Hop"]:
        """One after the other. They change only where the ring of a branch ends."""
        ends = {end for branch in self.straddling.values() for end in (branch.group - 2, branch.group - 1)}
        for before, last in pairwise(sorted({0, *ends})):
            yield from repeat(self._hop(last, hardware), last - before)

    def _hop(self, number: int, hardware: Hardware) -> "_Hop":
        here = [branch for branch in self.straddling.values() if branch.group > number]
        onward = [branch for branch in here if branch.group > number + 1]
        # Causal, some of every chunk's end at any hop.
        finished = [branch for branch in here if self.pattern.is_causal or branch not in onward]
        chunk, gradient = (
            self.sizes.unit * size / hardware.bytes_per_second
            for size in (self.sizes.itemsize, self.sizes.sum_itemsize)
        )
        work, calls = sum(branch.hop_pairs for branch in here), sum(len(branch.tiles) for branch in here)
        first = here[0].tiles[0]
        return _Hop(
            forward=self._seconds(work, 2, hardware, calls),
            first=self._seconds(first, 5, hardware, 1),
            others=self._seconds(work - first, 5, hardware, calls - 1),
            chunks=sum(branch.rows for branch in onward) * chunk,
            finished=sum(branch.rows for branch in finished) * gradient,
            onward=sum(branch.rows for branch in onward) * gradient,
        )

    @cached_property
    def _home_calls(self) -> int:
        shards = make_shards("contiguous", (self.length,) * min(2, self.num_ranks))
        lengths = [min(w, 2 * self.length) if w > self.length else w for w in self.pattern.segment_lengths]
        small = replace(self.pattern, segment_lengths=lengths)
        return len(make_plan(small, shards, 0, self.num_heads, self.num_kv_heads).local)

    def _seconds(self, num_pairs: int, products: int, hardware: Hardware, calls: int) -> float:
        flops = products * 2 * self.sizes.head_dim * self.sizes.batch * num_pairs
        return hardware.compute_seconds(flops, backward=products == 5, calls=calls)

    def _home_work(self, branch: int, plan: Plan) -> int:
        """Pairs at home of the heads that run the branch."""
        heads = self.pattern.heads_of(branch, self.num_heads)
        return sum(tile.pairs for tile in plan.local if tile.query.heads[0] in heads)

    def _alone(self, branch: int, rank: int) -> Plan:
        """The plan of two shards with this branch of the pattern alone: all heads run it, or those of its group."""
        w, r = self.pattern.branches[branch]
        is_split = self.pattern.heads == "split"
        lengths = [w if i == branch else 1 for i in range(len(self.pattern.branches))] if is_split else [w]
        rates = list(self.pattern.dilation_rates) if is_split else [r]
        one = replace(self.pattern, segment_lengths=lengths, dilation_rates=rates)
        shards = make_shards("contiguous", (self.length,) * min(2, self.num_ranks))
        return make_plan(one, shards, rank, self.num_heads, self.num_kv_heads)


def zigzag_balance(pattern: DilatedPattern, seq_len: int, num_ranks: int, num_heads: int) -> float | None:
    """Mean work over the largest if shards were zigzag's; None where its 2p parts are not of one length."""
    part, rest = divmod(seq_len, 2 * num_ranks)
    if rest:
        return None
    work = [0] * (2 * num_ranks)
    for branch, (w, r) in enumerate(pattern.branches):
        phases = sorted(pattern.phase_of(branch, h, num_heads) or 0 for h in pattern.heads_of(branch, num_heads))
        # A query sees what is before it in its segment: causal work repeats with segments and parts together.
        repeats = pattern.is_causal or w >= seq_len or seq_len % w == 0
        period = min(2 * num_ranks, lcm(w, part) // part) if repeats else 2 * num_ranks
        if repeats and part % r == 0 and w % part == 0:  # a line of parts that all have as many rows of each phase
            rows, every = part // r, min(w, seq_len) // r
            own, step = (rows * (rows + 1) // 2, rows * rows) if pattern.is_causal else (rows * every, 0)
            found = [len(phases) * (own + k * step) for k in range(period)]
        else:
            found = [_span_pairs(pattern, branch, phases, k * part, part, seq_len) for k in range(period)]
        repeated = found * -(-2 * num_ranks // period)
        work = [a + b for a, b in zip(work, repeated, strict=False)]
    ranks = [work[k] + work[-1 - k] for k in range(num_ranks)]
    return sum(ranks) / (num_ranks * max(ranks)) if max(ranks) else 1.0


def _span_pairs(pattern: DilatedPattern, branch: int, phases: list[int], start: int, length: int, seq_len: int) -> int:
    """Pairs of the queries at start..start+length-1, over heads that read `phases` (in ascending order)."""
    w, r = pattern.branches[branch]
    total, stop = 0, start + length
    whole = -(-start // w) * w
    num_whole = max(0, (stop - whole) // w)
    if num_whole:  # they are alike
        total += num_whole * _piece_pairs(pattern.is_causal, phases, r, 0, w, w)
    for a, b in ((start, min(whole, stop)), (whole + num_whole * w, stop)):
        if a < b:
            origin = a // w * w
            end = min(w, seq_len - origin)
            total += _piece_pairs(pattern.is_causal, phases, r, a - origin, b - origin, end)
    return total


def _piece_pairs(is_causal: bool, phases: list[int], r: int, start: int, stop: int, end: int) -> int:
    """The same of positions start..stop-1 of a segment of `end`. Before x a phase s has x // r rows, and one more if
    s < x mod r: heads differ only in which of these places they stand before."""
    places = [0, *sorted(bisect_left(phases, x % r) for x in (start, stop, end)), len(phases)]
    total = 0
    for lo, hi in pairwise(places):
        if lo < hi:
            before, after, every = (rows_before(x, phases[lo], r) for x in (start, stop, end))
            if after > before:
                seen = (after * (after + 1) - before * (before + 1)) // 2 if is_causal else (after - before) * every
                total += (hi - lo) * seen
    return total


class _Hop(NamedTuple):
    """Seconds of what a rank does at a hop: its tiles, forward, and backward the first and the others; and what passes
    meanwhile: the next hop's chunks, gradients that are finished, and those that go on."""

    forward: float
    first: float
    others: float
    chunks: float
    finished: float
    onward: float


class _Way:
    """A rank's way out, and the same one in: messages one after the other."""

    def __init__(self, hardware: Hardware) -> None:
        self.hardware, self.free = hardware, 0.0

    def carry(self, posted: float, seconds: float) -> float:
        """When the last of messages is there that take so long to pass; 0 if there are none."""
        if not seconds:
            return 0.0
        self.free = max(posted, self.free) + seconds
        return self.free + self.hardware.latency_seconds
