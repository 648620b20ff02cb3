"""Sums over ranks, and the mean of a loss."""

import math
from typing import Any

import torch
from torch import Tensor

from ..pattern import is_finite_number
from .call import described
from .ranks import Ranks


def all_reduce(ranks: Ranks, x: Tensor, call: str = "all_reduce") -> Tensor:
    """The sum of all ranks' tensors, without a gradient. Tensors must be small: each rank gathers every rank's
    tensor."""
    ranks.check_all_here(call)
    fields: dict[str, object] = {
        "call": call,
        "shape": tuple(x.shape),
        "dtype": x.dtype,
        "device": x.device.type,
    }
    ranks.agree(0, fields)
    with ranks.all_or_none():
        gathered = ranks.gather(x.detach().unsqueeze(0), [1] * ranks.world_size, 0, call)
        return torch.cat(gathered).sum(0, dtype=x.dtype)


def mean_loss(
    ranks: Ranks,
    local_sum: Tensor,
    local_count: int | Tensor,
    step_count: int | Tensor | None = None,
) -> Tensor:
    """The mean of a loss over these ranks, as `ContextParallel.mean_loss` describes it."""
    call = "mean_loss" if step_count is None else "mean_loss with step_count"
    ranks.check_all_here(call)
    with ranks.refusing():
        numbers = _numbers(local_sum, local_count, step_count)
    # `total`, `count` and `step` are scalars, and the same on all ranks.
    total, count, step = all_reduce(ranks, numbers, call)
    if count and not 1 <= count < math.inf:
        raise ValueError(
            f"the ranks have {count:g} terms of a loss in all: a mean needs one at least."
        )
    if not count and total.abs() > 0:
        raise ValueError(
            f"the ranks have a loss of {total:g} in all, and 0 terms: local_count must count the terms."
        )
    if not count <= step < math.inf:
        raise ValueError(
            f"step_count={step:g}, but this micro-batch alone has {count:g} terms over all ranks: "
            "step_count must count the terms of all micro-batches of the step."
        )
    return GlobalMean.apply(
        local_sum.reshape(()), total, step if count else count, ranks.world_size
    )


def _numbers(local_sum: Any, local_count: Any, step_count: Any) -> Tensor:
    """The arguments of `mean_loss` on this rank, checked: the sum, its number of terms, and the number of terms in the
    step, as a float64 tensor (3,) on the CPU."""
    if not _is_one_number(local_sum) or not local_sum.is_floating_point():
        raise ValueError(
            "local_sum must be one number, the sum over this rank's positions, as a floating tensor, got "
            f"{described(local_sum)}. Take reduction='sum'."
        )
    count = step = _count("local_count", local_count)
    if step_count is not None:
        step = _count("step_count", step_count)
    counts = torch.tensor([count, step], dtype=torch.float64, device="cpu")
    return torch.cat([local_sum.detach().reshape(1).double().cpu(), counts])


def _count(name: str, count: Any) -> float:
    if _is_one_number(count):
        count = count.item()
    if not is_finite_number(count) or count < 0:
        raise ValueError(
            f"{name} must be a number of at least 0, how many terms the sum has, got {count!r:.99}."
        )
    return float(count)


def _is_one_number(x: Any) -> bool:
    return isinstance(x, Tensor) and x.numel() == 1 and x.layout == torch.strided and not x.is_meta


class GlobalMean(torch.autograd.Function):
    """The mean L of a loss, from the ranks' sums s_0 ... s_{p-1} over n terms in all.

    forward, on every rank:  L = (s_0 + ... + s_{p-1}) / n, and 0 if n = 0
    backward, on rank k:     ds_k = dL * p / n, and 0 if n = 0

    Averaged over the ranks, what a backward computes is the gradient of the mean of the ranks' losses. (The average
    divides by p, hence the factor p.)
    """

    @staticmethod
    def forward(
        ctx: Any, local_sum: Tensor, total: Tensor, count: Tensor, world_size: int
    ) -> Tensor:
        if not count:
            ctx.scale = 0.0
            return torch.zeros_like(local_sum)
        ctx.scale = world_size / count.item()
        return (total / count).to(local_sum)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return grads[0] * ctx.scale, None, None, None


class SumOverRanks(torch.autograd.Function):
    """Forward: every rank gets the sum of all ranks' tensors. Backward: every rank gets the sum of all gradients.

    Averaged over the ranks, what a backward computes is the gradient of the mean of the ranks' losses.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Ranks) -> Tensor:
        ctx.ranks = ranks
        return all_reduce(ranks, x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return all_reduce(ctx.ranks, grads[0]), None
