"""Positions of rows in their documents, and rotary position embeddings (RoFormer, arXiv 2104.09864).

B batch, N positions, D head dim.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..attention.op import define_op
from ..attention.validate import check_tensor, is_integral
from ..pattern import is_finite_number
from ..ranks.call import borders_of
from ..ranks.named import context_named
from ..run.views import on_device

DEFAULT_ROTARY_BASE = 10_000.0


class RotaryTable:
    """The cosines and sines of the angles by which `rotate` rotates rows. Each pair of numbers in a row has one angle.

    cos_ND, sin_ND: (N, D/2), or (B, N, D/2) if batch entries are at different positions. base: as in `rotary_table`.

    The class is not a tuple, because FSDP would cast the tensors of a tuple to the 16-bit dtype of the parameters.
    """

    def __init__(self, cos_ND: Tensor, sin_ND: Tensor, base: float) -> None:
        self.cos_ND = cos_ND
        self.sin_ND = sin_ND
        self.base = base

    def of_rows(self, rows: Tensor) -> "RotaryTable":
        return RotaryTable(self.cos_ND[rows], self.sin_ND[rows], self.base)

    def check_inputs(self, rows: Sequence[int], head_dim: int, base: float) -> None:
        """Raise ValueError unless the table was made for inputs with `rows` = (B, N) and this head dim and base."""
        *batch, num_rows, half = self.cos_ND.shape
        found = (num_rows, 2 * half, self.base)
        needed = (rows[1], head_dim, base)
        if found != needed or (batch and batch != [rows[0]]):
            text = "{} rows of head_dim={} with base {}"
            if batch:
                text += " of a batch of {}"
            raise ValueError(
                f"positions are a RotaryTable for {text.format(*found, *batch)}, "
                f"the inputs need one for {text.format(*needed, rows[0])}"
            )


def rotary_table(positions: Tensor, head_dim: int, base: float, dtype: torch.dtype) -> RotaryTable:
    """The table of the angles position * base^(-2i/D). positions: (N,) or (B, N). The table is on the same device.

    Angles are float64, because in float32 an angle at position 10^6 is off by 0.06, and beyond 2^24 two positions have
    the same angle.
    """
    exponents = (
        torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float64) / head_dim
    )
    angles_ND = positions.to(torch.float64)[..., None] * base**-exponents
    return RotaryTable(angles_ND.cos().to(dtype), angles_ND.sin().to(dtype), base)


def rotate(x_BNHD: Tensor, table: RotaryTable) -> Tensor:
    """x with each pair (x[i], x[i + D/2]) rotated by its angle. The rotation is computed in the table's dtype, and the
    result has x's dtype."""
    first, second = x_BNHD.to(table.cos_ND.dtype).chunk(2, dim=-1)
    cos = table.cos_ND.unsqueeze(-2)
    sin = table.sin_ND.unsqueeze(-2)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(
        x_BNHD.dtype
    )


def rotary_base(rotary: bool | float, head_dim: int) -> float | None:
    if rotary is False:
        return None
    if head_dim % 2:
        raise ValueError(
            f"rotary with head_dim={head_dim}: rotary embeddings rotate pairs, the head dim must be even"
        )
    if rotary is not True and not (is_finite_number(rotary) and rotary > 1):
        raise ValueError(
            f"rotary={rotary!r}: the base must be a finite number greater than 1; True means "
            f"{DEFAULT_ROTARY_BASE:,.0f}"
        )
    return DEFAULT_ROTARY_BASE if rotary is True else float(rotary)


def check_positions(
    positions: Tensor | RotaryTable | None,
    x: Tensor,
    head_dim: int,
    base: float | None,
    has_cache: bool,
) -> None:
    """Raise ValueError unless a layer can take these `positions` for its input x (B, N, E).

    base: the base of the layer's rotary embeddings, or None if the layer has no rotary embeddings.
    """
    if positions is None:
        return
    if base is None:
        raise ValueError(
            "positions were passed, but only rotary embeddings read them: construct with rotary=True"
        )
    if isinstance(positions, RotaryTable):
        positions.check_inputs(x.shape[:2], head_dim, base)
        return
    if has_cache:
        raise ValueError(
            "positions and cache: rows are appended at cache.position. Leave positions out, or pass the table "
            "rotary_table(cache.next_positions(N)), which the layers of a model can share"
        )
    check_tensor("positions", positions)
    if positions.shape != x.shape[1:2]:
        raise ValueError(
            f"positions have shape {tuple(positions.shape)}, the inputs need ({x.shape[1]},), one for each row of this "
            "rank: ContextParallel.positions(seq_len, cu_seqlens) has them"
        )
    if not is_integral(positions):
        raise ValueError(
            f"positions have dtype {positions.dtype}: pass integers, as torch.arange makes them"
        )


def document_positions(
    num_positions: int, cu_seqlens: Tensor | None, device: torch.device
) -> Tensor:
    """The position of each row within its own packed document: 0, 1, ..., and again from 0 at each border. (N,) int64.

    This is for a sequence that one device holds as a whole. For ranks see `positions_on_ranks`.
    """
    positions_N = torch.arange(num_positions, device=device)
    if cu_seqlens is None:
        return positions_N
    starts = on_device(cu_seqlens, device).long()
    return positions_N - starts[torch.searchsorted(starts, positions_N, right=True) - 1]


def _run_positions(x: Tensor, cu_seqlens: Tensor | None, parallel: str) -> Tensor:
    """The position of each of this rank's rows within its own document: (N,) int64 on the CPU.

    This function runs as an op, because it sends messages, which torch.compile cannot trace. parallel: the `key` of a
    ContextParallel.
    """
    ranks = context_named(parallel).ranks
    borders = borders_of(cu_seqlens)
    fields: dict[str, object] = {
        "call": "positions of MultiheadDilatedAttention",
        "cu_seqlens": borders,
    }
    return ranks.positions(ranks.handshake(x.shape[1], fields), borders)


def _fake_positions(x: Tensor, *_: object) -> Tensor:
    return torch.empty(x.shape[1], dtype=torch.int64, device="cpu")


positions_on_ranks = define_op("positions", _run_positions, _fake_positions)
