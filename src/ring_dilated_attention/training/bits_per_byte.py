"""Measures bits per byte by the number of preceding bytes. The model reads with caches, so memory does not grow."""

import math
from collections.abc import Iterable
from typing import NamedTuple

import torch
import torch.nn.functional as F

from ..models.longnet import LongNetLM

NUM_BUCKETS = 63


class Bucket(NamedTuple):
    """The bytes that have `first` to `last` bytes of their context before them."""

    first: int
    last: int
    num_bytes: int
    bits_per_byte: float


@torch.no_grad()
def bits_by_position(model: LongNetLM, text: Iterable[tuple[int, bytes]], context: int | None) -> list[Bucket]:
    """Mean cross-entropy by powers of two of the number of bytes before. A context's first byte is not predicted.

    Args:
        text: blocks of bytes in order, each with its position in its context (`data.cut_into_contexts`).
        context: the length of the longest context; None if there is no limit.
    """
    caches = model.make_caches(1, max_len=context)
    sums, counts = torch.zeros(NUM_BUCKETS, dtype=torch.float64), torch.zeros(NUM_BUCKETS, dtype=torch.int64)
    powers, device = 2 ** torch.arange(1, NUM_BUCKETS), model.head.weight.device
    last_1E = torch.empty(1, 0)
    for position, some in text:
        if position == 0:
            for cache in caches:
                cache.reset()
        tokens_N = torch.frombuffer(bytearray(some), dtype=torch.uint8).to(device).long()
        hidden_NE = model.append(tokens_N[None], caches)[0]
        before_NE, labels_N = hidden_NE[:-1], tokens_N[1:]
        if position:  # the first of these bytes is predicted by the last one before them
            before_NE, labels_N = torch.cat([last_1E, before_NE]), tokens_N
        nats_N = F.cross_entropy(model.head(before_NE).float(), labels_N, reduction="none")
        num_before_N = torch.arange(max(position, 1), position + len(some))
        bucket_N = torch.bucketize(num_before_N, powers, right=True)
        sums.index_add_(0, bucket_N, nats_N.double().cpu() / math.log(2))
        counts += torch.bincount(bucket_N, minlength=NUM_BUCKETS)
        last_1E = hidden_NE[-1:]
    return [
        Bucket(2**k, 2 ** (k + 1) - 1, count, total / count)
        for k, (count, total) in enumerate(zip(counts.tolist(), sums.tolist(), strict=True))
        if count
    ]


def mean(buckets: list[Bucket]) -> float:
    return sum(b.num_bytes * b.bits_per_byte for b in buckets) / sum(b.num_bytes for b in buckets)
