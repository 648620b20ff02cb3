"""Defines dilated attention by dense matrices, in any dtype. Read this file first; it is never optimised.

B batch, N positions, H query heads, G key/value heads, D head dim.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from .pattern import DilatedPattern


def multiplicity(
    pattern: DilatedPattern, seq_len: int, num_heads: int, documents: Sequence[int] | None = None
) -> Tensor:
    """M[h, i, j]: the number of branches in which query i of head h attends to key j. (H, N, N), int64.

    A branch counts if the key is in reach of the query (`Branch.in_reach`), and if query and key have the phase that
    the head reads.
    documents: the borders (0, ..., N) of packed documents; None for one document.
    """
    borders = torch.tensor(documents if documents is not None else (0, seq_len))
    position = torch.arange(seq_len)
    document = torch.bucketize(position, borders, right=True) - 1
    t = position - borders[document]
    count = torch.zeros(num_heads, seq_len, seq_len, dtype=torch.int64)
    for i, branch in enumerate(pattern.branches):
        phase = (t % branch.segment_length) % branch.dilation_rate
        same = document[:, None] == document
        same = same & branch.in_reach(t[:, None], t, is_causal=pattern.is_causal)
        for h in pattern.heads_of(i, num_heads):
            own_phase = pattern.phase_of(i, h, num_heads)
            assert own_phase is not None
            reads = phase == own_phase
            count[h] += same & reads[:, None] & reads
    return count


def dilated_attention_reference(
    query_BNHD: Tensor,
    key_BNGD: Tensor,
    value_BNGD: Tensor,
    pattern: DilatedPattern,
    *,
    cu_seqlens: Sequence[int] | None = None,
    scale: float | None = None,
    sinks_H: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """out[i] = sum over j of softmax_j(score_ij) v_j, and lse[i] = logsumexp_j(score_ij).

    The scores of head h are score_ij = q_i k_j * scale + log M[h, i, j], where M is `multiplicity`. A sink takes part
    in the softmax like an additional key with the value 0.

    Args:
        cu_seqlens: the borders (0, ..., N) of packed documents; None for one document.
        scale: the default is D**-0.5.
        sinks_H: for each head the score of its sink; None for no sinks.

    Returns:
        out (B, N, H, D) and lse (B, N, H) in the input's dtype. A query without keys has out = 0 and lse = -inf, unless
        there are sinks.
    """
    seq_len, num_heads, head_dim = query_BNHD.shape[1:]
    key_BNHD = key_BNGD.repeat_interleave(num_heads // key_BNGD.shape[2], dim=2)
    value_BNHD = value_BNGD.repeat_interleave(num_heads // value_BNGD.shape[2], dim=2)
    count_HNN = multiplicity(pattern, seq_len, num_heads, cu_seqlens).to(query_BNHD.device)
    score_BHNN = torch.einsum("bihd,bjhd->bhij", query_BNHD, key_BNHD) * (
        head_dim**-0.5 if scale is None else scale
    )
    score_BHNN = score_BHNN.masked_fill(count_HNN == 0, -torch.inf)
    if sinks_H is not None:
        sink_BHN1 = sinks_H[:, None, None].expand(*score_BHNN.shape[:3], 1)
        score_BHNN = torch.cat([score_BHNN, sink_BHN1], dim=-1)
        count_HNN = pad(count_HNN, (0, 1), value=1)
        value_BNHD = pad(value_BNHD, (0, 0, 0, 0, 0, 1))
    largest = score_BHNN.detach().amax(-1, keepdim=True)
    # Subtract 0 if a query has no keys: all its scores are -inf, and (-inf) - (-inf) is NaN.
    largest = largest.masked_fill(largest == -torch.inf, 0)
    weight_BHNN = count_HNN * torch.exp(score_BHNN - largest)
    total = weight_BHNN.sum(-1, keepdim=True)
    covered = total > 0
    out = torch.einsum("bhij,bjhd->bihd", weight_BHNN / total.where(covered, 1), value_BNHD)
    lse = (total.where(covered, 1).log() + largest).masked_fill(~covered, -torch.inf)
    return out, lse.squeeze(-1).transpose(1, 2)
