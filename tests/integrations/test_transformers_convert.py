"""A dense model made dilated: what it keeps, what it refuses, and that a refusal leaves it as it was."""

import pytest
import torch
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

from ring_dilated_attention import ContextParallel, DilatedPattern
from ring_dilated_attention.integrations.transformers import context_parallel, convert_to_dilated


def test_converted():
    """The same parameters, under the same names, and the function of a model that was made so."""
    for pattern in (
        PATTERN,
        DilatedPattern((4, 9), (1, 3)),
        DilatedPattern((4, 9), (1, 3), is_causal=True),
    ):
        model = make("llama", None)
        before = {name: x.data_ptr() for name, x in model.named_parameters()}
        convert_to_dilated(model, pattern)
        assert {name: x.data_ptr() for name, x in model.named_parameters()} == before
        ids = tokens(2, 20)
        assert torch.equal(model(ids).logits, make("llama")(ids).logits)
    convert_to_dilated(model, {**PATTERN, "phase": "blocked"})
    assert torch.equal(
        model(ids).logits, make("llama", {**PATTERN, "phase": "blocked"})(ids).logits
    )


def test_at_a_prompt():
    """As a list's sort does: what changes in place returns nothing. A model would print pages."""
    model = make("llama", None)
    assert convert_to_dilated(model, PATTERN) is None
    assert len(repr(context_parallel(model, ContextParallel()))) < 100


def test_one_segment_is_the_dense_model():
    """Nothing is lost where a segment at rate 1 holds everything."""
    model, ids = make("llama", None), tokens(2, 20)
    expected = model(ids, use_cache=False).logits
    convert_to_dilated(model, DilatedPattern.dense())
    torch.testing.assert_close(model(ids).logits, expected, rtol=1e-9, atol=1e-9)


REFUSED = {
    "another library's": (
        lambda: nn.Linear(4, 4),
        "must be a PreTrainedModel of transformers, got Linear",
    ),
    "sliding window": (
        lambda: MistralForCausalLM(MistralConfig(**SIZES, **GROUPED)),
        "MistralForCausalLM has sliding_window=4096: a sliding window is another pattern",
    ),
    "some sliding layers": (
        lambda: Qwen3ForCausalLM(
            Qwen3Config(**SIZES, **GROUPED, use_sliding_window=True, max_window_layers=1)
        ),
        "Qwen3ForCausalLM has layers of sliding_attention: dilated attention replaces full_attention alone",
    ),
    "too few heads": (
        lambda: make("llama", None),
        "gives each of 5 branches its own heads, but there are only 4",
    ),
    "another causality": (
        lambda: make("bert", None),
        "the pattern has is_causal=True, but the attention of",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_refused(kind):
    make_model, said = REFUSED[kind]
    model = make_model()
    before = (
        str(getattr(model, "config", None)),
        getattr(getattr(model, "config", None), "_attn_implementation", None),
    )
    five = DilatedPattern([2] * 5, [1] * 5, heads="split")
    pattern = (
        five
        if kind == "too few heads"
        else DilatedPattern((4, 9), (1, 3), is_causal=kind == "another causality")
    )
    with pytest.raises(ValueError) as caught:
        convert_to_dilated(model, pattern)
    assert said in str(caught.value)
    after = (
        str(getattr(model, "config", None)),
        getattr(getattr(model, "config", None), "_attn_implementation", None),
    )
    assert after == before


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
