"""Configs of torchscale's family that cannot be, and what its models cannot take: a ValueError each."""

import math
import random
from collections.abc import Callable
from typing import Any

import torch
from fuzz import Trial
from fuzz_calls import why_not_refused

from ring_dilated_attention import DilatedPattern
from ring_dilated_attention.models import LongNetEncoder, TorchscaleConfig, torchscale_attention

SIZES = {"num_layers": 1, "embed_dim": 8, "num_heads": 2, "ffn_dim": 8}


def config_with(**more: Any) -> TorchscaleConfig:
    return TorchscaleConfig(
        more.pop("lengths", (4, 8)), more.pop("rates", (1, 2)), **{**SIZES, **more}
    )


def small(parallel: Any = None, **more: Any) -> Any:
    return LongNetEncoder(config_with(**more), parallel=parallel)


STATES = torch.zeros(2, 7, 8)
X = torch.zeros(2, 7, 2, 4)
BLOCKED = DilatedPattern((4, 8), (1, 2), phase="blocked")
WRONG: list[Callable[[], Any]] = [
    *(
        lambda name=name, value=value: config_with(**{name: value})
        for name in ("num_layers", "embed_dim", "num_heads", "ffn_dim")
        for value in (0, -1, 1.5, True, "2", math.nan)
    ),
    *(lambda value=value: config_with(normalize_output=value) for value in (None, 1, "yes")),
    lambda: config_with(lengths=()),
    lambda: config_with(lengths=(4,)),
    lambda: config_with(lengths=(0, 8)),
    lambda: config_with(rates=(1, "2")),
    lambda: config_with(lengths=None),
    lambda: config_with(padding="zeros"),
    lambda: config_with(padding=[]),
    lambda: config_with(embed_dim=9),
    lambda: LongNetEncoder(None),
    lambda: LongNetEncoder({}),
    lambda: LongNetEncoder(SIZES),
    lambda: small(parallel=2)(STATES),
    lambda: small(parallel="x")(STATES),
    lambda: LongNetEncoder(config_with(), activation_checkpointing=1),
    lambda: small()(None),
    lambda: small()(STATES.tolist()),
    lambda: small()(STATES[0]),
    lambda: small()(STATES[0, :, 0]),
    lambda: small()(STATES.long()),
    lambda: small()(STATES.bool()),
    lambda: small()(STATES.to(torch.complex64)),
    lambda: small()(STATES.to_sparse()),
    lambda: small()(STATES[:0]),
    lambda: small()(torch.zeros(2, 7, 9)),
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
    lambda: torchscale_attention(X[:0], X[:0], X[:0], BLOCKED),
]


def try_hostile(rng: random.Random) -> Trial:
    number = rng.randrange(len(WRONG))
    return Trial("refused", f"wrong {number}", why_not_refused(WRONG[number]))
