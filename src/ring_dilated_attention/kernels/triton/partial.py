"""A partial and its gradients by Triton kernels.

Unverified: no GPU was at hand. Tested in Triton's interpreter (float32, float16) and compiled ahead of time
(`compile.py`); so "auto" does not choose it.

B batch, H query heads, G key/value heads, M query rows, L key rows, D head dim. Inputs are views with any strides but a
last one of 1. `forward_into` and `backward_into` add to accumulators in place, so that a later branch or hop needs
neither a partial nor a pass that merges.
"""

import importlib.util
import os

import torch
from torch import Tensor

from .config import PATH, architecture, has_config

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Why "auto" passes it by, although it could serve a tensor. To be removed with the first verified run on a GPU.
ONLY_BY_NAME = "has not run on a GPU yet, so it is used only when asked for by name"


def why_not(query: Tensor) -> str | None:
    """The reason why this backend cannot serve the tensor, or None."""
    if importlib.util.find_spec("triton") is None:
        return "needs triton, which is not installed; pip install triton"
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if query.device.type != "cuda" and not (interpreted and query.device.type == "cpu"):
        return f"serves CUDA tensors (others only in Triton's interpreter, TRITON_INTERPRET=1), got {query.device}"
    if query.dtype not in DTYPES:
        return f"serves {', '.join(map(str, DTYPES))}, got {query.dtype}"
    if query.shape[-1] > 256:
        return f"serves head dims up to 256, got {query.shape[-1]}"
    if interpreted:
        if query.dtype == torch.bfloat16:
            return "cannot serve torch.bfloat16 in Triton's interpreter, whose products of it are wrong"
    elif not has_config(architecture(query.device)):
        return f"has no block sizes for {architecture(query.device)} in {PATH.name}"
    return None


def forward(
    q_BHMD: Tensor, k_BGLD: Tensor, v_BGLD: Tensor, is_causal: bool, scale: float, *, input_precision: str = "ieee"
) -> tuple[Tensor, Tensor]:
    """out (B, H, M, D) in the input's dtype and lse (B, H, M) in float32. Causal is for M == L only.

    input_precision: of products of float32: "ieee", or "tf32" (ten bits of mantissa, many times faster).
    """
    from .launch import rows_like

    out_BHMD = rows_like(q_BHMD)
    lse_BHM = rows_like(q_BHMD[..., :1], torch.float32).squeeze(-1)
    forward_into(
        q_BHMD, k_BGLD, v_BGLD, out_BHMD, lse_BHM, is_causal, scale, first=True, input_precision=input_precision
    )
    return out_BHMD, lse_BHM


def forward_into(
    q_BHMD: Tensor,
    k_BGLD: Tensor,
    v_BGLD: Tensor,
    out_BHMD: Tensor,
    lse_BHM: Tensor,
    is_causal: bool,
    scale: float,
    *,
    first: bool,
    input_precision: str = "ieee",
) -> None:
    """Merge the partial over these keys into (out, lse), float32 views; or, if it is the first, write it."""
    from .launch import launch_forward

    launch_forward(q_BHMD, k_BGLD, v_BGLD, out_BHMD, lse_BHM, is_causal, scale, not first, input_precision)


def backward(
    dout_BHMD: Tensor,
    dlse_BHM: Tensor | None,
    q_BHMD: Tensor,
    k_BGLD: Tensor,
    v_BGLD: Tensor,
    out_BHMD: Tensor,
    lse_BHM: Tensor,
    is_causal: bool,
    scale: float,
    *,
    input_precision: str = "ieee",
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv of these rows. `out` and `lse` are the merged ones: p = exp(s - lse) is then the global weight."""
    from .launch import rows_like

    grads = rows_like(q_BHMD), rows_like(k_BGLD), rows_like(v_BGLD)
    delta_BHM = delta(dout_BHMD, dlse_BHM, out_BHMD)
    backward_into(
        dout_BHMD,
        delta_BHM,
        q_BHMD,
        k_BGLD,
        v_BGLD,
        lse_BHM.contiguous(),
        *grads,
        is_causal,
        scale,
        first_query=True,
        first_key=True,
        input_precision=input_precision,
    )
    return grads


def delta(dout_BHMD: Tensor, dlse_BHM: Tensor | None, out_BHMD: Tensor) -> Tensor:
    """rowsum(dout * out) - dlse, (B, H, M) in float32, contiguous. Once per call serves all tiles."""
    from .launch import launch_delta

    delta_BHM = torch.empty(out_BHMD.shape[:3], dtype=torch.float32, device=out_BHMD.device)
    launch_delta(dout_BHMD, dlse_BHM, out_BHMD, delta_BHM)
    return delta_BHM


def backward_into(
    dout_BHMD: Tensor,
    delta_BHM: Tensor,
    q_BHMD: Tensor,
    k_BGLD: Tensor,
    v_BGLD: Tensor,
    lse_BHM: Tensor,
    dq_BHMD: Tensor,
    dk_BGLD: Tensor,
    dv_BGLD: Tensor,
    is_causal: bool,
    scale: float,
    *,
    first_query: bool,
    first_key: bool,
    input_precision: str = "ieee",
) -> None:
    """Add dq, dk, dv of these rows to float32 views, or write them if they are the first.

    `lse` is the merged one and `delta` is of the merged out; both have the same strides.
    """
    from .launch import launch_key_gradient, launch_query_gradient

    inputs = (dout_BHMD, delta_BHM, q_BHMD, k_BGLD, v_BGLD, lse_BHM)
    launch_query_gradient(*inputs, dq_BHMD, is_causal, scale, not first_query, input_precision)
    launch_key_gradient(*inputs, dk_BGLD, dv_BGLD, is_causal, scale, not first_key, input_precision)
