"""Bits per byte by how much came before, of text of any length, through caches: memory does not grow with the text."""

import math
from collections.abc import Iterable
from io import BytesIO
from typing import NamedTuple

import torch
import torch.nn.functional as F

from ..models.longnet import LongNetLM
from .files import MADE_BY

NUM_BUCKETS = 63


class Bucket(NamedTuple):
    """Bytes with `first` to `last` bytes of their context before them."""

    first: int
    last: int
    num_bytes: int
    bits_per_byte: float


@torch.no_grad()
def bits_by_position(model: LongNetLM, pieces: Iterable[tuple[int, bytes]], context: int | None) -> list[Bucket]:
    """Mean cross-entropy by powers of two of the number of bytes before; the first byte of a context is not predicted.

    Args:
        pieces: bytes with their position in their context, in order (`data.pieces`).
        context: the length of the longest context; None for any
    """
    caches = model.make_caches(1, max_len=context)
    sums, counts = torch.zeros(NUM_BUCKETS, dtype=torch.float64), torch.zeros(NUM_BUCKETS, dtype=torch.int64)
    powers, device = 2 ** torch.arange(1, NUM_BUCKETS), model.head.weight.device
    last_1E = torch.empty(1, 0)
    for position, piece in pieces:
        if position == 0:
            for cache in caches:
                cache.reset()
        tokens_N = torch.frombuffer(bytearray(piece), dtype=torch.uint8).to(device).long()
        hidden_NE = model.append(tokens_N[None], caches)[0]
        before_NE, labels_N = hidden_NE[:-1], tokens_N[1:]
        if position:  # the first byte of a piece is predicted by the last one of the piece before
            before_NE, labels_N = torch.cat([last_1E, before_NE]), tokens_N
        nats_N = F.cross_entropy(model.head(before_NE).float(), labels_N, reduction="none")
        num_before_N = torch.arange(max(position, 1), position + len(piece))
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


def draw_buckets(buckets: list[Bucket], title: str) -> bytes:
    """A PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    edges = [b.first for b in buckets] + [buckets[-1].last + 1]
    axes.stairs([b.bits_per_byte for b in buckets], edges, baseline=None, linewidth=2)
    axes.axhline(mean(buckets), color="tab:orange", linestyle="--", label=f"all bytes: {mean(buckets):.3f}")
    axes.set_xscale("log", base=2)
    axes.set_xlabel("bytes of the context before")
    axes.set_ylabel("bits per byte")
    axes.set_title(title)
    axes.set_ylim(bottom=0)
    axes.legend()
    content = BytesIO()
    figure.savefig(content, format="png", dpi=120, metadata={"Software": MADE_BY})
    return content.getvalue()
