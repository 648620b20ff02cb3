"""Loads a state dict as a whole or not at all, and removes what DDP, FSDP and other wrappers add to its names."""

from collections.abc import Collection, Mapping
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

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """torch's `load_state_dict`, but all is checked before anything changes.

        Raises:
            ValueError: for tensors that have another shape, are not floating, or hold numbers that are not finite in
                the model's dtype. With strict=True also for missing and unknown names.
        """
        if not isinstance(state_dict, Mapping):
            raise ValueError(
                f"state_dict must be a dict of tensors by name, got a {type(state_dict).__name__}."
            )
        if failure := _failure(self, state_dict, strict):
            raise ValueError(
                f"the weights do not fit this {type(self).__name__}, which is unchanged: {failure}."
            )
        return super().load_state_dict(state_dict, strict=strict, assign=assign)


def _failure(module: nn.Module, state_dict: Mapping[str, Any], strict: bool) -> str:
    """Why these tensors cannot be loaded; empty if they can."""
    parameters = module.state_dict()
    failures = []
    for name, parameter in parameters.items():
        if name in state_dict:
            why = _why_not(state_dict[name], parameter)
            if why is not None:
                failures.append(f"{name} {why}")
    if strict:
        missing = [name for name in parameters if name not in state_dict]
        unknown = [name for name in state_dict if name not in parameters]
        if missing:
            failures.append(f"missing {_listed(missing, ', ')}")
        if unknown:
            failures.append(f"unknown {_listed(unknown, ', ')}")
    return _listed(failures, "; ")


def _why_not(x: Any, parameter: Tensor) -> str | None:
    """Why x cannot replace a model's tensor, or None."""
    expected = tuple(parameter.shape)
    if not isinstance(x, Tensor):
        return f"is a {type(x).__name__}, expected {expected}"
    if x.shape != expected:
        return f"is {tuple(x.shape)}, expected {expected}"
    if not x.is_floating_point() or x.layout != torch.strided or x.is_meta:
        return f"has {x.layout} and {x.dtype} on {x.device}, expected floating numbers"
    return (
        None if x.to(parameter.dtype).isfinite().all() else f"holds NaN or inf as {parameter.dtype}"
    )


def _listed(texts: list[str], between: str) -> str:
    shown = texts[:NUM_LISTED]
    if len(texts) > NUM_LISTED:
        shown.append(f"and {len(texts) - NUM_LISTED} more")
    return between.join(shown)


def map_names(state_dict: Mapping[str, Any], model: nn.Module, prefix: str = "") -> Mapped:
    """Rename the tensors of a checkpoint as a model names them. Also returns the names that the model does not have.

    Drops what wrappers add to names (DDP's "module.", torch.compile's "_orig_mod.", FSDP's and fairscale's), and
    `prefix`, such as "encoder." for a part of a larger model.
    """
    expected = {f"{prefix}{name}": name for name in model.state_dict()}
    mapped: dict[str, Tensor] = {}
    left = []
    for key, x in state_dict.items():
        name = expected.get(_without_wrappers(key, expected))
        if name is not None and name not in mapped and isinstance(x, Tensor):
            mapped[name] = x
        else:
            left.append(key)
    return Mapped(mapped, left)


def _without_wrappers(name: str, expected: Collection[str]) -> str:
    """The name without what wrappers add. Prefixes are removed one by one, until the name is an expected one."""
    for infix in INFIXES:
        name = name.replace(infix, "")
    while name not in expected and name.startswith(PREFIXES):
        name = name.partition(".")[2]
    return name
