"""What is refused when a model is made or loaded, because positions would meet past dilated attention in it."""

import copy

import pytest
import torch
from accelerate import init_empty_weights
from tiny import PATTERN, SIZES
from torch import nn
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    BloomConfig,
    BloomForCausalLM,
    EsmConfig,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaModel,
    LlamaPreTrainedModel,
    LlavaConfig,
    LlavaForConditionalGeneration,
    ViTConfig,
)

from ring_dilated_attention.integrations.transformers import convert_to_dilated, register
from ring_dilated_attention.integrations.transformers.probe import _causal


def test_refused_when_loaded(tmp_path):
    """By the argument that the page recommends."""
    register()
    BloomForCausalLM(
        BloomConfig(vocab_size=61, hidden_size=32, n_layer=1, n_head=4)
    ).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="adds ALiBi's biases"):
        AutoModelForCausalLM.from_pretrained(tmp_path, dilated_attention=PATTERN)


def test_a_submodel_that_lost_its_attention(tmp_path):
    """transformers takes the name of the attention from a part when it makes the whole's config, and would load it
    dense, without a word."""
    vision = {
        "model_type": "clip_vision_model",
        "num_hidden_layers": 1,
        "hidden_size": 8,
        "intermediate_size": 8,
    }
    vision |= {"num_attention_heads": 2, "image_size": 16, "patch_size": 8}
    whole = LlavaForConditionalGeneration(
        LlavaConfig(text_config={"model_type": "llama", **SIZES}, vision_config=vision)
    )
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
    assert (
        LlavaForConditionalGeneration(
            loaded.config
        ).model.language_model.config._attn_implementation
        == "sdpa"
    )


def test_esm_is_taken_both_ways():
    """It has room for another config in its own, and has none in it."""
    register()
    sizes = {**SIZES, "pad_token_id": 0, "mask_token_id": 1, "attention_probs_dropout_prob": 0.0}
    model = AutoModel.from_config(EsmConfig(**sizes)).eval()
    made = AutoModel.from_config(EsmConfig(**sizes, dilated_attention=PATTERN)).eval()
    made.load_state_dict(model.state_dict())
    ids = torch.arange(5, 25)[None]
    convert_to_dilated(model, PATTERN)
    assert torch.equal(model(ids)[0], made(ids)[0])


class Smeared(LlamaModel):
    """A model of a user, in which a position also sees the one before."""

    def __init__(self, config):
        super().__init__(config)
        self.norm = Before()


class Before(nn.Module):
    def forward(self, x):
        return x + x.roll(1, 1)


class Headed(LlamaModel):
    """... and one in which all positions see the first."""

    def __init__(self, config):
        super().__init__(config)
        self.norm = One(0)


class Tailed(LlamaModel):
    """... and one in which all positions see the last."""

    def __init__(self, config):
        super().__init__(config)
        self.norm = One(-1)


class One(nn.Module):
    def __init__(self, position):
        super().__init__()
        self.position = position

    def forward(self, x):
        return x + x[:, [self.position]]


class Hidden(LlamaModel):
    """... and one whose attention over the layers' outcome is another's."""

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


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (Smeared, r"Smeared: positions meet in Before \(norm\) without dilated attention"),
        (Headed, r"Headed: positions meet in One \(norm\) without dilated attention"),
        (Tailed, r"Tailed: positions meet in One \(norm\) without dilated attention"),
        (
            Hidden,
            r"Hidden: positions meet in MultiheadAttention \(pool\) without dilated attention",
        ),
        (
            Capped,
            "Capped: dilated attention with one segment of all positions is not the attention of LlamaAttention",
        ),
    ],
)
def test_models_of_users(kind, said):
    register()
    with pytest.raises(ValueError, match=said):
        kind(LlamaConfig(**SIZES, dilated_attention=PATTERN))
    with pytest.raises(ValueError, match=said):
        convert_to_dilated(kind(LlamaConfig(**SIZES)), PATTERN)


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


def test_another_token_may_leave_an_expert_without_positions():
    register()
    config = LlamaConfig(**{**SIZES, "num_hidden_layers": 6}, dilated_attention=PATTERN)
    assert Routed(config).config.dilated_attention == config.dilated_attention


def test_a_vocabulary_of_two_tokens():
    register()
    config = LlamaConfig(
        **{**SIZES, "vocab_size": 4}, bos_token_id=0, eos_token_id=1, dilated_attention=PATTERN
    )
    assert LlamaModel(config).config.dilated_attention == config.dilated_attention
    with pytest.raises(ValueError, match=r"positions meet in Before \(norm\)"):
        Smeared(config)


class Labelled(LlamaPreTrainedModel):
    """A model of a user that does not run on tokens alone, and whose head sees the future."""

    def __init__(self, config):
        super().__init__(config)
        self.model = LlamaModel(config)
        self.head = nn.Conv1d(config.hidden_size, 2, 3, padding=1)

    def forward(self, input_ids, labels):
        return self.head(self.model(input_ids).last_hidden_state.mT).mT


def test_a_base_does_not_speak_for_what_a_user_adds():
    register()
    with pytest.raises(ValueError, match=r"Labelled does not run with dilated attention.*'labels'"):
        Labelled(LlamaConfig(**SIZES, dilated_attention=PATTERN))


@pytest.mark.parametrize(
    "place",
    [init_empty_weights, lambda: torch.autocast("cpu", dtype=torch.bfloat16)],
    ids=["accelerate", "autocast"],
)
def test_a_copy_is_made_alike_wherever_the_model_is(place):
    register()
    _causal.clear()
    with place():
        assert LlamaForCausalLM(
            LlamaConfig(**SIZES, dilated_attention=PATTERN)
        ).config.dilated_attention


def test_a_copy_leaves_the_seeds_of_gpus(monkeypatch):
    """`torch.manual_seed` sets those of all devices, of which only the CPU's is put back."""
    register()
    _causal.clear()
    seeds = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeds.append)
    LlamaModel(LlamaConfig(**SIZES, dilated_attention=PATTERN))
    assert seeds == []


def test_a_config_that_is_no_json():
    register()
    config = LlamaConfig(**SIZES, dilated_attention=PATTERN)
    config.tags = {"of", "a", "user"}
    assert LlamaModel(config).config.tags


def test_other_modules_are_asked_for_nothing():
    class Unready(nn.Module):
        config = property(lambda self: self.layers[0].config)

        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList()
            self.head = nn.Linear(1, 1)

    register()
    assert Unready().head.weight.numel() == 1


def test_a_copy_is_small_and_leaves_no_trace():
    """Layers of a billion parameters are looked at in a moment, on the device "meta", and no random number is taken."""
    register()
    sizes = {
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 6,
        "num_attention_heads": 64,
    }
    config = LlamaConfig(
        **sizes, num_key_value_heads=8, vocab_size=128256, dilated_attention=PATTERN
    )
    before = config.to_dict()
    torch.manual_seed(3)
    state = torch.get_rng_state()
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    assert torch.equal(torch.get_rng_state(), state)
    assert model.lm_head.weight.shape == (128256, 8192)
    assert config.to_dict() == before
    assert copy.deepcopy(model).config.dilated_attention == config.dilated_attention


def test_vision():
    register()
    sizes = {name: SIZES[name] for name in SIZES if name != "vocab_size"}
    config = ViTConfig(**sizes, image_size=32, patch_size=8, dilated_attention=PATTERN)
    assert AutoModel.from_config(config)(torch.zeros(1, 3, 32, 32)).last_hidden_state.shape == (
        1,
        17,
        32,
    )
