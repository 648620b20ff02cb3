"""A loaded dense model becomes a dilated one: a base for continued pretraining."""

from typing import Any

from transformers import PreTrainedModel

from ...pattern import DilatedPattern
from .config import FIELD, NAME, crosses, register, to_fields


def convert_to_dilated(model: Any, pattern: DilatedPattern | dict[str, Any]) -> Any:
    """Give a model of transformers dilated attention, in place. Parameters stay as they are; the function does not.

    A model trained with dense attention predicts worse until it has been trained on with the pattern. Only where one
    segment at rate 1 holds the whole sequence is the function the same.

    Args:
        model: a PreTrainedModel whose attention is transformers' to choose.
        pattern: a DilatedPattern, or a dict as it stands in config.json. Causal or not is the modules' to say:
            is_causal=False leaves it to them, True must agree.

    Returns:
        the model.

    Raises:
        ValueError: for a model that cannot be converted, which is left as it was.
    """
    register()
    if not isinstance(model, PreTrainedModel):
        raise ValueError(
            f"model must be a PreTrainedModel of transformers, got {type(model).__name__}. Convert what is inside."
        )
    fields, name, config = to_fields(pattern), type(model).__name__, model.config
    _refuse_config(name, config)
    modules = [module for module in model.modules() if hasattr(module, "is_causal")]
    if not modules:
        raise ValueError(
            f"{name} has no attention modules that say whether they are causal (is_causal): there is nothing to "
            "convert. Use a model whose attention goes through transformers' attention interface."
        )
    one_way = {bool(module.is_causal) for module in modules}
    if len(one_way) > 1:
        raise ValueError(f"{name} has attention modules that are causal and others that are not: convert its parts.")
    if isinstance(pattern, DilatedPattern) and pattern.is_causal and one_way == {False}:
        raise ValueError(f"the pattern has is_causal=True, but the attention of {name} is not causal: pass False.")
    num_heads = config.num_attention_heads
    _as_pattern(fields).check_heads(num_heads, getattr(config, "num_key_value_heads", None) or num_heads)
    before = config._attn_implementation
    model.set_attn_implementation(NAME)
    if config._attn_implementation != NAME:
        config._attn_implementation = before
        raise ValueError(
            f"{name} chooses its attention itself, not through transformers' attention interface: its attention "
            "modules cannot be given another function."
        )
    setattr(config, FIELD, fields)
    return model


def _as_pattern(fields: dict[str, Any]) -> DilatedPattern:
    return DilatedPattern(**fields)


def _refuse_config(name: str, config: Any) -> None:
    if config.sub_configs:
        parts = ", ".join(sorted(config.sub_configs))
        raise ValueError(
            f"{name} is made of parts with configs of their own ({parts}): convert the part that you mean."
        )
    if crosses(config):
        raise ValueError(f"{name} attends across sequences, and dilated attention is self-attention.")
    window, types = getattr(config, "sliding_window", None), getattr(config, "layer_types", None)
    if types is None and window is not None:
        raise ValueError(
            f"{name} has sliding_window={window}: a sliding window is another pattern. Load the model with "
            "sliding_window=None."
        )
    others = sorted(set(types or ()) - {"full_attention"})
    if others:
        raise ValueError(f"{name} has layers of {', '.join(others)}: dilated attention replaces full_attention alone.")
    if getattr(config, "attn_logit_softcapping", None) is not None:
        raise ValueError(
            f"{name} has attn_logit_softcapping={config.attn_logit_softcapping}: dilated attention does not cap scores."
        )
