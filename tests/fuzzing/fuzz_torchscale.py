"""torchscale's family: random networks against the same put together by hand, in float64.

By hand: projections, the definition over padded rows (`tests/padded.py`), feed-forward, residuals, LayerNorms.

What must hold: states of layers and every gradient equal those by hand. Uninitialised memory is NaN.

B batch, N positions, E embedding, H heads, D head dim.
"""

import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from fuzz import Trial, broken
from fuzz_modules import why_unequal
from helpers import poisoned_memory
from padded import padded_reference
from torch import Tensor

from ring_dilated_attention import simulate
from ring_dilated_attention.models import LongNetEncoder, TorchscaleConfig
from ring_dilated_attention.models.torchscale import gate as gates
from ring_dilated_attention.models.torchscale import networks
from ring_dilated_attention.reference import dilated_attention_reference

FEW = 64  # numbers of a slice of the feed-forward


def prepare(folder: Path) -> None:
    pass


def try_case(rng: random.Random, folder: Path) -> Trial:
    with poisoned_memory():
        return try_model(rng)


def draw_config(rng: random.Random) -> TorchscaleConfig:
    num_heads = rng.randint(1, 5)
    num_branches = rng.randint(1, 3)
    return TorchscaleConfig(
        [rng.choice([rng.randint(1, 12), rng.randint(1, 60), 2**40]) for _ in range(num_branches)],
        [rng.choice([1, rng.randint(1, 5), rng.randint(1, 12)]) for _ in range(num_branches)],
        num_layers=rng.randint(1, 3),
        embed_dim=num_heads * rng.choice([2, 3, 4, 6]),
        num_heads=num_heads,
        ffn_dim=rng.randint(1, 24),
        normalize_output=rng.random() < 0.7,
        padding=rng.choice(["torchscale", "torchscale", "exact"]),
    )


def draw_model(rng: random.Random, **more: Any) -> LongNetEncoder:
    torch.manual_seed(rng.randrange(2**31))
    model = LongNetEncoder(draw_config(rng), **more).double()
    for name, x in model.named_parameters():  # biases and norms that say something
        torch.nn.init.normal_(x, mean=float("norm" in name and name.endswith("weight")), std=0.4)
    return model


def by_hand(model: LongNetEncoder, x: Tensor) -> list[Tensor]:
    """What goes into the first layer, what comes out of each, and the result."""
    config, of = model.config, dict(model.named_parameters())

    def norm(name: str, x: Tensor) -> Tensor:
        mean = x.mean(-1, keepdim=True)
        variance = (x - mean).square().mean(-1, keepdim=True)
        return (x - mean) / torch.sqrt(variance + 1e-5) * of[f"{name}.weight"] + of[f"{name}.bias"]

    def linear(name: str, x: Tensor) -> Tensor:
        return x @ of[f"{name}.weight"].T + of[f"{name}.bias"]

    states = [x]
    for i in range(config.num_layers):
        layer = f"layers.{i}"
        normed = norm(f"{layer}.self_attn_layer_norm", x)
        q, k, v = (
            linear(f"{layer}.self_attn.{n}_proj", normed).unflatten(-1, (config.num_heads, -1))
            for n in "qkv"
        )
        attend = padded_reference if config.padding == "torchscale" else dilated_attention_reference
        out = attend(q, k, v, model.pattern)[0].flatten(2)
        x = x + linear(f"{layer}.self_attn.out_proj", norm(f"{layer}.self_attn.inner_attn_ln", out))
        hidden = linear(f"{layer}.ffn.fc1", norm(f"{layer}.final_layer_norm", x))
        hidden = hidden * (1 + torch.erf(hidden / math.sqrt(2))) / 2
        x = x + linear(f"{layer}.ffn.fc2", norm(f"{layer}.ffn.ffn_layernorm", hidden))
        states.append(x)
    return [*states, norm("layer_norm", x) if config.normalize_output else x]


def try_model(rng: random.Random) -> Trial:
    how = rng.choice(
        ["plain", "plain", "recomputed", "recomputed", "states", "no gradient", "shared", "shared"]
    )
    parallel = simulate.all_ranks(rng.randint(1, 4)) if how == "shared" else None
    model = draw_model(rng, activation_checkpointing="recomputed" in how, parallel=parallel)
    batch, num_positions = (
        rng.choice([1, 1, 2, 3]),
        rng.choice([rng.randint(1, 9), rng.randint(1, 45)]),
    )
    given = torch.randn(batch, num_positions, model.config.embed_dim, dtype=torch.float64)
    expected = by_hand(model, given)
    description = f"{model.config}, {tuple(given.shape)}"
    kind = f"{model.config.padding}, {how}"
    if how == "states":
        states = model(given, collect=lambda x: x)
        pairs = zip(states, expected[:-1], strict=True)
        complaints = [why_unequal(f"state {i}", x, y) for i, (x, y) in enumerate(pairs)]
        return Trial(kind, description, next(filter(None, complaints), None))
    if how == "no gradient":
        with torch.no_grad(), mock.patch.object(networks, "FFN_SLICE_NUMBERS", FEW):
            return Trial(kind, description, why_unequal("out", model(given), expected[-1]))
    found = model(given)
    complaint = why_unequal("out", found, expected[-1])
    names, parameters = zip(*model.named_parameters(), strict=True)
    dout = torch.randn_like(expected[-1])
    grads = [
        torch.autograd.grad(y, parameters, dout, materialize_grads=True)
        for y in (found, expected[-1])
    ]
    for name, actual, right in zip(names, *grads, strict=True):
        complaint = complaint or why_unequal(f"gradient of {name}", actual, right)
    return Trial(kind, description, complaint)


def _layer_without_a_residual(self: networks.Layer, x: Tensor, attend: Any) -> Tensor:
    x = self.self_attn(self.self_attn_layer_norm(x), attend)
    return x + self.ffn(self.final_layer_norm(x))


BREAKAGES: dict[str, Callable[[], Any]] = {
    "misplaced rows stay": broken("padded_position", lambda branch, position: position, gates),
    "a residual is left out": broken("forward", _layer_without_a_residual, networks.Layer),
}
