"""Models of transformers with dilated attention, against the same models with the definition in its place."""

import copy
import json
import subprocess
import sys
from dataclasses import fields

import pytest
import torch
from helpers import message_of
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import CONFIGS, DECODERS, PATTERN, make, tokens
from torch.nn.functional import cross_entropy
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    DataCollatorWithFlattening,
    LlamaConfig,
    LlamaForCausalLM,
)

from ring_dilated_attention import DilatedPattern, save_attention
from ring_dilated_attention.integrations.transformers import BoundedCache, register
from ring_dilated_attention.integrations.transformers import attention_function as ours
from ring_dilated_attention.reference import multiplicity

LENGTH = 22
PATTERNS = {
    "modulo": PATTERN,
    "blocked": {**PATTERN, "phase": "blocked"},
    "split": {**PATTERN, "heads": "split"},
    "uncovered": {"segment_lengths": [7], "dilation_rates": [3]},
    "windowed": {**PATTERN, "window": 5},
}


def padding(kind):
    """(3, LENGTH) of valid rows."""
    mask = torch.ones(3, LENGTH, dtype=torch.int64)
    if kind in ("right", "both"):
        mask[0, 15:], mask[1, 4:] = 0, 0
    if kind in ("left", "both"):
        mask[2, :6] = 0
        mask[0, :3] = 0
    return mask


def packed(kind):
    """Two or three documents in each row, as positions tell."""
    lengths = [[9, 13], [1, 20, 1]] if kind == "positions of a batch" else [[5, 14, 3]]
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths])
    inputs = {"input_ids": tokens(*positions.shape), "position_ids": positions}
    if kind == "borders":
        inputs["cu_seq_lens_q"] = torch.tensor([0, 5, 19, 22], dtype=torch.int32)
    return inputs


def inputs_of(kind):
    """What the model is given, and which rows count."""
    if kind in ("right", "left", "both"):
        mask = padding(kind)
        return {"input_ids": tokens(3, LENGTH), "attention_mask": mask}, mask.bool()
    inputs = {"input_ids": tokens(2, LENGTH)} if kind == "plain" else packed(kind)
    return inputs, torch.ones_like(inputs["input_ids"], dtype=torch.bool)


def loss_and_gradients(model, inputs, counts, **more):
    logits = model(**inputs, **more).logits
    loss = cross_entropy(logits[counts], inputs["input_ids"][counts])
    loss.backward()
    gradients = [x.grad.clone() for x in model.parameters() if x.grad is not None]
    model.zero_grad()
    return logits.detach()[counts], loss.detach(), gradients


def close(found, expected, atol=1e-11):
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=atol)


KINDS = ["plain", "right", "left", "both", "borders", "positions", "positions of a batch"]


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("kind", KINDS)
def test_equal_to_the_definition(name, kind):
    """Logits, loss and every gradient in float64. Catches padding that is read, documents that see each other, phases
    that go by the key/value head, and a module's causality that is not followed."""
    if name == "bert" and kind.startswith("positions"):
        pytest.skip(
            "BERT does not tell its attention the positions: packed, it needs cu_seq_lens_q"
        )
    model = make(name)
    inputs, counts = inputs_of(kind)
    found = loss_and_gradients(model, inputs, counts)
    model.set_attn_implementation("by_definition")
    expected = loss_and_gradients(model, inputs, counts)
    assert len(found[2]) > 10
    close(found, expected)


@pytest.mark.parametrize("kind", PATTERNS)
def test_phase_rules(kind):
    """Also of queries that no branch covers, and of heads that run one branch alone."""
    model = make("llama", PATTERNS[kind])
    found = loss_and_gradients(model, *inputs_of("left"))
    model.set_attn_implementation("by_definition")
    close(found, loss_and_gradients(model, *inputs_of("left")))


def test_another_pattern_is_another_function():
    """Proof that the comparison can fail: the phases of another rule, and no padding mask, are far off."""
    inputs, counts = inputs_of("left")
    model = make("llama")
    expected = model(**inputs).logits[counts]
    other = make("llama", PATTERNS["blocked"])(**inputs).logits[counts]
    unpadded = model(input_ids=inputs["input_ids"]).logits[counts]
    assert (other - expected).abs().max() > 0.01
    assert (unpadded - expected).abs().max() > 0.01


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("kind", ["plain", "right", "left", "positions"])
def test_a_dense_pattern_is_sdpa(name, kind):
    if name == "bert" and kind == "positions":
        pytest.skip("BERT does not tell its attention the positions")
    whole = {"segment_lengths": [LENGTH], "dilation_rates": [1]}
    inputs, counts = inputs_of(kind)
    found = loss_and_gradients(make(name, whole, torch.float32), inputs, counts, use_cache=False)
    expected = loss_and_gradients(make(name, None, torch.float32), inputs, counts, use_cache=False)
    torch.testing.assert_close(found, expected, rtol=2e-4, atol=2e-5)


def test_the_flattening_collator():
    """transformers' own, with and without borders: each document as if it were alone."""
    model = make("llama")
    documents = [tokens(1, n, seed=n)[0] for n in (5, 11, 1)]
    alone = torch.cat([model(x[None]).logits[0] for x in documents])
    for borders in (True, False):
        collator = DataCollatorWithFlattening(return_flash_attn_kwargs=borders)
        batch = collator([{"input_ids": x.tolist()} for x in documents])
        assert ("cu_seq_lens_q" in batch) == borders
        close(model(**batch).logits[0], alone)


CHECKPOINTS = {
    "computed again": ({"use_reentrant": False}, 4),
    "computed again in a graph of its own": ({"use_reentrant": True}, 4),
    "attention is saved": ({"use_reentrant": False, "context_fn": save_attention}, 2),
}


@pytest.mark.parametrize("checkpoints", CHECKPOINTS)
@pytest.mark.parametrize("kind", ["right", "borders", "positions"])
def test_checkpointing(kind, checkpoints):
    """The same gradients, and with save_attention no attention is computed twice. Catches documents that a layer
    forgets when it is computed once more, within backward."""
    inputs, counts = inputs_of(kind)
    expected = loss_and_gradients(make("llama"), inputs, counts)
    options, num_calls = CHECKPOINTS[checkpoints]
    model = make("llama").train()
    model.gradient_checkpointing_enable(options)
    with count_forwards() as calls:
        found = loss_and_gradients(model, inputs, counts)
    assert len(calls) == num_calls
    close(found, expected)


class count_forwards(torch.utils._python_dispatch.TorchDispatchMode):
    def __enter__(self):
        self.calls = []
        super().__enter__()
        return self.calls

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.ring_dilated_attention.forward.default:
            self.calls.append(function)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("autocast", [False, True])
def test_bfloat16(autocast):
    """No further from float64 than twice what the definition in bfloat16 is."""
    inputs, counts = inputs_of("left")
    expected = make("llama")(**inputs).logits[counts]
    model = make("llama", dtype=torch.float32 if autocast else torch.bfloat16)
    errors = []
    for implementation in ("dilated", "by_definition"):
        model.set_attn_implementation(implementation)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            found = model(**inputs).logits[counts]
        errors.append(((found.double() - expected).norm() / expected.norm()).item())
    assert errors[0] < 2 * errors[1] < 0.2


def test_compiled_whole():
    """One graph, forward and backward, packed too; a padded batch breaks it and stays right."""
    model = make("llama")
    whole = torch.compile(model, fullgraph=True, backend="aot_eager")
    for kind in ("plain", "borders"):
        inputs, counts = inputs_of(kind)
        close(loss_and_gradients(whole, inputs, counts), loss_and_gradients(model, inputs, counts))
    torch._dynamo.reset()
    inputs, counts = inputs_of("both")
    with_breaks = torch.compile(model, backend="aot_eager")
    close(
        loss_and_gradients(with_breaks, inputs, counts), loss_and_gradients(model, inputs, counts)
    )
    torch._dynamo.reset()


def test_compiled_code_refuses_documents_that_it_cannot_see():
    """Catches documents that see each other, in silence, since a graph cannot look for where positions start anew."""
    model = make("llama")
    inputs, _ = inputs_of("positions")
    with pytest.raises(RuntimeError, match="pass the borders of documents as cu_seq_lens_q"):
        torch.compile(model, fullgraph=True, backend="aot_eager")(**inputs)
    torch._dynamo.reset()


@pytest.mark.parametrize("kind", ["holes", "positions"])
def test_compiled_code_refuses_what_a_padded_batch_cannot_hold(kind):
    """Catches a mask with holes, and documents in a row with padding, that are refused by uncompiled code alone."""
    mask, positions = torch.ones(2, 12, dtype=torch.int64), torch.arange(12).expand(2, -1).clone()
    mask[1, :2] = 0
    if kind == "holes":
        mask[0, 3:5] = 0
    else:
        positions[0, 5:] -= 5
    model = torch.compile(make("llama"), backend="aot_eager")
    with pytest.raises(
        RuntimeError, match="attention_mask has holes, or position_ids do not increase by 1"
    ):
        model(tokens(2, 12), attention_mask=mask, position_ids=positions, use_cache=False)
    torch._dynamo.reset()


def test_a_compiled_step_from_a_static_cache():
    """One graph for each further token, as generate makes on GPUs."""
    from transformers import StaticCache

    model = make("llama")
    ids = tokens(2, 12)
    expected = model(ids, use_cache=False).logits
    cache = StaticCache(config=model.config, max_cache_len=16)
    step = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        model(ids[:, :8], past_key_values=cache)
        for place in range(8, 12):
            positions = torch.tensor([[place]])
            out = step(
                ids[:, place : place + 1], position_ids=positions, past_key_values=cache
            ).logits
            close(out[:, 0], expected[:, place])
    torch._dynamo.reset()


# --- generation


def recomputed(model, ids, mask, num_tokens):
    """Greedy tokens and their logits, each from the whole of its own prompt and what followed it, alone."""
    found, all_logits = [], []
    for row, valid in zip(ids, mask.bool(), strict=True):
        sequence, logits = row[valid][None], []
        for _ in range(num_tokens):
            logits.append(model(sequence, use_cache=False).logits[0, -1])
            sequence = torch.cat([sequence, logits[-1].argmax()[None, None]], dim=1)
        found.append(sequence[0, -num_tokens:])
        all_logits.append(torch.stack(logits))
    return torch.stack(found), torch.stack(all_logits)


GREEDY = {
    "do_sample": False,
    "max_new_tokens": 14,
    "output_logits": True,
    "return_dict_in_generate": True,
}
CACHES = {
    "none": lambda model: {"use_cache": False},
    "dynamic": lambda model: {},
    "static": lambda model: {"cache_implementation": "static", "disable_compile": True},
    "in chunks": lambda model: {"prefill_chunk_size": 3},
    "bounded": lambda model: {"past_key_values": BoundedCache(model)},
    "bounded, in chunks": lambda model: {
        "past_key_values": BoundedCache(model),
        "prefill_chunk_size": 3,
    },
}


@pytest.mark.parametrize("name", DECODERS)
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("prompts", ["equal", "unequal"])
@torch.no_grad()
def test_greedy_generation(name, cache, prompts):
    """Equal to recomputing each sequence alone, beyond the longest segment, for prompts that are padded on the left."""
    model = make(name)
    ids, mask = tokens(3, 7), torch.ones(3, 7, dtype=torch.int64)
    if prompts == "unequal":
        mask[0, :6], mask[1, :2] = 0, 0
    out = model.generate(ids, attention_mask=mask, **GREEDY, **CACHES[cache](model))
    sequences, logits = recomputed(model, ids, mask, 14)
    assert torch.equal(out.sequences[:, 7:], sequences)
    torch.testing.assert_close(torch.stack(out.logits, dim=1), logits.float(), rtol=1e-6, atol=1e-6)


@torch.no_grad()
def test_sampling_beams_and_lookup():
    """What a cache makes of them is what recomputation makes."""
    model = make("llama")
    ids = tokens(2, 7)
    ways = {
        "sampling": {"do_sample": True, "top_k": 20},
        "beams": {"do_sample": False, "num_beams": 3},
    }
    for way in ways.values():
        found = []
        for cache in ("none", "dynamic", "static", "bounded"):
            torch.manual_seed(7)
            found.append(model.generate(ids, max_new_tokens=12, **way, **CACHES[cache](model)))
        assert all(torch.equal(found[0], other) for other in found[1:])
    repeated = tokens(1, 5).repeat(1, 3)
    found = model.generate(repeated, max_new_tokens=12, do_sample=False, prompt_lookup_num_tokens=4)
    assert torch.equal(
        found, model.generate(repeated, max_new_tokens=12, do_sample=False, use_cache=False)
    )


@torch.no_grad()
def test_rows_that_no_branch_covers_from_a_cache():
    """out = 0 there, and not NaN; with grouped queries."""
    model = make("llama", PATTERNS["uncovered"])
    ids = tokens(1, 16)
    out = model(ids[:, :5])
    later = model(ids[:, 5:], past_key_values=out.past_key_values).logits
    close(later, model(ids, use_cache=False).logits[:, 5:])


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_the_multiplicity_of_cached_rows(data):
    """That of the definition, for any pattern, padding, and number of rows that go on."""
    branches = data.draw(
        st.lists(st.tuples(st.integers(1, 12), st.integers(1, 5)), min_size=1, max_size=3)
    )
    heads = data.draw(st.sampled_from(["modulo", "blocked", "split"]))
    rule = {"heads": "split"} if heads == "split" else {"phase": heads}
    pattern = DilatedPattern(*zip(*branches, strict=True), is_causal=True, **rule)
    length, first, num_heads = data.draw(st.integers(2, 20)), data.draw(st.integers(0, 3)), 4
    num_rows = data.draw(st.integers(1, length - 1))
    expected = multiplicity(pattern, length, num_heads)[:, -num_rows:]
    rows = torch.arange(first + length)[None] - first
    found = ours._counts(pattern, num_heads, rows[:, -num_rows:], rows, rows >= 0)
    assert torch.equal(found[:, :, first:].long(), expected)
    assert not found[:, :, :first].any()


# --- saving and loading


def test_saved_and_loaded(tmp_path):
    """Catches a model that comes back with another attention: also saved again, unused, and by whichever class."""
    pattern = {**PATTERNS["blocked"], "window": 5}
    model, ids = make("llama", pattern), tokens(2, LENGTH)
    expected = model(ids).logits
    folder = tmp_path / "0"
    model.save_pretrained(folder)
    saved = json.loads((folder / "config.json").read_text())
    assert saved["dilated_attention"] == {**pattern, "heads": "all"}
    names = {field.name for field in fields(DilatedPattern)}
    assert {*saved["dilated_attention"]} == names - {"is_causal"}  # which the model decides
    for i, kind in enumerate(
        (AutoModelForCausalLM, LlamaForCausalLM, AutoModelForCausalLM), start=1
    ):
        loaded = kind.from_pretrained(folder, dtype=torch.float64)
        assert loaded.config._attn_implementation == "dilated"
        folder = tmp_path / str(i)
        loaded.save_pretrained(folder)
        close(loaded(ids).logits, expected)
    config = AutoConfig.from_pretrained(folder)
    config.save_pretrained(tmp_path / "config")
    again = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path / "config"))
    assert again.config._attn_implementation == "dilated"
    assert copy.deepcopy(config).dilated_attention == saved["dilated_attention"]


def test_loaded_with_a_pattern(tmp_path):
    """A dense checkpoint becomes dilated by one argument, and a pattern can be replaced by another."""
    make("llama", None, torch.float32).save_pretrained(tmp_path)
    assert "dilated_attention" not in json.loads((tmp_path / "config.json").read_text())
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dilated_attention=PATTERN)
    assert loaded.config._attn_implementation == "dilated"
    ids = tokens(1, LENGTH)
    assert torch.equal(loaded(ids).logits, make("llama", dtype=torch.float32)(ids).logits)
    loaded.config.dilated_attention = PATTERNS["blocked"]
    assert torch.equal(
        loaded(ids).logits, make("llama", PATTERNS["blocked"], torch.float32)(ids).logits
    )


@pytest.mark.parametrize("kind", ["AutoModelForCausalLM", "LlamaForCausalLM"])
def test_without_the_import_loading_fails(tmp_path, kind):
    """Catches a model that comes back as sdpa in a program that does not know of us."""
    make("llama").save_pretrained(tmp_path)
    code = f"from transformers import {kind}; {kind}.from_pretrained({str(tmp_path)!r})"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1
    assert 'ValueError: Specified `attn_implementation="dilated"` is not supported' in done.stderr


# --- what is refused


OTHERS = {
    "sliding_window": 4096,
    "s_aux": torch.zeros(4),
    "softcap": 50.0,
    "position_bias": torch.zeros(1),
    "head_mask": torch.zeros(4),
    "output_attentions": True,
    "dropout": 0.1,
}


def test_what_attention_cannot_do():
    module = make("llama").model.layers[0].self_attn
    query, key = torch.randn(1, 4, 6, 8), torch.randn(1, 2, 6, 8)
    for name, value in OTHERS.items():
        said = message_of(
            lambda n=name, v=value: ours.attend(
                module, query, key, key, None, scaling=1.0, **{n: v}
            )
        )
        assert said.startswith(f"LlamaAttention passes {name}")
    out = ours.attend(module, query, key, key, None, scaling=1.0, use_cache=True)[0]
    assert out.shape == (1, 6, 4, 8)


def test_refused_by_models():
    """In the words of a user, who calls the model."""
    ids = tokens(2, 6)
    assert "passes output_attentions to" in message_of(
        lambda: make("llama")(ids, output_attentions=True)
    )
    dropping = make("llama", attention_dropout=0.1)
    dropping(ids)
    assert "passes dropout=0.1" in message_of(lambda: dropping.train()(ids))
    sliding = make("llama")
    sliding.config.layer_types = ["sliding_attention"] * 2
    from transformers.masking_utils import create_sliding_window_causal_mask

    sliding.config.sliding_window = 4
    embeds = torch.zeros(1, 6, 32)
    made = lambda: create_sliding_window_causal_mask(sliding.config, embeds, None, None)  # noqa: E731
    assert "a layer asks for a sliding window or chunks of 4" in message_of(made)
    model = make("llama")
    holes = torch.tensor([[1] * 6, [1, 0, 0, 1, 1, 1]])
    assert "attention_mask row 1 has holes: valid rows begin at positions [0, 3]" in message_of(
        lambda: model(ids, attention_mask=holes)
    )
    for mask in (torch.ones(2, 1, 6, 6, dtype=torch.bool), torch.zeros(2, 4, 6, 6)):
        assert f"attention_mask of shape {tuple(mask.shape)}" in message_of(
            lambda mask=mask: model(ids, attention_mask=mask)
        )
    two = torch.tensor([[0, 1, 2, 3, 4, 5], [0, 1, 2, 0, 1, 2]])
    mask = torch.tensor([[1] * 6, [0] + [1] * 5])
    assert "position_ids do not increase by 1 at position 3 of row 1" in message_of(
        lambda: model(ids, attention_mask=mask, position_ids=two)
    )


def test_borders_and_padding():
    """cu_seq_lens_q beside padding is refused, where it was left unread: documents saw each other. Compiled code does
    not see that a mask hides nothing, and refuses it too."""
    model, ids = make("llama"), tokens(1, 12)
    borders = torch.tensor([0, 5, 10], dtype=torch.int32)
    mask = torch.tensor([[1] * 10 + [0] * 2])
    assert "cu_seq_lens_q with padding (attention_mask)" in message_of(
        lambda: model(ids, attention_mask=mask, cu_seq_lens_q=borders)
    )
    borders, mask = torch.tensor([0, 5, 12], dtype=torch.int32), torch.ones_like(ids)
    close(
        model(ids, attention_mask=mask, cu_seq_lens_q=borders).logits,
        model(ids, cu_seq_lens_q=borders).logits,
    )
    compiled = torch.compile(model, backend="aot_eager")
    assert "cu_seq_lens_q with padding (attention_mask)" in message_of(
        lambda: compiled(ids, attention_mask=mask, cu_seq_lens_q=borders, use_cache=False)
    )
    torch._dynamo.reset()


def test_encoders_do_not_look_at_others():
    """Cross-attention is not self-attention."""
    assert "2 queries and 5 keys that see each other both ways" in message_of(
        lambda: ours.make_mask(
            1,
            2,
            5,
            mask_function=ours.bidirectional_mask_function,
            config=make("bert").config,
            device=torch.device("cpu"),
        )
    )


def test_configs_that_cannot_be():
    register()
    sizes = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    message = message_of(
        lambda: LlamaForCausalLM(LlamaConfig(**sizes, attn_implementation="dilated"))
    )
    assert "attn_implementation='dilated', but the LlamaConfig has no pattern" in message
    assert "config.dilated_attention = {" in message
    config = LlamaConfig(**sizes)
    for value in ([4], {"segment_lengths": [4]}, {**PATTERN, "is_causal": True}):
        message = message_of(lambda value=value: setattr(config, "dilated_attention", value))
        assert f"got {value!r}" in message
    message = message_of(
        lambda: setattr(
            config, "dilated_attention", {"segment_lengths": [4], "dilation_rates": [0]}
        )
    )
    assert "dilation_rates must be at least 1, got 0" in message
    assert config.dilated_attention is None
    assert config._attn_implementation is None
    config.dilated_attention = DilatedPattern((4, 8), (1, 2))
    assert config.dilated_attention["segment_lengths"] == [4, 8]
    config.dilated_attention = None
    assert config._attn_implementation is None
    assert "attn_implementation" not in config.to_dict()
    five = {"segment_lengths": [2] * 5, "dilation_rates": [1] * 5, "heads": "split"}
    assert "gives each of 5 branches its own heads, but there are only 4" in message_of(
        lambda: make("llama", five)
    )


def test_a_model_needs_no_accelerate():
    """Which Trainer alone needs, and a plain installation of transformers lacks."""
    code = "import sys; sys.modules['accelerate'] = None; import ring_dilated_attention.integrations.transformers"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
