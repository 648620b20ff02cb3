"""The decoders of transformers that can be planned, read from the fields of their config.json. No torch."""

from typing import Any

from ..pattern import is_integer
from .shape import Blocks, Shape

# By the option of `rda plan model` that says the same, in the order of `Shape`.
SIZES = {
    "layers": "num_hidden_layers",
    "embed_dim": "hidden_size",
    "ffn_dim": "intermediate_size",
    "vocab": "vocab_size",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
}
# A text says where the value is in the config, and what it is if the config has no such field.
_NONE: dict[str, Any] = dict.fromkeys(("qkv_bias", "out_bias", "ffn_bias"), False)
_ALL: dict[str, Any] = dict.fromkeys(_NONE, True)
_ASKED: dict[str, Any] = dict.fromkeys(_NONE, "use_bias or true")
_TIED: dict[str, Any] = {"is_tied": "tie_word_embeddings or true"}
_GEMMA: dict[str, Any] = {"norm": "rms in float32", "ffn_bias": False} | _TIED
_OLMO2 = Blocks("rms in float32", head_norms="all", ffn_bias=False)
_GLM: dict[str, Any] = _NONE | {"qkv_bias": "attention_bias or true"}
_NEOX: dict[str, Any] = dict.fromkeys(("qkv_bias", "out_bias"), "attention_bias or true") | {"ffn_bias": True}
FAMILIES = {
    "gemma": Blocks(**_GEMMA),
    "gemma2": Blocks(num_norms=4, **_GEMMA),
    "gemma3_text": Blocks(num_norms=4, head_norms="each", **_GEMMA),
    "glm": Blocks(**_GLM),
    "glm4": Blocks(num_norms=4, **_GLM),
    "gpt_neox": Blocks("layer", ffn="plain", is_fused=True, is_parallel="use_parallel_residual or true", **_NEOX),
    "granite": Blocks(),
    "llama": Blocks(),
    "mistral": Blocks(**_NONE),
    "olmo": Blocks("bare", ffn_bias=False),
    "olmo2": _OLMO2,
    "olmo3": _OLMO2,
    "phi": Blocks("layer", 1, ffn="gelu", head_bias=True, is_parallel=True, **_ALL),
    "phi3": Blocks(is_fused=True, **_NONE),
    "qwen2": Blocks(**_NONE | {"qkv_bias": True}),
    "qwen3": Blocks(head_norms="each", ffn_bias=False),
    "smollm3": Blocks(**_TIED),
    "starcoder2": Blocks("layer", ffn="plain", **_TIED, **_ASKED),
}
_OWN_HEAD_DIM = ("gemma", "gemma2", "gemma3_text", "glm", "glm4", "qwen3")  # in others it follows, if absent


def read_decoder(config: dict[str, Any]) -> tuple[str, Shape]:
    """The family and the sizes.

    Raises:
        ValueError: for a model that is not of FAMILIES, lacks a size, or has parameters that are not counted.
    """
    family = config.get("model_type")
    if not isinstance(family, str) or family not in FAMILIES:
        raise ValueError(f"model_type = {family!r} is not planned; these are: {', '.join(FAMILIES)}")
    for name in ("num_local_experts", "num_experts", "n_routed_experts", "qk_layernorm"):
        if config.get(name) is True or config.get(name) not in (None, 0, 1):
            raise ValueError(f"{name} = {config[name]!r}: neither experts nor such norms are planned")
    if family not in _OWN_HEAD_DIM:
        config = {"head_dim": None} | config
    if family == "gpt_neox":  # which reads neither
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
