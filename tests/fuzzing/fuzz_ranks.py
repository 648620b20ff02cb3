"""Real ranks (gloo): calls, modules and losses against the definition on one device; and one rank that errs.

What must hold: every rank has its rows of the right numbers; and whatever one rank does wrong before the handshake,
all ranks get a ValueError within seconds, nobody waits for the timeout, and the context serves on.
"""

import functools
import traceback
from contextlib import contextmanager

import torch
import torch.distributed as dist
from fuzz import Trial, broken, nothing
from fuzz_calls import HOSTILE, arranged, hostile, results
from fuzz_modules import by_hand, draw_language_model, draw_module, why_unequal
from fuzz_oracle import NAMES, Answer, answer_to, borders_of, difference, draw_call, tensors_of
from fuzz_simulated import RING_BREAKAGES, draw_cut
from fuzz_teams import PATIENCE, in_ranks, try_on_ranks, why_not_refused_at_once
from helpers import rows_of
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from ring_dilated_attention import ContextParallel, dilated_attention
from ring_dilated_attention.attention import attention
from ring_dilated_attention.layers import multihead
from ring_dilated_attention.models import LongNetLM
from ring_dilated_attention.ranks import context

EXCHANGES = ("auto", "ring", "all_gather", "all_to_all")


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
        return {self.call: 8, self.refused: 3, self.module: 2, self.loss: 2}

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

    def module(self, rng):
        """A module over shards is the module on one device, row by row, and so are the sums of its gradients."""
        seq_len = rng.randint(1, 40)
        with self.context(rng, seq_len, ["auto", "ring", "all_gather"]) as parallel:
            module = draw_module(rng, head_multiple=self.world_size, parallel=parallel)
            x = torch.randn(1, seq_len, module.embed_dim, dtype=torch.float64)
            documents = None
            if seq_len > 1 and rng.random() < 0.5:
                documents = (0, rng.randint(1, seq_len - 1), seq_len)
            expected = by_hand(module, x, documents)
            local = rows_of(parallel, x)
            found, _ = module(local, local, local, cu_seqlens=borders_of(documents))
            complaint = why_unequal("out", found, rows_of(parallel, expected))
            dout = torch.randn_like(expected)
            pairs = [(module, found, rows_of(parallel, dout)), (module, expected, dout)]
            complaint = complaint or self.why_gradients_unequal(pairs, 1.0)
        return f"{module}, {seq_len} positions, documents {documents}, {told(parallel)}", complaint

    def loss(self, rng):
        """The loss of a language model over shards, and the mean of the ranks' gradients, are those of one device."""
        seq_len = rng.randint(2, 40)
        with self.context(rng, seq_len, ["auto"]) as parallel:
            alone = draw_language_model(rng, head_multiple=self.world_size)
            how = alone.activation_checkpointing
            model = LongNetLM(alone.config, parallel=parallel, activation_checkpointing=how)
            model.double().load_state_dict(alone.state_dict())
            tokens = torch.randint(alone.config.vocab_size, (1, seq_len))
            local = rows_of(parallel, tokens)
            right, own = alone.loss(tokens), model.loss(local)
            complaint = why_unequal("loss", own, right)
            logits, expected = model(local), alone(tokens)
            complaint = complaint or why_unequal("logits", logits, rows_of(parallel, expected))
            if rng.random() < 0.5:  # by a user's own hand, over all rows
                right = expected.square().mean()
                own = parallel.mean_loss(logits.square().sum(), logits.numel())
                complaint = complaint or why_unequal("mean_loss", own, right)
            pairs = [(model, own, None), (alone, right, None)]
            complaint = complaint or self.why_gradients_unequal(pairs, 1 / self.world_size)
        return f"{alone.config}, {seq_len} positions, {told(parallel)}", complaint

    def why_gradients_unequal(self, pairs, factor):
        """All ranks' gradients, summed and times a factor, against those of one device: of a model, result and dout."""
        own, right = (
            torch.autograd.grad(y, [*model.parameters()], dout, materialize_grads=True)
            for model, y, dout in pairs
        )
        names = [name for name, _ in pairs[0][0].named_parameters()]
        total = torch.cat([x.flatten() for x in own])
        dist.all_reduce(total)
        grads = (total * factor).split([x.numel() for x in own])
        for name, x, y in zip(names, grads, right, strict=True):
            if complaint := why_unequal(f"gradient of {name}", x.view(y.shape), y):
                return complaint
        return None


def told(parallel):
    return f"exchange {parallel.exchange}, {parallel.cut}"


def mean_of_each_shard(ranks, local_sum, local_count, step_count=None):
    return mean_loss(ranks, local_sum / max(int(local_count), 1), 1)


mean_loss = context.mean_loss
RANK_BREAKAGES = {
    "a refusal stays at home": broken("refuse", nothing, attention, multihead),
    "the mean of each shard": broken("mean_loss", mean_of_each_shard, context),
    **RING_BREAKAGES,
}
BREAKAGES = in_ranks(RANK_BREAKAGES)
