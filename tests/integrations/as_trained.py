"""Tiny models of the families that people have, with the attention that they were trained with."""

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForMaskedLM

SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}
GROUPED = {"num_key_value_heads": 2, "head_dim": 8}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 150000.0,
    "factor": 4.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "original_max_position_embeddings": 16,
    "truncate": False,
}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}

# By family: the type of its config, and what it has beside SIZES. Windows do not divide lengths.
FAMILIES = {
    "llama": ("llama", GROUPED),
    "gpt_neox": ("gpt_neox", {}),
    "mistral": ("mistral", {**GROUPED, "sliding_window": 5}),
    "qwen2": (
        "qwen2",
        {
            "num_key_value_heads": 2,
            "use_sliding_window": True,
            "sliding_window": 6,
            "max_window_layers": 2,
        },
    ),
    "qwen3": (
        "qwen3",
        {**GROUPED, "use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1},
    ),
    "qwen3 dense": ("qwen3", GROUPED),
    "gemma3": (
        "gemma3_text",
        {**GROUPED, "sliding_window": 4, "sliding_window_pattern": 3, "query_pre_attn_scalar": 5},
    ),
    "gpt_oss": ("gpt_oss", {**GROUPED, **EXPERTS, "sliding_window": 3, "rope_parameters": YARN}),
    "modernbert": ("modernbert", {"local_attention": 7, "global_attn_every_n_layers": 3}),
}


def make(family, dtype=torch.float64, **more):
    kind, fields = FAMILIES[family]
    config = CONFIG_MAPPING[kind](**{**SIZES, **fields, **more})
    config._attn_implementation = config._experts_implementation = "eager"
    torch.manual_seed(0)
    auto = AutoModelForMaskedLM if family == "modernbert" else AutoModelForCausalLM
    model = auto.from_config(config)
    # larger than transformers', so that attention is far from uniform
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.15 if parameter.dim() > 1 else 1.0)
    return model.to(dtype).eval()
