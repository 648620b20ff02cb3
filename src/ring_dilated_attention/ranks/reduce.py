"""Sums over ranks, and the mean of a loss."""

import math
from typing import Any

import torch
from torch import Tensor

from ..pattern import is_finite_number
from .ranks import Ranks


def all_reduce(ranks: Ranks, x: Tensor) -> Tensor:
    """The sum of all ranks' tensors, without a gradient. Each rank gathers all of them: they must be small."""
    ranks.check_all_here("all_reduce")
    ranks.agree(0, {"call": "all_reduce", "shape": tuple(x.shape), "dtype": x.dtype, "device": x.device.type}, None)
    with ranks.all_or_none():
        gathered = ranks.gather(x.detach().unsqueeze(0), [1] * ranks.world_size, 0, "all_reduce")
        return torch.cat(gathered).sum(0, dtype=x.dtype)


def mean_loss(ranks: Ranks, local_sum: Tensor, local_count: int | Tensor) -> Tensor:
    """As `ContextParallel.mean_loss`."""
    ranks.check_all_here("mean_loss")
    with ranks.refusing():
        both = _sum_and_count(local_sum, local_count)
    total, count = all_reduce(ranks, both)
    if not 1 <= count < math.inf:
        raise ValueError(f"the ranks have {count:g} terms of a loss in all: a mean needs one at least.")
    return GlobalMean.apply(local_sum.reshape(()), total, count, ranks.world_size)


def _sum_and_count(local_sum: Any, local_count: Any) -> Tensor:
    if not _is_one_number(local_sum) or not local_sum.is_floating_point():
        got = f"{local_sum.dtype} {tuple(local_sum.shape)}" if isinstance(local_sum, Tensor) else repr(local_sum)
        raise ValueError(
            f"local_sum must be one number, the sum over this rank's positions, as a floating tensor, got {got}. Take "
            "reduction='sum'."
        )
    count = local_count.item() if _is_one_number(local_count) else local_count
    if not is_finite_number(count) or count < 0:
        raise ValueError(f"local_count must be one number of at least 0 (the terms in the sum), got {count!r:.99}.")
    count = torch.tensor(float(count), dtype=torch.float64, device="cpu")
    return torch.stack([local_sum.detach().reshape(()).double().cpu(), count])


def _is_one_number(x: Any) -> bool:
    return isinstance(x, Tensor) and x.numel() == 1 and x.layout == torch.strided and not x.is_meta


class GlobalMean(torch.autograd.Function):
    """The mean of a loss, from the ranks' sums s_0 ... s_{p-1} over n terms in all.

    forward, on every rank:  L = (s_0 + ... + s_{p-1}) / n
    backward, on rank k:     ds_k = dL * p / n

    Averaged over the ranks, what a backward computes is the gradient of the mean of the ranks' losses.
    """

    @staticmethod
    def forward(ctx: Any, local_sum: Tensor, total: Tensor, count: Tensor, world_size: int) -> Tensor:
        ctx.scale = world_size / count.item()
        return (total / count).to(local_sum)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return grads[0] * ctx.scale, None, None, None


class SumOverRanks(torch.autograd.Function):
    """Forward: the sum of all ranks' tensors, on each. Backward: the sum of all ranks' gradients.

    Averaged over the ranks, what a backward computes is the gradient of the mean of the ranks' losses.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Ranks) -> Tensor:
        ctx.ranks = ranks
        return all_reduce(ranks, x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return all_reduce(ctx.ranks, grads[0]), None
