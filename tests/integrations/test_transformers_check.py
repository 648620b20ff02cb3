"""What is refused when a model is made, loaded or converted, because positions would meet past dilated attention in it.

A refusal leaves the model as it was."""

import copy
from contextlib import nullcontext

import pytest
import torch
from accelerate import init_empty_weights
from helpers import message_of
from tiny import GROUPED, PATTERN, SIZES, make, tokens, with_norm
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    BloomForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaModel,
    LlamaPreTrainedModel,
    LlavaConfig,
    LlavaForConditionalGeneration,
    MistralConfig,
    MistralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from ring_dilated_attention import DilatedPattern
from ring_dilated_attention.integrations.transformers import convert_to_dilated, register
from ring_dilated_attention.integrations.transformers.probe import _causal


@pytest.fixture(autouse=True)
def registered():
    register()


def config_of(**more):
    return LlamaConfig(**{**SIZES, **more}, dilated_attention=PATTERN)


def test_refused_when_loaded(tmp_path):
    """By the argument that the page recommends."""
    BloomForCausalLM(
        BloomConfig(vocab_size=61, hidden_size=32, n_layer=1, n_head=4)
    ).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="adds ALiBi's biases"):
        AutoModelForCausalLM.from_pretrained(tmp_path, dilated_attention=PATTERN)


def test_a_submodel_that_lost_its_attention(tmp_path):
    """transformers takes the name of the attention from a part when it makes the whole's config, and would load it
    dense, without a word."""
    vision = {"model_type": "clip_vision_model", "num_hidden_layers": 1, "hidden_size": 8}
    vision |= {"intermediate_size": 8, "num_attention_heads": 2, "image_size": 16, "patch_size": 8}
    text = {"model_type": "llama", **SIZES}
    config = LlavaConfig(text_config=text, vision_config=vision)
    whole = LlavaForConditionalGeneration(config)
    convert_to_dilated(whole.model.language_model, PATTERN)
    whole.model.language_model.eval()
    whole.save_pretrained(tmp_path)
    with pytest.raises(
        ValueError, match=r"LlamaModel would have attn_implementation='sdpa', and its config has a"
    ):
        LlavaForConditionalGeneration.from_pretrained(tmp_path)
    named = {"text_config": "dilated"}
    loaded = LlavaForConditionalGeneration.from_pretrained(
        tmp_path, attn_implementation=named
    ).eval()
    ids = torch.arange(20)[None]
    torch.testing.assert_close(loaded(ids).logits, whole(ids).logits)
    loaded.config.text_config.dilated_attention = None
    dense = LlavaForConditionalGeneration(loaded.config).model.language_model
    assert dense.config._attn_implementation == "sdpa"


BEFORE = with_norm(lambda x: x + x.roll(1, 1))


class Hidden(LlamaModel):
    """A model of a user whose attention over the layers' outcome is another's."""

    def __init__(self, config):
        super().__init__(config)
        self.pool = nn.MultiheadAttention(config.hidden_size, 1, batch_first=True)

    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        x = output.last_hidden_state
        output["pooled"] = self.pool(x[:, :1], x, x)[0]
        return output


class Capped(LlamaModel):
    """... and one that changes what attention gives."""

    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        if self.config._attn_implementation == "eager":
            output["last_hidden_state"] = output.last_hidden_state.tanh()
        return output


FEW_TOKENS = {"vocab_size": 4, "bos_token_id": 0, "eos_token_id": 1}
MEET = r": positions are mixed in {} outside of dilated attention"
OTHER = "Capped: dilated attention with one segment of all positions gives other results than Llama"


@pytest.mark.parametrize(
    ("kind", "sizes", "said"),
    [
        (BEFORE, {}, MEET.format(r"Applied \(norm\)")),
        (
            with_norm(lambda x: x + x[:, :1]),
            {},
            MEET.format(r"Applied \(norm\)"),
        ),  # all see the first
        (with_norm(lambda x: x + x[:, -1:]), {}, MEET.format(r"Applied \(norm\)")),
        (Hidden, {}, "Hidden" + MEET.format(r"MultiheadAttention \(pool\)")),
        (Capped, {}, OTHER),
        (BEFORE, FEW_TOKENS, MEET.format(r"Applied \(norm\)")),
    ],
)
def test_models_of_users(kind, sizes, said):
    with pytest.raises(ValueError, match=said):
        kind(config_of(**sizes))
    with pytest.raises(ValueError, match=said):
        convert_to_dilated(kind(LlamaConfig(**{**SIZES, **sizes})), PATTERN)


class Experts(nn.Module):
    """Each position is given to one expert, and an expert without positions does not run."""

    def __init__(self, width, num_experts):
        super().__init__()
        self.router = nn.Linear(width, num_experts, bias=False)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(num_experts))

    def forward(self, x):
        chosen, output = self.router(x).argmax(-1), torch.zeros_like(x)
        for expert in chosen.unique().tolist():
            output[chosen == expert] = self.experts[expert](x[chosen == expert])
        return output


class Routed(LlamaModel):
    def __init__(self, config):
        super().__init__(config)
        for layer in self.layers:
            layer.mlp = Experts(config.hidden_size, 8)


@pytest.mark.parametrize(
    ("kind", "fields", "place"),
    [
        # another token may leave an expert without positions
        (Routed, {"num_hidden_layers": 6}, nullcontext),
        (LlamaModel, FEW_TOKENS, nullcontext),
        (LlamaModel, {"tags": {"which", "JSON", "has", "not"}}, nullcontext),
        (LlamaForCausalLM, {}, init_empty_weights),
        (LlamaForCausalLM, {}, lambda: torch.autocast("cpu", dtype=torch.bfloat16)),
    ],
)
def test_no_false_alarm(kind, fields, place):
    _causal.clear()
    config = config_of(**fields)
    with place():
        assert kind(config).config.dilated_attention == config.dilated_attention


class Labelled(LlamaPreTrainedModel):
    """A model of a user that does not run on tokens alone, and whose head sees the future."""

    def __init__(self, config):
        super().__init__(config)
        self.model = LlamaModel(config)
        self.head = nn.Conv1d(config.hidden_size, 2, 3, padding=1)

    def forward(self, input_ids, labels):
        return self.head(self.model(input_ids).last_hidden_state.mT).mT


def test_a_base_does_not_speak_for_what_a_user_adds():
    with pytest.raises(ValueError, match=r"Labelled does not run with dilated attention.*'labels'"):
        Labelled(config_of())


def test_other_modules_are_asked_for_nothing():
    class Unready(nn.Module):
        config = property(lambda self: self.layers[0].config)

        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList()
            self.head = nn.Linear(1, 1)

    assert Unready().head.weight.numel() == 1


def test_a_copy_is_small_and_leaves_no_trace(monkeypatch):
    """Layers of a billion parameters are looked at in a moment, on the device "meta", and no random number is taken.
    `torch.manual_seed` sets the seeds of all devices, of which only the CPU's is put back: it is not called."""
    _causal.clear()
    seeds = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeds.append)
    sizes = {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 6}
    sizes |= {"num_attention_heads": 64, "num_key_value_heads": 8, "vocab_size": 128256}
    config = config_of(**sizes)
    before = config.to_dict()
    state = torch.get_rng_state()
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    assert torch.equal(torch.get_rng_state(), state)
    assert seeds == []
    assert model.lm_head.weight.shape == (128256, 8192)
    assert config.to_dict() == before
    assert copy.deepcopy(model).config.dilated_attention == config.dilated_attention


# --- a dense model made dilated


def test_converted():
    """The same parameters, under the same names, and the function of a model that was made so."""
    ids, lengths = tokens(2, 20), ((4, 9), (1, 3))
    model, blocked = make("llama", None), {**PATTERN, "phase": "blocked"}
    before = {name: x.data_ptr() for name, x in model.named_parameters()}
    for pattern, same in (
        (PATTERN, PATTERN),
        (blocked, blocked),
        (DilatedPattern(*lengths), PATTERN),
        (DilatedPattern(*lengths, is_causal=True), PATTERN),
    ):
        convert_to_dilated(model, pattern)
        assert {name: x.data_ptr() for name, x in model.named_parameters()} == before
        assert torch.equal(model(ids).logits, make("llama", same)(ids).logits)


class OwnAttention(LlamaForCausalLM):
    """transformers asks the class, which looks at its source."""

    @classmethod
    def _can_set_attn_implementation(cls):
        return False


WINDOWED = {"use_sliding_window": True, "max_window_layers": 1}
BOTH_WAYS, CAUSAL = DilatedPattern((4, 9), (1, 3)), DilatedPattern((4, 9), (1, 3), is_causal=True)


@pytest.mark.parametrize(
    ("make_model", "pattern", "said"),
    [
        (lambda: nn.Linear(4, 4), BOTH_WAYS, "be a PreTrainedModel of transformers, got Linear"),
        (
            lambda: MistralForCausalLM(MistralConfig(**SIZES, **GROUPED)),
            BOTH_WAYS,
            "MistralForCausalLM has sliding_window=4096: a sliding window is another pattern",
        ),
        (
            lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES, **GROUPED, **WINDOWED)),
            BOTH_WAYS,
            "Qwen3ForCausalLM has layers of sliding_attention: dilated attention replaces full_at",
        ),
        (
            lambda: make("llama", None),
            DilatedPattern([2] * 5, [1] * 5, heads="split"),
            "gives each of 5 branches its own heads, but there are only 4",
        ),
        (lambda: OwnAttention(LlamaConfig(**SIZES)), BOTH_WAYS, "chooses its attention itself"),
        (lambda: make("bert", None), CAUSAL, "has is_causal=True, but the attention of"),
    ],
)
def test_refused(make_model, pattern, said):
    model = make_model()

    def state():
        config = getattr(model, "config", None)
        return str(config), getattr(config, "_attn_implementation", None)

    before = state()
    assert said in message_of(lambda: convert_to_dilated(model, pattern))
    assert state() == before


def test_a_pattern_for_the_config_of_a_model_that_stands():
    """It would reach models that were never looked at: Bloom saw the future so."""
    model = BloomForCausalLM(BloomConfig(vocab_size=61, hidden_size=16, n_layer=1, n_head=2))
    with pytest.raises(ValueError, match=r"dilated by convert_to_dilated\(model, pattern\)"):
        model.config.dilated_attention = PATTERN
    assert model.config.dilated_attention is None
