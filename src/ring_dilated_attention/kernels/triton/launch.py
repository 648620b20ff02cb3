"""Launching the kernels over views: shapes, strides, grids.

B batch, H query heads, G key/value heads, M query rows, L key rows, D head dim.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from ..contract import BackwardRows
from .backward import delta_kernel, key_gradient_kernel, query_gradient_kernel
from .block_sizes import Config, architecture, config, padded
from .blocks import IS_INTERPRETED
from .forward import forward_kernel
from .strips import bundle_size


def config_for(kernel: str, x: Tensor) -> Config:
    return config(kernel, x.shape[-1], x.element_size(), "interpreter" if IS_INTERPRETED else architecture(x.device))


def on_device(x: Tensor) -> AbstractContextManager:
    """Triton launches on the current device, which need not be the tensor's."""
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()


def precision() -> str:
    """Of products of float32: as torch's own."""
    return "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "ieee"


def constants(blocks: Config, head_dim: int, heads: int) -> dict[str, Any]:
    """What is compiled in of the sizes. heads: of a bundle."""
    return {
        "PRECISION": precision(),
        "D": head_dim,
        "BD": padded(head_dim),
        "HEADS": heads,
        "BM": blocks.block_m,
        "BN": blocks.block_n,
        "num_warps": blocks.num_warps,
        "num_stages": blocks.num_stages,
    }


def strides(*tensors: Tensor) -> Iterator[int]:
    """But for that of the columns, which is 1."""
    return (stride for x in tensors for stride in x.stride()[:3])


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
    tensors, blocks = (q, k, v, out, lse), config_for("forward", q)
    heads = bundle_size(num_heads // num_kv_heads, blocks.block_m)
    num_strips = -(-num_rows // (blocks.block_m // heads))
    with on_device(q):
        forward_kernel[batch * num_heads // heads * num_strips,](
            *(*tensors, scale),
            *(num_strips, num_heads // num_kv_heads // heads, num_kv_heads, num_rows, num_keys),
            *strides(*tensors),
            IS_CAUSAL=is_causal,
            ACCUMULATE=accumulate,
            **constants(blocks, head_dim, heads),
        )


def launch_delta(dout: Tensor, dlse: Tensor | None, out: Tensor, delta: Tensor) -> None:
    """Of (B, N, H, D) and (B, N, H)."""
    check(dout, out)
    batch, num_rows, num_heads, head_dim = out.shape
    block_m = 16 if IS_INTERPRETED else 64
    tensors = (dout, out, delta if dlse is None else dlse, delta)
    with on_device(out):
        delta_kernel[batch * num_heads * -(-num_rows // block_m),](
            *(*tensors, num_heads, num_rows, *strides(*tensors)),
            HAS_DLSE=dlse is not None,
            D=head_dim,
            BD=padded(head_dim),
            BM=block_m,
        )


def launch_gradient(
    rows: BackwardRows, results: tuple[Tensor, ...], is_causal: bool, scale: float, *, accumulate: bool
) -> None:
    """Of the queries, (dq,), or of the keys, (dk, dv)."""
    dout, q, k, v, lse, delta = rows.dout, rows.query, rows.key, rows.value, rows.lse, rows.delta
    check(dout, q, k, v, *results)
    assert delta is not None
    assert lse.stride() == delta.stride()
    (batch, num_heads, num_rows, head_dim), (num_kv_heads, num_keys) = q.shape, k.shape[1:3]
    of_keys = len(results) == 2
    blocks = config_for("key_gradient" if of_keys else "query_gradient", q)
    heads = bundle_size(num_heads // num_kv_heads, blocks.block_m)
    num_strips = -(-num_keys // blocks.block_n) if of_keys else -(-num_rows // (blocks.block_m // heads))
    num_programs = batch * num_strips * (num_kv_heads if of_keys else num_heads // heads)
    with on_device(q):
        (key_gradient_kernel if of_keys else query_gradient_kernel)[num_programs,](
            *(q, k, v, dout, lse, delta, *results, scale),
            *(num_strips, num_heads // num_kv_heads // heads, num_kv_heads, num_rows, num_keys),
            *strides(q, k, v, dout, lse, *results),
            IS_CAUSAL=is_causal,
            ACCUMULATE=accumulate,
            **constants(blocks, head_dim, heads),
        )
