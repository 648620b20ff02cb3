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


class Block(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.attention = layer(**options)

    def forward(self, x, mask=None):
        return self.attention(x, x, x, key_padding_mask=mask)[0]


def padded_batch(lengths, num_positions):
    x = torch.randn(len(lengths), num_positions, 16)
    mask = torch.arange(num_positions) >= torch.tensor(lengths)[:, None]
    return x.masked_fill(mask[..., None], torch.nan), mask  # padding must not be read


def test_an_exported_file_loads_after_a_plain_import(tmp_path):
    """After torch: `test_a_call_imports_few_files_and_no_compiler` has the other order. Until the op is looked up,
    there are no other files, and no compiler of torch's."""
    module, x = Block(rotary=True).eval(), torch.randn(1, 51, 16)
    with torch.no_grad():
        exported = torch.export.export(
            module, (torch.randn(1, 40, 16),), dynamic_shapes=({1: Dim("N", min=1)},)
        )
        torch.export.save(exported, tmp_path / "model.pt2")
        torch.save((x, module(x)), tmp_path / "expected.pt")
    code = """if True:
        import sys
        import torch, ring_dilated_attention
        names = [name for name in sys.modules if name.startswith("ring_dilated_attention.")]
        assert set(names) <= {"ring_dilated_attention.pattern"}, names
        assert "torch._dynamo" not in sys.modules, "torch's compiler was imported"
        x, expected = torch.load("expected.pt")
        out = torch.export.load("model.pt2").module()(x)
        torch.testing.assert_close(out, expected)
    """
    subprocess.run(
        [sys.executable, "-W", "error", "-c", code], check=True, timeout=120, cwd=tmp_path
    )


@pytest.mark.parametrize(
    ("options", "lengths"),
    [({}, (37, 37)), ({"rotary": True, "sub_layernorm": True, "num_kv_heads": 2}, (37, 1, 0, 20))],
)
def test_a_padded_batch_compiles(options, lengths):
    """One graph, whose outputs and gradients are those of the call that is not compiled."""
    module = Block(**options)
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
    module = Block(rotary=True).eval()
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


def model_of(**options):
    return nn.Sequential(layer(**options), nn.Linear(16, 16))


def test_weights_know_their_pattern_in_any_file(tmp_path):
    """In a file of safetensors, of torch.save, and cast with the weights. A layer that refuses them keeps its own."""
    model = model_of(rotary=True)
    state = {name: x if "extra" in name else x + 1 for name, x in model.state_dict().items()}
    save_file(state, tmp_path / "model.safetensors")
    torch.save(state, tmp_path / "model.pt")
    states = [
        state,
        load_file(tmp_path / "model.safetensors"),
        torch.load(tmp_path / "model.pt", weights_only=True),
        {name: x.bfloat16() for name, x in state.items()},
    ]
    others = [
        {},
        {"rotary": 500.0},
        {"rotary": True, "pattern": DilatedPattern((8, 32), (1, 4), phase="blocked")},
        {"rotary": True, "pattern": DilatedPattern((8, 32), (1, 4), window=4)},
    ]
    for state in states:
        model_of(rotary=True).load_state_dict(state)
        for options in others:
            module = layer(**options)
            before = copy.deepcopy(module.state_dict())
            of_layer = {name[2:]: x for name, x in state.items() if name.startswith("0.")}
            for strict in (True, False):
                with pytest.raises(ValueError, match=r"trained with Dil.*rotary_base=10000\.0"):
                    module.load_state_dict(of_layer, strict=strict)
                with pytest.raises(ValueError, match="it would compute another function"):
                    model_of(**options).load_state_dict(state, strict=strict)
            for name, x in module.state_dict().items():
                assert torch.equal(x, before[name])
    copy.deepcopy(model).load_state_dict(states[0])


def test_a_part_of_a_model_without_attention_says_nothing():
    """A warning would be an error here. A part with some of the attention's weights still warns."""
    model = model_of()
    weights = model.state_dict()
    linear = {name: x for name, x in weights.items() if name.startswith("1.")}
    assert "0._extra_state" in model.load_state_dict(linear, strict=False).missing_keys
    layer().load_state_dict({}, strict=False)
    part = {"0.out_proj.weight": weights["0.out_proj.weight"]}
    with pytest.warns(UserWarning, match="do not say with which pattern"):
        model.load_state_dict(part, strict=False)


def test_another_pattern_is_loaded_by_those_who_mean_it():
    """By what the error says, with one warning for all layers. So are older weights, which do not say theirs."""
    state = nn.Sequential(*[layer(rotary=True) for _ in range(3)]).state_dict()
    other = nn.Sequential(*[layer(DilatedPattern.dense()) for _ in range(3)])
    with pytest.raises(ValueError, match=r"leave the names that end in '\w+' out") as said:
        other.load_state_dict(state)
    [ending] = re.findall(r"end in '(\w+)'", str(said.value))
    named = {name: x for name, x in state.items() if not name.endswith(ending)}
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("default")
        other.load_state_dict(named, strict=True)
    assert ["do not say with which pattern" in str(x.message) for x in shown] == [True]
    assert torch.equal(other[2].in_proj_weight, state["2.in_proj_weight"])


def encoder(lengths, padding):
    sizes = {"num_layers": 2, "embed_dim": 32, "num_heads": 4, "ffn_dim": 64}
    return LongNetEncoder(TorchscaleConfig(lengths, (1, 4), padding=padding, **sizes))


def slide_encoder(lengths, padding):
    rules = {"segment_lengths": lengths, "dilation_rates": (1, 4), "padding": padding}
    return LongNetViT(4, 32, 1, 4, slide_ngrids=8, **rules)


@pytest.mark.parametrize("padding", ["exact", "torchscale"])
def test_an_encoder_remembers_its_pattern(padding):
    weights = encoder((8, 32), padding).state_dict()
    encoder((8, 32), padding).load_state_dict(weights)
    other = encoder((16, 32), padding)
    before = {name: x.clone() for name, x in other.named_parameters()}
    with pytest.raises(ValueError, match="it would compute another function"):
        other.load_state_dict(weights)
    assert all(torch.equal(x, before[name]) for name, x in other.named_parameters())
    published = {name: x for name, x in weights.items() if not name.endswith("_extra_state")}
    with pytest.warns(UserWarning, match="do not say with which pattern") as shown:
        other.load_state_dict(published)
    assert len(shown) == 1


def test_a_published_slide_encoder_takes_weights_of_any_slide_size():
    weights = slide_encoder((8, 32), "torchscale").state_dict()
    assert not any(name.endswith("_extra_state") for name in weights)
    slide_encoder((16, 64), "torchscale").load_state_dict(weights)
    state = slide_encoder((8, 32), "exact").state_dict()
    with pytest.raises(ValueError, match="it would compute another function"):
        slide_encoder((16, 64), "exact").load_state_dict(state)


NO_PATTERN = "does not say with which pattern they were trained"


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (torch.tensor([1, 2, 3], dtype=torch.uint8), NO_PATTERN),
        (
            torch.tensor(list(b'{"pattern": {"stride": 3}, "rotary_base": null}')).byte(),
            NO_PATTERN,  # of another version
        ),
        (torch.empty(0, dtype=torch.uint8), NO_PATTERN),
        (None, NO_PATTERN),
        (
            layer().state_dict()["_extra_state"] * 0.95,
            "was averaged with the weights, as by an EMA",
        ),
    ],
    ids=["damaged", "of another version", "empty", "none", "averaged"],
)
def test_a_damaged_state_is_refused_in_a_sentence(state, message):
    module = layer()
    with pytest.raises(ValueError, match=message):
        module.load_state_dict(module.state_dict() | {"_extra_state": state})


def through_dcp(rank, world_size, folder):
    """FSDP2's shards are saved and loaded; another pattern is refused; and so with a whole state_dict."""
    mesh = init_device_mesh("cpu", (world_size,))

    def sharded(**options):
        return fully_shard(model_of(**options), mesh=mesh)

    model = sharded(rotary=True)
    state = get_model_state_dict(model)
    dcp.save(state, checkpoint_id=folder)
    loaded = get_model_state_dict(sharded(rotary=True))
    dcp.load(loaded, checkpoint_id=folder)
    set_model_state_dict(sharded(rotary=True), loaded)
    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    for more, state in (({}, whole), ({"broadcast_from_rank0": True}, {} if rank else whole)):
        options = StateDictOptions(full_state_dict=True, **more)
        set_model_state_dict(sharded(rotary=True), copy.deepcopy(state), options=options)
    with pytest.raises(ValueError, match="it would compute another function"):
        set_model_state_dict(sharded(rotary=500.0), loaded)


def test_fsdp2_and_distributed_checkpoints_hold_the_pattern(tmp_path):
    run(2, through_dcp, tmp_path)


def test_models_are_exported_for_one_length():
    config = LongNetConfig((8, 32), (1, 4), num_layers=1, embed_dim=32, num_heads=4)
    models = [
        (encoder((8, 32), "exact"), torch.randn(1, 40, 32)),
        (LongNetLM(config), torch.arange(40)[None]),
    ]
    for model, x in models:
        with torch.no_grad():
            exported = torch.export.export(model.eval(), (x,)).module()
            torch.testing.assert_close(exported(x), model(x))
