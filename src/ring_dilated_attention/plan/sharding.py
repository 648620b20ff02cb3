"""Which rank owns which positions: global position <-> (rank, local index). Pure integers, no torch.

A *shard* is the positions that one rank owns: a tuple of spans (start, stop), in the order of the rank's rows. A
*sharding* is the rule that makes the shards:

    contiguous          Each shard has one span.
    zigzag              The sequence is cut into 2p near-equal slices, and rank k owns slices k and 2p-1-k. In a causal
                        pattern slice k attends to few keys and slice 2p-1-k to many, so ranks have about equal work.
    zigzag_documents    Each packed document is cut as in zigzag. A shard has up to two spans of each document.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import NamedTuple


class Span(NamedTuple):
    """Global positions start..stop-1."""

    start: int
    stop: int


Shard = tuple[Span, ...]
Borders = tuple[int, ...] | None  # borders (0, ..., n) of packed documents; None for one document


@lru_cache(maxsize=64)
def split_lengths(seq_len: int, num_slices: int, align: int = 1) -> tuple[int, ...]:
    """The lengths of near-equal slices of seq_len positions. Each slice begins at a multiple of `align` or is empty."""
    size, larger = divmod(-(-seq_len // align), num_slices)
    borders = [min((i * size + min(i, larger)) * align, seq_len) for i in range(num_slices + 1)]
    return tuple(b - a for a, b in pairwise(borders))


def _contiguous_shards(lengths: Sequence[int], documents: Borders) -> tuple[Shard, ...]:
    return tuple(joined([Span(a, b)]) for a, b in pairwise(accumulate(lengths, initial=0)))


def _zigzag_shards(lengths: Sequence[int], documents: Borders) -> tuple[Shard, ...]:
    num_shards = len(lengths)
    if num_shards == 1:
        return _contiguous_shards(lengths, documents)

    borders = accumulate(split_lengths(sum(lengths), 2 * num_shards), initial=0)
    slices = [Span(a, b) for a, b in pairwise(borders)]

    # The last rank's two slices are neighbours. Keep them as two spans, because other ranks need the slices at
    # different hops of a ring.
    pairs = [(slices[k], slices[-1 - k]) for k in range(num_shards)]
    return tuple(tuple(span for span in pair if span.start < span.stop) for pair in pairs)


def _document_shards(lengths: Sequence[int], documents: Borders) -> tuple[Shard, ...]:
    return deal_documents(documents, sum(lengths), len(lengths))


class Sharding(NamedTuple):
    """A rule that says which rank owns which positions."""

    # (number of positions of every rank, borders of packed documents) -> the shard of every rank. If `takes_lengths` is
    # False, the rule itself decides how many positions each rank owns. The rule then uses only the number of ranks and
    # the total number of positions.
    shards: Callable[[Sequence[int], Borders], tuple[Shard, ...]]
    # whether the caller may choose how many positions each rank owns (`ShardSpec.align` and `ShardSpec.lengths`)
    takes_lengths: bool = False
    needs_documents: bool = False


SHARDINGS = {
    "contiguous": Sharding(_contiguous_shards, takes_lengths=True),
    "zigzag": Sharding(_zigzag_shards),
    "zigzag_documents": Sharding(_document_shards, needs_documents=True),
}
WITHOUT_DOCUMENTS = [name for name, sharding in SHARDINGS.items() if not sharding.needs_documents]


def sharding_of(name: str) -> Sharding:
    """The sharding with this name; ValueError if there is none."""
    if name not in SHARDINGS:
        raise ValueError(f"sharding={name!r} is unknown; choose one of {tuple(SHARDINGS)}.")
    return SHARDINGS[name]


def make_shards(sharding: str, lengths: Sequence[int]) -> tuple[Shard, ...]:
    """The shard of every rank.

    lengths: the number of positions of every rank. ValueError if the sharding gives a rank a different number.
    """
    return ShardSpec(sharding, len(lengths)).shards_of(lengths)


@lru_cache(maxsize=64)
def deal_documents(documents: Borders, seq_len: int, num_ranks: int) -> tuple[Shard, ...]:
    """The shard of every rank if each document is cut as in zigzag. ValueError if `documents` is None.

    The slices of a document are not all equally long: some have one position more. The start of the document decides
    which slices are longer. So the positions of many short documents are spread over all ranks.
    """
    if documents is None:
        raise ValueError(
            "sharding='zigzag_documents' cuts each document by itself, so this call needs cu_seqlens, the same on "
            "every rank ([0, N] for one document). If the call takes no cu_seqlens, choose another sharding."
        )
    check_documents(documents, seq_len)
    if num_ranks == 1:
        return ((Span(0, seq_len),),)

    num_slices = 2 * num_ranks
    shards: list[list[Span]] = [[] for _ in range(num_ranks)]
    for start, stop in pairwise(documents):
        borders: list[int] = []
        for i in range(num_slices + 1):
            border = start + (i * (stop - start) + start % num_slices) // num_slices
            borders.append(border)
        for rank, shard in enumerate(shards):
            for i in (rank, num_slices - 1 - rank):
                span = Span(borders[i], borders[i + 1])
                if span.start < span.stop:
                    shard.append(span)
    return tuple(map(tuple, shards))


class ShardSpec(NamedTuple):
    """How a sequence is cut into the shards of ranks. sharding, align, lengths: as in `ContextParallel`."""

    sharding: str
    num_shards: int  # the number of ranks
    align: int = 1
    lengths: tuple[int, ...] | None = None
    # On a 2-D mesh: how many neighbouring ranks share one larger shard, which they cut into slices. 1: each rank has a
    # shard of its own.
    inner: int = 1

    @property
    def needs_documents(self) -> bool:
        return sharding_of(self.sharding).needs_documents

    def default_lengths(self, seq_len: int, documents: Borders = None) -> tuple[int, ...]:
        """The number of positions of every rank. ValueError if the spec's `lengths` do not add up to seq_len."""
        if self.lengths is not None:
            if sum(self.lengths) != seq_len:
                raise ValueError(
                    f"lengths={self.lengths} add up to {sum(self.lengths)}, but the sequence has {seq_len} positions."
                )
            return self.lengths
        sharding = sharding_of(self.sharding)
        if sharding.takes_lengths:
            return split_lengths(seq_len, self.num_shards, self.align)
        near_equal = split_lengths(seq_len, self.num_shards // self.inner)
        lengths: list[int] = []
        for shard in sharding.shards(near_equal, documents):
            lengths += split_lengths(shard_length(shard), self.inner)
        return tuple(lengths)

    def shards_of(self, lengths: Sequence[int], documents: Borders = None) -> tuple[Shard, ...]:
        """The shard of every rank.

        lengths: the number of positions of every rank. ValueError if this spec gives a rank a different number.
        """
        return _shards_of(self, tuple(lengths), documents)


@lru_cache(maxsize=64)
def _shards_of(cut: ShardSpec, lengths: tuple[int, ...], documents: Borders) -> tuple[Shard, ...]:
    sharding = sharding_of(cut.sharding)
    if sharding.takes_lengths:
        if cut.lengths not in (None, lengths):
            raise ValueError(
                f"ranks have {lengths} positions, but lengths={cut.lengths} was given."
            )
    elif (expected := cut.default_lengths(sum(lengths), documents)) != lengths:
        remedy = ", and pass the cu_seqlens that it was given" if cut.needs_documents else ""
        raise ValueError(
            f"{cut.sharding} shards of {sum(lengths)} positions over {len(lengths)} ranks have lengths {expected}, got "
            f"{lengths}. Cut the sequence with ContextParallel.shard{remedy}."
        )

    groups = [lengths[i : i + cut.inner] for i in range(0, len(lengths), cut.inner)]
    shards_of_groups = sharding.shards([sum(group) for group in groups], documents)
    if cut.inner == 1:
        return shards_of_groups

    shards: list[Shard] = []
    for shard, group in zip(shards_of_groups, groups, strict=True):
        shards += slice_shard(shard, group)
    return tuple(shards)


def slice_shard(shard: Shard, lengths: Sequence[int]) -> tuple[Shard, ...]:
    """Cut a shard, in its local order, into slices of the given lengths."""
    slices: list[Shard] = []
    for a, b in pairwise(accumulate(lengths, initial=0)):
        # `spans`: the part of each span that lies in the local rows a..b-1.
        spans: list[Span] = []
        for (start, stop), row in zip(shard, first_rows(shard), strict=False):
            clipped = Span(start + max(a - row, 0), min(start + b - row, stop))
            if clipped.start < clipped.stop:
                spans.append(clipped)
        slices.append(tuple(spans))
    return tuple(slices)


def joined(spans: Iterable[Span]) -> Shard:
    """A shard of these spans. Spans that touch become one span, so that no segment is cut where they touch."""
    shard: list[Span] = []
    for start, stop in spans:
        if start == stop:
            continue
        if shard and shard[-1].stop == start:
            start = shard.pop().start
        shard.append(Span(start, stop))
    return tuple(shard)


def order_by_host(hosts: Sequence[str]) -> tuple[int, ...]:
    """An order of the ranks in which the ranks of a host are side by side. hosts: the host of every rank.

    Hosts come in the order of their lowest ranks.
    """
    first_seen = {host: rank for rank, host in reversed(list(enumerate(hosts)))}
    return tuple(sorted(range(len(hosts)), key=lambda rank: (first_seen[hosts[rank]], rank)))


def shard_length(shard: Shard) -> int:
    return sum(span.stop - span.start for span in shard)


def first_rows(shard: Shard) -> Iterator[int]:
    """Yield the local row at which each span begins. After these rows, yield the length of the shard."""
    return accumulate((span.stop - span.start for span in shard), initial=0)


def check_documents(borders: Sequence[int], seq_len: int) -> None:
    """Raise ValueError unless borders of packed documents increase from 0 to seq_len."""
    if len(borders) < 2 or borders[0] != 0 or borders[-1] != seq_len:
        quoted = (
            list(borders)
            if len(borders) <= 6
            else f"[{borders[0]}, {borders[1]}, ..., {borders[-1]}]"
        )
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


# cached, because every layer of a model makes this call with the same borders
@lru_cache(maxsize=64)
def documents_of(borders: Borders, seq_len: int) -> Borders:
    """Check borders of packed documents and return them. ValueError if they are invalid. None (one document) stays
    None."""
    if borders is not None:
        check_documents(borders, seq_len)
    return borders


def document_positions(shard: Shard, documents: Sequence[int]) -> list[range]:
    """For each row of a shard, its position within its document. Returned as ranges, in the order of the rows.

    documents: the borders (0, ..., n).
    """
    ranges = []
    for start, stop in shard:
        for i in range(bisect_right(documents, start) - 1, bisect_left(documents, stop)):
            lo = max(start, documents[i])
            hi = min(stop, documents[i + 1])
            ranges.append(range(lo - documents[i], hi - documents[i]))
    return ranges
