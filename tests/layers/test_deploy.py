"""What leaves the training machine: exported files, and weights that say what they were trained with."""

import copy
import re
import subprocess
import sys
import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp
from distributed import preload, run
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.export import Dim

from ring_dilated_attention import DilatedPattern, MultiheadDilatedAttention
from ring_dilated_attention.models import (
    LongNetConfig,
    LongNetEncoder,
    LongNetLM,
    LongNetViT,
    TorchscaleConfig,
)

preload("torch.distributed.fsdp", "torch.distributed.checkpoint")
PATTERN = DilatedPattern((8, 32), (1, 4))


def layer(pattern=PATTERN, **options):
    torch.manual_seed(0)
    return MultiheadDilatedAttention(16, 4, pattern, **options)


class Padded(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.attention = layer(**options)

    def forward(self, x, mask):
        return self.attention(x, x, x, key_padding_mask=mask)[0]


class Whole(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = layer(rotary=True)

    def forward(self, x):
        return self.attention(x, x, x)[0]


def padded_batch(lengths, num_positions):
    x = torch.randn(len(lengths), num_positions, 16)
    mask = torch.arange(num_positions) >= torch.tensor(lengths)[:, None]
    return x.masked_fill(mask[..., None], torch.nan), mask  # padding must not be read


@pytest.fixture(scope="module")
def exported_folder(tmp_path_factory):
    """model.pt2, and expected.pt: an input and its output."""
    folder = tmp_path_factory.mktemp("exported")
    torch.manual_seed(0)
    module, x = Whole().eval(), torch.randn(1, 51, 16)
    with torch.no_grad():
        exported = torch.export.export(
            module, (torch.randn(1, 40, 16),), dynamic_shapes=({1: Dim("N", min=1)},)
        )
        torch.export.save(exported, folder / "model.pt2")
        torch.save((x, module(x)), folder / "expected.pt")
    return folder


@pytest.mark.parametrize(
    "first",
    [
        "ring_dilated_attention, torch",
        "torch, ring_dilated_attention",
        # as packages do that ask whether torch is there before they import it
        "ring_dilated_attention, importlib.util; importlib.util.find_spec('torch'); import torch",
    ],
    ids=["before torch", "after torch", "before torch, which is looked for first"],
)
def test_an_exported_file_loads_after_a_plain_import(first, exported_folder):
    """In either order of imports, and without the package's other files or torch's compiler until then."""
    code = f"""if True:
        import sys
        import {first}
        names = [name for name in sys.modules if name.startswith("ring_dilated_attention.")]
        assert set(names) <= {{"ring_dilated_attention.pattern"}}, names
        assert "torch._dynamo" not in sys.modules, "torch's compiler was imported"
        x, expected = torch.load("{exported_folder}/expected.pt")
        out = torch.export.load("{exported_folder}/model.pt2").module()(x)
        torch.testing.assert_close(out, expected)
    """
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, timeout=120)


@pytest.mark.parametrize(
    "options", [{}, {"rotary": True, "sub_layernorm": True, "num_kv_heads": 2}]
)
@pytest.mark.parametrize("lengths", [(37, 1, 0, 20), (37, 37)])
def test_a_padded_batch_compiles(options, lengths):
    """One graph, whose outputs and gradients are those of the call that is not compiled."""
    module = Padded(**options)
    x, mask = padded_batch(lengths, 37)
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    results = []
    for call in (module, compiled):
        rows = x.clone().requires_grad_()
        module.zero_grad()
        out = call(rows, mask)
        out[~mask].square().sum().backward()
        results.append([out, rows.grad, *(p.grad.clone() for p in module.parameters())])
    for found, expected in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_a_padded_batch_is_exported():
    """With a length of its own for each call; a wrong mask is refused as ever."""
    module = Padded(rotary=True).eval()
    with torch.no_grad():
        dims = {1: Dim("N", min=2)}
        exported = torch.export.export(
            module, padded_batch((40, 9), 40), dynamic_shapes=(dims, dims)
        ).module()
        for lengths, num_positions in (((40, 9), 40), ((3, 61), 64)):
            batch = padded_batch(lengths, num_positions)
            torch.testing.assert_close(exported(*batch), module(*batch))
        x, mask = padded_batch((3, 61), 64)
        with pytest.raises(ValueError, match="padding must be on the right"):
            exported(x, ~mask)


def test_weights_know_their_pattern():
    state = layer(rotary=True).state_dict()
    layer(rotary=True).load_state_dict(state)
    others = [
        layer(),
        layer(rotary=500.0),
        layer(DilatedPattern((8, 32), (1, 4), phase="blocked"), rotary=True),
        layer(DilatedPattern((8, 32), (1, 4), window=4), rotary=True),
    ]
    for other in others:
        for strict in (True, False):
            with pytest.raises(
                ValueError, match=r"trained with DilatedPattern.*rotary_base=10000\.0"
            ):
                other.load_state_dict(state, strict=strict)


def test_a_part_of_a_model_without_attention_says_nothing():
    """A warning would be an error here. A part with some of the attention's weights still warns."""
    model = nn.Sequential(layer(), nn.Linear(16, 16))
    weights = model.state_dict()
    linear = {name: x for name, x in weights.items() if name.startswith("1.")}
    assert "0._extra_state" in model.load_state_dict(linear, strict=False).missing_keys
    layer().load_state_dict({}, strict=False)
    part = {"0.out_proj.weight": weights["0.out_proj.weight"]}
    with pytest.warns(UserWarning, match="do not say with which pattern"):
        model.load_state_dict(part, strict=False)


def test_averaged_weights_are_told_why():
    module = layer()
    averaged = {name: x * 0.9 + x * 0.05 for name, x in module.state_dict().items()}
    with pytest.raises(ValueError, match="was averaged with the weights, as by an EMA"):
        module.load_state_dict(averaged)


def test_weights_know_their_pattern_in_any_file(tmp_path):
    """In a file of safetensors, of torch.save, and cast with the weights; in parts of a model too."""
    model = nn.Sequential(layer(rotary=True), nn.Linear(16, 16))
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    torch.save(model.state_dict(), tmp_path / "model.pt")
    states = [
        load_file(tmp_path / "model.safetensors"),
        torch.load(tmp_path / "model.pt", weights_only=True),
        {name: x.bfloat16() for name, x in model.state_dict().items()},
    ]
    for state in states:
        nn.Sequential(layer(rotary=True), nn.Linear(16, 16)).load_state_dict(state)
        with pytest.raises(ValueError, match="it would be another function"):
            nn.Sequential(layer(), nn.Linear(16, 16)).load_state_dict(state)
    copy.deepcopy(model).load_state_dict(states[0])


def test_another_pattern_is_loaded_by_those_who_mean_it():
    """By what the error says."""
    state = layer(rotary=True).state_dict()
    other = layer(DilatedPattern.dense())
    with pytest.raises(ValueError, match=r"leave the names that end in '\w+' out") as said:
        other.load_state_dict(state)
    [ending] = re.findall(r"end in '(\w+)'", str(said.value))
    named = {name: x for name, x in state.items() if not name.endswith(ending)}
    with pytest.warns(UserWarning, match="do not say with which pattern"):
        other.load_state_dict(named)
    assert torch.equal(other.in_proj_weight, state["in_proj_weight"])


def test_a_refused_layer_keeps_its_weights():
    module = layer()
    before = copy.deepcopy(module.state_dict())
    other = {name: x + 1 for name, x in layer(rotary=True).state_dict().items()}
    other["_extra_state"] -= 1
    with pytest.raises(ValueError, match="it would be another function"):
        module.load_state_dict(other)
    for name, x in module.state_dict().items():
        assert torch.equal(x, before[name])


def test_older_weights_load_with_one_warning():
    model = nn.Sequential(layer(), layer(), layer())
    older = {name: x for name, x in model.state_dict().items() if "_extra_state" not in name}
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("default")
        model.load_state_dict(older, strict=True)
    assert [str(warning.message)[:37] for warning in shown] == [
        "the weights do not say with which pat"
    ]


@pytest.mark.parametrize("padding", ["exact", "torchscale"])
def test_an_encoder_remembers_its_pattern(padding):
    def encoder(lengths):
        sizes = {"num_layers": 2, "embed_dim": 32, "num_heads": 4, "ffn_dim": 64}
        return LongNetEncoder(TorchscaleConfig(lengths, (1, 4), padding=padding, **sizes))

    weights = encoder((8, 32)).state_dict()
    encoder((8, 32)).load_state_dict(weights)
    other = encoder((16, 32))
    before = {name: x.clone() for name, x in other.named_parameters()}
    with pytest.raises(ValueError, match="it would be another function"):
        other.load_state_dict(weights)
    assert all(torch.equal(x, before[name]) for name, x in other.named_parameters())
    published = {name: x for name, x in weights.items() if not name.endswith("_extra_state")}
    with pytest.warns(UserWarning, match="do not say with which pattern") as shown:
        other.load_state_dict(published)
    assert len(shown) == 1


def test_a_published_slide_encoder_takes_weights_of_any_slide_size():
    def slide_encoder(padding, lengths=(8, 32)):
        rules = {"segment_lengths": lengths, "dilation_rates": (1, 4), "padding": padding}
        return LongNetViT(4, 32, 1, 4, slide_ngrids=8, **rules)

    weights = slide_encoder("torchscale").state_dict()
    assert not any(name.endswith("_extra_state") for name in weights)
    slide_encoder("torchscale", (16, 64)).load_state_dict(weights)
    with pytest.raises(ValueError, match="it would be another function"):
        slide_encoder("exact", (16, 64)).load_state_dict(slide_encoder("exact").state_dict())


@pytest.mark.parametrize(
    "state",
    [
        torch.tensor([1, 2, 3], dtype=torch.uint8),
        torch.tensor(list(b'{"pattern": {"stride": 3}, "rotary_base": null}'), dtype=torch.uint8),
        torch.empty(0, dtype=torch.uint8),
        None,
    ],
    ids=["damaged", "of another version", "empty", "none"],
)
def test_a_damaged_state_is_refused_in_a_sentence(state):
    module = layer()
    weights = module.state_dict() | {"_extra_state": state}
    with pytest.raises(ValueError, match="does not say with which pattern they were trained"):
        module.load_state_dict(weights)


def test_torch_loads_a_pattern(tmp_path):
    pattern = DilatedPattern((8, 32), (1, 4), window=6, is_causal=True)
    torch.save({"pattern": pattern}, tmp_path / "made.pt")
    loaded = torch.load(tmp_path / "made.pt", weights_only=True)["pattern"]
    assert loaded == pattern
    assert loaded.text == pattern.text


def through_dcp(rank, world_size, folder):
    """FSDP2's shards are saved and loaded; another pattern is refused; and so with a whole state_dict."""
    mesh = init_device_mesh("cpu", (world_size,))

    def sharded(**options):
        model = nn.Sequential(layer(**options), nn.Linear(16, 16))
        return fully_shard(model, mesh=mesh)

    model = sharded(rotary=True)
    state = get_model_state_dict(model)
    dcp.save(state, checkpoint_id=folder)
    loaded = get_model_state_dict(sharded(rotary=True))
    dcp.load(loaded, checkpoint_id=folder)
    set_model_state_dict(sharded(rotary=True), loaded)
    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    options = StateDictOptions(full_state_dict=True)
    set_model_state_dict(sharded(rotary=True), copy.deepcopy(whole), options=options)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(sharded(rotary=True), whole if rank == 0 else {}, options=options)
    with pytest.raises(ValueError, match="it would be another function"):
        set_model_state_dict(sharded(rotary=500.0), loaded)


def test_fsdp2_and_distributed_checkpoints_hold_the_pattern(tmp_path):
    run(2, through_dcp, tmp_path)


@pytest.mark.parametrize("kind", ["encoder", "language model"])
def test_models_are_exported_for_one_length(kind):
    sizes = {"num_layers": 1, "embed_dim": 32, "num_heads": 4, "ffn_dim": 64}
    if kind == "encoder":
        model = LongNetEncoder(TorchscaleConfig((8, 32), (1, 4), **sizes))
        x = torch.randn(1, 40, 32)
    else:
        model = LongNetLM(LongNetConfig((8, 32), (1, 4), **sizes))
        x = torch.arange(40)[None]
    with torch.no_grad():
        exported = torch.export.export(model.eval(), (x,)).module()
        torch.testing.assert_close(exported(x), model(x))
        with pytest.raises(torch._dynamo.exc.UserError, match="specialized it to be a constant"):
            torch.export.export(model, (x,), dynamic_shapes=({1: Dim("N", min=2, max=1000)},))


def test_torch_is_not_imported_by_a_plain_import():
    code = "import sys, ring_dilated_attention; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
