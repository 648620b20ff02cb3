"""The arguments of a model's forward under `context_parallel`, before they are cut into shards: one whole sample."""

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss

from ...ranks.context import ContextParallel
from .attention_function import find_borders

IGNORED_LABEL = -100  # transformers and torch ignore this label
# Values of `loss_type` for losses that compare a position with its own label, not with the next position's label.
TOKEN_LOSSES = ("ForMaskedLM", "ForTokenClassification")
# Arguments that are not passed on to the forward of a shard: `ShardedForward` passes a value of its own, or the
# argument follows from cu_seq_lens_q, or the argument has no meaning for a shard.
DROPPED = {
    "attention_mask",
    "cu_seq_lens_q",
    "cu_seq_lens_k",
    "max_length_q",
    "max_length_k",
    "num_items_in_batch",
    "use_cache",
    "return_dict",
    "seq_idx",
}
# The names of the argument that passes a cache to a model: "cache" since transformers 5.24, the others before 5.24.
CACHES = {"cache", "past_key_values", "cache_params"}
CUT = ("input_ids", "token_type_ids", "position_ids")  # arguments that are cut into shards
LABELS = ("labels", "shift_labels")


class Sample(NamedTuple):
    """The arguments of a forward, and the number of labels."""

    tensors: dict[str, Tensor]  # the tensors that are cut into shards
    others: dict[str, Any]  # arguments that are passed on as they are
    # The number by which the summed loss of the whole sample is divided.
    num_labels: int | Tensor


def whole_sample(model: Any, parallel: ContextParallel, arguments: dict[str, Any]) -> Sample:
    """The whole sample, from the arguments of a forward.

    Raises ValueError for arguments that cannot be cut into shards.
    """
    if CACHES & {*arguments} or arguments.get("logits_to_keep"):
        raise ValueError(
            "context_parallel takes no cache and no logits_to_keep, which generate passes: remove() the handle that it "
            "returned, then generate."
        )
    ids = arguments.get("input_ids")
    if not isinstance(ids, Tensor) or ids.dim() != 2:
        raise ValueError(
            "under context_parallel pass input_ids of shape (batch, N): whole sequences on every rank."
        )
    num_positions = ids.shape[1]
    lengths = parallel.cut.default_lengths(num_positions)
    if 0 in lengths:
        raise ValueError(
            f"{num_positions} positions over {parallel.world_size} ranks are cut into shards of {lengths}: a rank "
            "would have no position. Give longer sequences, or fewer ranks."
        )
    tensors = {name: arguments[name] for name in CUT if name in arguments}
    positions = arguments.get("position_ids")
    borders = arguments.get("cu_seq_lens_q")
    if borders is None and positions is not None:
        borders = find_borders(positions, len(positions), num_positions)
    if positions is None:
        positions = _positions_of_model(model, ids)
    tensors["position_ids"] = positions.expand(len(ids), -1)
    if borders is not None:
        tensors["cu_seqlens"] = borders.to(torch.int32)
    labels = arguments.get("shift_labels")
    if labels is None and "labels" in arguments:
        shift = label_shift(model)
        labels = F.pad(arguments["labels"][:, shift:], (0, shift), value=IGNORED_LABEL)
    _refuse_padding(arguments.get("attention_mask"), labels, model)
    num_labels: int | Tensor = 0
    if labels is not None:
        tensors["labels"] = labels
        num_labels = _count(labels, arguments.get("num_items_in_batch"))
    others = {}
    for name, value in arguments.items():
        if name in (*CUT, *LABELS, *DROPPED):
            continue
        if isinstance(value, Tensor) and value.dim():
            known = ", ".join((*CUT, *LABELS))
            raise ValueError(
                f"{name}: it is not known how to cut this tensor into shards. Pass only {known}."
            )
        others[name] = value
    return Sample(tensors, others, num_labels)


def label_shift(model: Any) -> int:
    """1 if the logits at a position predict the next position's label, 0 if they predict the position's own label.

    Raises ValueError if the model's loss is not a sum over positions.
    """
    kind = getattr(model, "loss_type", None)
    if kind in TOKEN_LOSSES:
        return 0
    is_causal_loss = LOSS_MAPPING.get(kind, ForCausalLMLoss) is ForCausalLMLoss
    if model.get_decoder() is not model and is_causal_loss:
        return 1
    raise no_loss(model)


def no_loss(model: Any) -> ValueError:
    return ValueError(
        f"{type(model).__name__} computes no loss of single positions: call it without labels, and compute the loss on "
        "every rank, from outputs that parallel.unshard joins."
    )


def _positions_of_model(model: nn.Module, ids: Tensor) -> Tensor:
    """The model's own position_ids. They count from 0, or from padding_idx + 1 in models such as RoBERTa."""
    for module in model.modules():
        embeddings = getattr(module, "position_embeddings", None)
        padding = getattr(embeddings, "padding_idx", None)
        if padding is not None:
            valid = ids != padding
            return valid.cumsum(1) * valid + padding
    return torch.arange(ids.shape[1], device=ids.device)[None]


def _refuse_padding(mask: Tensor | None, labels: Tensor | None, model: Any) -> None:
    """Raise ValueError for padding that tokens would attend to. A causal model may be padded on the right."""
    if mask is None:
        return
    is_valid = mask.bool()
    if mask.dim() == 2 and is_valid.all():
        return
    is_causal = all(module.is_causal for module in model.modules() if hasattr(module, "is_causal"))
    if mask.dim() != 2 or not is_causal or (is_valid.diff() & is_valid[:, 1:]).any():
        raise ValueError(
            f"attention_mask of shape {tuple(mask.shape)}: sequences that are split over ranks may have padding only "
            "on the right, and only in a causal model. Pack documents into one row (DataCollatorWithFlattening)."
        )
    if labels is not None and (labels[~is_valid] != IGNORED_LABEL).any():
        raise ValueError(
            "labels of padded positions must be -100, or padding would be learned from."
        )


def _count(labels: Tensor, num_items: int | Tensor | None) -> int | Tensor:
    """The number by which the loss is divided: num_items, which a trainer passes, or else the number of labels."""
    num_labels = int((labels != IGNORED_LABEL).sum())
    least = min(num_labels, 1)  # without labels a count of 0 is allowed: the loss is then 0
    count = num_labels if num_items is None else num_items
    if not least <= count < math.inf:
        raise ValueError(f"num_items_in_batch={count}: the mean of a loss needs one item at least.")
    return count
