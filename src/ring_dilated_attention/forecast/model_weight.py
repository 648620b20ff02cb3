"""Weighs the training of a decoder: one or two of its blocks run forward and backward on tensors of the device "meta",
and the bytes that exist at once are counted. All blocks are alike, so each further one adds what the second adds.

What attention holds comes from `simulate/weighing.py`, for the rank that holds most.
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
ACTIVATIONS = ("kept", "checkpointed", "offloaded")


class DecoderWithLoss(nn.Module):
    """The sum of the losses of a decoder. body: from tokens (B, N) to hidden rows (B, N, E). head: to logits.

    As in models/recompute.py, each slice of rows makes its logits again in backward. Two slices show the peak. The
    other rows take part only with their gradients, which are held while the logits of the slices are.
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


# Makes a decoder with this many blocks on "meta" in float32, with checkpointed blocks (save_attention) if True.
MakeDecoder = Callable[[int, bool], DecoderWithLoss]


class Decoder(NamedTuple):
    """A decoder's sizes, counted in the module itself."""

    name: str
    make: MakeDecoder
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_parameters: int
    block_parameters: int  # of one block
    matrix_entries: int  # of all matrices that multiply a token's row, the output matrix included


def count_decoder(
    name: str, make: MakeDecoder, num_layers: int, num_heads: int, num_kv_heads: int, head_dim: int
) -> Decoder:
    """Count a decoder's parameters from two modules, of one block and of two."""
    parameters, matrices = [], []
    for layers in (1, 2):
        module = make(layers, False)
        parameters.append(sum(x.numel() for x in module.parameters()))
        linears = [child for child in module.modules() if isinstance(child, nn.Linear)]
        matrices.append(sum(linear.weight.numel() for linear in linears))
    per_block, matrices_per_block = parameters[1] - parameters[0], matrices[1] - matrices[0]
    return Decoder(
        name,
        make,
        num_layers,
        num_heads,
        num_kv_heads,
        head_dim,
        num_parameters=parameters[0] + (num_layers - 1) * per_block,
        block_parameters=per_block,
        matrix_entries=matrices[0] + (num_layers - 1) * matrices_per_block,
    )


class HeldByModel(Held):
    """Counts what a model holds. An attention call counts as `attention` says, beside what the model holds then."""

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
        # Models of transformers ask whether all tokens are of one document, or whether any is not.
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            return not self.is_any_asked
        self.is_any_asked = func is torch.ops.aten.any.default
        self.peak_bytes = max(self.peak_bytes, self.num_bytes + self.in_attention.get(func, 0))
        return super().__torch_dispatch__(func, types, args, kwargs)


class Activations(NamedTuple):
    """Bytes that the forward and backward of a rank hold beside parameters, gradients and optimiser state."""

    device: int
    host: int = 0  # what offloading keeps there


def weigh_activations(
    decoder: Decoder, batch: int, num_positions: int, dtype: torch.dtype, attention: AttentionWeight
) -> dict[str, Activations]:
    """By the names in ACTIVATIONS, what a rank with so many positions of each sequence holds."""
    kept = [
        _peak(decoder, layers, batch, num_positions, dtype, attention, is_checkpointed=False)
        for layers in (1, 2)
    ]
    again = [
        _peak(decoder, layers, batch, num_positions, dtype, attention, is_checkpointed=True)
        for layers in (1, 2)
    ]
    further = decoder.num_layers - 1
    return {
        "kept": Activations(kept[0] + further * (kept[1] - kept[0])),
        "checkpointed": Activations(again[0] + further * (again[1] - again[0])),
        "offloaded": Activations(again[0], host=decoder.num_layers * (again[1] - again[0])),
    }


@without_collection()
def _peak(
    decoder: Decoder,
    num_layers: int,
    batch: int,
    num_positions: int,
    dtype: torch.dtype,
    attention: AttentionWeight,
    *,
    is_checkpointed: bool,
) -> int:
    module = decoder.make(num_layers, is_checkpointed)
    module.to(dtype)
    for parameter in module.parameters():
        parameter.grad = torch.empty_like(parameter)  # a step adds to gradients that are there
    tokens = torch.empty(batch, num_positions, dtype=torch.int64, device="meta")
    with torch.device("meta"), HeldByModel([tokens], attention) as held:
        module(tokens).backward()
    return held.peak_bytes


class ModelMemory(NamedTuple):
    """Bytes of one rank. host: what offloading keeps there."""

    parameters: int
    gradients: int
    optimiser: int
    activations: int
    working: int  # parameters in the activations' dtype, and what FSDP gathers
    total: int
    host: int = 0


def model_memory(
    decoder: Decoder, activations: Activations, num_shards: int, itemsize: int
) -> ModelMemory:
    """The memory of a rank: float32 parameters, gradients and AdamW's two moments (float64 if activations are).

    num_shards: over how many ranks FSDP2 cuts these. itemsize: of activations.
    """
    width = max(FLOAT, itemsize)
    states = -(-decoder.num_parameters // num_shards) * width
    working = 0
    if num_shards > 1:  # the parameters of this block and the next, and one block's gradients
        working = 3 * decoder.block_parameters * itemsize
    elif itemsize < width:
        working = decoder.num_parameters * itemsize
    sizes = (states, states, 2 * states, activations.device, working)
    return ModelMemory(*sizes, sum(sizes), activations.host)
