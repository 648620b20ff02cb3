"""Merges partials (out, lse): a monoid with the identity (0, -inf).

The last three functions read or write the rows of many tiles at once. They define what `kernels/rows_at_once.py`
computes in one kernel each. B batch, N positions, H query heads, G key/value heads, M rows of a tile, D head dim.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..kernels.contract import GradientSum, Merging, TileRows
from .views import accumulator_dtype, rows_view


def merge_(out: Tensor, lse: Tensor, partial_out: Tensor, partial_lse: Tensor) -> None:
    """Merge a partial into (out, lse), in place. Shapes (..., D) and (...); `out` is in the accumulator's dtype.

    Each merge rounds lse, and the errors add up in p = exp(score - lse). For many merges pass lse in float64, whatever
    the dtype of the partial.

    Two partials over disjoint multisets of keys, naively:

        lse' = log(exp(lse) + exp(partial_lse))
        out' = out * exp(lse - lse') + partial_out * exp(partial_lse - lse')

    The two weights add up to 1, so out' is a linear interpolation by sigmoid(partial_lse - lse): one pass over out.
    """
    # (-inf) - (-inf) is NaN; an empty partial has no weight.
    weight = torch.sigmoid(partial_lse - lse).masked_fill_(partial_lse == -torch.inf, 0)
    out.lerp_(partial_out.to(out.dtype), weight.to(out.dtype).unsqueeze(-1))
    lse.copy_(torch.logaddexp(lse, partial_lse.to(lse.dtype)))


def merged(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """Partials (P, ..., D) and (P, ...) merged at once: out (..., D) and lse (...)."""
    lse = lses.logsumexp(0)
    weights = (lses - lse).exp_().masked_fill_(lses == -torch.inf, 0)  # (-inf) - (-inf) is NaN
    return (weights.to(outs.dtype).unsqueeze(-1) * outs).sum(0), lse


def merge_rows(
    out_BNHD: Tensor, lse_BNH: Tensor, partials: Sequence[TileRows], heads: range, *, adds: bool
) -> None:
    """Write the merged partials of some heads into out and lse. If `adds`, out and lse hold a partial too. A row that
    no partial covers gets (0, -inf)."""
    sum_BNHD = torch.zeros_like(out_BNHD, dtype=accumulator_dtype(out_BNHD.dtype))
    sum_lse_BNH = torch.full_like(lse_BNH, -torch.inf, dtype=torch.float64)
    if adds:
        sum_BNHD.copy_(out_BNHD)
        sum_lse_BNH.copy_(lse_BNH)
    for tile in partials:
        partial_out, partial_lse = tile.tensors
        merge_(_view(sum_BNHD, tile), _view(sum_lse_BNH, tile), partial_out, partial_lse)
    own = slice(heads.start, heads.stop)
    out_BNHD[:, :, own] = sum_BNHD[:, :, own]
    lse_BNH[:, :, own] = sum_lse_BNH[:, :, own]


def add_rows(sums: Sequence[GradientSum], factor: float, *, adds: bool) -> None:
    """Write the sums of some heads' gradients into dq (times factor), dk and dv, or into dq alone. If `adds`, these
    hold sums already. A row that no gradient covers gets 0."""
    for i, (total_BNHD, gradients, heads) in enumerate(sums):
        sum_BNHD = torch.zeros_like(total_BNHD, dtype=accumulator_dtype(total_BNHD.dtype))
        for tile in gradients:
            _view(sum_BNHD, tile).add_(tile.tensors[0])
        if i == 0:
            sum_BNHD.mul_(factor)
        if adds:
            sum_BNHD.add_(total_BNHD)
        own = slice(heads.start, heads.stop)
        total_BNHD[:, :, own] = sum_BNHD[:, :, own]


def lay_out_rows(
    dout_BNHD: Tensor, out_BNHD: Tensor, lse_BNH: Tensor, tiles: Sequence[TileRows], heads: range
) -> None:
    """Copy rows of dout, out and lse to the tensors of every tile, where lse may have more rows. All rows are of these
    heads."""
    for tile in tiles:
        for target, x in zip(tile.tensors, (dout_BNHD, out_BNHD, lse_BNH), strict=True):
            target[:, :, : tile.rows.num_rows] = _view(x, tile)


def _view(x_BNHD: Tensor, tile: TileRows) -> Tensor:
    entry = tile.entry
    return rows_view(x_BNHD if entry is None else x_BNHD[entry : entry + 1], tile.rows)


PLAIN = Merging(merge_rows, add_rows, lay_out_rows)
