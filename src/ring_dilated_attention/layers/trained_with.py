"""What weights were trained with, beside them in a state_dict: the pattern, and the base of rotary embeddings."""

import json
import warnings
from typing import Any

import torch
from torch import Tensor, nn

from ..pattern import DilatedPattern


def extra_state_of(pattern: DilatedPattern, rotary_base: float | None) -> Tensor:
    """The bytes of a JSON text, since safetensors and torch.distributed.checkpoint take tensors."""
    text = json.dumps({"pattern": pattern.as_dict(), "rotary_base": rotary_base})
    return torch.tensor(list(text.encode()), dtype=torch.uint8, device="cpu")


def check_extra_state(state: Tensor, pattern: DilatedPattern, rotary_base: float | None) -> None:
    """Raise ValueError unless the weights were trained with this pattern and this base."""
    try:
        # `state` may have been cast with the weights
        stored = json.loads(bytes(state.to(torch.uint8).tolist()))
        stored_pattern = DilatedPattern.from_dict(stored["pattern"])
        stored_base = stored["rotary_base"]
    except (ValueError, TypeError, KeyError, AttributeError, RuntimeError) as error:
        raise ValueError(
            "the weights' '_extra_state' does not say with which pattern they were trained: it is damaged, of "
            "another version, or was averaged with the weights, as by an EMA: average floats alone. If you know the "
            "pattern, leave the names that end so out of the state_dict"
        ) from error
    if (stored_pattern, stored_base) != (pattern, rotary_base):
        raise ValueError(
            f"the weights were trained with {stored_pattern} and rotary_base={stored_base}, and this module has "
            f"{pattern} and rotary_base={rotary_base}: it would be another function. Make the module so; or, if you "
            "mean to train on, leave the names that end in '_extra_state' out of the state_dict"
        )


class TrainedWith(nn.Module):
    """A part of a model, without weights, by which its state_dict says the model's pattern."""

    def __init__(self, pattern: DilatedPattern) -> None:
        super().__init__()
        self.pattern = pattern

    def get_extra_state(self) -> Tensor:
        return extra_state_of(self.pattern, None)

    def set_extra_state(self, state: Tensor) -> None:
        check_extra_state(state, self.pattern, None)


def check_before_loading(module: nn.Module, state: dict[str, Any], prefix: str, *_: object) -> None:
    """Refuse weights of another pattern before any is copied, and let those load that do not say their pattern, with a
    warning. Python shows a warning of one text once."""
    rememberer: Any = module
    name = f"{prefix}_extra_state"
    if hasattr(module, "trained_with"):
        rememberer, name = module.trained_with, f"{prefix}trained_with._extra_state"
    if name in state:
        rememberer.set_extra_state(state[name])
    elif any(key.startswith(prefix) for key in state):
        warnings.warn(
            "the weights do not say with which pattern and rotary they were trained: make sure that the module has the "
            "same, or its outputs are wrong. (Weights saved by this version say it.)",
            stacklevel=2,
        )
        state[name] = rememberer.get_extra_state()
