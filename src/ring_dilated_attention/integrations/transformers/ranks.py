"""Context parallelism for models of transformers: each rank is given the whole sample and computes its shard."""

import inspect
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss

from ...ranks.context import ContextParallel
from ...ranks.reduce import GlobalMean, all_reduce
from ..torch import check_meshes
from .attention import find_borders
from .config import NAME

IGNORED_LABEL = -100  # transformers' and torch's
# Losses that are a mean of cross-entropies over positions. `after` computes them.
TOKEN_LOSSES = ("ForMaskedLM", "ForTokenClassification")
# Arguments that are not passed on: they repeat cu_seq_lens_q, or do not apply to a shard.
DROPPED = ("attention_mask", "cu_seq_lens_k", "max_length_q", "max_length_k", "use_cache", "return_dict", "seq_idx")
CUT = ("input_ids", "token_type_ids", "position_ids", "labels", "shift_labels")


def context_parallel(model: Any, parallel: ContextParallel) -> "ShardedForward":
    """From now on a forward of the model is given the whole sample on every rank, and computes this rank's shard of it.

        context_parallel(model, ContextParallel(mesh["cp"]))
        loss = model(input_ids=ids, labels=labels).loss     # (B, N) on every rank, the same on all that share it

    The loss is that of the whole sample, on every rank. The *mean* of the ranks' gradients, which DDP, FSDP2 and
    DeepSpeed take, is the gradient of that loss: to a trainer ranks look like replicas. Other outputs (logits, hidden
    states) are this rank's rows; `parallel.unshard` joins them. Documents may be packed (position_ids that start anew,
    or cu_seq_lens_q). Padding is allowed only on the right, in a causal model, with labels of -100.

    Returns:
        a handle, whose `remove()` undoes this.

    Raises:
        ValueError: if the model has no dilated attention, has convolutions over positions, or does not take positions
            or further keywords.
    """
    if not isinstance(parallel, ContextParallel):
        raise ValueError(f"parallel must be a ContextParallel, got {parallel!r}.")
    name, config = type(model).__name__, getattr(model, "config", None)
    if getattr(config, "_attn_implementation", None) != NAME:
        raise ValueError(
            f"{name} has attn_implementation={getattr(config, '_attn_implementation', None)!r}: only dilated attention "
            "is shared by ranks. Convert the model first, by convert_to_dilated (DilatedPattern.dense() is dense)."
        )
    parameters = inspect.signature(model.forward).parameters
    takes_more = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    if not takes_more or "position_ids" not in parameters:
        raise ValueError(
            f"the forward of {name} takes no {'position_ids' if takes_more else 'further keywords'}: it could not tell "
            "its attention which rows a rank has. Use a model that takes both."
        )
    convolutions = {f"{type(x).__name__} of {x.kernel_size[0]}" for x in model.modules() if isinstance(x, nn.Conv1d)}
    if others := ", ".join(sorted(convolutions - {"Conv1d of 1"})):
        raise ValueError(
            f"{name} has layers of {others}: ranks exchange rows for dilated attention alone. Use a model in which "
            "positions meet nowhere else."
        )
    if getattr(model, SHARDED, None) is not None:
        raise ValueError(f"{name} is on sequences that ranks share already: remove() the first handle.")
    return ShardedForward(model, parallel)


SHARDED = "sharded_forward"


class ShardedForward:
    """The hooks of `context_parallel` before and after a model's forward."""

    def __init__(self, model: nn.Module, parallel: ContextParallel) -> None:
        self.parallel, self.model = parallel, model
        self.signature = inspect.signature(model.forward)
        self.num_labels: Any = None
        self.labels: Tensor | None = None
        self.hooks = [
            model.register_forward_pre_hook(self.before, with_kwargs=True),
            model.register_forward_hook(self.after, with_kwargs=True),
        ]
        setattr(model, SHARDED, self)

    def remove(self) -> None:
        """From now on the model computes whole sequences again."""
        for hook in self.hooks:
            hook.remove()
        setattr(self.model, SHARDED, None)

    @torch.compiler.disable  # ranks talk to each other
    def before(self, model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        with self.parallel.ranks.refusing():
            check_meshes(model, self.parallel)
            batch, rest = self._batch(model, self._named(args, kwargs))
        try:
            local = self.parallel.shard_batch(batch)
        except ValueError as error:
            if "given different samples" not in str(error):
                raise
            raise ValueError(f"{error} Under Trainer, SameSample does this.") from error
        self.labels = local.get("labels")
        if self.labels is not None and _has_causal_loss(model):
            rest |= {"labels": self.labels, "shift_labels": self.labels, "num_items_in_batch": 1}  # the loss is a sum
            self.labels = None
        rest["cu_seq_lens_q"] = local.get("cu_seqlens")
        inputs = {name: local[name] for name in CUT[:3] if name in local}
        return (), {**rest, **inputs, "parallel": self.parallel, "use_cache": False}

    @torch.compiler.disable
    def after(self, model: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> Any:
        if self.num_labels is None:
            return output
        if self.labels is None:
            local_sum = output.loss
        else:
            logits = output.logits.flatten(0, -2)
            logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
            local_sum = F.cross_entropy(logits, self.labels.flatten(), ignore_index=IGNORED_LABEL, reduction="sum")
        ranks = self.parallel.ranks
        total, count = all_reduce(ranks, local_sum), torch.as_tensor(self.num_labels)
        output["loss"] = GlobalMean.apply(local_sum, total, count, ranks.world_size)
        self.num_labels = self.labels = None
        return output

    def _named(self, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
        """The arguments of the forward that are not None, by name."""
        bound = self.signature.bind(*args, **kwargs).arguments
        more = next((p.name for p in self.signature.parameters.values() if p.kind is p.VAR_KEYWORD), "")
        given = {**bound, **bound.pop(more, {})}
        return {name: value for name, value in given.items() if value is not None and name != more}

    def _batch(self, model: Any, given: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The tensors to cut, still whole, and the arguments to pass on. Counts the labels."""
        _refuse_what_is_no_training(given)
        ids = given.get("input_ids")
        if not isinstance(ids, Tensor) or ids.dim() != 2:
            raise ValueError("a model on sequences that ranks share needs input_ids, (batch, N), the whole of them.")
        lengths = self.parallel.cut.default_lengths(ids.shape[1])
        if 0 in lengths:
            raise ValueError(
                f"{ids.shape[1]} positions over {self.parallel.world_size} ranks are {lengths}: a rank would have none."
                " Give longer sequences, or fewer ranks."
            )
        positions, borders = given.get("position_ids"), given.get("cu_seq_lens_q")
        if borders is None and positions is not None:
            borders = find_borders(positions, len(positions), ids.shape[1])
            if borders is not None and len(positions) > 1:
                raise ValueError(
                    f"position_ids start anew inside rows, and the batch has {len(positions)} of them: pack all "
                    "documents into one row, as DataCollatorWithFlattening does."
                )
        batch = {name: given[name] for name in CUT if name in given}
        batch["position_ids"] = (_own_positions(model, ids) if positions is None else positions).expand(len(ids), -1)
        if borders is not None:
            batch["cu_seqlens"] = borders.to(torch.int32)
        labels = _labels(batch, given.get("attention_mask"), model)
        self.num_labels = None
        if labels is not None:
            batch["labels"] = labels
            self.num_labels = given.get("num_items_in_batch")
            if self.num_labels is None:
                self.num_labels = int((labels != IGNORED_LABEL).sum())
        taken = (*CUT, *DROPPED, "cu_seq_lens_q", "num_items_in_batch")
        rest = {name: value for name, value in given.items() if name not in taken}
        unknown = [name for name, value in rest.items() if isinstance(value, Tensor) and value.dim()]
        if unknown:
            raise ValueError(f"{', '.join(unknown)}: it is not known how to cut this. Pass only {', '.join(CUT)}.")
        return batch, rest


def _refuse_what_is_no_training(given: dict[str, Any]) -> None:
    if given.get("past_key_values") is not None or given.get("logits_to_keep"):
        raise ValueError(
            "generate on sequences that ranks share: a cache is of one device. Call remove() of context_parallel's "
            "handle, and generate on every rank, or on one."
        )
    if given.get("return_dict") is False:
        raise ValueError("return_dict=False: the loss of all ranks is put in by its name; leave return_dict out.")


def _own_positions(model: nn.Module, ids: Tensor) -> Tensor:
    """The positions that the model would count: from 0, but in RoBERTa and its like from padding_idx + 1."""
    for module in model.modules():
        padding = getattr(getattr(module, "position_embeddings", None), "padding_idx", None)
        if padding is not None:
            valid = ids != padding
            return valid.cumsum(1) * valid + padding
    return torch.arange(ids.shape[1], device=ids.device)[None]


def _has_causal_loss(model: Any) -> bool:
    return LOSS_MAPPING.get(getattr(model, "loss_type", None)) is ForCausalLMLoss


def _labels(batch: dict[str, Tensor], mask: Tensor | None, model: Any) -> Tensor | None:
    """The label that each position predicts. None if there is no loss."""
    labels, plain = batch.pop("shift_labels", None), batch.pop("labels", None)
    if labels is None and plain is not None:
        if _has_causal_loss(model):
            labels = F.pad(plain[:, 1:], (0, 1), value=IGNORED_LABEL)
        elif getattr(model, "loss_type", None) in TOKEN_LOSSES:
            labels = plain
        else:
            raise ValueError(
                f"{type(model).__name__} computes its loss from more than single positions: call it without labels, "
                "and compute the loss from outputs that parallel.unshard joins."
            )
    if labels is not None and getattr(model.config, "output_router_logits", False):
        raise ValueError("output_router_logits=True adds a loss over all positions, and a rank has a shard: set False.")
    _refuse_padding(mask, labels, model)
    return labels


def _refuse_padding(mask: Tensor | None, labels: Tensor | None, model: Any) -> None:
    """Refuse padding that other positions would see: all but padding on the right in a causal model."""
    if mask is None or (mask.dim() == 2 and bool(mask.bool().all())):
        return
    causal = all(module.is_causal for module in model.modules() if hasattr(module, "is_causal"))
    if mask.dim() != 2 or not causal or bool((mask.bool().diff() & mask.bool()[:, 1:]).any()):
        raise ValueError(
            f"attention_mask of shape {tuple(mask.shape)}: ranks share whole sequences, which may have padding only on "
            "the right, in a causal model. Pack documents into one row (DataCollatorWithFlattening)."
        )
    if labels is not None and bool((labels[~mask.bool()] != IGNORED_LABEL).any()):
        raise ValueError("labels of padded positions must be -100, or padding would be learned from.")
