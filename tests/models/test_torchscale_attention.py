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


def same(found, expected, tolerance=1e-11):
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def inputs_of(batch, length, num_heads=4, head_dim=4):
    return [random(batch, length, num_heads, head_dim, seed=seed) for seed in range(3)]


@pytest.mark.parametrize("name", ATTENTION)
def test_equals_what_torchscale_computed(name):
    case = ATTENTION[name]
    inputs, expected = case.inputs(), kept()[f"attention: {name}"]
    same(torchscale_attention(*inputs, case.pattern), expected, 1e-13)
    same(padded_reference(*inputs, case.pattern)[0], expected, 1e-13)
    single = torchscale_attention(*(x.float() for x in inputs), case.pattern)
    assert relative_error(single, expected) < 1e-6


def check(inputs, pattern, attend):
    """Value, lse and every gradient, through both, against the definition over padded rows."""
    leaves = [x.clone().requires_grad_() for x in inputs]
    expected, expected_lse = padded_reference(*leaves, pattern)
    covered = expected_lse > -torch.inf
    dout, dlse = random(*expected.shape, seed=7), random(*expected_lse.shape, seed=8)

    def loss(out, lse):
        return (out * dout).sum() + (lse * dlse)[covered].sum()

    own = [x.clone().requires_grad_() for x in inputs]
    out, lse = attend(own)
    assert torch.equal(lse > -torch.inf, covered)
    same((out, lse), (expected, expected_lse))
    gradients = torch.autograd.grad(loss(expected, expected_lse), leaves)
    same(torch.autograd.grad(loss(out, lse), own), gradients)


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
    check(
        inputs_of(2, length, num_heads),
        pattern,
        lambda own: torchscale_attention(*own, pattern, parallel=parallel, return_lse=True),
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("pattern", PATTERNS.values(), ids=[*PATTERNS])
def test_grouped_queries_and_half_precision(dtype, pattern):
    """Rounded inputs, and an error of the size of one rounding of the output."""
    query, key, value = inputs_of(1, 29, 6, 8)
    inputs = [x.to(dtype) for x in (query, key[:, :, :2], value[:, :, :2])]
    out = torchscale_attention(*inputs, pattern)
    assert out.dtype == dtype
    query, key, value = (x.double() for x in inputs)
    wide = (x.repeat_interleave(3, dim=2) for x in (key, value))
    expected, _ = padded_reference(query, *wide, pattern)
    assert relative_error(out, expected) < 3 * torch.finfo(dtype).eps
    same(torchscale_attention(query, key, value, pattern), expected)


def test_refusals():
    x = torch.zeros(1, 9, 2, 4)
    aligned, split = PATTERNS["aligned"], DilatedPattern((8,), (2,), heads="split")
    for rows, pattern, message in (
        (x, DilatedPattern((8,), (2,)), "phase='modulo', heads='all' and window=None: make it w"),
        (x, split, "heads='split' and window=None: make it"),
        (x, "blocked", "pattern must be a DilatedPattern, got 'blocked'"),
        (x[0], aligned, r"query must be .batch, seq, heads, head_dim., got 3 dimensions"),
    ):
        with pytest.raises(ValueError, match=message):
            torchscale_attention(rows, rows, rows, pattern)
    with pytest.raises(TypeError, match="torchscale_attention has no argument 'cu_seqlens'"):
        torchscale_attention(x, x, x, aligned, cu_seqlens=torch.tensor([0, 9]))


def check_without_lse(cp, inputs, pattern):
    """Gradients of a loss that uses out alone: only ranks that see zero keys have a gradient of lse."""
    leaves = [x.clone().requires_grad_() for x in inputs]
    dout = random(*inputs[0].shape, seed=7)
    expected = torch.autograd.grad((padded_reference(*leaves, pattern)[0] * dout).sum(), leaves)
    local = [rows_of(cp, x).requires_grad_() for x in inputs]
    out = torchscale_attention(*local, pattern, parallel=cp)
    found = torch.autograd.grad((out * rows_of(cp, dout)).sum(), local)
    same(found, tuple(rows_of(cp, x) for x in expected))


def rank_attends(rank, world_size, cases):
    for options, length, patterns in cases:
        if mesh := options.get("group"):
            options = {"group": init_device_mesh("cpu", mesh)}
        cp = ContextParallel(**options, timeout=timedelta(seconds=30))
        for pattern in patterns:

            def attend(own, pattern=pattern, cp=cp):
                local = (cp.shard(x) for x in own)
                out, lse = torchscale_attention(*local, pattern, parallel=cp, return_lse=True)
                return cp.unshard(out), cp.unshard(lse)

            check(inputs_of(2, length), pattern, attend)
        check_without_lse(cp, inputs_of(2, length), AT_THE_END)
        x = torch.zeros(1, 3, 4, 4)
        bad = DilatedPattern((8,), (2,)) if rank == world_size - 1 else patterns[0]
        refused = [(x, bad, "phase='modulo'")]
        if cp.sharding == "zigzag" or cp.cut.lengths:
            x = rows_of(cp, torch.zeros(1, length, 4, 4))
            refused.append((x, PATTERNS["misaligned"], "moves rows to later positions"))
        for x, pattern, message in refused:
            with pytest.raises(ValueError, match=message):
                torchscale_attention(x, x, x, pattern, parallel=cp)
        assert not cp.ranks.warned
        cp.close()


ALL = [*PATTERNS.values(), AT_THE_END]


@pytest.mark.parametrize(
    ("world_size", "cases"),
    [
        (
            2,
            [
                ({}, 37, ALL),
                ({"sharding": "zigzag"}, 37, ALIGNED),
                ({"exchange": "all_to_all"}, 33, ALL),
            ],
        ),
        (
            3,
            [
                ({"exchange": "all_gather"}, 31, ALL),
                ({"exchange": "ring", "lengths": (20, 20, 0)}, 40, ALIGNED),
                ({"exchange": "ring", "align": 20}, 37, ALL),  # 20, 17, 0
            ],
        ),
        (4, [({"group": (2, 2)}, 37, ALL)]),
    ],
)
def test_on_ranks(world_size, cases):
    """Every exchange and cut, zero rows at the end of the last rank's shard, misplaced rows that cross borders."""
    run(world_size, rank_attends, cases)
