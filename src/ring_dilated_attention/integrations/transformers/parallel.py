"""Context parallelism for models of transformers, also under its Trainer: each rank is given the whole sample and
computes its shard.

T rows of a slice, E width.
"""

import inspect
import math
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss

from ...models.recompute import loss_slice_rows, sum_in_slices
from ...ranks.context import ContextParallel
from ...ranks.reduce import GlobalMean, all_reduce
from ..torch import check_meshes
from .attention_function import find_borders
from .config import AS_TRAINED, NAME
from .convert import check_as_trained, switch_attention
from .probe_ranks import check_ranks

IGNORED_LABEL = -100  # transformers' and torch's
# Losses in which a position has the label of its own token, not of the next.
TOKEN_LOSSES = ("ForMaskedLM", "ForTokenClassification")
# Arguments that are not passed on: they are replaced, repeat cu_seq_lens_q, or do not apply to a shard.
DROPPED = {
    "attention_mask",
    "cu_seq_lens_q",
    "cu_seq_lens_k",
    "max_length_q",
    "max_length_k",
    "num_items_in_batch",
}
DROPPED |= {"use_cache", "return_dict", "seq_idx"}
CACHES = {"cache", "past_key_values", "cache_params"}  # the first since transformers 5.24
OWN_LABEL = 0  # the label of the row on which a model's own loss is checked
CUT = ("input_ids", "token_type_ids", "position_ids")
LABELS = ("labels", "shift_labels")
# Rotary embeddings whose angles go by the largest position of a call.
BY_LENGTH = {"dynamic", "longrope"}


def context_parallel(model: Any, parallel: ContextParallel) -> "ShardedForward":
    """From now on a forward of the model is given the whole sample on every rank, and computes this rank's shard of it.
    `remove()` of the handle that is returned undoes this.

        context_parallel(model, ContextParallel(mesh["cp"]))
        loss = model(input_ids=ids, labels=labels).loss     # (B, N) on every rank, the same on all that share it

    A model without a pattern in its config keeps the attention that it was trained with: each layer's window and sinks.

    The loss is that of the whole sample, on every rank. Averaged over the ranks, as DDP, FSDP2 and DeepSpeed do, what a
    backward computes is the gradient of the mean of the ranks' losses: to a trainer ranks look like replicas. Other
    outputs (logits, hidden states) are this rank's rows. `parallel.unshard` joins them, for a loss of your own too.
    With labels no logits are returned: the loss makes them for some rows at a time, and backward makes them again.
    Documents may be packed (position_ids that start anew, or cu_seq_lens_q). Padding is allowed only on the right, in a
    causal model, with labels of -100.

    Raises:
        ValueError: if ours is not the attention of the model, if it has convolutions over positions, or does not take
            positions or further keywords; and if it computes something from the whole sequence outside of attention, as
            a classifier of sequences does.
    """
    if not isinstance(parallel, ContextParallel):
        raise ValueError(f"parallel must be a ContextParallel, got {parallel!r}.")
    name = type(model).__name__
    wrapped = None
    if isinstance(model, nn.parallel.DistributedDataParallel):
        wrapped = "model.module"
    elif callable(getattr(model, "get_base_model", None)):
        wrapped = "model.get_base_model()"
    if wrapped is not None:
        raise ValueError(
            f"{name} wraps a model: call context_parallel({wrapped}, parallel), and the wrapper as before."
        )
    if not isinstance(model, PreTrainedModel):
        raise ValueError(f"model must be a PreTrainedModel of transformers, got {name}.")
    has_pattern = model.config._attn_implementation == NAME
    if not has_pattern:
        check_as_trained(model)
    parameters = inspect.signature(model.forward).parameters
    missing = None
    if "position_ids" not in parameters:
        missing = "position_ids"
    if all(parameter.kind is not parameter.VAR_KEYWORD for parameter in parameters.values()):
        missing = "further keywords"
    if missing is not None:
        raise ValueError(
            f"the forward of {name} takes no {missing}: it could not tell its attention which rows a rank has. Use a "
            "model that takes position_ids and **kwargs."
        )
    for module in model.modules():
        if isinstance(module, nn.Conv1d) and module.kernel_size[0] > 1:
            raise ValueError(
                f"{name} has layers of {type(module).__name__} of {module.kernel_size[0]}: ranks exchange rows for "
                "dilated attention alone. Use a model in which positions meet nowhere else."
            )
    if getattr(model, SHARDED, None) is not None:
        raise ValueError(f"{name} is under context_parallel already: remove() the first handle.")
    handle = ShardedForward(model, parallel)
    if not has_pattern:
        handle.attention_before = switch_attention(model, AS_TRAINED)
    try:
        if parallel.world_size > 1:
            check_ranks(model, ShardedForward)
    except BaseException:  # also Ctrl-C: the model is as it was
        handle.remove()
        raise
    return handle


SHARDED = "sharded_forward"


class ShardedForward:
    """The hooks of `context_parallel`: before and after a model's forward, and where its hidden states are made.

    A slice's logits come from the model's own forward: its decoder is replaced by one that returns the slice's hidden
    states. So whatever a model does to its logits (NanoChat caps them, Cohere scales them) is done.
    """

    def __init__(self, model: Any, parallel: ContextParallel) -> None:
        self.parallel, self.model = parallel, model
        self.parameters = inspect.signature(model.forward)
        self.shard: dict[str, Any] = {}  # the arguments of the forward for this rank's shard
        # of this rank's shard; None without labels, and between forwards
        self.labels: Tensor | None = None
        self.num_labels: int | Tensor = 0  # of the whole sample
        self.local_sum: Any = None  # of the losses of this rank's labels
        self.largest_position: Any = None  # of the whole sequence
        # configs with the attention that they had, if it was replaced by AS_TRAINED
        self.attention_before: list[tuple[Any, str]] = []
        decoder = model.get_decoder()
        if not isinstance(decoder, PreTrainedModel):  # ModernBERT calls its last layer so
            decoder = model.base_model
        [self.decoder] = [name for name, module in model.named_modules() if module is decoder]
        self.hooks = [
            decoder.register_forward_hook(self.sum_loss),
            model.register_forward_pre_hook(self.before, with_kwargs=True),
            model.register_forward_hook(self.after),
        ]
        for name, module in model.named_modules():
            rope_types = getattr(module, "rope_type", None)
            if not isinstance(rope_types, dict):  # of layer types
                rope_types = {"": rope_types}
            if BY_LENGTH.intersection(rope_types.values()):
                self.hooks.append(
                    module.register_forward_pre_hook(self.add_position, with_kwargs=True)
                )
                self.hooks.append(module.register_forward_hook(_drop_position))
            if name.endswith("pooler"):
                self.hooks.append(module.register_forward_pre_hook(self.join))
        setattr(model, SHARDED, self)

    def remove(self) -> None:
        """From now on the model computes whole sequences again."""
        for hook in self.hooks:
            hook.remove()
        for config, implementation in self.attention_before:
            config._attn_implementation = implementation
        setattr(self.model, SHARDED, None)

    @torch.compiler.disable  # ranks talk to each other
    def before(
        self, model: nn.Module, args: tuple, kwargs: dict[str, Any]
    ) -> tuple[tuple, dict[str, Any]]:
        """Replace the arguments of a forward by those of this rank's shard.

        With labels the model computes its own loss of two rows only, the second with a label: see `after`.
        """
        with self.parallel.ranks.refusing():
            check_meshes(model, self.parallel)
            if self.parallel.world_size > 1:
                _refuse_noise(model)
            self.parameters.bind(*args, **kwargs)  # refuses what the forward does not take
            arguments = {**dict(zip(self.parameters.parameters, args, strict=False)), **kwargs}
            whole, others = self._whole(
                {name: value for name, value in arguments.items() if value is not None}
            )
        self.largest_position = whole["position_ids"].max()
        shard: dict[str, Any] = self.parallel.shard_batch(whole)
        # registered anew, to run after those of FSDP2 and ZeRO 3, which watch hidden states
        self.hooks[0].remove()
        self.hooks[0] = model.get_submodule(self.decoder).register_forward_hook(self.sum_loss)
        self.labels = shard.pop("labels", None)
        borders = shard.pop("cu_seqlens", None)
        self.shard = {
            **others,
            **shard,
            "cu_seq_lens_q": borders,
            "parallel": self.parallel,
            "use_cache": False,
        }
        if self.labels is None:
            return (), self.shard
        return (), {**self.shard, "labels": self.labels.new_tensor([[IGNORED_LABEL, OWN_LABEL]])}

    def add_position(
        self, rotary: nn.Module, args: tuple, kwargs: dict[str, Any]
    ) -> tuple[tuple, dict[str, Any]]:
        """Let a rotary embedding see the largest position of the whole sequence, by which its angles go."""

        def longer(positions: Tensor) -> Tensor:
            largest = self.largest_position.to(positions.device).expand(*positions.shape[:-1], 1)
            return torch.cat([positions, largest], dim=-1)

        if "position_ids" in kwargs:
            return args, {**kwargs, "position_ids": longer(kwargs["position_ids"])}
        return (args[0], longer(args[1]), *args[2:]), kwargs

    @torch.compiler.disable
    def join(self, pooler: nn.Module, args: tuple) -> tuple:
        """Give a pooler the rows of the whole sequence. (`check_ranks` refuses a pooler that is given one row.)"""
        return (self.parallel.unshard(args[0]), *args[1:]) if args and args[0].dim() == 3 else args

    @torch.compiler.disable
    def sum_loss(self, decoder: nn.Module, args: tuple, output: Any) -> Any:
        """Sum the loss of this rank's rows. The decoder then hands on two rows, by which `after` checks the loss."""
        if self.labels is None:
            return output
        hidden = output.last_hidden_state
        num_rows = loss_slice_rows(self.model.config.get_text_config().vocab_size)
        loss = partial(self._loss, self.shard, output)
        self.local_sum = sum_in_slices(
            loss, hidden, self.labels.to(hidden.device), num_rows, is_random=True
        )
        first = hidden[:1, :1].detach()
        return replace(output, last_hidden_state=torch.cat([first, first.flip(-1)], dim=1))

    def _loss(
        self, arguments: dict[str, Any], output: Any, hidden_TE: Tensor, labels_T: Tensor
    ) -> Tensor:
        """The sum of the cross-entropies of a slice, from the logits that the model's own forward makes of it."""
        output = replace(output, last_hidden_state=hidden_TE[None])
        model = _with(self.model, self.decoder, lambda *_, **__: output)
        logits = type(self.model).forward(model, **arguments).logits.flatten(0, -2)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return F.cross_entropy(logits, labels_T, ignore_index=IGNORED_LABEL, reduction="sum")

    @torch.compiler.disable
    def after(self, model: nn.Module, args: tuple, output: Any) -> Any:
        """Replace the model's own loss, which is only checked, by that of the whole sample."""
        if self.labels is None:
            return output
        ranks = self.parallel.ranks
        with ranks.refusing():
            _check_loss(model, output)
        local_sum = self.local_sum.to(output.loss.dtype)
        count = torch.as_tensor(self.num_labels)
        loss = GlobalMean.apply(local_sum, all_reduce(ranks, local_sum), count, ranks.world_size)
        self.labels = self.local_sum = None
        self.shard = {}
        return replace(output, loss=loss, logits=None)

    def _whole(self, arguments: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The tensors to cut, still whole, and the arguments to pass on. Counts the labels."""
        if CACHES & {*arguments} or arguments.get("logits_to_keep"):
            remedy = "remove() the handle that it returned, then generate."
            raise ValueError(
                f"context_parallel takes no cache and no logits_to_keep, which generate passes: {remedy}"
            )
        if arguments.get("return_dict") is False:
            raise ValueError(
                "return_dict=False: a tuple has no output.loss to replace. Leave return_dict out."
            )
        ids = arguments.get("input_ids")
        if not isinstance(ids, Tensor) or ids.dim() != 2:
            raise ValueError(
                "under context_parallel a model needs input_ids, (batch, N), the whole of them."
            )
        lengths = self.parallel.cut.default_lengths(ids.shape[1])
        if 0 in lengths:
            raise ValueError(
                f"{ids.shape[1]} positions over {self.parallel.world_size} ranks are {lengths}: a rank would have "
                "none. Give longer sequences, or fewer ranks."
            )
        whole = {name: arguments[name] for name in CUT if name in arguments}
        positions = arguments.get("position_ids")
        borders = arguments.get("cu_seq_lens_q")
        if borders is None and positions is not None:
            borders = find_borders(positions, len(positions), ids.shape[1])
            if borders is not None and len(positions) > 1:
                raise ValueError(
                    f"position_ids start anew inside rows, and the batch has {len(positions)} of them: pack all "
                    "documents into one row, as DataCollatorWithFlattening does."
                )
        if positions is None:
            positions = _own_positions(self.model, ids)
        whole["position_ids"] = positions.expand(len(ids), -1)
        if borders is not None:
            whole["cu_seqlens"] = borders.to(torch.int32)
        labels = arguments.get("shift_labels")
        if labels is None and "labels" in arguments:
            shift = _shift(self.model)
            labels = F.pad(arguments["labels"][:, shift:], (0, shift), value=IGNORED_LABEL)
        _refuse_padding(arguments.get("attention_mask"), labels, self.model)
        if labels is not None:
            whole["labels"] = labels
            self.num_labels = _count(labels, arguments.get("num_items_in_batch"))
        others = {
            name: value
            for name, value in arguments.items()
            if name not in (*CUT, *LABELS, *DROPPED)
        }
        unknown = [
            name for name, value in others.items() if isinstance(value, Tensor) and value.dim()
        ]
        if unknown:
            known = ", ".join((*CUT, *LABELS))
            raise ValueError(
                f"{', '.join(unknown)}: it is not known how to cut this. Pass only {known}."
            )
        return whole, others


def _check_loss(model: nn.Module, output: Any) -> None:
    """Refuse a model whose own loss of one label is not the cross-entropy of that label."""
    loss = output.loss
    row = output.logits.flatten(0, -2)[1 - _shift(model)]
    row = row.float() if loss is None else row.to(loss)
    expected = F.cross_entropy(row, row.new_tensor(OWN_LABEL).long())
    if loss is None or not torch.isclose(loss, expected, rtol=1e-4, atol=1e-6, equal_nan=True):
        raise ValueError(
            f"the loss of {type(model).__name__} for one label is {loss}, and the cross-entropy of its logits is "
            f"{expected}: ranks compute no other loss. Leave out what adds to it (output_router_logits, a "
            "loss_function), or call the model without labels and use parallel.mean_loss."
        )


def _count(labels: Tensor, num_items: int | Tensor | None) -> int | Tensor:
    """The number of labels by which the loss is divided."""
    num_labels = int((labels != IGNORED_LABEL).sum())
    least = min(num_labels, 1)  # without a label the loss is 0
    count = num_labels if num_items is None else num_items
    if not least <= count < math.inf:
        raise ValueError(f"num_items_in_batch={count}: the mean of a loss needs one item at least.")
    return count


def _drop_position(
    rotary: nn.Module, args: tuple, angles: tuple[Tensor, ...]
) -> tuple[Tensor, ...]:
    """The cosines and sines without those of the position that `add_position` added."""
    return tuple(x[..., :-1, :] for x in angles)


def _refuse_noise(model: Any) -> None:
    for module in model.modules():
        alpha = vars(module).get("neftune_noise_alpha")
        if alpha is not None and model.training:
            raise ValueError(
                f"neftune_noise_alpha={alpha}: its noise is scaled by the length of the sequence, and a rank knows "
                "only that of its shard. Leave it out."
            )


def _own_positions(model: nn.Module, ids: Tensor) -> Tensor:
    """The positions that the model would count: from 0, but in RoBERTa and its like from padding_idx + 1."""
    for module in model.modules():
        embeddings = getattr(module, "position_embeddings", None)
        padding = getattr(embeddings, "padding_idx", None)
        if padding is not None:
            valid = ids != padding
            return valid.cumsum(1) * valid + padding
    return torch.arange(ids.shape[1], device=ids.device)[None]


def _with(module: Any, path: str, new: Any) -> Any:
    """A module that shares all with another, but for one submodule. No `copy`: FSDP2's modules refuse it."""
    name, _, rest = path.partition(".")
    if rest:
        new = _with(module._modules[name], rest, new)
    other = object.__new__(type(module))
    other.__dict__.update(module.__dict__)
    other.__dict__["_modules"] = {**module._modules, name: new}
    return other


def _shift(model: Any) -> int:
    """1 if a position has the label of the next token, 0 if of its own."""
    kind = getattr(model, "loss_type", None)
    if kind in TOKEN_LOSSES:
        return 0
    if (
        model.get_decoder() is not model
        and LOSS_MAPPING.get(kind, ForCausalLMLoss) is ForCausalLMLoss
    ):
        return 1
    remedy = "call it without labels, and compute the loss on every rank, from outputs that parallel.unshard joins."
    raise ValueError(f"{type(model).__name__} computes no loss of single positions: {remedy}")


def _refuse_padding(mask: Tensor | None, labels: Tensor | None, model: Any) -> None:
    """Refuse padding that other positions would see: all but padding on the right in a causal model."""
    if mask is None:
        return
    is_valid = mask.bool()
    if mask.dim() == 2 and is_valid.all():
        return
    is_causal = all(module.is_causal for module in model.modules() if hasattr(module, "is_causal"))
    if mask.dim() != 2 or not is_causal or (is_valid.diff() & is_valid[:, 1:]).any():
        raise ValueError(
            f"attention_mask of shape {tuple(mask.shape)}: ranks share whole sequences, which may have padding only on "
            "the right, in a causal model. Pack documents into one row (DataCollatorWithFlattening)."
        )
    if labels is not None and (labels[~is_valid] != IGNORED_LABEL).any():
        raise ValueError(
            "labels of padded positions must be -100, or padding would be learned from."
        )


class SameSample:
    """A mixin for Trainer that gives the same samples to the ranks that share a sequence.

        class SequenceTrainer(SameSample, Trainer):
            pass

        context_parallel(model, parallel)
        SequenceTrainer(model=model, ...).train()

    accelerate gives every process different samples. With this mixin each group of ranks that share a sequence gets
    different samples, and the ranks within a group get the same samples.
    """

    model: Any
    args: Any
    accelerator: Any
    compute_loss_func: Any

    def get_train_dataloader(self) -> Any:
        smoothing = self.args.label_smoothing_factor
        if smoothing:
            raise ValueError(
                f"label_smoothing_factor={smoothing}: Trainer would compute its own loss, from whole labels and the "
                "logits of a shard. Set it to 0."
            )
        if self.compute_loss_func is not None:
            raise ValueError(
                "compute_loss_func would be given whole labels and the logits of a shard: leave it out."
            )
        return self._same(super().get_train_dataloader())  # type: ignore[misc]

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        return self._evaluated(self._same(super().get_eval_dataloader(eval_dataset)))  # type: ignore[misc]

    def get_test_dataloader(self, test_dataset: Any) -> Any:
        return self._evaluated(self._same(super().get_test_dataloader(test_dataset)))  # type: ignore[misc]

    def prediction_step(
        self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None
    ) -> Any:
        if not prediction_loss_only:
            raise ValueError(
                "evaluation beyond the loss needs whole logits, and each rank has its shard of them: leave out "
                "compute_metrics, or set prediction_loss_only=True."
            )
        return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)  # type: ignore[misc]

    def _sharded(self) -> ShardedForward:
        sharded = getattr(self.accelerator.unwrap_model(self.model), SHARDED, None)
        if sharded is None:
            raise ValueError(
                "SameSample is for sequences that ranks share: call context_parallel(model, ...) first."
            )
        return sharded

    def _same(self, loader: Any) -> Any:
        """Make a loader give samples to groups of ranks, not to processes. Groups are ordered by their lowest ranks."""
        # which Trainer alone needs
        from accelerate.data_loader import BatchSamplerShard, IterableDatasetShard

        parallel = self._sharded().parallel
        if parallel.world_size == 1:
            return loader
        members = parallel.ranks.handshake(dist.get_rank(), {"call": "SameSample"})
        lowest = torch.tensor([min(members)], device=self.accelerator.device)
        groups = sorted(set(self.accelerator.gather(lowest).tolist()))
        for sampler in (loader.batch_sampler, loader.dataset):
            if isinstance(sampler, (BatchSamplerShard, IterableDatasetShard)):
                sampler.num_processes = len(groups)
                sampler.process_index = groups.index(min(members))
                return loader
        raise ValueError(
            f"samples are dealt by a {type(loader).__name__}, which takes no groups of ranks: pass Trainer "
            'accelerator_config={"dispatch_batches": False}.'
        )

    def _evaluated(self, loader: Any) -> Any:
        """Refuse a smaller last batch: Trainer would weigh it as if the ranks of a group had different samples."""
        if (
            self._sharded().parallel.world_size > 1
            and loader.total_dataset_length % loader.total_batch_size
        ):
            raise ValueError(
                f"{loader.total_dataset_length} samples are no multiple of the {loader.total_batch_size} of a step: "
                "their mean would not be exact. Choose another per_device_eval_batch_size (1 always fits one group)."
            )
        return loader
