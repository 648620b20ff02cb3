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
from fuzz import Trial
from fuzz_calls import HOSTILE, arranged, results
from fuzz_modules import by_hand, draw_language_model, draw_module, why_unequal
from fuzz_oracle import Answer, Call, answer_to, difference, draw_call, tensors_of
from fuzz_rank_breakages import RANK_BREAKAGES
from fuzz_simulated import draw_cut
from fuzz_teams import PATIENCE, Outcome, TeamDesk, in_ranks, try_on_ranks, why_not_refused_at_once
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from ring_dilated_attention import ContextParallel, DilatedPattern, dilated_attention
from ring_dilated_attention.models import LongNetLM
from ring_dilated_attention.models.longnet import shift_left
from ring_dilated_attention.ranks.reshard import own_rows

EXCHANGES = ("auto", "ring", "all_gather", "all_to_all")
BREAKAGES = in_ranks(RANK_BREAKAGES)


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
            self.disagree: 2,
            self.constructor: 1,
            self.module: 2,
            self.loss: 2,
            self.batch: 2,
            self.misuse: 3,
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

    def disagree(self, rng: random.Random) -> Outcome:
        """Each rank's call is right, and one is another."""
        call = draw_call(
            rng, dtypes=[torch.float64, torch.float32], head_multiple=self.world_size
        )._replace(scale=0.5)
        with self.context(rng, call.seq_len) as parallel:
            which = rng.choice(["pattern", "scale", "dtype", "heads", "call", "no call"])
            q, k, v = (self.rows(x, parallel, call.seq_len) for x in tensors_of(call)[0])
            pattern, scale = call.pattern, call.scale
            attempt: Callable[[], Any] = lambda: parallel.unshard(q)  # noqa: E731
            if parallel.rank == self.odd:
                if which == "pattern":
                    lengths = (*pattern.segment_lengths[:-1], 97)
                    rates = pattern.dilation_rates or (1,)
                    pattern = DilatedPattern(lengths, rates, window=pattern.window)
                elif which == "scale":
                    scale = 0.25
                elif which == "dtype":
                    q, k, v = (x.to(torch.bfloat16) for x in (q, k, v))
                elif which == "heads":
                    q = torch.cat([q, q], dim=2)
            if which != "call" or parallel.rank != self.odd:
                attempt = functools.partial(
                    dilated_attention,
                    q,
                    k,
                    v,
                    pattern,
                    scale=scale,
                    parallel=parallel,
                    cu_seqlens=call.cu_seqlens,
                )
            if which == "no call":
                complaint = None
            else:
                complaint = why_not_refused_at_once(attempt)
            complaint = complaint or self.why_no_answer(rng, parallel, call)
        return f"rank {self.odd} has another {which}, {call}, {told(parallel)}", complaint

    def constructor(self, rng: random.Random) -> Outcome:
        """One rank makes a context that cannot be, or another: none is made, and the next is right."""
        right = rng.choice([{}, {"sharding": "zigzag"}, {"align": 4}, {"exchange": "ring"}])
        others = [
            {"sharding": "x"},
            {"exchange": 3},
            {"align": 0},
            {"align": "4"},
            {"lengths": [1]},
            {"lengths": 5},
        ]
        others += [
            {"lengths": [-1] * self.world_size},
            {"timeout": 7},
            {"align": 2**70},
        ]
        others += [
            {"align": 3},
            {"exchange": "all_gather"},
            {"lengths": [5] * self.world_size},
            {"sharding": ["zigzag"]},
        ]
        others += [{"lengths": [1.5] * self.world_size}]
        other = rng.choice(others)
        arguments = {"timeout": PATIENCE} | (other if dist.get_rank() == self.odd else right)
        complaint = why_not_refused_at_once(lambda: ContextParallel(**arguments))
        parallel = ContextParallel(timeout=PATIENCE)
        complaint = complaint or self.why_no_answer(rng, parallel, draw_call(rng))
        parallel.close()
        return f"rank {self.odd} makes {other}, the others {right}", complaint

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

    def batch(self, rng: random.Random) -> Outcome:
        """shard, unshard, shard_batch and shift_left: every row comes to where it belongs, and so do gradients."""
        seq_len, dim = rng.randint(1, 30), rng.choice([0, 1, 2, -1, -2])
        with self.context(rng, seq_len) as parallel:
            shape = [rng.randint(1, 3) for _ in range(3)]
            shape[dim] = seq_len
            torch.manual_seed(rng.randrange(2**31))
            x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
            weights = torch.randn(shape, dtype=torch.float64)
            local = parallel.shard(x, dim)
            complaint = why_unequal("shard", local, self.rows(x, parallel, seq_len, dim))
            complaint = complaint or why_unequal("unshard", parallel.unshard(local, dim), x)
            [grad] = torch.autograd.grad(local, [x], self.rows(weights, parallel, seq_len, dim))
            complaint = complaint or why_unequal(
                "gradient of shard", grad, weights / self.world_size
            )
            rows = local.detach().requires_grad_()
            [grad] = torch.autograd.grad(
                parallel.unshard(rows, dim), [rows], weights * (1 + parallel.rank)
            )
            right = self.rows(weights, parallel, seq_len, dim) * sum(range(1, self.world_size + 1))
            complaint = complaint or why_unequal("gradient of unshard", grad, right)
            tokens, source = (
                torch.arange(seq_len)[None],
                rng.choice([None, *range(self.world_size)]),
            )
            given = {"tokens": tokens} if source in (None, parallel.rank) else None
            dealt = parallel.shard_batch(given, source=source)
            for name, whole in (("tokens", tokens), ("positions", tokens[0])):
                rows = self.rows(whole, parallel, seq_len, min(1, whole.dim() - 1))
                complaint = complaint or (
                    None if torch.equal(dealt[name], rows) else f"shard_batch: {name}"
                )
            moved = torch.cat([tokens[:, 1:], torch.tensor([[-7]])], dim=1)
            is_moved = torch.equal(
                shift_left(parallel, dealt["tokens"], -7), self.rows(moved, parallel, seq_len)
            )
            complaint = complaint or (None if is_moved else "shift_left")
        return f"{shape} along {dim}, from {source}, {told(parallel)}", complaint

    def misuse(self, rng: random.Random) -> Outcome:
        """One rank calls something with what it cannot take, and the others rightly."""
        seq_len = rng.randint(1, 20)
        with self.context(rng, seq_len) as parallel:
            x, rows = (
                torch.zeros(1, seq_len, 8),
                self.rows(torch.zeros(1, seq_len, 8), parallel, seq_len),
            )
            tokens = self.rows(torch.zeros(1, seq_len, dtype=torch.int64), parallel, seq_len)
            module = draw_module(rng, head_multiple=self.world_size, parallel=parallel).float()
            model = LongNetLM(
                draw_language_model(rng, head_multiple=self.world_size).config, parallel=parallel
            )
            wide = torch.zeros(1, rows.shape[1], module.embed_dim)
            batch = {"tokens": torch.zeros(1, seq_len, dtype=torch.int64)}
            bad_batches = [
                None,
                {},
                [1],
                {"x": 3},
                {"tokens": x},
                {1: x},
                {"x": x.to_sparse()},
                {"x": x.to("meta")},
            ]
            methods: dict[str, tuple[Callable[[Any], Any], Any, list[Any]]] = {
                "shard": (parallel.shard, x, [None, 3, x[0, 0], x[0], x.double(), x[:, :, :3], "x"]),
                "shard's dim": (lambda dim: parallel.shard(x, dim), 1, [3, -4, None, "1", 1.0, 2**70]),
                "unshard": (parallel.unshard, rows, [None, [1], rows[0, 0:0, 0], rows.double(), rows[:, :, :3]]),
                "shard_batch": (parallel.shard_batch, batch, bad_batches),
                "source": (lambda source: parallel.shard_batch(batch, source=source), 0, [1, -1, "0", 1.5, True, 9]),
                "mean_loss": (lambda y: parallel.mean_loss(y, 3), x.sum(), [None, "x", x, x[:0], 1j]),
                "count": (lambda n: parallel.mean_loss(x.sum(), n), 3, [None, "x", torch.ones(2), 1j]),
                "module": (lambda y: module(y, y, y), wide, [None, wide[0], wide.bfloat16(), wide[..., 1:], "x"]),
                "mask": (lambda m: module(wide, wide, wide, m), None, [[1], torch.ones(2, 2), wide[..., 0] > 0]),
                "model": (model, tokens, [None, tokens[0], tokens.float(), tokens + 999, tokens - 1, "x"]),
                "loss": (model.loss, tokens, [None, tokens[0], tokens.bool(), tokens + 999, [[1]]]),
            }  # fmt: skip
            name = rng.choice(list(methods))
            method, right, wrong = methods[name]
            number = rng.randrange(len(wrong))
            given = wrong[number] if parallel.rank == self.odd else right
            if (
                isinstance(given, Tensor)
                and isinstance(right, Tensor)
                and given.shape == right.shape
                and not given.numel()
            ):
                given = None  # no token is out of range, no dtype is seen, on a rank without rows
            complaint = why_not_refused_at_once(lambda: method(given))
            complaint = complaint or self.why_no_answer(
                rng,
                parallel,
                draw_call(rng, head_multiple=self.world_size)._replace(
                    seq_len=seq_len, documents=None
                ),
            )
        return f"rank {self.odd} has {name} {number}, {told(parallel)}", complaint


def told(parallel: ContextParallel) -> str:
    return f"exchange {parallel.exchange}, {parallel.cut}"
