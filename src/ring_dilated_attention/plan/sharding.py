"""Which rank owns which positions: global position <-> (rank, local index). Pure integers, no torch.

A shard is a tuple of spans (start, stop) of global positions, in local order. Contiguous shards have one span. Zigzag
shards have two: the sequence is cut into 2p near-equal slices, and rank k holds slices k and 2p-1-k. Under a causal
pattern every rank then has about the same work: one slice that sees few keys and one that sees many. Under
"zigzag_documents" each packed document is cut so by itself, and a shard has up to two spans of each.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import NamedTuple

BY_DOCUMENT = "zigzag_documents"
OF_ONE_DOCUMENT = ("contiguous", "zigzag")
SHARDINGS = (*OF_ONE_DOCUMENT, BY_DOCUMENT)


class Span(NamedTuple):
    """Global positions start..stop-1."""

    start: int
    stop: int


Shard = tuple[Span, ...]
Borders = tuple[int, ...] | None  # (0, ..., n) of packed documents


@lru_cache(maxsize=64)
def split_lengths(seq_len: int, num_slices: int, align: int = 1) -> tuple[int, ...]:
    """Cut seq_len positions into near-equal slices whose borders are multiples of `align` (the last may be ragged)."""
    size, larger = divmod(-(-seq_len // align), num_slices)
    borders = [min((i * size + min(i, larger)) * align, seq_len) for i in range(num_slices + 1)]
    return tuple(b - a for a, b in pairwise(borders))


def default_lengths(sharding: str, seq_len: int, world_size: int, align: int = 1, inner: int = 1) -> tuple[int, ...]:
    """The number of positions of every rank under the near-equal split. align, inner: as in `Cut`."""
    if sharding != "zigzag":
        return split_lengths(seq_len, world_size, align)
    slices = split_lengths(seq_len, 2 * (world_size // inner))
    return tuple(n for k in range(len(slices) // 2) for n in split_lengths(slices[k] + slices[-1 - k], inner))


def make_shards(sharding: str, lengths: Sequence[int]) -> tuple[Shard, ...]:
    """Every rank's shard, given every rank's number of positions; ValueError if zigzag's lengths are not those of 2p
    near-equal slices."""
    return _make_shards(sharding, tuple(lengths))


@lru_cache(maxsize=64)
def _make_shards(sharding: str, lengths: tuple[int, ...]) -> tuple[Shard, ...]:
    assert sharding in OF_ONE_DOCUMENT, "`deal_documents` deals documents"
    if sharding == "contiguous" or len(lengths) == 1:
        return tuple(joined([Span(a, b)]) for a, b in pairwise(accumulate(lengths, initial=0)))
    world_size = len(lengths)
    expected = default_lengths(sharding, sum(lengths), world_size)
    if expected != lengths:
        raise ValueError(
            f"zigzag shards of {sum(lengths)} positions over {world_size} ranks have lengths {expected}, "
            f"got {lengths}. Cut the sequence with ContextParallel.shard."
        )
    slices = [Span(a, b) for a, b in pairwise(accumulate(split_lengths(sum(lengths), 2 * world_size), initial=0))]
    # The last rank's two slices are neighbours, but stay two spans: as chunks they travel at different hops.
    pairs = ((slices[k], slices[-1 - k]) for k in range(world_size))
    return tuple(tuple(span for span in pair if span.start < span.stop) for pair in pairs)


@lru_cache(maxsize=64)
def deal_documents(documents: Borders, seq_len: int, num_ranks: int) -> tuple[Shard, ...]:
    """The shard of every rank if each document is cut as zigzag by itself; ValueError without documents.

    Which slices of a document are longer by one depends on where it starts, so that short documents fall to all ranks.
    """
    if documents is None:
        raise ValueError(
            f"sharding={BY_DOCUMENT!r} deals each document by itself, so this call needs cu_seqlens, the same on every "
            "rank ([0, N] for one document). If it takes none, choose another sharding."
        )
    check_documents(documents, seq_len)
    if num_ranks == 1:
        return ((Span(0, seq_len),),)
    slices, shards = 2 * num_ranks, [list[Span]() for _ in range(num_ranks)]
    for start, stop in pairwise(documents):
        borders = [start + (i * (stop - start) + start % slices) // slices for i in range(slices + 1)]
        for k, shard in enumerate(shards):
            spans = (Span(*borders[i : i + 2]) for i in (k, slices - 1 - k))
            shard.extend(span for span in spans if span.start < span.stop)
    return tuple(map(tuple, shards))


class Cut(NamedTuple):
    """How ranks cut a sequence. `ContextParallel` takes the same sharding, align and lengths."""

    sharding: str
    num_shards: int  # the number of ranks
    align: int = 1
    lengths: tuple[int, ...] | None = None
    inner: int = 1  # how many neighbouring ranks' shards are slices of one larger shard (2-D mesh; otherwise 1)

    def default_lengths(self, seq_len: int, documents: Borders = None) -> tuple[int, ...]:
        """Every rank's number of positions of a sequence; ValueError if `lengths` adds up to another length."""
        if self.sharding == BY_DOCUMENT:
            outer = map(shard_length, deal_documents(documents, seq_len, self.num_shards // self.inner))
            return tuple(n for length in outer for n in split_lengths(length, self.inner))
        if self.lengths is None:
            return default_lengths(self.sharding, seq_len, self.num_shards, self.align, self.inner)
        if sum(self.lengths) != seq_len:
            raise ValueError(
                f"lengths={self.lengths} add up to {sum(self.lengths)}, but the sequence has {seq_len} positions."
            )
        return self.lengths

    def shards_of(self, lengths: Sequence[int], documents: Borders = None) -> tuple[Shard, ...]:
        """Every rank's shard, given every rank's number of positions; ValueError if `self.lengths` differs."""
        if self.lengths is not None and tuple(lengths) != self.lengths:
            raise ValueError(f"ranks have {tuple(lengths)} positions, but lengths={self.lengths} was given.")
        groups = [lengths[i : i + self.inner] for i in range(0, len(lengths), self.inner)]
        if self.sharding == BY_DOCUMENT:
            outer = deal_documents(documents, sum(lengths), len(groups))
            if (expected := self.default_lengths(sum(lengths), documents)) != tuple(lengths):
                raise ValueError(
                    f"these documents, dealt one by one, give the ranks {expected} positions, but ranks have "
                    f"{tuple(lengths)}. Pass the cu_seqlens that ContextParallel.shard was given."
                )
        else:
            outer = make_shards(self.sharding, [sum(group) for group in groups])
        if self.inner == 1:
            return outer
        return tuple(x for shard, group in zip(outer, groups, strict=True) for x in slice_shard(shard, group))


def slice_shard(shard: Shard, lengths: Sequence[int]) -> tuple[Shard, ...]:
    """Cut a shard, in its local order, into slices of the given lengths."""
    slices = []
    for a, b in pairwise(accumulate(lengths, initial=0)):
        clipped = (
            Span(start + max(a - row, 0), min(start + b - row, stop))
            for (start, stop), row in zip(shard, first_rows(shard), strict=False)
        )
        slices.append(tuple(span for span in clipped if span.start < span.stop))
    return tuple(slices)


def joined(spans: Iterable[Span]) -> Shard:
    """A shard of these spans. Neighbours are joined, so that a segment inside the shard lies inside one span."""
    found: list[Span] = []
    for span in spans:
        if span.start == span.stop:
            continue
        if found and found[-1].stop == span.start:
            found[-1] = Span(found[-1].start, span.stop)
        else:
            found.append(span)
    return tuple(found)


def order_by_host(hosts: Sequence[str]) -> tuple[int, ...]:
    """The order of ranks: those of one host side by side, and hosts in the order of their lowest ranks."""
    first_seen = {host: rank for rank, host in reversed(list(enumerate(hosts)))}
    return tuple(sorted(range(len(hosts)), key=lambda rank: (first_seen[hosts[rank]], rank)))


def shard_length(shard: Shard) -> int:
    return sum(span.stop - span.start for span in shard)


def first_rows(shard: Shard) -> Iterator[int]:
    """The local row at which each span begins."""
    return accumulate((span.stop - span.start for span in shard), initial=0)


def check_documents(borders: Sequence[int], seq_len: int) -> None:
    """Raise ValueError unless borders of packed documents increase from 0 to seq_len."""
    if len(borders) < 2 or borders[0] != 0 or borders[-1] != seq_len:
        quoted = list(borders) if len(borders) <= 6 else f"[{borders[0]}, {borders[1]}, ..., {borders[-1]}]"
        raise ValueError(
            f"cu_seqlens must start at 0 and end at the length of the sequence, {seq_len}; "
            f"got {quoted}, which has {len(borders)} entries."
        )
    for i, (a, b) in enumerate(pairwise(borders)):
        if a >= b:
            raise ValueError(
                f"cu_seqlens must increase, got {a} then {b} at entries {i} and {i + 1}. Leave out empty documents: "
                "cu_seqlens.unique_consecutive()."
            )


@lru_cache(maxsize=64)  # a batch's borders come again in every layer
def documents_of(borders: Borders, seq_len: int) -> Borders:
    """The borders of packed documents, checked; None for one document."""
    if borders is not None:
        check_documents(borders, seq_len)
    return borders


def document_positions(shard: Shard, documents: Sequence[int]) -> list[range]:
    """Positions of a shard's rows within their documents, as ranges in local order. documents: borders (0, ..., n)."""
    ranges = []
    for start, stop in shard:
        for i in range(bisect_right(documents, start) - 1, bisect_left(documents, stop)):
            lo, hi = max(start, documents[i]), min(stop, documents[i + 1])
            ranges.append(range(lo - documents[i], hi - documents[i]))
    return ranges
