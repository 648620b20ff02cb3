"""A partial and its gradients by torch's CUDA attention ops: flash for 16-bit types, memory-efficient for the rest.

Unverified: written from the ops' schemas and checked on meta tensors only; no GPU was at hand.

B batch, H query heads, G key/value heads, M query rows, L key rows, D head dim.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from .column import with_dlse_column

aten = torch.ops.aten

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_ALIGNMENT = 8  # both ops want head dims that are multiples of 8 (16 bytes of a 16-bit type)


def why_not(query: Tensor) -> str | None:
    """The reason why this backend cannot serve the tensor, or None."""
    if query.device.type != "cuda":
        return f"serves CUDA tensors, got {query.device}"
    if query.dtype not in DTYPES:
        return f"serves {', '.join(map(str, DTYPES))}, got {query.dtype}"
    return None


def _is_flash(q: Tensor) -> bool:
    if q.dtype == torch.float32 or q.shape[-1] > 256:
        return False
    return q.device.type == "meta" or torch.cuda.get_device_capability(q.device) >= (8, 0)


def _padded(x: Tensor) -> Tensor:
    rest = -x.shape[-1] % _ALIGNMENT
    return pad(x, (0, rest)) if rest else x


def _expanded(x_BGLD: Tensor, num_heads: int) -> Tensor:
    """The memory-efficient op knows no grouped queries."""
    return x_BGLD.repeat_interleave(num_heads // x_BGLD.shape[1], dim=1)


def _summed(dx_BHLD: Tensor, num_kv_heads: int) -> Tensor:
    return dx_BHLD.unflatten(1, (num_kv_heads, -1)).sum(2)


def forward(q_BHMD: Tensor, k_BGLD: Tensor, v_BGLD: Tensor, is_causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """out (B, H, M, D) in the input's dtype and lse (B, H, M) in float32. Causal is for M == L only."""
    num_heads, num_rows, head_dim = q_BHMD.shape[1:]
    q, k, v = map(_padded, (q_BHMD, k_BGLD, v_BGLD))
    k, v = _expanded(k, num_heads), _expanded(v, num_heads)
    if _is_flash(q):
        out, lse = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, is_causal, scale=scale)[:2]
    else:
        out, lse = aten._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.0, is_causal, scale=scale)[:2]
    return out[..., :head_dim], lse[..., :num_rows]  # the memory-efficient op pads lse to multiples of 32


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
    num_heads, num_rows, head_dim = q_BHMD.shape[1:]
    num_kv_heads, num_keys = k_BGLD.shape[1:3]
    inputs: tuple[Tensor, ...] = (dout_BHMD, q_BHMD, k_BGLD, v_BGLD, out_BHMD)
    if dlse_BHM is not None:
        inputs = with_dlse_column(dout_BHMD, q_BHMD, k_BGLD, v_BGLD, out_BHMD, dlse_BHM)
    dout, q, k, v, out = map(_padded, inputs)
    k, v = _expanded(k, num_heads), _expanded(v, num_heads)
    lse = lse_BHM.contiguous()
    none = torch.empty(0, dtype=torch.int64, device=q.device)  # dropout's seed and offset, unused
    if _is_flash(q):
        dq, dk, dv = aten._scaled_dot_product_flash_attention_backward(
            dout, q, k, v, out, lse, None, None, num_rows, num_keys, 0.0, is_causal, none, none, scale=scale
        )
    else:
        lse = pad(lse, (0, -num_rows % 32), value=torch.inf)
        dq, dk, dv, _ = aten._scaled_dot_product_efficient_attention_backward(
            dout, q, k, v, None, out, lse, none, none, 0.0, [True, True, True, False], is_causal, scale=scale
        )
    dq, dk, dv = (grad[..., :head_dim] for grad in (dq, dk, dv))
    return dq, _summed(dk, num_kv_heads), _summed(dv, num_kv_heads)
