"""A partial and its gradients by torch's CPU flash attention, which returns the log-sum-exp.

B batch, H query heads, G key/value heads, M query rows, L key rows, D head dim. Inputs are views; the op reads any
strides as long as those of the last dimension are 1.
"""

import torch
from torch import Tensor

from .column import with_dlse_column

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def why_not(query: Tensor) -> str | None:
    """The reason why this backend cannot serve the tensor, or None."""
    if query.device.type != "cpu":
        return f"serves CPU tensors, got {query.device}"
    if query.dtype not in DTYPES:
        return f"serves {', '.join(map(str, DTYPES))}, got {query.dtype}"
    return None


def forward(q_BHMD: Tensor, k_BGLD: Tensor, v_BGLD: Tensor, is_causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """out (B, H, M, D) in the input's dtype and lse (B, H, M), float32 or float64. Causal is for M == L only."""
    assert q_BHMD.stride(-1) == k_BGLD.stride(-1) == v_BGLD.stride(-1) == 1  # else the op is silently wrong
    assert min(q_BHMD.numel(), k_BGLD.numel()) > 0  # else the op kills the process
    return _forward(q_BHMD, k_BGLD, v_BGLD, 0.0, is_causal, scale=scale)


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
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv of these rows. `out` and `lse` are the merged ones: p = exp(s - lse) is then the global weight."""
    inputs: tuple[Tensor, ...] = (dout_BHMD, q_BHMD, k_BGLD, v_BGLD, out_BHMD)
    if dlse_BHM is not None:
        inputs = with_dlse_column(dout_BHMD, q_BHMD, k_BGLD, v_BGLD, out_BHMD, dlse_BHM)
    # The op's float16 backward takes nine times as long as its float32 one (283 against 31 ms for 4 x 1024 x 64).
    if q_BHMD.dtype == torch.float16:
        inputs = tuple(x.float() for x in inputs)
    dout, q, k, v, out = inputs
    grads = _backward(dout, q, k, v, out, lse_BHM, 0.0, is_causal, scale=scale)
    head_dim = q_BHMD.shape[-1]
    return tuple(grad[..., :head_dim] for grad in grads)
