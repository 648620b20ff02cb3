"""torchscale's attention by the definition: each branch over rows padded with zeros, then one softmax of the branches.

Dense and slow, for small sizes. B batch, N positions, H heads, D head dim, P rows with those of padding.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ring_dilated_attention.pattern import DilatedPattern
from ring_dilated_attention.reference import dilated_attention_reference


class PaddedBranch(NamedTuple):
    """Where torchscale puts the rows of one branch.

    rows_P: the position of each padded row; is_row_P: False where the row is padding. pattern: the branch, over them.
    """

    rows_P: Tensor
    is_row_P: Tensor
    pattern: DilatedPattern


def padded_branches(pattern, length):
    for segment_length, rate, _ in pattern.branches:
        w = min(segment_length, length)
        taken = -(-w // rate) * rate  # places of a segment
        places_P = torch.arange(-(-length // w) * taken)
        rows_P = places_P // taken * w + places_P % taken
        is_row_P = (places_P % taken < w) & (rows_P < length)
        one = DilatedPattern((taken,), (rate,), is_causal=pattern.is_causal, phase="blocked")
        yield PaddedBranch(rows_P.where(is_row_P, 0), is_row_P, one)


def padded_reference(query_BNHD, key_BNHD, value_BNHD, pattern, scale=None):
    """out (B, N, H, D) and lse (B, N, H), rows where torchscale puts them."""
    inputs = (query_BNHD, key_BNHD, value_BNHD)
    length = query_BNHD.shape[1]
    outs, lses = [], []
    for rows_P, is_row_P, one in padded_branches(pattern, length):
        query, key, value = (x[:, rows_P] * is_row_P[:, None, None] for x in inputs)
        out, lse = dilated_attention_reference(query, key, value, one, scale=scale)
        # a zero query that sees one zero key has lse = 0, which torchscale takes for "not covered"
        if one.segment_lengths == one.dilation_rates:
            lse = lse.masked_fill(~is_row_P[:, None], -torch.inf)
        outs.append(out[:, :length])
        lses.append(lse[:, :length])
    lse_BNH = torch.stack(lses).logsumexp(0)
    weights = [(lse - lse_BNH.where(lse_BNH > -torch.inf, 0)).exp().unsqueeze(-1) for lse in lses]
    return sum(
        (weight * out for weight, out in zip(weights, outs, strict=True)),
        torch.zeros_like(query_BNHD),
    ), lse_BNH
