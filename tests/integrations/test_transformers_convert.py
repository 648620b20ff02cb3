"""A dense model made dilated: what it keeps, what it refuses, and that a refusal leaves it as it was."""

import pytest
import torch
from helpers import message_of
from tiny import GROUPED, PATTERN, SIZES, make, tokens
from torch import nn
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from ring_dilated_attention import DilatedPattern
from ring_dilated_attention.integrations.transformers import convert_to_dilated


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


def test_a_model_that_cannot_be_given_another_attention():
    """transformers asks the class, which looks at its source."""
    kind = type(
        "OwnModel",
        (LlamaForCausalLM,),
        {"_can_set_attn_implementation": classmethod(lambda cls: False)},
    )
    model = kind(LlamaConfig(**SIZES))
    before = model.config._attn_implementation
    with pytest.raises(ValueError, match="chooses its attention itself"):
        convert_to_dilated(model, PATTERN)
    assert {x.config._attn_implementation for x in (model, model.model)} == {before}
    assert model.config.dilated_attention is None


def test_a_pattern_for_the_config_of_a_model_that_stands():
    """It would reach models that were never looked at: Bloom saw the future so."""
    model = BloomForCausalLM(BloomConfig(vocab_size=61, hidden_size=16, n_layer=1, n_head=2))
    with pytest.raises(ValueError, match=r"dilated by convert_to_dilated\(model, pattern\)"):
        model.config.dilated_attention = PATTERN
    assert model.config.dilated_attention is None
