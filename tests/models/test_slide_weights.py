"""Weights of slide encoders from files: what fits, what is refused, and that nothing is changed on the way."""

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torchscale_cases import SLIDES, TINY, fill

from ring_dilated_attention.models import LongNetViT, load_slide_encoder, segment_lengths_for
from ring_dilated_attention.models.longnet_vit import PUBLISHED

POOLED = SLIDES["aligned, pooled"]


@pytest.fixture(autouse=True)
def tiny_size(monkeypatch):
    """The size of `Slide` counts as published."""
    monkeypatch.setitem(PUBLISHED, "tiny", TINY)


@pytest.fixture
def file(tmp_path):
    return tmp_path / "weights.pth"


def save(weights, path):
    if path.suffix == ".safetensors":
        save_file(weights, path)
    else:
        torch.save({"model": weights}, path)
    return path


def tiny_weights():
    return POOLED.model().state_dict()


@pytest.mark.parametrize(("suffix", "padding"), [("pth", "torchscale"), ("safetensors", "exact")])
def test_load_slide_encoder(tmp_path, suffix, padding):
    """The size is that of the weights; their dtype is float32, as the model's."""
    lengths = {"segment_lengths": segment_lengths_for(), "dilation_rates": (1, 2, 4, 8, 16)}
    model = fill(LongNetViT(*TINY, 16, **lengths, padding=padding))
    path = save(model.state_dict(), tmp_path / f"weights.{suffix}")
    loaded = load_slide_encoder(path, padding=padding)
    assert not loaded.training
    inputs = POOLED.inputs()
    torch.testing.assert_close(loaded(*inputs), model(*inputs), rtol=1e-6, atol=1e-6)


def with_a_gap(weights, last, gap):
    kept = {name: x for name, x in weights.items() if f"layers.{gap}." not in name}
    return kept | {f"encoder.layers.{last}.x": torch.ones(1)}


def with_prefix(weights, prefix):
    return {prefix + name: x for name, x in weights.items()}


def of_another_size():
    model = LongNetViT(5, 48, 1, 8, segment_lengths=(8,), dilation_rates=(1,))
    return model.state_dict()


def of_published_width(width, change):
    """Weights of a published size, changed: those of another model, however well they would load."""
    [name] = [name for name, size in PUBLISHED.items() if size.embed_dim == width]
    with torch.device("meta"):
        weights = change(LongNetViT.published(name).state_dict())
    return {key: torch.zeros(1).expand(x.shape) for key, x in weights.items()}


def without_last_layer(weights):
    return {key: x for key, x in weights.items() if "layers.11." not in key}


def with_other_features(weights):
    width = len(weights["patch_embed.proj.weight"])
    return weights | {"patch_embed.proj.weight": torch.empty(width, 1024)}


NOT_FLOATING = r"norm\.weight is torch\.\S+, expected floating numbers"
NOT_FINITE = r"weights\.pth: norm\.bias holds NaN or inf as torch\.float32$"
NO_LAST = r"Missing key\(s\) in state_dict: \"encoder\.layers\.11\."
NO_FIT = r"weights\.pth: .*size mismatch for patch_embed\.proj\.weight"
NO_PLACE = "tensors that a LongNetViT has no place for: "


def with_norm(change):
    """torch casts other kinds of numbers without a word."""
    return lambda weights: weights | {"norm.weight": change(weights["norm.weight"])}


def with_bias(number):
    return lambda weights: weights | {"norm.bias": torch.full((32,), number, dtype=torch.float64)}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda weights: {key: x for key, x in weights.items() if "1.ffn.fc1" not in key},
            r"weights\.pth: .* LongNetViT: Missing key\(s\) .*encoder.layers.1.ffn.fc1",
        ),
        (lambda _: {"a": torch.ones(2)}, "encoder's weights: its cls_token has the shape None"),
        (lambda weights: weights | {"cls_token": torch.ones(1, 1, 0)}, r"the shape \(1, 1, 0\)"),
        (lambda weights: weights | {"mask_token": torch.ones(1)}, f"1 {NO_PLACE}mask_token"),
        (lambda weights: with_prefix(weights, "module.") | {"x": torch.ones(1)}, f"1 {NO_PLACE}x"),
        (
            lambda weights: with_prefix(weights, "slide_encoder."),
            r"has no place for: slide_encoder\.cls_token.* have a prefix",
        ),
        # a depth that is believed from one name, and a model of so many layers
        (lambda weights: with_a_gap(weights, 2, 1), r"no place for: encoder\.layers\.2\.x"),
        (lambda weights: with_a_gap(weights, 10**11 - 1, 2), r"layers\.99999999999\.x"),
        (with_norm(torch.Tensor.bool), NOT_FLOATING),
        (with_norm(torch.Tensor.cfloat), NOT_FLOATING),
        (with_bias(torch.nan), NOT_FINITE),
        (with_bias(-torch.inf), NOT_FINITE),
        (with_bias(1e39), NOT_FINITE),  # once it is of the model's dtype
        # 16 heads of weights that do not tell their number
        (
            lambda _: of_another_size(),
            r"has the shape \(1, 1, 48\), and not \(1, 1, 768\) or .*: for another size m",
        ),
        (lambda _: of_published_width(768, without_last_layer), NO_LAST),
        (lambda _: of_published_width(384, with_other_features), NO_FIT),
    ],
)
def test_weights_that_are_refused(change, message, file):
    with pytest.raises(ValueError, match=message):
        load_slide_encoder(save(change(tiny_weights()), file))


def test_files_that_are_refused(tmp_path, file):
    torch.save(nn.Linear(2, 2), tmp_path / "module.pth")
    torch.save([1, 2], tmp_path / "list.pth")
    for name in ("damaged.pth", "damaged.safetensors"):
        (tmp_path / name).write_bytes(b"weights")
    save(tiny_weights(), file)
    damaged = bytearray(file.read_bytes())
    damaged[damaged.find(tiny_weights()["norm.weight"].numpy().tobytes())] ^= 1
    file.write_bytes(damaged)
    for name, message in (
        (
            "module.pth",
            r"module\.pth cannot be read as weights: torch.load.* nothing else may read",
        ),
        ("list.pth", r"list\.pth holds no tensors by name, but a list"),
        ("damaged.pth", r"damaged\.pth cannot be read"),
        ("damaged.safetensors", r"damaged\.safetensors cannot be read"),
        (file.name, "cannot be read as weights: the file is damaged: the checksum of"),
        ("none.pth", r"none\.pth cannot be read as weights: .*No such file"),
    ):
        with pytest.raises(ValueError, match=message):
            load_slide_encoder(tmp_path / name)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float8_e4m3fn])
def test_weights_of_another_dtype(dtype, file):
    """The model is of float32, whatever they are; and segments are those of its tile size."""
    weights = {name: x.to(dtype) for name, x in tiny_weights().items()}
    loaded = load_slide_encoder(save(weights, file), tile_size=512)
    assert all(torch.equal(x, weights[name].float()) for name, x in loaded.state_dict().items())
    lengths = loaded.encoder.pattern.segment_lengths
    assert (loaded.tile_size, lengths) == (512, segment_lengths_for(tile_size=512))
