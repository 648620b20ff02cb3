"""Weights of slide encoders from files: what fits, what is refused, and that nothing is changed on the way."""

import pytest
import torch
from torch import nn
from torchscale_cases import SLIDES, TINY, Slide, fill

from ring_dilated_attention.models import LongNetViT, load_slide_encoder, segment_lengths_for
from ring_dilated_attention.models.longnet_vit import PUBLISHED

POOLED = SLIDES["aligned, pooled"]


@pytest.fixture(autouse=True)
def tiny_size(monkeypatch):
    """The size of `Slide` counts as published."""
    monkeypatch.setitem(PUBLISHED, "tiny", TINY)


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
        *TINY,
        16,
        segment_lengths=segment_lengths_for(),
        dilation_rates=(1, 2, 4, 8, 16),
        padding=padding,
    )
    weights = fill(model).state_dict()
    loaded = load_slide_encoder(save(weights, tmp_path / f"weights.{suffix}"), padding=padding)
    assert not loaded.training
    x, coords = POOLED.inputs()
    torch.testing.assert_close(loaded(x, coords), model(x, coords), rtol=1e-6, atol=1e-6)
    more = {**{f"module.{name}": x for name, x in weights.items()}, "mask_token": torch.ones(1)}
    path = save(more, tmp_path / f"more.{suffix}")
    with pytest.raises(
        ValueError, match="1 tensors that a LongNetViT has no place for: mask_token"
    ):
        load_slide_encoder(path, padding=padding)


def test_weights_that_are_refused(tmp_path):
    whole = fill(Slide(2048, 5, True).model()).state_dict()
    weights = dict(whole)
    del weights["encoder.layers.1.ffn.fc1.weight"]
    with pytest.raises(
        ValueError, match=r"few\.pth: .* LongNetViT: Missing key\(s\) .*encoder.layers.1.ffn.fc1"
    ):
        load_slide_encoder(save(weights, tmp_path / "few.pth"))
    with pytest.raises(
        ValueError,
        match="not hold a published slide encoder's weights: its cls_token has the shape None",
    ):
        load_slide_encoder(save({"a": torch.ones(2)}, tmp_path / "other.pth"))
    torch.save(nn.Linear(2, 2), tmp_path / "module.pth")
    with pytest.raises(
        ValueError, match=r"module\.pth cannot be read as weights: torch.load.* and it is not read"
    ):
        load_slide_encoder(tmp_path / "module.pth")
    path = save(whole | {"cls_token": torch.ones(1, 1, 0)}, tmp_path / "narrow.pth")
    with pytest.raises(ValueError, match=r"cls_token has the shape \(1, 1, 0\)"):
        load_slide_encoder(path)
    path = save(whole, tmp_path / "bit.pth")
    damaged = bytearray(path.read_bytes())
    damaged[damaged.find(whole["norm.weight"].numpy().tobytes())] ^= 1
    path.write_bytes(damaged)
    with pytest.raises(
        ValueError, match=r"bit\.pth cannot be read as weights: it is damaged: the checksum of"
    ):
        load_slide_encoder(path)
    torch.save([1, 2], tmp_path / "list.pth")
    with pytest.raises(ValueError, match=r"list\.pth holds no tensors by name, but a list"):
        load_slide_encoder(tmp_path / "list.pth")
    for name in ("damaged.pth", "damaged.safetensors"):
        (tmp_path / name).write_bytes(b"weights")
        with pytest.raises(ValueError, match=f"{name} cannot be read"):
            load_slide_encoder(tmp_path / name)
    with pytest.raises(ValueError, match=r"none\.pth cannot be read as weights: .*No such file"):
        load_slide_encoder(tmp_path / "none.pth")


@pytest.mark.parametrize(
    "change", [torch.Tensor.bool, torch.Tensor.char, torch.Tensor.cfloat], ids=str
)
def test_weights_that_would_become_other_numbers(change, tmp_path):
    """torch casts them without a word."""
    weights = Slide(2048, 5, True).model().float().state_dict()
    weights["norm.weight"] = change(weights["norm.weight"])
    with pytest.raises(ValueError, match=r"norm\.weight is torch\.\S+, expected floating numbers"):
        load_slide_encoder(save(weights, tmp_path / "weights.pth"))


@pytest.mark.parametrize("number", [torch.nan, torch.inf, -torch.inf, 1e39])
def test_weights_that_are_not_finite(number, tmp_path):
    """Also those that are so once they are of the model's dtype."""
    weights = Slide(2048, 5, True).model().double().state_dict()
    weights["norm.bias"][3] = number
    said = r"weights\.pth: norm\.bias holds NaN or inf as torch\.float32$"
    with pytest.raises(ValueError, match=said):
        load_slide_encoder(save(weights, tmp_path / "weights.pth"))


@pytest.mark.parametrize("width", [768, 384])
def test_weights_of_a_published_width_that_are_no_published_ones(width, tmp_path):
    """Those that lack their last layers, or take other features, are of another model, however well they would load."""
    [name] = [name for name, size in PUBLISHED.items() if size.embed_dim == width]
    with torch.device("meta"):
        whole = LongNetViT.published(name).state_dict()
    path = tmp_path / "other.pth"
    shorter = {key: x for key, x in whole.items() if "layers.11." not in key}
    narrower = whole | {"patch_embed.proj.weight": torch.empty(width, 1024, device="meta")}
    for weights, why in (
        (shorter, r"Missing key\(s\) in state_dict: \"encoder\.layers\.11\."),
        (narrower, r"size mismatch for patch_embed\.proj\.weight"),
    ):
        save({key: torch.zeros(1).expand(x.shape) for key, x in weights.items()}, path)
        with pytest.raises(ValueError, match=rf"other\.pth: .*{why}"):
            load_slide_encoder(path)


def test_weights_of_another_size(tmp_path):
    """Catches 16 heads of weights that do not tell their number."""
    path = save(
        LongNetViT(5, 48, 1, 8, segment_lengths=(8,), dilation_rates=(1,)).state_dict(),
        tmp_path / "own.pth",
    )
    message = (
        r"own\.pth .* has the shape \(1, 1, 48\), and not \(1, 1, 768\) or .*: make a LongNetViT"
    )
    with pytest.raises(ValueError, match=message):
        load_slide_encoder(path)


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
        load_slide_encoder(path)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float8_e4m3fn])
def test_weights_of_another_dtype(dtype, tmp_path):
    """The model is of float32, whatever they are."""
    weights = {name: x.to(dtype) for name, x in Slide(2048, 5, True).model().state_dict().items()}
    loaded = load_slide_encoder(save(weights, tmp_path / "weights.pth"))
    assert all(torch.equal(x, weights[name].float()) for name, x in loaded.state_dict().items())


def test_segment_lengths_are_those_of_the_tile_size(tmp_path):
    path = save(Slide(2048, 5, True).model().state_dict(), tmp_path / "weights.pth")
    model = load_slide_encoder(path, tile_size=512)
    assert (model.tile_size, model.encoder.pattern.segment_lengths) == (
        512,
        segment_lengths_for(tile_size=512),
    )


def test_weights_under_other_names_are_refused(tmp_path):
    weights = {f"slide_encoder.{name}": x for name, x in fill(POOLED.model()).state_dict().items()}
    with pytest.raises(
        ValueError, match=r"has no place for: slide_encoder\.cls_token.* have a prefix"
    ):
        load_slide_encoder(save(weights, tmp_path / "tuned.pth"))
