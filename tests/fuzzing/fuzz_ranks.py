"""Real ranks (gloo): calls, modules and losses against the definition on one device; and one rank that errs.

What must hold: every rank has its rows of the right numbers; and whatever one rank does wrong before the handshake,
all ranks get a ValueError within seconds, nobody waits for the timeout, and the context serves on.
"""

import functools
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from fuzz import Trial, broken, nothing
from fuzz_calls import HOSTILE, arranged, results
from fuzz_modules import by_hand, draw_language_model, draw_module, why_unequal
from fuzz_oracle import Answer, Call, answer_to, difference, draw_call, tensors_of
from fuzz_simulated import RING_BREAKAGES, draw_cut
from fuzz_teams import PATIENCE, Outcome, TeamDesk, in_ranks, try_on_ranks, why_not_refused_at_once
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from ring_dilated_attention import ContextParallel, dilated_attention
from ring_dilated_attention.attention import attention
from ring_dilated_attention.layers import multihead
from ring_dilated_attention.models import LongNetLM
from ring_dilated_attention.ranks import context
from ring_dilated_attention.ranks.reshard import own_rows

EXCHANGES = ("auto", "ring", "all_gather", "all_to_all")


def prepare(folder: Path) -> None:
    pass


def try_case(rng: random.Random, folder: Path) -> Trial:
    return try_on_ranks(__name__, rng)


class Desk(TeamDesk):
    """One rank, and the contexts that it keeps from case to case."""

    def __init__(self, world_size: int) -> None:
        super().__init__(world_size)
        self.mesh = (
            init_device_mesh("cpu", (2, 2), mesh_dim_names=("ring", "heads"))
            if world_size == 4
            else None
        )
        self.contexts: dict[str, ContextParallel] = {}

    def deeds(self) -> dict[Callable[[random.Random], Outcome], int]:
        return {
            self.call: 8,
            self.refused: 3,
            self.module: 2,
            self.loss: 2,
        }

    @contextmanager
    def context(
        self, rng: random.Random, seq_len: int, exchanges: Sequence[str] = EXCHANGES
    ) -> Iterator[ContextParallel]:
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

    def rows(self, x: Tensor, parallel: ContextParallel, seq_len: int, dim: int = 1) -> Tensor:
        """This rank's rows of a full tensor. Nothing is sent."""
        return own_rows(
            x, parallel.ranks.shards(parallel.ranks.lengths_of(seq_len))[parallel.rank], dim
        )

    def why_no_answer(
        self, rng: random.Random, parallel: ContextParallel, call: Call
    ) -> str | None:
        """What is wrong with this rank's rows of a call."""
        inputs, dout, dlse = tensors_of(call)
        values, sizes = answer_to(call, inputs, dout, dlse)
        take = functools.partial(self.rows, parallel=parallel, seq_len=call.seq_len)
        attend = functools.partial(
            dilated_attention,
            pattern=call.pattern,
            cu_seqlens=call.cu_seqlens,
            scale=call.scale,
            parallel=parallel,
        )
        found = results(
            call, arranged(rng, call, [*map(take, inputs)]), attend, take(dout), take(dlse)
        )
        found.pop("dsinks", None)  # a rank's own rows have a part of it
        own = (
            {name: take(x) for name, x in numbers.items() if name != "dsinks"}
            for numbers in (values, sizes)
        )
        return difference(call, found, Answer(*own))

    def call(self, rng: random.Random) -> Outcome:
        """Right calls, one or two on one context."""
        exchanges = rng.choice([["all_to_all"], EXCHANGES[:3]])
        is_dealt = exchanges == ["all_to_all"] or self.world_size == 4
        call = draw_call(rng, head_multiple=self.world_size if is_dealt else 1, sinks=True)
        complaint = None
        with self.context(rng, call.seq_len, exchanges) as parallel:
            for _ in range(rng.randint(1, 2)):
                complaint = complaint or self.why_no_answer(rng, parallel, call)
        return f"{call}, {told(parallel)}", complaint

    def refused(self, rng: random.Random) -> Outcome:
        """One rank's arguments cannot be: none computes, and the next call is right."""
        call = draw_call(rng, head_multiple=self.world_size)
        names = [name for name in HOSTILE if name != "parallel"]
        name = rng.choice(names)
        number = rng.randrange(len(HOSTILE[name]))
        with self.context(rng, call.seq_len) as parallel:
            take = functools.partial(self.rows, parallel=parallel, seq_len=call.seq_len)
            arguments: dict[str, Any] = dict(
                zip(("query", "key", "value"), map(take, tensors_of(call)[0]), strict=True)
            )
            arguments |= {
                "pattern": call.pattern,
                "cu_seqlens": call.cu_seqlens,
                "scale": call.scale,
            }
            if parallel.rank == self.odd:
                right = arguments.get(name)
                # borders: of all rows
                whole = {"query": tensors_of(call)[0][0]} if name == "cu_seqlens" else {}
                arguments[name] = HOSTILE[name][number](arguments | whole)
                shape = getattr(arguments[name], "shape", None)
                if isinstance(right, Tensor) and shape == right.shape and not right.numel():
                    arguments[name] = None  # on a rank without rows, a part of them is all
            complaint = why_not_refused_at_once(
                lambda: dilated_attention(**arguments, parallel=parallel)
            )
            complaint = complaint or self.why_no_answer(rng, parallel, call)
        return f"rank {self.odd} has {name} {number}, {call}, {told(parallel)}", complaint

    def module(self, rng: random.Random) -> Outcome:
        """A module over shards is the module on one device, row by row, and so are the sums of its gradients."""
        seq_len = rng.randint(1, 40)
        with self.context(rng, seq_len, ["auto", "ring", "all_gather"]) as parallel:
            module = draw_module(rng, head_multiple=self.world_size, parallel=parallel)
            x = torch.randn(1, seq_len, module.embed_dim, dtype=torch.float64)
            documents = (
                (0, rng.randint(1, seq_len - 1), seq_len)
                if seq_len > 1 and rng.random() < 0.5
                else None
            )
            starts = [
                0 if documents is None or t < documents[1] else documents[1] for t in range(seq_len)
            ]
            expected = by_hand(module, x, torch.arange(seq_len) - torch.tensor(starts), documents)
            local = self.rows(x, parallel, seq_len)
            cu_seqlens = None if documents is None else torch.tensor(documents, dtype=torch.int32)
            found, _ = module(local, local, local, cu_seqlens=cu_seqlens)
            complaint = why_unequal("out", found, self.rows(expected, parallel, seq_len))
            weights = torch.randn_like(expected)
            pairs = ((expected, weights), (found, self.rows(weights, parallel, seq_len)))
            names, parameters = zip(*module.named_parameters(), strict=True)
            right, own = (
                torch.autograd.grad(y, parameters, w, materialize_grads=True) for y, w in pairs
            )
            complaint = complaint or self.why_unequal_in_all(names, own, right, 1.0)
        return f"{module}, {seq_len} positions, documents {documents}, {told(parallel)}", complaint

    def loss(self, rng: random.Random) -> Outcome:
        """The loss of a language model over shards, and the mean of the ranks' gradients, are those of one device."""
        seq_len = rng.randint(2, 40)
        with self.context(rng, seq_len, ["auto"]) as parallel:
            alone = draw_language_model(rng, head_multiple=self.world_size)
            model = LongNetLM(
                alone.config,
                parallel=parallel,
                activation_checkpointing=alone.activation_checkpointing,
            )
            model.double().load_state_dict(alone.state_dict())
            tokens = torch.randint(alone.config.vocab_size, (1, seq_len))
            right, own = alone.loss(tokens), model.loss(self.rows(tokens, parallel, seq_len))
            complaint = why_unequal("loss", own, right)
            logits = model(self.rows(tokens, parallel, seq_len))
            expected = self.rows(alone(tokens), parallel, seq_len)
            complaint = complaint or why_unequal("logits", logits, expected)
            if rng.random() < 0.5:  # by a user's own hand, over all rows
                right = alone(tokens).square().mean()
                own = parallel.mean_loss(logits.square().sum(), logits.numel())
                complaint = complaint or why_unequal("mean_loss", own, right)
            names = [name for name, _ in model.named_parameters()]
            grads = [
                torch.autograd.grad(y, m.parameters(), materialize_grads=True)
                for y, m in ((own, model), (right, alone))
            ]
            complaint = complaint or self.why_unequal_in_all(names, *grads, 1 / self.world_size)
        return f"{alone.config}, {seq_len} positions, {told(parallel)}", complaint

    def why_unequal_in_all(
        self, names: Sequence[str], own: Sequence[Tensor], right: Sequence[Tensor], factor: float
    ) -> str | None:
        """All ranks' gradients, summed and times a factor, against the right ones."""
        total = torch.cat([x.flatten() for x in own])
        dist.all_reduce(total)
        grads = (total * factor).split([x.numel() for x in own])
        for name, x, y in zip(names, grads, right, strict=True):
            if complaint := why_unequal(f"gradient of {name}", x.view(y.shape), y):
                return complaint
        return None


def told(parallel: ContextParallel) -> str:
    return f"exchange {parallel.exchange}, {parallel.cut}"


def mean_of_each_shard(
    ranks: Any, local_sum: Tensor, local_count: int | Tensor, step_count: Any = None
) -> Tensor:
    return mean_loss(ranks, local_sum / max(int(local_count), 1), 1)


mean_loss = context.mean_loss
RANK_BREAKAGES: dict[str, Callable[[], Any]] = {
    "a refusal stays at home": broken("refuse", nothing, attention, multihead),
    "the mean of each shard": broken("mean_loss", mean_of_each_shard, context),
    **RING_BREAKAGES,
}
BREAKAGES = in_ranks(RANK_BREAKAGES)
