"""The ring's plan in one round: every chunk goes straight to every rank that meets it, all at once.

As many bytes as the ring, waiting once instead of g - 1 times; but a rank holds all the chunks that it meets, and their
gradients (or, after these, its own chunks' from everybody). The right choice where chunks are small.
"""

from types import ModuleType

import torch
from torch import Tensor

from ..plan.plan import Hop, Message, Plan, Tile
from ..plan.rows import Block
from ..ranks.link import Link
from .tiles import (
    ChunkKeys,
    MergedPartial,
    OwnKeys,
    OwnRows,
    accumulator_dtype,
    add_home,
    backward_tile,
    forward_tile,
    local_gradients,
    pack,
    query_side,
)


def forward(
    kernel: ModuleType, plan: Plan, scale: float, query: Tensor, key: Tensor, value: Tensor, link: Link | None
) -> tuple[Tensor, Tensor]:
    """As `ring.forward`."""
    routes = _Routes(plan, query.shape[0] * query.shape[3])
    merged = MergedPartial(query, plan.query_covered)
    chunks = routes.gather(key, value, link, "forward")
    for tile in plan.local:
        forward_tile(kernel, tile, scale, query, OwnRows(key, value, None), merged)
    for hop in plan.hops:
        for tile in hop.tiles:
            forward_tile(kernel, routes.rebased(hop, tile), scale, query, chunks, merged)
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
    """As `ring.backward`: the chunks again, then their gradients straight home."""
    routes = _Routes(plan, query.shape[0] * query.shape[3])
    chunks = routes.gather(key, value, link, "backward")
    side = query_side(kernel, dout, dlse, query, out, lse)
    dq, own = local_gradients(kernel, plan, scale, side, OwnRows(key, value, None))
    grads = torch.zeros_like(chunks, dtype=accumulator_dtype(chunks.dtype))
    sums = ChunkKeys(grads, query.shape[0], query.shape[3])
    for hop in plan.hops:
        for tile in hop.tiles:
            backward_tile(kernel, routes.rebased(hop, tile), scale, side, chunks, dq, sums)
    del chunks  # before the gradients of the own ones come
    routes.bring_home(grads, link, own)
    return dq.result(), own.dk.result(), own.dv.result()


class _Routes:
    """Which rank gets what, and where a received chunk lies. Buffers are in the order of owners, then of hops."""

    def __init__(self, plan: Plan, unit: int) -> None:
        self.plan, self.unit = plan, unit  # elements per unit of the plan's sizes
        self.receives = sorted(((m.owner, m) for hop in plan.hops for m in hop.receives), key=lambda entry: entry[0])
        self.targets = sorted(((m.peer, m) for hop in plan.hops for m in hop.targets), key=lambda entry: entry[0])
        self.place: dict[tuple[int, int], int] = {}
        self.size = 0
        for owner, message in self.receives:
            self.place[owner, message.offset] = self.size
            self.size += message.size

    def gather(self, key: Tensor, value: Tensor, link: Link | None, stage: str) -> Tensor:
        """All chunks that this rank meets, in one flat buffer."""
        own = pack(self.plan, key, value)
        if link is None:
            return own
        chunks = own.new_empty(self.size * self.unit)
        sends = [(own[m.offset * self.unit : (m.offset + m.size) * self.unit], peer) for peer, m in self.targets]
        link.exchange(sends, self._slices(chunks, self.receives), f"{stage}, keys and values").wait()
        return chunks

    def bring_home(self, grads: Tensor, link: Link | None, own: OwnKeys) -> None:
        """Send the gradients of others' chunks to their owners, and add those of the own chunks."""
        if link is None:
            return
        returned = grads.new_empty(sum(m.size for _, m in self.targets) * self.unit)
        sends, receives = self._slices(grads, self.receives), self._slices(returned, self.targets)
        link.exchange(sends, receives, "backward, gradients").wait()
        start = 0
        for _, message in self.targets:
            add_home(self.plan, message, returned, own, at=start)
            start += message.size

    def _slices(self, buffer: Tensor, messages: list[tuple[int, Message]]) -> list[tuple[Tensor, int]]:
        """A buffer of messages, one after the other, cut into them; each with its peer."""
        sizes = [message.size * self.unit for _, message in messages]
        return list(zip(buffer.split(sizes), (peer for peer, _ in messages), strict=True)) if messages else []

    def rebased(self, hop: Hop, tile: Tile) -> Tile:
        """The tile with its keys where they lie in the gathered buffer."""
        assert isinstance(tile.key, Block)
        offset = tile.key.offset
        message = next(m for m in hop.receives if m.offset <= offset < m.offset + m.size)
        place = self.place[message.owner, message.offset]
        return tile._replace(key=tile.key._replace(offset=offset - message.offset + place))
