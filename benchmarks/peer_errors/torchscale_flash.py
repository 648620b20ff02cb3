"""torchscale's DilatedAttention without projections, for the other scripts. torch's CPU op replaces flash_attn."""

from types import SimpleNamespace

import torch
from torchscale.component import dilated_attention, multihead_attention


def flash(q, k, v, dropout, bias, scale, is_causal):
    """flash_attn's function as torchscale calls it: returns out (B, M, H, D) and lse (B, H, M)."""
    op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    rows = (x.transpose(1, 2) for x in (q, k, v))
    out, lse = op(*rows, 0.0, is_causal, scale=scale)
    return out.transpose(1, 2), lse


def attention(segment_lengths, dilated_ratio, num_heads, head_dim, seq_parallel=False):
    """The module as a function of query, key and value (B, N, H * D).

    seq_parallel: each rank gives the rows of its own shard.
    """
    multihead_attention.flash_attn_func = flash
    torch.cuda.current_device = lambda: "cpu"
    args = SimpleNamespace(
        segment_length=segment_lengths,
        dilated_ratio=dilated_ratio,
        seq_parallel=seq_parallel,
        flash_attention=True,
        multiway=False,
        xpos_rel_pos=False,
    )
    width = num_heads * head_dim
    module = dilated_attention.DilatedAttention(args, width, num_heads, self_attention=True)
    module.q_proj = module.k_proj = module.v_proj = module.out_proj = torch.nn.Identity()

    def attend(q, k, v, is_causal=False):
        out, _ = module(q, k, v, is_causal=is_causal)
        return out

    return attend
