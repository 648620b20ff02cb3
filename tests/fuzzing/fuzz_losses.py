"""`mean_loss` on real ranks: whatever sums and counts ranks give, each gets the exact mean, and its gradient.

`tests/ranks/test_mean_loss.py` has what is refused.
"""

import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fuzz_ranks
import torch
import torch.distributed as dist
import torch.nn.functional as F
from fuzz import Trial, broken
from fuzz_modules import why_unequal
from fuzz_teams import Outcome, in_ranks, try_on_ranks
from torch import Tensor

from ring_dilated_attention import ContextParallel
from ring_dilated_attention.ranks import context

FLOATS = [torch.float64] * 3 + [torch.float32, torch.float32, torch.bfloat16, torch.float16]


def prepare(folder: Path) -> None:
    pass


def try_case(rng: random.Random, folder: Path) -> Trial:
    return try_on_ranks(__name__, rng)


class Desk(fuzz_ranks.Desk):
    def deeds(self) -> dict[Callable[[random.Random], Outcome], int]:
        return {
            self.exact: 2,
            self.trained: 1,
        }

    def exact(self, rng: random.Random) -> Outcome:
        """Sums of any floating dtypes and counts of any forms, a few of them 0, NaN or infinite."""
        with self.context(rng, 9) as parallel:
            sums = [draw_sum(rng) for _ in range(self.world_size)]
            counts = [draw_count(rng) for _ in range(self.world_size)]
            if sum(map(number, counts)) < 1:
                counts[self.odd] = 3
            steps = None
            if rng.random() < 0.3:
                steps = [number(count) + rng.randint(0, 99) for count in counts]
            complaint = self.why_no_mean(parallel, sums, counts, steps)
        return f"{sums} over {counts} of {steps}, {fuzz_ranks.told(parallel)}", complaint

    def why_no_mean(
        self,
        parallel: ContextParallel,
        sums: list[Tensor],
        counts: list[Any],
        steps: list[float] | None = None,
    ) -> str | None:
        total, count = (sum(map(number, numbers)) for numbers in (sums, steps or counts))
        own = sums[parallel.rank].detach().clone().requires_grad_(sums[parallel.rank].requires_grad)
        step_count = None if steps is None else steps[parallel.rank]
        found = parallel.mean_loss(own, counts[parallel.rank], step_count=step_count)
        complaint = why_off(
            "the mean", found, torch.tensor(total / count, dtype=torch.float64).to(own.dtype)
        )
        if own.requires_grad and not complaint:
            [grad] = torch.autograd.grad(found, [own], torch.full_like(found, 1.5))
            expected = torch.full(own.shape, 1.5 * self.world_size / count, dtype=torch.float64)
            complaint = why_off("its gradient", grad, expected.to(own.dtype))
        return complaint

    def trained(self, rng: random.Random) -> Outcome:
        """Labels, some of which are ignored, of a sequence in shards: the loss and the mean of the ranks' gradients."""
        seq_len, dtype = rng.randint(1, 30), torch.float64
        with self.context(rng, seq_len) as parallel:
            torch.manual_seed(rng.randrange(2**31))
            x, weight = (
                torch.randn(1, seq_len, 4, dtype=dtype),
                torch.randn(5, 4, dtype=dtype, requires_grad=True),
            )
            labels = torch.randint(5, (1, seq_len)).masked_fill(
                torch.rand(1, seq_len) < rng.random() / 2, -100
            )
            labels[0, rng.randrange(seq_len)] = 2
            expected = F.cross_entropy((x @ weight.T)[0], labels[0])
            own = self.rows(labels, parallel, seq_len)[0]
            logits = self.rows(x, parallel, seq_len)[0] @ weight.T
            found = parallel.mean_loss(
                F.cross_entropy(logits, own, reduction="sum"), (own != -100).sum()
            )
            complaint = why_unequal("loss", found, expected)
            right, gradient = (torch.autograd.grad(y, [weight])[0] for y in (expected, found))
            dist.all_reduce(gradient)
            complaint = complaint or why_unequal("gradient", gradient / self.world_size, right)
        return (
            f"{int((labels != -100).sum())} of {seq_len} labels, {fuzz_ranks.told(parallel)}",
            complaint,
        )


def number(x: Any) -> float:
    return float(x.detach() if isinstance(x, Tensor) else x)


def draw_sum(rng: random.Random) -> Tensor:
    value = rng.choice(
        [
            rng.uniform(-9, 9),
            rng.uniform(-9, 9),
            0.0,
            1e4 * rng.random(),
            math.nan,
            math.inf,
            -math.inf,
        ]
    )
    shape = rng.choice([(), (), (1,), (1, 1)])
    x = torch.full(shape, value, dtype=rng.choice(FLOATS))
    return x.requires_grad_(rng.random() < 0.7)


def draw_count(rng: random.Random) -> Any:
    """A number of terms; weights of terms may add up to anything."""
    count = rng.choice(
        [0, 1, rng.randint(1, 50), rng.randint(1, 50), 10**6, 2**40 + 1, 2.5, 2.0**24 + 1]
    )
    form = rng.choice(["number", "number", "tensor", "tensor", "one", "grad"])
    if form == "number":
        return count
    dtypes = (
        [torch.float64]
        if count > 100 or count == 2.5
        else [torch.uint8, torch.int32, torch.float16, torch.float32]
    )
    dtypes += [torch.int64] if count != 2.5 else []
    x = torch.tensor(count, dtype=rng.choice(dtypes))
    x = x[None] if form == "one" else x
    return x.requires_grad_() if form == "grad" and x.is_floating_point() else x


def why_off(name: str, found: Tensor, expected: Tensor) -> str | None:
    """Equal to a rounding or two of the dtype, NaN and infinity too."""
    if found.dtype != expected.dtype or found.shape != expected.shape:
        return f"{name} is {found.dtype} {tuple(found.shape)}, not {expected.dtype} {tuple(expected.shape)}"
    eps = 2 * torch.finfo(found.dtype).eps
    is_near = torch.allclose(
        found, expected, rtol=eps, atol=4 * torch.finfo(found.dtype).tiny, equal_nan=True
    )
    return None if is_near else f"{name} is {found}, and should be {expected}"


RANK_BREAKAGES: dict[str, Callable[[], Any]] = {
    "the mean of each shard": broken("mean_loss", fuzz_ranks.mean_of_each_shard, context),
}
BREAKAGES = in_ranks(RANK_BREAKAGES)
