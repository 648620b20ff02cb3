"""How ranks exchange heads for positions (DeepSpeed-Ulysses, arXiv 2309.14509). Pure integers, no torch.

Before the attention each rank gets all positions of its group, but only its share of the heads. Afterwards it gets its
own positions of all heads again.
"""

from collections.abc import Sequence
from typing import NamedTuple

from .sharding import Shard, Span, first_rows, joined, shard_length


class Dealing(NamedTuple):
    """How one rank deals heads within its group."""

    place: int  # this rank's place in the group
    lengths: tuple[int, ...]  # the number of positions of every rank of the group
    # (place of the owner, local row at which the run begins there, number of rows) of each run of consecutive positions
    runs: tuple[tuple[int, int, int], ...]

    @property
    def size(self) -> int:
        return len(self.lengths)


def deal(shards: Sequence[Shard], place: int) -> tuple[Dealing, Shard]:
    """The dealing of the rank at `place`, given the shards of its group; and one shard of all the group's positions."""
    spans: list[
        tuple[Span, int, int]
    ] = []  # each with the place of its owner, and its first row there
    for owner, shard in enumerate(shards):
        for span, row in zip(shard, first_rows(shard), strict=False):
            spans.append((span, owner, row))
    spans.sort()
    runs = tuple((owner, row, span.stop - span.start) for span, owner, row in spans)
    dealing = Dealing(place, tuple(map(shard_length, shards)), runs)
    return dealing, joined(span for span, _, _ in spans)


def check_dealing(num_kv_heads: int, world_size: int) -> None:
    """Raise ValueError unless the key/value heads divide among `world_size` ranks."""
    if num_kv_heads % world_size:
        raise ValueError(
            f"all_to_all deals heads to ranks, and {num_kv_heads} key/value heads do not divide among {world_size} "
            f"ranks: {num_kv_heads} mod {world_size} = {num_kv_heads % world_size}. exchange='ring' takes any number."
        )
