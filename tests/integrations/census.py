"""What becomes of each architecture of transformers under dilated attention: `python tests/integrations/census.py`
writes architectures.json, which test_transformers_census.py computes anew and compares.

"equal"      a tiny model in float32 gives the numbers of its own eager attention under the explicit mask log M
"refused"    it is refused when it is made, by this sentence
"not built"  no tiny config of it is a model that runs with its own attention, by this error
"""

import json
import re
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.models.auto import modeling_auto

from ring_dilated_attention.integrations.transformers import register
from ring_dilated_attention.integrations.transformers.config import pattern_of
from ring_dilated_attention.reference import multiplicity

LIST = Path(__file__).with_name("architectures.json")
PATTERN = {"segment_lengths": [4, 9], "dilation_rates": [1, 3]}
ROWS = 20
MAPPINGS = ("MODEL_MAPPING", "MODEL_FOR_CAUSAL_LM_MAPPING", "MODEL_FOR_MASKED_LM_MAPPING")
# Of any config that has such a field. The heads of 8 are as wide as rotary embeddings in sections need.
SIZES = {
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 99,
    "max_position_embeddings": 64,
    "image_size": 32,
    "patch_size": 8,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_group": 1,
    "topk_group": 1,
    "sliding_window": None,
    "embedding_size": 32,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "rotary_dim": 4,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
FEWER = ("num_hidden_layers", "vocab_size", "max_position_embeddings", "num_experts", "n_routed_experts", "sliding_window")


def architectures() -> dict[str, tuple[type, type]]:
    """The model and its config, by "type of config: name of the model"."""
    found = {}
    for mapping in MAPPINGS:
        for kind in (modeling_auto.__dict__[mapping]).keys():
            try:
                models = modeling_auto.__dict__[mapping][kind]
            except ValueError:
                continue
            for model in models if isinstance(models, tuple) else [models]:
                found[f"{kind.model_type}: {model.__name__}"] = (model, kind)
    return dict(sorted(found.items()))


def log_m(config: Any, rows: int, is_causal: bool) -> Tensor:
    """(1, H, N, N), by the definition."""
    heads = config.num_attention_heads
    return multiplicity(pattern_of(config, is_causal=is_causal), rows, heads).float().log()[None]


def masked(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, *, scaling: float | None = None, **_: Any):
    """Plain attention under log M, for models that take no mask."""
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    scores = query @ key.transpose(2, 3) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    scores = scores + log_m(module.config, query.shape[2], module.config.census_causal)
    return (scores.softmax(-1) @ value).transpose(1, 2), None


AttentionInterface.register("log_m", masked)
AttentionMaskInterface.register("log_m", lambda *_, **__: None)


def configs(kind: type):
    """Tiny ones, the likelier first."""
    fields = {name for base in kind.__mro__ for name in getattr(base, "__annotations__", {})} | set(kind.attribute_map)
    for names in (SIZES, [x for x in SIZES if "token" not in x], FEWER, ()):
        try:
            config = kind(**{name: SIZES[name] for name in names if name in fields})
            types = getattr(config, "layer_types", None)
            if types and {*types} <= {"sliding_attention", "full_attention"}:
                config.layer_types = ["full_attention"] * len(types)
            yield config
        except Exception as error:
            yield error


def inputs_of(model: Any) -> dict[str, Tensor]:
    config, noise = model.config, torch.Generator().manual_seed(1)
    if model.main_input_name == "input_ids":
        return {"input_ids": torch.randint(5, min(config.vocab_size, 99), (1, ROWS), generator=noise)}
    if model.main_input_name == "pixel_values":
        sides = getattr(config, "image_size", 32)
        sides = (sides, sides) if isinstance(sides, int) else tuple(sides)
        return {"pixel_values": torch.randn(1, getattr(config, "num_channels", 3), *sides, generator=noise)}
    if model.main_input_name == "input_values":
        return {"input_values": torch.randn(1, 6000, generator=noise)}
    raise ValueError(f"the census knows no {model.main_input_name}")


def said(error: Exception) -> str:
    text = f"{type(error).__name__}: {error}".strip().splitlines()
    return re.sub(r"0x[0-9a-f]+", "0x", " ".join(text))[:300]


def fill(model: Any) -> Any:
    """Far from uniform attention, the same numbers in each."""
    torch.manual_seed(0)
    for parameter in model.parameters():
        with torch.no_grad():
            parameter.normal_(std=0.15) if parameter.dim() > 1 else parameter.uniform_(0.5, 1)
    return model.eval()


def first(output: Any) -> Tensor:
    return output[0] if not isinstance(output, Tensor) else output


@torch.no_grad()
def outcome(model_class: type, config_class: type) -> list[str]:
    register()
    error: Exception = ValueError("no config")
    for config in configs(config_class):
        if isinstance(config, Exception):
            error = config
            continue
        fields = config.to_dict()
        try:
            made = config_class.from_dict({**fields, "dilated_attention": PATTERN})
            made._attn_implementation = "dilated"
        except Exception as e:
            error = e
            continue
        try:
            ours = fill(model_class(made))
        except ValueError as refusal:
            if refusal.__traceback__ and "check.py" in _files(refusal):
                return ["refused", str(refusal)[:600]]
            error = refusal
            continue
        except Exception as e:
            error = e
            continue
        return compare(ours, config_class, fields)
    return ["not built", said(error)]


def _files(error: BaseException) -> str:
    names, at = "", error.__traceback__
    while at is not None:
        names, at = names + at.tb_frame.f_code.co_filename + "\n", at.tb_next
    return names


def compare(ours: Any, config_class: type, fields: dict[str, Any]) -> list[str]:
    inputs = inputs_of(ours)
    found = first(ours(**inputs))
    config = config_class.from_dict({**fields, "attn_implementation": "eager"})
    own = fill(type(ours)(config))
    plain = first(own(**inputs))
    if "input_ids" in inputs:
        other = inputs["input_ids"].clone()
        other[0, -1] = 5 + (other[0, -1] - 4) % 20
        is_causal = torch.equal(plain[:, 0], first(own(other))[:, 0])
        mask = log_m(ours.config, ROWS, is_causal)
        expected = first(own(**inputs, attention_mask=mask))
    else:
        config = config_class.from_dict({**fields, "dilated_attention": PATTERN})
        config._attn_implementation, config.census_causal = "log_m", False
        expected = first(fill(type(ours)(config))(**inputs))
    scale = float(expected.abs().max())
    error, matters = float((found - expected).abs().max()) / scale, float((plain - expected).abs().max()) / scale
    good = error <= 1e-4 and matters > 1e-3
    return ["equal"] if good else ["WRONG", f"{error:.1e} {matters:.1e}"]


if __name__ == "__main__":
    import time, collections, traceback
    torch.set_num_threads(1)
    only = sys.argv[1] if len(sys.argv) > 1 else ""
    part, parts = (int(x) for x in sys.argv[2].split("/")) if len(sys.argv) > 2 else (0, 1)
    result, start = {}, time.process_time()
    for i, (name, (m, c)) in enumerate(architectures().items()):
        if only not in name or i % parts != part: continue
        t = time.process_time()
        try:
            result[name] = outcome(m, c)
        except Exception as e:
            result[name] = ["CRASH", said(e), "".join(traceback.format_tb(e.__traceback__)[-2:])]
        t = time.process_time() - t
        if t > 5: print("SLOW", name, t, flush=True)
        if only: print(name, result[name], flush=True)
    print(collections.Counter(x[0] for x in result.values()), time.process_time() - start)
    json.dump(result, open(f"/tmp/hf_census_{part}.json", "w"), indent=1)
