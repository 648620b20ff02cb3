"""torchscale's DilatedAttention without projections, for the other scripts. torch's CPU op replaces flash_attn."""

from types import SimpleNamespace

import torch
from torchscale.component import dilated_attention, multihead_attention


def flash(q, k, v, dropout, bias, scale, is_causal):
    op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    out, lse = op(*(x.transpose(1, 2) for x in (q, k, v)), 0.0, is_causal, scale=scale)
    return out.transpose(1, 2), lse


def attention(segment_lengths, dilated_ratio, num_heads, head_dim, seq_parallel=False):
    multihead_attention.flash_attn_func = flash
    torch.cuda.current_device = lambda: "cpu"
    args = SimpleNamespace(
        segment_length=segment_lengths, dilated_ratio=dilated_ratio, seq_parallel=seq_parallel
    )
    args.flash_attention, args.multiway, args.xpos_rel_pos = True, False, False
    module = dilated_attention.DilatedAttention(
        args, num_heads * head_dim, num_heads, self_attention=True
    )
    module.q_proj = module.k_proj = module.v_proj = module.out_proj = torch.nn.Identity()
    return lambda q, k, v, is_causal=False: module(q, k, v, is_causal=is_causal)[0]
