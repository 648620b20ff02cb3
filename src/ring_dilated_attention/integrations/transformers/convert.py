"""Registers the attention "dilated" with transformers, and gives it to models that are loaded already."""

import copy
from typing import Any

from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    PreTrainedConfig,
    PreTrainedModel,
)

from ...pattern import DilatedPattern
from .attention_function import attend, make_mask
from .config import ALONE, AS_TRAINED, FIELD, NAME, REPLAYED, SEEN, PatternField, to_fields
from .probe import attend_alone, attend_seen, check_model, watch_models
from .probe_ranks import attend_replayed


def register() -> None:
    """Make `attn_implementation="dilated"` and `config.dilated_attention` known to transformers. Idempotent.

    register()
    pattern = {"segment_lengths": [2048, 8192], "dilation_rates": [1, 4]}
    model = AutoModelForCausalLM.from_pretrained(path, dilated_attention=pattern)
    """
    functions = {
        NAME: attend,
        AS_TRAINED: attend,
        SEEN: attend_seen,
        ALONE: attend_alone,
        REPLAYED: attend_replayed,
    }
    for name, function in functions.items():
        AttentionInterface.register(name, function)
        AttentionMaskInterface.register(name, make_mask)
    watch_models()
    setattr(PreTrainedConfig, FIELD, PatternField())


def convert_to_dilated(model: Any, pattern: DilatedPattern | dict[str, Any]) -> None:
    """Give a model of transformers dilated attention, in place. The parameters stay as they are.

    The model's outputs then change, unless one segment at rate 1 covers the whole sequence. A model that was trained
    with dense attention predicts worse until it is trained with the pattern.

    Args:
        model: a PreTrainedModel that takes its attention from transformers' attention interface.
        pattern: a DilatedPattern, or a dict of its arguments as in config.json. The model decides whether its attention
            is causal: is_causal=False fits any model; is_causal=True needs a causal model.

    Raises:
        ValueError: for a model that cannot be converted. The model is then unchanged.
    """
    register()
    name = type(model).__name__
    if not isinstance(model, PreTrainedModel):
        raise ValueError(
            f"model must be a PreTrainedModel of transformers, got {name}. If it wraps one, convert the model inside."
        )
    fields, config = to_fields(pattern), copy.deepcopy(model.config)
    config._attn_implementation = {"": NAME}
    setattr(config, FIELD, fields)
    causal = check_model(type(model), config)
    if isinstance(pattern, DilatedPattern) and pattern.is_causal and not causal:
        raise ValueError(
            f"the pattern has is_causal=True, but the attention of {name} is not causal: pass False."
        )
    for config, _ in switch_attention(model, NAME):
        setattr(config, FIELD, fields)


def check_as_trained(model: Any) -> None:
    """Raise ValueError unless this package can compute the attention that a model was trained with."""
    register()
    config = copy.deepcopy(model.config)
    config._attn_implementation = AS_TRAINED
    check_model(type(model), config)


def switch_attention(model: Any, name: str) -> list[tuple[Any, str]]:
    """Switch a model to the attention that transformers knows as `name`.

    Returns pairs (a config of the model, the name of the attention that it had before). Raises ValueError if the model
    does not switch.
    """
    configs = [child.config for child in model.modules() if isinstance(child, PreTrainedModel)]
    before = [(config, config._attn_implementation) for config in configs]
    model.set_attn_implementation(name)
    if any(config._attn_implementation != name for config in configs):
        for config, implementation in before:
            config._attn_implementation = implementation
        raise ValueError(
            f"{type(model).__name__} chooses its attention itself, not by transformers' interface. Use another model."
        )
    return before
