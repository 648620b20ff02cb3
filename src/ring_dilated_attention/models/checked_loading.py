"""Loads a state dict as a whole or not at all, and removes what DDP, FSDP and other wrappers add to its names."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

# What trainers and wrappers put before a parameter's name, or inside it.
PREFIXES = ("module.", "_orig_mod.", "model.")
INFIXES = ("_fsdp_wrapped_module.", "_fpw_module.", "_checkpoint_wrapped_module.")
NUM_LISTED = 5


class Mapped(NamedTuple):
    """The tensors of a checkpoint by a model's names, and the names in the checkpoint that the model does not have."""

    state_dict: dict[str, Tensor]
    left: list[str]


class CheckedLoading(nn.Module):
    """A module that loads all of a state dict or nothing."""

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """torch's `load_state_dict`, but all is checked before anything changes.

        Raises:
            ValueError: for tensors that have another shape, are not floating, or hold numbers that are not finite in
                the model's dtype. With strict=True also for missing and unknown names.
        """
        if not isinstance(state_dict, Mapping):
            raise ValueError(f"state_dict must be a dict of tensors by name, got a {type(state_dict).__name__}.")
        failure = _failure(self, state_dict, strict)
        if failure:
            raise ValueError(f"the weights do not fit this {type(self).__name__}, which is unchanged: {failure}.")
        return super().load_state_dict(state_dict, strict=strict, assign=assign)


def _failure(module: nn.Module, state_dict: Mapping[str, Any], strict: bool) -> str | None:
    own = module.state_dict()
    given = {name: state_dict[name] for name in own if name in state_dict}
    failures = [f"{name} {why}" for name, x in given.items() if (why := _why_not(x, own[name]))]
    if strict:
        missing = [name for name in own if name not in state_dict]
        unknown = [name for name in state_dict if name not in own]
        kinds = {"missing": missing, "unknown": unknown}
        failures += [f"{what} {_listed(names, ', ', ' ')}" for what, names in kinds.items() if names]
    return _listed(failures, "; ", "; ")


def _why_not(x: Any, own: Tensor) -> str | None:
    """Why x cannot replace a model's tensor `own`, or None."""
    if not isinstance(x, Tensor) or x.shape != own.shape:
        found = tuple(x.shape) if isinstance(x, Tensor) else f"a {type(x).__name__}"
        return f"is {found}, expected {tuple(own.shape)}"
    if not x.is_floating_point() or x.layout != torch.strided or x.is_meta:
        return f"has {x.layout} and {x.dtype} on {x.device}, expected floating numbers"
    return None if x.to(own.dtype).isfinite().all() else f"holds NaN or inf as {own.dtype}"


def _listed(texts: list[str], between: str, last: str) -> str:
    shown = between.join(texts[:NUM_LISTED])
    return f"{shown}{last}and {len(texts) - NUM_LISTED} more" if len(texts) > NUM_LISTED else shown


def map_names(state_dict: Mapping[str, Any], model: nn.Module, prefix: str = "") -> Mapped:
    """Rename the tensors of a checkpoint as a model names them. Also returns the names that the model does not have.

    Drops what wrappers add to names (DDP's "module.", torch.compile's "_orig_mod.", FSDP's and fairscale's), and
    `prefix`, such as "encoder." for a part of a larger model.
    """
    own = set(model.state_dict())
    mapped: dict[str, Tensor] = {}
    left = []
    for key, x in state_dict.items():
        name = _bare(key, prefix, own)
        if name in own and name not in mapped and isinstance(x, Tensor):
            mapped[name] = x
        else:
            left.append(key)
    return Mapped(mapped, left)


def _bare(name: str, prefix: str, own: set[str]) -> str | None:
    """The name without `prefix` and what wrappers add. None if it lacks `prefix`, or if that is "" and `own` lacks
    the name."""
    for infix in INFIXES:
        name = name.replace(infix, "")
    while True:
        if prefix and name.startswith(prefix):
            return name.removeprefix(prefix)
        if not prefix and name in own:
            return name
        found = next((text for text in PREFIXES if name.startswith(text)), None)
        if found is None:
            return None
        name = name.removeprefix(found)
