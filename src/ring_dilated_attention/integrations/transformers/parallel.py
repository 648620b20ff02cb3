"""Context parallelism for models of transformers, also under transformers' Trainer. Every rank receives the whole
sample, and computes its own shard of it.

The loss of a shard is computed and summed in slices of rows. Shape suffixes: T rows per slice, E embedding.
"""

import inspect
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from ...models.recompute import loss_slice_rows, sum_in_slices
from ...ranks.context import ContextParallel
from ...ranks.reduce import GlobalMean, all_reduce
from ..torch import check_meshes
from .config import AS_TRAINED, NAME
from .convert import check_as_trained, switch_attention
from .probe_ranks import check_ranks
from .sample import IGNORED_LABEL, label_shift, no_loss, whole_sample

OWN_LABEL = 0  # the label of the row on which a model's own loss is checked
# Values of `rope_type` with which the angles of a rotary embedding depend on the largest position in a call.
BY_LENGTH = {"dynamic", "longrope"}


def context_parallel(model: Any, parallel: ContextParallel) -> "ShardedForward":
    """Make a model compute shards: from now on its forward takes the whole sample, and computes this rank's shard.

        context_parallel(model, ContextParallel(mesh["cp"]))
        loss = model(input_ids=ids, labels=labels).loss     # ids (B, N), the same on all ranks that share the sample

    Returns a handle. Its `remove()` makes the model compute whole sequences again.

    Inputs: documents may be packed (position_ids that start anew, or cu_seq_lens_q). Padding is allowed only on the
    right, in a causal model, with labels of -100.

    Outputs: every rank returns the loss of the whole sample. Logits and hidden states are this rank's rows.
    `parallel.unshard` joins the rows of all ranks, for example for a loss of your own. A call with labels returns no
    logits: the loss computes the logits of one slice of rows at a time, and backward computes these logits again.

    Gradients: averaged over the ranks, as DDP, FSDP2 and DeepSpeed do, what a backward computes is the gradient of the
    mean of the ranks' losses. A trainer may treat the ranks as replicas.

    A model without a pattern in its config keeps the attention that it was trained with, including each layer's window
    and sinks.

    Raises:
        ValueError: if this package cannot compute the model's attention, if the model takes no position_ids, or if the
            model needs the whole sequence outside of attention, as a classifier of sequences does.
    """
    if not isinstance(parallel, ContextParallel):
        raise ValueError(f"parallel must be a ContextParallel, got {parallel!r}.")
    name = type(model).__name__
    if not isinstance(model, PreTrainedModel):
        raise ValueError(
            f"model must be a PreTrainedModel of transformers, got {name}. If it wraps one (DDP, PEFT), pass the model "
            "inside (model.module, model.get_base_model()), and call the wrapper as before."
        )
    has_pattern = model.config._attn_implementation == NAME
    if not has_pattern:
        check_as_trained(model)
    if "position_ids" not in inspect.signature(model.forward).parameters:
        raise ValueError(
            f"the forward of {name} takes no position_ids. Without them its attention would not know which rows a rank "
            "has. Use a model that takes position_ids and **kwargs."
        )
    if getattr(model, SHARDED, None) is not None:
        raise ValueError(f"{name} is under context_parallel already: remove() the first handle.")
    handle = ShardedForward(model, parallel)
    if not has_pattern:
        handle.attention_before = switch_attention(model, AS_TRAINED)
        handle.attention = AS_TRAINED
    try:
        if parallel.world_size > 1:
            check_ranks(model, ShardedForward)
    except BaseException:  # restore the model after any error, also after Ctrl-C
        handle.remove()
        raise
    return handle


SHARDED = "sharded_forward"  # a ShardedForward sets this attribute of its model to itself


class ShardedForward:
    """The hooks of `context_parallel`. `before` and `after` run around the model's forward, and `sum_loss` runs after
    the model's decoder.

    The decoder computes the hidden states of this rank's rows. The loss is computed for a slice of these rows at a
    time. To get the logits of a slice, the model's forward is called once more, with a decoder that only returns the
    slice's hidden states. So the model still changes logits in its own way (NanoChat caps them, Cohere scales them).
    """

    def __init__(self, model: Any, parallel: ContextParallel) -> None:
        self.parallel, self.model = parallel, model
        self.parameters = inspect.signature(model.forward)
        self.shard: dict[str, Any] = {}  # the arguments of the forward for this rank's shard
        # The labels of this rank's shard. None between forwards, and in a forward without labels.
        self.labels: Tensor | None = None
        self.num_labels: int | Tensor = 0  # the number of labels in the whole sample
        self.local_sum: Any = None  # the sum of the losses of this rank's labels
        self.largest_position: Any = None  # the largest position of the whole sequence
        # Pairs (config, name of its attention before `context_parallel` switched the model to AS_TRAINED). Empty if the
        # model was not switched.
        self.attention_before: list[tuple[Any, str]] = []
        self.attention = model.config._attn_implementation  # what every forward must use
        decoder = model.get_decoder()
        if not isinstance(decoder, PreTrainedModel):
            # Take the base model, because ModernBERT's get_decoder() returns the model's last layer.
            decoder = model.base_model
        [self.decoder] = [name for name, module in model.named_modules() if module is decoder]
        self.hooks = [
            decoder.register_forward_hook(self.sum_loss),
            model.register_forward_pre_hook(self.before, with_kwargs=True),
            model.register_forward_hook(self.after),
        ]
        for name, module in model.named_modules():
            rope_types = getattr(module, "rope_type", None)
            # Make a dict, because some models have a dict with a rope_type for each type of layer.
            if not isinstance(rope_types, dict):
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

    @torch.compiler.disable  # ranks send messages here, and torch cannot compile messages
    def before(
        self, model: nn.Module, args: tuple, kwargs: dict[str, Any]
    ) -> tuple[tuple, dict[str, Any]]:
        """Replace the whole sample in the arguments of a forward by this rank's shard of the sample.

        `sum_loss` computes this rank's loss. The model also computes a loss, of only two rows. The labels of these rows
        are IGNORED_LABEL and OWN_LABEL, and `after` checks the model's loss.
        """
        with self.parallel.ranks.refusing():
            check_meshes(model, self.parallel)
            _refuse_switched(model, self.attention)
            if self.parallel.world_size > 1:
                _refuse_noise(model)
            self.parameters.bind(*args, **kwargs)  # raises TypeError for unknown arguments
            arguments = {**dict(zip(self.parameters.parameters, args, strict=False)), **kwargs}
            arguments = {name: value for name, value in arguments.items() if value is not None}
            sample = whole_sample(self.model, self.parallel, arguments)
        self.num_labels = sample.num_labels
        self.largest_position = sample.tensors["position_ids"].max()
        shard: dict[str, Any] = self.parallel.shard_batch(sample.tensors)
        # Register `sum_loss` anew, so that `sum_loss` runs after the hooks of FSDP2 and ZeRO 3 on the decoder.
        self.hooks[0].remove()
        self.hooks[0] = model.get_submodule(self.decoder).register_forward_hook(self.sum_loss)
        self.labels = shard.pop("labels", None)
        borders = shard.pop("cu_seqlens", None)
        self.shard = {
            **sample.others,
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
        """Append the whole sequence's largest position to the input of `rotary`.

        The largest position in the input decides the angles.
        """

        def longer(positions: Tensor) -> Tensor:
            largest = self.largest_position.to(positions.device).expand(*positions.shape[:-1], 1)
            return torch.cat([positions, largest], dim=-1)

        if "position_ids" in kwargs:
            return args, {**kwargs, "position_ids": longer(kwargs["position_ids"])}
        return (args[0], longer(args[1]), *args[2:]), kwargs

    @torch.compiler.disable
    def join(self, pooler: nn.Module, args: tuple) -> tuple:
        """Replace this rank's rows (B, N, E) in a pooler's input by the rows of all ranks.

        Inputs of other shapes are not replaced. (`check_ranks` refuses a pooler that receives one row of each
        sequence.)
        """
        return (self.parallel.unshard(args[0]), *args[1:]) if args and args[0].dim() == 3 else args

    @torch.compiler.disable
    def sum_loss(self, decoder: nn.Module, args: tuple, output: Any) -> Any:
        """Sum the loss over this rank's rows, and keep the sum for `after`.

        Returns the decoder's output with only two rows. From these two rows the model then computes its own loss, which
        `after` checks.
        """
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
        """The sum of the cross-entropies of a slice. The model's forward computes the logits from `hidden_TE`."""
        output = replace(output, last_hidden_state=hidden_TE[None])
        model = _with(self.model, self.decoder, lambda *_, **__: output)
        output = type(self.model).forward(model, **arguments)
        if not hasattr(output, "logits"):  # the output of BertForPreTraining has no `logits`
            raise no_loss(self.model)
        logits = output.logits.flatten(0, -2)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return F.cross_entropy(logits, labels_T, ignore_index=IGNORED_LABEL, reduction="sum")

    @torch.compiler.disable
    def after(self, model: nn.Module, args: tuple, output: Any) -> Any:
        """Replace the model's own loss by the loss of the whole sample.

        Also check the model's own loss, which is computed for one label: it must be this label's cross-entropy.
        """
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


def _check_loss(model: nn.Module, output: Any) -> None:
    """Raise ValueError if the loss that a model computes for one label is not the cross-entropy of this label."""
    loss = output.loss
    row = output.logits.flatten(0, -2)[1 - label_shift(model)]
    row = row.float() if loss is None else row.to(loss)
    expected = F.cross_entropy(row, row.new_tensor(OWN_LABEL).long())
    if loss is None or not torch.isclose(loss, expected, rtol=1e-4, atol=1e-6, equal_nan=True):
        raise ValueError(
            f"the loss of {type(model).__name__} for one label is {loss}, but the cross-entropy of its logits is "
            f"{expected}. With context_parallel the loss is the cross-entropy alone. Switch off what the model adds "
            "to it (output_router_logits, a loss_function), or leave out the labels and use parallel.mean_loss."
        )


def _drop_position(
    rotary: nn.Module, args: tuple, angles: tuple[Tensor, ...]
) -> tuple[Tensor, ...]:
    """Remove from the cosines and sines the last position, which `add_position` added."""
    return tuple(x[..., :-1, :] for x in angles)


def _refuse_switched(model: nn.Module, attention: str) -> None:
    for module in model.modules():
        if isinstance(module, PreTrainedModel) and module.config._attn_implementation != attention:
            raise ValueError(
                f"attn_implementation={module.config._attn_implementation!r} under context_parallel: a rank would see "
                f"its own rows alone. Call set_attn_implementation({attention!r}), or remove() the handle."
            )


def _refuse_noise(model: Any) -> None:
    for module in model.modules():
        alpha = vars(module).get("neftune_noise_alpha")
        if alpha is not None and model.training:
            raise ValueError(
                f"neftune_noise_alpha={alpha}: its noise is scaled by the length of the sequence, and a rank knows "
                "only the length of its shard. Leave it out."
            )


def _with(module: Any, path: str, new: Any) -> Any:
    """A second module with the parameters and attributes of `module`, in which the submodule at `path` is `new`.

    Parameters are shared, not copied. `copy.copy` is not used, because FSDP2's modules refuse `copy.copy`.
    """
    name, _, rest = path.partition(".")
    if rest:
        new = _with(module._modules[name], rest, new)
    other = object.__new__(type(module))
    other.__dict__.update(module.__dict__)
    other.__dict__["_modules"] = {**module._modules, name: new}
    return other
