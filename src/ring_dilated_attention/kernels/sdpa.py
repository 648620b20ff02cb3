"""Computes forward and backward of a tile (some queries and the keys that they attend to) by torch's CUDA attention
ops: flash, memory-efficient and cuDNN.

Unverified: no GPU has run it. It is written from the ops' schemas and sources, and tested on meta tensors and with
stand-ins that keep to the ops' contracts.

For each tile, the ops are tried in the order of `cuda_ops.in_order`, and the first op that can compute the tile is
used. `torch.nn.attention.sdpa_kernel([...])` enables ops as usual, but does not change their order, even with
set_priority. After a call of `torch.nn.attention.activate_flash_attention_impl` FlashAttention 3 or 4 runs instead of
torch's flash.

Names are those of `contract.py`.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import current_flash_attention_impl
from torch.nn.functional import pad

from . import rows_at_once
from .contract import BackwardRows, Merging
from .cuda_ops import OPS, TileFacts, in_order, lse_multiple
from .lse_gradient import dlse_columns, with_dlse_columns
from .traits import TRAITS as ALL_TRAITS

aten: Any = torch.ops.aten

NAME = "sdpa"
TRAITS = ALL_TRAITS[NAME]

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def why_not(query: Tensor) -> str | None:
    if query.device.type != "cuda":
        return f"serves CUDA tensors, got {query.device}"
    if query.dtype not in DTYPES:
        return f"serves {', '.join(map(str, DTYPES))}, got {query.dtype}"
    # Under torch.compile skip the checks below, because the compiler cannot trace them. They are made when the compiled
    # call runs.
    if torch.compiler.is_compiling():
        return None
    against = _against(_any_tile(query))
    if None in against.values():
        return None
    return f"has no op for these tensors: {_listed(against)}"


def takes_short_rows(dtype: torch.dtype) -> bool:
    return True


def merging(query: Tensor) -> Merging | None:
    """The Triton kernels of `rows_at_once`, or None where Triton does not work."""
    if rows_at_once.why_not(query.device):
        return None
    return Merging(
        merge=rows_at_once.merge_rows,
        add=rows_at_once.add_rows,
        lay_out=rows_at_once.lay_out_rows,
        dlse_columns=partial(dlse_columns, multiple=_row_multiple(query)),
        lse_multiple=lse_multiple(_first(_any_tile(query))),
    )


def ops(query: Tensor) -> dict[str, str | None]:
    """torch's ops by name, in the order in which they are tried. The value for an op is the reason why this op cannot
    run dense attention on the tensor, or None if it can. If FlashAttention 3 is active, the name of flash is
    "flash, FA3"."""
    q_BHMD = query.transpose(1, 2)
    active = current_flash_attention_impl()
    reasons: dict[str, str | None] = {}
    for name, reason in _against(_tile(q_BHMD, q_BHMD)).items():
        if name == "flash" and active:
            name = f"flash, {active}"
        reasons[name] = reason
    return reasons


def _any_tile(query: Tensor) -> TileFacts:
    """The facts of a small example tile with the query's dtype, heads and head dim. Before a call, each op is asked
    whether it can compute the example tile.

    The example tile has two rows on every rank, however many positions a rank has. So either all ranks refuse the call,
    or none does.
    """
    _, _, num_heads, head_dim = query.shape
    capability = torch.cuda.get_device_capability(query.device)
    return TileFacts(query.dtype, capability, 1, num_heads, 2, 2, head_dim)


def _tile(q_BHMD: Tensor, k_BGLD: Tensor, is_backward: bool = False) -> TileFacts:
    batch, num_heads, num_rows, head_dim = q_BHMD.shape
    num_keys = k_BGLD.shape[2]
    capability = torch.cuda.get_device_capability(q_BHMD.device)
    return TileFacts(
        q_BHMD.dtype, capability, batch, num_heads, num_rows, num_keys, head_dim, is_backward
    )


def _against(tile: TileFacts) -> dict[str, str | None]:
    return {name: OPS[name].why_not(tile) for name in in_order(tile)}


def _listed(against: dict[str, str | None]) -> str:
    return "; ".join(f"{name} {reason}" for name, reason in against.items())


def _first(tile: TileFacts) -> str | None:
    for name in in_order(tile):
        if OPS[name].why_not(tile) is None:
            return name
    return None


def _choose(tile: TileFacts) -> str:
    """The name of the first op that can compute the tile. Different tiles of one call may get different ops."""
    name = _first(tile)
    if name is not None:
        return name

    size = f"{tile.batch} x {tile.num_heads} x {tile.num_rows} queries, {tile.num_keys} keys, head dim {tile.head_dim}"
    raise ValueError(
        f"backend='sdpa' has no op for {size}: {_listed(_against(tile))}. Enable another op."
    )


def _row_multiple(x: Tensor) -> int:
    """The number of elements in 16 bytes. The ops need rows of a multiple of this number."""
    return 16 // x.element_size()


def _aligned(tensors_BHMD: Sequence[Tensor]) -> list[Tensor]:
    """The tensors, or copies whose rows, strides and pointers are multiples of 16 bytes, as the ops need them. The
    tensors have the same dtype and head dim."""
    width = _row_multiple(tensors_BHMD[0])
    padding = -tensors_BHMD[0].shape[3] % width
    if padding:
        return [pad(x, (0, padding)) for x in tensors_BHMD]

    aligned: list[Tensor] = []
    for x in tensors_BHMD:
        stride_b, stride_h, stride_m, last = x.stride()
        assert last == 1
        if x.data_ptr() % 16 or (stride_b | stride_h | stride_m) % width:
            x = x.clone(memory_format=torch.contiguous_format)
        aligned.append(x)
    return aligned


def _heads_together(x_BHMD: Tensor) -> Tensor:
    """The tensor, or a copy, so that it is contiguous as (B, M, H, D). An op without `takes_strides` needs it so."""
    _, num_heads, num_rows, head_dim = x_BHMD.shape
    row = num_heads * head_dim
    # Rows that `Merging.lay_out` wrote are returned here: to transpose them twice would take longer.
    if x_BHMD.stride() == (num_rows * row, head_dim, row, 1):
        return x_BHMD
    return x_BHMD.transpose(1, 2).contiguous().transpose(1, 2)


def _prepared(*given: Tensor) -> tuple[str, list[Tensor]]:
    """The name of the op that takes a tile, and the tensors as this op needs them: query, key and value, and in
    backward also dout and out."""
    query, key = given[:2]
    name = _choose(_tile(query, key, is_backward=len(given) > 3))
    tensors = _aligned(given)

    ratio = query.shape[1] // key.shape[1]
    if ratio > 1 and not OPS[name].takes_groups:
        # Expand key and value to (B, H, L, D).
        tensors[1:3] = [x.repeat_interleave(ratio, dim=1) for x in tensors[1:3]]
    if not OPS[name].takes_strides:
        tensors[3:] = map(_heads_together, tensors[3:])
    return name, tensors


def forward(
    q_BHMD: Tensor, k_BGLD: Tensor, v_BGLD: Tensor, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    num_rows, head_dim = q_BHMD.shape[2:]
    name, (q, k, v) = _prepared(q_BHMD, k_BGLD, v_BGLD)
    op = getattr(aten, f"_scaled_dot_product_{name}_attention")
    out, lse = op(q, k, v, *OPS[name].forward_arguments, 0.0, is_causal, scale=scale)[:2]

    # Undo what ops do to lse: the memory-efficient op pads lse to a multiple of 32 rows, and cuDNN returns lse as
    # (B, H, M, 1).
    if lse.dim() == 4:
        lse = lse.squeeze(3)
    if lse.shape[2] > num_rows:
        lse = lse.narrow(2, 0, num_rows)
    if out.shape[3] > head_dim:
        out = out.narrow(3, 0, head_dim)
    return out, lse


def backward(rows: BackwardRows, is_causal: bool, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """dq (B, H, M, D), dk and dv (B, G, L, D) of this tile.

    The op may differ from the forward's, because every op's backward needs only out and lse from the forward.
    """
    _, _, num_rows, head_dim = rows.query.shape
    _, num_kv_heads, num_keys, _ = rows.key.shape
    rows = with_dlse_columns(rows, _row_multiple(rows.query))
    name, (q, k, v, dout, out) = _prepared(rows.query, rows.key, rows.value, rows.dout, rows.out)

    # Make lse contiguous, with a multiple of `lse_multiple` rows. If lse has too few rows, add rows of inf.
    lse = rows.lse
    given = lse.shape[2]
    wanted = num_rows + -num_rows % lse_multiple(name)
    if given < wanted:
        lse = pad(lse[..., :num_rows], (0, wanted - num_rows), value=torch.inf)
    if given > wanted:
        lse = lse[..., :wanted]
    lse = lse.contiguous()

    op = getattr(aten, f"_scaled_dot_product_{name}_attention_backward")
    arguments = OPS[name].backward_arguments(out, lse, num_keys, is_causal)
    dq, dk, dv, *_ = op(dout, q, k, v, *arguments, scale=scale)

    # dq is (B, H, M, D). dk and dv are (B, G, L, D), or (B, H, L, D) if heads were expanded.
    if dq.shape[3] > head_dim:
        dq, dk, dv = (gradient.narrow(3, 0, head_dim) for gradient in (dq, dk, dv))
    if dk.shape[1] != num_kv_heads:  # sum over the query heads that share a key/value head
        dk, dv = (x.unflatten(1, (num_kv_heads, -1)).sum(2) for x in (dk, dv))
    return dq, dk, dv
