"""Moves rows of a tensor between ranks, and their gradients back. B batch, N positions of this rank."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...ranks.ranks import Ranks
from ...ranks.reshard import rows_fields
from .zero_rows import Move


class MoveRows(torch.autograd.Function):
    """Forward: x (B, N, ...) -> y (B, N, ...). y[t] = x[s] of the rank whose row s moves to row t here; `fill` if none.
    Backward: dx[s] = dy[t] of the rank to which row s moved, 0 if it moved nowhere."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, moves: Sequence[Move], ranks: Ranks, fill: float) -> Tensor:
        ctx.moves, ctx.ranks = moves, ranks
        return _carry(x, moves, ranks, fill, "rows to their places")

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        back = [move.back() for move in ctx.moves]
        return _carry(grads[0], back, ctx.ranks, 0, "backward of rows to their places"), None, None, None


def _carry(x: Tensor, moves: Sequence[Move], ranks: Ranks, fill: float, moment: str) -> Tensor:
    rank = ranks.rank
    with ranks.refusing():
        y = x.new_full(x.shape, fill)
        for move in moves:
            if move.source_rank == move.target_rank == rank:
                _place(y, move, x.narrow(1, move.source_row, move.num_rows))
    if ranks.world_size == 1:
        return y
    ranks.check_all_here(moment)
    ranks.agree(x.shape[1], rows_fields(moment, x, 1), None)
    with ranks.all_or_none():
        row_size = x.shape[0] * math.prod(x.shape[2:])
        leaving: list[list[Tensor]] = [[x.new_empty(0)] for _ in range(ranks.world_size)]
        coming: list[list[Move]] = [[] for _ in range(ranks.world_size)]
        for move in moves:
            if move.source_rank == move.target_rank:
                continue
            if move.source_rank == rank:
                leaving[move.target_rank].append(x.narrow(1, move.source_row, move.num_rows).flatten())
            if move.target_rank == rank:
                coming[move.source_rank].append(move)
        sizes = [[move.num_rows * row_size for move in group] for group in coming]
        received = ranks.scatter([torch.cat(rows) for rows in leaving], [sum(each) for each in sizes], x, moment)
        for flat, group, each in zip(received, coming, sizes, strict=True):
            for move, rows in zip(group, flat.split(each) if group else (), strict=True):
                _place(y, move, rows.view(x.shape[0], move.num_rows, *x.shape[2:]))
    return y


def _place(y: Tensor, move: Move, rows: Tensor) -> None:
    y.narrow(1, move.target_row, move.num_rows).copy_(rows)
