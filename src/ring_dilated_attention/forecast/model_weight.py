"""Counts the bytes of memory that training a decoder needs, without allocating them.

One or two of the decoder's blocks run forward and backward on tensors of the device "meta", and the bytes of the
tensors that exist at the same time are counted. All blocks after the first are alike (`transformers_decoder` checks
this), so each further block adds as many bytes as the second.

`simulate/weighing.py` counts the bytes that an attention call holds on a rank. `meshes.py` takes the largest count.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..models.recompute import loss_slice_rows
from ..plan.collection import without_collection
from ..simulate.measuring import Held
from ..simulate.weighing import AttentionWeight

FLOAT = 4
ACTIVATIONS = ("kept", "checkpointed")


class DecoderWithLoss(nn.Module):
    """A decoder with its loss, made only to measure memory. It returns a sum of losses.

    body: the module that turns tokens (B, N) into hidden rows (B, N, E). head: the module that turns hidden rows into
    logits.

    As in models/recompute.py, logits are computed for one slice of rows at a time, and again in the backward.

    Two slices are enough to reach the peak of memory, so no logits are computed for further slices. As in training, the
    gradients of all hidden rows are held at the same time.
    """

    def __init__(self, body: nn.Module, head: nn.Module, vocab_size: int) -> None:
        super().__init__()
        self.body, self.head, self.vocab_size = body, head, vocab_size

    def forward(self, tokens_BN: Tensor) -> Tensor:
        hidden = self.body(tokens_BN)
        rows_TE = (hidden if isinstance(hidden, Tensor) else hidden[0]).flatten(0, 1)
        num_rows, slice_rows = rows_TE.shape[0], loss_slice_rows(self.vocab_size)
        first = min(slice_rows, num_rows)
        second = min(slice_rows, num_rows - first)
        sizes = [first, second, num_rows - first - second]
        *slices, others_TE = zip(
            rows_TE.split(sizes), tokens_BN.flatten().split(sizes), strict=True
        )
        total = rows_TE.new_zeros((), dtype=torch.float32)
        for rows, labels in slices:
            total = total + checkpoint(
                self._loss, rows, labels, use_reentrant=False, preserve_rng_state=False
            )
        return total + (others_TE[0] * others_TE[0]).sum()

    def _loss(self, rows_TE: Tensor, labels_T: Tensor) -> Tensor:
        logits_TV = self.head(rows_TE)
        logits_TV = logits_TV.to(torch.promote_types(logits_TV.dtype, torch.float32))
        return F.cross_entropy(logits_TV, labels_T, reduction="sum")


# The type of a function make(num_blocks, is_checkpointed), which returns a decoder in float32 on the device "meta". If
# `is_checkpointed` is set, the decoder's blocks use activation checkpointing with `save_attention`.
MakeDecoder = Callable[[int, bool], DecoderWithLoss]


class Decoder(NamedTuple):
    """The sizes of a decoder. The last three sizes are counted in the modules that `make` returns."""

    name: str
    make: MakeDecoder
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_parameters: int
    block_parameters: int  # the parameters of one block
    # By how many weights a token is multiplied: those of all matrices, including the one that makes logits. Of experts,
    # only those count that a token goes to.
    matrix_entries: int


def count_decoder(
    name: str,
    make: MakeDecoder,
    num_layers: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    experts_per_token: int | None = None,
) -> Decoder:
    """Count a decoder's parameters and the entries of its matrices.

    Only a decoder with one block and a decoder with two blocks are made. Each further block adds as much as the second.

    experts_per_token: to how many experts of a block a token goes. If None, it goes to all.
    """
    one, two = make(1, False), make(2, False)
    block_parameters = _parameters(two) - _parameters(one)
    one_entries = _matrix_entries(one, experts_per_token)
    two_entries = _matrix_entries(two, experts_per_token)
    return Decoder(
        name,
        make,
        num_layers,
        num_heads,
        num_kv_heads,
        head_dim,
        _parameters(one) + (num_layers - 1) * block_parameters,
        block_parameters,
        one_entries + (num_layers - 1) * (two_entries - one_entries),
    )


def _parameters(module: nn.Module) -> int:
    return sum(x.numel() for x in module.parameters())


def _matrix_entries(module: nn.Module, experts_per_token: int | None) -> int:
    num_entries = 0
    for part in module.modules():
        if isinstance(part, nn.Embedding):
            continue  # a token reads one row of it, and no product is computed
        for weight in part.parameters(recurse=False):
            if weight.ndim == 2:
                num_entries += weight.numel()
            elif weight.ndim == 3:  # the matrices of all experts, one below the other
                num_entries += weight[:experts_per_token].numel()
    return num_entries


class HeldByModel(Held):
    """Counts the peak bytes of a model's tensors. attention: the bytes that one attention call holds."""

    def __init__(self, inputs: list[Tensor], attention: AttentionWeight) -> None:
        super().__init__(inputs)
        self.is_any_asked = False
        ops = torch.ops.ring_dilated_attention
        self.in_attention: dict[Any, int] = {
            ops.forward.default: attention.forward - attention.given_forward,
            ops.backward.default: attention.backward - attention.given_backward,
        }

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        # Answer True for torch.all and False for torch.any, because tensors on "meta" have no values. Models of
        # transformers ask whether all tokens belong to one document, or whether any token belongs to a second document.
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            return not self.is_any_asked
        self.is_any_asked = func is torch.ops.aten.any.default
        self.peak_bytes = max(self.peak_bytes, self.num_bytes + self.in_attention.get(func, 0))
        return super().__torch_dispatch__(func, types, args, kwargs)


@without_collection()
def weigh_activations(
    decoder: Decoder, batch: int, num_positions: int, dtype: torch.dtype, attention: AttentionWeight
) -> dict[str, int]:
    """The peak bytes that a rank holds in a forward and backward, for each name in ACTIVATIONS.

    Parameters, gradients and optimiser state are not included. num_positions: how many positions of each sequence the
    rank holds. attention: the bytes that one attention call holds on the rank.
    """

    def peak(num_layers: int, is_checkpointed: bool) -> int:
        module = decoder.make(num_layers, is_checkpointed)
        module.to(dtype)
        for parameter in module.parameters():
            # Make the gradients before the backward, so that they are not counted as activations: `model_memory` counts
            # gradients as states.
            parameter.grad = torch.empty_like(parameter)
        tokens = torch.empty(batch, num_positions, dtype=torch.int64, device="meta")
        with torch.device("meta"), HeldByModel([tokens], attention) as held:
            module(tokens).backward()
        return held.peak_bytes

    num_bytes = {}
    for name in ACTIVATIONS:
        is_checkpointed = name == "checkpointed"
        one, two = peak(1, is_checkpointed), peak(2, is_checkpointed)
        num_bytes[name] = one + (decoder.num_layers - 1) * (two - one)
    return num_bytes


class ModelMemory(NamedTuple):
    """The bytes that one rank holds in training."""

    states: int  # bytes of parameters, gradients and AdamW's two moments
    activations: int
    # The bytes of a copy of the parameters in the activations' dtype. With FSDP2: the bytes of the gathered parameters
    # of two blocks, and of the whole gradients of one block.
    working: int
    total: int


def model_memory(decoder: Decoder, activations: int, num_shards: int, itemsize: int) -> ModelMemory:
    """The memory of a rank in training. States (parameters, gradients and optimiser state) are float32, or float64 if
    activations are float64.

    activations: the bytes of activations. itemsize: the bytes of one number in activations. num_shards: over how many
    ranks FSDP2 cuts the states; 1 without FSDP2.
    """
    width = max(FLOAT, itemsize)
    states = 4 * width * -(-decoder.num_parameters // num_shards)
    working = 0
    if num_shards > 1:  # held whole: parameters of two blocks, gradients of one block
        working = 3 * decoder.block_parameters * itemsize
    elif itemsize < width:
        working = decoder.num_parameters * itemsize
    return ModelMemory(states, activations, working, states + activations + working)
