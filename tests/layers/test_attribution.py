"""Which positions mattered: weights of queries against the definition, and what influence sees."""

import pytest
import torch
from helpers import randn
from PIL import Image

from ring_dilated_attention import ContextParallel, DilatedPattern, MultiheadDilatedAttention
from ring_dilated_attention.layers import attention_weights, draw_influence, influence

PATTERNS = [
    DilatedPattern((8, 32), (1, 4)),
    DilatedPattern((8, 32), (1, 3), is_causal=True),
    DilatedPattern((16,), (2,), window=6),
]


def layer(pattern, **options):
    torch.manual_seed(0)
    return MultiheadDilatedAttention(24, 4, pattern, dtype=torch.float64, **options)


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("options", [{}, {"num_kv_heads": 2, "rotary": True}])
@pytest.mark.parametrize("documents", [False, True])
def test_weights_rebuild_the_output(pattern, options, documents):
    """More queries than dims, one of them twice; they add up to one and make the layer's output."""
    module, x = layer(pattern, **options), randn(1 if documents else 2, 45, 24)
    cu_seqlens = torch.tensor([0, 20, 45], dtype=torch.int32) if documents else None
    queries = torch.tensor([0, 3, 3, 17, 20, 21, 38, 44])
    weights = attention_weights(module, x, queries, cu_seqlens=cu_seqlens)
    assert weights.shape == (len(x), 8, 4, 45)
    is_covered = pattern.without_keys(4)[0] == 0
    if is_covered:
        torch.testing.assert_close(weights.sum(-1), torch.ones_like(weights[..., 0]))
    _, _, value = module._heads(x, x, x, None)
    value = value.repeat_interleave(4 // value.shape[2], dim=2)
    attended = torch.einsum("bqhn,bnhd->bqhd", weights, value).flatten(2)
    out, _ = module(x, x, x, cu_seqlens=cu_seqlens)
    torch.testing.assert_close(module.out_proj(attended), out[:, queries])
    if documents:
        assert not weights[:, :4, :, 20:].any()


def test_weights_of_ranks_are_refused():
    module = layer(PATTERNS[0], parallel=ContextParallel())
    with pytest.raises(ValueError, match="attention_weights is for one device"):
        attention_weights(module, randn(1, 45, 24), torch.tensor([0]))


def test_need_weights_names_what_computes_them():
    module, x = layer(PATTERNS[0]), randn(1, 8, 24)
    with pytest.raises(ValueError, match=r"layers\.attention_weights .* layers\.influence"):
        module(x, x, x, need_weights=True)


@pytest.mark.parametrize("channels", [(), (3,)])
def test_influence_is_where_the_output_looks(channels):
    x = torch.randn(2, 30, *channels)
    weight = torch.zeros(30)
    weight[[4, 21]] = torch.tensor([2.0, -1.0])

    def output(x):
        return (x.reshape(2, 30, -1)[..., 0] * weight).sum(1)

    with torch.no_grad():
        found = influence(output, x)
    torch.testing.assert_close(found, x.reshape(2, 30, -1)[..., 0] * weight)


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


@pytest.mark.parametrize("num_positions", [7, 5000])
def test_a_picture(num_positions, tmp_path):
    """The one position that mattered is seen, however many share a column."""
    values = torch.zeros(num_positions)
    values[num_positions // 2] = -1
    for signal in (None, torch.randn(num_positions)):
        draw_influence(tmp_path / "made.png", values, signal)
        with Image.open(tmp_path / "made.png") as picture:
            colours = picture.convert("RGB").getcolors(2**24)
        reds = sum(count for count, (r, g, b) in colours if r > 180 and g < 90 and b < 90)
        assert reds > 20
