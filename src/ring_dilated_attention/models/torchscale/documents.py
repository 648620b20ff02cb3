"""Where a rank's rows lie in the documents that the ranks hold together. Agreed once for all layers of a model."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from ...plan.sharding import Shard, check_documents, make_shards
from ...ranks.borders import validate_cu_seqlens
from ...ranks.context import ContextParallel


class Stretch(NamedTuple):
    """Consecutive positions of one document among a rank's rows.

    Args:
        begin: of the document, counted over the whole sequence.
        length: of the document.
        positions: in the document.
        row: the local row of the first of them.
    """

    begin: int
    length: int
    positions: range
    row: int

    def rows(self, wanted: range) -> slice:
        """The local rows of those of the wanted positions that lie here."""
        own, step = self.positions, wanted.step
        first = wanted.start + max(0, -(-(own.start - wanted.start) // step)) * step
        stop = max(first, min(wanted.stop, own.stop))
        return slice(first + self.row - own.start, stop + self.row - own.start, step)


@dataclass(frozen=True)
class Documents:
    """The documents' borders, all ranks' shards, which of them is this rank's, and the stretches that it holds."""

    borders: tuple[int, ...]
    shards: tuple[Shard, ...]
    rank: int
    stretches: tuple[Stretch, ...]

    @property
    def num_rows(self) -> int:
        return sum(len(stretch.positions) for stretch in self.stretches)

    @property
    def longest(self) -> int:
        """The length of the longest document."""
        lengths = [b - a for a, b in pairwise(self.borders)]
        return max(lengths) if lengths else 0  # torch.compile knows no max with a default

    def positions(self) -> Tensor:
        """Positions within their document of this rank's rows, (N,) int64 on the CPU."""
        parts = [torch.arange(s.positions.start, s.positions.stop, device="cpu") for s in self.stretches]
        return torch.cat([torch.arange(0, device="cpu"), *parts])


def agree_on_documents(
    call: str,
    shape: tuple[int, int],
    *,
    parallel: ContextParallel | None = None,
    cu_seqlens: Tensor | None = None,
    fields: dict[str, object] | None = None,
    failure: str | None = None,
) -> Documents:
    """The documents of a call that all ranks make together.

    Args:
        call: its name, for errors.
        shape: batch and number of positions of this rank.
        cu_seqlens: global borders of packed documents, for a batch of 1.
        fields: what else must agree, by name.
        failure: why this rank refuses the call, if it does.

    Raises:
        ValueError: on every rank, if one refuses, or if fields, borders and lengths do not fit.
    """
    if not (parallel is None or isinstance(parallel, ContextParallel)):
        raise ValueError(f"parallel must be a ContextParallel or None, got {parallel!r}.")
    batch, num_positions = shape
    if cu_seqlens is not None and failure is None:
        try:
            validate_cu_seqlens(cu_seqlens, batch)
        except ValueError as error:
            failure = str(error)
    given = None if cu_seqlens is None or failure else tuple(cu_seqlens.tolist())
    if parallel is None:
        if failure:
            raise ValueError(failure)
        lengths: tuple[int, ...] = (num_positions,)
    else:
        agreed = {"call": call, "batch": batch, "cu_seqlens": given, **(fields or {})}
        lengths = parallel.ranks.handshake(num_positions, agreed, failure)
    total = sum(lengths)
    if given is not None:
        check_documents(given, total)
    borders = given or ((0, total) if total else (0,))
    if parallel is None:
        shards, rank = make_shards("contiguous", lengths), 0
    else:
        shards, rank = parallel.ranks.shards(lengths), parallel.rank
    return Documents(borders, shards, rank, tuple(_stretches(shards[rank], borders)))


def _stretches(shard: Shard, borders: Sequence[int]) -> Iterator[Stretch]:
    row = 0
    for start, stop in shard:
        for begin, end in pairwise(borders):
            lo, hi = max(begin, start), min(end, stop)
            if lo < hi:
                yield Stretch(begin, end - begin, range(lo - begin, hi - begin), row + lo - start)
        row += stop - start
