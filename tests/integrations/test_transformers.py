"""Models of transformers with dilated attention, against the same models with the definition in its place."""

import copy
import json
import re
import subprocess
import sys
from dataclasses import fields
from functools import partial

import drawn
import pytest
import torch
from helpers import message_of
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import DECODERS, PATTERN, SIZES, make, tokens
from torch.nn.functional import cross_entropy
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    StaticCache,
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
        mask[2, :6], mask[0, :3] = 0, 0
    return mask


def inputs_of(kind):
    """What the model is given, and which rows count. Packed: two or three documents in each row, as positions tell."""
    inputs = {"input_ids": tokens(2, LENGTH)}
    if kind in ("right", "left", "both"):
        inputs = {"input_ids": tokens(3, LENGTH), "attention_mask": padding(kind)}
        return inputs, inputs["attention_mask"].bool()
    if kind != "plain":
        lengths = [[9, 13], [1, 20, 1]] if kind == "positions of a batch" else [[5, 14, 3]]
        positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths])
        inputs = {"input_ids": tokens(*positions.shape), "position_ids": positions}
    if kind == "borders":
        inputs["cu_seq_lens_q"] = torch.tensor([0, 5, 19, 22], dtype=torch.int32)
    return inputs, torch.ones_like(inputs["input_ids"], dtype=torch.bool)


def loss_and_gradients(model, inputs, counts):
    logits = model(**inputs).logits
    loss = cross_entropy(logits[counts], inputs["input_ids"][counts])
    loss.backward()
    gradients = [x.grad.clone() for x in model.parameters() if x.grad is not None]
    model.zero_grad()
    return logits.detach()[counts], loss.detach(), gradients


def close(found, expected, atol=1e-11):
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=atol)


# BERT does not tell its attention the positions: packed, it needs cu_seq_lens_q.
KINDS = {
    "llama": ["plain", "right", "left", "both", "borders", "positions", "positions of a batch"]
}
KINDS |= {name: ["both", "positions of a batch"] for name in DECODERS if name != "llama"}
KINDS |= {"bert": ["plain", "right", "left", "both", "borders"]}
EVERY = [(name, kind, "modulo") for name, kinds in KINDS.items() for kind in kinds]
EVERY += [("llama", "left", pattern) for pattern in PATTERNS if pattern != "modulo"]


@pytest.mark.parametrize(("name", "kind", "pattern"), EVERY)
def test_equal_to_the_definition(name, kind, pattern):
    """Logits, loss and every gradient in float64, also of queries that no branch covers, and of heads that run one
    branch alone. Catches padding that is read, documents that see each other, phases that go by the key/value head, and
    a module's causality that is not followed."""
    model = make(name, PATTERNS[pattern])
    inputs, counts = inputs_of(kind)
    found = loss_and_gradients(model, inputs, counts)
    model.set_attn_implementation("by_definition")
    assert len(found[2]) > 10
    close(found, loss_and_gradients(model, inputs, counts))


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


@pytest.fixture
def compiled():
    """A function that compiles a model; what it keeps is dropped after the test."""
    yield partial(torch.compile, backend="aot_eager")
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("kind", "is_whole"), [("plain", True), ("borders", True), ("both", False)]
)
def test_compiled(kind, is_whole, compiled):
    """One graph, forward and backward, packed too; a padded batch breaks it and stays right."""
    model, (inputs, counts) = make("llama"), inputs_of(kind)
    found = loss_and_gradients(compiled(model, fullgraph=is_whole), inputs, counts)
    close(found, loss_and_gradients(model, inputs, counts))


@torch.no_grad()
def test_a_compiled_step_from_a_static_cache(compiled):
    """One graph for each further token, as generate makes on GPUs."""
    model, ids = make("llama"), tokens(2, 12)
    expected = model(ids, use_cache=False).logits
    cache = StaticCache(config=model.config, max_cache_len=16)
    step = compiled(model, fullgraph=True)
    mask = ours.make_mask(2, 8, 16, config=model.config, device=ids.device)
    assert mask.shape == (2, 8)  # of the first rows, and not of all that the cache could hold
    model(ids[:, :8], past_key_values=cache)
    for place in range(8, 12):
        position = torch.tensor([[place]])
        out = step(ids[:, place, None], position_ids=position, past_key_values=cache)
        close(out.logits[:, 0], expected[:, place])


# --- generation


CACHES = {
    "none": lambda model: {"use_cache": False},
    "dynamic": lambda model: {},
    "static": lambda model: {"cache_implementation": "static", "disable_compile": True},
    "in chunks": lambda model: {"prefill_chunk_size": 2},  # as many rows as key/value heads
    "bounded": lambda model: {"past_key_values": BoundedCache(model)},
    "bounded, in chunks": lambda model: {
        "past_key_values": BoundedCache(model),
        "prefill_chunk_size": 3,
    },
}
FROM_CACHES = [("llama", cache, "modulo") for cache in CACHES]
FROM_CACHES += [
    (name, cache, "modulo") for name in DECODERS[1:] for cache in ("dynamic", "bounded")
]
FROM_CACHES += [("llama", cache, "windowed") for cache in ("dynamic", "bounded")]


@pytest.mark.parametrize(("name", "cache", "pattern"), FROM_CACHES)
@torch.no_grad()
def test_greedy_generation(name, cache, pattern):
    """Of prompts padded on the left: equal to recomputing each sequence alone, beyond the longest segment."""
    ids, mask = tokens(3, 7), torch.ones(3, 7, dtype=torch.int64)
    mask[0, :6], mask[1, :2] = 0, 0
    model = make(name, PATTERNS[pattern])
    options = {"output_logits": True, "return_dict_in_generate": True, "max_new_tokens": 14}
    options |= {"attention_mask": mask, "do_sample": False, **CACHES[cache](model)}
    out = model.generate(ids, **options)
    written, logits = out.sequences[:, ids.shape[1] :], torch.stack(out.logits, dim=1)
    assert written.shape == (len(ids), 14)
    for row, valid, found, found_logits in zip(ids, mask.bool(), written, logits, strict=True):
        sequence = torch.cat([row[valid], found])
        expected = model(sequence[None], use_cache=False).logits[0, valid.sum() - 1 : -1]
        assert torch.equal(found, expected.argmax(-1))
        torch.testing.assert_close(found_logits, expected.float(), rtol=1e-6, atol=1e-6)


@torch.no_grad()
def test_beams():
    """What a cache makes of them is what recomputation makes."""
    model = make("llama")
    options = {"max_new_tokens": 12, "do_sample": False, "num_beams": 3}
    found = [
        model.generate(tokens(2, 7), **options, **CACHES[cache](model))
        for cache in ("none", "dynamic", "static", "bounded")
    ]
    assert all(torch.equal(found[0], other) for other in found[1:])


@torch.no_grad()
def test_rows_that_no_branch_covers_from_a_cache():
    """out = 0 there, and not NaN; with grouped queries."""
    model = make("llama", PATTERNS["uncovered"])
    ids = tokens(1, 16)
    out = model(ids[:, :5])
    later = model(ids[:, 5:], past_key_values=out.past_key_values).logits
    close(later, model(ids, use_cache=False).logits[:, 5:])


@given(
    drawn.patterns(4, longest=12, highest_rate=5, is_causal=True),
    st.integers(2, 20),
    st.integers(0, 3),
    st.data(),
)
@settings(max_examples=60, deadline=None)
def test_the_multiplicity_of_cached_rows(pattern, length, first, data):
    """That of the definition, for any pattern, padding, and number of rows that go on."""
    num_rows = data.draw(st.integers(1, length - 1))
    expected = multiplicity(pattern, length, 4)[:, -num_rows:]
    rows = torch.arange(first + length)[None] - first
    found = ours._counts(pattern, 4, rows[:, -num_rows:], rows, rows >= 0)
    assert torch.equal(found[:, :, first:].long(), expected)
    assert not found[:, :, :first].any()


# --- saving and loading


def test_saved_and_loaded(tmp_path):
    """Catches a model that comes back with another attention: also saved again, unused, and by whichever class."""
    pattern = {**PATTERNS["blocked"], "window": 5}
    model, ids = make("llama", pattern), tokens(2, LENGTH)
    expected, folder = model(ids).logits, tmp_path / "0"
    model.save_pretrained(folder)
    saved = json.loads((folder / "config.json").read_text())["dilated_attention"]
    assert saved == {**pattern, "heads": "all"}
    names = {field.name for field in fields(DilatedPattern)}
    assert {*saved} == names - {"is_causal"}  # which the model decides
    for kind in (AutoModelForCausalLM, LlamaForCausalLM, AutoModelForCausalLM):
        loaded = kind.from_pretrained(folder, dtype=torch.float64)
        assert loaded.config._attn_implementation == "dilated"
        folder = folder / "again"
        loaded.save_pretrained(folder)
        close(loaded(ids).logits, expected)
    config = AutoConfig.from_pretrained(folder)
    config.save_pretrained(tmp_path / "config")
    again = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path / "config"))
    assert again.config._attn_implementation == "dilated"
    assert copy.deepcopy(config).dilated_attention == saved


def test_loaded_with_a_pattern(tmp_path):
    """A dense checkpoint becomes dilated by one argument, and a pattern can be replaced by another."""
    make("llama", None, torch.float32).save_pretrained(tmp_path)
    assert "dilated_attention" not in json.loads((tmp_path / "config.json").read_text())
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dilated_attention=PATTERN)
    assert loaded.config._attn_implementation == "dilated"
    ids = tokens(1, LENGTH)
    for kind in ("modulo", "blocked"):
        expected = make("llama", PATTERNS[kind], torch.float32)(ids).logits
        loaded.config.dilated_attention = PATTERNS[kind]
        assert torch.equal(loaded(ids).logits, expected)


def test_without_the_import_loading_fails(tmp_path):
    """Catches a model that comes back as sdpa in a program that does not know of us."""
    make("llama").save_pretrained(tmp_path)
    code = f"from transformers import LlamaForCausalLM as L; L.from_pretrained({str(tmp_path)!r})"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
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
    attend = partial(ours.attend, module, query, key, key, None, scaling=1.0)
    for name, value in OTHERS.items():
        said = message_of(lambda n=name, v=value: attend(**{n: v}))
        assert said.startswith(f"LlamaAttention passes {name}")
    assert attend(use_cache=True)[0].shape == (1, 6, 4, 8)
    said = message_of(lambda: ours.attend(module, query, key.repeat(1, 1, 2, 1), key, None))
    assert said.startswith("6 queries and 12 keys")


HOLES = {"attention_mask": torch.tensor([[1] * 3 + [0] * 2 + [1] * 7, [0] * 2 + [1] * 10])}
BEHIND_PADDING = {
    "attention_mask": torch.tensor([[1] * 12, [0] * 2 + [1] * 10]),
    "position_ids": torch.tensor([[*range(5), *range(7)], [*range(12)]]),
}
NOT_HELD = "attention_mask has holes, or position_ids do not increase by 1"
BORDERS = torch.tensor([0, 5, 10], dtype=torch.int32)
ENDS_IN_PADDING = {"attention_mask": torch.tensor([[1] * 10 + [0] * 2]), "cu_seq_lens_q": BORDERS}
HIDES_NOTHING = {
    "attention_mask": torch.ones(1, 12, dtype=torch.int64),
    "cu_seq_lens_q": torch.tensor([0, 5, 12], dtype=torch.int32),
}
BOTH = "cu_seq_lens_q together with an attention_mask"


@pytest.mark.parametrize(
    ("more", "said", "said_by_compiled_code"),
    [
        ({"output_attentions": True}, "passes output_attentions to", None),
        (
            HOLES,
            "attention_mask row 0 has holes: valid rows begin at positions [0, 5]",
            NOT_HELD,
        ),
        (
            {"attention_mask": torch.ones(2, 1, 12, 12) > 0},
            "attention_mask of shape (2, 1, 12, 12)",
            None,
        ),
        (
            {"attention_mask": torch.zeros(2, 4, 12, 12)},
            "attention_mask of shape (2, 4, 12, 12)",
            None,
        ),
        (BEHIND_PADDING, "position_ids do not increase by 1 at position 5 of row 0", NOT_HELD),
        (ENDS_IN_PADDING, BOTH, None),  # or documents would see each other
        ({"position_ids": BEHIND_PADDING["position_ids"]}, None, "pass the borders of documents"),
        (HIDES_NOTHING, None, BOTH),
    ],
)
def test_refused_by_models(more, said, said_by_compiled_code, compiled):
    """In the words of a user, who calls the model. Catches documents that see each other, in silence, since a graph
    cannot look for where positions start anew; and what uncompiled code alone refuses."""
    model, ids = make("llama"), tokens(1 if "cu_seq_lens_q" in more else 2, 12)
    if said is not None:
        assert said in message_of(lambda: model(ids, **more))
    if said_by_compiled_code is not None:
        with pytest.raises((RuntimeError, ValueError), match=re.escape(said_by_compiled_code)):
            compiled(model)(ids, **more, use_cache=False)


def test_borders_beside_a_mask_that_hides_nothing():
    model, ids = make("llama"), tokens(1, 12)
    borders = HIDES_NOTHING["cu_seq_lens_q"]
    close(model(ids, **HIDES_NOTHING).logits, model(ids, cu_seq_lens_q=borders).logits)


def test_configs_that_cannot_be():
    register()
    implementation = {"attn_implementation": "dilated"}
    said = message_of(lambda: LlamaForCausalLM(LlamaConfig(**SIZES, **implementation)))
    assert "attn_implementation='dilated', but the LlamaConfig has no pattern" in said
    assert "config.dilated_attention = {" in said
    config = LlamaConfig(**SIZES)
    rate = {"segment_lengths": [4], "dilation_rates": [0]}
    causal = {**PATTERN, "is_causal": True}
    for value, said in (
        ([4], "got [4]"),
        ({"segment_lengths": [4]}, "got {'segment_lengths': [4]}"),
        (causal, f"got {causal!r}"),
        (rate, "dilation_rates must be at least 1, got 0"),
    ):
        assert said in message_of(lambda v=value: setattr(config, "dilated_attention", v))
    assert config.dilated_attention is config._attn_implementation is None
    config.dilated_attention = DilatedPattern((4, 8), (1, 2))
    assert config.dilated_attention["segment_lengths"] == [4, 8]
    config.dilated_attention = None
    assert config._attn_implementation is None
    assert "attn_implementation" not in config.to_dict()
    five = {"segment_lengths": [2] * 5, "dilation_rates": [1] * 5, "heads": "split"}
    said = message_of(lambda: make("llama", five))
    assert "gives each of 5 branches its own heads, but there are only 4" in said


def test_a_model_needs_no_accelerate():
    """Which Trainer alone needs, and a plain installation of transformers lacks."""
    code = "import sys; sys.modules['accelerate'] = None; import ring_dilated_attention.integrations.transformers"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
