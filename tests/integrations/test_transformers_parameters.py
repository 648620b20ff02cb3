"""What `rda plan model` weighs from a config.json, against the models that transformers builds of it."""

import json

import pytest
import torch
from helpers import ROOT
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from benchmarks.measure import allocated
from ring_dilated_attention import DilatedPattern, save_attention
from ring_dilated_attention.commands.plan.decoders import transformers_decoder
from ring_dilated_attention.forecast.model_weight import weigh_activations
from ring_dilated_attention.integrations.transformers import register
from ring_dilated_attention.models.recompute import loss_slice_rows
from ring_dilated_attention.plan.exchange import plan_exchange
from ring_dilated_attention.plan.sharded_call import ShardedCall
from ring_dilated_attention.plan.sharding import make_shards
from ring_dilated_attention.plan.step import Sizes
from ring_dilated_attention.simulate.weighing import weigh_attention

CONFIGS = sorted((ROOT / "tests" / "data" / "configs").glob("*.json"))
WINDOWED = ("gemma2", "gemma3_text")  # whose layers ask for windows: they are refused
# Of a family, those that its config has.
SIZES = {
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 256,
    "sliding_window": None,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def build(model_type, **fields):
    return AutoModelForCausalLM.from_config(CONFIG_MAPPING[model_type](**fields))


def decoder_of(folder, fields, pattern):
    """Of a config.json that is written for it."""
    path = folder / "config.json"
    path.write_text(json.dumps(fields))
    return transformers_decoder(path, pattern)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_public_models_have_the_parameters_that_are_counted(path, tmp_path):
    fields = json.loads(path.read_text())
    pattern = DilatedPattern((2048, 16384), (1, 4), is_causal=True)
    if fields["model_type"] in WINDOWED:
        with pytest.raises(ValueError, match=r"sliding_attention|attn_logit_softcapping"):
            decoder_of(tmp_path, fields, pattern)
        return
    fields["sliding_window"] = None
    decoder = decoder_of(tmp_path, fields, pattern)
    with torch.device("meta"):
        assert decoder.num_parameters == build(**fields).num_parameters()
    # Files of models whose products are not all those of nn.Linear say how many weights a token is multiplied by.
    assert fields.get("matrix_entries", decoder.matrix_entries) == decoder.matrix_entries


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model_type": "nothing"}, "model type `nothing` but Transformers does not recognize"),
        ({"hidden_size": 8}, "Should have a `model_type`"),
        ({"model_type": "llama", "hidden_size": "x"}, "'hidden_size' expected int"),
        ({"model_type": "bert"}, "BertLMHeadModel"),
        ({"model_type": "qwen3_moe", "mlp_only_layers": [0, 1]}, "its blocks differ"),
    ],
)
def test_models_that_cannot_be_weighed_are_refused(fields, message, tmp_path):
    said = rf"^--config \S+json.*: .*{message}"
    with pytest.raises(ValueError, match=said):
        decoder_of(tmp_path, fields, DilatedPattern((32,), (1,), is_causal=True))


def measured(model, seq_len):
    """Bytes that are held at the peak of a step, by torch's allocator. The loss is summed over slices, as under
    `parallel`; gradients of an earlier backward are kept."""
    vocab_size = model.config.vocab_size
    tokens = torch.randint(3, vocab_size, (1, seq_len))
    rows = loss_slice_rows(vocab_size)

    def loss_of_rows(hidden, labels):
        return cross_entropy(model.lm_head(hidden).float(), labels, reduction="sum")

    def loss():
        slices = model.base_model(tokens, use_cache=False)[0].flatten(0, 1).split(rows)
        pairs = zip(slices, tokens.flatten().split(rows), strict=True)
        return sum(
            checkpoint(loss_of_rows, *pair, use_reentrant=False, preserve_rng_state=False)
            for pair in pairs
        )

    loss().backward()
    return allocated(lambda: loss().backward()).peak_bytes


@pytest.mark.parametrize("activations", ["kept", "checkpointed"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma", "gpt_neox", "phi3", "starcoder2"])
def test_a_step_holds_what_is_weighed(family, activations, tmp_path):
    """Within 5 %, with three layers, of which two are weighed."""
    register()
    n, known = 1024, CONFIG_MAPPING[family]()
    fields = {name: x for name, x in SIZES.items() if hasattr(known, name)}
    fields["model_type"] = family
    rules = {"segment_lengths": [32, n], "dilation_rates": [1, 4]}
    model = build(**fields, dilated_attention=rules)
    if activations == "checkpointed":
        model.gradient_checkpointing_enable({"use_reentrant": False, "context_fn": save_attention})
    pattern = DilatedPattern(**rules, is_causal=True)
    decoder = decoder_of(tmp_path, fields, pattern)
    sharded_call = ShardedCall(
        pattern, make_shards("contiguous", (n,)), decoder.num_heads, decoder.num_kv_heads
    )
    sizes = Sizes(1, decoder.head_dim, 4, torch.get_num_threads())
    attention = weigh_attention(plan_exchange("none", sharded_call, 0), sizes, "cpu")
    weighed = weigh_activations(decoder, 1, n, torch.float32, attention)[activations]
    assert weighed == pytest.approx(measured(model.train(), n), rel=0.05)
