"""How long a ring takes where all ranks go in lockstep: one rank's way tells it, hop by hop. Numbers only, no torch.

A rank's ways carry what it sends, at the moments of the one that sends to it, under the rules of `clock.py` and in the
order of `program.py`.
"""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from typing import NamedTuple

from .clock import Hardware
from .memory import Sizes

SAME = 1e-13  # of a moment: what sums of floats may be off


class Flow(NamedTuple):
    """What passes of a branch from rank to rank.

    members: ranks of its rings, the fewest first. rows: of all key/value heads in one chunk, K and V.
    tiles: pairs of each kernel call of a hop.
    """

    members: tuple[int, ...]
    rows: int
    tiles: tuple[int, ...]

    @property
    def group(self) -> int:
        return self.members[-1]

    @property
    def hop_pairs(self) -> int:
        return sum(self.tiles)


def stage_seconds(num_pairs: int, products: int, sizes: Sizes, hardware: Hardware, calls: int) -> float:
    """Of so many pairs, by the forward's 2 matrix products or the backward's 5."""
    flops = products * 2 * sizes.head_dim * sizes.batch * num_pairs
    return hardware.compute_seconds(flops, backward=products == 5, calls=calls)


def work_seconds(num_pairs: int, sizes: Sizes, hardware: Hardware, calls: int = 0) -> float:
    """Of both stages. calls: of each."""
    return sum(stage_seconds(num_pairs, products, sizes, hardware, calls) for products in (2, 5))


class Pace(NamedTuple):
    """One rank's way through all hops, in step with all others, with what is most, or least, at each of them.

    home_pairs, home_calls: of its own rows.
    """

    flows: list[Flow]
    home_pairs: int
    home_calls: int
    is_causal: bool
    num_ranks: int
    sizes: Sizes
    hardware: Hardware

    def seconds(self) -> tuple[float, float]:
        """Of both stages."""
        ends = []
        for products, step in ((2, self._forward), (5, self._backward)):
            moments = self._begin(products)
            for hop, times in self._hops():
                moments = _repeated(partial(step, hop), moments, times)
            ends.append(max(moments.now, moments.left))
        return ends[0], ends[1]

    def _begin(self, products: int) -> "_Moments":
        """Of a stage: when own tiles are done, and when the first chunks are there."""
        start = self.hardware.handshake if self.num_ranks > 1 else 0.0
        chunks = sum(flow.rows for flow in self.flows) * self.sizes.unit * self.sizes.itemsize
        arrives, free = self._carry(0.0, start, chunks / self.hardware.bytes_per_second)
        return _Moments(start + self._seconds(self.home_pairs, products, self.home_calls), free, arrives)

    def _forward(self, hop: "_Hop", m: "_Moments") -> "_Moments":
        now = max(m.now, m.arrives)
        arrives, free = self._carry(m.free, now, hop.chunks)
        return m._replace(now=now + hop.forward, free=free, arrives=arrives)

    def _backward(self, hop: "_Hop", m: "_Moments") -> "_Moments":
        """As `program.py` orders it: gradients leave one hop behind the chunks, finished ones first."""
        now = max(m.now, m.arrives)
        arrives, free = self._carry(m.free, now, hop.chunks)
        now = max(now + hop.first, m.onward) + hop.others
        now, left = max(now, m.left), 0.0
        if hop.finished:
            now, free = self._carry(free, now, hop.finished)
            left = now
        onward, free = self._carry(free, now, hop.onward)
        return _Moments(now, free, arrives, onward, max(left, onward))

    def _carry(self, free: float, posted: float, seconds: float) -> tuple[float, float]:
        """When the last of messages is there that take so long to pass, 0 if there are none; and when the way, which
        was free from `free` on, is free again."""
        if not seconds:
            return 0.0, free
        free = max(posted, free) + seconds
        return free + self.hardware.latency_seconds, free

    def _hops(self) -> Iterator[tuple["_Hop", int]]:
        """And how often, one after the other. They change only where a ring of a branch ends."""
        ends = {end for flow in self.flows for size in flow.members for end in (size - 2, size - 1)}
        for before, last in pairwise(sorted({0, *ends})):
            yield self._hop(last), last - before

    def _hop(self, number: int) -> "_Hop":
        here = [flow for flow in self.flows if flow.group > number]
        onward = [flow for flow in here if flow.group > number + 1]
        # Causal, some of every chunk's end at any hop.
        finished = [flow for flow in here if self.is_causal or number + 1 in flow.members]
        chunk, gradient = (
            self.sizes.unit * size / self.hardware.bytes_per_second
            for size in (self.sizes.itemsize, self.sizes.sum_itemsize)
        )
        work, calls = sum(flow.hop_pairs for flow in here), sum(len(flow.tiles) for flow in here)
        first = here[0].tiles[0]
        return _Hop(
            forward=self._seconds(work, 2, calls),
            first=self._seconds(first, 5, 1),
            others=self._seconds(work - first, 5, calls - 1),
            chunks=sum(flow.rows for flow in onward) * chunk,
            finished=sum(flow.rows for flow in finished) * gradient,
            onward=sum(flow.rows for flow in onward) * gradient,
        )

    def _seconds(self, num_pairs: int, products: int, calls: int) -> float:
        return stage_seconds(num_pairs, products, self.sizes, self.hardware, calls)


class _Hop(NamedTuple):
    """Seconds of what a rank does at a hop: its tiles, forward, and backward the first and the others; and what passes
    meanwhile: the next hop's chunks, gradients that are finished, and those that go on."""

    forward: float
    first: float
    others: float
    chunks: float
    finished: float
    onward: float


class _Moments(NamedTuple):
    """now: the rank is ready for the next hop. free: its way is. arrives: chunks of the next hop are there; onward: so
    are gradients. left: those that it sent have left."""

    now: float
    free: float
    arrives: float
    onward: float = 0.0
    left: float = 0.0


def _repeated(step: Callable[[_Moments], _Moments], moments: _Moments, times: int) -> _Moments:
    """As if `step` was taken so often. Moments are maxima of sums: once all have moved on by as much, they go on so."""
    for remaining in range(times - 1, -1, -1):
        before, moments = moments, step(moments)
        moved = moments.now - before.now
        pairs = [(a, b) for a, b in zip(before, moments, strict=True) if a or b]
        if all(abs(b - a - moved) <= SAME * b for a, b in pairs):
            return _Moments(*(moment + moved * remaining if moment else 0.0 for moment in moments))
    return moments
