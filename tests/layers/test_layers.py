"""MultiheadDilatedAttention against torch's module, against itself on single samples, and what it refuses."""

import random

import pytest
import torch
from distributed import run
from fuzz_modules import try_module
from helpers import randn
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from ring_dilated_attention import ContextParallel, DilatedPattern, MultiheadDilatedAttention
from ring_dilated_attention.layers import rotary_table

DILATED = DilatedPattern((8, 32), (1, 3))
CAUSAL = DilatedPattern((8, 32), (1, 3), is_causal=True)


def make(pattern=DILATED, embed_dim=24, num_heads=4, seed=0, **options):
    torch.manual_seed(seed)
    module = MultiheadDilatedAttention(
        embed_dim, num_heads, pattern, dtype=torch.float64, **options
    )
    if module.in_proj_bias is not None:  # zero biases would hide a bias that is left out
        nn.init.normal_(module.in_proj_bias)
        nn.init.normal_(module.out_proj.bias)
    return module


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("same_input", [False, True])
def test_equals_torch_with_its_weights(is_causal, bias, same_input):
    """Parameters keep torch's names and meaning: its state_dict loads, and outputs and gradients are equal."""
    theirs = nn.MultiheadAttention(24, 4, bias=bias, batch_first=True, dtype=torch.float64)
    ours = make(DilatedPattern((13,), (1,), is_causal=is_causal), bias=bias)
    theirs.load_state_dict(ours.state_dict(), strict=False)  # biases that are not 0
    ours.load_state_dict(theirs.state_dict(), strict=True)
    inputs = [randn(2, 13, 24)] * 3 if same_input else [randn(2, 13, 24) for _ in range(3)]
    mask = torch.ones(13, 13, dtype=torch.bool).triu(1) if is_causal else None
    expected, _ = theirs(*inputs, attn_mask=mask, need_weights=False)
    out, weights = ours(*inputs)
    assert weights is None
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    grad = randn(2, 13, 24)
    expected.backward(grad)
    out.backward(grad)
    for name, parameter in theirs.named_parameters():
        found = ours.get_parameter(name).grad
        torch.testing.assert_close(found, parameter.grad, rtol=1e-10, atol=1e-10)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32))
def test_any_module_equals_the_same_by_hand(seed):
    """Catches what no chosen case thought of: any pattern, shared keys, norms, rotary, packed and padded batches.
    Padding is NaN here: it is never read, has no gradient, and comes out as zeros before out_proj."""
    trial = try_module(random.Random(seed))
    assert trial.complaint is None, trial


def test_rotary_tells_neighbours_apart_beyond_float32_integers():
    """2^24 + 1 is no float32: angles of that dtype would be the same for both."""
    table = rotary_table(torch.tensor([2**24, 2**24 + 1]), 2, 10_000.0, torch.float32)
    turns = torch.complex(table.cos_ND, table.sin_ND)
    torch.testing.assert_close((turns[1] / turns[0]).angle(), torch.ones(1), rtol=1e-6, atol=1e-6)


def test_layers_share_a_rotary_table():
    """The same numbers as from positions, to the bit, in a padded batch and for packed documents too."""
    module, x = make(rotary=True), randn(2, 11, 24)
    positions = 3 * torch.arange(11)
    table = module.rotary_table(positions)
    padded = {"key_padding_mask": torch.arange(11) >= torch.tensor([[11], [4]])}
    packed = {"cu_seqlens": torch.tensor([0, 5, 11], dtype=torch.int32)}
    for options, inputs in (({}, x), (padded, x), (packed, x[:1])):
        expected = module(inputs, inputs, inputs, positions=positions, **options)[0]
        assert torch.equal(module(inputs, inputs, inputs, positions=table, **options)[0], expected)
    compiled = torch.compile(
        lambda x: module(x, x, x, positions=table)[0], fullgraph=True, backend="aot_eager"
    )
    torch.testing.assert_close(
        compiled(x), module(x, x, x, positions=positions)[0], rtol=1e-12, atol=1e-12
    )


def test_rotary_tables_are_float32_at_least():
    """Also for layers whose weights are 16-bit: an angle of 8 bits is none."""
    module = make(rotary=True, sub_layernorm=True)
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        table = module.to(dtype).rotary_table(torch.arange(5))
        wide = torch.promote_types(dtype, torch.float32)
        assert table.cos_ND.dtype == table.sin_ND.dtype == wide
    x = torch.randn(1, 9, 24, dtype=torch.bfloat16)
    assert module(x, x, x)[0].dtype == torch.bfloat16


def rotary_on_one_process(rank=0, world_size=1):
    """A context of one process has no name by which an op could find it: it is one device."""
    alone, module = make(rotary=True), make(rotary=True, parallel=ContextParallel())
    x, borders = randn(1, 60, 24), torch.tensor([0, 17, 60], dtype=torch.int32)
    for cu_seqlens in (None, borders):
        expected = alone(x, x, x, cu_seqlens=cu_seqlens)[0]
        assert torch.equal(module(x, x, x, cu_seqlens=cu_seqlens)[0], expected)
    compiled = torch.compile(lambda x: module(x, x, x)[0], fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x), alone(x, x, x)[0], rtol=1e-12, atol=1e-12)


def test_rotary_on_one_process():
    """Without torch.distributed, and as the only process of a job (torchrun --nproc-per-node 1)."""
    rotary_on_one_process()
    run(1, rotary_on_one_process)


def test_the_backend_is_the_callers():
    x = randn(1, 9, 24)
    auto, cpu, sdpa = (make(backend=backend) for backend in ("auto", "cpu", "sdpa"))
    assert torch.equal(auto(x, x, x)[0], cpu(x, x, x)[0])
    with pytest.raises(ValueError, match="backend='sdpa'"):
        sdpa(x, x, x)
    assert "backend='cpu'" in repr(cpu)
    assert "backend" not in repr(auto)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("padded", [False, True])
def test_a_causal_pattern_inside_torch_encoders(training, padded):
    """torch's layers pass is_causal=False where nobody said anything: the pattern's causality holds, in copies too."""
    layer = nn.TransformerEncoderLayer(
        24, 4, 32, dropout=0.0, batch_first=True, dtype=torch.float64
    )
    layer.self_attn = make(CAUSAL)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).train(training)
    x = randn(2, 21, 24)
    mask = torch.arange(21) >= torch.tensor([[21], [12]]) if padded else None
    with torch.set_grad_enabled(training):
        once, twice = (
            layer.train(training)(x, src_key_padding_mask=mask),
            encoder(x, src_key_padding_mask=mask),
        )
        hinted = encoder(x, src_key_padding_mask=mask, is_causal=True)
        changed = x.clone()
        changed[:, 10] += 1
        moved = (encoder(changed, src_key_padding_mask=mask) != twice).any(-1)
    attended = layer.self_attn(x, x, x, key_padding_mask=mask)[0]
    after = layer.norm1(x + attended)
    torch.testing.assert_close(
        once, layer.norm2(after + layer.linear2(layer.linear1(after).relu()))
    )
    assert torch.equal(hinted, twice)
    assert not moved[:, :10].any()
    assert moved[:, 10].all()


def test_gain_scales_value_and_output_only():
    """MAGNETO's initialisation leaves query and key alone."""
    module, weights = make(embed_dim=64, num_kv_heads=2), []
    for gain in (1.0, 3.0):
        torch.manual_seed(1)
        module.reset_parameters(gain=gain)
        rows = module.in_proj_weight.detach().clone().split((64, 32, 32))
        weights.append([*rows, module.out_proj.weight.detach().clone()])
    for before, after, factor in zip(*weights, (1, 1, 3, 3), strict=True):
        torch.testing.assert_close(after, factor * before)


def test_empty_sequence_keeps_the_graph():
    module = make(rotary=True, sub_layernorm=True)
    x = randn(2, 0, 24)
    out = module(x, x, x)[0]
    assert out.shape == (2, 0, 24)
    out.sum().backward()
    assert all(parameter.grad is not None for parameter in module.parameters())
    nobody = torch.ones(2, 0, dtype=torch.bool)
    assert module(x, x, x, key_padding_mask=nobody)[0].shape == (2, 0, 24)


def mask_of(*rows):
    return torch.tensor(rows).bool()


def table_of(head_dim, base):
    return rotary_table(torch.arange(6), head_dim, base, torch.float64)


SIX_HEADS = {"num_heads": 6, "pattern": DilatedPattern((8,), (2,))}


@pytest.mark.parametrize(
    ("made", "changed", "message"),
    [
        # by the constructor
        ({"dropout": 0.1}, {}, "dropout=0.1: attention dropout is not supported"),
        ({"batch_first": False}, {}, "batch_first=False: inputs are"),
        ({"embed_dim": 25}, {}, "embed_dim=25 is not a multiple of num_heads=4 .remainder 1."),
        ({"num_heads": 0}, {}, "num_heads=0 must be at least 1"),
        ({"embed_dim": 0}, {}, "embed_dim=0 and num_heads=4 must be at least 1"),
        ({"embed_dim": -4}, {}, "embed_dim=-4 and num_heads=4 must be at least 1"),
        ({"num_kv_heads": 3}, {}, "4 query heads cannot share 3 key/value heads: 4 mod 3 is not 0"),
        ({"embed_dim": 12, "rotary": True}, {}, "rotary with head_dim=3"),
        ({"rotary": 0.5}, {}, "rotary=0.5: the base must be a finite number greater than 1"),
        ({"rotary": 10**400}, {}, "rotary=1000"),
        ({"backend": "flash"}, {}, "backend='flash' is unknown"),
        ({"embed_dim": 24.0}, {}, "embed_dim must be an integer, got 24.0"),
        ({"bias": "no"}, {}, "bias must be True or False, got 'no'"),
        (
            {**SIX_HEADS, "heads_held": range(3, 5), "num_kv_heads": 3},
            {},
            "cut through a group of 2 query heads",
        ),
        (
            {**SIX_HEADS, "heads_held": range(4, 8)},
            {},
            r"not a range of consecutive heads within range\(6\)",
        ),
        ({**SIX_HEADS, "heads_held": 3}, {}, "heads_held=3 and num_heads=6: give both or none"),
        (
            {**SIX_HEADS, "heads_held": range(3), "sub_layernorm": True},
            {},
            "takes its mean over all 6 heads",
        ),
        # by a call
        (
            {},
            {"need_weights": True},
            r"are never formed; .*attention_weights .*layers.influence says",
        ),
        ({}, {"attn_mask": torch.zeros(6, 6)}, "attn_mask: the pattern decides which keys a query"),
        ({}, {"is_causal": True}, "is_causal=True, but the pattern has is_causal=False"),
        ({}, {"positions": torch.arange(6)}, "construct with rotary=True"),
        (
            {},
            {"key_padding_mask": [[False] * 6] * 2},
            "key_padding_mask must be a tensor, got list",
        ),
        (
            {},
            {"key_padding_mask": mask_of([0] * 5, [0] * 5)},
            r"shape \(2, 5\), the inputs need \(2, 6\)",
        ),
        (
            {},
            {"key_padding_mask": torch.zeros(2, 6, dtype=torch.int64)},
            "dtype torch.int64: pass a bool mask",
        ),
        ({}, {"key_padding_mask": torch.full((2, 6), 0.5)}, "values other than 0 and -inf"),
        (
            {},
            {"key_padding_mask": mask_of([0, 0, 0, 0, 1, 1], [0, 0, 1, 0, 0, 1])},
            r"row 1 has padding at position 2 and valid positions after it \(4 valid in all\)",
        ),
        (
            {},
            {"key_padding_mask": mask_of(*[[1, 1, 1, 1, 0, 0]] * 2)},  # inverted
            "row 0 has padding at position 0.*pass ~mask if yours is True at valid positions",
        ),
        (
            {},
            {"key_padding_mask": mask_of([1] * 6, [1] * 6)},
            "True everywhere, and no position is valid. True means padding: pass ~mask",
        ),
        (
            {},
            {
                "key_padding_mask": mask_of([0] * 6, [0] * 6),
                "cu_seqlens": torch.tensor([0, 6], dtype=torch.int32),
            },
            "pass one of them",
        ),
        (
            {"rotary": True},
            {"positions": torch.arange(6).double()},
            "positions have dtype torch.float64: pass integers",
        ),
        (
            {"rotary": True},
            {"positions": list(range(6))},
            "positions must be a tensor, got list",
        ),
        (
            {"rotary": True},
            {"positions": torch.arange(5)},
            r"positions have shape \(5,\), the inputs need \(6,\)",
        ),
        (
            {"rotary": True},
            {"positions": table_of(8, 1e4)},
            "head_dim=8 with base 10000.0, the inputs need one for 6 rows of",
        ),
        (
            {"rotary": True},
            {"positions": table_of(6, 500.0)},
            "with base 500.0, the inputs need one .* with base 10000.0",
        ),
        (
            {"embed_dim": 28},
            {},
            r"shape \(2, 6, 24\), not \(batch, positions, embed_dim=28\)",
        ),
        ({}, {"query": torch.ones(6, 24)}, r"query has shape \(6, 24\).*unsqueeze"),
        ({}, {"query": torch.ones(2, 7, 24)}, "dilated attention is self-attention"),
        ({}, {"value": torch.ones(1, 6, 24)}, "must have the same batch and positions"),
    ],
)
def test_refusals(made, changed, message):
    arguments = dict.fromkeys(("query", "key", "value"), randn(2, 6, 24)) | changed
    with pytest.raises(ValueError, match=message):
        make(**made)(**arguments)


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(6, 6), (6, 3)])
@pytest.mark.parametrize("rules", [{}, {"phase": "blocked"}, {"heads": "split"}], ids=str)
def test_modules_that_hold_some_heads_add_up(num_heads, num_kv_heads, rules):
    """Catches phases by the local head (another function, without a word), and a bias that is added twice."""
    pattern = DilatedPattern((8, 21), (3, 4), is_causal=True, **rules)
    whole = make(pattern, num_heads=num_heads, num_kv_heads=num_kv_heads, rotary=True)
    x = randn(2, 21, 24)
    padding = torch.arange(21) >= torch.tensor([[21], [5]])
    groups = [whole.held(range(0, 2)), whole.held(range(2, 6))]
    for mask in (None, padding):
        found = sum(some(x, x, x, mask)[0] for some in groups)
        torch.testing.assert_close(found, whole(x, x, x, mask)[0])
