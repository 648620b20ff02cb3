"""Checks that a transformers model computes the same on several ranks as on one device, by running a tiny copy.

1. The copy receives the whole input. The output of each attention call is recorded.
2. The copy receives the first half of the input, then the second half, as two ranks would. Attention computes
   nothing, and returns the matching half of the recorded output.

A result of step 2 differs from the same rows in step 1 only if the model uses the whole input outside of attention.
Examples are rotary angles that depend on the length, a mean over all rows, and a classification head that takes the
last row.

B batch, H query heads, G key/value heads, M rows, D head dim.
"""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ...ranks.arguments import cut_of
from ...ranks.context import ContextParallel
from ...ranks.ranks import Ranks
from .attention_function import attend
from .config import REPLAYED
from .probe import FAILURES, ROWS, UnfitError, first_tensor, for_copies, inputs_of_copy, tiny_copy

NUM_RANKS = 2
# In a copy, the length beyond which some rotary embeddings change their angles. The whole input is longer than SHORT,
# and a half of the input is shorter.
SHORT = ROWS * 3 // 4
_fit: set[tuple[type, str, bool]] = set()  # the models that passed `check_ranks`


def check_ranks(model: Any, sharded: Callable[[Any, Any], Any]) -> None:
    """Check that a model computes the same on several ranks as on one device. A class and config are checked once.

    Args:
        sharded: `ShardedForward`, which makes a model compute a rank's shard.

    Raises:
        ValueError: if results on several ranks would differ from those on one device, with the reason.
    """
    has_no_pooler = getattr(model, "pooler", None) is None
    key = type(model), repr(model.config.to_dict()), has_no_pooler
    if key in _fit:
        return
    name = type(model).__name__
    if getattr(model.config, "attn_temperature_tuning", False):
        raise ValueError(
            f"{name} has attn_temperature_tuning: it scales each query by its position among the rows that "
            "it receives, and a rank receives only a shard of the rows. Compute it on one device."
        )
    with for_copies(name):
        try:
            copied = tiny_copy(type(model), _shortened(model.config))
            if has_no_pooler:
                copied.pooler = None
            _check_halves(name, copied, sharded)
        except UnfitError:
            raise
        except FAILURES as error:
            raise ValueError(
                f"{name} does not run on a rank's rows, as a tiny copy of it shows: {error!r}"
            ) from error
    _fit.add(key)


def _shortened(config: Any) -> Any:
    """A copy of a config, with SHORT as the length beyond which rotary embeddings change their angles."""
    config = copy.deepcopy(config)
    parameters = getattr(config, "rope_parameters", None) or {}
    by_layer_type = [x for x in parameters.values() if isinstance(x, dict)]
    for rope in by_layer_type or [parameters]:
        if "original_max_position_embeddings" in rope:
            rope["original_max_position_embeddings"] = SHORT
        if rope.get("rope_type") == "dynamic":
            config.max_position_embeddings = SHORT
    if hasattr(config, "original_max_position_embeddings"):
        config.original_max_position_embeddings = SHORT
    return config


class Recording(ContextParallel):
    """A ContextParallel of one rank with the whole input. It records inputs and output of each attention call."""

    def __init__(self, rank: int = 0, num_ranks: int = 1) -> None:
        ranks = Ranks(cut_of(num_ranks, "contiguous", 1, None))
        ranks.rank, ranks.world_size = rank, num_ranks
        self.group = None
        self._take(ranks, "ring")
        # The query, key, value and output of each attention call.
        self.calls: list[tuple[Tensor, ...]] = []
        self.joined: list[Tensor] = []  # the tensors that `unshard` received

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, **options: Any
    ) -> Tensor:
        output, _ = attend(module, query, key, value, None, **options)
        self.calls.append((query, key, value, output))
        return output

    def unshard(self, x: Tensor, dim: int = 1, *, cu_seqlens: Tensor | None = None) -> Tensor:
        self.joined.append(x)
        return x


class Replaying(Recording):
    """The ContextParallel of a rank with one half of the input.

    whole: the Recording of the whole input. `attend` computes nothing, but returns this rank's half of the output that
        was recorded.
    """

    def __init__(self, rank: int, whole: Recording) -> None:
        super().__init__(rank, NUM_RANKS)
        self.replayed, self.whole_rows = iter(whole.calls), iter(whole.joined)

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, **options: Any
    ) -> Tensor:
        *inputs, output = next(self.replayed)
        for rows, whole in zip((query, key, value), inputs, strict=True):
            if not _is_half(rows, whole, self.rank):
                raise OtherRowsError
        return output.chunk(NUM_RANKS, dim=1)[self.rank]

    def unshard(self, x: Tensor, dim: int = 1, *, cu_seqlens: Tensor | None = None) -> Tensor:
        whole = next(self.whole_rows)
        if not _is_half(x, whole, self.rank):
            raise OtherRowsError
        return whole


class OtherRowsError(Exception):
    """Raised if a rank passes to attention, or to `unshard`, other rows than its half of the rows on one device."""


def attend_replayed(
    module: nn.Module,
    query_BHMD: Tensor,
    key_BGMD: Tensor,
    value_BGMD: Tensor,
    attention_mask: Any,
    **options: Any,
) -> tuple[Tensor, None]:
    """The attention function of tiny copies: calls `attend` of the Recording that the model received as `parallel`."""
    parallel: Recording | None = options.pop("parallel", None)
    if parallel is None:
        raise UnfitError(
            f"the model received `parallel`, but did not pass it on to {type(module).__name__}: on each rank attention "
            "would see only this rank's rows. Use a model that passes keywords on to its attention."
        )
    return parallel.attend(module, query_BHMD, key_BGMD, value_BGMD, **options), None


def _check_halves(name: str, model: Any, sharded: Callable[[Any, Any], Any]) -> None:
    model.config._attn_implementation = REPLAYED
    inputs = inputs_of_copy(model, None)
    whole = Recording()
    whole_outputs, whole_result = _run(model, whole, inputs, sharded)
    for rank in range(NUM_RANKS):
        outputs, result = _run(model, Replaying(rank, whole), inputs, sharded)
        for module, output in outputs.items():
            # `all_rows` is None if a module, such as an expert, ran on this half of the input, but not on the whole.
            all_rows = whole_outputs.get(module)
            if all_rows is None or all_rows.dim() != 2 or all_rows.shape[1] != ROWS:
                continue
            if not _is_half(output, all_rows, rank):
                kind = type(model.get_submodule(module)).__name__
                raise UnfitError(
                    f"{name}: {kind} ({module}) needs the rows of the whole sequence, and a rank has only a shard of "
                    "the rows. Use another model (or another rope_type), or compute it on one device."
                )
        if result is None:
            raise UnfitError(
                f"{name}: on two ranks its attention receives other rows than on one device, so that ranks would "
                "compute another function. Use another model, or compute it on one device."
            )
        for field, value in result.items():
            if isinstance(value, Tensor) and not _is_half(value, whole_result[field], rank):
                raise UnfitError(
                    f"{name} computes {field} from all rows of a sequence, and a rank has only a shard of the rows: "
                    "call context_parallel with the model without this head (base_model; pooler = None), then pass to "
                    "the head the rows that parallel.unshard joins (see docs/integrations.md)."
                )


def _run(
    model: Any, parallel: Recording, inputs: dict[str, Tensor], sharded: Any
) -> tuple[dict[str, Tensor], Any]:
    """Run the model. Returns two things: the first output tensor of each module, by name, and the model's output.

    Modules come in the order in which they finish. The model's output is None if an OtherRowsError was raised.
    """
    outputs: dict[str, Tensor] = {}

    def keep(name: str, module: nn.Module, args: tuple, output: Any) -> None:
        tensor = first_tensor(output)
        if name and name not in outputs and tensor is not None:
            outputs[name] = tensor

    handle = sharded(model, parallel)
    hooks = [
        module.register_forward_hook(partial(keep, name)) for name, module in model.named_modules()
    ]
    try:
        return outputs, model(**inputs)
    except OtherRowsError:
        return outputs, None
    finally:
        for hook in (handle, *hooks):
            hook.remove()


def _is_half(x: Tensor, whole: Tensor, rank: int) -> bool:
    """Whether x is this rank's half of the tensor `whole`, or all of it."""
    if x.dim() != whole.dim():
        return False
    for dim, length in enumerate(x.shape):
        if whole.shape[dim] > length:
            whole = whole.chunk(NUM_RANKS, dim)[rank]
    if x.shape != whole.shape:
        return False
    if not x.is_floating_point():
        return torch.equal(x, whole)
    return torch.allclose(x, whole, rtol=1e-3, atol=1e-3 * float(whole.abs().max()))
