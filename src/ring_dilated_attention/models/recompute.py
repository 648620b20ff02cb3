"""Saves memory by what backward computes again: a layer except its attention, and the loss of some rows at a time."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..attention import save_attention

# The logits of a loss are formed this many at a time, so that a long shard never holds (N, V) of them.
LOSS_SLICE_LOGITS = 2**20
# A slice has at least this many rows: each slice adds a (V, E) gradient of the head, which is slow for few rows.
LOSS_SLICE_ROWS = 1024


def check_checkpointing(value: bool) -> None:
    if not isinstance(value, bool):
        raise ValueError(f"activation_checkpointing must be True or False, got {value!r}.")


def run_layer(layer: nn.Module, x: Tensor, *more: Any, recompute: bool) -> Tensor:
    """`layer(x, *more)`. With `recompute` only its input and attention are kept; backward computes the rest again."""
    if not (recompute and torch.is_grad_enabled()):
        return layer(x, *more)
    return checkpoint(
        layer, x, *more, use_reentrant=False, preserve_rng_state=False, context_fn=save_attention
    )


def loss_slice_rows(vocab_size: int) -> int:
    """The number of rows whose logits exist at the same time."""
    return max(LOSS_SLICE_ROWS, LOSS_SLICE_LOGITS // vocab_size)


def sum_in_slices(
    loss: Callable[[Tensor, Tensor], Tensor],
    x_BNE: Tensor,
    labels_BN: Tensor,
    rows: int,
    *,
    is_random: bool = False,
) -> Tensor:
    """The sum of `loss(x_TE, labels_T)` over slices of T = `rows` rows. Backward computes each slice again.

    is_random: whether the loss draws random numbers, which must be the same when it is computed again.
    """
    total = x_BNE.new_zeros((), dtype=torch.float32)
    for hidden_and_labels in zip(
        x_BNE.flatten(0, 1).split(rows), labels_BN.flatten().split(rows), strict=True
    ):
        total = total + checkpoint(
            loss, *hidden_and_labels, use_reentrant=False, preserve_rng_state=is_random
        )
    return total
