"""The CUDA kernel's wrapping without a GPU: shapes on meta tensors, and numbers with stand-ins for torch's CUDA ops.

A stand-in keeps to the op's contract as the schemas and meta kernels of torch 2.13 state it, and computes on the CPU.
"""

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad

from ring_dilated_attention import DilatedPattern, dilated_attention
from ring_dilated_attention.kernels import cpu, sdpa

aten = torch.ops.aten
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def make(dtype, num_heads, num_kv_heads, num_rows, num_keys, head_dim, device="cpu"):
    """q, k, v as the plan's views: (B, heads, rows, D), rows far apart in memory."""
    torch.manual_seed(0)
    shapes = [(2, num_heads, num_rows, head_dim), *[(2, num_kv_heads, num_keys, head_dim)] * 2]
    return [torch.randn(b, m, h, d, device=device).to(dtype).transpose(1, 2) for b, h, m, d in shapes]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [8, 24, 33, 96, 257])
@pytest.mark.parametrize(("num_rows", "num_keys", "is_causal"), [(33, 33, True), (1, 63, False), (64, 7, False)])
def test_shapes_on_meta_tensors(dtype, head_dim, num_rows, num_keys, is_causal):
    """Catches arguments that the ops do not take, lse that keeps its padding, and gradients of the wrong shape."""
    q, k, v = make(dtype, 6, 2, num_rows, num_keys, head_dim, device="meta")
    out, lse = sdpa.forward(q, k, v, is_causal, 0.3)
    assert (out.shape, out.dtype) == (q.shape, dtype)
    assert (lse.shape, lse.dtype) == (q.shape[:3], torch.float32)
    for dlse in (None, torch.empty_like(lse)):
        grads = sdpa.backward(torch.empty_like(out), dlse, q, k, v, out, lse, is_causal, 0.3)
        assert [(x.shape, x.dtype) for x in grads] == [(x.shape, dtype) for x in (q, k, v)]


def check_inputs(*tensors: Tensor) -> None:
    """What both CUDA ops ask of their inputs: equal heads, head dims of 16 bytes in 16 bits, dense last dimension."""
    assert len({x.dtype for x in tensors}) == 1
    assert len({x.shape[1] for x in tensors}) == 1
    assert len({x.shape[3] for x in tensors}) == 1
    assert all(x.shape[3] % 8 == 0 and x.stride(3) == 1 for x in tensors)


def flash(q, k, v, dropout, is_causal, *, scale):
    check_inputs(q, k, v)
    assert q.dtype != torch.float32
    assert q.shape[3] <= 256
    return *aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, dropout, is_causal, scale=scale), *[None] * 7


def flash_backward(dout, q, k, v, out, lse, starts_q, starts_k, max_q, max_k, dropout, is_causal, *seeds, scale):
    check_inputs(dout, q, k, v, out)
    assert (max_q, max_k) == (q.shape[2], k.shape[2])
    assert lse.is_contiguous()
    op = aten._scaled_dot_product_flash_attention_for_cpu_backward
    return op(dout, q, k, v, out, lse, dropout, is_causal, scale=scale)


def efficient(q, k, v, bias, compute_lse, dropout, is_causal, *, scale):
    check_inputs(q, k, v)
    assert compute_lse
    out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, dropout, is_causal, scale=scale)
    return out, pad(lse, (0, -lse.shape[2] % 32), value=torch.nan), None, None


def efficient_backward(dout, q, k, v, bias, out, lse, seed, offset, dropout, mask, is_causal, *, scale):
    check_inputs(dout, q, k, v, out)
    assert lse.shape[2] % 32 == 0
    assert (lse[:, :, q.shape[2] :] == torch.inf).all()  # p = exp(s - lse) must be 0 there
    assert mask == [True, True, True, False]
    op = aten._scaled_dot_product_flash_attention_for_cpu_backward
    return *op(dout, q, k, v, out, lse[:, :, : q.shape[2]], dropout, is_causal, scale=scale), None


@pytest.fixture
def stand_ins(monkeypatch):
    names = SimpleNamespace(
        _scaled_dot_product_flash_attention=flash,
        _scaled_dot_product_flash_attention_backward=flash_backward,
        _scaled_dot_product_efficient_attention=efficient,
        _scaled_dot_product_efficient_attention_backward=efficient_backward,
    )
    monkeypatch.setattr(sdpa, "aten", names)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(sdpa, "why_not", lambda query: None)
    monkeypatch.setattr(sdpa, "DTYPES", cpu.DTYPES)


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [8, 24, 33])
@pytest.mark.parametrize("num_kv_heads", [6, 2, 1])
@pytest.mark.parametrize("has_dlse", [False, True])
def test_numbers_with_stand_ins(dtype, head_dim, num_kv_heads, has_dlse):
    """Catches padding that changes the scores, key/value heads that go to the wrong query heads, gradients of shared
    heads that are not summed, and a column for dlse that is lost in the padding."""
    q, k, v = make(dtype, 6, num_kv_heads, 37, 37, head_dim)
    out, lse = sdpa.forward(q, k, v, True, 0.3)
    expected = cpu.forward(q, k, v, True, 0.3)
    torch.testing.assert_close((out, lse), expected)
    dout, dlse = torch.randn_like(out), torch.randn_like(lse) if has_dlse else None
    grads = sdpa.backward(dout, dlse, q, k, v, out, lse, True, 0.3)
    expected = cpu.backward(dout, dlse, q, k, v, out, lse, True, 0.3)
    for x, y in zip(grads, expected, strict=True):
        assert x.shape == y.shape
        # A sum over shared heads in the input's dtype: a few roundings more than the CPU op's.
        assert (x.float() - y.float()).norm() <= 4 * torch.finfo(dtype).eps * y.float().norm()


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_whole_calls_with_stand_ins(dtype):
    """Catches views of the plan that the wrapping cannot take, branch by branch."""
    torch.manual_seed(0)
    inputs = [torch.randn(2, 41, h, 24).to(dtype).requires_grad_() for h in (4, 2, 2)]
    pattern = DilatedPattern((8, 41), (1, 2), is_causal=True)
    results = []
    for backend in ("sdpa", "cpu"):
        out, lse = dilated_attention(*inputs, pattern, backend=backend, return_lse=True)
        results.append([out, lse, *torch.autograd.grad(out.float().sin().sum() + lse.sum(), inputs)])
    for x, y in zip(*results, strict=True):
        assert (x.float() - y.float()).norm() <= 4 * torch.finfo(dtype).eps * y.float().norm()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: the real ops run nowhere else")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [24, 33, 96])
def test_on_a_gpu(dtype, head_dim):
    """Catches what the stand-ins get wrong about the real ops."""
    pattern = DilatedPattern((32, 111), (1, 3), is_causal=True)
    torch.manual_seed(0)
    inputs = [torch.randn(2, 111, h, head_dim).to(dtype) for h in (4, 2, 2)]
    results = []
    for device in ("cuda", "cpu"):
        leaves = [x.to(device).requires_grad_() for x in inputs]
        out, lse = dilated_attention(*leaves, pattern, return_lse=True)
        grads = torch.autograd.grad(out.float().sin().sum() + lse.sum(), leaves)
        results.append([x.detach().cpu().double() for x in (out, lse, *grads)])
    for x, y in zip(*results, strict=True):
        assert (x - y).norm() <= 4 * torch.finfo(dtype).eps * y.norm()
