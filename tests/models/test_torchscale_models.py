"""LongNetEncoder and LongNetDecoder against what torchscale's computed, names and shapes included."""

import copy
import re

import checkout
import pytest
import torch
from distributed import run
from torchscale_cases import SEQUENCES, fill, kept

from benchmarks.measure import allocated
from ring_dilated_attention import ContextParallel, DilatedPattern
from ring_dilated_attention.models import (
    LongNetDecoder,
    LongNetEncoder,
    TorchscaleConfig,
    map_names,
    torchscale_attention,
)
from ring_dilated_attention.models.documents import agree_on_documents

needs_torchscale = pytest.mark.skipif(bool(checkout.why_not("TORCHSCALE_CHECKOUT")), reason="no checkout of torchscale")
SMALL = TorchscaleConfig(
    (8, 16), (1, 2), num_layers=1, embed_dim=8, num_heads=2, ffn_dim=12, num_tokens=11, num_logits=11
)


def tolerance(name):
    """torchscale makes XPOS's angles in float32, also for a float64 model."""
    return 2e-5 if "xpos" in name else 1e-12


@pytest.mark.parametrize("name", SEQUENCES)
def test_equals_what_torchscale_computed(name):
    case = SEQUENCES[name]
    model = case.model()
    out = model(case.tokens())
    assert out.shape[:2] == (2, case.length)
    torch.testing.assert_close(out, kept()[f"sequence: {name}"], rtol=tolerance(name), atol=tolerance(name))
    if "xpos" not in name:
        single = copy.deepcopy(model).float()(case.tokens())
        torch.testing.assert_close(single.double(), out, rtol=1e-4, atol=1e-5)


@needs_torchscale
@pytest.mark.parametrize("name", SEQUENCES)
def test_loads_torchscales_state_dict(name):
    """Every name and shape of the original, strictly; its config read as `vars` gives it; kept results are its own."""
    case = SEQUENCES[name]
    original = fill(case.original_model())
    model = case.model(vars(case.original_config()))
    result = model.load_state_dict(original.state_dict(), strict=True)
    assert not result.missing_keys
    assert not result.unexpected_keys
    torch.testing.assert_close(case.original(), kept()[f"sequence: {name}"], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(
        model(case.tokens()), kept()[f"sequence: {name}"], rtol=tolerance(name), atol=tolerance(name)
    )


SCALED = ("v_proj", "out_proj", "fc1", "fc2")


@needs_torchscale
@pytest.mark.parametrize("name", [name for name in SEQUENCES if name.startswith("encoder of")])
def test_scales_are_torchscales(name):
    """Of residuals and of initial weights: theirs beside those of a model that scales nothing."""
    case = SEQUENCES[name]
    config = TorchscaleConfig.from_torchscale(vars(case.original_config()), side=case.side, num_tokens=11)
    models = []
    for options in (case.options, {"subln": False}):
        torch.manual_seed(0)
        models.append(case._replace(options=options).original_model())
    scaled, plain = (dict(model.layers.named_parameters()) for model in models)
    assert config.residual_scale == pytest.approx(models[0].layers[0].alpha, rel=1e-12)
    for key, x in plain.items():
        factor = config.initial_scale if key.split(".")[-2] in SCALED else 1.0
        torch.testing.assert_close(scaled[key], x * factor, rtol=1e-6, atol=0)


@pytest.mark.parametrize("settings", [{}, {"deepnorm": True, "sub_layernorm": False}, {"num_decoder_layers": 3}])
def test_initial_weights_are_scaled(settings):
    models = []
    for options in (settings, {"sub_layernorm": False}):
        torch.manual_seed(0)
        models.append(LongNetEncoder(TorchscaleConfig(**{**vars(SMALL), **options})))
    scaled, plain = (dict(model.layers.named_parameters()) for model in models)
    assert models[0].config.initial_scale != 1
    for key, x in plain.items():
        factor = models[0].config.initial_scale if key.split(".")[-2] in SCALED else 1.0
        torch.testing.assert_close(scaled[key], x * factor)


@pytest.mark.parametrize("name", ["encoder", "decoder"])
def test_padding_exact_is_another_function_where_lengths_do_not_divide(name):
    case = SEQUENCES[name]
    model = case.model()
    exact = type(model)(TorchscaleConfig(**{**vars(model.config), "padding": "exact"})).double()
    exact.load_state_dict(model.state_dict())
    with torch.no_grad():
        difference = (exact(case.tokens()) - model(case.tokens())).abs().max()
        whole = case.tokens()[:, :16]
        torch.testing.assert_close(exact(whole), model(whole), rtol=1e-12, atol=1e-12)
    assert (difference == 0) == (name == "decoder")  # causal patterns hide the zero rows


def rank_computes(rank, world_size, name):
    case = SEQUENCES[name]
    cp = ContextParallel()
    model = case.model(parallel=cp, activation_checkpointing=world_size == 3)
    out = cp.unshard(model(cp.shard(case.tokens())))
    torch.testing.assert_close(out, case.model()(case.tokens()), rtol=1e-11, atol=1e-11)
    borders = torch.tensor([0, 13, 14, case.length], dtype=torch.int32)
    tokens = case.tokens()[:1]
    outs = [case.model()(some) for some in tokens.tensor_split([13, 14], dim=1)]
    out = cp.unshard(model(cp.shard(tokens), cu_seqlens=borders))
    torch.testing.assert_close(out, torch.cat(outs, 1), rtol=1e-11, atol=1e-11)
    before = cp.ranks.calls
    model(cp.shard(tokens)).sum().backward()
    assert cp.ranks.calls - before == len(model.layers)  # also where layers are recomputed
    if model.layers[0].self_attn.xpos is not None:
        model.layers[0].self_attn.xpos.scale_base = 0.01
        with pytest.raises(ValueError, match=r"from the middle of a document, and XPOS .*torch\.float64 after 5:"):
            model(cp.shard(tokens))
    with pytest.raises(ValueError, match="tokens from 0 to 11, but num_tokens=11"):
        model(torch.tensor([[0, 11 if rank == 1 else 1]]))


@pytest.mark.parametrize(("world_size", "name"), [(2, "encoder, learned positions"), (3, "decoder, xpos")])
def test_on_ranks(world_size, name):
    """Positions, zero rows and documents are those of the whole, wherever it is cut; no attention is computed and sent
    twice; one rank's bad token stops all."""
    run(world_size, rank_computes, name)


def test_xpos_that_grows_beyond_the_dtype_within_a_document():
    """Catches rows that are infinite far from the middle of a document, where segments are short: all out was NaN."""
    model = LongNetEncoder(TorchscaleConfig(**{**vars(SMALL), "segment_lengths": (14, 14), "xpos_scale_base": 0.3}))
    assert model(torch.zeros(1, 20, dtype=int)).isfinite().all()
    with pytest.raises(ValueError, match=r"of up to 28 from the middle of a document, and XPOS .* after 21:"):
        model(torch.zeros(1, 55, dtype=int))


def test_activation_checkpointing_changes_nothing():
    case = SEQUENCES["encoder"]
    gradients = []
    for checkpointing in (False, True):
        model = case.model(activation_checkpointing=checkpointing)
        model(case.tokens()).sin().sum().backward()
        gradients.append([x.grad for x in model.parameters()])
    for plain, recomputed in zip(*gradients, strict=True):
        assert torch.equal(plain, recomputed)


def test_activation_checkpointing_holds_less():
    config = TorchscaleConfig(**{**vars(SMALL), "num_layers": 6, "embed_dim": 32, "ffn_dim": 128})
    tokens = torch.zeros(1, 1024, dtype=int)
    models = [LongNetEncoder(config, activation_checkpointing=checkpointing) for checkpointing in (False, True)]
    plain, recomputed = (allocated(lambda m=model: m(tokens).sum().backward()).peak_bytes for model in models)
    assert recomputed < 0.6 * plain


def test_feed_forward_in_slices_without_gradients(monkeypatch):
    case = SEQUENCES["encoder"]
    model = case.model()
    expected = model(case.tokens())
    monkeypatch.setattr("ring_dilated_attention.models.torchscale.networks.FFN_SLICE_NUMBERS", 24 * 5)
    with torch.no_grad():
        torch.testing.assert_close(model(case.tokens()), expected, rtol=1e-13, atol=1e-13)


def test_collected_states_are_before_the_last_layernorm():
    model = fill(LongNetEncoder(SMALL).double())
    tokens = torch.arange(10)[None]
    states = model(tokens, collect=torch.clone)
    assert [tuple(x.shape) for x in states] == [(1, 10, 8)] * 2
    torch.testing.assert_close(model.output_projection(model.layer_norm(states[-1])), model(tokens))


def test_map_names():
    """Names inside other names; what has no place is listed by its own name."""
    model = LongNetEncoder(SMALL)
    own = model.state_dict()
    wrapped = {f"module.encoder._fsdp_wrapped_module.{name}": x for name, x in own.items()}
    mapped = map_names({**wrapped, "module.decoder.version": torch.ones(1)}, model, prefix="encoder.")
    assert mapped.state_dict.keys() == own.keys()
    assert mapped.left == ["module.decoder.version"]
    model.load_state_dict(mapped.state_dict)
    assert map_names(own, model).left == []
    mapped = map_names({**own, "model.layer_norm.weight": torch.ones(8), "step": 3}, model)
    assert mapped.left == ["model.layer_norm.weight", "step"]


def test_cross_attention_is_refused():
    """By its name, where it belongs to the part that is mapped: what is left would be another model."""
    own = LongNetEncoder(SMALL).state_dict()
    cross = {"layers.0.encoder_attn.k_proj.weight": torch.ones(8, 8)}
    whole = {f"encoder.{name}": x for name, x in own.items()} | {f"decoder.{name}": x for name, x in cross.items()}
    for given, prefix in ((own | cross, ""), (whole, "decoder.")):
        with pytest.raises(ValueError, match=r"layers\.0\.encoder_attn\.k_proj\.weight belongs to cross-attention"):
            map_names(given, LongNetEncoder(SMALL), prefix=prefix)
    assert map_names(whole, LongNetEncoder(SMALL), prefix="encoder.").state_dict.keys() == own.keys()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layer_norm.weight": None}, "missing layer_norm.weight"),
        ({"layer_norm.wait": torch.ones(8)}, "unknown layer_norm.wait"),
        ({"layer_norm.weight": torch.ones(7)}, r"layer_norm.weight is \(7,\), expected \(8,\)"),
        ({"layer_norm.weight": "x"}, r"layer_norm.weight is a str, expected \(8,\)"),
    ],
)
def test_weights_that_do_not_fit_change_nothing(change, message):
    model, other = LongNetEncoder(SMALL), fill(LongNetEncoder(SMALL))
    before = {name: x.clone() for name, x in model.state_dict().items()}
    given = {**other.state_dict(), **change}
    given = {name: x for name, x in given.items() if x is not None}
    with pytest.raises(ValueError, match=f"do not fit this LongNetEncoder, which is unchanged: {message}"):
        model.load_state_dict(given)
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
    if "expected" in message:
        with pytest.raises(ValueError, match=message):
            model.load_state_dict(given, strict=False)
    else:
        result = model.load_state_dict(given, strict=False)
        assert [*result.missing_keys, *result.unexpected_keys] == list(change)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"moe_freq": 2}, "moe_freq=2 is not supported: mixtures of experts"),
        ({"multiway": True}, "multiway=True is not supported"),
        ({"rel_pos_buckets": 32}, "rel_pos_buckets=32 is not supported"),
        ({"segment_length": None}, "have no segment_length: these are not those of a LongNet"),
        ({"segment_length": "[a]"}, r"segment_lengths='\[a\]' is not a list of integers"),
        ({"activation_fn": "tanh"}, "activation='tanh' is unknown; choose one of"),
        ({"encoder_attention_heads": 3}, "embed_dim=16 is not a multiple of num_heads=3"),
    ],
)
def test_settings_that_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        TorchscaleConfig.from_torchscale({**SEQUENCES["encoder"].settings(), **settings})


def test_a_side_is_asked_for_where_there_are_both():
    """An EncoderDecoderConfig has sizes of its own for each."""
    encoder, decoder = (SEQUENCES[name].settings() for name in ("encoder", "decoder"))
    both = {**decoder, **encoder, "encoder_layers": 3, "decoder_layers": 5}
    with pytest.raises(ValueError, match="have encoder_layers and decoder_layers: pass side='encoder' or"):
        TorchscaleConfig.from_torchscale(both)
    for side, num_layers in (("encoder", 3), ("decoder", 5)):
        config = TorchscaleConfig.from_torchscale(both, side=side, is_encoder_decoder=False, num_tokens=11)
        assert (config.num_layers, config.num_decoder_layers, config.num_logits) == (num_layers, None, 11)
    with pytest.raises(ValueError, match="side='decoder', but the settings have neither"):
        TorchscaleConfig.from_torchscale(encoder, side="decoder")
    with pytest.raises(ValueError, match="side='left' is unknown"):
        TorchscaleConfig.from_torchscale(both, side="left")


def test_a_side_of_an_encoder_decoder():
    """Its encoder has no output layer, whatever is shared; its decoder has cross-attention."""
    encoder = {**SEQUENCES["encoder"].settings(), "share_encoder_input_output_embed": True}
    both = {**encoder, "decoder_layers": 5}
    config = TorchscaleConfig.from_torchscale(both, side="encoder", num_tokens=11)
    assert (config.num_logits, config.num_decoder_layers, config.shares_embedding) == (None, 5, False)
    with pytest.raises(ValueError, match="has cross-attention, which is not supported: pass is_encoder_decoder=False"):
        TorchscaleConfig.from_torchscale(both, side="decoder", num_tokens=11)
    with pytest.raises(ValueError, match="have no decoder_layers, on which an encoder's scales depend"):
        TorchscaleConfig.from_torchscale(encoder, is_encoder_decoder=True)
    with pytest.raises(ValueError, match="num_decoder_layers=5 is for an encoder: a decoder takes None"):
        LongNetDecoder(config)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"padding": "zeros"}, "padding='zeros' is unknown; choose one of"),
        ({"num_layers": 0}, "num_layers=0 must be a whole number, at least 1"),
        ({"num_decoder_layers": 0}, "num_decoder_layers=0 must be a whole number, at least 1"),
        ({"num_layers": 2.0}, "num_layers=2.0 must be a whole number"),
        ({"deepnorm": True}, "deepnorm=True is for models without sub-LayerNorms"),
        ({"shares_embedding": True, "num_logits": 12}, "num_tokens=11 and num_logits=12"),
        ({"embed_dim": 6, "xpos_scale_base": 512}, "xpos with a head dim of 3"),
        ({"xpos_scale_base": 0}, "xpos_scale_base=0 must be a number, positive and finite"),
    ],
)
def test_configs_that_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        TorchscaleConfig(**{**vars(SMALL), **options})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "give tokens or embeddings="),
        ({"tokens_BN": [[1]]}, "tokens must be a tensor, got list"),
        ({"embeddings": torch.ones(1, 5, 8).long()}, "embeddings have dtype torch.int64, not floating"),
        ({"tokens_BN": torch.zeros(1, 3)}, "dtype torch.float32: pass integers"),
        ({"tokens_BN": torch.tensor([[11]])}, "tokens from 11 to 11, but num_tokens=11"),
        ({"embeddings": torch.zeros(1, 3, 7)}, r"shape \(1, 3, 7\), not \(batch, N, 8\)"),
        ({"embeddings": torch.zeros(1, 3, 8), "cu_seqlens": torch.tensor([0, 3])}, "1-D int32"),
        ({"embeddings": torch.zeros(2, 3, 8), "cu_seqlens": torch.tensor([0, 3]).int()}, "batch must be 1, got 2"),
        ({"tokens_BN": torch.zeros(1, 3, dtype=int), "cu_seqlens": torch.tensor([0, 2], dtype=torch.int32)}, "length"),
    ],
)
def test_input_that_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        LongNetEncoder(SMALL)(**arguments)


def test_more_positions_than_were_learned():
    model = LongNetEncoder(TorchscaleConfig(**{**vars(SMALL), "num_learned_positions": 10}))
    assert model(torch.zeros(1, 8, dtype=int)).shape == (1, 8, 11)
    with pytest.raises(ValueError, match=r"has 9 positions, and 8 were learned \(10 rows, the first 2"):
        model(torch.zeros(1, 9, dtype=int))


@pytest.mark.parametrize(
    ("dtype", "longest", "remedy"),
    [
        (torch.float16, 16, "bfloat16 or float32"),
        (torch.bfloat16, 140, "float64"),
        (torch.float32, 140, "float64"),
        (torch.float64, 1132, "shorter documents"),
    ],
)
def test_more_positions_than_xpos_grows_over(dtype, longest, remedy):
    """Its tables are finite up to there; beyond all was NaN, without a word."""
    config = TorchscaleConfig(**{**vars(SMALL), "xpos_scale_base": 1.0})
    model = LongNetDecoder(config).to(dtype)
    _, _, growth = model.layers[0].self_attn.xpos.tables(agree_on_documents("test", torch.empty(1, longest)))
    assert torch.stack((growth, 1 / growth)).to(dtype).isfinite().all()
    half = longest // 2
    with pytest.raises(ValueError, match=rf"up to {half + 1} from the middle .* {dtype} after {half}: take {remedy}"):
        model(torch.zeros(1, longest + 1, dtype=int))


@pytest.mark.parametrize("padding", ["torchscale", "exact"])
def test_xpos_without_causality_grows_with_the_whole_distance(padding):
    """Queries see keys from one end of a segment to the other: NaN from half of a decoder's length on, it was."""
    more = {"xpos_scale_base": 1.0, "padding": padding, "segment_lengths": (8, 100), "num_logits": None}
    model = fill(LongNetEncoder(TorchscaleConfig(**{**vars(SMALL), **more})))
    assert model(torch.arange(68)[None] % 11).isfinite().all()
    with pytest.raises(ValueError, match=r"up to 72 between queries and keys, and XPOS .*float32 after 70: take"):
        model(torch.zeros(1, 72, dtype=int))
    short = LongNetEncoder(TorchscaleConfig(**{**vars(SMALL), **more, "segment_lengths": (8, 16)}))
    assert short(torch.arange(139)[None] % 11).isfinite().all()


@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")
@pytest.mark.parametrize("kind", [LongNetEncoder, LongNetDecoder])
def test_xpos_compiles_as_one_graph(kind):
    model = kind(TorchscaleConfig(**{**vars(SMALL), "xpos_scale_base": 512.0, "padding": "exact"}))
    embeddings = torch.randn(1, 20, 8)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        torch.testing.assert_close(compiled(embeddings=embeddings), model(embeddings=embeddings))


def test_without_tokens_or_without_logits():
    config = TorchscaleConfig(**{**vars(SMALL), "num_tokens": None, "num_logits": None})
    assert LongNetEncoder(config)(embeddings=torch.zeros(1, 5, 8)).shape == (1, 5, 8)
    with pytest.raises(ValueError, match="embeds no tokens"):
        LongNetEncoder(config)(torch.zeros(1, 5, dtype=int))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_tokens", 0),
        ("num_logits", -1),
        ("num_learned_positions", 2.0),
        ("num_tokens", True),
        ("xpos_scale_base", "512"),
        ("xpos_scale_base", True),
        ("layernorm_eps", float("nan")),
        ("layernorm_eps", None),
        ("normalize_before", None),
        ("deepnorm", 1),
    ],
)
def test_a_config_that_cannot_be(name, value):
    """Catches a size that torch stumbles on when the model is made, and a switch that is neither on nor off."""
    with pytest.raises(ValueError, match=f"{name}={value!r} must be"):
        TorchscaleConfig(**{**vars(SMALL), name: value})


TOKENS = torch.zeros(1, 7, dtype=torch.int64)
X = torch.zeros(1, 7, 2, 4)
BLOCKED = DilatedPattern((4, 8), (1, 2), phase="blocked")
SETTINGS = {"segment_length": "[4, 8]", "dilated_ratio": "[1, 2]", "encoder_layers": 1}


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: LongNetEncoder(None), "config must be a TorchscaleConfig, got None"),
        (
            lambda: LongNetEncoder(SMALL, activation_checkpointing=1),
            'activation_checkpointing must be True, False or "offload", got 1',
        ),
        (lambda: LongNetEncoder(SMALL, parallel=2)(TOKENS), "parallel must be a ContextParallel or None, got 2"),
        (lambda: LongNetEncoder(SMALL)(TOKENS.bool()), "dtype torch.bool: pass integers"),
        (lambda: LongNetEncoder(SMALL)(TOKENS.to_sparse()), "pass a dense tensor of numbers"),
        (lambda: LongNetEncoder(SMALL)(TOKENS.to("meta")), "pass a dense tensor of numbers"),
        (lambda: LongNetEncoder(SMALL)(TOKENS, collect=3), "collect must be a function or None, got 3"),
        (lambda: torchscale_attention(X, X, X, BLOCKED, return_lse=1), "return_lse must be True or False, got 1"),
        (
            lambda: torchscale_attention(X, X, X, BLOCKED, parallel="x"),
            "parallel must be a ContextParallel or None, got 'x'",
        ),
        (
            lambda: TorchscaleConfig.from_torchscale({**SETTINGS, "vocab_size": "x"}),
            "vocab_size='x' must be a whole number",
        ),
    ],
)
def test_what_models_cannot_take(call, words):
    """Catches errors of torch and Python in the place of a sentence, and arguments that are taken and ignored."""
    with pytest.raises(ValueError, match=re.escape(words)):
        call()
