"""Merges partials. A partial is (out, lse) of queries over some of their keys. (0, -inf) is a partial over no keys.

A *tile* is a block of queries times keys that a kernel computes in one call. The last three functions read or write the
rows of many tiles. For each of the three, `kernels/rows_at_once.py` has a GPU kernel that computes the same results.

B batch, N positions, H query heads, G key/value heads, M rows of a tile, D head dim.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..kernels.contract import GradientSum, Merging, TileRows
from ..kernels.lse_gradient import dlse_columns
from .views import accumulator_dtype, rows_view


def merge_(out: Tensor, lse: Tensor, partial_out: Tensor, partial_lse: Tensor) -> None:
    """Merge a partial into (out, lse), in place. out is (..., D), float32 or float64. lse is (...).

    Each merge rounds lse, and the rounding errors add up in p = exp(score - lse). If there are many merges, pass lse in
    float64, even if the partial is float32.

    A key that is in both partials counts twice. The formula of a merge is:

        lse' = log(exp(lse) + exp(partial_lse))
        out' = out * exp(lse - lse') + partial_out * exp(partial_lse - lse')

    The two weights add up to 1, and the second one is sigmoid(partial_lse - lse). So out' is a linear interpolation,
    which `lerp_` computes in one pass over out.
    """
    # Set the weight of a partial over no keys to 0. If lse is -inf too, the difference is NaN, which masked_fill_
    # replaces.
    weight = torch.sigmoid(partial_lse - lse).masked_fill_(partial_lse == -torch.inf, 0)
    out.lerp_(partial_out.to(out.dtype), weight.to(out.dtype).unsqueeze(-1))
    lse.copy_(torch.logaddexp(lse, partial_lse.to(lse.dtype)))


def merged(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """Merge P partials, outs (P, ..., D) and lses (P, ...), into out (..., D) and lse (...)."""
    lse = lses.logsumexp(0)
    # Set the weight of a partial over no keys to 0, because the difference may be (-inf) - (-inf), which is NaN.
    weights = (lses - lse).exp_().masked_fill_(lses == -torch.inf, 0)
    return (weights.to(outs.dtype).unsqueeze(-1) * outs).sum(0), lse


def merge_rows(
    out_BNHD: Tensor, lse_BNH: Tensor, partials: Sequence[TileRows], heads: range, *, adds: bool
) -> None:
    """Merge the partials of tiles, and write the result into some heads of out and lse.

    adds: whether out and lse already hold a partial, which is merged with the partials of the tiles. If not, a row that
    is in no tile gets out = 0 and lse = -inf.
    """
    sum_BNHD = torch.zeros_like(out_BNHD, dtype=accumulator_dtype(out_BNHD.dtype))
    sum_lse_BNH = torch.full_like(lse_BNH, -torch.inf, dtype=torch.float64)
    if adds:
        sum_BNHD.copy_(out_BNHD)
        sum_lse_BNH.copy_(lse_BNH)
    for tile in partials:
        partial_out, partial_lse = tile.tensors
        merge_(_view(sum_BNHD, tile), _view(sum_lse_BNH, tile), partial_out, partial_lse)
    of_heads = slice(heads.start, heads.stop)
    out_BNHD[:, :, of_heads] = sum_BNHD[:, :, of_heads]
    lse_BNH[:, :, of_heads] = sum_lse_BNH[:, :, of_heads]


def add_rows(sums: Sequence[GradientSum], factor: float, *, adds: bool) -> None:
    """Add up the gradients of tiles, and write each sum into some heads of dq, dk or dv.

    sums: the sums for dq, dk and dv in this order, or only the sum for dq. factor: multiplies the new gradients of dq.
    adds: whether dq, dk and dv already hold sums, to which the new sums are added. If not, a row that is in no tile
    gets 0.
    """
    for i, (total_BNHD, gradients, heads) in enumerate(sums):
        sum_BNHD = torch.zeros_like(total_BNHD, dtype=accumulator_dtype(total_BNHD.dtype))
        for tile in gradients:
            _view(sum_BNHD, tile).add_(tile.tensors[0])
        if i == 0:
            sum_BNHD.mul_(factor)
        if adds:
            sum_BNHD.add_(total_BNHD)
        of_heads = slice(heads.start, heads.stop)
        total_BNHD[:, :, of_heads] = sum_BNHD[:, :, of_heads]


def lay_out_rows(
    dout_BNHD: Tensor, out_BNHD: Tensor, lse_BNH: Tensor, tiles: Sequence[TileRows], heads: range
) -> None:
    """Copy each tile's rows of dout, out and lse into the three tensors of the tile.

    A tile's tensor for lse may have more rows than the tile. The additional rows are left unchanged. heads: the heads
    of all tiles.
    """
    for tile in tiles:
        for target, x in zip(tile.tensors, (dout_BNHD, out_BNHD, lse_BNH), strict=True):
            target[:, :, : tile.rows.num_rows] = _view(x, tile)


def _view(x_BNHD: Tensor, tile: TileRows) -> Tensor:
    entry = tile.entry
    return rows_view(x_BNHD if entry is None else x_BNHD[entry : entry + 1], tile.rows)


PLAIN = Merging(merge_rows, add_rows, lay_out_rows, dlse_columns)
