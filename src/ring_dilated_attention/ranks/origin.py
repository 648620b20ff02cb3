"""Marks a shard with how it was cut, so that a context that cuts otherwise can refuse the shard.

The mark is an attribute of the tensor; copy, pickle and torch.save keep it. The result of an op has no mark:
`Ranks.notice` warns if the ranks' lengths look like a mistake.
"""

import weakref
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

import torch
from torch import Tensor

from ..plan.sharding import Shard, documents_of, shard_length, sharding_of
from .call import borders_of
from .ranks import Ranks

_MARK = "ring_dilated_attention_origin"
_last: list[tuple["Origin", "weakref.ref[Ranks]"]] = []  # the mark that this process made last, and who cut


class Origin(NamedTuple):
    """The shard of rank `rank`, as borders of spans. The sequence was cut into shards of these lengths."""

    sharding: str
    lengths: tuple[int, ...]
    rank: int
    shard: tuple[tuple[int, int], ...]

    def __str__(self) -> str:
        return f"rank {self.rank}'s rows of {sum(self.lengths)} positions, cut {self.sharding} as {self.lengths}"


def remember(x: Tensor, ranks: Ranks, shards: Sequence[Shard]) -> Tensor:
    """x, marked as this rank's rows."""
    shard = tuple((span.start, span.stop) for span in shards[ranks.rank])
    mark = (ranks.cut.sharding, tuple(map(shard_length, shards)), ranks.rank, shard)
    setattr(x, _MARK, mark)  # plain tuples, which torch.load(weights_only=True) takes
    _last[:] = [(Origin(*mark), weakref.ref(ranks))]
    return x


def notice_forgotten(num_rows: int) -> None:
    """Warn once if a call without `parallel` has as many rows as the shard that was cut last, by an open context."""
    if torch.compiler.is_compiling() or not _last:
        return
    origin, ranks = _last[0][0], _last[0][1]()
    whole = sum(origin.lengths)
    if ranks is None or ranks.is_closed or num_rows != origin.lengths[origin.rank] or num_rows in (0, whole):
        return
    text = (
        f"a call without parallel= has {num_rows} positions, as many as rank {origin.rank}'s shard of the {whole} "
        "positions that were cut last: they are taken for a whole sequence. If they are a shard, pass parallel= to the "
        "call, or to the module that makes it"
    )
    ranks.warn_once("forgotten", text, stacklevel=4)


def why_doubtful(lengths: Sequence[int], ranks: Ranks) -> str | None:
    """Why these rows look as if another context cut them. None if not, or if this context has cut some itself."""
    if ranks.last_whole is not None or not _last:
        return None
    origin, _ = _last[0]
    if origin.lengths != tuple(lengths) or _is_own(origin, ranks):
        return None
    return (
        f"ranks have {tuple(lengths)} positions, the lengths of the shards that were cut last, by a context that cuts "
        f"{origin.sharding}; they are taken for {ranks.cut.sharding} shards. Cut with the context that computes"
    )


def origin_of(x: object) -> Origin | None:
    """How a tensor was cut, if `remember` has marked it."""
    if torch.compiler.is_compiling():  # a graph knows no attributes of its inputs
        return None
    mark = getattr(x, _MARK, None)
    return None if mark is None else Origin(*mark)


def why_foreign(name: str, x: object, ranks: Ranks, cu_seqlens: object = None) -> str | None:
    """Why a tensor cannot be this rank's rows, or None. A tensor without a mark can be."""
    origin = origin_of(x)
    if origin is None or _is_own(origin, ranks, cu_seqlens):
        return None
    same = " and with the same cu_seqlens" if ranks.cut.needs_documents else ""
    here = "one rank alone" if ranks.world_size == 1 else f"rank {ranks.rank} of {ranks.world_size}"
    return (
        f"{name} is {origin}; this context is of {here} and cuts {ranks.cut.sharding}. Cut the whole with the context "
        f"that computes with it{same}: parallel.shard or parallel.shard_batch"
    )


def _is_own(origin: Origin, ranks: Ranks, cu_seqlens: object = None) -> bool:
    if len(origin.lengths) != ranks.world_size or ranks.cut.lengths not in (None, origin.lengths):
        return False
    if not (ranks.cut.needs_documents or sharding_of(origin.sharding).needs_documents):
        return ranks.shards(origin.lengths)[ranks.rank] == origin.shard
    if origin.sharding != ranks.cut.sharding or origin.rank != ranks.rank:
        return False
    with suppress(ValueError):  # what is wrong with the borders themselves is said elsewhere, on all ranks
        documents = documents_of(borders_of(cu_seqlens), whole := sum(origin.lengths))
        return ranks.shards(ranks.lengths_of(whole, documents), documents)[ranks.rank] == origin.shard
    return True
