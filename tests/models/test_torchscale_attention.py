"""The gate: torchscale's function, zero rows and misplaced rows included, on one device and on many.

Judged by what torchscale computed, and by the definition over rows padded with zeros.
"""

from datetime import timedelta

import pytest
import torch
from distributed import run
from helpers import relative_error, rows_of
from hypothesis import given, settings
from hypothesis import strategies as st
from padded import padded_reference
from torch.distributed.device_mesh import init_device_mesh
from torchscale_cases import ATTENTION, blocked, kept

from ring_dilated_attention import ContextParallel, DilatedPattern, simulate
from ring_dilated_attention.attention.sinks import with_sinks
from ring_dilated_attention.models import torchscale_attention

PATTERNS = {
    "aligned": blocked((8, 16, 64), (1, 2, 4)),
    "misaligned": blocked((8, 13, 5), (2, 4, 3)),
    "causal": blocked((8, 13), (1, 3), True),
}
# zero rows after the last row only, so that one rank alone sees some
AT_THE_END = blocked((8, 16), (1, 2))
ALIGNED = [PATTERNS["aligned"], AT_THE_END]


def random(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", ATTENTION)
def test_equals_what_torchscale_computed(name):
    case = ATTENTION[name]
    expected = kept()[f"attention: {name}"]
    out = torchscale_attention(*case.inputs(), case.pattern)
    torch.testing.assert_close(out, expected, rtol=1e-13, atol=1e-14)
    reference, _ = padded_reference(*case.inputs(), case.pattern)
    torch.testing.assert_close(reference, expected, rtol=1e-13, atol=1e-14)
    single = torchscale_attention(*(x.float() for x in case.inputs()), case.pattern)
    assert relative_error(single.double(), expected) < 1e-6


def check(inputs, pattern, attend, tolerance=1e-11):
    """Value, lse and every gradient, through both, against the definition over padded rows."""
    leaves = [x.clone().requires_grad_() for x in inputs]
    expected, expected_lse = padded_reference(*leaves, pattern)
    covered = expected_lse > -torch.inf
    dout, dlse = random(*expected.shape, seed=7), random(*expected_lse.shape, seed=8)
    gradients = torch.autograd.grad(
        (expected * dout).sum() + (expected_lse * dlse)[covered].sum(), leaves
    )
    own = [x.clone().requires_grad_() for x in inputs]
    out, lse = attend(own)
    assert torch.equal(lse > -torch.inf, covered)
    torch.testing.assert_close(out, expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(lse, expected_lse, rtol=tolerance, atol=tolerance)
    found = torch.autograd.grad((out * dout).sum() + (lse * dlse)[covered].sum(), own)
    for x, y in zip(found, gradients, strict=True):
        torch.testing.assert_close(x, y, rtol=tolerance, atol=tolerance)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 24), st.integers(1, 7)), min_size=1, max_size=3),
    st.integers(1, 40),
    st.integers(1, 5),
    st.booleans(),
    st.integers(0, 3),
)
def test_value_lse_and_gradients(branches, length, num_heads, is_causal, num_simulated):
    """Any branches and lengths, also where no branch covers a query, and over simulated ranks."""
    pattern = DilatedPattern(*zip(*branches, strict=True), is_causal=is_causal, phase="blocked")
    parallel = simulate.all_ranks(num_simulated) if num_simulated else None
    inputs = [random(2, length, num_heads, 4, seed=seed) for seed in range(3)]
    check(
        inputs,
        pattern,
        lambda own: torchscale_attention(*own, pattern, parallel=parallel, return_lse=True),
    )


def test_grouped_queries():
    query, key, value = (
        random(1, 29, 6, 4),
        random(1, 29, 2, 4, seed=1),
        random(1, 29, 2, 4, seed=2),
    )
    for pattern in PATTERNS.values():
        out = torchscale_attention(query, key, value, pattern)
        wide = (x.repeat_interleave(3, dim=2) for x in (key, value))
        torch.testing.assert_close(
            out, torchscale_attention(query, *wide, pattern), rtol=1e-12, atol=1e-12
        )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", PATTERNS)
def test_half_precision(dtype, name):
    """Rounded inputs, and an error of the size of one rounding of the output."""
    pattern = PATTERNS[name]
    inputs = [random(1, 29, 4, 8, seed=seed).to(dtype) for seed in range(3)]
    out = torchscale_attention(*inputs, pattern)
    assert out.dtype == dtype
    expected, _ = padded_reference(*(x.double() for x in inputs), pattern)
    assert relative_error(out.double(), expected) < 3 * torch.finfo(dtype).eps


def test_gate_leaves_queries_without_keys_alone():
    """No NaN, forward or backward, where lse is -inf, and nothing at all where no zero key is seen."""
    out, lse = (
        random(1, 2, 1, 3).requires_grad_(),
        torch.tensor([[[-torch.inf], [0.3]]]).requires_grad_(),
    )
    gated, gated_lse = with_sinks(out, lse, torch.full((2, 1), -torch.inf))
    assert torch.equal(gated, out)
    assert torch.equal(gated_lse, lse)
    (gated.sum() + gated_lse[:, 1].sum()).backward()
    assert torch.equal(out.grad, torch.ones_like(out))
    assert torch.equal(lse.grad, torch.tensor([[[0.0], [1.0]]]))


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        (
            DilatedPattern((8,), (2,)),
            "phase='modulo', heads='all' and window=None: make it with phase='blocked'",
        ),
        (DilatedPattern((8,), (2,), heads="split"), "heads='split' and window=None: make it"),
        ("blocked", "pattern must be a DilatedPattern, got 'blocked'"),
    ],
)
def test_refusals(pattern, message):
    x = torch.zeros(1, 9, 2, 4)
    with pytest.raises(ValueError, match=message):
        torchscale_attention(x, x, x, pattern)
    with pytest.raises(
        ValueError, match=r"query must be .batch, seq, heads, head_dim., got 3 dimensions"
    ):
        torchscale_attention(x[0], x[0], x[0], PATTERNS["aligned"])
    with pytest.raises(TypeError, match="torchscale_attention has no argument 'cu_seqlens'"):
        torchscale_attention(
            x, x, x, PATTERNS["aligned"], cu_seqlens=torch.tensor([0, 9], dtype=torch.int32)
        )


def check_without_lse(cp, pattern, length):
    """Gradients of a loss that uses out alone: only ranks that see zero keys have a gradient of lse."""
    inputs = [random(2, length, 4, 4, seed=seed) for seed in range(3)]
    leaves = [x.clone().requires_grad_() for x in inputs]
    dout = random(2, length, 4, 4, seed=7)
    expected = torch.autograd.grad((padded_reference(*leaves, pattern)[0] * dout).sum(), leaves)
    local = [rows_of(cp, x).requires_grad_() for x in inputs]
    out = torchscale_attention(*local, pattern, parallel=cp)
    found = torch.autograd.grad((out * rows_of(cp, dout)).sum(), local)
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, rows_of(cp, y), rtol=1e-11, atol=1e-11)


def rank_attends(rank, world_size, options, length, patterns):
    mesh = options.get("group")
    options = {
        **options,
        "group": init_device_mesh("cpu", mesh) if mesh else None,
        "timeout": timedelta(seconds=30),
    }
    cp = ContextParallel(**options)
    for pattern in patterns:

        def attend(own, pattern=pattern):
            local = (cp.shard(x) for x in own)
            out, lse = torchscale_attention(*local, pattern, parallel=cp, return_lse=True)
            return cp.unshard(out), cp.unshard(lse)

        check([random(2, length, 4, 4, seed=seed) for seed in range(3)], pattern, attend)

        check_without_lse(cp, pattern, length)
    x = rows_of(cp, torch.zeros(1, length, 4, 4))
    if cp.sharding == "zigzag" or cp.cut.lengths:
        with pytest.raises(ValueError, match="moves rows to later positions"):
            torchscale_attention(x, x, x, PATTERNS["misaligned"], parallel=cp)
    bad = DilatedPattern((8,), (2,)) if rank == world_size - 1 else patterns[0]
    x = torch.zeros(1, 3, 4, 4)
    with pytest.raises(ValueError, match="phase='modulo'"):
        torchscale_attention(x, x, x, bad, parallel=cp)


@pytest.mark.parametrize(
    ("world_size", "options", "length", "patterns"),
    [
        (2, {}, 37, [*PATTERNS.values(), AT_THE_END]),
        (2, {"sharding": "zigzag"}, 37, ALIGNED),
        (3, {"exchange": "all_gather"}, 31, [*PATTERNS.values(), AT_THE_END]),
        (2, {"exchange": "all_to_all"}, 33, [*PATTERNS.values(), AT_THE_END]),
        (3, {"exchange": "ring", "lengths": (20, 20, 0)}, 40, ALIGNED),
        (3, {"exchange": "ring", "align": 20}, 37, [*PATTERNS.values(), AT_THE_END]),  # 20, 17, 0
        (4, {"group": (2, 2)}, 37, [*PATTERNS.values(), AT_THE_END]),
    ],
)
def test_on_ranks(world_size, options, length, patterns):
    """Every exchange and cut, zero rows at the end of the last rank's shard, misplaced rows that cross borders."""
    run(world_size, rank_attends, options, length, patterns)
