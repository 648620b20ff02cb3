"""Scores a model in bits per byte, on any text or on the held-out bytes of a run.

All ranks of a run together score the held-out bytes.
"""

import gzip
import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..models.longnet import LongNetLM
from ..ranks.context import ContextParallel
from .data import Document

CHUNK = 4096


class Score(NamedTuple):
    """How many bits a model needed to predict the bytes that it read."""

    num_read: int  # how many bytes the model read
    num_predicted: int  # how many bytes the model predicted: all but the first byte of each context
    bits: float


def tokens_of(text: bytearray) -> Tensor:
    """The bytes of a text as tokens (1, N) of dtype uint8. The tensor shares the memory of `text`."""
    return torch.frombuffer(text, dtype=torch.uint8)[None]


@torch.no_grad()
def score(model: LongNetLM, text: bytes, context: int) -> Iterator[Score]:
    """Measure the cross-entropy of a text that is cut into contexts. A context's first byte is not predicted.

    The model reads CHUNK bytes at a time, and keeps what it has read in caches. The memory of the caches does not grow
    with the context. Yields a Score for each chunk of a context.
    """
    caches = model.make_caches(1, max_len=context)
    for start in range(0, len(text), context):
        for cache in caches:
            cache.reset()
        stop = min(start + context, len(text))
        last_1E = torch.empty(1, 0)  # the hidden state of the last byte before the chunk
        for first in range(start, stop, CHUNK):
            chunk = text[first : min(first + CHUNK, stop)]
            tokens_1N = tokens_of(bytearray(chunk)).long()
            hidden_NE = model.append(tokens_1N, caches)[0]
            before_NE, labels_N = hidden_NE[:-1], tokens_1N[0, 1:]
            if first > start:  # the byte before the chunk predicts the chunk's first byte
                before_NE, labels_N = torch.cat([last_1E, before_NE]), tokens_1N[0]
            nats_N = F.cross_entropy(model.head(before_NE).float(), labels_N, reduction="none")
            yield Score(len(chunk), len(labels_N), nats_N.double().sum().item() / math.log(2))
            last_1E = hidden_NE[-1:]


@torch.no_grad()
def held_out_bits_per_byte(model: LongNetLM, document: Document) -> float:
    """Mean bits per byte over the held-out bytes. Each of these bytes is predicted once.

    The held-out bytes are cut into contexts. The model also reads the byte before each context, to predict the
    context's first byte.
    """
    parallel = model.parallel or ContextParallel()
    content = document.content
    size = min(document.seq_len, document.num_held_out)
    nats = 0.0
    for start in range(document.num_train - 1, len(content) - 1, size):
        row = content[start : start + size + 1]
        mean = model.loss(parallel.shard(tokens_of(bytearray(row)).long()))
        nats += mean.item() * (len(row) - 1)
    return nats / document.num_held_out / math.log(2)


def gzip_bits_per_byte(document: Document) -> float:
    """The bits per byte that gzip needs for the held-out bytes as one stream.

    Users compare a model's bits per byte with this number. gzip looks back at most 32 KiB.
    """
    held_out = document.content[document.num_train :]
    return 8 * len(gzip.compress(held_out, 9, mtime=0)) / len(held_out)
