"""Scores a model in bits per byte.

Bits of any text are counted by how many bytes stand before the byte that they tell. The held-out bytes of a run are
scored once each, and every rank takes part.
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
CHUNK = 4096


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
def score(model: LongNetLM, blocks: Iterable[bytes], context: int | None) -> Iterator[Score]:
    """Measure the cross-entropy of a text. A context's first byte is not predicted.

    A `context` of None is the whole text. The model reads CHUNK bytes at a time through caches, whose memory does not
    grow with the text.
    """
    caches, last_1E = model.make_caches(1, max_len=context), torch.empty(1, 0)
    for position, some in cut_into_contexts(blocks, CHUNK, context):
        if position == 0:
            for cache in caches:
                cache.reset()
        tokens_N = torch.frombuffer(bytearray(some), dtype=torch.uint8).long()
        hidden_NE = model.append(tokens_N[None], caches)[0]
        before_NE, labels_N = hidden_NE[:-1], tokens_N[1:]
        if position:  # the first of these bytes is predicted by the last one before them
            before_NE, labels_N = torch.cat([last_1E, before_NE]), tokens_N
        nats_N = F.cross_entropy(model.head(before_NE).float(), labels_N, reduction="none")
        num_before_N = torch.arange(max(position, 1), position + len(some))
        yield _in_buckets(len(some), num_before_N, nats_N)
        last_1E = hidden_NE[-1:]


def _in_buckets(num_read: int, num_before_N: Tensor, nats_N: Tensor) -> Score:
    bucket_N = torch.bucketize(num_before_N, 2 ** torch.arange(1, NUM_BUCKETS), right=True)
    bits_N = nats_N.double() / math.log(2)
    bits = torch.zeros(NUM_BUCKETS, dtype=torch.float64).index_add_(0, bucket_N, bits_N)
    counts = torch.bincount(bucket_N, minlength=NUM_BUCKETS)
    return Score(num_read, bits.tolist(), counts.tolist())


@torch.no_grad()
def held_out_bits_per_byte(model: LongNetLM, document: Document) -> float:
    """The mean over the held-out bytes, each predicted once. A context predicts all its bytes but the first."""
    parallel = model.parallel or ContextParallel()
    content = document.content
    size = min(document.seq_len, document.num_held_out)
    starts = range(document.num_train - 1, len(content) - 1, size)
    total = torch.zeros((), dtype=torch.float64)
    number = 0
    for start in starts:
        row = content[start : start + size + 1]
        # The last row may be shorter. The zeros after it change nothing before them.
        tokens_1N = torch.frombuffer(bytearray(row.ljust(size + 1, b"\0")), dtype=torch.uint8)[None]
        is_next_scored_1N = torch.arange(size + 1)[None] < len(row) - 1
        nats_1N = model.token_losses(parallel.shard(tokens_1N.long()))
        nats = nats_1N[parallel.shard(is_next_scored_1N)]
        total += nats.sum(dtype=torch.float64)
        number += len(nats)
    return parallel.mean_loss(total, number).item() / math.log(2)


def gzip_bits_per_byte(document: Document) -> float:
    """What gzip needs for the held-out bytes, as one stream. To compare a loss with. It looks back at most 32 KiB."""
    held_out = document.content[document.num_train :]
    return 8 * len(gzip.compress(held_out, 9, mtime=0)) / len(held_out)
