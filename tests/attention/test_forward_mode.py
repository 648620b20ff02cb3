"""Derivatives in forward mode are refused: a custom op would give tangents of zero without a word."""

import pytest
import torch
from helpers import randn
from torch.autograd import forward_ad

from ring_dilated_attention import (
    DilatedPattern,
    MultiheadDilatedAttention,
    dilated_attention,
    simulate,
)
from ring_dilated_attention.models import torchscale_attention

# torch itself warns in forward mode: of what it uses, and while it compiles a module.
pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:`torch.jit.script:FutureWarning"),  # since torch 2.14
    pytest.mark.filterwarnings(
        "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"
    ),
]
PATTERN = DilatedPattern((3,), (1,), phase="blocked")


def jvp(call, x):
    return torch.func.jvp(call, (x,), (x,))


def tangent_of_a_backward(call, x):
    x = x.clone().requires_grad_()
    out = call(x)
    with forward_ad.dual_level():
        (dx,) = torch.autograd.grad(
            out, x, forward_ad.make_dual(torch.ones_like(out), torch.ones_like(out))
        )
        return forward_ad.unpack_dual(dx).tangent


WAYS = {
    "jvp": jvp,
    "jacfwd": lambda call, x: torch.func.jacfwd(call)(x),
    "jvp of compiled code": lambda call, x: jvp(torch.compile(call, backend="eager"), x),
    "compiled jvp": lambda call, x: torch.compile(lambda x: jvp(call, x), backend="eager")(x),
    "a dual tensor in backward": tangent_of_a_backward,
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("what", ["function", "query alone", "value alone", "module", "torchscale"])
def test_a_forward_mode_derivative_is_refused(what, way):
    """Catches a tangent that is dropped: beside a residual the result looks plausible."""
    module, other = MultiheadDilatedAttention(8, 2, PATTERN).double(), randn(1, 6, 2, 4)
    calls = {
        "function": lambda x: dilated_attention(x, x, x, PATTERN),
        "query alone": lambda x: dilated_attention(x, other, other, PATTERN),
        "value alone": lambda x: dilated_attention(other, other, x, PATTERN),
        "module": lambda x: module(*[x.flatten(2)] * 3)[0],
        "torchscale": lambda x: torchscale_attention(x, x, x, PATTERN),
    }
    with pytest.raises(
        NotImplementedError, match=r"no forward-mode derivative .*jvp.*: use backward"
    ):
        WAYS[way](calls[what], randn(1, 6, 2, 4))
    torch._dynamo.reset()  # it would never compile these functions again


def test_ranks_refuse_it_like_any_call():
    """Catches a rank that raises alone, while the others wait."""
    parallel = simulate.all_ranks(2)
    with pytest.raises(ValueError, match="no forward-mode derivative"):
        torch.func.jvp(
            lambda x: dilated_attention(x, x, x, PATTERN, parallel=parallel),
            *[(randn(1, 6, 2, 4),)] * 2,
        )


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.jacrev])
def test_derivatives_of_torch_func_are_refused_in_one_sentence(transform):
    """torch's own error tells how our code should be written."""
    x = randn(1, 6, 2, 4)
    with pytest.raises(NotImplementedError, match=r"cannot be differentiated by torch\.func"):
        transform(lambda query: dilated_attention(query, x, x, PATTERN).sum())(x)
