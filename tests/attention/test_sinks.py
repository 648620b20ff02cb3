"""Learned sinks: one more key of each head, with a score of its own and the value 0."""

import math

import pytest
import torch
from helpers import message_of

from ring_dilated_attention import DilatedPattern, dilated_attention, simulate
from ring_dilated_attention.reference import dilated_attention_reference

PATTERNS = [
    DilatedPattern((8, 31), (1, 2), is_causal=True),
    DilatedPattern((8,), (3,)),  # queries off the phase see the sink alone
    DilatedPattern.sliding(5, is_causal=True),
]


def tensors(num_heads, num_kv_heads):
    torch.manual_seed(0)
    shapes = [(2, 31, heads, 8) for heads in (num_heads, num_kv_heads, num_kv_heads)]
    return [torch.randn(shape, dtype=torch.float64).requires_grad_() for shape in shapes]


@pytest.mark.parametrize("num_ranks", [None, 3])
@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
def test_value_and_gradients(pattern, num_ranks):
    """Those of the definition, also for the sinks; and where a sink is -inf there is none."""
    parallel = None if num_ranks is None else simulate.all_ranks(num_ranks)
    sinks = torch.tensor([0.3, -math.inf, 4.0, -20.0], dtype=torch.float64).requires_grad_()
    leaves = [*tensors(4, 2), sinks]
    *rows, sinks = leaves
    found = dilated_attention(*rows, pattern, sinks=sinks, parallel=parallel, return_lse=True)
    expected = dilated_attention_reference(*rows, pattern, sinks_H=sinks)
    weights = [torch.randn_like(x) for x in expected]
    grads = []
    for out, lse in (found, expected):
        loss = (out * weights[0]).sum() + (lse.masked_fill(lse == -math.inf, 0) * weights[1]).sum()
        grads.append(torch.autograd.grad(loss, leaves))
    for x, y in zip((*found, *grads[0]), (*expected, *grads[1]), strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=1e-12)


def test_a_sink_that_outweighs_all_keys():
    """Catches an overflow: the sink alone remains, and out is 0."""
    rows, sinks = [x.detach().float() for x in tensors(2, 2)], torch.full((2,), 1e4)
    out, lse = dilated_attention(*rows, PATTERNS[0], sinks=sinks, return_lse=True)
    assert not out.any()
    assert (lse == 1e4).all()


def test_the_gradient_of_a_sink_of_hardly_any_weight():
    """Catches 1 - weight, of which rounding leaves nothing."""
    rows = [x.detach().float() for x in tensors(2, 2)]
    sinks = torch.full((2,), -18.0).requires_grad_()
    out = dilated_attention(*rows, PATTERNS[0], sinks=sinks)
    (found,) = torch.autograd.grad(out.sum(), sinks)
    exact = sinks.detach().double().requires_grad_()
    out, _ = dilated_attention_reference(*(x.double() for x in rows), PATTERNS[0], sinks_H=exact)
    (expected,) = torch.autograd.grad(out.sum(), exact)
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=0)


MUST = "sinks must have one floating-point number for each of the 4 query heads, got torch"


@pytest.mark.parametrize(
    ("sinks", "message"),
    [
        (1.0, "sinks must be a tensor of 4 numbers, one for each query head, got 1.0."),
        (torch.zeros(2), f"{MUST}.float32 of shape (2,)."),
        (torch.zeros(4, dtype=torch.int64), f"{MUST}.int64 of shape (4,)."),
        (torch.zeros(4, device="meta"), "sinks are on meta, query is on cpu: move them."),
    ],
)
def test_what_is_no_sink(sinks, message):
    call = lambda: dilated_attention(*tensors(4, 2), PATTERNS[0], sinks=sinks)  # noqa: E731
    assert message_of(call) == message
