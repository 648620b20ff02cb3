"""Launching the kernels over views: shapes, strides, grids.

B batch, H query heads, G key/value heads, M query rows, L key rows, D head dim.
"""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from ..contract import BackwardRows
from .backward import delta_kernel, key_gradient_kernel, query_gradient_kernel
from .blocks import IS_INTERPRETED
from .config import Config, architecture, config, padded
from .forward import forward_kernel


def config_for(kernel: str, x: Tensor) -> Config:
    return config(kernel, x.shape[-1], x.element_size(), "interpreter" if IS_INTERPRETED else architecture(x.device))


def on_device(x: Tensor) -> AbstractContextManager:
    """Triton launches on the current device, which need not be the tensor's."""
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()


def pack_of(ratio: int, block_m: int) -> int:
    """How many of the query heads that share a key/value head fill the rows of one tile: a divisor of their number."""
    return max(p for p in range(1, min(ratio, block_m) + 1) if ratio % p == 0)


def precision() -> str:
    """Of products of float32: as torch's own."""
    return "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "ieee"


def check(*rows: Tensor) -> None:
    for x in rows:
        assert x.stride(-1) == 1, f"a row must be consecutive numbers, got strides {x.stride()}"
        assert x.numel(), f"a kernel needs rows, got {tuple(x.shape)}"


def launch_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    is_causal: bool,
    scale: float,
    *,
    accumulate: bool,
) -> None:
    check(q, k, v, out)
    (batch, num_heads, num_rows, head_dim), (num_kv_heads, num_keys) = q.shape, k.shape[1:3]
    block_m, block_n, num_warps, num_stages = config_for("forward", q)
    pack = pack_of(num_heads // num_kv_heads, block_m)
    num_tiles = -(-num_rows // (block_m // pack))
    with on_device(q):
        forward_kernel[batch * num_heads // pack * num_tiles,](
            *(q, k, v, out, lse, scale),
            *(num_tiles, num_heads // num_kv_heads // pack, num_kv_heads, num_rows, num_keys),
            *(*q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *out.stride()[:3], *lse.stride()),
            IS_CAUSAL=is_causal,
            ACCUMULATE=accumulate,
            PRECISION=precision(),
            D=head_dim,
            BD=padded(head_dim),
            PACK=pack,
            BM=block_m,
            BN=block_n,
            num_warps=num_warps,
            num_stages=num_stages,
        )


def launch_delta(dout: Tensor, dlse: Tensor | None, out: Tensor, delta: Tensor) -> None:
    """Of (B, N, H, D) and (B, N, H)."""
    check(dout, out)
    batch, num_rows, num_heads, head_dim = out.shape
    block_m = 16 if IS_INTERPRETED else 64
    views = (dout, out, delta if dlse is None else dlse, delta)
    with on_device(out):
        delta_kernel[batch * num_heads * -(-num_rows // block_m),](
            *(*views, num_heads, num_rows),
            *(stride for x in views for stride in x.stride()[:3]),
            HAS_DLSE=dlse is not None,
            D=head_dim,
            BD=padded(head_dim),
            BM=block_m,
        )


def launch_query_gradient(rows: BackwardRows, dq: Tensor, is_causal: bool, scale: float, *, accumulate: bool) -> None:
    dout, q, k, v, lse, delta = rows.dout, rows.query, rows.key, rows.value, rows.lse, rows.delta
    check(dout, q, k, v, dq)
    assert delta is not None
    assert lse.stride() == delta.stride()
    (batch, num_heads, num_rows, head_dim), (num_kv_heads, num_keys) = q.shape, k.shape[1:3]
    block_m, block_n, num_warps, num_stages = config_for("query_gradient", q)
    pack = pack_of(num_heads // num_kv_heads, block_m)
    num_tiles = -(-num_rows // (block_m // pack))
    with on_device(q):
        query_gradient_kernel[batch * num_heads // pack * num_tiles,](
            *(q, k, v, dout, lse, delta, dq, scale),
            *(num_tiles, num_heads // num_kv_heads // pack, num_kv_heads, num_rows, num_keys),
            *(*q.stride()[:3], *k.stride()[:3], *v.stride()[:3]),
            *(*dout.stride()[:3], *lse.stride(), *dq.stride()[:3]),
            IS_CAUSAL=is_causal,
            ACCUMULATE=accumulate,
            PRECISION=precision(),
            D=head_dim,
            BD=padded(head_dim),
            PACK=pack,
            BM=block_m,
            BN=block_n,
            num_warps=num_warps,
            num_stages=num_stages,
        )


def launch_key_gradient(
    rows: BackwardRows, dk: Tensor, dv: Tensor, is_causal: bool, scale: float, *, accumulate: bool
) -> None:
    dout, q, k, v, lse, delta = rows.dout, rows.query, rows.key, rows.value, rows.lse, rows.delta
    check(dout, q, k, v, dk, dv)
    assert delta is not None
    assert lse.stride() == delta.stride()
    (batch, num_heads, num_rows, head_dim), (num_kv_heads, num_keys) = q.shape, k.shape[1:3]
    block_m, block_n, num_warps, num_stages = config_for("key_gradient", q)
    pack = pack_of(num_heads // num_kv_heads, block_m)
    num_tiles = -(-num_keys // block_n)
    with on_device(q):
        key_gradient_kernel[batch * num_kv_heads * num_tiles,](
            *(q, k, v, dout, lse, delta, dk, dv, scale),
            *(num_tiles, num_heads // num_kv_heads // pack, num_kv_heads, num_rows, num_keys),
            *(*q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *dout.stride()[:3], *lse.stride()),
            *(*dk.stride()[:3], *dv.stride()[:3]),
            IS_CAUSAL=is_causal,
            ACCUMULATE=accumulate,
            PRECISION=precision(),
            D=head_dim,
            BD=padded(head_dim),
            PACK=pack,
            BM=block_m,
            BN=block_n,
            num_warps=num_warps,
            num_stages=num_stages,
        )
