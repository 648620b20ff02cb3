"""Weights of slide encoders from files: what fits, what is refused, and that nothing is changed on the way."""

from functools import partial

import pytest
import torch
from torch import nn
from torchscale_cases import SLIDES, Slide, fill

from ring_dilated_attention.models import LongNetViT, load_slide_encoder, segment_lengths_for
from ring_dilated_attention.models.weights import slide_encoder_size

POOLED = SLIDES["aligned, pooled"]
load = partial(load_slide_encoder, num_heads=16)


def save(weights, path):
    if path.suffix == ".safetensors":
        from safetensors.torch import save_file

        save_file(weights, path)
    else:
        torch.save({"model": weights}, path)
    return path


@pytest.mark.parametrize("padding", ["torchscale", "exact"])
@pytest.mark.parametrize("suffix", ["pth", "safetensors"])
def test_load_slide_encoder(tmp_path, suffix, padding):
    """The size is that of the weights; their dtype is float32, as the model's."""
    model = LongNetViT(
        5,
        32,
        2,
        16,
        slide_ngrids=20,
        segment_lengths=segment_lengths_for(),
        dilation_rates=(1, 2, 4, 8, 16),
        padding=padding,
    )
    weights = fill(model).state_dict()
    loaded = load(save(weights, tmp_path / f"weights.{suffix}"), padding=padding)
    assert not loaded.training
    x, coords = POOLED.inputs()
    torch.testing.assert_close(loaded(x, coords), model(x, coords), rtol=1e-6, atol=1e-6)
    more = {**{f"module.{name}": x for name, x in weights.items()}, "mask_token": torch.ones(1)}
    path = save(more, tmp_path / f"more.{suffix}")
    with pytest.raises(
        ValueError, match="1 tensors that a LongNetViT has no place for: mask_token"
    ):
        load(path, padding=padding)


def test_weights_that_are_refused(tmp_path):
    whole = fill(Slide(2048, 5, True).model()).state_dict()
    weights = dict(whole)
    del weights["encoder.layers.1.ffn.fc1.weight"]
    with pytest.raises(
        ValueError, match=r"few\.pth: .* LongNetViT: Missing key\(s\) .*encoder.layers.1.ffn.fc1"
    ):
        load(save(weights, tmp_path / "few.pth"))
    with pytest.raises(ValueError, match="not hold a slide encoder's weights: it has no cls_token"):
        load(save({"a": torch.ones(2)}, tmp_path / "other.pth"))
    torch.save(nn.Linear(2, 2), tmp_path / "module.pth")
    with pytest.raises(
        ValueError, match=r"module\.pth cannot be read as weights: torch.load.* and it is not read"
    ):
        load(tmp_path / "module.pth")
    path = save(whole | {"cls_token": torch.ones(1, 1, 0)}, tmp_path / "narrow.pth")
    with pytest.raises(ValueError, match=r"cls_token has shape \(1, 1, 0\)"):
        load(path)
    path = save(whole, tmp_path / "bit.pth")
    damaged = bytearray(path.read_bytes())
    damaged[damaged.find(whole["norm.weight"].numpy().tobytes())] ^= 1
    path.write_bytes(damaged)
    with pytest.raises(
        ValueError, match=r"bit\.pth cannot be read as weights: it is damaged: the checksum of"
    ):
        load(path)
    torch.save([1, 2], tmp_path / "list.pth")
    with pytest.raises(ValueError, match=r"list\.pth holds no tensors by name, but a list"):
        load(tmp_path / "list.pth")
    for name in ("damaged.pth", "damaged.safetensors"):
        (tmp_path / name).write_bytes(b"weights")
        with pytest.raises(ValueError, match=f"{name} cannot be read"):
            load(tmp_path / name)
    with pytest.raises(ValueError, match=r"none\.pth cannot be read as weights: .*No such file"):
        load(tmp_path / "none.pth")


@pytest.mark.parametrize(
    "change", [torch.Tensor.bool, torch.Tensor.char, torch.Tensor.cfloat], ids=str
)
def test_weights_that_would_become_other_numbers(change, tmp_path):
    """torch casts them without a word."""
    weights = Slide(2048, 5, True).model().float().state_dict()
    weights["norm.weight"] = change(weights["norm.weight"])
    with pytest.raises(ValueError, match=r"norm\.weight is torch\.\S+, expected floating numbers"):
        load(save(weights, tmp_path / "weights.pth"))


@pytest.mark.parametrize("number", [torch.nan, torch.inf, -torch.inf, 1e39])
def test_weights_that_are_not_finite(number, tmp_path):
    """Also those that are so once they are of the model's dtype."""
    weights = Slide(2048, 5, True).model().double().state_dict()
    weights["norm.bias"][3] = number
    said = r"weights\.pth: norm\.bias holds NaN or inf as torch\.float32$"
    with pytest.raises(ValueError, match=said):
        load(save(weights, tmp_path / "weights.pth"), dtype=torch.float32)


@pytest.mark.parametrize("name", ["gigapath", "gigapath-flash"])
def test_published_sizes_have_16_heads(name):
    """Others tell no number of heads, and are refused unless it is given."""
    with torch.device("meta"):
        weights = LongNetViT.published(name).state_dict()
    size = slide_encoder_size("weights.pth", weights, None, None)
    assert (size.depth, size.num_heads) == (12, 16)
    assert slide_encoder_size("weights.pth", weights, None, 12).num_heads == 12
    shorter = {key: x for key, x in weights.items() if "layers.11." not in key}
    narrower = weights | {"encoder.layers.0.ffn.fc1.bias": torch.empty(size.ffn_dim // 2)}
    fewer = weights | {"patch_embed.proj.weight": torch.empty(size.embed_dim, 1024)}
    for other, depth in ((shorter, 11), (narrower, None), (fewer, None)):
        with pytest.raises(
            ValueError, match=r"tell their number of heads: pass num_heads= \(--heads\)$"
        ):
            slide_encoder_size("weights.pth", other, depth, None)
        assert slide_encoder_size("weights.pth", other, depth, 8).num_heads == 8


def test_heads_that_are_not_told(tmp_path):
    path = save(Slide(2048, 5, True).model().state_dict(), tmp_path / "weights.pth")
    with pytest.raises(
        ValueError,
        match=r"weights\.pth holds 2 layers x 32 for 5 features of a tile, .* num_heads=",
    ):
        load_slide_encoder(path)
    assert load_slide_encoder(path, num_heads=8).encoder.config.num_heads == 8


@pytest.mark.parametrize("width", [768, 384])
def test_weights_that_lack_their_last_layers(width, tmp_path):
    """They load strictly as a shallower model, so that a published width asks for the published depth."""
    with torch.device("meta"):
        whole = LongNetViT(
            5, width, 2, 16, segment_lengths=(8,), dilation_rates=(1,), mlp_ratio=0.25
        ).state_dict()
    path = save({name: torch.zeros(x.shape) for name, x in whole.items()}, tmp_path / "short.pth")
    with pytest.raises(
        ValueError, match=rf"short\.pth holds 2 layers x {width}, and published .* have 12 layers"
    ):
        load(path)
    assert len(load(path, depth=2).encoder.layers) == 2
    with pytest.raises(
        ValueError, match="and you asked for 3 layers: some are missing, or pass depth=2"
    ):
        load(path, depth=3)


@pytest.mark.parametrize(
    ("last", "gap", "why"),
    [
        (2, 1, "no place for: encoder.layers.2.x"),
        (99_999_999_999, 2, "no place for: encoder.layers.99999999999.x"),
    ],
)
def test_layers_with_a_gap(last, gap, why, tmp_path):
    """Catches a depth that is believed from one name, and a model of so many layers."""
    weights = Slide(2048, 5, True).model().state_dict() | {
        f"encoder.layers.{last}.x": torch.ones(1)
    }
    weights = {name: x for name, x in weights.items() if f"layers.{gap}." not in name}
    path = save(weights, tmp_path / "gap.pth")
    with pytest.raises(ValueError, match=why):
        load(path)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float8_e4m3fn])
def test_weights_are_not_rounded(dtype, tmp_path):
    """The model is of the weights' dtype where that is wider than float32; another when told."""
    weights = {name: x.to(dtype) for name, x in Slide(2048, 5, True).model().state_dict().items()}
    path = save(weights, tmp_path / "weights.pth")
    loaded = load(path)
    assert loaded.cls_token.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert all(torch.equal(x, weights[name].to(x.dtype)) for name, x in loaded.state_dict().items())
    assert load(path, dtype=torch.float16).cls_token.dtype == torch.float16


def test_segment_lengths_are_those_of_the_tile_size(tmp_path):
    path = save(Slide(2048, 5, True).model().state_dict(), tmp_path / "weights.pth")
    model = load(path, tile_size=512)
    assert (model.tile_size, model.encoder.pattern.segment_lengths) == (
        512,
        segment_lengths_for(tile_size=512),
    )


def test_weights_under_other_names_are_refused(tmp_path):
    weights = {f"slide_encoder.{name}": x for name, x in fill(POOLED.model()).state_dict().items()}
    with pytest.raises(
        ValueError, match=r"has no place for: slide_encoder\.cls_token.* have a prefix"
    ):
        load(save(weights, tmp_path / "tuned.pth"))
