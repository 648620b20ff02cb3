"""What backward computes again: a layer without its attention; and the loss, some rows at a time."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from ..attention import save_attention

Checkpointing = bool | Literal["offload"]

# The logits of a loss are formed this many at a time, so that a long shard never holds (N, V) of them.
LOSS_SLICE_LOGITS = 2**20
# A slice has at least this many rows: each slice adds a (V, E) gradient of the head, which is slow for few rows.
LOSS_SLICE_ROWS = 1024


def check_checkpointing(value: Checkpointing) -> None:
    if not (isinstance(value, bool) or (isinstance(value, str) and value == "offload")):
        raise ValueError(
            f'activation_checkpointing must be True, False or "offload", got {value!r}.'
        )


def run_layer(layer: nn.Module, x: Tensor, *more: Any, recompute: Checkpointing) -> Tensor:
    """`layer(x, *more)`. With `recompute` only its input and attention are kept; backward computes the rest again.

    recompute: "offload" keeps both in the memory of the host, pinned if x is on a GPU.
    """
    if not (recompute and torch.is_grad_enabled()):
        return layer(x, *more)
    host = save_on_cpu(pin_memory=x.is_cuda) if recompute == "offload" else None
    kept = save_attention if host is None else partial(offload_attention, host)
    with host or nullcontext():
        return checkpoint(
            layer, x, *more, use_reentrant=False, preserve_rng_state=False, context_fn=kept
        )


def offload_attention(host: save_on_cpu) -> tuple[Any, Any]:
    """`save_attention` with out and lse on the host. torch's own offloading works in compiled code alone."""
    kept: list[list[Any]] = []
    return _Offloading(kept, host, is_again=False), _Offloading(kept, host, is_again=True)


class _Offloading(TorchDispatchMode):
    """Moves each call's outputs to the host, or, when the same calls run again, returns the stored outputs in order."""

    def __init__(self, kept: list[list[Any]], host: save_on_cpu, *, is_again: bool) -> None:
        super().__init__()
        self.kept = kept
        self.host = host
        self.is_again = is_again

    def __enter__(self) -> Self:
        self.calls = iter(self.kept)  # anew, if the graph is retained and its backward runs again
        return super().__enter__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_attention = func is torch.ops.ring_dilated_attention.forward.default
        if is_attention and self.is_again:
            return tuple(map(self.host.unpack_hook, next(self.calls)))
        outputs = func(*args, **(kwargs or {}))
        if is_attention:
            self.kept.append([self.host.pack_hook(x) for x in outputs])
        return outputs


def loss_slice_rows(vocab_size: int) -> int:
    """The rows whose logits exist at once."""
    return max(LOSS_SLICE_ROWS, LOSS_SLICE_LOGITS // vocab_size)


def sum_in_slices(
    loss: Callable[[Tensor, Tensor], Tensor],
    x_BNE: Tensor,
    labels_BN: Tensor,
    rows: int,
    *,
    is_random: bool = False,
) -> Tensor:
    """The sum of `loss(x_TE, labels_T)` over slices of T = `rows` rows, of which backward computes each again.

    is_random: the loss draws random numbers, and must draw the same ones again.
    """
    total = x_BNE.new_zeros((), dtype=torch.float32)
    for hidden_and_labels in zip(
        x_BNE.flatten(0, 1).split(rows), labels_BN.flatten().split(rows), strict=True
    ):
        total = total + checkpoint(
            loss, *hidden_and_labels, use_reentrant=False, preserve_rng_state=is_random
        )
    return total
