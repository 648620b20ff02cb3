"""`config.dilated_attention`: the pattern in the config of a transformers model. Without it a model keeps its own
attention."""

from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import torch

from ...pattern import DilatedPattern

NAME = "dilated"
FIELD = "dilated_attention"
# Names of attention functions for tiny copies (small models that are run to check a model). `check_model` uses SEEN and
# ALONE, `check_ranks` uses REPLAYED.
SEEN = "dilated_seen"
ALONE = "dilated_alone"
REPLAYED = "dilated_replayed"
# The name of the attention under `context_parallel` if a model keeps the attention that it was trained with.
AS_TRAINED = "as_trained"
LISTS = {"segment_lengths", "dilation_rates"}  # the keys that a pattern in a config must have
# The keys of a pattern in a config. `is_causal` is left out, because the model decides whether attention is causal.
FIELDS = {item.name for item in fields(DilatedPattern)} - {"is_causal"}


class PatternField:
    """`config.dilated_attention`: {"segment_lengths": [...], "dilation_rates": [...]}, and optional further fields.

    A config with a pattern asks for dilated attention. transformers does not save the name of the attention: a model
    saved with the pattern alone would silently load with a default attention of transformers. This field therefore
    saves the attention's name as "attn_implementation" in config.json. transformers then refuses to load the model
    before `register` is called.
    """

    def __get__(self, config: Any, owner: type | None = None) -> Any:
        return self if config is None else config.__dict__.get(FIELD)

    def __set__(self, config: Any, value: Any) -> None:
        if value is None:
            for name in (FIELD, "attn_implementation"):
                config.__dict__.pop(name, None)
            if config._attn_implementation == NAME:
                config._attn_implementation = {"": None}
            return
        if config._attn_implementation not in (None, NAME):
            raise ValueError(
                f"{FIELD} for a {type(config).__name__} with attn_implementation={config._attn_implementation!r}: make "
                "its model dilated by convert_to_dilated(model, pattern), or give the pattern when the config is made: "
                f"{type(config).__name__}(..., {FIELD}=pattern)."
            )
        config.__dict__[FIELD] = to_fields(value)
        config.__dict__["attn_implementation"] = NAME  # config.json saves this name
        # Choose the attention of this config's own layers. The key "" excludes sub-configs.
        config._attn_implementation = {"": NAME}


def pattern_of(config: Any, *, is_causal: bool) -> DilatedPattern:
    """The pattern of a config. Raises ValueError if the config has no pattern, or an invalid one."""
    values = getattr(config, FIELD, None)
    if values is None:
        raise ValueError(
            f"attn_implementation={NAME!r}, but the {type(config).__name__} has no pattern. Give it one: "
            f'config.{FIELD} = {{"segment_lengths": [2048, 8192], "dilation_rates": [1, 4]}}.'
        )
    return _made({**values, "is_causal": is_causal})


def is_as_trained(config: Any) -> bool:
    """Whether a model keeps the attention that it was trained with: its config neither has a pattern nor asks for
    dilated attention."""
    return getattr(config, FIELD, None) is None and config._attn_implementation != NAME


def layer_pattern(config: Any, window: int | None, *, is_causal: bool) -> DilatedPattern:
    """The pattern of one layer: the config's pattern, if the config has one.

    Otherwise the model keeps its own attention: the pattern is a sliding window, or dense if the layer has no window.

    window: the layer's window in transformers. A query attends to keys less than `window` positions away.
    """
    if not is_as_trained(config):
        return pattern_of(config, is_causal=is_causal)
    if not window:
        return _made({**DENSE, "is_causal": is_causal})
    if not is_causal:
        # Convert the window, because in a DilatedPattern that is not causal a query attends to keys at most window // 2
        # positions away.
        window = max(2 * (window - 1), 1)
    return _made({**WINDOWED, "window": window, "is_causal": is_causal})


def _made(values: dict[str, Any]) -> DilatedPattern:
    items = [
        (name, tuple(value) if isinstance(value, list) else value) for name, value in values.items()
    ]
    key = tuple(items)
    if key not in _patterns:
        _make(key)
    return _patterns[key]


DENSE = DilatedPattern.dense().as_dict()
WINDOWED = DilatedPattern.sliding(1).as_dict()


# The patterns made so far, by their fields. Compiled code, which cannot make patterns, reads this dict.
_patterns: dict[tuple, DilatedPattern] = {}


@torch.compiler.disable
def _make(key: tuple) -> None:
    _patterns[key] = DilatedPattern(**dict(key))


def to_fields(value: Any) -> dict[str, Any]:
    """The dict that config.json saves for a pattern. value: a DilatedPattern, or a dict of its arguments.

    Raises ValueError for a pattern that is not valid.
    """
    if not isinstance(value, DilatedPattern):
        if not isinstance(value, dict) or not LISTS <= {*value} <= FIELDS:
            raise ValueError(
                f"{FIELD} must be a DilatedPattern, or a dict of {', '.join(sorted(LISTS))} and, if you like, "
                f"{', '.join(sorted(FIELDS - LISTS))}, got {value!r}."
            )
        value = DilatedPattern(**value)
    values = value.as_dict()
    del values["is_causal"]
    for is_causal in (False, True):
        # Make the pattern now, because compiled code cannot make a pattern.
        pattern_of(SimpleNamespace(**{FIELD: values}), is_causal=is_causal)
    return values
