"""What becomes of each architecture of transformers under dilated attention: `python tests/integrations/census.py`
writes architectures.json, which test_transformers_census.py computes anew and compares.

"equal"      a tiny model in float32 gives the numbers of its own eager attention under the explicit mask log M
"refused"    it is refused when it is made, by this sentence
"not built"  no tiny config of it is a model that runs with its own attention, by this error
"""

import copy
import json
import re
import sys
import time
import traceback
from collections import Counter
from pathlib import Path

import torch
import transformers
from torch import Tensor
from transformers import CONFIG_MAPPING, AttentionInterface, AttentionMaskInterface
from transformers.models.auto import modeling_auto

from ring_dilated_attention import DilatedPattern
from ring_dilated_attention.integrations.transformers import convert_to_dilated, register
from ring_dilated_attention.integrations.transformers.probe import FAILURES
from ring_dilated_attention.reference import multiplicity

LIST = Path(__file__).with_name("architectures.json")
PATTERN = {"segment_lengths": [4, 9], "dilation_rates": [1, 3]}
ROWS = 20
MOST = 20_000_000  # parameters
MAPPINGS = (
    "MODEL_MAPPING_NAMES",
    "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
)
# The sizes of any config that has such a field. The heads of 8 are as wide as rotary embeddings in sections need.
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
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 40,
    "decoder_ffn_dim": 40,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
FEWER = (
    "num_hidden_layers",
    "vocab_size",
    "max_position_embeddings",
    "num_experts",
    "n_routed_experts",
    "sliding_window",
)


def architectures():
    """The type of a config and the name of a model, by "type of config: name of the model"."""
    found = {}
    for mapping in MAPPINGS:
        for kind, models in getattr(modeling_auto, mapping).items():
            for model in models if isinstance(models, (tuple, list)) else [models]:
                found[f"{kind}: {model}"] = kind, model
    return dict(sorted(found.items()))


def log_m(config, rows, is_causal):
    """(1, H, N, N), by the definition."""
    pattern = DilatedPattern(**PATTERN, is_causal=is_causal)
    return multiplicity(pattern, rows, config.num_attention_heads).float().log()[None]


def masked(
    module,
    query,
    key,
    value,
    mask=None,
    *,
    scaling=None,
    **_,
):
    """Plain attention under log M, for models that take no mask."""
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    scores = query @ key.transpose(2, 3) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    scores = scores + log_m(module.config, query.shape[2], module.config.census_causal)
    return (scores.softmax(-1) @ value).transpose(1, 2), None


AttentionInterface.register("log_m", masked)
AttentionMaskInterface.register("log_m", lambda *_, **__: None)


def configs(kind, more=None):
    """Tiny ones, the likelier first, and its own defaults last. Windows are left out where full attention is known.

    more: sizes in the place of these, for models as they were trained: then the first of two layers is sliding.
    """
    fields = {name for base in kind.__mro__ for name in getattr(base, "__annotations__", {})} | set(
        kind.attribute_map
    )
    try:
        types = {*(getattr(kind(), "layer_types", None) or ())}
    except FAILURES:
        types = set()
    kinds = ["full_attention"] * 2 if more is None else ["sliding_attention", "full_attention"]
    is_known = types and types <= {"sliding_attention", "full_attention"}
    full = {"layer_types": kinds} if is_known else {}
    all_sizes = {**SIZES, **(more or {})}
    same = {**all_sizes, **full, "num_key_value_heads": SIZES["num_attention_heads"]}
    windowed = {name: value for name, value in same.items() if name != "sliding_window"}
    plain = {name: value for name, value in windowed.items() if "token" not in name}
    wide = {**same, "hidden_size": 512, "head_dim": 128}
    sectioned = {**windowed, "hidden_size": 512, "head_dim": 128, "qk_rope_head_dim": 64}
    fewer = {name: all_sizes[name] for name in FEWER}
    for sizes in ({**all_sizes, **full}, same, windowed, plain, wide, sectioned, fewer, {}):
        try:
            config = kind(**{name: value for name, value in sizes.items() if name in fields})
            if full and more is None:
                config.layer_types = ["full_attention"] * len(config.layer_types)
            yield config
        except FAILURES as error:
            yield error


def inputs_of(model):
    config, noise = model.config, torch.Generator().manual_seed(1)
    if model.main_input_name == "input_ids":
        return {
            "input_ids": torch.randint(5, min(config.vocab_size, 99), (1, ROWS), generator=noise)
        }
    if model.main_input_name == "pixel_values":
        sides = getattr(config, "image_size", 32)
        sides = (sides, sides) if isinstance(sides, int) else tuple(sides)
        return {
            "pixel_values": torch.randn(
                1, getattr(config, "num_channels", 3), *sides, generator=noise
            )
        }
    if model.main_input_name == "input_features":
        names = [
            name for name in ("num_mel_bins", "feature_size", "input_dim") if hasattr(config, name)
        ]
        mels = getattr(config, names[0]) if names else 80
        return {"input_features": torch.randn(1, 40, mels, generator=noise)}
    if model.main_input_name == "input_values":
        return {"input_values": torch.randn(1, 6000, generator=noise)}
    raise ValueError(f"the census knows no {model.main_input_name}")


def said(error):
    """In one line, without addresses."""
    return re.sub(r"0x[0-9a-f]+", "0x", " ".join(f"{type(error).__name__}: {error}".split()))[:300]


def fill(model):
    """The same numbers in each, and attention far from uniform."""
    torch.manual_seed(0)
    for parameter in model.parameters():
        with torch.no_grad():
            parameter.normal_(std=0.15) if parameter.dim() > 1 else parameter.uniform_(0.5, 1)
    return model.eval()


def made(model_class, config_class, fields, implementation):
    config = config_class.from_dict(copy.deepcopy(fields))
    if implementation != "eager":
        config.dilated_attention = PATTERN
    config._attn_implementation = implementation if implementation != "dilated" else {"": "dilated"}
    return fill(model_class(config))


def first(output):
    return output if isinstance(output, Tensor) else output[0]


@torch.no_grad()
def outcome(kind, model):
    """ "equal", "refused" or "not built", and how."""
    register()
    try:
        config_class, model_class = CONFIG_MAPPING[kind], getattr(transformers, model)
    except (KeyError, AttributeError, ImportError) as missing:
        return ["not built", said(missing)]
    failures: list[Exception] = []
    for config in configs(config_class):
        try:
            if isinstance(config, Exception):
                raise config
            fields = config.to_dict()
            with torch.device("meta"):
                refusal, conversion = refused(model_class, config_class, fields)
            if (refusal is None) != (conversion is None):
                return ["two ways", f"made: {refusal}; converted: {conversion}"]
            if refusal is not None and "does not run with dilated attention" not in refusal:
                return ["refused", refusal]
            with torch.device("meta"):
                size = sum(x.numel() for x in model_class(copy.deepcopy(config)).parameters())
            if size > MOST:
                raise ValueError(f"{size:,} parameters")
            dense = made(model_class, config_class, fields, "eager")
            plain = first(dense(**inputs_of(dense)))
        except FAILURES as error:
            failures.append(error)
            continue
        return ["refused", refusal] if refusal is not None else compare(dense, plain, fields)
    return ["not built", said(failures[0])]


def refused(model_class, config_class, fields):
    """The sentences by which it is refused when it is made, and when it is converted."""
    sentences: list[str | None] = [None, None]
    try:
        made(model_class, config_class, fields, "dilated")
    except ValueError as error:
        if "probe.py" not in {
            Path(x.filename).name for x in traceback.extract_tb(error.__traceback__)
        }:
            raise
        sentences[0] = str(error)
    dense = made(model_class, config_class, fields, "eager")
    try:
        convert_to_dilated(dense, PATTERN)
    except ValueError as error:
        sentences[1] = str(error)
    return sentences[0], sentences[1]


def compare(dense, plain, fields):
    """float32 keeps 1e-7 of a number; two layers of sums of 32 lose less than a hundred times that."""
    model_class, config_class, inputs = type(dense), type(dense.config), inputs_of(dense)
    found = first(made(model_class, config_class, fields, "dilated")(**inputs))
    is_causal, way, expected = False, "under log M as its mask", plain
    if "input_ids" in inputs:
        other = inputs["input_ids"].clone()
        other[0, -1] = 5 + (other[0, -1] - 4) % 20
        is_causal = torch.equal(plain[:, 0], first(dense(other))[:, 0])
        try:
            expected = first(dense(**inputs, attention_mask=log_m(dense.config, ROWS, is_causal)))
        except FAILURES:
            expected = plain  # it takes no such mask
    if torch.equal(expected, plain):
        masked_model = made(model_class, config_class, fields, "log_m")
        masked_model.config.census_causal = is_causal
        expected, way = (
            first(masked_model(**inputs)),
            "with attention under log M in the place of its own",
        )
    scale = expected.abs().max()
    error, matters = ((x - expected).abs().max() / scale for x in (found, plain))
    if not (error <= 1e-5 and matters > 1e-3):
        return [
            "another function",
            f"by {error:.0e}, where dense attention differs by {matters:.0e}",
        ]
    converted = made(model_class, config_class, fields, "eager")
    convert_to_dilated(converted, PATTERN)
    return (
        ["equal", way]
        if torch.equal(first(converted(**inputs)), found)
        else ["two ways", "two functions"]
    )


def written(path, outcomes):
    """Into a committed list, in place of what it has of these architectures."""
    everything = (json.loads(path.read_text()) if path.exists() else {}) | outcomes
    path.write_text(json.dumps(dict(sorted(everything.items())), indent=0) + "\n")
    counts = Counter(found for found, _ in everything.values())
    print(counts, f"{time.process_time():.0f} CPU s", flush=True)


def main():
    torch.set_num_threads(1)
    share, shares = (int(x) for x in sys.argv[1].split("/")) if sys.argv[1:] else (0, 1)
    todo = list(architectures().items())[share::shares]
    written(LIST, {name: outcome(*names) for name, names in todo})


if __name__ == "__main__":
    main()
