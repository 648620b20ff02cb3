"""Which positions mattered: weights of queries against the definition, and what influence sees."""

import pytest
import torch
from helpers import randn
from PIL import Image
from torch import nn

from ring_dilated_attention import ContextParallel, DilatedPattern, MultiheadDilatedAttention
from ring_dilated_attention.layers import attention_weights, influence
from ring_dilated_attention.pictures import draw_influence

PATTERNS = [
    DilatedPattern((8, 32), (1, 4)),
    DilatedPattern((8, 32), (1, 3), is_causal=True),
    DilatedPattern((16,), (2,), window=6),
]


def layer(pattern, **options):
    torch.manual_seed(0)
    return MultiheadDilatedAttention(24, 4, pattern, dtype=torch.float64, **options)


def attended(module, weights, x):
    _, _, value = module._heads(x, x, x, None)
    value = value.repeat_interleave(4 // value.shape[2], dim=2)
    return module.out_proj(torch.einsum("bqhn,bnhd->bqhd", weights, value).flatten(2))


GROUPED = {"num_kv_heads": 2, "rotary": True}
DOCUMENTS = {"cu_seqlens": torch.tensor([0, 20, 45], dtype=torch.int32)}
WITH_A_GAP = {"positions": torch.cat([torch.arange(20), torch.arange(500, 525)])}
PADDED = {"key_padding_mask": torch.arange(45) >= torch.tensor([[45], [30]])}


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize(
    ("options", "given"),
    [
        ({}, {}),
        ({}, DOCUMENTS),
        (GROUPED, {}),
        (GROUPED, DOCUMENTS),
        (GROUPED, WITH_A_GAP),
        (GROUPED, {**WITH_A_GAP, **PADDED}),
    ],
)
def test_weights_rebuild_the_output(pattern, options, given):
    """More queries than dims, one of them twice; they add up to one and make the layer's output."""
    batch = 1 if "cu_seqlens" in given else 2
    module, x = layer(pattern, **options), randn(batch, 45, 24)
    queries = torch.tensor([0, 3, 3, 17, 20, 21, 38, 44])
    weights = attention_weights(module, x, queries, **given)
    assert weights.shape == (batch, 8, 4, 45)
    out, _ = module(x, x, x, **given)
    torch.testing.assert_close(attended(module, weights, x), out[:, queries])
    is_covered = pattern.without_keys(4)[0] == 0
    if is_covered:
        torch.testing.assert_close(weights[0].sum(-1), torch.ones(8, 4, dtype=torch.float64))
    if "cu_seqlens" in given:
        assert not weights[:, :4, :, 20:].any()
    if "key_padding_mask" in given:
        assert not weights[1, :, :, 30:].any()
        assert not weights[1, queries >= 30].any()


def test_queries_are_a_list_a_range_or_a_tensor():
    module, x = layer(PATTERNS[0]), randn(1, 8, 24)
    expected = attention_weights(module, x, torch.tensor([1, 2, 3]))
    for queries in ([1, 2, 3], range(1, 4), torch.tensor([1, 2, 3], dtype=torch.uint8)):
        assert torch.equal(attention_weights(module, x, queries), expected)


MASK, BORDERS = torch.zeros(1, 8, dtype=torch.bool), torch.tensor([0, 8], dtype=torch.int32)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        *(
            ({"queries": queries}, "queries must be integers below 8 and at least 0, the")
            for queries in ([[1, 2]], [True], [1.0], None, [8], [-1], torch.tensor([1.0]))
        ),
        (
            {"module": nn.TransformerEncoderLayer(24, 4, batch_first=True)},
            r"got TransformerEncoderLayer: .* pass layer\.self_attn",
        ),
        (
            {"module": layer(PATTERNS[0], parallel=ContextParallel())},
            "attention_weights is for one device",
        ),
        ({"positions": torch.arange(8)}, "only rotary embeddings read them"),
        ({"key_padding_mask": MASK, "cu_seqlens": BORDERS}, "pass one of them"),
    ],
)
def test_refusals(options, message):
    given = {"module": layer(PATTERNS[0]), "x": randn(1, 8, 24), "queries": [0], **options}
    with pytest.raises(ValueError, match=message):
        attention_weights(given.pop("module"), given.pop("x"), given.pop("queries"), **given)


@pytest.mark.parametrize("channels", [(), (3,)])
def test_influence_is_where_the_output_looks(channels):
    x, weight = torch.randn(2, 30, *channels), torch.randn(30)

    def first_channel(x):
        return x.reshape(2, 30, -1)[..., 0]

    with torch.no_grad():
        found = influence(lambda x: (first_channel(x) * weight).sum(1), x)
    torch.testing.assert_close(found, first_channel(x) * weight)


@pytest.mark.filterwarnings("ignore:the influences are .* off")  # with the coarse steps
def test_influence_adds_up_to_the_output():
    """Also where the output is saturated, and the gradient there is nearly zero."""
    module, x = layer(PATTERNS[0]), randn(2, 45, 24)
    x[:, 7] *= 30

    def output(x):
        return torch.tanh(module(x, x, x)[0].sum((1, 2)))

    with torch.no_grad():
        expected = output(x) - output(torch.zeros_like(x))
        coarse, fine = (influence(output, x, num_steps=steps).sum(1) for steps in (16, 400))
    torch.testing.assert_close(fine, expected, rtol=0, atol=0.05)
    assert (fine - expected).abs().max() <= (coarse - expected).abs().max() + 1e-3


def test_influence_warns_if_it_does_not_add_up():
    """As where LayerNorm reads x itself: near zeros its output jumps. The remedies that it names help."""
    x, baseline = randn(3, 9, 24), randn(1, 1, 24)
    normed = nn.Sequential(nn.LayerNorm(24), nn.Linear(24, 2)).double()

    def output(x):
        return normed(x).sum(1)

    with pytest.warns(
        UserWarning, match=r"off the output's change.*more steps than num_steps=16; .* baseline"
    ):
        influence(output, x)
    with torch.no_grad():
        change = (output(x) - output(torch.zeros_like(x))).sum(1)
    fine = influence(output, x, num_steps=3000).sum(1)
    torch.testing.assert_close(fine, change, rtol=0, atol=0.1 * float(change.norm()))
    influence(lambda d: output(baseline + d), x - baseline)
    with pytest.raises(ValueError, match="num_steps=0 must be at least 1"):
        influence(output, x, num_steps=0)


@pytest.mark.parametrize("num_outputs", [1, 4])
def test_influence_on_outputs_of_the_whole_batch(num_outputs):
    x = randn(1 if num_outputs > 1 else 3, 9)
    moved = influence(lambda x: x.sum() * torch.ones(num_outputs, dtype=x.dtype).squeeze(), x)
    torch.testing.assert_close(moved, num_outputs * x)


@pytest.mark.parametrize("num_positions", [7, 5000])
def test_a_picture(num_positions, tmp_path):
    """The one position that mattered is seen, however many share a column."""
    values = torch.zeros(num_positions)
    values[num_positions // 2] = -1
    for signal in (None, torch.randn(num_positions)):
        draw_influence(values, signal).savefig(tmp_path / "made.png", dpi=120)
        with Image.open(tmp_path / "made.png") as picture:
            colours = picture.convert("RGB").getcolors(2**24)
        reds = sum(count for count, (r, g, b) in colours if r > 180 and g < 90 and b < 90)
        assert reds > 20
