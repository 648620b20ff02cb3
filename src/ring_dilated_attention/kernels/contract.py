"""The interface of a kernel: which tensors it serves, and the forward and backward of a tile (some query rows and the
key rows that they attend to). Backends are modules that implement the interface.

B batch (in a tile: segments too), N positions, H query heads, G key/value heads, M query rows, L key rows, D head dim.
Tensors may have any strides, except that the last dim has stride 1. A tile is never empty. A causal tile has M == L.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ..plan.rows import Rows
from ..plan.step import Traits


class BackwardRows(NamedTuple):
    """The inputs of a tile's backward. out and lse are over all keys, not only over those of the tile.

    So p = exp(score - lse) is a key's weight among all keys, and the tiles' gradients add up to the exact gradient.
    lse may have more rows than query (`Merging.lse_multiple`).
    """

    dout: Tensor
    dlse: Tensor | None  # the gradient of lse, or None for zero
    query: Tensor
    key: Tensor
    value: Tensor
    out: Tensor
    lse: Tensor


class TileRows(NamedTuple):
    """Tensors of a tile, and where their rows lie in a (B, N, H, D) tensor.

    rows: the positions and heads of the rows. entry: their batch entry, or None for all entries. tensors: each
    (B, H, M, D) or (B, H, M).
    """

    rows: Rows
    entry: int | None
    tensors: tuple[Tensor, ...]


class GradientSum(NamedTuple):
    """The gradients of tiles, and where their sum is written. total: the tensor (B, N, H, D) that gets the sum.
    heads: which heads of `total` are written."""

    total: Tensor
    gradients: Sequence[TileRows]
    heads: range


class Merging(NamedTuple):
    """Functions that read or write the rows of many tiles in one pass. `run/merge.py` defines them in plain torch."""

    merge: Callable[..., None]
    add: Callable[..., None]
    lay_out: Callable[..., None]
    # The caller adds rows of inf to the end of lse, so that `Kernel.backward` gets a multiple of this number of rows.
    lse_multiple: int = 1


class Kernel(Protocol):
    """A backend. It returns a tile's partial (out and lse) or gradients. The caller merges partials, and adds up
    gradients."""

    NAME: str
    TRAITS: Traits
    # A function of a (B, N, H, D) tensor. It returns the backend's ops by name. Each has the reason why it cannot run
    # dense attention on the tensor, or None if it can. The first op that can, runs. A backend with one op has ops=None.
    ops: Callable[[Tensor], dict[str, str | None]] | None

    def why_not(self, query: Tensor) -> str | None:
        """The reason why this backend cannot serve the tensor, or None."""

    def takes_short_rows(self, dtype: torch.dtype) -> bool:
        """Whether the kernel computes short rows (rows of this 16-bit dtype) as they are. If it does not, and
        `TRAITS.packing` is set, the caller gives it float32 copies of a tile's rows."""

    def merging(self, query: Tensor) -> Merging | None:
        """Functions that merge or add the results of many tiles in one pass. If it returns None, the caller merges or
        adds each result as soon as it is computed."""

    def forward(
        self, q_BHMD: Tensor, k_BGLD: Tensor, v_BGLD: Tensor, is_causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        """out (B, H, M, D) in the input's dtype, and lse (B, H, M), float32 or float64. Keys and values from a cache
        come in the cache's dtype: the caller does not copy them to float32, even if `takes_short_rows` is False."""

    def backward(
        self, rows: BackwardRows, is_causal: bool, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """dq (B, H, M, D), dk and dv (B, G, L, D) of this tile."""
