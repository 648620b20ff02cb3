"""The interface of a kernel: what it serves, a tile forward, a tile backward. Backends are modules that implement it.

B batch (in a tile: segments too), N positions, H query heads, G key/value heads, M query rows, L key rows, D head dim.
Tensors may have any strides, but that of their last dim is 1. A tile is never empty. A causal tile has M == L.
"""

from collections.abc import Callable
from typing import Literal, NamedTuple, Protocol

from torch import Tensor

from ..pattern import DilatedPattern
from ..plan.cache_plan import CachePlan
from ..plan.sizes import Traits


class BackwardRows(NamedTuple):
    """The inputs of a tile's backward. out and lse are over all keys, not the tile's alone: so p = exp(score - lse) is
    the global weight, and the sum over tiles is the exact gradient."""

    dout: Tensor
    dlse: Tensor | None  # the gradient of lse, or None for zero
    query: Tensor
    key: Tensor
    value: Tensor
    out: Tensor
    lse: Tensor
    delta: Tensor | None = None  # from `InPlaceKernel.delta`, for kernels that read it


class Pass(Protocol):
    """All tiles of a call on one device, computed at once by a kernel."""

    def forward(self, scale: float, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """out (B, N, H, D) in the input's dtype and lse (B, N, H)."""

    def backward(self, scale: float, rows: BackwardRows) -> tuple[Tensor, Tensor, Tensor]:
        """dq (B, N, H, D), dk and dv (B, N, G, D), in the input's dtype."""


class WholePasses(NamedTuple):
    """The pass that computes a whole call on one device, or None if a kernel goes branch by branch; and the reason."""

    found: Pass | None
    reason: str


# Appends a row to each batch entry of a cache, and attends from it. Positions are read on the device only.
# (plan, scale, query (B, 1, H, D), key, value (B, 1, G, D), memory, progress, lengths) -> out and lse, as `run.append`.
AppendOne = Callable[[CachePlan, float, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None], tuple[Tensor, Tensor]]


class _Backend(Protocol):
    NAME: str
    TRAITS: Traits
    ONLY_BY_NAME: str | None  # why "auto" passes it by although it could serve a tensor
    choose_pass: Callable[[DilatedPattern, tuple[int, ...]], WholePasses] | None  # given the borders (0, ..., N)
    append_one: AppendOne | None  # None: a token is computed by tiles
    # For a (B, N, H, D) tensor: each op, with the reason why it cannot run dense attention on it, or None if it can.
    # The first with None is run. `ops` is None for a backend with one op.
    ops: Callable[[Tensor], dict[str, str | None]] | None

    def why_not(self, query: Tensor) -> str | None:
        """The reason why this backend cannot serve the tensor, or None."""


class PartialKernel(_Backend, Protocol):
    """Returns the results of one tile."""

    IN_PLACE: Literal[False]

    def forward(
        self, q_BHMD: Tensor, k_BGLD: Tensor, v_BGLD: Tensor, is_causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        """out (B, H, M, D) in the input's dtype and lse (B, H, M), float32 or float64. A kernel with a packing gets
        float32 copies of 16-bit rows; only rows of a cache come as they are."""

    def backward(self, rows: BackwardRows, is_causal: bool, scale: float) -> tuple[Tensor, Tensor, Tensor]:
        """dq, dk, dv of these rows."""


class InPlaceKernel(_Backend, Protocol):
    """Merges or adds a tile's results into views of accumulators by itself. The first tile writes them."""

    IN_PLACE: Literal[True]

    def forward_into(
        self, q_BHMD: Tensor, k_BGLD: Tensor, v_BGLD: Tensor, out_BHMD: Tensor, lse_BHM: Tensor,
        is_causal: bool, scale: float, *, first: bool,
    ) -> None:  # fmt: skip
        """Merge the partial over these keys into (out, lse). A float64 lse keeps what many merges would round away."""

    def delta(self, dout_BNHD: Tensor, dlse_BNH: Tensor | None, out_BNHD: Tensor) -> Tensor:
        """rowsum(dout * out) - dlse, (B, N, H) in float32, contiguous. All tiles of a call share it."""

    def query_gradient_into(
        self, rows: BackwardRows, dq_BHMD: Tensor, is_causal: bool, scale: float, *, first: bool
    ) -> None:
        """Add dq of these rows. lse and delta have equal strides."""

    def key_gradient_into(
        self, rows: BackwardRows, dk_BGLD: Tensor, dv_BGLD: Tensor, is_causal: bool, scale: float, *, first: bool
    ) -> None:
        """Add dk and dv of these rows. lse and delta have equal strides."""


Kernel = PartialKernel | InPlaceKernel
