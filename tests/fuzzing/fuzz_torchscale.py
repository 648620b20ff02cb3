"""torchscale's family: random networks against the same put together by hand, in float64, and its attention in 16 bits.

By hand: projections, the definition over padded rows (`tests/padded.py`), feed-forward, residuals, LayerNorms.

What must hold: states of layers and every gradient equal those by hand. Uninitialised memory is NaN.

B batch, N positions, E embedding, H heads, D head dim.
"""

from unittest import mock

import torch
import torch.nn.functional as F
from fuzz import Trial, broken
from fuzz_modules import why_gradients_unequal, why_unequal
from fuzz_oracle import NAMES, sizes_of_terms, why_off
from helpers import poisoned_memory
from padded import padded_branches, padded_reference

from ring_dilated_attention import DilatedPattern, simulate
from ring_dilated_attention.models import LongNetEncoder, TorchscaleConfig, torchscale_attention
from ring_dilated_attention.models.torchscale import gate as gates
from ring_dilated_attention.models.torchscale import networks
from ring_dilated_attention.reference import dilated_attention_reference, multiplicity

FEW = 64  # numbers of a slice of the feed-forward


def try_case(rng, folder):
    with poisoned_memory():
        return rng.choice([try_model, try_model, try_gated])(rng)


def draw_config(rng):
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


def draw_model(rng, **more):
    torch.manual_seed(rng.randrange(2**31))
    model = LongNetEncoder(draw_config(rng), **more).double()
    for name, x in model.named_parameters():  # biases and norms that say something
        torch.nn.init.normal_(x, mean=float("norm" in name and name.endswith("weight")), std=0.4)
    return model


def by_hand(model, x):
    """What goes into the first layer, what comes out of each, and the result."""
    config, of = model.config, dict(model.named_parameters())

    def norm(name, x):
        return F.layer_norm(x, x.shape[-1:], of[f"{name}.weight"], of[f"{name}.bias"])

    def linear(name, x):
        return F.linear(x, of[f"{name}.weight"], of[f"{name}.bias"])

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
        hidden = F.gelu(linear(f"{layer}.ffn.fc1", norm(f"{layer}.final_layer_norm", x)))
        x = x + linear(f"{layer}.ffn.fc2", norm(f"{layer}.ffn.ffn_layernorm", hidden))
        states.append(x)
    return [*states, norm("layer_norm", x) if config.normalize_output else x]


def try_model(rng):
    how = rng.choice(["plain", "recomputed", "states", "no gradient", "shared"])
    parallel = simulate.all_ranks(rng.randint(1, 4)) if how == "shared" else None
    model = draw_model(rng, activation_checkpointing=how == "recomputed", parallel=parallel)
    batch = rng.choice([1, 1, 2, 3])
    num_positions = rng.choice([rng.randint(1, 9), rng.randint(1, 45)])
    given = torch.randn(batch, num_positions, model.config.embed_dim, dtype=torch.float64)
    given.requires_grad_()
    *states, expected = by_hand(model, given)
    if how == "states":
        pairs = zip(model(given, collect=lambda x: x), states, strict=True)
        complaints = [why_unequal(f"state {i}", x, y) for i, (x, y) in enumerate(pairs)]
        complaint = next(filter(None, complaints), None)
    elif how == "no gradient":
        with torch.no_grad(), mock.patch.object(networks, "FFN_SLICE_NUMBERS", FEW):
            complaint = why_unequal("out", model(given), expected)
    else:
        found = model(given)
        complaint = why_unequal("out", found, expected)
        complaint = complaint or why_gradients_unequal(model, given, found, expected)
    kind = f"{model.config.padding}, {how}"
    return Trial(kind, f"{model.config}, {tuple(given.shape)}", complaint)


def sizes_of_gated(inputs, pattern, dout, lse):
    """`sizes_of` over padded rows, branch by branch. Keys of padding are zero: they count in lse alone."""
    length, num_heads, head_dim = inputs[0].shape[1:]
    total = {name: torch.zeros_like(dout) for name in NAMES} | {"lse": torch.zeros_like(lse)}
    for rows_P, is_row_P, one in padded_branches(pattern, length):
        cropped = len(rows_P) - length  # places beyond the sequence, which are no result
        padded = [x[:, rows_P] * is_row_P[:, None, None] for x in inputs]
        dout_P = F.pad(dout, (0, 0, 0, 0, 0, cropped))
        lse_P = F.pad(lse, (0, 0, 0, cropped), value=torch.inf)
        count, dlse_P = multiplicity(one, len(rows_P), num_heads), torch.zeros_like(lse_P)
        sizes = sizes_of_terms(count, head_dim**-0.5, padded, dout_P, dlse_P, lse_P)
        for name in ("out", "lse"):
            total[name] += sizes[name][:, :length]
        for name in ("dq", "dk", "dv"):
            total[name].index_add_(1, rows_P[is_row_P], sizes[name][:, is_row_P])
    return total


def try_gated(rng):
    """torchscale's attention, zero rows and misplaced ones included, against the definition over padded rows."""
    torch.manual_seed(rng.randrange(2**31))
    short = rng.choice([torch.bfloat16, torch.float16])
    num_heads, seq_len = rng.randint(1, 5), rng.randint(1, 40)
    branches = [(rng.randint(1, 30), rng.randint(1, 7)) for _ in range(rng.randint(1, 3))]
    is_causal = rng.random() < 0.3
    pattern = DilatedPattern(*zip(*branches, strict=True), is_causal=is_causal, phase="blocked")
    inputs = [torch.randn(2, seq_len, num_heads, 8) for _ in range(3)]
    leaves = [x.clone().requires_grad_() for x in inputs]
    with torch.autocast("cpu", short):
        out, lse = torchscale_attention(*leaves, pattern, return_lse=True)
    exact = [x.to(short).double().requires_grad_() for x in inputs]
    expected, right_lse = padded_reference(*exact, pattern)
    dout = torch.randn_like(out)
    values = [expected.detach(), right_lse.detach()]
    values += torch.autograd.grad((expected * dout).sum(), exact)
    results_here = [out, lse, *torch.autograd.grad((out * dout).sum(), leaves)]
    sizes = sizes_of_gated([x.detach() for x in exact], pattern, dout.double(), values[1])
    complaint = None
    for name, actual, value in zip(NAMES, results_here, values, strict=True):
        dtype = short if name == "out" else torch.float32
        complaint = complaint or why_off(name, actual, value, sizes[name], dtype, short)
    kind = "gated, causal" if is_causal else "gated, not causal"
    return Trial(kind, f"{pattern}, {out.shape} under {short}", complaint)


def _layer_without_a_residual(self, x, attend):
    x = self.self_attn(self.self_attn_layer_norm(x), attend)
    return x + self.ffn(self.final_layer_norm(x))


def _ungated(out, lse, _):
    return out, lse


BREAKAGES = {
    "misplaced rows stay": broken("padded_position", lambda branch, position: position, gates),
    "a residual is left out": broken("forward", _layer_without_a_residual, networks.Layer),
    "zero rows are not counted": broken("with_sinks", _ungated, gates),
}
