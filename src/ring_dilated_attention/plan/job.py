"""Job: an attention call over shards, as far as integers tell. No torch."""

from typing import NamedTuple

from ..pattern import DilatedPattern
from .sharding import Shard, shard_length


class Job(NamedTuple):
    """What the plans of all ranks of a call share.

    shards: the spans of every rank (`sharding.make_shards`).
    num_heads, num_kv_heads: query heads and key/value heads of the layer.
    documents: global borders (0, ..., n) of packed documents; None is one document.
    held: the query heads that the tensors hold, if not all.
    """

    pattern: DilatedPattern
    shards: tuple[Shard, ...]
    num_heads: int
    num_kv_heads: int
    documents: tuple[int, ...] | None = None
    held: range | None = None

    @property
    def num_ranks(self) -> int:
        return len(self.shards)

    @property
    def seq_len(self) -> int:
        return sum(map(shard_length, self.shards))

    @property
    def borders(self) -> tuple[int, ...]:
        """The borders of its documents, also where there is one."""
        return (0, self.seq_len) if self.documents is None else self.documents

    @property
    def held_heads(self) -> range:
        """The query heads that the tensors hold."""
        return range(self.num_heads) if self.held is None else self.held

    @property
    def num_kv_held(self) -> int:
        """The key/value heads that the tensors hold."""
        return len(self.held_heads) * self.num_kv_heads // self.num_heads
