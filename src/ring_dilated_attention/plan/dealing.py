"""Heads for positions (DeepSpeed-Ulysses, arXiv 2309.14509). Pure integers, no torch.

Before the attention every rank of a group gets all of the group's positions of its share of the heads, in the order of
the sequence, and afterwards its own positions of all heads again.
"""

from collections.abc import Sequence
from typing import NamedTuple

from .sharding import Shard, first_rows, joined, shard_length


class Dealing(NamedTuple):
    """How one rank deals.

    place: of this rank in the group that deals.
    lengths: the number of positions of every rank of the group.
    runs: (place, first row, number of rows) of runs of the ranks' rows, in the order of the sequence.
    """

    place: int
    lengths: tuple[int, ...]
    runs: tuple[tuple[int, int, int], ...]

    @property
    def size(self) -> int:
        return len(self.lengths)


def deal(shards: Sequence[Shard], place: int) -> tuple[Dealing, Shard]:
    """How the rank at `place` deals with those that hold these shards, and the shard of all their rows in order."""
    found = sorted(
        (span, k, row) for k, shard in enumerate(shards) for span, row in zip(shard, first_rows(shard), strict=False)
    )
    runs = tuple((k, row, span.stop - span.start) for span, k, row in found)
    return Dealing(place, tuple(map(shard_length, shards)), runs), joined(span for span, _, _ in found)


def check_dealing(num_kv_heads: int, world_size: int) -> None:
    """Raise ValueError unless heads can be dealt to so many ranks."""
    if num_kv_heads % world_size:
        raise ValueError(
            f"all_to_all deals heads to ranks, and {num_kv_heads} key/value heads do not divide among {world_size} "
            f"ranks: {num_kv_heads} mod {world_size} = {num_kv_heads % world_size}. The exchange ring "
            "takes any number."
        )
