"""What `rda plan model` counts from a config.json, against the models that transformers builds of it."""

import json
import random

import pytest
import torch
from helpers import ROOT
from torch.nn.functional import cross_entropy
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils.checkpoint import checkpoint
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from ring_dilated_attention import DilatedPattern, save_attention
from ring_dilated_attention.forecast.decoders import FAMILIES, read_decoder
from ring_dilated_attention.forecast.training_cost import (
    LOSS_SLICE_LOGITS,
    LOSS_SLICE_ROWS,
    Mesh,
    ModelJob,
    model_memory,
)
from ring_dilated_attention.integrations.transformers import register
from ring_dilated_attention.kernels.traits import TRAITS

CONFIGS = sorted((ROOT / "tests" / "data" / "configs").glob("*.json"))
WINDOWED = ("gemma2", "gemma3_text", "olmo3")  # whose layers ask for windows, so that they do not run dilated
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 99,
    "head_dim": 8,
}


def build(fields, **more):
    config = CONFIG_MAPPING[fields["model_type"]](**{k: v for k, v in fields.items() if k != "model_type"}, **more)
    return AutoModelForCausalLM.from_config(config)


def num_built(fields, **more):
    with torch.device("meta"):
        return sum(x.numel() for x in build(fields, **more).parameters())


def config_of(family, sizes=SIZES):
    """head_dim of those that must say it; gpt_neox has no grouped queries."""
    grouped = {} if family == "gpt_neox" else {"num_key_value_heads": sizes["num_key_value_heads"]}
    own = {"head_dim": sizes["head_dim"]} if hasattr(CONFIG_MAPPING[family](), "head_dim") else {}
    plain = {name: x for name, x in sizes.items() if name not in ("num_key_value_heads", "head_dim")}
    return {"model_type": family, **plain, **grouped, **own}


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_public_models_have_the_parameters_that_are_counted(path):
    fields = json.loads(path.read_text())
    assert read_decoder(fields)[1].num_parameters == num_built(fields)


@pytest.mark.parametrize("family", FAMILIES)
def test_any_config_of_a_family_is_counted_exactly(family):
    """Awkward sizes, and each flag true, false and absent. Catches a default that is another in transformers."""
    draws = random.Random(family)
    flags = {x.split(" or ")[0] for x in FAMILIES[family] if isinstance(x, str) and "_" in x}
    for _ in range(6):
        kv_heads = draws.choice((1, 2, 3, 6))
        sizes = {"hidden_size": 42, "intermediate_size": 68, "num_attention_heads": 6, "head_dim": 10}
        fields = config_of(family, {**SIZES, **sizes, "num_key_value_heads": kv_heads})
        fields |= {flag: draws.choice((True, False)) for flag in flags if draws.random() < 0.6}
        assert read_decoder(fields)[1].num_parameters == num_built(fields, pad_token_id=0), fields


def dilated(fields, seq_len):
    register()
    pattern = {"segment_lengths": [32, seq_len], "dilation_rates": [1, 4]}
    windows = {"sliding_window": None} if hasattr(CONFIG_MAPPING[fields["model_type"]](), "sliding_window") else {}
    return build(fields, dilated_attention=pattern, pad_token_id=0, bos_token_id=1, eos_token_id=2, **windows)


def saved(fields, dtype, seq_len=128):
    """Bytes for each position that autograd keeps of the forward without the head. Storages, each once."""
    model = dilated(fields, seq_len).to(dtype)
    known = {x.untyped_storage().data_ptr() for x in (*model.parameters(), *model.buffers())}
    found, kept = {}, []

    def pack(x):
        storage = x.untyped_storage()
        if storage.data_ptr() not in known:
            found[storage.data_ptr()] = storage.nbytes()
            kept.append(x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        model.base_model(torch.randint(3, 99, (1, seq_len)), use_cache=False)
    return sum(found.values()) / seq_len


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in WINDOWED])
def test_a_block_saves_what_is_planned(family, dtype):
    """Of heads of 8, whose rows cos and sin count for more than they do in real models, to 3 %."""
    fields = config_of(family)
    block = saved(fields | {"num_hidden_layers": 3}, dtype) - saved(fields, dtype)
    assert read_decoder(fields)[1]._replace(itemsize=dtype.itemsize).saved()[0] == pytest.approx(block, rel=0.03)


def measured(model, seq_len):
    """Bytes that are held after the forward, and at the peak of the step, by torch's allocator. The loss is summed over
    slices, as under `parallel`; gradients of an earlier backward are kept."""
    tokens, vocab_size = torch.randint(3, model.config.vocab_size, (1, seq_len)), model.config.vocab_size
    rows = max(LOSS_SLICE_ROWS, LOSS_SLICE_LOGITS // vocab_size)

    def loss_of_rows(hidden, labels):
        return cross_entropy(model.lm_head(hidden).float(), labels, reduction="sum")

    def loss():
        slices = model.base_model(tokens, use_cache=False)[0].flatten(0, 1).split(rows)
        pairs = zip(slices, tokens.flatten().split(rows), strict=True)
        return sum(checkpoint(loss_of_rows, *pair, use_reentrant=False, preserve_rng_state=False) for pair in pairs)

    loss().backward()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        total = loss()
        with record_function("the forward is done"):
            pass
        total.backward()
    current = peak = held = 0
    for event in sorted(profiled.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
        if event.name() == "the forward is done":
            held = current
        elif event.name() == "[memory]":
            current += event.nbytes()
            peak = max(peak, current)
    return held, peak


@pytest.mark.parametrize("activations", ["kept", "checkpointed"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma", "gpt_neox", "phi3", "starcoder2"])
def test_a_step_holds_what_is_planned(family, activations, monkeypatch):
    """Within 5 %: with one layer, `working` is as much as the activations."""
    monkeypatch.setenv("KINETO_LOG_LEVEL", "99")
    n, sizes = 1024, {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 1, "head_dim": 32}
    fields = config_of(family, {**SIZES, **sizes, "vocab_size": 256})
    model = dilated(fields, n)
    if activations == "checkpointed":
        model.gradient_checkpointing_enable({"use_reentrant": False, "context_fn": save_attention})
    held, peak = measured(model.train(), n)
    job = ModelJob(read_decoder(fields)[1], DilatedPattern((32, n), (1, 4), is_causal=True), n, 1, Mesh())
    planned = model_memory(job, activations, TRAITS["cpu"])
    assert planned.activations == pytest.approx(held, rel=0.05)
    assert planned.activations + planned.working == pytest.approx(peak, rel=0.05)


def test_a_wide_vocabulary_is_held_in_slices(monkeypatch):
    """The loss decides: 1,280 rows of 2,048 logits in two slices, and the head's gradient summed over them."""
    monkeypatch.setenv("KINETO_LOG_LEVEL", "99")
    sizes = {"hidden_size": 512, "intermediate_size": 128, "num_hidden_layers": 1, "vocab_size": 2048}
    fields = config_of("llama", {**SIZES, **sizes, "head_dim": 64})
    job = ModelJob(read_decoder(fields)[1], DilatedPattern((32, 1280), (1, 4), is_causal=True), 1280, 1, Mesh())
    held, peak = measured(dilated(fields, 1280).train(), 1280)
    assert model_memory(job, "kept", TRAITS["cpu"]).working == pytest.approx(peak - held, rel=0.02)
