"""The interface of a kernel: which tensors it serves, and the forward and backward of a tile (some query rows and the
key rows that they attend to). Backends are modules that implement the interface.

B batch, N positions, H query heads, G key/value heads, M query rows, L key rows, D head dim. In a tile's tensors, B
counts every segment of every batch entry. Tensors may have any strides, except that the last dim has stride 1. A tile
is never empty. A causal tile has M == L.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ..plan.rows import Rows
from ..plan.step import Traits


class BackwardRows(NamedTuple):
    """The inputs of a tile's backward. out and lse are the attention over all keys, not only over the tile's keys.

    So p = exp(score - lse) is a key's weight among all keys, and the tiles' gradients add up to the exact gradient.
    lse may have more rows than query (`Merging.lse_multiple`), and dout and out more columns (`Merging.dlse_columns`).
    """

    dout: Tensor
    dlse: Tensor | None  # the gradient of lse, or None if it is zero
    query: Tensor
    key: Tensor
    value: Tensor
    out: Tensor
    lse: Tensor


class TileRows(NamedTuple):
    """Tensors of a tile, and where their rows lie in a (B, N, H, D) tensor.

    rows: which positions and heads the tensors contain. entry: the batch entry of the tensors, or None if they contain
    all entries. tensors: each is (B, H, M, D), or (B, H, M) for lse.
    """

    rows: Rows
    entry: int | None
    tensors: tuple[Tensor, ...]

    def with_columns(self, start: int, stop: int) -> "TileRows":
        """dout and out with only some of their columns, and lse."""
        dout, out, lse = self.tensors
        return self._replace(tensors=(dout[..., start:stop], out[..., start:stop], lse))


class GradientSum(NamedTuple):
    """The gradients of tiles, and where their sum is written. total: the tensor (B, N, H, D) to which the sum is
    written. gradients: each tile's gradient. heads: the heads of `total` that are written."""

    total: Tensor
    gradients: Sequence[TileRows]
    heads: range


class Merging(NamedTuple):
    """Functions that read or write the rows of many tiles in one pass. `run/merge.py` defines them in plain torch."""

    merge: Callable[..., None]
    add: Callable[..., None]
    lay_out: Callable[..., None]
    # Takes dlse (B, N, H) and out, and returns the columns of dout and of out that carry dlse (`lse_gradient.py`).
    dlse_columns: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
    # `Kernel.backward` needs an lse whose number of rows is a multiple of this number. The caller appends rows of inf.
    lse_multiple: int = 1


class Kernel(Protocol):
    """A backend. It returns a tile's partial (out and lse) or gradients. The caller merges partials, and adds up
    gradients."""

    NAME: str
    TRAITS: Traits
    # `ops` takes a (B, N, H, D) tensor. The result maps the name of each op of the backend to the reason why this op
    # cannot run dense attention on the tensor, or to None if it can. The kernel runs the first op that can. If the
    # backend has only one op, `ops` is None.
    ops: Callable[[Tensor], dict[str, str | None]] | None

    def why_not(self, query: Tensor) -> str | None:
        """The reason why this backend cannot serve the tensor, or None."""

    def takes_short_rows(self, dtype: torch.dtype) -> bool:
        """Whether the kernel takes 16-bit ("short") rows of this dtype as they are. If it does not, and
        `TRAITS.packing` is set, the caller passes float32 copies of a tile's rows."""

    def merging(self, query: Tensor) -> Merging | None:
        """Return functions that merge or add the results of many tiles in one pass. If this method returns None, the
        caller merges or adds each result as soon as it is computed."""

    def forward(
        self, q_BHMD: Tensor, k_BGLD: Tensor, v_BGLD: Tensor, is_causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        """out (B, H, M, D) in the input's dtype, and lse (B, H, M), float32 or float64. Keys and values from a cache
        come in the cache's dtype: the caller does not copy them to float32, even if `takes_short_rows` is False."""

    def backward(
        self, rows: BackwardRows, is_causal: bool, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """dq (B, H, M, D), dk and dv (B, G, L, D) of this tile."""
