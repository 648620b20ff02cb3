"""Another library's dilated attention, called as it stands, if it can be imported."""

import importlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ring_dilated_attention.pattern import DilatedPattern


def torchscale_attention(
    pattern: DilatedPattern, num_heads: int, head_dim: int
) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """LongNet's official module without its projections, for (B, N, H, D) each.

    Its forward is this library's under phase="blocked" where each segment length divides the sequence and each rate its
    segment length; else it counts padding as keys. Its backward leaves out the gradient of the branches' weights.
    """
    dilated: Any = importlib.import_module("torchscale.component.dilated_attention")
    multihead: Any = importlib.import_module("torchscale.component.multihead_attention")
    if multihead.flash_attn_func is None:  # the flash_attn package is not there; torch's op takes its place
        multihead.flash_attn_func = flash
    arguments = SimpleNamespace(
        segment_length=list(pattern.segment_lengths),
        dilated_ratio=list(pattern.dilation_rates),
        flash_attention=True,
        seq_parallel=False,
        multiway=False,
        xpos_rel_pos=False,
    )
    module = dilated.DilatedAttention(arguments, num_heads * head_dim, num_heads, self_attention=True)
    module.q_proj = module.k_proj = module.v_proj = module.out_proj = torch.nn.Identity()

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out, _ = module(*(x.flatten(2) for x in (query, key, value)), is_causal=pattern.is_causal)
        return out.unflatten(2, (num_heads, head_dim))

    return attend


def flash(
    query: Tensor, key: Tensor, value: Tensor, dropout: float, bias: None, scale: float | None, is_causal: bool
) -> tuple[Tensor, Tensor]:
    """out (B, M, H, D) and lse (B, H, M), as flash_attn's function returns them."""
    suffix = "_for_cpu" if query.device.type == "cpu" else ""
    op = getattr(torch.ops.aten, f"_scaled_dot_product_flash_attention{suffix}")
    rows = (x.transpose(1, 2) for x in (query, key, value))
    out, lse, *_ = op(*rows, dropout, is_causal, scale=scale)
    return out.transpose(1, 2), lse
