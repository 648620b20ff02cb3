"""Checks what modules are given, before they compute."""

import math

import torch
from torch import Tensor

from ..pattern import is_integer


def is_integral(x: Tensor) -> bool:
    return not (x.is_floating_point() or x.is_complex() or x.dtype == torch.bool)


def check_tensor(name: str, x: object) -> None:
    if not isinstance(x, Tensor):
        raise ValueError(f"{name} must be a tensor, got {type(x).__name__}")


def check_heads(embed_dim: int, num_heads: int, num_kv_heads: int) -> None:
    for name, number in (("embed_dim", embed_dim), ("num_heads", num_heads), ("num_kv_heads", num_kv_heads)):
        if not is_integer(number):
            raise ValueError(f"{name} must be an integer, got {number!r}")
    if num_heads < 1 or embed_dim < 1:
        raise ValueError(f"embed_dim={embed_dim} and num_heads={num_heads} must be at least 1")
    if embed_dim % num_heads:
        raise ValueError(
            f"embed_dim={embed_dim} is not a multiple of num_heads={num_heads} (remainder {embed_dim % num_heads}): "
            "choose a number of heads that divides it"
        )


def valid_lengths(mask_BN: Tensor, batch: int, num_positions: int) -> Tensor:
    """(B, N), True at padding -> (B,) numbers of valid positions, which must precede the padding in each row."""
    if mask_BN.shape != (batch, num_positions):
        shape = tuple(mask_BN.shape)
        raise ValueError(f"key_padding_mask has shape {shape}, the inputs need ({batch}, {num_positions})")
    if mask_BN.is_floating_point():
        # nn.TransformerEncoderLayer turns its bool mask into 0 and -inf before it calls the attention.
        if not ((mask_BN == 0) | (mask_BN == -math.inf)).all():
            raise ValueError("key_padding_mask is a float mask with values other than 0 and -inf: pass a bool mask")
        mask_BN = mask_BN != 0
    if mask_BN.dtype != torch.bool:
        raise ValueError(f"key_padding_mask has dtype {mask_BN.dtype}: pass a bool mask, True at padding")
    lengths_B = (~mask_BN).sum(1)
    expected_BN = torch.arange(num_positions, device=mask_BN.device) >= lengths_B[:, None]
    wrong = (mask_BN != expected_BN).nonzero()
    if len(wrong):
        row, first = wrong[0].tolist()
        raise ValueError(
            f"key_padding_mask row {row} has padding at position {first} and valid positions after it "
            f"({int(lengths_B[row])} valid in all): padding must be on the right; move it there, or pack the documents "
            "into one row and pass cu_seqlens"
        )
    return lengths_B
