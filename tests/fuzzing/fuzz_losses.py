"""`mean_loss` on real ranks: whatever sums and counts ranks give, each gets the exact mean, and its gradient.

`tests/ranks/test_mean_loss.py` has what is refused.
"""

import math

import fuzz_ranks
import torch
from fuzz import broken
from fuzz_teams import in_ranks, try_on_ranks
from torch import Tensor

from ring_dilated_attention.ranks import context

FLOATS = [torch.float64] * 3 + [torch.float32, torch.float32, torch.bfloat16, torch.float16]


def try_case(rng, folder):
    return try_on_ranks(__name__, rng)


class Desk(fuzz_ranks.Desk):
    def deeds(self):
        return {self.exact: 1}

    def exact(self, rng):
        """Sums of any floating dtypes and counts of any forms, a few of them 0, NaN or infinite."""
        with self.context(rng, 9) as parallel:
            sums = [draw_sum(rng) for _ in range(self.world_size)]
            counts = [draw_count(rng) for _ in range(self.world_size)]
            if sum(map(number, counts)) < 1:
                counts[self.odd] = 3
            steps, step_count = None, None
            if rng.random() < 0.3:
                steps = [number(count) + rng.randint(0, 99) for count in counts]
                step_count = steps[parallel.rank]
            total, count = sum(map(number, sums)), sum(map(number, steps or counts))
            own = sums[parallel.rank]
            found = parallel.mean_loss(own, counts[parallel.rank], step_count=step_count)
            mean = torch.tensor(total / count, dtype=torch.float64)
            complaint = why_off("the mean", found, mean.to(own.dtype))
            if own.requires_grad and not complaint:
                [grad] = torch.autograd.grad(found, [own], torch.full_like(found, 1.5))
                right = torch.full(own.shape, 1.5 * self.world_size / count, dtype=torch.float64)
                complaint = why_off("its gradient", grad, right.to(own.dtype))
        return f"{sums} over {counts} of {steps}, {fuzz_ranks.told(parallel)}", complaint


def number(x):
    return float(x.detach() if isinstance(x, Tensor) else x)


def draw_sum(rng):
    usual = [rng.uniform(-9, 9), rng.uniform(-9, 9), 0.0, 1e4 * rng.random()]
    value = rng.choice([*usual, math.nan, math.inf, -math.inf])
    shape = rng.choice([(), (), (1,), (1, 1)])
    x = torch.full(shape, value, dtype=rng.choice(FLOATS))
    return x.requires_grad_(rng.random() < 0.7)


def draw_count(rng):
    """A number of terms; weights of terms may add up to anything."""
    usual = [0, 1, rng.randint(1, 50), rng.randint(1, 50)]
    count = rng.choice([*usual, 10**6, 2**40 + 1, 2.5, 2.0**24 + 1])
    form = rng.choice(["number", "number", "tensor", "tensor", "one", "grad"])
    if form == "number":
        return count
    dtypes = [torch.uint8, torch.int32, torch.float16, torch.float32]
    if count > 100 or count == 2.5:
        dtypes = [torch.float64]
    if count != 2.5:
        dtypes.append(torch.int64)
    x = torch.tensor(count, dtype=rng.choice(dtypes))
    x = x[None] if form == "one" else x
    return x.requires_grad_() if form == "grad" and x.is_floating_point() else x


def why_off(name, found, expected):
    """Equal to a rounding or two of the dtype, NaN and infinity too."""
    if found.dtype != expected.dtype or found.shape != expected.shape:
        return f"{name} is {found.dtype} {tuple(found.shape)}, not {expected.dtype} {tuple(expected.shape)}"
    eps = 2 * torch.finfo(found.dtype).eps
    is_near = torch.allclose(
        found, expected, rtol=eps, atol=4 * torch.finfo(found.dtype).tiny, equal_nan=True
    )
    return None if is_near else f"{name} is {found}, and should be {expected}"


RANK_BREAKAGES = {
    "the mean of each shard": broken("mean_loss", fuzz_ranks.mean_of_each_shard, context)
}
BREAKAGES = in_ranks(RANK_BREAKAGES)
