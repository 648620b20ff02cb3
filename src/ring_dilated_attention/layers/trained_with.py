"""Saves the pattern and the rotary base in a state_dict, beside the weights that were trained with them."""

import json
import warnings
from typing import Any

import torch
from torch import Tensor, nn

from ..pattern import DilatedPattern


class RemembersPattern(nn.Module):
    """A module whose state_dict also holds its pattern and the base of its rotary embeddings."""

    pattern: DilatedPattern
    rotary_base: float | None = None

    def get_extra_state(self) -> Tensor:
        """The pattern and the rotary base as the bytes of a JSON text: a uint8 tensor, because safetensors and
        torch.distributed.checkpoint save only tensors."""
        text = json.dumps({"pattern": self.pattern.as_dict(), "rotary_base": self.rotary_base})
        return torch.tensor(list(text.encode()), dtype=torch.uint8, device="cpu")

    def set_extra_state(self, state: Tensor) -> None:
        """Raise ValueError unless the weights were trained with this module's pattern and rotary base."""
        try:
            # Cast `state` back to bytes, because it may have been cast to a floating dtype together with the weights.
            stored = json.loads(bytes(state.to(torch.uint8).tolist()))
            pattern = DilatedPattern(**stored["pattern"])
            base = stored["rotary_base"]
        except (ValueError, TypeError, KeyError, AttributeError, RuntimeError) as error:
            raise ValueError(
                "the weights' '_extra_state' does not say with which pattern they were trained: it is damaged, of "
                "another version, or was averaged with the weights, as by an EMA. An EMA must leave integer tensors as "
                "they are. If you know the pattern, leave the names that end in '_extra_state' out of the state_dict"
            ) from error
        if (pattern, base) != (self.pattern, self.rotary_base):
            raise ValueError(
                f"the weights were trained with {pattern} and rotary_base={base}, and this module has {self.pattern} "
                f"and rotary_base={self.rotary_base}: with these weights it would compute another function. Give the "
                "module the pattern and rotary base of the weights. If you mean to train the weights further with the "
                "module's own pattern and rotary base, leave the names that end in '_extra_state' out of the state_dict"
            )


def check_before_loading(module: nn.Module, state: dict[str, Any], prefix: str, *_: object) -> None:
    """A pre-hook of load_state_dict. It raises ValueError, before any weight is copied, if the weights were trained
    with a different pattern or rotary base than the module's.

    If the weights contain no pattern, a warning says so. Python shows this warning once for all modules.
    """
    holder: Any = module
    name = f"{prefix}_extra_state"
    if not isinstance(module, RemembersPattern):
        holder = module.trained_with
        name = f"{prefix}trained_with._extra_state"
    # If `holder` is None, check nothing: the model is for published weights without a fixed pattern. The model computes
    # its pattern from the size of each input.
    if holder is None:
        return
    if name in state:
        holder.set_extra_state(state[name])
    elif any(key.startswith(prefix) for key in state):
        warnings.warn(
            "the weights do not say with which pattern and rotary they were trained: make sure that the module has the "
            "same, or its outputs are wrong. (Weights saved by this version say it.)",
            stacklevel=2,
        )
        state[name] = holder.get_extra_state()
