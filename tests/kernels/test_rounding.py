"""In 16 bits only inputs and results are rounded: partial results are not, however many ranks make them."""

import pytest
import torch

from ring_dilated_attention import DilatedPattern, dilated_attention, simulate
from ring_dilated_attention.commands.errors import relative, squares

PATTERNS = [
    (DilatedPattern.dense(is_causal=True), "zigzag"),
    (DilatedPattern((64, 512), (1, 4)), "contiguous"),
]


def errors(pattern, sharding, dtype, num_ranks):
    """out and gradients of one rank and of many, and the exact ones rounded once: each against float64."""
    generator = torch.Generator().manual_seed(1)
    *inputs, dout = (torch.randn(1, 512, 4, 16, generator=generator).to(dtype) for _ in range(4))

    def call(dtype, parallel=None):
        leaves = [x.to(dtype).requires_grad_() for x in inputs]
        out = dilated_attention(*leaves, pattern, parallel=parallel)
        return out.detach(), *torch.autograd.grad(out, leaves, dout.to(dtype))

    exact = call(torch.float64)
    many = call(dtype, simulate.all_ranks(num_ranks, sharding=sharding))
    for name, x, *found in zip(
        ("out", "dq", "dk", "dv"), exact, call(dtype), many, exact, strict=True
    ):
        yield name, *(relative(squares(y.to(dtype), x)) for y in found)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("pattern", "sharding"), PATTERNS)
def test_errors_do_not_grow_with_the_number_of_ranks(pattern, sharding, dtype):
    """Catches partial results, or sums of gradients, that are rounded to 16 bits."""
    for name, one, many, least in errors(pattern, sharding, dtype, 16):
        assert many <= 1.02 * one, (name, one, many)
        # ds is of the rounded out
        assert one <= (1.05 if name in ("out", "dv") else 1.3) * least, (name, one, least)
