"""Heads for positions (DeepSpeed-Ulysses, arXiv 2309.14509): before the attention every rank of a group gets all of the
group's positions of its share of the heads, afterwards its own positions of all heads again.

B batch, N positions of this rank, T positions of the group, H heads, h = H / p heads of this rank, D head dim.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..ranks.link import Link


def to_heads(x_BNHD: Tensor, lengths: Sequence[int], link: Link, moment: str) -> Tensor:
    """(B, N, H, D) -> (B, T, h, D). `lengths` are the ranks' numbers of positions; T is their sum."""
    batch, _, num_heads, head_dim = x_BNHD.shape
    share = num_heads // link.world_size
    parts = [part.flatten() for part in x_BNHD.split(share, dim=2)]
    sizes = [batch * length * share * head_dim for length in lengths]
    received = link.all_to_all_single(parts, sizes, x_BNHD, moment)
    rows = [part.view(batch, n, share, head_dim) for part, n in zip(received, lengths, strict=True)]
    return torch.cat(rows, dim=1)


def to_positions(x_BThD: Tensor, lengths: Sequence[int], link: Link, moment: str) -> Tensor:
    """(B, T, h, D) -> (B, N, H, D)."""
    batch, _, share, head_dim = x_BThD.shape
    length = lengths[link.rank]
    parts = [part.flatten() for part in x_BThD.split(list(lengths), dim=1)]
    sizes = [batch * length * share * head_dim] * link.world_size
    received = link.all_to_all_single(parts, sizes, x_BThD, moment)
    return torch.cat([part.view(batch, length, share, head_dim) for part in received], dim=2)
