"""What a kernel is: what it can serve, a tile forward, a tile backward. A backend is a module that keeps one of these.

B batch (segments count as batch entries), H query heads, G key/value heads, M query rows, L key rows, D head dim. Rows
are views with any strides but a last one of 1; a tile is never empty; causal is for M == L only.
"""

from collections.abc import Callable
from typing import Literal, NamedTuple, Protocol

from torch import Tensor

from ..pattern import DilatedPattern
from ..plan.cache_plan import CachePlan
from ..plan.sizes import Traits


class BackwardRows(NamedTuple):
    """What a backward knows of some query rows and some key rows.

    out, lse: the merged ones, of all keys. p = exp(score - lse) is then the global weight, and the sum over tiles is
        the exact gradient.
    dlse: the gradient of lse, or None for zero. delta: that of `InPlaceKernel.delta`, for kernels that read it.
    """

    dout: Tensor
    dlse: Tensor | None
    query: Tensor
    key: Tensor
    value: Tensor
    out: Tensor
    lse: Tensor
    delta: Tensor | None = None


class Pass(Protocol):
    """All of a stage on one device, by a kernel's own means."""

    def forward(self, scale: float, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """out (B, N, H, D) in the input's dtype and lse (B, N, H)."""

    def backward(self, scale: float, rows: BackwardRows) -> tuple[Tensor, Tensor, Tensor]:
        """dq (B, N, H, D), dk and dv (B, N, G, D), in the input's dtype."""


class WholePasses(NamedTuple):
    """How a call on one device is best computed by a kernel that may take all branches at once, and why."""

    found: Pass | None
    reason: str


# One new row for each batch entry of a cache, without asking the device where the sequences stand.
# (plan, scale, query (B, 1, H, D), key, value (B, 1, G, D), memory, progress, lengths) -> out and lse, as `run.append`.
AppendOne = Callable[[CachePlan, float, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None], tuple[Tensor, Tensor]]


class _Backend(Protocol):
    NAME: str
    TRAITS: Traits
    ONLY_BY_NAME: str | None  # why "auto" passes it by although it could serve a tensor
    choose_pass: Callable[[DilatedPattern, tuple[int, ...]], WholePasses] | None  # given the borders (0, ..., N)
    append_one: AppendOne | None  # None: a token is put together of tiles
    # The ops that may run it, each with the reason why it cannot attend densely to (B, N, H, D), or None. The first
    # that can does. None: it has one.
    ops: Callable[[Tensor], dict[str, str | None]] | None

    def why_not(self, query: Tensor) -> str | None:
        """The reason why this backend cannot serve the tensor, or None."""


class PartialKernel(_Backend, Protocol):
    """Gives the results of one tile."""

    IN_PLACE: Literal[False]

    def forward(
        self, q_BHMD: Tensor, k_BGLD: Tensor, v_BGLD: Tensor, is_causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        """out (B, H, M, D) in the input's dtype and lse (B, H, M), float32 or float64."""

    def backward(self, rows: BackwardRows, is_causal: bool, scale: float) -> tuple[Tensor, Tensor, Tensor]:
        """dq, dk, dv of these rows."""


class InPlaceKernel(_Backend, Protocol):
    """Merges and adds to views of accumulators by itself, or writes to them if it is the first."""

    IN_PLACE: Literal[True]

    def forward_into(
        self,
        q_BHMD: Tensor,
        k_BGLD: Tensor,
        v_BGLD: Tensor,
        out_BHMD: Tensor,
        lse_BHM: Tensor,
        is_causal: bool,
        scale: float,
        *,
        first: bool,
    ) -> None:
        """Merge the partial over these keys into (out, lse)."""

    def delta(self, dout_BNHD: Tensor, dlse_BNH: Tensor | None, out_BNHD: Tensor) -> Tensor:
        """rowsum(dout * out) - dlse, (B, N, H) in float32, contiguous. One for all tiles of a call."""

    def query_gradient_into(
        self, rows: BackwardRows, dq_BHMD: Tensor, is_causal: bool, scale: float, *, first: bool
    ) -> None:
        """Add dq of these rows. lse and delta have equal strides."""

    def key_gradient_into(
        self, rows: BackwardRows, dk_BGLD: Tensor, dv_BGLD: Tensor, is_causal: bool, scale: float, *, first: bool
    ) -> None:
        """Add dk and dv of these rows; else as `query_gradient_into`."""


Kernel = PartialKernel | InPlaceKernel
