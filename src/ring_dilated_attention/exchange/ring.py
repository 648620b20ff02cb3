"""Ring attention over a plan (arXiv 2310.01889), with dilation before sending (LongNet). One device is the ring of one.

A rank holds its shards, two K‖V buffers and, in backward, two dK‖dV buffers; nothing else that it receives is kept.
"""

from collections.abc import Callable, Sequence
from types import ModuleType

import torch
from torch import Tensor

from ..plan import Hop, Message, Plan
from ..tiles import (
    ChunkKeys,
    MergedPartial,
    accumulator_dtype,
    add_home,
    backward_tile,
    forward_tile,
    local_gradients,
    pack,
    query_side,
)
from .comm import Link, Pending


def forward(
    kernel: ModuleType, plan: Plan, scale: float, query: Tensor, key: Tensor, value: Tensor, link: Link | None
) -> tuple[Tensor, Tensor]:
    """out (B, N, H, D) and lse (B, N, H) of this rank's queries, given its own rows of query, key and value."""
    ring = RingCall(plan, query, link, "forward")
    chunks = ring.chunk_buffers(key, value)
    moving = ring.start(0, chunks[0], chunks[1])
    merged = MergedPartial(query, plan.query_covered)
    for tile in plan.local:  # while the first chunks fly
        forward_tile(kernel, tile, scale, query, (key, value), merged)
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

    The chunks make their way again. The gradient of a chunk starts at the first rank that met it and follows one hop
    behind; the own part is added at home.
    """
    ring = RingCall(plan, query, link, "backward")
    chunks = ring.chunk_buffers(key, value)
    moving = ring.start(0, chunks[0], chunks[1])
    side = query_side(kernel, dout, dlse, query, out, lse)
    dq, own = local_gradients(kernel, plan, scale, side, key, value)  # while the first chunks fly
    grads = ring.gradient_buffers()
    leaving, arriving = ring.nothing(), list[Pending]()

    def earlier_sums() -> None:
        """Wait for what earlier ranks added to the gradients of the chunks at hand."""
        for pending in arriving:
            pending.wait()

    for s, hop in enumerate(plan.hops):
        moving.wait()
        chunk, free = chunks[(s + 1) % 2], chunks[s % 2]
        moving = ring.start(s + 1, chunk, free)
        grad, other = grads[s % 2], grads[(s + 1) % 2]
        sums = ChunkKeys(grad, query.shape[0], query.shape[3])
        for tile in hop.tiles:
            backward_tile(kernel, tile, scale, side, chunk, dq, sums, before_keys=earlier_sums)
        earlier_sums()
        leaving.wait()  # `other` is free from here on
        leaving = ring.send_gradients(s, hop, grad)
        arriving = []
        for message in hop.grad_receives:
            incoming = ring.receive_gradient(s, message, other)
            if message.owner == plan.rank:
                incoming.wait()
                add_home(plan, message, other, own, at=message.offset)
            else:
                arriving.append(incoming)
    leaving.wait()
    return dq.result(), own.dk.result(), own.dv.result()


class RingCall:
    """The buffers and messages of one call. Sizes in the plan are in units of B * D elements."""

    def __init__(self, plan: Plan, query: Tensor, link: Link | None, stage: str) -> None:
        self.plan, self.link, self.stage = plan, link, stage
        self.like, self.batch, self.head_dim = query, query.shape[0], query.shape[3]

    def chunk_buffers(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Two flat K‖V buffers; this rank's own chunks, dilated, are in the first."""
        own = pack(self.plan, key, value)
        return own, torch.empty_like(own)

    def gradient_buffers(self) -> tuple[Tensor, Tensor]:
        """Two flat dK‖dV buffers in the accumulator's dtype. In the first, gradients of chunks start from zero."""
        dtype = accumulator_dtype(self.like.dtype)
        return self._buffer(torch.zeros, dtype), self._buffer(torch.empty, dtype)

    def start(self, s: int, chunk: Tensor, free: Tensor) -> Pending:
        """Start the exchange of hop s (from 0): send chunks on from `chunk`, receive others into `free`."""
        if s >= len(self.plan.hops):
            return self.nothing()
        hop = self.plan.hops[s]
        return self._exchange(hop.sends, chunk, hop.receives, free, f"{self.stage}, hop {s + 1}, keys and values")

    def send_gradients(self, s: int, hop: Hop, grad: Tensor) -> Pending:
        return self._exchange(hop.grad_sends, grad, (), grad, f"{self.stage}, hop {s + 1}, gradients")

    def receive_gradient(self, s: int, message: Message, into: Tensor) -> Pending:
        return self._exchange((), into, (message,), into, f"{self.stage}, hop {s + 1}, gradients")

    def nothing(self) -> Pending:
        return Pending(self.link, self.stage)

    def _buffer(self, make: Callable[..., Tensor], dtype: torch.dtype) -> Tensor:
        return make(self.plan.chunk_size * self.batch * self.head_dim, dtype=dtype, device=self.like.device)

    def _exchange(
        self, sends: Sequence[Message], source: Tensor, receives: Sequence[Message], into: Tensor, moment: str
    ) -> Pending:
        if not sends and not receives:
            return self.nothing()
        assert self.link is not None
        unit = self.batch * self.head_dim

        def cut(buffer: Tensor, messages: Sequence[Message]) -> list[tuple[Tensor, Message]]:
            return [(buffer[m.offset * unit : (m.offset + m.size) * unit], m) for m in messages]

        return self.link.carry(cut(source, sends), cut(into, receives), moment)
