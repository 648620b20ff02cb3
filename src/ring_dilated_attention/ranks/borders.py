"""Borders of packed documents, as the caller gives them."""

from typing import Any

import torch
from torch import Tensor


def validate_cu_seqlens(cu_seqlens: Any, batch: int) -> None:
    """What can be said of borders before the length of the whole sequence is known."""
    if not isinstance(cu_seqlens, Tensor) or cu_seqlens.dtype != torch.int32 or cu_seqlens.dim() != 1:
        got = f"{cu_seqlens.dtype} {tuple(cu_seqlens.shape)}" if isinstance(cu_seqlens, Tensor) else repr(cu_seqlens)
        raise ValueError(
            f"cu_seqlens must be a 1-D int32 tensor, got {got}. Make it with torch.tensor(..., dtype=int32)."
        )
    if cu_seqlens.layout != torch.strided:
        raise ValueError(f"cu_seqlens must be a dense tensor, got layout {cu_seqlens.layout}. Call .to_dense().")
    if cu_seqlens.device.type == "meta" or cu_seqlens.numel() < 2:
        raise ValueError(
            f"cu_seqlens must hold the borders (0, ..., N) of one document at least, got {cu_seqlens.numel()} entries "
            f"on {cu_seqlens.device}."
        )
    if batch != 1:
        raise ValueError(f"cu_seqlens packs documents into one sequence, so batch must be 1, got {batch}. Flatten it.")
