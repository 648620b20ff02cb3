"""A partial and its gradients by torch's CUDA attention ops: flash, memory-efficient and cuDNN.

Unverified: no GPU has run it. Written from the ops' schemas and sources, tested on meta tensors and with stand-ins that
keep to the ops' contracts.

The first op of `cuda_ops.OPS` that takes a call runs it. `torch.nn.attention.sdpa_kernel([...])` selects one here as
everywhere (but for set_priority: the order is that of the table). FlashAttention 3 and 4 run in the place of torch's
flash once somebody has called `torch.nn.attention.activate_flash_attention_impl`; nothing here does.

B batch, H query heads, G key/value heads, M query rows, L key rows, D head dim. Inputs are views; the ops read any
strides, if those of the last dimension are 1 and the others whole numbers of 16 bytes.
"""

from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.attention import current_flash_attention_impl
from torch.nn.functional import pad

from .column import num_columns, with_dlse_columns
from .contract import BackwardRows
from .cuda_ops import OPS, TileFacts
from .traits import TRAITS as ALL_TRAITS

aten: Any = torch.ops.aten

NAME = "sdpa"
IN_PLACE: Literal[False] = False
TRAITS = ALL_TRAITS[NAME]
ONLY_BY_NAME: str | None = None
choose_pass = append_one = None

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def why_not(query: Tensor) -> str | None:
    """The reason why this backend cannot serve the tensor, or None."""
    if query.device.type != "cuda":
        return f"serves CUDA tensors, got {query.device}"
    if query.dtype not in DTYPES:
        return f"serves {', '.join(map(str, DTYPES))}, got {query.dtype}"
    if torch.compiler.is_compiling():  # it cannot trace torch's switches; the call itself will ask again
        return None
    # A tile that says nothing of this rank's length, so that all ranks refuse a call or none does.
    against = _against(_dense_tile(query)._replace(batch=1, num_rows=2, num_keys=2))
    return None if None in against.values() else f"has no op for these tensors: {_listed(against)}"


def ops(query: Tensor) -> dict[str, str | None]:
    """For each op the reason why it cannot attend densely to the tensor (B, N, H, D), or None if it can.

    Names say whose it is: "efficient", "flash, FA3".
    """
    active = current_flash_attention_impl()
    against = _against(_dense_tile(query))
    return {f"{name}, {active}" if name == "flash" and active else name: reason for name, reason in against.items()}


def _dense_tile(query: Tensor) -> TileFacts:
    return _tile(query.transpose(1, 2), query.transpose(1, 2))


def _tile(q_BHMD: Tensor, k_BGLD: Tensor) -> TileFacts:
    batch, num_heads, num_rows, head_dim = q_BHMD.shape
    return TileFacts(q_BHMD.dtype, q_BHMD.device, batch, num_heads, num_rows, k_BGLD.shape[2], head_dim)


def _against(tile: TileFacts) -> dict[str, str | None]:
    return {name: op.why_not(tile) for name, op in OPS.items()}


def _listed(against: dict[str, str | None]) -> str:
    return "; ".join(f"{name} {reason}" for name, reason in against.items())


def _choose(tile: TileFacts) -> str:
    """The first op that takes the tile. Those of one call may go to several."""
    against = _against(tile)
    for name, reason in against.items():
        if reason is None:
            return name
    size = f"{tile.batch} x {tile.num_heads} x {tile.num_rows} queries and {tile.num_keys} keys of {tile.head_dim}"
    raise ValueError(f"backend='sdpa' has no op for {size}: {_listed(against)}. Enable another.")


def _aligned(x_BHMD: Tensor) -> Tensor:
    """Rows, strides and pointer in whole numbers of 16 bytes, which the ops read at a time. Most tensors are so."""
    width = 16 // x_BHMD.element_size()
    if x_BHMD.shape[-1] % width:
        return pad(x_BHMD, (0, -x_BHMD.shape[-1] % width))
    assert x_BHMD.stride(-1) == 1
    if x_BHMD.data_ptr() % 16 or any(stride % width for stride in x_BHMD.stride()[:-1]):
        return x_BHMD.clone(memory_format=torch.contiguous_format)
    return x_BHMD


def _expanded(x_BGLD: Tensor, num_heads: int) -> Tensor:
    return x_BGLD if num_heads == x_BGLD.shape[1] else x_BGLD.repeat_interleave(num_heads // x_BGLD.shape[1], dim=1)


def forward(q_BHMD: Tensor, k_BGLD: Tensor, v_BGLD: Tensor, is_causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """out (B, H, M, D) in the input's dtype and lse (B, H, M) in float32. Causal is for M == L only."""
    num_heads, num_rows, head_dim = q_BHMD.shape[1:]
    name = _choose(_tile(q_BHMD, k_BGLD))
    q, k, v = map(_aligned, (q_BHMD, k_BGLD, v_BGLD))
    if not OPS[name].takes_groups:
        k, v = _expanded(k, num_heads), _expanded(v, num_heads)
    op = getattr(aten, f"_scaled_dot_product_{name}_attention")
    out, lse = op(q, k, v, *OPS[name].forward_arguments, 0.0, is_causal, scale=scale)[:2]
    # The memory-efficient op pads lse to multiples of 32 rows, and cuDNN's is (B, H, M, 1).
    return out[..., :head_dim], lse.flatten(2)[..., :num_rows]


def backward(rows: BackwardRows, is_causal: bool, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv of these rows.

    The op is chosen anew, also if another ran forward: of forward's results any backward uses out and lse only.
    """
    num_heads, head_dim = rows.query.shape[1], rows.query.shape[3]
    num_kv_heads, num_keys = rows.key.shape[1:3]
    if rows.dlse is not None:
        width = num_columns(rows.query.dtype)
        width += -(head_dim + width) % (16 // rows.query.element_size())  # aligned, so that nothing is padded twice
        rows = with_dlse_columns(rows, width)
    dout, q, k, v, out = map(_aligned, (rows.dout, rows.query, rows.key, rows.value, rows.out))
    name = _choose(_tile(q, k))
    if not OPS[name].takes_groups:
        k, v = _expanded(k, num_heads), _expanded(v, num_heads)
    if not OPS[name].takes_strides:
        dout, out = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (dout, out))  # as (B, M, H, D)
    op = getattr(aten, f"_scaled_dot_product_{name}_attention_backward")
    arguments = OPS[name].backward_arguments(out, rows.lse.contiguous(), num_keys, is_causal)
    dq, dk, dv = (grad[..., :head_dim] for grad in op(dout, q, k, v, *arguments, scale=scale)[:3])
    if dk.shape[1] != num_kv_heads:  # of expanded heads
        dk, dv = (x.unflatten(1, (num_kv_heads, -1)).sum(2) for x in (dk, dv))
    return dq, dk, dv
