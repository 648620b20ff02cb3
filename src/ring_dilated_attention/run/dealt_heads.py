"""Heads for positions, and back, on tensors (see `plan/dealing.py`).

B batch, N positions of this rank, T positions of the group, H heads, h = H / p heads of this rank, D head dim.
"""

import torch
from torch import Tensor

from ..plan.dealing import Dealing
from .link_contract import Dealer


def to_heads(x_BNHD: Tensor, dealing: Dealing, dealer: Dealer, moment: str) -> Tensor:
    """(B, N, H, D) -> (B, T, h, D), in the order of the sequence."""
    batch, _, num_heads, head_dim = x_BNHD.shape
    share = num_heads // dealing.size
    parts = [part.flatten() for part in x_BNHD.split(share, dim=2)]
    sizes = [batch * length * share * head_dim for length in dealing.lengths]
    received = dealer.all_to_all_single(parts, sizes, x_BNHD, moment)
    del parts
    rows = [part.view(batch, n, share, head_dim) for part, n in zip(received, dealing.lengths, strict=True)]
    pieces = [rows[k][:, first : first + length] for k, first, length in dealing.pieces]
    return torch.cat(pieces or [rows[0]], dim=1)


def to_positions(x_BThD: Tensor, dealing: Dealing, dealer: Dealer, moment: str) -> Tensor:
    """(B, T, h, D) -> (B, N, H, D)."""
    batch, _, share, head_dim = x_BThD.shape
    own = dealing.lengths[dealing.place]
    pieces: list[list[tuple[int, Tensor]]] = [[] for _ in dealing.lengths]
    row = 0
    for k, first, length in dealing.pieces:
        pieces[k].append((first, x_BThD[:, row : row + length]))
        row += length
    parts = [
        torch.cat([x for _, x in sorted(found, key=lambda entry: entry[0])] or [x_BThD[:, :0]], dim=1).flatten()
        for found in pieces
    ]
    sizes = [batch * own * share * head_dim] * dealing.size
    received = dealer.all_to_all_single(parts, sizes, x_BThD, moment)
    del parts
    return torch.cat([part.view(batch, own, share, head_dim) for part in received], dim=2)
