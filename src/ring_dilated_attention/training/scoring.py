"""Scores a model on the held-out bytes: each once, and some of them again with less context. Every rank takes part."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..models.longnet import IGNORED_LABEL, LongNetLM
from ..ranks.context import ContextParallel
from .data import Document

PACKED_POSITIONS = 32_768  # short contexts are joined up to this length, as packed documents
CUTS = (64, 512, 4_096)
CUT_BYTES = 32_768  # held-out bytes that are scored with each cut
CLEAR_BYTES = 64  # the bytes before it that a target sees at least of its segment
HELPS = 0.01  # bits per byte; less is noise on so few bytes


class Context(NamedTuple):
    """Bytes that a model reads from `start` on. It predicts those from `first` to before `stop`."""

    start: int
    first: int
    stop: int


def held_out_bits_per_byte(model: LongNetLM, document: Document, parallel: ContextParallel) -> float:
    """The mean over the held-out bytes, each of which is predicted once, whatever the length of a sequence.

    A context is one byte and the next seq_len bytes, which are predicted.
    """
    end, length = len(document.content), document.seq_len
    firsts = range(document.num_train, end, length)
    contexts = [Context(first - 1, first, min(first + length, end)) for first in firsts]
    return bits_per_byte(model, document, contexts, parallel)


def bits_by_context(model: LongNetLM, document: Document, parallel: ContextParallel) -> dict[str, Any] | None:
    """Bits per byte with the context cut to c bytes, for each of CUTS and for half a sequence, on the same bytes.

    Contexts are 2 c bytes long and overlap by c. The second half is scored, so a byte has between c and 2 c before it.
    A byte counts if for every c it is CLEAR_BYTES or more behind the start of its segment, in the longest segments of
    rate 1. Returns None if a sequence is too short for a cut, or no byte counts.
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
    bits = []
    for c in cuts:
        firsts = range(begin, begin + number, c)
        contexts = [Context(first - c, first, min(first + c, begin + number)) for first in firsts]
        bits.append(bits_per_byte(model, document, contexts, parallel, counts))
    return {"num_bytes": int(counts.sum()), "least_context": cuts, "bits_per_byte": bits}


@torch.no_grad()
def bits_per_byte(
    model: LongNetLM,
    document: Document,
    contexts: Sequence[Context],
    parallel: ContextParallel,
    counts: Tensor | None = None,
) -> float:
    """The mean over the bytes that the contexts predict, or over those for which `counts` (one for each) is true."""
    number_at_once = max(1, PACKED_POSITIONS // (contexts[0].stop - contexts[0].start))
    total, num_labels = 0.0, 0
    for i in range(0, len(contexts), number_at_once):
        some = contexts[i : i + number_at_once]
        labels = [_bytes(document, x.start + 1, x.stop) for x in some]
        for x, row in zip(some, labels, strict=True):
            row[: x.first - x.start - 1] = IGNORED_LABEL
            if counts is not None:
                own, counts = counts[: x.stop - x.first], counts[x.stop - x.first :]
                row[x.first - x.start - 1 :][~own] = IGNORED_LABEL
        tokens = torch.cat([_bytes(document, x.start, x.stop - 1) for x in some])
        borders = torch.tensor([0, *map(len, labels)]).cumsum(0, dtype=torch.int32)
        own_tokens, own_labels = parallel.shard(torch.stack([tokens, torch.cat(labels)]))
        if number := sum(int((row != IGNORED_LABEL).sum()) for row in labels):
            logits = model(own_tokens[None], borders)[0]
            nats = F.cross_entropy(logits, own_labels, ignore_index=IGNORED_LABEL, reduction="sum")
            total += number * parallel.mean_loss(nats, (own_labels != IGNORED_LABEL).sum()).item()
            num_labels += number
    return total / num_labels / math.log(2)


def _bytes(document: Document, start: int, stop: int) -> Tensor:
    return torch.frombuffer(bytearray(memoryview(document.content)[start:stop]), dtype=torch.uint8).long()
