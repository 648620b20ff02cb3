"""Runs one rank of a job of any size, with the plan that this rank would have in the job. When the rank receives keys
and values, an `OtherRanks` object makes them in place of the other ranks.

A chunk is the keys and values that one rank sends to others, packed into one flat tensor.

B batch, G key/value heads, M rows of one head, D head dim.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..pattern import is_integer
from ..plan.exchange import Choice
from ..plan.plan import Message
from ..plan.planner import offsets_of, planner_of
from ..plan.rows import Block, Rows
from ..plan.sharded_call import ShardedCall
from ..plan.sharding import ShardSpec
from ..plan.step import Sizes
from ..ranks.arguments import cut_of
from ..ranks.ranks import Links, Ranks
from ..run.link_contract import Messages
from ..run.views import block_views
from .all_ranks import Simulated


class GlobalChunk(NamedTuple):
    """The chunk that a message carries: keys and values of the rank `owner`, or their gradients.

    branch, origin, lane: the ring to which the chunk belongs (`plan/rings.py`).
    size: the number of elements of the chunk if the batch and the head dim are 1.
    rows: for each block of the chunk, the global positions and heads of its rows, and the block itself.
    """

    owner: int
    branch: int
    origin: int
    lane: int
    size: int
    rows: tuple[tuple[Rows, Block], ...]


def chunk_finder(sharded_call: ShardedCall, rank: int) -> Callable[[Message], GlobalChunk]:
    """A function that tells which chunk a message of the rank's plan carries."""
    planner = planner_of(sharded_call)
    _, rings = planner.local_and_rings(rank)
    ring_at = dict(zip(offsets_of(rings), rings, strict=False))

    def find(message: Message) -> GlobalChunk:
        ring = ring_at[message.offset]
        rows = tuple(
            (rows._replace(first=rows.first + piece.start - piece.row), block)
            for piece, rows, block in planner.rows_of(ring, ring.place_of(message.owner))
        )
        return GlobalChunk(message.owner, ring.branch, ring.origin, ring.lane, message.size, rows)

    return find


class OtherRanks:
    """Stands in for all ranks except the running rank. A subclass defines the keys and values that these ranks send.

    These ranks add nothing to the gradients of the running rank's keys and values, unless the subclass overrides
    `gradient_home`.
    """

    def keys_and_values(self, positions_GM: Tensor, heads_G1: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values, (B, G, M, D) each, for the given global positions and key/value heads."""
        raise NotImplementedError

    def take_gradient(self, chunk: GlobalChunk, gradient: Tensor) -> None:
        """Called when the running rank sends its part of the gradient of another rank's chunk. A subclass may override
        this method to look at the gradient.

        gradient: a flat tensor, laid out by `chunk.rows`. To keep the tensor, copy it, because its memory is reused.
        """

    def gradient_home(self, chunk: GlobalChunk) -> Tensor | None:
        """The sum of the other ranks' gradients of the running rank's `chunk`, or None for zero.

        The sum is a flat tensor, laid out by `chunk.rows`.
        """
        return None


def one_rank(
    rank: int,
    num_ranks: int,
    others: OtherRanks,
    *,
    sharding: str = "contiguous",
    align: int = 1,
    lengths: Sequence[int] | None = None,
) -> Simulated:
    """A context that runs one rank of a larger job, on this rank's rows. Without `lengths` every rank owns equally many
    positions.

    Args:
        others: makes the keys and values that the other ranks send, and receives the gradients that this rank sends.
        sharding, align, lengths: how the sequence is divided among the ranks, as in `ContextParallel`.

    Raises:
        ValueError: for a rank outside 0 to num_ranks - 1, for `others` that is not an `OtherRanks`, and for arguments
            that `all_ranks` refuses.
    """
    cut = cut_of(num_ranks, sharding, align, lengths)
    if not is_integer(rank) or not 0 <= rank < num_ranks:
        raise ValueError(f"rank must be an integer from 0 to {num_ranks - 1}, got {rank!r}.")
    if not isinstance(others, OtherRanks):
        raise ValueError(
            f"others must be an OtherRanks, which makes what the other ranks send; got {others!r}."
        )
    return Simulated(OneRank(rank, others, cut))


class Delivered:
    """Messages that have already been delivered, so that there is nothing to wait for."""

    def wait(self) -> None:
        pass


class OneRankLink:
    """The link of the running rank. A receive is filled immediately with what `others` makes. Gradients that the rank
    sends are passed to `others`."""

    def __init__(
        self, rank: int, others: OtherRanks, chunk_of: Callable[[Message], GlobalChunk]
    ) -> None:
        self.rank = rank
        self.others = others
        self.chunk_of = chunk_of

    def carry(self, sends: Messages, receives: Messages, moment: str) -> Delivered:
        for x, message in sends:
            if message.is_gradient:
                self.others.take_gradient(self.chunk_of(message), x)
        for x, message in receives:
            if not message.is_gradient:
                self._make_chunk(x, self.chunk_of(message))
            else:
                # If the chunk is the running rank's own, receive the sum of the other ranks' gradients. If it is
                # another rank's chunk, receive zeros, to which the running rank adds its gradient.
                is_home = message.owner == self.rank
                gradient = self.others.gradient_home(self.chunk_of(message)) if is_home else None
                x.zero_() if gradient is None else x.copy_(gradient)
        return Delivered()

    def carry_apart(
        self, sends: Messages, receives: Messages, moment: str
    ) -> tuple[Delivered, Delivered]:
        return self.carry(sends, receives, moment), Delivered()

    def _make_chunk(self, buffer: Tensor, chunk: GlobalChunk) -> None:
        for rows, block in chunk.rows:
            made = self.others.keys_and_values(*grid(rows))
            batch = made[0].shape[0]
            head_dim = made[0].shape[-1]
            if batch * head_dim * chunk.size != buffer.numel():
                raise ValueError(
                    f"keys_and_values made keys of shape {tuple(made[0].shape)} for {block.num_heads} heads and "
                    f"{block.num_rows} rows. Their batch * head_dim must be {buffer.numel() // chunk.size}, as it is "
                    "for this rank's own keys."
                )
            for target, x in zip(block_views(buffer, block, batch, head_dim), made, strict=True):
                target.copy_(x)


def grid(rows: Rows) -> tuple[Tensor, Tensor]:
    """The positions (G, M) and the key/value heads (G, 1) of some rows."""
    heads = torch.arange(rows.heads.start, rows.heads.stop, rows.heads.step).unsqueeze(1)
    first = rows.first + torch.arange(len(rows.heads)).unsqueeze(1) * rows.shift
    return first + torch.arange(rows.num_rows) * rows.step, heads


class OneRank(Ranks):
    """Runs one rank of a larger job, on this rank's rows. Every rank is assumed to have the same number of rows,
    unless the context was made with `lengths`."""

    name = "simulated"

    def __init__(self, rank: int, others: OtherRanks, cut: ShardSpec) -> None:
        super().__init__(cut)
        self.rank = rank
        self.others = others

    def agree(
        self, length: int, fields: dict[str, object], failure: str | None = None
    ) -> tuple[int, ...]:
        super().agree(length, fields, failure)
        lengths = (length,) * self.cut.num_shards if self.cut.lengths is None else self.cut.lengths
        if lengths[self.rank] != length:
            raise ValueError(
                f"rank {self.rank} has {length} positions, but lengths gives it {lengths[self.rank]}."
            )
        return lengths

    def check_all_here(self, method: str) -> None:
        raise ValueError(
            f"{method} needs the tensors of all ranks, and only rank {self.rank} of {self.cut.num_shards} is run. "
            "Make this rank's rows yourself, at the positions that `positions` gives, or run simulate.all_ranks."
        )

    def choose(self, sharded_call: ShardedCall, sizes: Sizes) -> Choice:
        return Choice("ring", "one rank runs, and the others are imitated")

    def links(self, exchange: str, sharded_call: ShardedCall) -> Links:
        return OneRankLink(self.rank, self.others, chunk_finder(sharded_call, self.rank)), None
