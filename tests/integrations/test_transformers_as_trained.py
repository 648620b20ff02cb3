"""Models of transformers with the attention that they were trained with (windows, sinks, scales), under
`context_parallel` on one device and over ranks, against their own eager attention.

Every function whose name starts with `rank` runs on every rank, and every rank asserts.
"""

import pytest
import torch
from as_trained import FAMILIES, make
from distributed import run
from helpers import message_of
from pages import block
from test_transformers_ranks import batches, loss_and_gradients
from tiny import GROUPED, SIZES, tokens
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.masking_utils import (
    sliding_window_bidirectional_mask_function,
    sliding_window_causal_mask_function,
)

from ring_dilated_attention import ContextParallel, save_attention
from ring_dilated_attention.integrations.transformers import (
    BoundedCache,
    context_parallel,
    convert_to_dilated,
)
from ring_dilated_attention.integrations.transformers.config import AS_TRAINED, layer_pattern
from ring_dilated_attention.reference import multiplicity

# Their own attention computes softmax in float32, and Gemma its norms.
CLOSE = {"rtol": 2e-5, "atol": 2e-6}
# Their own eager attention lets packed documents see each other.
NO_DOCUMENTS = ("modernbert", "gpt_oss")


def own(family):
    """By kind, the batch and what the model's own attention makes of it: the loss, and gradients."""
    model = make(family)
    kinds = batches("bert" if family == "modernbert" else family)
    if family != "modernbert":  # a cache keeps transformers from finding packed documents
        kinds = {kind: {**batch, "use_cache": False} for kind, batch in kinds.items()}
    borders = kinds.pop("borders")  # which their own attention does not see
    if family in NO_DOCUMENTS:
        kinds.pop("positions", None)
    found = {}
    for kind, batch in kinds.items():
        # In float64 it gives NaN to padding, and the rows before padding do not see it.
        seen = {name: value for name, value in batch.items() if name != "attention_mask"}
        found[kind] = batch, loss_and_gradients(model, seen)
    if "positions" in found:  # of the same documents
        found["borders"] = borders, found["positions"][1]
    return model, found


def check(family, parallel):
    model, kinds = own(family)
    ids = kinds["plain"][0]["input_ids"]
    whole = model(ids).logits.detach()
    handle = context_parallel(model, parallel)
    assert model.config._attn_implementation == AS_TRAINED
    for kind, (batch, expected) in kinds.items():
        found = loss_and_gradients(model, batch, parallel)
        torch.testing.assert_close(found, expected, **CLOSE, msg=lambda m, k=kind: f"{k} {m}")
    torch.testing.assert_close(model(ids).logits, parallel.shard(whole), **CLOSE)
    handle.remove()
    assert model.config._attn_implementation == "eager"
    assert torch.equal(model(ids).logits, whole)


@pytest.mark.parametrize("family", FAMILIES)
def test_on_one_device(family):
    """The losses and gradients of plain, short, packed and padded batches, and logits."""
    check(family, ContextParallel())


def rank_computes(rank, world_size, families):
    for family in families:
        for sharding in ("contiguous", "zigzag"):
            parallel = ContextParallel(sharding=sharding)
            check(family, parallel)
            parallel.close()


@pytest.mark.parametrize("world_size", [2, 3])
def test_over_ranks(world_size):
    """Catches a window that ends at the border of a shard, and a sink that counts once per rank."""
    run(world_size, rank_computes, [*FAMILIES], seconds=500)


@pytest.mark.parametrize("window", range(1, 9))
def test_windows_are_those_of_transformers(window):
    """All pairs of 20 positions. Attention is given one more than the half that a centred mask has."""
    config, position = make("llama").config, torch.arange(20)
    for is_causal, mask in (
        (True, sliding_window_causal_mask_function(window)),
        (False, sliding_window_bidirectional_mask_function(window - 1)),
    ):
        pattern = layer_pattern(config, window, is_causal=is_causal)
        seen = mask(0, 0, position[:, None], position)
        assert torch.equal(multiplicity(pattern, 20, 1)[0], seen.long())


def documents_apart(rank, world_size, family):
    lengths, model, parallel = (5, 11, 1, 7), make(family), ContextParallel()
    documents = [tokens(1, length, seed=length) for length in lengths]
    expected = torch.cat([model(ids).logits for ids in documents], dim=1).detach()
    borders = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    context_parallel(model, parallel)
    found = model(torch.cat(documents, dim=1), position_ids=positions, cu_seq_lens_q=borders)
    expected = parallel.shard(expected, cu_seqlens=borders)
    torch.testing.assert_close(found.logits, expected, **CLOSE)
    parallel.close()


@pytest.mark.parametrize("family", NO_DOCUMENTS)
def test_packed_documents(family):
    """Where the model's own eager attention knows of none: each document alone is what a packed batch must give."""
    documents_apart(0, 1, family)
    run(2, documents_apart, family, seconds=120)


@pytest.mark.parametrize("family", ["gemma3", "gpt_oss"])
def test_checkpointed_and_compiled(family):
    model, kinds = own(family)
    batch, expected = kinds["plain"]
    context_parallel(model, ContextParallel())
    options = {"use_reentrant": False, "context_fn": save_attention}
    model.train().gradient_checkpointing_enable(options)
    torch.testing.assert_close(loss_and_gradients(model, batch), expected, **CLOSE)
    model.gradient_checkpointing_disable()
    model.compile(backend="aot_eager")
    torch.testing.assert_close(loss_and_gradients(model, batch), expected, **CLOSE)


@torch.no_grad()
@pytest.mark.parametrize("family", ["mistral", "gemma3", "gpt_oss"])
def test_generation_is_their_own(family, tmp_path):
    """Under the handle it is refused. Afterwards, and in what is saved meanwhile, nothing is left of the handle."""
    file = tmp_path / "config.json"
    model, ids = make(family, torch.float32), tokens(2, 6)
    expected = model.generate(ids, max_new_tokens=12, do_sample=False)
    model.save_pretrained(tmp_path)
    before = file.read_text()
    handle = context_parallel(model, ContextParallel())
    model.save_pretrained(tmp_path)
    assert file.read_text() == before
    assert "then generate" in message_of(lambda: model.generate(ids, max_new_tokens=2))
    assert "has no pattern" in message_of(lambda: BoundedCache(model))
    handle.remove()
    assert torch.equal(model.generate(ids, max_new_tokens=12, do_sample=False), expected)


def test_masks_of_its_own_are_refused():
    """In a sentence, and the model is left as it was. The census has other reasons."""
    fields = {**GROUPED, "use_bidirectional_attention": True}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(CONFIG_MAPPING["gemma3_text"](**SIZES, **fields))
    before = model.config._attn_implementation
    message = message_of(lambda: context_parallel(model, ContextParallel()))
    assert "the model masks by rules of its own" in message
    assert model.config._attn_implementation == before


@pytest.mark.parametrize("pattern", [None, {"segment_lengths": [8], "dilation_rates": [2]}])
def test_another_attention_under_the_handle_is_refused(pattern):
    """Catches ranks that attend to their own rows alone, after `set_attn_implementation`."""
    model, ids = make("llama"), tokens(1, 20)
    if pattern is not None:
        convert_to_dilated(model, pattern)
    context_parallel(model, ContextParallel())
    expected, attention = model(ids).logits, model.config._attn_implementation
    model.set_attn_implementation("sdpa")
    message = message_of(lambda: model(ids))
    assert "attn_implementation='sdpa' under context_parallel: a rank would see its own" in message
    assert f"Call set_attn_implementation({attention!r})" in message
    model.set_attn_implementation(attention)
    assert torch.equal(model(ids).logits, expected)


def rank_meets_a_temperature(rank, world_size):
    sizes = {**SIZES, **GROUPED, "intermediate_size_mlp": 40, "num_local_experts": 2}
    sizes |= {"layer_types": ["full_attention"] * 2, "no_rope_layers": [1, 0]}
    for has_temperature in (True, False):
        config = CONFIG_MAPPING["llama4_text"](**sizes, attn_temperature_tuning=has_temperature)
        model, parallel = AutoModelForCausalLM.from_config(config), ContextParallel()
        if has_temperature and world_size > 1:
            message = message_of(lambda m=model, p=parallel: context_parallel(m, p))
            assert "has attn_temperature_tuning: it scales each query by its position" in message
        else:
            context_parallel(model, parallel)
        parallel.close()


def test_a_temperature_that_counts_positions_is_refused_over_ranks():
    """Llama 4's. Its steps are 8,192 positions long, so that a tiny copy does not show it."""
    rank_meets_a_temperature(0, 1)
    run(2, rank_meets_a_temperature, seconds=120)


def test_the_text_of_a_model_of_parts(tmp_path):
    """The message names two ways. The code of the page loads the same weights."""
    sizes = {"hidden_size": 32, "intermediate_size": 32, "image_size": 28, "patch_size": 14}
    config = CONFIG_MAPPING["gemma3"](
        text_config={**SIZES, **GROUPED, "sliding_window": 5},
        vision_config={**sizes, "num_hidden_layers": 1, "num_attention_heads": 2},
    )
    whole, ids = AutoModelForImageTextToText.from_config(config).eval(), tokens(1, 20)
    expected = whole(ids).logits
    message = message_of(lambda: context_parallel(whole, ContextParallel()))
    assert "pass the text model inside, get_decoder(), or with a head and a loss" in message
    whole.save_pretrained(tmp_path)
    names = {"path": tmp_path}
    exec(block("docs/long_context.md", "the text part"), names)
    context_parallel(names["model"], ContextParallel())
    torch.testing.assert_close(names["model"](ids).logits, expected)
    decoder = whole.get_decoder()
    context_parallel(decoder, ContextParallel())
    torch.testing.assert_close(whole.lm_head(decoder(ids).last_hidden_state), expected)


def rank_runs_the_page(rank, world_size):
    found = {}
    exec(block("docs/long_context.md", "a model as it was trained"), found)
    return float(found["loss"].detach())


def test_the_page():
    alone = rank_runs_the_page(0, 1)
    for loss in run(2, rank_runs_the_page, seconds=120):
        assert loss == pytest.approx(alone, rel=1e-6)
