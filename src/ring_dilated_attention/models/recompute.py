"""Layers whose insides are computed again in backward."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..attention import save_attention


def run_layer(layer: nn.Module, x: Tensor, *more: Any, recompute: bool) -> Tensor:
    """`layer(x, *more)`. With `recompute`, backward computes it again, but for its attention, which is kept."""
    if not (recompute and torch.is_grad_enabled()):
        return layer(x, *more)
    return checkpoint(layer, x, *more, use_reentrant=False, preserve_rng_state=False, context_fn=save_attention)
