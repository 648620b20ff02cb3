"""`mean_loss` on real ranks: whatever ranks give, each gets the exact mean, or all get a ValueError that names the rank
and the argument; and the next mean is right.
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
from fuzz import Trial
from fuzz_commands import broken
from fuzz_modules import why_unequal
from fuzz_rank_breakages import mean_of_each_shard
from fuzz_teams import Outcome, in_ranks, try_on_ranks, why_not_refused_at_once
from torch import Tensor

from ring_dilated_attention import ContextParallel
from ring_dilated_attention.ranks import context, reduce

FLOATS = [torch.float64] * 3 + [torch.float32, torch.float32, torch.bfloat16, torch.float16]
ONE = torch.ones(())
WRONG_SUMS: list[Callable[[], Any]] = [
    lambda: None,
    lambda: "x",
    lambda: 3.0,
    lambda: [ONE],
    lambda: torch.ones(2),
    lambda: torch.ones(0),
    lambda: torch.ones(1, 0, 3),
    lambda: torch.tensor(3),
    lambda: torch.tensor(True),
    lambda: torch.tensor(1j),
    lambda: torch.ones((), device="meta"),
    lambda: torch.ones(1).to_sparse(),
    lambda: torch.float32,
]
WRONG_COUNTS: list[Callable[[], Any]] = [
    *(lambda x=x: x for x in (None, "x", "3", b"3", -1, -0.5, math.nan, math.inf, -math.inf, True, 1j, 10**400)),
    *(lambda x=x: x for x in ([], [1, 2], [3], {}, {3}, ONE.dtype, object(), -(2**63))),
    *(lambda x=x: torch.tensor(x) for x in (True, 1j, -3, math.nan, math.inf, [1, 2], [[4, 5]], [])),
    lambda: torch.ones((), device="meta"),
    lambda: torch.ones(1).to_sparse(),
    lambda: torch.zeros(3, 4, dtype=torch.int64),
]  # fmt: skip


def prepare(folder: Path) -> None:
    pass


def try_case(rng: random.Random, folder: Path) -> Trial:
    return try_on_ranks(__name__, rng)


class Desk(fuzz_ranks.Desk):
    def deeds(self) -> dict[Callable[[random.Random], Outcome], int]:
        return {
            self.exact: 6,
            self.refused: 5,
            self.too_few: 2,
            self.other_call: 2,
            self.trained: 3,
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

    def refused(self, rng: random.Random) -> Outcome:
        """One rank's sum or count is none."""
        name, wrong = rng.choice(
            [
                ("local_sum", WRONG_SUMS),
                ("local_count", WRONG_COUNTS),
                ("local_count", WRONG_COUNTS),
            ]
        )
        number = rng.randrange(len(wrong))
        with self.context(rng, 9) as parallel:
            given: dict[str, Any] = {"local_sum": draw_sum(rng), "local_count": 3}
            says = [name]
            if parallel.rank == self.odd:
                given[name] = wrong[number]()
            else:
                says.append(f"rank {parallel.ranks.control.members[self.odd]} refused")
            complaint = why_not_refused_at_once(lambda: parallel.mean_loss(**given), *says)
            complaint = complaint or self.why_no_mean(
                parallel, [ONE] * self.world_size, [2] * self.world_size
            )
        return f"rank {self.odd} has {name} {number}, {fuzz_ranks.told(parallel)}", complaint

    def too_few(self, rng: random.Random) -> Outcome:
        """No rank has a term, which is a loss of 0; or so many that their number is none."""
        counts = [rng.choice([0, 0.0, -0.0, torch.tensor(0), 1e-3, 1.6e308])]
        counts *= self.world_size
        with self.context(rng, 9) as parallel:
            own, complaint = draw_sum(rng), None
            attempt = lambda: parallel.mean_loss(own, counts[parallel.rank])  # noqa: E731
            if number(counts[0]):
                complaint = why_not_refused_at_once(attempt, "terms of a loss")
            elif abs(number(own)) > 0:
                complaint = why_not_refused_at_once(attempt, "and 0 terms")
            else:
                complaint = why_off("the mean of nothing", attempt(), own.new_zeros(()))
            complaint = complaint or self.why_no_mean(
                parallel, [ONE] * self.world_size, [2] * self.world_size
            )
        return f"over {counts}, {fuzz_ranks.told(parallel)}", complaint

    def other_call(self, rng: random.Random) -> Outcome:
        """One rank does something else meanwhile."""
        with self.context(rng, 9) as parallel:
            x = torch.ones(1, 9)
            calls: list[Callable[[], Any]] = [
                lambda: parallel.shard(x),
                lambda: parallel.unshard(x),
                lambda: parallel.shard_batch({"x": x}),
                lambda: reduce.all_reduce(parallel.ranks, x),
            ]
            number = rng.randrange(len(calls))
            attempt: Callable[[], Any] = lambda: parallel.mean_loss(ONE, 3)  # noqa: E731
            complaint = why_not_refused_at_once(
                calls[number] if parallel.rank == self.odd else attempt, "rank"
            )
            complaint = complaint or self.why_no_mean(
                parallel, [ONE] * self.world_size, [2] * self.world_size
            )
        return f"rank {self.odd} makes call {number}, {fuzz_ranks.told(parallel)}", complaint

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


def _unchecked(local_sum: Any, local_count: Any, step_count: Any) -> Tensor:
    given = (local_sum, local_count, local_count if step_count is None else step_count)
    return torch.stack([torch.as_tensor(x).detach().reshape(-1)[0].double().cpu() for x in given])


def _of_float32(local_sum: Any, local_count: Any, step_count: Any) -> Tensor:
    return _numbers(local_sum, local_count, step_count).float()


def _refused_at_home(
    ranks: Any, local_sum: Any, local_count: Any, step_count: Any = None
) -> Tensor:
    _numbers(local_sum, local_count, step_count)
    return _mean_loss(ranks, local_sum, local_count, step_count)


def _of_any_number(ranks: Any, local_sum: Any, local_count: Any, step_count: Any = None) -> Tensor:
    total, _, count = reduce.all_reduce(ranks, _numbers(local_sum, local_count, step_count))
    return reduce.GlobalMean.apply(local_sum.reshape(()), total, count, ranks.world_size)


def _unscaled(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
    return grads[0], None, None, None


_numbers, _mean_loss = reduce._numbers, context.mean_loss
RANK_BREAKAGES: dict[str, Callable[[], Any]] = {
    "the mean of each shard": broken("mean_loss", mean_of_each_shard, context),
    "sums and counts are not checked": broken("_numbers", _unchecked, reduce),
    "sums are float32": broken("_numbers", _of_float32, reduce),
    "a refusal stays at home": broken("mean_loss", _refused_at_home, context),
    "the number of all terms is not checked": broken("mean_loss", _of_any_number, context),
    "gradients are not scaled": broken("backward", staticmethod(_unscaled), reduce.GlobalMean),
}
BREAKAGES = in_ranks(RANK_BREAKAGES)
