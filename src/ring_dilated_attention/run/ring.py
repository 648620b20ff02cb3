"""Ring attention over a plan (arXiv 2310.01889), with dilation before sending (LongNet). One device is the ring of one.

A rank holds its shards, two K‖V buffers and, in backward, two dK‖dV buffers; nothing else that it receives is kept. An
own chunk that is sent later than at the first hop is packed once more, for as long as that takes.
"""

from collections.abc import Sequence
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from ..plan.plan import Hop, Message, Plan
from ..ranks.link import Link, Pending
from .tiles import (
    ChunkKeys,
    MergedPartial,
    OwnRows,
    accumulator_dtype,
    add_home,
    backward_tile,
    forward_tile,
    local_gradients,
    pack,
    pack_chunk,
    query_side,
)


def forward(
    kernel: ModuleType, plan: Plan, scale: float, query: Tensor, key: Tensor, value: Tensor, link: Link | None
) -> tuple[Tensor, Tensor]:
    """out (B, N, H, D) and lse (B, N, H) of this rank's queries, given its own rows of query, key and value."""
    ring = RingCall(plan, query, link, "forward")
    chunks = ring.chunk_buffers(key, value)
    moving = ring.start(0, chunks[0], chunks[1])
    merged = MergedPartial(query, plan.query_covered)
    for tile in plan.local:  # while the first chunks fly
        forward_tile(kernel, tile, scale, query, OwnRows(key, value, chunks[0]), merged)
    for s, hop in enumerate(plan.hops):
        moving.wait()
        chunk, free = chunks[(s + 1) % 2], chunks[s % 2]
        moving = ring.start(s + 1, chunk, free)
        for tile in hop.tiles:
            forward_tile(kernel, tile, scale, query, chunk, merged)
    return merged.result()


def backward(
    kernel: ModuleType,
    plan: Plan,
    scale: float,
    dout: Tensor,
    dlse: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    link: Link | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv of this rank's rows. `out` and `lse` are the merged ones, so every tile's p is the global weight.

    The chunks make their way again. The gradient of a chunk starts where a run of ranks that meet it does, follows one
    hop behind and goes home at the end of the run; the own part is added at home.
    """
    ring = RingCall(plan, query, link, "backward")
    chunks = ring.chunk_buffers(key, value)
    moving = ring.start(0, chunks[0], chunks[1])
    side = query_side(kernel, dout, dlse, query, out, lse)
    dq, own = local_gradients(kernel, plan, scale, side, OwnRows(key, value, chunks[0]))  # while the first chunks fly
    grads = ring.gradient_buffers()
    arriving = ring.nothing()
    for s, hop in enumerate(plan.hops):
        moving.wait()
        chunk, free = chunks[(s + 1) % 2], chunks[s % 2]
        moving = ring.start(s + 1, chunk, free)
        grad, other = grads[s % 2], grads[(s + 1) % 2]
        sums = ChunkKeys(grad, query.shape[0], query.shape[3])
        ring.start_sums(hop, grad)
        for tile in hop.tiles:
            backward_tile(kernel, tile, scale, side, chunk, dq, sums, before_keys=arriving.wait)
        arriving.wait()  # what earlier ranks added to the gradients of the chunks at hand
        ring.wait_for_sent_gradients()  # `other` is free from here on
        finished, onward = ring.gradients(hop)
        home = ring.move_gradients(s, finished, grad, other)
        for message in finished.receives:
            home.wait()
            add_home(plan, message, other, own, at=message.offset)
        arriving = ring.move_gradients(s, onward, grad, other)
    ring.wait_for_sent_gradients()
    return dq.result(), own.dk.result(), own.dv.result()


class Moves(NamedTuple):
    """Messages of one batch."""

    sends: Sequence[Message]
    receives: Sequence[Message]


class RingCall:
    """The buffers and messages of one call. Sizes in the plan are in units of B * D elements."""

    def __init__(self, plan: Plan, query: Tensor, link: Link | None, stage: str) -> None:
        self.plan, self.link, self.stage = plan, link, stage
        self.like, self.batch, self.head_dim = query, query.shape[0], query.shape[3]
        self.leaving: list[Pending] = []  # gradients

    def chunk_buffers(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Two flat K‖V buffers; this rank's own chunks, dilated, are in the first."""
        self.own = key, value
        chunks = pack(self.plan, key, value)
        return chunks, torch.empty_like(chunks)

    def gradient_buffers(self) -> tuple[Tensor, Tensor]:
        """Two flat dK‖dV buffers in the accumulator's dtype."""
        size = self.plan.chunk_size * self.batch * self.head_dim
        first = torch.empty(size, dtype=accumulator_dtype(self.like.dtype), device=self.like.device)
        return first, torch.empty_like(first)

    def start_sums(self, hop: Hop, grad: Tensor) -> None:
        """Gradients of the chunks that nobody met at the hop before start from zero."""
        for part, _ in self._cut(grad, hop.grad_starts):
            part.zero_()

    def start(self, s: int, chunk: Tensor, free: Tensor) -> Pending:
        """Start the exchange of hop s (from 0): send chunks on from `chunk`, receive others into `free`."""
        if s >= len(self.plan.hops):
            return self.nothing()
        hop = self.plan.hops[s]
        if not hop.sends and not hop.receives:
            return self.nothing()
        assert self.link is not None
        moment = f"{self.stage}, hop {s + 1}, keys and values"
        sends = self._cut(chunk, hop.sends)
        if s:  # the buffer holds others' chunks by now: an own one that is sent late is dilated again
            sends = [(pack_chunk(self.plan, m, *self.own) if m.owner == self.plan.rank else x, m) for x, m in sends]
        return self.link.carry(sends, self._cut(free, hop.receives), moment)

    def gradients(self, hop: Hop) -> tuple[Moves, Moves]:
        """Of a hop: finished gradients, which go to the owners of their chunks, and those that go on to the next hop.

        The first come in where the second will, so they are two batches. All ranks have them in this order, and each
        holds both sides of its messages: no batch waits for one that stands behind it in another rank's stream.
        """
        sends, receives = hop.grad_sends, hop.grad_receives
        return (
            Moves([m for m in sends if m.peer == m.owner], [m for m in receives if m.owner == self.plan.rank]),
            Moves([m for m in sends if m.peer != m.owner], [m for m in receives if m.owner != self.plan.rank]),
        )

    def move_gradients(self, s: int, moves: Moves, grad: Tensor, other: Tensor) -> Pending:
        """Send gradients from one buffer and receive others into the other one. To be awaited are those that come."""
        if not moves.sends and not moves.receives:
            return self.nothing()
        assert self.link is not None
        moment = f"{self.stage}, hop {s + 1}, gradients"
        sent, received = self.link.carry_apart(self._cut(grad, moves.sends), self._cut(other, moves.receives), moment)
        self.leaving.append(sent)
        return received

    def wait_for_sent_gradients(self) -> None:
        while self.leaving:
            self.leaving.pop(0).wait()

    def nothing(self) -> Pending:
        return Pending(self.link, self.stage)

    def _cut(self, buffer: Tensor, messages: Sequence[Message]) -> list[tuple[Tensor, Message]]:
        unit = self.batch * self.head_dim
        return [(buffer[m.offset * unit : (m.offset + m.size) * unit], m) for m in messages]
