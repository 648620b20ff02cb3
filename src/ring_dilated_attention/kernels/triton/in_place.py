"""The backend "triton": tiles by kernels that merge and add in place, so that no partials are made.

Unverified: no GPU was at hand. The kernels are tested in Triton's interpreter (float32, float16) and compiled ahead of
time (`python -m benchmarks.resources`, in a clone). So "auto" does not choose this backend.

Products of float32 are computed in TF32 (ten bits of mantissa, many times faster) where torch's own are, for example
after `torch.set_float32_matmul_precision("high")`; else in float32. Names are those of `contract.py`.
"""

import importlib.util
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from ...pattern import DilatedPattern
from ..contract import BackwardRows, WholePasses
from ..traits import TRAITS as ALL_TRAITS
from . import launch
from .block_sizes import PATH, architecture, has_config, padded
from .strips import bundle_size
from .token import append_one as append_one

NAME = "triton"
IN_PLACE: Literal[True] = True
TRAITS = ALL_TRAITS[NAME]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ops = None
# To be removed with the first verified run on a GPU.
ONLY_BY_NAME: str | None = "has not run on a GPU yet, so it is used only when asked for by name"


def why_not(query: Tensor) -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "needs triton, which is not installed; pip install 'ring-dilated-attention[triton]'"
    interpreted = launch.is_interpreted()
    if query.device.type != "cuda" and not (interpreted and query.device.type == "cpu"):
        return f"serves CUDA tensors (others only in Triton's interpreter, TRITON_INTERPRET=1), got {query.device}"
    if query.dtype not in DTYPES:
        return f"serves {', '.join(map(str, DTYPES))}, got {query.dtype}"
    if query.shape[-1] > 256:
        return f"serves head dims up to 256, got {query.shape[-1]}"
    if interpreted:
        if query.dtype == torch.bfloat16:
            return "cannot serve torch.bfloat16 in Triton's interpreter, which multiplies bfloat16 wrongly"
    elif torch.compiler.is_compiling():  # the compiler cannot trace reading a file; the call asks again
        return None
    elif not has_config(architecture(query.device)):
        return f"has no block sizes for {architecture(query.device)} in {PATH.name}"
    return None


def choose_pass(pattern: DilatedPattern, borders: tuple[int, ...]) -> WholePasses:
    return WholePasses(None, 'branch by branch; backend="triton-fused" takes all at once, in less memory')


def forward_into(
    q_BHMD: Tensor, k_BGLD: Tensor, v_BGLD: Tensor, out_BHMD: Tensor, lse_BHM: Tensor,
    is_causal: bool, scale: float, *, first: bool,
) -> None:  # fmt: skip
    from .forward import forward_kernel

    launch.check(q_BHMD, k_BGLD, v_BGLD, out_BHMD)
    tensors = (q_BHMD, k_BGLD, v_BGLD, out_BHMD, lse_BHM)
    _launch(forward_kernel, "forward", tensors, launch.strides(*tensors), is_causal, scale, first)


def delta(dout_BNHD: Tensor, dlse_BNH: Tensor | None, out_BNHD: Tensor) -> Tensor:
    from .backward import delta_kernel

    launch.check(dout_BNHD, out_BNHD)
    batch, num_rows, num_heads, head_dim = out_BNHD.shape
    delta_BNH = torch.empty(out_BNHD.shape[:3], dtype=torch.float32, device=out_BNHD.device)
    block_m = 16 if launch.is_interpreted() else 64
    tensors = (dout_BNHD, out_BNHD, delta_BNH if dlse_BNH is None else dlse_BNH, delta_BNH)
    with launch.on_device(out_BNHD):
        delta_kernel[batch * num_heads * -(-num_rows // block_m),](
            *(*tensors, num_heads, num_rows, *launch.strides(*tensors)),
            HAS_DLSE=dlse_BNH is not None,
            D=head_dim,
            BD=padded(head_dim),
            BM=block_m,
        )
    return delta_BNH


def query_gradient_into(rows: BackwardRows, dq_BHMD: Tensor, is_causal: bool, scale: float, *, first: bool) -> None:
    from .backward import query_gradient_kernel

    _launch_gradient(query_gradient_kernel, "query_gradient", rows, (dq_BHMD,), is_causal, scale, first)


def key_gradient_into(
    rows: BackwardRows, dk_BGLD: Tensor, dv_BGLD: Tensor, is_causal: bool, scale: float, *, first: bool
) -> None:
    from .backward import key_gradient_kernel

    _launch_gradient(key_gradient_kernel, "key_gradient", rows, (dk_BGLD, dv_BGLD), is_causal, scale, first)


def _launch_gradient(
    kernel: Any, name: str, rows: BackwardRows, results: tuple[Tensor, ...], is_causal: bool, scale: float, first: bool
) -> None:
    inputs, lse = (rows.query, rows.key, rows.value, rows.dout), rows.lse
    launch.check(*inputs, *results)
    assert rows.delta is not None
    assert lse.stride() == rows.delta.stride()
    tensors = (*inputs, lse, rows.delta, *results)
    _launch(kernel, name, tensors, launch.strides(*inputs, lse, *results), is_causal, scale, first)


def _launch(
    kernel: Any, name: str, tensors: Sequence[Tensor], strides: Iterable[int], causal: bool, scale: float, first: bool
) -> None:
    """tensors: query, key and the rest in the kernel's order."""
    q, k = tensors[:2]
    (batch, num_heads, num_rows, head_dim), (num_kv_heads, num_keys) = q.shape, k.shape[1:3]
    blocks, of_keys = launch.config_for(name, q), name == "key_gradient"
    heads = bundle_size(num_heads // num_kv_heads, blocks.block_m)
    num_strips = -(-num_keys // blocks.block_n) if of_keys else -(-num_rows // (blocks.block_m // heads))
    with launch.on_device(q):
        kernel[batch * num_strips * (num_kv_heads if of_keys else num_heads // heads),](
            *(*tensors, scale),
            *(num_strips, num_heads // num_kv_heads // heads, num_kv_heads, num_rows, num_keys),
            *strides,
            IS_CAUSAL=causal,
            ACCUMULATE=not first,
            **launch.constants(blocks, head_dim, heads),
        )
