"""Scores a model on the held-out bytes: each once, and some of them again with less context. Every rank takes part."""

import math
from typing import Any

import torch
from torch import Tensor

from ..models.longnet import LongNetLM
from ..ranks.context import ContextParallel
from .bits_per_byte import POSITIONS_AT_ONCE
from .data import Document

CUTS = (64, 512, 4_096)
CUT_BYTES = 32_768  # held-out bytes that are scored with each cut
CLEAR_BYTES = 64  # at least so many of its segment precede a scored byte, or half the segment if that is less
HELPS = 0.01  # bits per byte; less is noise on so few bytes


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
    w = max((w for w, r in zip(pattern.segment_lengths, pattern.dilation_rates, strict=True) if r == 1), default=1)
    target = torch.arange(number)
    counts = torch.stack([(target % c + c) % w >= min(CLEAR_BYTES, w // 2) for c in cuts]).all(0)
    if len(cuts) == 1 or not counts.any():
        return None
    targets = range(begin, begin + number)
    bits = [bits_per_byte(model, document, targets, c, c, counts) for c in cuts]
    return {"num_bytes": int(counts.sum()), "least_context": cuts, "bits_per_byte": bits}


@torch.no_grad()
def bits_per_byte(
    model: LongNetLM, document: Document, targets: range, size: int, num_before: int, counts: Tensor | None = None
) -> float:
    """The mean over the target bytes, or over those for which `counts` is true. A context has `num_before` bytes, and
    then the `size` bytes that it predicts."""
    size, parallel = min(size, len(targets)), model.parallel or ContextParallel()
    ranges, length = [targets[i : i + size] for i in range(0, len(targets), size)], num_before + size
    total, number, at_once = torch.zeros((), dtype=torch.float64), 0, max(1, POSITIONS_AT_ONCE // length)
    for i in range(0, len(ranges), at_once):
        some = ranges[i : i + at_once]
        # The last range may be shorter. The zeros after it change nothing before them.
        rows = b"".join(document.content[x.start - num_before : x.stop].ljust(length, b"\0") for x in some)
        tokens_BN = torch.frombuffer(bytearray(rows), dtype=torch.uint8).view(-1, length).long()
        is_next_scored_BN = torch.zeros_like(tokens_BN, dtype=torch.bool)
        for x, row in zip(some, is_next_scored_BN[:, num_before - 1 :], strict=True):
            row[: len(x)] = True if counts is None else counts[x.start - targets.start : x.stop - targets.start]
        nats = model.token_losses(parallel.shard(tokens_BN))[parallel.shard(is_next_scored_BN)]
        total, number = total + nats.sum(dtype=torch.float64), number + len(nats)
    return parallel.mean_loss(total, number).item() / math.log(2)
