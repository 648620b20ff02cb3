"""Computes forward and backward of a tile (some queries and the keys that they attend to) by torch's CPU flash
attention.

Names are those of `contract.py`.
"""

from functools import cache

import torch
from torch import Tensor

from .contract import BackwardRows
from .lse_gradient import with_dlse_columns
from .traits import TRAITS as ALL_TRAITS

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

NAME = "cpu"
TRAITS = ALL_TRAITS[NAME]
ops = None

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def why_not(query: Tensor) -> str | None:
    if query.device.type != "cpu":
        return f"serves CPU tensors, got {query.device}"
    if query.dtype not in DTYPES:
        return f"serves {', '.join(map(str, DTYPES))}, got {query.dtype}"
    return None


def merging(query: Tensor) -> None:
    """Return None: the caller then merges each result as soon as it is computed, while the result is in the CPU's
    cache."""


def takes_short_rows(dtype: torch.dtype) -> bool:
    """Whether the caller should pass 16-bit ("short") rows of this dtype without a copy to float32.

    The result is True for bfloat16 if torch's attention can use the CPU's matrix unit (AMX). Then a forward in bfloat16
    takes half the time of one in float32 (docs/decisions.md). The result is False for float16: whether float16 would be
    faster is not known, and partials (out and lse of a tile) would be less exact.
    """
    if dtype != torch.bfloat16 or not torch.cpu._is_amx_tile_supported():
        return False
    has_capability = torch.backends.cpu.get_cpu_capability() == "AVX512"
    return has_capability and bool(torch.backends.mkldnn.enabled)


@cache
def short_rows_fail() -> bool:
    """Whether torch's attention raises for 16-bit rows.

    On a CPU with a matrix unit (AMX) torch rearranges 16-bit rows by the function pack_vnni2, which exists only for the
    capability AVX512. If the user has chosen a lower capability (ATEN_CPU_CAPABILITY=avx2), torch raises.
    """
    return (
        torch.cpu._is_amx_tile_supported() and torch.backends.cpu.get_cpu_capability() != "AVX512"
    )


def forward(
    q_BHMD: Tensor, k_BGLD: Tensor, v_BGLD: Tensor, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    # Check the strides, because with a last stride other than 1 the op returns wrong results without an error.
    assert q_BHMD.stride(-1) == k_BGLD.stride(-1) == v_BGLD.stride(-1) == 1
    # Check that no tensor is empty, because an empty tensor kills the process.
    assert min(q_BHMD.numel(), k_BGLD.numel()) > 0
    dtype = q_BHMD.dtype
    # Copy the rows of a cache to float32. 16-bit rows that are not from a cache never get here: the caller copies them
    # to float32, because `takes_short_rows` returned False.
    if dtype.itemsize == 2 and short_rows_fail():
        q_BHMD = q_BHMD.float()
        k_BGLD = k_BGLD.float()
        v_BGLD = v_BGLD.float()
    out_BHMD, lse_BHM = _forward(q_BHMD, k_BGLD, v_BGLD, 0.0, is_causal, scale=scale)
    return out_BHMD.to(dtype), lse_BHM


def backward(rows: BackwardRows, is_causal: bool, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    head_dim = rows.query.shape[-1]
    dout, _, query, key, value, out, lse = with_dlse_columns(rows)
    grads = _backward(dout, query, key, value, out, lse, 0.0, is_causal, scale=scale)
    return tuple(grad[..., :head_dim] for grad in grads)
