"""Saves memory: the forward keeps fewer tensors, and backward computes the dropped tensors again.

`run_layer` drops the tensors that a layer computes, except the results of attention. `sum_in_slices` drops the logits
of a loss.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..attention import save_attention

# The loss computes about this many logits at a time, because all (N, V) logits of a long shard would take too much
# memory.
LOSS_SLICE_LOGITS = 2**20
# A slice has at least this many rows. Many small slices would be slow, because each slice adds a (V, E) gradient to the
# gradient of `head`.
LOSS_SLICE_ROWS = 1024


def check_checkpointing(value: bool) -> None:
    if not isinstance(value, bool):
        raise ValueError(f"activation_checkpointing must be True or False, got {value!r}.")


def run_layer(layer: nn.Module, x: Tensor, *more: Any, recompute: bool) -> Tensor:
    """`layer(x, *more)`.

    With `recompute` the forward keeps only the layer's input and the results of its attention. Backward computes the
    other tensors again.
    """
    if not (recompute and torch.is_grad_enabled()):
        return layer(x, *more)
    return checkpoint(
        layer, x, *more, use_reentrant=False, preserve_rng_state=False, context_fn=save_attention
    )


def loss_slice_rows(vocab_size: int) -> int:
    """The number of rows in a slice of a loss. Only the logits of one slice exist at a time."""
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

    is_random: whether the loss draws random numbers. Backward then draws the same numbers.
    """
    total = x_BNE.new_zeros((), dtype=torch.float32)
    for hidden_and_labels in zip(
        x_BNE.flatten(0, 1).split(rows), labels_BN.flatten().split(rows), strict=True
    ):
        total = total + checkpoint(
            loss, *hidden_and_labels, use_reentrant=False, preserve_rng_state=is_random
        )
    return total
