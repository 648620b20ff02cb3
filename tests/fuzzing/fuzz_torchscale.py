"""torchscale's family: random encoders and decoders against the same put together by hand, in float64.

By hand: embeddings, projections, XPOS, the definition over padded rows (`tests/padded.py`), feed-forward, residuals.

What must hold: logits, states of layers and every gradient equal those by hand; packed documents are as if each were
alone; a decoder sees nothing that comes later; what cannot be is a ValueError. Uninitialised memory is NaN.

B batch, N positions, E embedding, H heads, D head dim.
"""

import itertools
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from fuzz import Trial
from fuzz_commands import broken, nothing
from fuzz_modules import why_unequal
from fuzz_torchscale_misuse import TOKENS, try_hostile
from helpers import poisoned_memory
from padded import padded_reference
from torch import Tensor

from ring_dilated_attention import simulate
from ring_dilated_attention.models import LongNetDecoder, LongNetEncoder, TorchscaleConfig
from ring_dilated_attention.models.documents import Documents
from ring_dilated_attention.models.torchscale import gate as gates
from ring_dilated_attention.models.torchscale import networks
from ring_dilated_attention.reference import dilated_attention_reference

Model = LongNetEncoder | LongNetDecoder
BY_HAND: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": lambda x: x.clamp(min=0),
    "swish": lambda x: x / (1 + torch.exp(-x)),
    "gelu": lambda x: x * (1 + torch.erf(x / math.sqrt(2))) / 2,
}
FEW = 64  # numbers of a slice of the feed-forward


def prepare(folder: Path) -> None:
    pass


def try_case(rng: random.Random, folder: Path) -> Trial:
    with poisoned_memory():
        return rng.choices([try_model, try_steep_xpos, try_hostile, try_settings], [12, 1, 4, 2])[0](rng)


def draw_config(rng: random.Random, *, is_causal: bool) -> TorchscaleConfig:
    num_heads = rng.randint(1, 5)
    num_branches = rng.randint(1, 3)
    num_tokens, shares = rng.choice([None, 2, 13, 13]), rng.random() < 0.4
    deepnorm = rng.random() < 0.3
    return TorchscaleConfig(
        [rng.choice([rng.randint(1, 12), rng.randint(1, 60), 2**40]) for _ in range(num_branches)],
        [rng.choice([1, rng.randint(1, 5), rng.randint(1, 12)]) for _ in range(num_branches)],
        num_layers=rng.randint(1, 3),
        embed_dim=num_heads * rng.choice([2, 4, 6]),
        num_heads=num_heads,
        ffn_dim=rng.randint(1, 24),
        num_tokens=num_tokens,
        num_logits=num_tokens if shares else rng.choice([None, 1, 7]),
        num_learned_positions=rng.choice([None, None, 50]),
        shares_embedding=shares and num_tokens is not None,
        activation=rng.choice(list(BY_HAND)),
        normalize_before=rng.random() < 0.6,
        normalize_output=rng.random() < 0.7,
        scale_embedding=rng.random() < 0.3,
        layernorm_embedding=rng.random() < 0.3,
        sub_layernorm=not deepnorm and rng.random() < 0.6,
        deepnorm=deepnorm,
        num_decoder_layers=None if is_causal else rng.choice([None, None, 3]),
        layernorm_eps=rng.choice([1e-5, 1e-3]),
        xpos_scale_base=rng.choice([None, None, None, 512, 20.0]),
        padding=rng.choice(["torchscale", "torchscale", "exact"]),
    )


def draw_model(rng: random.Random, **more: Any) -> Model:
    torch.manual_seed(rng.randrange(2**31))
    kind = rng.choice([LongNetEncoder, LongNetDecoder])
    model = kind(draw_config(rng, is_causal=kind.is_causal), **more).double()
    for name, x in model.named_parameters():  # biases and norms that say something
        torch.nn.init.normal_(x, mean=float("norm" in name and name.endswith("weight")), std=0.4)
    return model


def by_hand(model: Model, given: Tensor, documents: tuple[int, ...]) -> list[Tensor]:
    """What goes into the first layer, what comes out of each, and the result; documents are computed one by one."""
    alone = [_by_hand(model, given[:, a:b]) for a, b in itertools.pairwise(documents)]
    return [torch.cat(outs, 1) for outs in zip(*alone, strict=True)]


def _by_hand(model: Model, given: Tensor) -> list[Tensor]:
    config, width, of = model.config, model.config.embed_dim, dict(model.named_parameters(remove_duplicate=False))
    positions = torch.arange(given.shape[1])
    x = given if given.is_floating_point() else of["embed_tokens.weight"][given.long()]
    x = x * math.sqrt(width) if config.scale_embedding else x
    x = x + of["embed_positions.weight"][positions + 2] if config.num_learned_positions else x

    def norm(name: str, x: Tensor) -> Tensor:
        mean = x.mean(-1, keepdim=True)
        variance = (x - mean).square().mean(-1, keepdim=True)
        return (x - mean) / torch.sqrt(variance + config.layernorm_eps) * of[f"{name}.weight"] + of[f"{name}.bias"]

    def linear(name: str, x: Tensor) -> Tensor:
        return x @ of[f"{name}.weight"].T + of[f"{name}.bias"]

    x = norm("layernorm_embedding", x) if config.layernorm_embedding else x
    states, alpha = [x], 1.0
    if config.deepnorm:
        m, n = config.num_layers, config.num_decoder_layers
        alpha = (2 * m) ** 0.25 if n is None else 0.81 * (m**4 * n) ** (1 / 16)
    for i in range(config.num_layers):
        layer = f"layers.{i}"

        def attention(x: Tensor, layer: str = layer) -> Tensor:
            q, k, v = (linear(f"{layer}.self_attn.{n}_proj", x).unflatten(-1, (config.num_heads, -1)) for n in "qkv")
            if config.xpos_scale_base is not None:
                decay = model.layers[0].self_attn.xpos.scale  # which torchscale rounds to float32
                q, k = (turned(y, decay, config.xpos_scale_base, sign) for y, sign in ((q, 1), (k, -1)))
            attend = padded_reference if config.padding == "torchscale" else dilated_attention_reference
            out = attend(q, k, v, model.pattern)[0].flatten(2)
            out = norm(f"{layer}.self_attn.inner_attn_ln", out) if config.sub_layernorm else out
            return linear(f"{layer}.self_attn.out_proj", out)

        def ffn(x: Tensor, layer: str = layer) -> Tensor:
            hidden = BY_HAND[config.activation](linear(f"{layer}.ffn.fc1", x))
            return linear(
                f"{layer}.ffn.fc2", norm(f"{layer}.ffn.ffn_layernorm", hidden) if config.sub_layernorm else hidden
            )

        for sublayer, name in ((attention, "self_attn_layer_norm"), (ffn, "final_layer_norm")):
            if config.normalize_before:
                x = alpha * x + sublayer(norm(f"{layer}.{name}", x))
            else:
                x = norm(f"{layer}.{name}", alpha * x + sublayer(x))
        states.append(x)
    if config.normalize_before and (model.is_causal or config.normalize_output):
        x = norm("layer_norm", x)
    if config.num_logits is not None:
        x = x @ of["embed_tokens.weight" if config.shares_embedding else "output_projection.weight"].T
    return [*states, x]


def turned(x_BNHD: Tensor, decay: Tensor, scale_base: float, sign: int) -> Tensor:
    """XPOS of one document: pair i of row t as a complex number, turned by t / 10000^(i / pairs) and scaled."""
    num_rows, num_pairs = x_BNHD.shape[1], x_BNHD.shape[3] // 2
    rows, pairs = torch.arange(num_rows)[:, None], torch.arange(num_pairs)
    angles = rows * 10_000.0 ** -(pairs.double() / num_pairs)
    torch.testing.assert_close(decay, (2 * pairs.double() + 0.8 * num_pairs) / (2.8 * num_pairs), rtol=1e-6, atol=0)
    size = decay ** (sign * (rows - (num_rows + 1) // 2).double() / scale_base)
    turn = torch.polar(size, angles)[:, None]
    return torch.view_as_real(torch.view_as_complex(x_BNHD.unflatten(-1, (-1, 2)).contiguous()) * turn).flatten(-2)


def draw_input(rng: random.Random, model: Model, num_positions: int, batch: int) -> Tensor:
    """Tokens, or embeddings, which a model without an embedding needs."""
    num_tokens = model.config.num_tokens
    if num_tokens is None or rng.random() < 0.2:
        return torch.randn(batch, num_positions, model.config.embed_dim, dtype=torch.float64)
    dtype = rng.choice([torch.int64, torch.int64, torch.int32, torch.uint8, torch.int16])
    return torch.randint(num_tokens, (batch, num_positions), dtype=dtype)


def call(model: Model, given: Tensor, documents: tuple[int, ...] | None = None, **more: Any) -> Any:
    borders = None if documents is None else torch.tensor(documents, dtype=torch.int32)
    name = "embeddings" if given.is_floating_point() else "tokens_BN"
    return model(**{name: given}, cu_seqlens=borders, **more)


def try_model(rng: random.Random) -> Trial:
    how = rng.choice(
        ["plain", "plain", "recomputed", "packed", "packed, recomputed", "states", "no gradient", "shared"]
    )
    parallel = simulate.all_ranks(rng.randint(1, 4)) if how == "shared" else None
    model = draw_model(rng, activation_checkpointing="recomputed" in how, parallel=parallel)
    batch, num_positions = rng.choice([1, 1, 2, 3]), rng.choice([rng.randint(1, 9), rng.randint(1, 45)])
    documents = None
    if "packed" in how or (how != "plain" and rng.random() < 0.4):
        batch, inner = 1, {rng.randint(1, num_positions) for _ in range(rng.randint(0, 3))}
        documents = (0, *sorted(inner - {num_positions}), num_positions)
    given = draw_input(rng, model, num_positions, batch)
    expected = by_hand(model, given, documents or (0, num_positions))
    description = f"{type(model).__name__} {model.config}, {given.dtype} {tuple(given.shape)}, documents {documents}"
    kind = f"{type(model).__name__}, {model.config.padding}, {how}"
    if how == "states":
        states = call(model, given, documents, collect=lambda x: x)
        pairs = zip(states, expected[:-1], strict=True)
        complaints = [why_unequal(f"state {i}", x, y) for i, (x, y) in enumerate(pairs)]
        return Trial(kind, description, next(filter(None, complaints), None))
    if how == "no gradient":
        with torch.no_grad(), mock.patch.object(networks, "FFN_SLICE_NUMBERS", FEW):
            return Trial(kind, description, why_unequal("out", call(model, given, documents), expected[-1]))
    found = call(model, given, documents)
    complaint = why_unequal("out", found, expected[-1])
    names, parameters = zip(*model.named_parameters(), strict=True)
    dout = torch.randn_like(expected[-1])
    grads = [torch.autograd.grad(y, parameters, dout, materialize_grads=True) for y in (found, expected[-1])]
    for name, actual, right in zip(names, *grads, strict=True):
        complaint = complaint or why_unequal(f"gradient of {name}", actual, right)
    if complaint is None and model.is_causal and documents is None and given.dtype == torch.int64:
        border = rng.randrange(num_positions)
        later = given.clone()
        later[:, border:] = (later[:, border:] + 1) % model.config.num_tokens
        before, after = (call(model, x)[:, :border] for x in (given, later))
        complaint = why_unequal("logits before a change", after, before)
    return Trial(kind, description, complaint)


def try_steep_xpos(rng: random.Random) -> Trial:
    """Where XPOS may grow beyond the dtype: refused, or without NaN."""
    kind, dtype = (
        rng.choice([LongNetEncoder, LongNetDecoder]),
        rng.choice([torch.float64, torch.float32, torch.bfloat16]),
    )
    lengths = (rng.randint(1, 60),)
    sizes = {"num_layers": 1, "embed_dim": 8, "num_heads": 2, "ffn_dim": 8}
    config = TorchscaleConfig(lengths, (1,), **sizes, xpos_scale_base=rng.choice([0.01, 0.05, 0.3, 1.0, 3.0, 1e-9]))
    torch.manual_seed(rng.randrange(2**31))
    x = torch.randn(1, rng.randint(1, 60), 8, dtype=dtype)
    complaint, what = None, "computed"
    try:
        model = kind(config).to(dtype)
        out = model(embeddings=x)
        grads = torch.autograd.grad(out.float().sum(), [y for y in model.parameters() if y.requires_grad])
        # An encoder's scores grow towards later keys. Beyond 1 / eps they are rounded by more than 1, and a backward
        # that makes exp(score - lse) again has no digit of it: docs/reliability.md promises no gradients there.
        apart = min(lengths[0], x.shape[1]) if kind is LongNetEncoder else 0
        is_rounded = apart / config.xpos_scale_base * -math.log(networks.LEAST_SCALE) > -math.log(
            torch.finfo(dtype).eps
        )
        if not all(torch.isfinite(y).all() for y in ((out,) if is_rounded else (out, *grads))):
            complaint = "out or a gradient is not finite"
    except ValueError as error:
        what = "refused"
        complaint = None if "scale_base" in str(error) else f"it says something else: {error}"
    return Trial(f"steep xpos, {what}", f"{kind.__name__} {config}, {dtype} {tuple(x.shape)}", complaint)


SPOILT: list[Any] = [None, "", "x", [], {}, 0, -1, 1.5, "[4, 8", "[]", "[a]", math.nan, True, "4;8", [4.5], object()]


def try_settings(rng: random.Random) -> Trial:
    """torchscale's own settings, some spoilt: refused in a sentence, or a config that makes a model."""
    side = rng.choice(["encoder", "decoder"])
    settings: dict[str, Any] = {
        "segment_length": rng.choice(["[4, 8]", "4,8", [4, 8], (4, 8)]),
        "dilated_ratio": "[1, 2]",
        f"{side}_layers": 1,
        f"{side}_embed_dim": 8,
        f"{side}_attention_heads": 2,
        f"{side}_ffn_embed_dim": 8,
        "vocab_size": 11,
    }
    more: dict[str, Any] = {
        "deepnorm": True,
        "subln": False,
        "xpos_rel_pos": True,
        "xpos_scale_base": 64,
        "activation_fn": "relu",
        f"{side}_normalize_before": True,
        "no_output_layer": True,
        "layernorm_embedding": True,
        "moe_freq": 1,
        "multiway": True,
        f"share_{side}_input_output_embed": True,
        "no_scale_embedding": False,
        "rel_pos_buckets": 32,
        "layernorm_eps": 1e-6,
        "normalize_output": False,
        "dropout": 0.3,
        "unknown": 1,
    }
    settings |= dict(rng.sample(list(more.items()), rng.randint(0, 4)))
    options: dict[str, Any] = {"num_tokens": 11}
    is_spoilt = rng.random() < 0.7
    if is_spoilt:
        place = rng.choice([settings, options])
        name = rng.choice([*place, "side", "padding"] if place is options else list(place))
        place[name] = rng.choice(SPOILT)
    what = "computed"
    complaint = None
    try:
        config = TorchscaleConfig.from_torchscale(settings, **options)
        model = (LongNetDecoder if side == "decoder" else LongNetEncoder)(config).double()
        given = torch.zeros(1, 7, config.embed_dim, dtype=torch.float64) if config.num_tokens is None else TOKENS[:1]
        complaint = why_unequal("out", call(model, given), by_hand(model, given, (0, 7))[-1])
    except ValueError as error:
        what = "refused"
        complaint = None if len(str(error)) > 10 else f"it says too little: {error}"
        if not is_spoilt and not settings.keys() & {"moe_freq", "multiway", "rel_pos_buckets"}:
            complaint = f"right settings are refused: {error}"
    except Exception as error:  # noqa: BLE001  whatever it is, it is not what a user can be told
        complaint = f"{type(error).__name__} where a ValueError belongs: {error}"
    return Trial(f"settings, {what}", f"{settings}, {options}", complaint)


_positions, _gate, _sum = Documents.positions, gates.gate, networks.Layer._sum


def _positions_over_documents(self: Documents) -> Tensor:
    return torch.cat(
        [_positions(self)[:0], *(torch.arange(s.positions.start, s.positions.stop) + s.begin for s in self.spans)]
    )


def _gate_of_one_more(out: Tensor, lse: Tensor, log_num_zero_keys: Tensor) -> tuple[Tensor, Tensor]:
    return _gate(out, lse, (log_num_zero_keys.exp() + (log_num_zero_keys > -torch.inf)).log())


def _residual_unscaled(self: networks.Layer, residual: Tensor, x: Tensor) -> Tensor:
    return residual + x


def _rotate_keys_as_queries(x: Tensor, cos: Tensor, sin: Tensor, growth: Tensor) -> Tensor:
    return _rotate(x, cos, sin, growth.maximum(1 / growth))


_rotate = networks.XPos.rotate
BREAKAGES: dict[str, Callable[[], Any]] = {
    "positions do not begin anew with documents": broken("positions", _positions_over_documents, Documents),
    "a zero row too many is counted": broken("gate", _gate_of_one_more, gates),
    "misplaced rows stay": broken("_put_in_place", lambda out, lse, *_: (out, lse), gates),
    "residuals are not scaled": broken("_sum", _residual_unscaled, networks.Layer),
    "keys grow as queries do": broken("rotate", staticmethod(_rotate_keys_as_queries), networks.XPos),
    "tokens are not checked": broken("_failure", nothing, networks._LongNet),
    "steep xpos is not refused": broken("check", nothing, networks.XPos),
}
