"""Scores a model in bits per byte. Every rank takes part.

Any text is scored in one forward, or in slices through caches. Its bits are counted by how many bytes stand before the
byte that they tell. The held-out bytes of a run are scored once each, and some of them again with less context.
"""

import gzip
import math
from collections.abc import Iterable, Iterator, Sequence
from operator import add
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..models.longnet import LongNetLM
from ..ranks.context import ContextParallel
from .data import Document, cut_into_contexts

NUM_BUCKETS = 63
POSITIONS_AT_ONCE = 16_384  # of short contexts, in one forward: fewer or more are slower on a CPU
CUTS = (64, 512, 4_096)
CUT_BYTES = 32_768  # held-out bytes that are scored with each cut
CLEAR_BYTES = 64  # a byte is scored if so many bytes of its segment precede it, or half the segment if that is less
HELPS = 0.01  # bits per byte; less is noise on so few bytes
SMOOTHING = 2.0  # the weight of p_{n-1} in `baselines`, in occurrences of the context
BLOCK = 2**22  # bytes of the training part that are counted at a time


class Score(NamedTuple):
    """Bits, and the number of bytes that took them, in buckets. A byte with 1 byte before it is in the first; with 2 to
    3 in the next, then 4 to 7, ..."""

    num_read: int = 0  # also those that are not predicted
    bits: Sequence[float] = (0.0,) * NUM_BUCKETS
    counts: Sequence[int] = (0,) * NUM_BUCKETS

    def plus(self, other: "Score") -> "Score":
        bits, counts = map(add, self.bits, other.bits), map(add, self.counts, other.counts)
        return Score(self.num_read + other.num_read, tuple(bits), tuple(counts))

    def mean(self) -> float:
        return sum(self.bits) / sum(self.counts)

    def buckets(self) -> list[dict[str, Any]]:
        """A record for each bucket that is not empty. Its bytes have `first` to `last` bytes of context before them."""
        return [
            {
                "first": 2**k,
                "last": 2 ** (k + 1) - 1,
                "num_bytes": count,
                "bits_per_byte": bits / count,
            }
            for k, (bits, count) in enumerate(zip(self.bits, self.counts, strict=True))
            if count
        ]


@torch.no_grad()
def score(
    model: LongNetLM, blocks: Iterable[bytes], context: int | None, size: int | None = None
) -> Iterator[Score]:
    """Measure the cross-entropy of a text, block by block. A context's first byte is not predicted.

    A `context` of None is the whole text, and needs a `size`: so many bytes at a time are read through caches, whose
    memory does not grow with the text. Ranks of `model.parallel` all give the same text, and score their shards.
    """
    if size is not None:
        yield from _by_caches(model, cut_into_contexts(blocks, size, context), context)
        return
    assert context is not None
    parallel, joined = model.parallel, max(1, POSITIONS_AT_ONCE // context) * context
    for _, some in cut_into_contexts(blocks, joined, joined):
        tokens_T, stop = _tokens(model, some), len(some) // context * context
        for tokens_BN in (tokens_T[:stop].view(-1 if stop else 0, context), tokens_T[None, stop:]):
            if tokens_BN.numel():
                length = tokens_BN.shape[1]
                num_before_N = 1 + (
                    torch.arange(length) if parallel is None else parallel.positions(length)
                )
                nats_BN = model.token_losses(
                    tokens_BN if parallel is None else parallel.shard(tokens_BN)
                )
                is_text = num_before_N < length  # nothing comes after the last byte
                yield _in_buckets(tokens_BN.numel(), num_before_N[is_text], nats_BN[:, is_text])


def _by_caches(
    model: LongNetLM, text: Iterable[tuple[int, bytes]], context: int | None
) -> Iterator[Score]:
    caches, last_1E = model.make_caches(1, max_len=context), torch.empty(1, 0)
    for position, some in text:
        if position == 0:
            for cache in caches:
                cache.reset()
        tokens_N = _tokens(model, some)
        hidden_NE = model.append(tokens_N[None], caches)[0]
        before_NE, labels_N = hidden_NE[:-1], tokens_N[1:]
        if position:  # the first of these bytes is predicted by the last one before them
            before_NE, labels_N = torch.cat([last_1E, before_NE]), tokens_N
        nats_N = F.cross_entropy(model.head(before_NE).float(), labels_N, reduction="none")
        yield _in_buckets(
            len(some), torch.arange(max(position, 1), position + len(some)), nats_N[None]
        )
        last_1E = hidden_NE[-1:]


def _tokens(model: LongNetLM, some: bytes) -> Tensor:
    return torch.frombuffer(bytearray(some), dtype=torch.uint8).to(model.head.weight.device).long()


def _in_buckets(num_read: int, num_before_N: Tensor, nats_BN: Tensor) -> Score:
    bucket_N = torch.bucketize(num_before_N, 2 ** torch.arange(1, NUM_BUCKETS), right=True)
    bits_N = nats_BN.sum(0, dtype=torch.float64).cpu() / math.log(2)
    bits = torch.zeros(NUM_BUCKETS, dtype=torch.float64).index_add_(0, bucket_N, bits_N)
    counts = torch.bincount(bucket_N, minlength=NUM_BUCKETS) * len(nats_BN)
    return Score(num_read, bits.tolist(), counts.tolist())


def held_out_bits_per_byte(model: LongNetLM, document: Document) -> float:
    """The mean over the held-out bytes, each predicted once. A context predicts all its bytes but the first."""
    targets = range(document.num_train, len(document.content))
    return bits_per_byte(model, document, targets, document.seq_len, 1)


def bits_by_context(model: LongNetLM, document: Document) -> dict[str, Any] | None:
    """Bits per byte with the context cut to c bytes, for each of CUTS and for half a sequence, on the same bytes.

    Contexts of 2 c bytes overlap by c; second halves are scored. A byte counts if, with every cut, CLEAR_BYTES or
    half of its segment (the longest of rate 1) precede it. None if a sequence is too short, or no byte counts.
    """
    cuts = [c for c in CUTS if 2 * c < document.seq_len] + [document.seq_len // 2]
    number = min(CUT_BYTES, document.num_held_out)
    begin = document.num_train + min(cuts[-1], document.num_held_out - number)
    pattern = model.config.pattern
    w = max(
        (w for w, r in zip(pattern.segment_lengths, pattern.dilation_rates, strict=True) if r == 1),
        default=1,
    )
    target = torch.arange(number)
    counts = torch.stack([(target % c + c) % w >= min(CLEAR_BYTES, w // 2) for c in cuts]).all(0)
    if len(cuts) == 1 or not counts.any():
        return None
    targets = range(begin, begin + number)
    bits = [bits_per_byte(model, document, targets, c, c, counts) for c in cuts]
    return {"num_bytes": int(counts.sum()), "least_context": cuts, "bits_per_byte": bits}


@torch.no_grad()
def bits_per_byte(
    model: LongNetLM,
    document: Document,
    targets: range,
    size: int,
    num_before: int,
    counts: Tensor | None = None,
) -> float:
    """The mean over the target bytes, or over those for which `counts` is true. A context has `num_before` bytes, and
    then the `size` bytes that it predicts."""
    size, parallel = min(size, len(targets)), model.parallel or ContextParallel()
    ranges, length = (
        [targets[i : i + size] for i in range(0, len(targets), size)],
        num_before + size,
    )
    total, number, at_once = (
        torch.zeros((), dtype=torch.float64),
        0,
        max(1, POSITIONS_AT_ONCE // length),
    )
    for i in range(0, len(ranges), at_once):
        some = ranges[i : i + at_once]
        # The last range may be shorter. The zeros after it change nothing before them.
        rows = b"".join(
            document.content[x.start - num_before : x.stop].ljust(length, b"\0") for x in some
        )
        tokens_BN = torch.frombuffer(bytearray(rows), dtype=torch.uint8).view(-1, length).long()
        is_next_scored_BN = torch.zeros_like(tokens_BN, dtype=torch.bool)
        for x, row in zip(some, is_next_scored_BN[:, num_before - 1 :], strict=True):
            row[: len(x)] = (
                True if counts is None else counts[x.start - targets.start : x.stop - targets.start]
            )
        nats = model.token_losses(parallel.shard(tokens_BN))[parallel.shard(is_next_scored_BN)]
        total, number = total + nats.sum(dtype=torch.float64), number + len(nats)
    return parallel.mean_loss(total, number).item() / math.log(2)


def baselines(document: Document) -> dict[str, float]:
    """Bits per byte of simple models on the held-out bytes, by name. To compare a loss with.

    gzip sees them as one stream, and looks back at most 32 KiB. Bigrams and trigrams are tables of the training part:
    what came after the last byte, or after the last two. A table of n bytes is mixed with that of n - 1,

        p_n(c | context) = (count(context, c) + SMOOTHING * p_{n-1}(c)) / (count(context) + SMOOTHING),

    down to p_0 = 1 / 256.
    """
    import numpy

    content, num_train = numpy.frombuffer(document.content, numpy.uint8), document.num_train
    held_out = memoryview(document.content)[num_train:]
    # Bytes are numbered anew, 0 to A - 1, so that a table of trigrams has A**3 entries and not 256**3.
    is_there = numpy.bincount(content, minlength=256) > 0
    number, alphabet = (numpy.cumsum(is_there) - 1).astype(numpy.int32), int(is_there.sum())

    def codes(start: int, stop: int, order: int) -> Any:
        """For each byte from start to stop the number of the n-gram that ends there."""
        rows = [number[content[start - i : stop - i]] for i in range(order)]
        return sum(row * alphabet**i for i, row in enumerate(rows))

    probability = numpy.full(len(held_out), 1 / 256)
    bits = []
    for order in (1, 2, 3):
        table = numpy.zeros(alphabet**order, numpy.int64)
        for start in range(order - 1, num_train, BLOCK):
            counted = codes(start, min(start + BLOCK, num_train), order)
            table += numpy.bincount(counted, minlength=len(table))
        code = codes(num_train, len(content), order)
        before = table.reshape(-1, alphabet).sum(1)[code // alphabet]
        probability = (table[code] + SMOOTHING * probability) / (before + SMOOTHING)
        bits.append(-float(numpy.log2(probability).mean()))
    packed = 8 * len(gzip.compress(held_out, 9, mtime=0)) / len(held_out)
    return {"gzip": packed, "bigrams": bits[1], "trigrams": bits[2]}
