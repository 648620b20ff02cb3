"""What a language model needs of other ranks: labels across the borders of shards, sums, and the mean loss."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..plan.sharding import Shard
from ..ranks.context import ContextParallel
from ..ranks.handshake import all_or_none


def shift_left(parallel: ContextParallel, x: Tensor, fill: int) -> Tensor:
    """For each local position the value at the next position of the whole sequence; `fill` after the last.

    Crosses the borders of shards, also over ranks that own nothing. For labels: not differentiable.

    Args:
        x: (B, N_local), any integer dtype.
    """
    parallel.ranks.check_all_here("shift_left")
    failure = None
    if x.dim() != 2 or x.is_floating_point() or x.is_complex():
        failure = f"shift_left takes integers (batch, N), got {x.dtype} {tuple(x.shape)}"
    batch, length = (0, 0) if failure else x.shape
    lengths = parallel.handshake(length, {"call": "shift_left", "batch": batch, "fill": fill}, failure)
    shards = parallel.ranks.shards(lengths)
    with all_or_none(parallel):
        firsts = _first_columns(parallel, x, shards)
    parts, row = [], 0
    for span in shards[parallel.rank]:
        stop = row + span.stop - span.start
        last = firsts.get(span.stop, torch.full_like(x[:, :1], fill))
        parts += [x[:, row + 1 : stop], last.to(x)]
        row = stop
    return torch.cat([x[:, :0], *parts], dim=1)


def _first_columns(parallel: ContextParallel, x: Tensor, shards: Sequence[Shard]) -> dict[int, Tensor]:
    """The first column (B, 1) of every span of every rank, by its global position."""
    own = torch.zeros(2, x.shape[0], dtype=torch.int64, device="cpu")
    row = 0
    for i, span in enumerate(shards[parallel.rank]):
        own[i] = x[:, row].cpu()
        row += span.stop - span.start
    records = parallel.ranks.records(own, "the exchange of labels")
    return {
        span.start: record[i].unsqueeze(1)
        for shard, record in zip(shards, records, strict=True)
        for i, span in enumerate(shard)
    }


def all_reduce(parallel: ContextParallel, x: Tensor) -> Tensor:
    """The sum of all ranks' tensors, which are small. Not differentiable."""
    parallel.ranks.check_all_here("all_reduce")
    parallel.handshake(0, {"call": "all_reduce", "shape": tuple(x.shape), "dtype": x.dtype, "device": x.device.type})
    with all_or_none(parallel):
        parts = parallel.ranks.gather(x.detach().unsqueeze(0), [1] * parallel.world_size, 0, "all_reduce")
        return torch.cat(parts).sum(0, dtype=x.dtype)


class GlobalMean(torch.autograd.Function):
    """The ranks' sums s_0 ... s_{p-1} over n labels in all.

    forward, on every rank:  L = (s_0 + ... + s_{p-1}) / n
    backward, on rank k:     ds_k = dL * p / n

    Rank k's backward computes its part of the gradient of the *sum* of all s, so the ranks' gradients add up to
    p * dL/dparameters, and their mean is the gradient of L.
    """

    @staticmethod
    def forward(ctx: Any, local_sum: Tensor, num_labels: int, parallel: ContextParallel) -> Tensor:
        ctx.scale = parallel.world_size / num_labels
        return all_reduce(parallel, local_sum) / num_labels

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor, None, None]:
        return grad_loss * ctx.scale, None, None
