"""Rows that change ranks and sums over ranks, with gradients. Both are their own adjoints: what one rank receives in
forward it sends the gradient of in backward. B batch, N positions of this rank."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..plan.zero_rows import Move
from .handshake import all_or_none
from .reshard import rows_fields

if TYPE_CHECKING:
    from .context import ContextParallel


class MoveRows(torch.autograd.Function):
    """Forward on rank k: x (B, N, ...) -> y (B, N, ...), in which row t is the row of whichever rank moves there, and
    `fill` where none does. Backward: dx[s] = dy[t] for the row s that moved to t, 0 for those that moved nowhere."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, moves: Sequence[Move], context: "ContextParallel | None", fill: float) -> Tensor:
        ctx.moves, ctx.context = moves, context
        return _carry(x, moves, context, fill, "rows to their places")

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        back = [move.back() for move in ctx.moves]
        return _carry(grads[0], back, ctx.context, 0, "backward of rows to their places"), None, None, None


class SumOverRanks(torch.autograd.Function):
    """Forward: the sum of all ranks' tensors, on each. Backward: the sum of all ranks' gradients.

    Where what follows is the same on every rank, that is p times the gradient of one rank: so the *mean* of the ranks'
    gradients of parameters, which DDP and FSDP2 take, is right before the sum and after it.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, context: "ContextParallel") -> Tensor:
        ctx.context = context
        return context.all_reduce(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.context.all_reduce(grads[0]), None


def _carry(x: Tensor, moves: Sequence[Move], context: "ContextParallel | None", fill: float, moment: str) -> Tensor:
    link = None if context is None or context.runs_all else context.link
    rank = 0 if link is None else link.rank
    y = x.new_full(x.shape, fill)
    for move in moves:
        if move.source_rank == move.target_rank == rank:
            _place(y, move, x.narrow(1, move.source_row, move.num_rows))
    if context is None or link is None:
        return y
    context.handshake(x.shape[1], rows_fields(moment, x, 1))
    with all_or_none(context):
        row_size = x.shape[0] * math.prod(x.shape[2:])
        parts: list[list[Tensor]] = [[x.new_empty(0)] for _ in range(link.world_size)]
        sizes = [0] * link.world_size
        arrivals: list[list[Move]] = [[] for _ in range(link.world_size)]
        for move in moves:
            if move.source_rank == move.target_rank:
                continue
            if move.source_rank == rank:
                parts[move.target_rank].append(x.narrow(1, move.source_row, move.num_rows).flatten())
            if move.target_rank == rank:
                sizes[move.source_rank] += move.num_rows * row_size
                arrivals[move.source_rank].append(move)
        received = link.all_to_all_single([torch.cat(part) for part in parts], sizes, x, moment)
        for piece, coming in zip(received, arrivals, strict=True):
            rows = piece.split([move.num_rows * row_size for move in coming]) if coming else ()
            for move, row in zip(coming, rows, strict=True):
                _place(y, move, row.view(x.shape[0], move.num_rows, *x.shape[2:]))
    return y


def _place(y: Tensor, move: Move, rows: Tensor) -> None:
    y.narrow(1, move.target_row, move.num_rows).copy_(rows)
