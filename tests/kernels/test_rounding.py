"""In 16 bits only inputs and results are rounded: partial results are not, however many ranks make them."""

import pytest
import torch

from ring_dilated_attention import DilatedPattern, dilated_attention, explain, simulate
from ring_dilated_attention.commands.check import CASES
from ring_dilated_attention.commands.errors import measure, relative, squares, worst
from ring_dilated_attention.kernels import cpu
from ring_dilated_attention.kernels.lse_gradient import dlse_columns


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("pattern", "sharding"),
    [
        (DilatedPattern.dense(is_causal=True), "zigzag"),
        (DilatedPattern((64, 512), (1, 4)), "contiguous"),
    ],
)
def test_errors_do_not_grow_with_the_number_of_ranks(pattern, sharding, dtype, monkeypatch):
    """Catches partial results, or sums of gradients, that are rounded to 16 bits."""
    monkeypatch.setattr(cpu, "takes_short_rows", lambda dtype: False)
    generator = torch.Generator().manual_seed(1)
    *inputs, dout = (torch.randn(1, 512, 4, 16, generator=generator).to(dtype) for _ in range(4))

    def call(dtype, parallel=None):
        leaves = [x.to(dtype).requires_grad_() for x in inputs]
        out = dilated_attention(*leaves, pattern, parallel=parallel)
        return out.detach(), *torch.autograd.grad(out, leaves, dout.to(dtype))

    exact = call(torch.float64)
    several = (call(dtype), call(dtype, simulate.all_ranks(16, sharding=sharding)), exact)
    for name, x, *found in zip(("out", "dq", "dk", "dv"), exact, *several, strict=True):
        # of one rank and of many, and the exact ones rounded once
        one, many, least = (relative(squares(y.to(dtype), x)) for y in found)
        assert many <= 1.02 * one, (name, one, many)
        # ds is of the rounded out
        assert one <= (1.05 if name in ("out", "dv") else 1.3) * least, (name, one, least)


@pytest.fixture
def machine(monkeypatch):
    """Makes this CPU say that it is another: by default a Xeon with a matrix unit."""

    def pretend(amx=True, capability="AVX512", mkldnn=True):
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
        monkeypatch.setattr(torch.backends.mkldnn, "enabled", mkldnn)

    return pretend


@pytest.mark.parametrize("lack", [{}, {"amx": False}, {"capability": "AVX2"}, {"mkldnn": False}])
def test_who_takes_rows_of_16_bits(lack, machine):
    machine(**lack)
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        assert cpu.takes_short_rows(dtype) == (dtype == torch.bfloat16 and not lack)
    query = torch.empty(1, 8, 2, 8, dtype=torch.bfloat16)
    how = "copied in float32" if lack else "as they are"
    assert how in str(explain(query, query, query, DilatedPattern((8,), (1,))))


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_with_a_matrix_unit_errors_stay_within_twice_those_of_torch(
    num_ranks, machine, monkeypatch
):
    """The rows reach torch's kernel as they are. (Here it then computes without the unit.)"""
    if cpu.short_rows_fail():
        pytest.skip("torch's attention raises for rows of 16 bits")
    dtype = torch.bfloat16
    machine()
    seen, forward = set(), cpu.forward
    monkeypatch.setattr(cpu, "forward", lambda q, *rest: seen.add(q.dtype) or forward(q, *rest))
    cases = [case for case in CASES if num_ranks == 1 or case.sharding == "contiguous"]
    parallel = None if num_ranks == 1 else simulate.all_ranks(num_ranks)
    found = [measure(case, dtype, "cpu", "cpu", parallel) for case in cases]
    result = worst(cases, dtype, [found])
    assert result.passed, result
    assert seen == {dtype}


@pytest.mark.parametrize("size", [1e-8, 1.0, 1e6])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_columns_carry_a_gradient_of_lse_of_any_size(dtype, size):
    """Catches a power of two that float16 takes for infinity, or for zero. Out times dout in the columns is -dlse, as
    far as three columns and the least float16 tell."""
    generator = torch.Generator().manual_seed(0)
    dlse = (torch.rand(1, 2, 50, generator=generator) - 0.5) * size
    dout, out = dlse_columns(dlse, torch.zeros(1, 2, 50, 8, dtype=dtype))
    product = (out.double() * dout.double()).sum(-1)
    torch.testing.assert_close(product, -dlse.double(), rtol=1e-6, atol=2.0**-14 * 2.0**-24)
