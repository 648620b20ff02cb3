"""ShardedCall: the pattern, shards and heads of an attention call. Pure integers, no torch."""

from typing import Any, NamedTuple

from ..pattern import DilatedPattern
from .sharding import Shard, shard_length


class ShardedCall(NamedTuple):
    """The facts of a call that are the same on every rank.

    These facts and a rank's number determine the rank's plan.
    """

    pattern: DilatedPattern
    shards: tuple[Shard, ...]  # the shard of every rank (`sharding.make_shards`)
    num_heads: int  # query heads of the layer
    num_kv_heads: int  # key/value heads of the layer
    # the borders (0, ..., n) of packed documents in the whole sequence; None for one document
    documents: tuple[int, ...] | None = None
    held: range | None = None  # the query heads of the layer that the tensors hold; None for all

    @property
    def num_ranks(self) -> int:
        return len(self.shards)

    @property
    def seq_len(self) -> int:
        return self.documents[-1] if self.documents else sum(map(shard_length, self.shards))

    @property
    def borders(self) -> tuple[int, ...]:
        """The borders of the documents, (0, ..., n). For a single document they are (0, n)."""
        return (0, self.seq_len) if self.documents is None else self.documents

    @property
    def held_heads(self) -> range:
        return range(self.num_heads) if self.held is None else self.held

    @property
    def num_kv_held(self) -> int:
        return len(self.held_heads) * self.num_kv_heads // self.num_heads


def held_heads(num_held: int, ratio: int, heads_held: Any, num_heads: Any) -> range:
    """Which query heads of a layer the tensors of a call hold (tensor parallelism): all heads if heads_held is None.

    num_held: the number of query heads in the tensors. ratio: how many query heads share a key/value head.

    Raises:
        ValueError: unless heads_held is a range of num_held consecutive heads within range(num_heads). Query heads
            that share a key/value head must all be in the range, or all outside it.
    """
    if heads_held is None and num_heads is None:
        return range(num_held)
    if (
        not isinstance(heads_held, range)
        or isinstance(num_heads, bool)
        or not isinstance(num_heads, int)
    ):
        raise ValueError(
            f"heads_held={heads_held!r} and num_heads={num_heads!r}: give both or none, for example "
            "heads_held=range(3, 6) and num_heads=6."
        )
    if heads_held.step != 1 or not 0 <= heads_held.start < heads_held.stop <= num_heads:
        raise ValueError(
            f"heads_held={heads_held} is not a range of consecutive heads within range({num_heads})."
        )
    # Subtract the bounds, because torch.compile cannot take `len` of a range with variable bounds.
    if heads_held.stop - heads_held.start != num_held:
        raise ValueError(
            f"heads_held={heads_held} has {len(heads_held)} heads, but query has {num_held}."
        )
    if num_heads % ratio or heads_held.start % ratio or num_held % ratio:
        raise ValueError(
            f"heads_held={heads_held} of num_heads={num_heads} cut through a group of {ratio} query heads that share a "
            "key/value head. Give whole groups."
        )
    return heads_held
