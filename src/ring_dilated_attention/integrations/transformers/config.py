"""`config.dilated_attention`: the pattern in the config of a transformers model."""

from types import SimpleNamespace
from typing import Any

import torch

from ...pattern import DilatedPattern

NAME = "dilated"
FIELD = "dilated_attention"
SEEN = "dilated_seen"  # the attention of tiny copies, in `check_model`
REPLAYED = "dilated_replayed"  # and in `check_ranks`
LISTS = ("segment_lengths", "dilation_rates")
RULES = ("phase", "heads")


class PatternField:
    """`config.dilated_attention`: {"segment_lengths": [...], "dilation_rates": [...], "phase": ..., "heads": ...}.

    A config with a pattern asks for dilated attention. transformers does not save the name of the attention: a model
    saved with the pattern alone would silently load with another attention. This field therefore saves the name as
    "attn_implementation" in config.json. transformers then refuses to load the model before `register` is called.
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
        config.__dict__["attn_implementation"] = NAME  # what is saved
        # what is computed, under this config and not its sub-configs
        config._attn_implementation = {"": NAME}


def pattern_of(config: Any, *, is_causal: bool) -> DilatedPattern:
    """The pattern of a config. A ValueError if there is none, or it is not valid."""
    fields = getattr(config, FIELD, None)
    if fields is None:
        raise ValueError(
            f"attn_implementation={NAME!r}, but the {type(config).__name__} has no pattern. Give it one: "
            f'config.{FIELD} = {{"segment_lengths": [2048, 8192], "dilation_rates": [1, 4]}}.'
        )
    key = (*(tuple(fields[name]) for name in LISTS), *(fields[name] for name in RULES), is_causal)
    if key not in _patterns:
        _make(key)
    return _patterns[key]


# Patterns by the fields of configs. Compiled code cannot make a pattern, but can read one from here.
_patterns: dict[tuple, DilatedPattern] = {}


@torch.compiler.disable
def _make(key: tuple) -> None:
    lengths, rates, phase, heads, is_causal = key
    _patterns[key] = DilatedPattern(lengths, rates, is_causal=is_causal, phase=phase, heads=heads)


def to_fields(value: Any) -> dict[str, Any]:
    """A DilatedPattern, or a dict of its arguments, as it is saved in config.json. A ValueError if it is not valid."""
    if not isinstance(value, DilatedPattern):
        if not isinstance(value, dict) or not {*LISTS} <= {*value} <= {*LISTS, *RULES}:
            raise ValueError(
                f"{FIELD} must be a DilatedPattern, or a dict of {', '.join(LISTS)} and, if you like, "
                f"{', '.join(RULES)}, got {value!r}."
            )
        value = DilatedPattern(**value)
    fields = {name: list(getattr(value, name)) for name in LISTS} | {
        name: getattr(value, name) for name in RULES
    }
    for is_causal in (False, True):
        # made before anything is compiled
        pattern_of(SimpleNamespace(**{FIELD: fields}), is_causal=is_causal)
    return fields
