"""Activation checkpointing: backward computes a layer again, but not its attention."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..attention import save_attention


def run_layer(layer: nn.Module, x: Tensor, *more: Any, recompute: bool) -> Tensor:
    """`layer(x, *more)`. With `recompute` only its input and attention are kept; backward computes the rest again."""
    if not (recompute and torch.is_grad_enabled()):
        return layer(x, *more)
    return checkpoint(layer, x, *more, use_reentrant=False, preserve_rng_state=False, context_fn=save_attention)
