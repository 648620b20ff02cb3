"""Real ranks (gloo): calls against the definition on one device; `mean_loss`; and one rank that errs.

What must hold: every rank has its rows of the right numbers; whatever sums and counts ranks give, each gets the exact
mean, and its gradient; and whatever one rank does wrong before the handshake,
all ranks get a ValueError within seconds, nobody waits for the timeout, and the context serves on.
"""

import functools
import math
import traceback
from contextlib import contextmanager

import torch
from fuzz import Trial, broken, nothing
from fuzz_calls import HOSTILE, arranged, hostile, results
from fuzz_oracle import NAMES, Answer, answer_to, difference, draw_call, tensors_of
from fuzz_simulated import RING_BREAKAGES, draw_cut
from fuzz_teams import PATIENCE, in_ranks, try_on_ranks, why_not_refused_at_once
from helpers import rows_of
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from ring_dilated_attention import ContextParallel, dilated_attention
from ring_dilated_attention.attention import attention
from ring_dilated_attention.layers import multihead
from ring_dilated_attention.ranks import context

EXCHANGES = ("auto", "ring", "all_gather", "all_to_all")
FLOATS = [torch.float64] * 3 + [torch.float32, torch.float32, torch.bfloat16, torch.float16]


def try_case(rng, folder):
    return try_on_ranks(__name__, rng)


class Desk:
    """One rank, and the contexts that it keeps from case to case. A deed tells what was done, and what is wrong."""

    def __init__(self, world_size):
        self.world_size, self.contexts, self.mesh = world_size, {}, None
        if world_size == 4:
            self.mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ring", "heads"))

    def deeds(self):
        """What may be done in a case, and how often."""
        return {self.call: 8, self.refused: 3, self.mean: 5}

    def trial_of(self, rng):
        """What this rank finds. All draw the same numbers."""
        self.odd = rng.randrange(self.world_size)  # that errs, where one does
        deeds = self.deeds()
        deed = rng.choices([*deeds], [*deeds.values()])[0]
        try:
            description, complaint = deed(rng)
        except Exception:  # noqa: BLE001  whatever it is, it is reported
            description, complaint = "", traceback.format_exc()
        name = f"{deed.__name__}, {self.world_size} ranks"
        return Trial(name, f"{name}: {description}", complaint)

    @contextmanager
    def context(self, rng, seq_len, exchanges=EXCHANGES):
        """One of these ranks, which may be known from cases before."""
        arguments = draw_cut(rng, self.world_size, seq_len) | {"exchange": rng.choice(exchanges)}
        group, stays = None, rng.random() < 0.9
        if self.mesh is not None and rng.random() < 0.3 and arguments["exchange"] != "all_to_all":
            group = self.mesh
            arguments.pop("lengths", None)
        name = f"{group is None} {arguments}"
        if name not in self.contexts:
            self.contexts[name] = ContextParallel(group, timeout=PATIENCE, **arguments)
        yield self.contexts[name]
        if not stays or {"lengths", "align"} & arguments.keys():
            self.contexts.pop(name).close()

    def why_no_answer(self, rng, parallel, call):
        """What is wrong with this rank's rows of a call."""
        inputs, dout, dlse = tensors_of(call)
        take = functools.partial(rows_of, parallel)
        attend = functools.partial(dilated_attention, **call.rules, parallel=parallel)
        leaves = arranged(rng, call, [take(x) for x in inputs])
        found = results(call, leaves, attend, take(dout), take(dlse))
        found.pop("dsinks", None)  # a rank's own rows have a part of it
        values, sizes = (
            {name: take(numbers[name]) for name in NAMES}
            for numbers in answer_to(call, inputs, dout, dlse)
        )
        return difference(call, found, Answer(values, sizes))

    def call(self, rng):
        """Right calls, one or two on one context."""
        exchanges = rng.choice([["all_to_all"], EXCHANGES[:3]])
        is_dealt = exchanges == ["all_to_all"] or self.world_size == 4
        call = draw_call(rng, head_multiple=self.world_size if is_dealt else 1, sinks=True)
        complaint = None
        with self.context(rng, call.seq_len, exchanges) as parallel:
            for _ in range(rng.randint(1, 2)):
                complaint = complaint or self.why_no_answer(rng, parallel, call)
        return f"{call}, {told(parallel)}", complaint

    def refused(self, rng):
        """One rank's arguments cannot be: none computes, and the next call is right."""
        call = draw_call(rng, head_multiple=self.world_size)
        names = [name for name in HOSTILE if name != "parallel"]
        name = rng.choice(names)
        number = rng.randrange(len(HOSTILE[name]))
        with self.context(rng, call.seq_len) as parallel:
            rows = [rows_of(parallel, x) for x in tensors_of(call)[0]]
            arguments = dict(zip(("query", "key", "value"), rows, strict=True)) | call.rules
            if parallel.rank == self.odd:
                right = arguments.get(name)
                # borders: of all rows
                whole = {"query": tensors_of(call)[0][0]} if name == "cu_seqlens" else {}
                arguments[name] = hostile(name, number, arguments | whole)
                shape = getattr(arguments[name], "shape", None)
                if isinstance(right, Tensor) and shape == right.shape and not right.numel():
                    arguments[name] = None  # on a rank without rows, a part of them is all
            complaint = why_not_refused_at_once(
                lambda: dilated_attention(**arguments, parallel=parallel)
            )
            complaint = complaint or self.why_no_answer(rng, parallel, call)
        return f"rank {self.odd} has {name} {number}, {call}, {told(parallel)}", complaint

    def mean(self, rng):
        """`mean_loss` of sums of any floating dtypes and counts of any forms, a few of them 0, NaN or infinite."""
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
            complaint = why_no_mean("the mean", found, mean.to(own.dtype))
            if own.requires_grad and not complaint:
                [grad] = torch.autograd.grad(found, [own], torch.full_like(found, 1.5))
                right = torch.full(own.shape, 1.5 * self.world_size / count, dtype=torch.float64)
                complaint = why_no_mean("its gradient", grad, right.to(own.dtype))
        return f"{sums} over {counts} of {steps}, {told(parallel)}", complaint


def told(parallel):
    return f"exchange {parallel.exchange}, {parallel.cut}"


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


def why_no_mean(name, found, expected):
    """Equal to a rounding or two of the dtype, NaN and infinity too."""
    if found.dtype != expected.dtype or found.shape != expected.shape:
        return f"{name} is {found.dtype} {tuple(found.shape)}, not {expected.dtype} {tuple(expected.shape)}"
    eps = 2 * torch.finfo(found.dtype).eps
    is_near = torch.allclose(
        found, expected, rtol=eps, atol=4 * torch.finfo(found.dtype).tiny, equal_nan=True
    )
    return None if is_near else f"{name} is {found}, and should be {expected}"


def mean_of_each_shard(ranks, local_sum, local_count, step_count=None):
    return mean_loss(ranks, local_sum / max(int(local_count), 1), 1)


mean_loss = context.mean_loss
RANK_BREAKAGES = {
    "a refusal stays at home": broken("refuse", nothing, attention, multihead),
    "the mean of each shard": broken("mean_loss", mean_of_each_shard, context),
    **RING_BREAKAGES,
}
BREAKAGES = in_ranks(RANK_BREAKAGES)
