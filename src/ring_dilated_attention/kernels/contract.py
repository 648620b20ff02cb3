"""The interface of a kernel: what it serves, a tile forward, a tile backward. Backends are modules that implement it.

B batch (in a tile: segments too), N positions, H query heads, G key/value heads, M query rows, L key rows, D head dim.
Tensors may have any strides, but that of their last dim is 1. A tile is never empty. A causal tile has M == L.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ..plan.rows import Rows
from ..plan.step import Traits


class BackwardRows(NamedTuple):
    """The inputs of a tile's backward. out and lse are over all keys, not the tile's alone: so p = exp(score - lse) is
    the global weight, and the sum over tiles is the exact gradient. lse may have more rows (`Merging.lse_multiple`)."""

    dout: Tensor
    dlse: Tensor | None  # the gradient of lse, or None for zero
    query: Tensor
    key: Tensor
    value: Tensor
    out: Tensor
    lse: Tensor


class TileRows(NamedTuple):
    """Tensors of a tile, each (B, H, M, D) or (B, H, M), and the rows of a (B, N, H, D) tensor that they are of.

    entry: the batch entry of the rows, or None for all.
    """

    rows: Rows
    entry: int | None
    tensors: tuple[Tensor, ...]


class GradientSum(NamedTuple):
    """A sum of gradients (B, N, H, D), what is added up in it, and the heads that it has."""

    total: Tensor
    gradients: Sequence[TileRows]
    heads: range


class Merging(NamedTuple):
    """Functions that read or write the rows of many tiles in one pass. `run/merge.py` defines them in plain torch."""

    merge: Callable[..., None]
    add: Callable[..., None]
    lay_out: Callable[..., None]
    # The number of rows of lse that `Kernel.backward` gets is a multiple of this. Rows after the last are inf.
    lse_multiple: int = 1


class Kernel(Protocol):
    """A backend. It returns the results of a tile; who calls it merges or adds them."""

    NAME: str
    TRAITS: Traits
    # For a (B, N, H, D) tensor: each op, with the reason why it cannot run dense attention on it, or None if it can.
    # The first with None is run. `ops` is None for a backend with one op.
    ops: Callable[[Tensor], dict[str, str | None]] | None

    def why_not(self, query: Tensor) -> str | None:
        """The reason why this backend cannot serve the tensor, or None."""

    def takes_short_rows(self, dtype: torch.dtype) -> bool:
        """Whether tiles of this 16-bit dtype come as they are. Else a kernel with a packing gets float32 copies."""

    def merging(self, query: Tensor) -> Merging | None:
        """How results of tiles are gathered in one pass, or None if each is merged or added at once."""

    def forward(
        self, q_BHMD: Tensor, k_BGLD: Tensor, v_BGLD: Tensor, is_causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        """out (B, H, M, D) in the input's dtype and lse (B, H, M), float32 or float64. Rows of a cache always come as
        they are."""

    def backward(
        self, rows: BackwardRows, is_causal: bool, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """dq, dk, dv of these rows."""
