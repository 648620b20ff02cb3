"""How ranks deal heads: they exchange heads for positions (DeepSpeed-Ulysses, arXiv 2309.14509). No torch.

Before the attention each rank has all heads of its own positions. The exchange gives the rank all positions of its
group of ranks, but only some of the heads. After the attention a second exchange gives the rank its own positions back,
with all heads.
"""

from collections.abc import Sequence
from typing import NamedTuple

from .sharding import Shard, Span, first_rows, joined, shard_length


class Dealing(NamedTuple):
    """How one rank exchanges heads for positions within its group of ranks."""

    place: int  # this rank's place in the group
    lengths: tuple[int, ...]  # the number of positions of every rank of the group
    # The group's positions in order, cut into runs. One rank owns all positions of a run. A run is (the owner's place
    # in the group, the owner's local row at which the run begins, number of rows).
    runs: tuple[tuple[int, int, int], ...]

    @property
    def size(self) -> int:
        return len(self.lengths)


def deal(shards: Sequence[Shard], place: int) -> tuple[Dealing, Shard]:
    """How a rank exchanges heads for positions within its group, and a shard with all positions of the group.

    shards: the shards of the group's ranks. place: the rank's number in the group.
    """
    # `spans`: (span, its owner's place in the group, the owner's local row at which the span begins).
    spans: list[tuple[Span, int, int]] = []
    for owner, shard in enumerate(shards):
        for span, row in zip(shard, first_rows(shard), strict=False):
            spans.append((span, owner, row))
    spans.sort()
    runs = tuple((owner, row, span.stop - span.start) for span, owner, row in spans)
    dealing = Dealing(place, tuple(map(shard_length, shards)), runs)
    return dealing, joined(span for span, _, _ in spans)


def check_dealing(num_kv_heads: int, world_size: int) -> None:
    """Raise ValueError unless each of `world_size` ranks can get equally many key/value heads."""
    if num_kv_heads % world_size:
        raise ValueError(
            f"all_to_all deals heads to ranks, and {num_kv_heads} key/value heads do not divide among {world_size} "
            f"ranks: {num_kv_heads} mod {world_size} = {num_kv_heads % world_size}. exchange='ring' takes any number."
        )
