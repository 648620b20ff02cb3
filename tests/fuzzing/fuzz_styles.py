"""FSDP2 and torch's tensor-parallel styles on real ranks: ShardSequence, ShardHeads, both on a mesh, torch's own
ColwiseParallel and RowwiseParallel, parameters sharded by `fully_shard`; against the same module in one process.

B batch, N positions, E embedding.
"""

import copy
import random
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import fuzz_ranks
import torch
import torch.distributed as dist
from fuzz import Trial
from fuzz_commands import broken
from fuzz_modules import by_hand, draw_language_model, draw_module, why_unequal
from fuzz_oracle import draw_pattern
from fuzz_rank_breakages import mean_of_each_shard
from fuzz_teams import PATIENCE, Outcome, in_ranks, try_on_ranks, why_not_refused_at_once
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from ring_dilated_attention import (
    ContextParallel,
    DilatedPattern,
    MultiheadDilatedAttention,
    dilated_attention,
)
from ring_dilated_attention.integrations import torch as styles
from ring_dilated_attention.integrations.torch import (
    ShardHeads,
    ShardSequence,
    check_averaged,
    held_heads,
    replace_attention,
)
from ring_dilated_attention.models import LongNetLM, NextTokenLoss
from ring_dilated_attention.ranks import context, reshard


def prepare(folder: Path) -> None:
    pass


def try_case(rng: random.Random, folder: Path) -> Trial:
    return try_on_ranks(__name__, rng)


class Around(nn.Module):
    """Something before and after what is sharded."""

    def __init__(self, inner: nn.Module, embed_dim: int) -> None:
        super().__init__()
        self.before = nn.Linear(embed_dim, embed_dim, dtype=torch.float64)
        self.inner = inner
        self.after = nn.Linear(embed_dim, 3, dtype=torch.float64)

    def forward(self, x: Tensor, **more: Any) -> Tensor:
        y = self.before(x)
        out = (
            self.inner(y, y, y, **more)
            if isinstance(self.inner, MultiheadDilatedAttention)
            else self.inner(y)
        )
        return self.after(out[0] if isinstance(out, tuple) else out)


class Projected(nn.Module):
    """An attention of four projections, of which torch's styles shard the columns and rows."""

    def __init__(
        self, embed_dim: int, num_heads: int, num_kv_heads: int, pattern: DilatedPattern, bias: bool
    ) -> None:
        super().__init__()
        self.num_heads, self.pattern, self.head_dim = num_heads, pattern, embed_dim // num_heads
        widths = [n * self.head_dim for n in (num_heads, num_kv_heads, num_kv_heads)]
        self.q, self.k, self.v = (
            nn.Linear(embed_dim, width, bias=bias, dtype=torch.float64) for width in widths
        )
        self.o = nn.Linear(embed_dim, embed_dim, bias=bias, dtype=torch.float64)

    def forward(self, x: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
        q, k, v = (
            linear(x).unflatten(-1, (-1, self.head_dim)) for linear in (self.q, self.k, self.v)
        )
        more = {
            "heads_held": held_heads(self, q.shape[2], self.num_heads),
            "num_heads": self.num_heads,
        }
        more = more if more["heads_held"] is not None else {}
        return self.o(
            dilated_attention(q, k, v, self.pattern, cu_seqlens=cu_seqlens, **more).flatten(2)
        )


class Desk(fuzz_ranks.Desk):
    def __init__(self, world_size: int) -> None:
        super().__init__(world_size)
        self.line = init_device_mesh("cpu", (world_size,), mesh_dim_names=("line",))
        self.grid = (
            init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
            if world_size == 4
            else None
        )
        self.all_of_grid = self.grid["dp", "cp"]._flatten("all") if self.grid is not None else None

    def deeds(self) -> dict[Callable[[random.Random], Outcome], int]:
        deeds: dict[Callable[[random.Random], Outcome], int] = {
            self.heads: 4,
            self.columns: 3,
            self.sequence: 5,
            self.erring: 3,
            self.parameters: 6,
            self.refused_between: 2,
        }
        if self.grid is not None:
            deeds |= {
                self.heads_and_sequence: 4,
                self.heads_and_parameters: 3,
            }
        return deeds

    def mean(self, x: Tensor, mesh: DeviceMesh | None = None) -> Tensor:
        total = x.detach().clone()
        group = None if mesh is None else mesh.get_group()
        dist.all_reduce(total, group=group)
        return total / dist.get_world_size(group)

    # --- heads

    def heads(self, rng: random.Random) -> Outcome:
        """ShardHeads: outputs, and gradients of inputs and of what a rank holds of the parameters."""
        alone = draw_heads(rng, self.world_size)
        frozen = {name: rng.random() < 0.2 for name, _ in alone.named_parameters()}
        sharded = nn.ModuleDict({"attention": copy.deepcopy(alone)})
        for name, parameter in sharded["attention"].named_parameters():
            parameter.requires_grad_(not frozen[name])
        parallelize_module(sharded, self.line, {"attention": ShardHeads()})
        is_kept = all(
            x.requires_grad != frozen[name] for name, x in sharded["attention"].named_parameters()
        )
        complaint = None if is_kept else "what was frozen is trained, or the other way round"
        sharded.requires_grad_(True)
        # random numbers, which must still be those of all ranks
        inputs, more, expected = self.draw_inputs(rng, alone)
        found, _ = sharded["attention"](*inputs, **more)
        complaint = complaint or why_unequal("out", found, expected)
        complaint = complaint or self.why_wrong_gradients(
            alone, sharded["attention"], inputs[:1], expected, found
        )
        return f"{alone}, {more}", complaint

    def draw_inputs(
        self, rng: random.Random, module: MultiheadDilatedAttention
    ) -> tuple[list[Tensor], dict[str, Any], Tensor]:
        """Inputs, further arguments, and the output by hand."""
        seq_len, batch = rng.randint(1, 40), rng.choice([1, 1, 2])
        how = rng.choice(["plain", "packed", "positions", "three tensors"])
        documents, more, positions = None, {}, torch.arange(seq_len)
        if how == "packed" and seq_len > 1:
            batch, documents = 1, (0, rng.randint(1, seq_len - 1), seq_len)
            more["cu_seqlens"] = torch.tensor(documents, dtype=torch.int32)
            positions = torch.cat(
                [torch.arange(documents[1]), torch.arange(seq_len - documents[1])]
            )
        elif how == "positions" and module.rotary_base is not None:
            more["positions"] = positions = torch.tensor(
                [rng.randrange(10**6) for _ in range(seq_len)]
            )
        x = torch.randn(
            batch, seq_len, module.embed_dim, dtype=torch.float64, requires_grad=rng.random() < 0.8
        )
        expected = by_hand(module, x, positions, documents)
        return [x * 1 for _ in range(3)] if how == "three tensors" else [x] * 3, more, expected

    def why_wrong_gradients(
        self,
        alone: MultiheadDilatedAttention,
        sharded: MultiheadDilatedAttention,
        inputs: Sequence[Tensor],
        expected: Tensor,
        found: Tensor,
    ) -> str | None:
        """Of whole inputs, and of the parameters that this rank holds, which have the gradients of their rows."""
        weights = torch.randn_like(expected)
        leaves = [x for x in inputs if x.requires_grad and x.is_leaf]
        right = torch.autograd.grad(
            expected, [*leaves, *alone.parameters()], weights, materialize_grads=True
        )
        own = torch.autograd.grad(
            found, [*leaves, *sharded.parameters()], weights, materialize_grads=True
        )
        for x, y in zip(own[: len(leaves)], right, strict=False):
            if complaint := why_unequal("gradient of the input", x, y):
                return complaint
        return self.why_other_heads(alone, sharded, right[len(leaves) :], own[len(leaves) :])

    def why_other_heads(
        self,
        alone: MultiheadDilatedAttention,
        sharded: MultiheadDilatedAttention,
        right: Sequence[Tensor],
        own: Sequence[Tensor],
    ) -> str | None:
        """Gradients by the place of their parameters in the whole module."""
        whole = copy.deepcopy(alone)
        with torch.no_grad():
            for parameter, grad in zip(whole.parameters(), right, strict=True):
                parameter.copy_(grad)
        whole.parallel = None
        for (name, x), y in zip(
            whole.held(sharded.heads_held).named_parameters(), own, strict=True
        ):
            if complaint := why_unequal(f"gradient of {name}", y, x):
                return complaint
        return None

    def columns(self, rng: random.Random) -> Outcome:
        """torch's ColwiseParallel and RowwiseParallel: which heads a rank has is read from the parameters."""
        kv_heads = self.world_size * rng.randint(1, 2) if rng.random() < 0.8 else rng.randint(1, 5)
        num_heads = kv_heads * rng.randint(1, 3)
        torch.manual_seed(rng.randrange(2**31))
        pattern = draw_pattern(rng, num_heads)
        alone = Projected(
            num_heads * rng.choice([2, 4]), num_heads, kv_heads, pattern, rng.random() < 0.5
        )
        sharded = copy.deepcopy(alone)
        x = torch.randn(2, rng.randint(1, 30), alone.q.in_features, dtype=torch.float64)
        plan = {
            "q": ColwiseParallel(),
            "k": ColwiseParallel(),
            "v": ColwiseParallel(),
            "o": RowwiseParallel(),
        }
        mesh = self.line if self.grid is None or rng.random() < 0.5 else self.grid["cp"]
        parallelize_module(sharded, mesh, plan)
        is_sharded_over_dp = mesh is not self.line and rng.random() < 0.5
        if is_sharded_over_dp:
            fully_shard(sharded, mesh=self.grid["dp"])
        description = (
            f"{num_heads} heads, {kv_heads} key/value heads, {pattern}, FSDP {is_sharded_over_dp}"
        )
        if kv_heads % mesh.size():
            pairs = zip(
                *(linear.weight.chunk(mesh.size()) for linear in (alone.q, alone.k)), strict=False
            )
            widths = [(len(q), len(k)) for q, k in pairs]
            # A rank with whole heads by chance would wait for those that refuse, and so would one without a column,
            # for which torch's linear gathers the others' columns.
            if len(widths) < mesh.size() or any(
                k % sharded.head_dim == 0 and q % k == 0 for q, k in widths
            ):
                return description, None
            attempt = lambda: sharded(x)  # noqa: E731
            return description, None if is_refused(
                attempt
            ) else "projections that cut a head are taken"
        expected, found = alone(x), sharded(x)
        complaint = why_unequal("out", found, expected)
        weights = torch.randn_like(expected)
        (expected * weights).sum().backward()
        (found * weights).sum().backward()
        for (name, p), q in zip(alone.named_parameters(), sharded.parameters(), strict=True):
            complaint = complaint or why_unequal(f"gradient of {name}", whole(q.grad), p.grad)
        return description, complaint

    # --- sequences

    def draw_around(self, rng: random.Random, kv_multiple: int) -> tuple[Around, str]:
        torch.manual_seed(rng.randrange(2**31))
        if rng.random() < 0.6:
            inner: nn.Module = draw_heads(rng, kv_multiple)
            return Around(inner, inner.embed_dim), f"{inner}"
        num_heads = kv_multiple * rng.randint(1, 2)
        dim = 4 * num_heads
        layer = nn.TransformerEncoderLayer(
            dim, num_heads, 8, dropout=0.0, batch_first=True, dtype=torch.float64
        )
        encoder = nn.TransformerEncoder(layer, rng.randint(1, 2), enable_nested_tensor=False)
        pattern = draw_pattern(rng, num_heads)
        replace_attention(encoder, pattern)
        return Around(encoder, dim), f"encoder of {num_heads} heads, {pattern}"

    def sequence(self, rng: random.Random) -> Outcome:
        """ShardSequence: outputs, and the mean of gradients, before it, in it and behind it."""
        alone, told = self.draw_around(rng, self.world_size)
        return self.why_unequal_over(rng, self.line, alone, copy.deepcopy(alone), told, [])

    def heads_and_sequence(self, rng: random.Random) -> Outcome:
        """Both on a mesh, in either order."""
        assert self.grid is not None
        torch.manual_seed(rng.randrange(2**31))
        module = draw_heads(rng, 4)
        alone = Around(module, module.embed_dim)
        sharded = copy.deepcopy(alone)
        return self.why_unequal_over(
            rng, self.grid["cp"], alone, sharded, f"{module}", [self.grid["dp"]]
        )

    def why_unequal_over(
        self,
        rng: random.Random,
        mesh: DeviceMesh,
        alone: Around,
        sharded: Around,
        told: str,
        heads_over: Sequence[DeviceMesh],
    ) -> Outcome:
        """Where heads are shared too: over another axis of the mesh."""
        seq_len, batch = rng.randint(1, 40), rng.choice([1, 1, 2])
        exchange = rng.choice(["auto", "ring", "all_gather", "all_to_all"])
        style = ShardSequence(
            sharding=rng.choice(["contiguous", "zigzag"]),
            exchange=exchange,
            shard_inputs=rng.random() < 0.6,
            unshard_outputs=rng.random() < 0.5,
        )
        plans = [(axis, {"inner": ShardHeads()}) for axis in heads_over]
        for axis, plan in rng.sample([*plans, (mesh, {"inner": style})], len(plans) + 1):
            parallelize_module(sharded, axis, plan)
        [parallel] = style.contexts.values()
        more: dict[str, Any] = {}
        if (
            isinstance(alone.inner, MultiheadDilatedAttention)
            and seq_len > 1
            and rng.random() < 0.4
        ):
            batch = 1
            more["cu_seqlens"] = torch.tensor(
                [0, rng.randint(1, seq_len - 1), seq_len], dtype=torch.int32
            )
        x = torch.randn(
            batch, seq_len, alone.before.in_features, dtype=torch.float64, requires_grad=True
        )
        expected = alone(x, **more)
        given = (
            x if style.shard_inputs else self.rows(x.detach(), parallel, seq_len).requires_grad_()
        )
        found = sharded(given, **more)
        weights = torch.randn_like(expected)
        right, loss = expected, (found * weights).sum() if style.unshard_outputs else None
        if not style.unshard_outputs:
            right = self.rows(expected, parallel, seq_len)
            loss = (found * self.rows(weights, parallel, seq_len)).sum() * mesh.size()
        complaint = why_unequal("out", found, right)
        grads = torch.autograd.grad(
            (expected * weights).sum(), [x, *alone.parameters()], materialize_grads=True
        )
        own = torch.autograd.grad(loss, [given, *sharded.parameters()], materialize_grads=True)
        if style.shard_inputs:
            complaint = complaint or why_unequal(
                "gradient of the input", self.mean(own[0], mesh), grads[0]
            )
        else:
            dx = self.rows(grads[0], parallel, seq_len) * mesh.size()
            complaint = complaint or why_unequal("gradient of the rows", own[0], dx)
        means = [self.mean(x, mesh) for x in own[1:]]
        names = [name for name, _ in alone.named_parameters()]
        if heads_over:
            inner = [i for i, name in enumerate(names) if name.startswith("inner")]
            outer = [i for i, name in enumerate(names) if not name.startswith("inner")]
            # a rank may hold no bias of out_proj
            own_names = [name for name, _ in sharded.named_parameters()]
            held = [x for name, x in zip(own_names, means, strict=True) if name.startswith("inner")]
            rest = [
                x for name, x in zip(own_names, means, strict=True) if not name.startswith("inner")
            ]
            right_of_inner = [grads[1 + i] for i in inner]
            complaint = complaint or self.why_other_heads(
                alone.inner, sharded.inner, right_of_inner, held
            )
            names, means, grads = (
                [names[i] for i in outer],
                rest,
                (grads[0], *(grads[1 + i] for i in outer)),
            )
        for name, x, y in zip(names, means, grads[1:], strict=True):
            complaint = complaint or why_unequal(f"gradient of {name}", x, y)
        parallel.close()
        return f"{told}, {batch} x {seq_len}, {vars(style)}, {more}", complaint

    def erring(self, rng: random.Random) -> Outcome:
        """One rank gives a module on shared sequences what it cannot take; then all give what it can."""
        seq_len = rng.randint(self.world_size, 20)
        module = draw_heads(rng, self.world_size)
        style = ShardSequence(shard_inputs=rng.random() < 0.5, unshard_outputs=rng.random() < 0.5)
        box = nn.ModuleDict({"inner": copy.deepcopy(module)})
        parallelize_module(box, self.line, {"inner": style})
        [parallel] = style.contexts.values()
        x = torch.randn(1, seq_len, module.embed_dim, dtype=torch.float64)
        given = x if style.shard_inputs else self.rows(x, parallel, seq_len)
        wrong = [
            None,
            given[0],
            given[..., 1:],
            given.float(),
            [given],
            given[None],
            given.to("meta"),
            "x",
            given[0, 0],
        ]
        if style.shard_inputs:
            wrong += [x[:, 1:], x[:, :0], torch.cat([x, x]), x.to_sparse()]
        number = rng.randrange(len(wrong))
        own = wrong[number] if parallel.rank == self.odd else given
        complaint = why_not_refused_at_once(lambda: box["inner"](own, own, own), "")
        found, _ = box["inner"](given, given, given)
        expected, _ = module(x, x, x)
        right = expected if style.unshard_outputs else self.rows(expected, parallel, seq_len)
        complaint = complaint or why_unequal("out afterwards", found, right)
        parallel.close()
        return (
            f"rank {self.odd} gives {number}, {vars(style)}, {seq_len} positions, {module}",
            complaint,
        )

    # --- parameters

    def draw_models(
        self, rng: random.Random, parallel: ContextParallel, multiple: int
    ) -> tuple[NextTokenLoss, NextTokenLoss]:
        """A language model with its loss, of one process and of ranks."""
        alone = draw_language_model(rng, head_multiple=multiple)
        model = LongNetLM(
            alone.config, parallel=parallel, activation_checkpointing=rng.random() < 0.5
        ).double()
        model.load_state_dict(alone.state_dict())
        return NextTokenLoss(alone), NextTokenLoss(model)

    def sharded_over(
        self, rng: random.Random
    ) -> tuple[DeviceMesh | None, DeviceMesh | None, DeviceMesh, int]:
        """The mesh of parameters, of a sequence, and of samples, and how many samples there are."""
        if self.grid is not None and rng.random() < 0.6:
            return rng.choice([self.grid, self.all_of_grid]), self.grid["cp"], self.grid["dp"], 2
        return rng.choice([None, self.line]), None, self.line, 1

    def parameters(self, rng: random.Random) -> Outcome:
        """Losses and parameters of a few steps with FSDP2: accumulated, clipped, packed."""
        over, cp, dp, replicas = self.sharded_over(rng)
        sharding = rng.choice(["contiguous", "zigzag"])
        parallel = ContextParallel(cp, sharding=sharding, timeout=PATIENCE)
        alone, model = self.draw_models(rng, parallel, self.world_size)
        reshard = rng.choice([True, False, None])
        options = {} if over is None else {"mesh": over}
        modules = [*model.model.blocks, *rng.choice([[], [model.model.head]]), model]
        for sharded in modules[rng.choice([0, -1]) :]:
            fully_shard(sharded, reshard_after_forward=reshard, **options)
        check_averaged(model, parallel)
        seq_len, num_steps, clip = rng.randint(2, 30), rng.randint(1, 2), rng.choice([None, 0.05])
        micro = rng.choice([1, 1, 2])
        place = dp.get_local_rank() if replicas > 1 else 0
        borders = None
        if replicas == 1 and seq_len > 3 and rng.random() < 0.4:
            borders = torch.tensor([0, rng.randint(1, seq_len - 2), seq_len], dtype=torch.int32)
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.5) for m in (alone, model)]
        complaint = None
        for _ in range(num_steps):
            for i in range(micro):
                tokens = torch.randint(alone.model.config.vocab_size, (replicas, seq_len))
                own = self.rows(tokens[place : place + 1], parallel, seq_len)
                model.set_requires_gradient_sync(i == micro - 1)
                loss = model(own, borders)
                complaint = complaint or why_unequal(
                    "loss", loss, alone(tokens[place : place + 1], borders)
                )
                (loss / micro).backward()
                (alone(tokens, borders) / micro).backward()
            for each, optimizer in zip((alone, model), optimizers, strict=True):
                if clip is not None:
                    nn.utils.clip_grad_norm_(each.parameters(), clip)
                optimizer.step()
                optimizer.zero_grad()
        for (name, x), y in zip(alone.named_parameters(), model.parameters(), strict=True):
            complaint = complaint or why_unequal(name, whole(y.detach()), x)
        parallel.close()
        told = f"{num_steps} steps of {micro}, clip {clip}, reshard {reshard}, {replicas} replicas, {sharding}"
        return (
            f"{alone.model.config}, {seq_len} positions, {told}, over {over}, {borders}",
            complaint,
        )

    def refused_between(self, rng: random.Random) -> Outcome:
        """One rank gives a sharded model tokens that it cannot take: all refuse, and the next loss is right."""
        over, cp, *_ = self.sharded_over(rng)
        parallel = ContextParallel(cp, timeout=PATIENCE)
        alone, model = self.draw_models(rng, parallel, self.world_size)
        for sharded in (*model.model.blocks, model):
            fully_shard(sharded, **({} if over is None else {"mesh": over}))
        seq_len = rng.randint(self.world_size, 20)
        tokens = torch.randint(alone.model.config.vocab_size, (1, seq_len))
        own = self.rows(tokens, parallel, seq_len)
        wrong = [None, own[0], own.double(), own + 999, own - 999, "x", own.bool(), [own]]
        number = rng.randrange(len(wrong))
        rank = self.odd % parallel.world_size  # of each sequence, so that all meet in what follows
        given = wrong[number] if parallel.rank == rank else own
        complaint = why_not_refused_at_once(lambda: model(given), "")
        loss, right = model(own), alone(tokens)
        complaint = complaint or why_unequal("loss afterwards", loss, right)
        loss.backward()
        right.backward()
        for (name, x), y in zip(alone.named_parameters(), model.parameters(), strict=True):
            complaint = complaint or why_unequal(f"gradient of {name}", whole(y.grad), x.grad)
        parallel.close()
        return f"rank {rank} gives {number}, {alone.model.config}, over {over}", complaint

    def heads_and_parameters(self, rng: random.Random) -> Outcome:
        """ShardHeads over one axis, what each rank holds of them sharded over the other, samples along it."""
        assert self.grid is not None
        alone = draw_heads(rng, 2)
        box = nn.ModuleDict({"attention": copy.deepcopy(alone)})
        parallelize_module(box, self.grid["cp"], {"attention": ShardHeads()})
        sharded = box["attention"]
        held = sharded.heads_held
        fully_shard(sharded, mesh=self.grid["dp"])
        x = torch.randn(2, rng.randint(1, 30), alone.embed_dim, dtype=torch.float64)
        place = self.grid["dp"].get_local_rank()
        own = x[place : place + 1]
        expected, found = alone(x, x, x)[0], sharded(own, own, own)[0]
        complaint = why_unequal("out", found, expected[place : place + 1])
        weights = torch.randn_like(expected)
        grads = torch.autograd.grad(
            (expected * weights).sum() / 2, [*alone.parameters()], materialize_grads=True
        )
        (found * weights[place : place + 1]).sum().backward()
        assert sharded.heads_held == held
        own_grads = [whole(p.grad) for p in sharded.parameters()]
        complaint = complaint or self.why_other_heads(alone, sharded, grads, own_grads)
        return f"{alone}", complaint


def draw_heads(rng: random.Random, multiple: int) -> MultiheadDilatedAttention:
    """A module without a norm over all heads."""
    module = draw_module(rng, head_multiple=multiple)
    while module.sub_layernorm is not None:
        module = draw_module(rng, head_multiple=multiple)
    return module


def is_refused(attempt: Callable[[], Any]) -> bool:
    try:
        attempt()
    except (ValueError, RuntimeError):
        return True
    return False


def whole(x: Tensor | None) -> Any:
    return x.full_tensor() if isinstance(x, DTensor) else x


def _held_from_the_first(module: nn.Module, num_held: int, num_heads: int) -> range | None:
    return None if num_held == num_heads else range(num_held)


def _held_with_bias(self: MultiheadDilatedAttention, heads: range) -> MultiheadDilatedAttention:
    sharded = _held(self, heads)
    if sharded.out_proj.bias is None and self.out_proj.bias is not None:
        sharded.out_proj.bias = nn.Parameter(self.out_proj.bias.detach().clone())
    return sharded


def _held_as_first(self: MultiheadDilatedAttention, heads: range) -> MultiheadDilatedAttention:
    """Its parameters, with the phases of the first heads."""
    sharded = _held(self, heads)
    sharded.heads_held = range(len(heads))
    return sharded


def _held_at_random(self: MultiheadDilatedAttention, heads: range) -> MultiheadDilatedAttention:
    """With numbers drawn in between, on each rank another number of them."""
    torch.rand(heads.start + 1)
    return _held(self, heads)


def _unsummed(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
    return reshard.own_rows(grads[0], ctx.shards[ctx.ranks.rank], ctx.dim), None, None, None


def _inputs_as_they_are(
    change: Callable[[Tensor], Tensor],
) -> Callable[[nn.Module, tuple, dict], Any]:
    return lambda _, args, kwargs: (args, kwargs)


_held = MultiheadDilatedAttention.held
RANK_BREAKAGES: dict[str, Callable[[], Any]] = {
    "heads of torch's styles are taken for the first": broken(
        "held_heads", _held_from_the_first, sys.modules[__name__]
    ),
    "phases go by the held head": broken("held", _held_as_first, MultiheadDilatedAttention),
    "biases are added by every rank": broken("held", _held_with_bias, MultiheadDilatedAttention),
    "parts draw random numbers": broken("held", _held_at_random, MultiheadDilatedAttention),
    "gradients of whole tensors are not summed": broken(
        "backward", staticmethod(_unsummed), reshard.UnshardRows
    ),
    "inputs stay as they are": broken("_each_input", _inputs_as_they_are, styles),
    "the mean of each shard": broken("mean_loss", mean_of_each_shard, context),
}
BREAKAGES = in_ranks(RANK_BREAKAGES)
