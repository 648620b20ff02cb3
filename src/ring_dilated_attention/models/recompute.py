"""Computed again in backward: a layer without its attention, and the loss of some rows at a time."""

from collections.abc import Callable
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from ..attention import save_attention

Checkpointing = bool | Literal["offload"]

# The logits of a loss are formed this many at a time, so that a long shard never holds (N, V) of them.
LOSS_CHUNK_LOGITS = 2**20
# A chunk has at least this many rows: each chunk adds a (V, E) gradient of the head, which is slow for few rows.
LOSS_CHUNK_ROWS = 1024


def check_checkpointing(value: Checkpointing) -> None:
    if not (isinstance(value, bool) or (isinstance(value, str) and value == "offload")):
        raise ValueError(f'activation_checkpointing must be True, False or "offload", got {value!r}.')


def run_layer(layer: nn.Module, x: Tensor, *more: Any, recompute: Checkpointing) -> Tensor:
    """`layer(x, *more)`. With `recompute` only its input and attention are kept; backward computes the rest again.

    recompute: "offload" keeps both in the memory of the host, pinned if x is on a GPU.
    """
    if not (recompute and torch.is_grad_enabled()):
        return layer(x, *more)
    again = {"use_reentrant": False, "preserve_rng_state": False}
    if recompute == "offload":
        with save_on_cpu(pin_memory=x.is_cuda):
            return checkpoint(layer, x, *more, **again, context_fn=offload_attention)
    return checkpoint(layer, x, *more, **again, context_fn=save_attention)


def offload_attention() -> tuple[Any, Any]:
    """`save_attention`, with out and lse in the memory of the host until backward. Not for `torch.compile`.

    Torch's own selective checkpointing offloads in compiled code alone.
    """
    kept: list[list[tuple[torch.device, Tensor]]] = []
    return _Offloading(kept, is_again=False), _Offloading(kept, is_again=True)


class _Offloading(TorchDispatchMode):
    """Takes each call's outputs to the host, or, when the same calls run again, gives these in their order."""

    def __init__(self, kept: list[list[tuple[torch.device, Tensor]]], *, is_again: bool) -> None:
        super().__init__()
        self.kept, self.is_again = kept, is_again

    def __enter__(self) -> Self:
        self.calls = iter(self.kept)  # anew, if the graph is retained and its backward runs again
        return super().__enter__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_attention = func is torch.ops.ring_dilated_attention.forward.default
        if is_attention and self.is_again:
            return tuple(x.to(device, non_blocking=True) for device, x in next(self.calls))
        outputs = func(*args, **(kwargs or {}))
        if is_attention:
            self.kept.append([(x.device, _on_host(x)) for x in outputs])
        return outputs


def _on_host(x: Tensor) -> Tensor:
    if not x.is_cuda:
        return x.cpu()
    return torch.empty_like(x, device="cpu", pin_memory=True).copy_(x, non_blocking=True)


def loss_chunk_rows(vocab_size: int) -> int:
    """The rows whose logits exist at once."""
    return max(LOSS_CHUNK_ROWS, LOSS_CHUNK_LOGITS // vocab_size)


def sum_in_chunks(
    loss: Callable[[Tensor, Tensor], Tensor], x_BNE: Tensor, labels_BN: Tensor, rows: int, *, is_random: bool = False
) -> Tensor:
    """The sum of `loss(x_TE, labels_T)` over chunks of T = `rows` rows, of which backward computes each again.

    is_random: the loss draws random numbers, and must draw the same ones again.
    """
    total = x_BNE.new_zeros((), dtype=torch.float32)
    for chunk in zip(x_BNE.flatten(0, 1).split(rows), labels_BN.flatten().split(rows), strict=True):
        total = total + checkpoint(loss, *chunk, use_reentrant=False, preserve_rng_state=is_random)
    return total
