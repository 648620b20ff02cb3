"""The decoders of transformers that can be planned, read from the fields of their config.json. No torch."""

import tomllib
from pathlib import Path
from typing import Any

from ..pattern import is_integer
from .shape import Blocks, Shape

# Fields of config.json, by the option of `rda plan model` that says the same. The order is that of `Shape`.
SIZES = {
    "layers": "num_hidden_layers",
    "embed_dim": "hidden_size",
    "ffn_dim": "intermediate_size",
    "vocab": "vocab_size",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
}
_TABLES = tomllib.loads(Path(__file__).with_name("decoders.toml").read_text())
FAMILIES = {family: Blocks(**fields) for family, fields in _TABLES.items()}
_OWN_HEAD_DIM = ("gemma", "gemma2", "gemma3_text", "glm", "glm4", "qwen3")  # others may lack head_dim


def read_decoder(config: dict[str, Any]) -> tuple[str, Shape]:
    """The family and the sizes. Raises ValueError for a model that is not of FAMILIES, lacks a size, or has parameters
    that are not counted."""
    family = config.get("model_type")
    if not isinstance(family, str) or family not in FAMILIES:
        raise ValueError(f"model_type = {family!r} is not planned; these are: {', '.join(FAMILIES)}")
    for name in ("num_local_experts", "num_experts", "n_routed_experts", "qk_layernorm"):
        if config.get(name) is True or config.get(name) not in (None, 0, 1):
            raise ValueError(f"{name} = {config[name]!r}: models with this are not planned")
    if family not in _OWN_HEAD_DIM:
        config = {"head_dim": None} | config
    if family == "gpt_neox":  # it reads neither of these
        config = config | {"num_key_value_heads": None, "head_dim": None}
    sizes: dict[str, Any] = {name: config.get(name, "absent") for name in (*SIZES.values(), "head_dim")}
    for name, value in sizes.items():
        is_left = value is None and name in ("num_key_value_heads", "head_dim")
        if not is_left and not (is_integer(value) and value > 0):
            raise ValueError(f"{name} is {value}: it must be an integer of at least 1")
    said: dict[str, Any] = {}
    for field in ("qkv_bias", "out_bias", "ffn_bias", "is_tied", "is_parallel"):
        if isinstance(source := getattr(FAMILIES[family], field), str):
            name, *default = source.split(" or ")
            said[field] = config.get(name, bool(default))
            if not isinstance(said[field], bool):
                raise ValueError(f"{name} is {said[field]!r}: it must be true or false")
    layers, embed_dim, ffn_dim, vocab, heads, kv_heads, head_dim = sizes.values()
    blocks, kv_heads = FAMILIES[family]._replace(**said), kv_heads or heads
    return family, Shape(layers, embed_dim, ffn_dim, vocab, heads, kv_heads, own_head_dim=head_dim, blocks=blocks)
