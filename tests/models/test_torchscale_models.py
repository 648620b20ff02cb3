"""LongNetEncoder against what torchscale's computed, names and shapes included."""

import copy
import math
import re

import pytest
import torch
from distributed import run
from torch import nn
from torchscale_cases import ENCODERS, kept

from benchmarks.measure import allocated
from ring_dilated_attention import ContextParallel, DilatedPattern
from ring_dilated_attention.models import (
    LongNetEncoder,
    TorchscaleConfig,
    map_names,
)

SMALL = TorchscaleConfig((8, 16), (1, 2), num_layers=1, embed_dim=8, num_heads=2, ffn_dim=12)


@pytest.mark.parametrize("name", ENCODERS)
def test_equals_what_torchscale_computed(name):
    case = ENCODERS[name]
    model = case.model()
    out = model(case.embeddings())
    assert out.shape == (2, case.length, 16)
    torch.testing.assert_close(out, kept()[f"encoder: {name}"], rtol=1e-12, atol=1e-12)
    single = copy.deepcopy(model).float()(case.embeddings().float())
    torch.testing.assert_close(single.double(), out, rtol=1e-4, atol=1e-5)


def test_initial_weights_are_scaled():
    """MAGNETO's factor on value, output and feed-forward, beside linear maps that draw the same numbers."""
    [layer] = LongNetEncoder(SMALL).layers
    torch.manual_seed(0)
    factor = math.sqrt(math.log(2))
    for name, (num_in, num_out, scale) in {
        "self_attn.k_proj": (8, 8, 1.0),
        "self_attn.v_proj": (8, 8, factor),
        "self_attn.q_proj": (8, 8, 1.0),
        "self_attn.out_proj": (8, 8, factor),
        "ffn.fc1": (8, 12, factor),
        "ffn.fc2": (12, 8, factor),
    }.items():
        found, plain = layer.get_submodule(name), nn.Linear(num_in, num_out)
        torch.testing.assert_close(found.weight, plain.weight * scale)
        torch.testing.assert_close(found.bias, plain.bias * scale)


def rank_computes(rank, world_size, name):
    case = ENCODERS[name]
    cp = ContextParallel()
    model = case.model(parallel=cp, activation_checkpointing=world_size == 3)
    out = cp.unshard(model(cp.shard(case.embeddings())))
    torch.testing.assert_close(out, case.model()(case.embeddings()), rtol=1e-11, atol=1e-11)
    if name != "misaligned":  # whose branches are calls of their own
        before = cp.ranks.calls
        model(cp.shard(case.embeddings())).sum().backward()
        assert cp.ranks.calls - before == len(model.layers)  # also where layers are recomputed
    with pytest.raises(
        ValueError, match=r"embeddings have shape \(1, 2, 7\), not \(batch, N, 16\)"
    ):
        model(torch.zeros(1, 2, 7 if rank == 1 else 16, dtype=torch.float64))


@pytest.mark.parametrize(("world_size", "name"), [(3, "LongViT"), (2, "misaligned")])
def test_on_ranks(world_size, name):
    """Zero rows are those of the whole, wherever it is cut; no attention is computed and sent twice; one rank's bad
    input stops all."""
    run(world_size, rank_computes, name)


def test_activation_checkpointing_holds_less():
    config = TorchscaleConfig(**{**vars(SMALL), "num_layers": 6, "embed_dim": 32, "ffn_dim": 128})
    x = torch.zeros(1, 1024, 32)
    models = [LongNetEncoder(config, activation_checkpointing=kept) for kept in (False, True)]
    plain, recomputed = (allocated(lambda m=m: m(x).sum().backward()).peak_bytes for m in models)
    assert recomputed < 0.6 * plain


def test_map_names():
    """Names inside other names; what has no place is listed by its own name."""
    model = LongNetEncoder(SMALL)
    own = model.state_dict()
    wrapped = {f"module.encoder._fsdp_wrapped_module.{name}": x for name, x in own.items()}
    others = {"module.decoder.version": torch.ones(1)}
    mapped = map_names(wrapped | others, model, prefix="encoder.")
    assert mapped.state_dict.keys() == own.keys()
    assert mapped.left == [*others]
    model.load_state_dict(mapped.state_dict)
    others = {"model.layer_norm.weight": torch.ones(8), "step": 3}
    assert map_names(own | others, model).left == [*others]


UNSUPPORTED = {
    "moe_freq": 2,
    "multiway": True,
    "rel_pos_buckets": 32,
    "xpos_rel_pos": True,
    "deepnorm": True,
    "subln": False,
    "encoder_normalize_before": False,
    "activation_fn": "relu",
    "no_scale_embedding": False,
    "layernorm_embedding": True,
    "layernorm_eps": 1e-6,
    "decoder_layers": 3,
}


def test_settings_of_no_consequence_are_read_as_they_are():
    others = settings(dropout=0.25, drop_path_rate=0.1, vocab_size=11, no_output_layer=True)
    assert TorchscaleConfig.from_torchscale(others, padding="exact") == TorchscaleConfig(
        (8, 16), (1, 2), num_layers=2, embed_dim=16, num_heads=4, ffn_dim=24, padding="exact"
    )


def test_an_encoder_takes_a_pattern():
    """Any pattern, with exact padding: the first states after a change of the last are those that the pattern lets."""
    pattern = DilatedPattern((8,), (1,), window=3, is_causal=True)
    sizes = {"num_layers": 1, "embed_dim": 8, "num_heads": 2, "ffn_dim": 12}
    config = TorchscaleConfig(pattern, padding="exact", **sizes)
    assert TorchscaleConfig(**vars(config)).pattern == pattern
    model, x = LongNetEncoder(config), torch.randn(1, 20, 8)
    assert model.layers[0].self_attn.pattern == pattern
    before = model(x)
    x[:, 15] = torch.randn(8)
    assert ((model(x) - before).abs().amax(-1) > 1e-6).nonzero()[:, 1].tolist() == [15, 16, 17]


def settings(**changes):
    return {**ENCODERS["GigaPath"].settings(), **changes}


def config(**changes):
    return TorchscaleConfig(**{**vars(SMALL), **changes})


STATES = torch.zeros(1, 7, 8)
DENSE = DilatedPattern((8,), (1,))
OUTPUTS = (
    "vocab_size=11 adds an output layer, and no published encoder has one: set no_output_layer"
)


def from_torchscale(**changes):
    return TorchscaleConfig.from_torchscale(settings(**changes))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        *(
            (
                lambda name=name, value=value: from_torchscale(**{name: value}),
                f"{name}={value!r} is not supported: every published encoder has {name}=",
            )
            for name, value in UNSUPPORTED.items()
        ),
        (lambda: from_torchscale(vocab_size=11), OUTPUTS),
        (lambda: from_torchscale(segment_length=None), "have no segment_length: they are not"),
        (lambda: from_torchscale(segment_length="[a]"), "segment_lengths='[a]' is not a list of"),
        (lambda: config(num_heads=3), "embed_dim=8 is not a multiple of num_heads=3"),
        (lambda: config(num_layers=0), "num_layers=0 must be"),
        (lambda: config(ffn_dim="12"), "ffn_dim='12' must be"),
        (lambda: config(normalize_output=1), "normalize_output=1 must be"),
        # zero rows are those of torchscale's patterns
        (lambda: TorchscaleConfig(DENSE), "leave out dilation_rates, and pass padding='exact'"),
        (lambda: TorchscaleConfig(DENSE, dilation_rates=(1,), padding="exact"), "leave out"),
        (lambda: LongNetEncoder(None), "config must be a TorchscaleConfig, got None"),
        (lambda: LongNetEncoder(SMALL, activation_checkpointing=1), "must be True or False, got 1"),
        (lambda: LongNetEncoder(SMALL)([[1.0]]), "embeddings must be a tensor, got list"),
        (lambda: LongNetEncoder(SMALL)(STATES.long()), "dtype torch.int64, not floating"),
        (lambda: LongNetEncoder(SMALL)(STATES[..., :7]), "shape (1, 7, 7), not (batch, N, 8)"),
    ],
)
def test_what_is_refused(call, words):
    """Catches errors of torch and Python in the place of a sentence, and arguments that are taken and ignored."""
    with pytest.raises(ValueError, match=re.escape(words)):
        call()
