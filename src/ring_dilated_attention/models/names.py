"""Removes what DDP, FSDP and other wrappers add to the names in a checkpoint."""

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn

# Parts of names that trainers and wrappers put before a parameter's name (prefixes), or inside the name (infixes).
PREFIXES = ("module.", "_orig_mod.", "model.")
INFIXES = ("_fsdp_wrapped_module.", "_fpw_module.", "_checkpoint_wrapped_module.")


class Mapped(NamedTuple):
    """The tensors of a checkpoint, renamed as a model names them.

    left: the names in the checkpoint that the model lacks.
    """

    state_dict: dict[str, Tensor]
    left: list[str]


def map_names(state_dict: Mapping[str, Any], model: nn.Module, prefix: str = "") -> Mapped:
    """Rename the tensors of a checkpoint as a model names them. Also returns the names that the model does not have.

    Wrappers add parts to names: DDP adds "module.", torch.compile adds "_orig_mod.". FSDP and fairscale add further
    parts. All of these parts are dropped, and so is `prefix`. Pass prefix="encoder." if the checkpoint is of a larger
    model, which has this model as `encoder`.
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
    """The name without the parts that wrappers add. Prefixes are removed until the name is in `expected`."""
    for infix in INFIXES:
        name = name.replace(infix, "")
    while name not in expected and name.startswith(PREFIXES):
        name = name.partition(".")[2]
    return name
