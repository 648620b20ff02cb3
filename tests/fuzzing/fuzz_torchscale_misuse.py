"""Configs of torchscale's family that cannot be, and what its models cannot take: a ValueError each."""

import math
import random
from collections.abc import Callable
from typing import Any

import torch
from fuzz import Trial
from fuzz_calls import why_not_refused

from ring_dilated_attention import DilatedPattern
from ring_dilated_attention.models import LongNetDecoder, LongNetEncoder, TorchscaleConfig, torchscale_attention

Model = LongNetEncoder | LongNetDecoder
SIZES = {"num_layers": 1, "embed_dim": 8, "num_heads": 2, "ffn_dim": 8, "num_tokens": 11, "num_logits": 11}


def config_with(**more: Any) -> TorchscaleConfig:
    return TorchscaleConfig(more.pop("lengths", (4, 8)), more.pop("rates", (1, 2)), **{**SIZES, **more})


def small(kind: type[Model] = LongNetEncoder, parallel: Any = None, **more: Any) -> Any:
    return kind(config_with(**more), parallel=parallel)


TOKENS = torch.zeros(2, 7, dtype=torch.int64)
X = torch.zeros(2, 7, 2, 4)
BLOCKED = DilatedPattern((4, 8), (1, 2), phase="blocked")
SETTINGS = {"segment_length": "[4, 8]", "dilated_ratio": "[1, 2]", "encoder_layers": 1, "encoder_embed_dim": 8}
WRONG: list[Callable[[], Any]] = [
    *(
        lambda name=name, value=value: config_with(**{name: value})
        for name in ("num_layers", "embed_dim", "num_heads", "ffn_dim", "num_decoder_layers")
        for value in (0, -1, 1.5, True, "2", math.nan)
    ),
    *(
        lambda name=name, value=value: config_with(**{name: value})
        for name in ("num_tokens", "num_logits", "num_learned_positions")
        for value in (0, -1, 2.0, True, "x")
    ),
    *(
        lambda value=value: config_with(xpos_scale_base=value)
        for value in (0, -1.0, math.nan, math.inf, "512", True, 1j)
    ),
    *(lambda value=value: config_with(layernorm_eps=value) for value in (-1.0, math.nan, math.inf, "x", None)),
    *(
        lambda name=name, value=value: config_with(**{name: value})
        for name in (
            "shares_embedding",
            "normalize_before",
            "normalize_output",
            "scale_embedding",
            "layernorm_embedding",
            "sub_layernorm",
            "deepnorm",
        )
        for value in (None, 1, "yes")
    ),
    lambda: config_with(lengths=()),
    lambda: config_with(lengths=(4,)),
    lambda: config_with(lengths=(0, 8)),
    lambda: config_with(rates=(1, "2")),
    lambda: config_with(lengths=None),
    lambda: config_with(activation="tanh"),
    lambda: config_with(activation=None),
    lambda: config_with(padding="zeros"),
    lambda: config_with(embed_dim=9),
    lambda: config_with(padding=[]),
    lambda: config_with(activation=["gelu"]),
    lambda: config_with(embed_dim=6, xpos_scale_base=512),
    lambda: config_with(shares_embedding=True, num_logits=12),
    lambda: config_with(shares_embedding=True, num_tokens=None, num_logits=None),
    lambda: config_with(deepnorm=True),
    lambda: LongNetEncoder(None),
    lambda: LongNetEncoder({}),
    lambda: LongNetDecoder(config_with(num_decoder_layers=2)),
    lambda: LongNetEncoder(SIZES),
    lambda: small(parallel=2)(TOKENS),
    lambda: small(parallel="x")(TOKENS),
    lambda: LongNetEncoder(config_with(), activation_checkpointing=1),
    lambda: small()(),
    lambda: small()(TOKENS, embeddings=torch.zeros(2, 7, 8)),
    lambda: small()(TOKENS.tolist()),
    lambda: small()(TOKENS[0]),
    lambda: small()(TOKENS.double()),
    lambda: small()(TOKENS - 1),
    lambda: small()(TOKENS + 11),
    lambda: small()(TOKENS.bool()),
    lambda: small()(TOKENS.to(torch.complex64)),
    lambda: small()(TOKENS.to("meta")),
    lambda: small()(TOKENS.to_sparse()),
    lambda: small()(TOKENS[:0]),
    lambda: small()(embeddings=torch.zeros(7, 8)),
    lambda: small()(embeddings=torch.zeros(2, 7, 9)),
    lambda: small()(embeddings=TOKENS),
    lambda: small()(embeddings=torch.zeros(2, 7, 8, dtype=torch.int64)),
    lambda: small()(embeddings=[[0.0] * 8]),
    lambda: small()(embeddings=torch.zeros(0, 7, 8)),
    lambda: small(num_tokens=None)(TOKENS),
    lambda: small()(embeddings=torch.zeros(2, 7, 8).to_sparse()),
    lambda: small()(embeddings=torch.zeros(2, 7, 8).to("meta")),
    lambda: small()(TOKENS, cu_seqlens=torch.tensor([0, 7], dtype=torch.int32)),
    lambda: small()(TOKENS[:1], cu_seqlens=[0, 7]),
    lambda: small()(TOKENS[:1], cu_seqlens=torch.tensor([0, 7])),
    lambda: small()(TOKENS[:1], cu_seqlens=torch.tensor([0, 8], dtype=torch.int32)),
    lambda: small()(TOKENS[:1], cu_seqlens=torch.tensor([0, 0, 7], dtype=torch.int32)),
    lambda: small()(TOKENS[:1], cu_seqlens=torch.tensor([1, 7], dtype=torch.int32)),
    lambda: small(num_learned_positions=8)(TOKENS),
    lambda: small()(TOKENS, collect=3),
    lambda: small()(TOKENS, collect="x"),
    lambda: torchscale_attention(X, X, X, DilatedPattern((4,), (1,))),
    lambda: torchscale_attention(X, X, X, DilatedPattern((4,), (1,), heads="split")),
    lambda: torchscale_attention(X, X, X, None),
    lambda: torchscale_attention(X, X[:, :3], X, BLOCKED),
    lambda: torchscale_attention(X[0], X[0], X[0], BLOCKED),
    lambda: torchscale_attention(None, X, X, BLOCKED),
    lambda: torchscale_attention(X, None, X, BLOCKED),
    lambda: torchscale_attention(X, X, X.double(), BLOCKED),
    lambda: torchscale_attention(X.int(), X.int(), X.int(), BLOCKED),
    lambda: torchscale_attention(X, X, X, BLOCKED, scale=math.nan),
    lambda: torchscale_attention(X, X, X, BLOCKED, parallel="x"),
    lambda: torchscale_attention(X, X, X, BLOCKED, backend="x"),
    lambda: torchscale_attention(X, X, X, BLOCKED, return_lse=1),
    lambda: torchscale_attention(X[:0], X[:0], X[:0], BLOCKED),
    lambda: torchscale_attention(X, X, X, BLOCKED, cu_seqlens=torch.tensor([0, 7], dtype=torch.int32)),
]


def try_hostile(rng: random.Random) -> Trial:
    number = rng.randrange(len(WRONG))
    return Trial("refused", f"wrong {number}", why_not_refused(WRONG[number]))
