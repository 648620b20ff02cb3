"""`ContextParallel.shard` and `unshard`, with gradients. They cut each rank's rows out of a whole tensor, and join all
ranks' rows into a whole tensor."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..plan.sharding import Shard, Span, shard_length
from .ranks import Ranks


def check_dim(call: str, x: Any, dim: Any) -> None:
    """Raise ValueError for a tensor that cannot be cut or joined along a dim."""
    if not isinstance(x, Tensor):
        raise ValueError(f"{call} takes a dense tensor, got {type(x).__name__}")
    if x.layout != torch.strided:
        raise ValueError(f"{call} takes a dense tensor, got {x.layout}")
    if not isinstance(dim, int) or not -x.dim() <= dim < x.dim():
        raise ValueError(
            f"{call} along dim={dim!r} of a {x.dim()}-dimensional tensor {tuple(x.shape)}: give the dim of the "
            "positions"
        )


def rows_fields(call: str, x: Tensor, dim: int) -> dict[str, object]:
    """The fields of the handshake that precedes a gather of rows: values that must be the same on all ranks."""
    return {
        "call": call,
        "dim": dim,
        "other lengths": [length for i, length in enumerate(x.shape) if i != dim % x.dim()],
        "dtype": x.dtype,
        "device": x.device.type,
    }


def forward_fields(call: str, x: Tensor, dim: int) -> dict[str, object]:
    """The fields of `rows_fields`, and one more: whether a backward will follow."""
    return rows_fields(call, x, dim) | {"gradients": x.requires_grad and torch.is_grad_enabled()}


def own_rows(x: Tensor, shard: Shard, dim: int) -> Tensor:
    rows_of_spans = [x.narrow(dim, span.start, span.stop - span.start) for span in shard]
    if not rows_of_spans:
        rows_of_spans = [x.narrow(dim, 0, 0)]
    # Copy the rows, because a view would keep the whole tensor alive.
    return torch.cat(rows_of_spans, dim=dim)


def _all_rows(x: Tensor, ranks: Ranks, shards: Sequence[Shard], dim: int, moment: str) -> Tensor:
    """Gather all ranks' rows, and return the whole tensor. x: this rank's rows."""
    lengths = [shard_length(shard) for shard in shards]
    with ranks.all_or_none():
        return whole_of(ranks.gather(x, lengths, dim, moment), shards, dim)


def whole_of(rows_by_rank: Sequence[Tensor], shards: Sequence[Shard], dim: int) -> Tensor:
    """The whole tensor, joined from every rank's rows in the order of positions."""
    rows_of_span: dict[Span, Tensor] = {}
    for shard, rows in zip(shards, rows_by_rank, strict=True):
        lengths = [span.stop - span.start for span in shard]
        rows_of_span.update(zip(shard, rows.split(lengths, dim), strict=True))
    nothing = rows_by_rank[0].narrow(dim, 0, 0)
    return torch.cat([nothing, *(rows_of_span[span] for span in sorted(rows_of_span))], dim=dim)


class ShardRows(torch.autograd.Function):
    """This rank's rows of a whole tensor x. Every rank holds the whole x. p: the number of ranks.

    forward on rank k:   x (.., N, ..) -> y_k (.., N_k, ..), the rows of rank k
    backward:            dx = (dy_0, ..., dy_{p-1}) / p, joined from all ranks' rows, the same on every rank
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Ranks, shards: tuple[Shard, ...], dim: int) -> Tensor:
        ctx.ranks = ranks
        ctx.shards = shards
        ctx.dim = dim
        return own_rows(x, shards[ranks.rank], dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        fields = rows_fields("backward of shard", grads[0], ctx.dim)
        fields["length of the whole"] = sum(map(shard_length, ctx.shards))
        ctx.ranks.agree(grads[0].shape[ctx.dim], fields)
        whole = _all_rows(grads[0], ctx.ranks, ctx.shards, ctx.dim, "backward of shard")
        return whole.div_(len(ctx.shards)), None, None, None


class UnshardRows(torch.autograd.Function):
    """The whole tensor, on every rank.

    forward on rank k:   y_k (.., N_k, ..), the rows of rank k -> x (.., N, ..), the rows of all ranks
    backward on rank k:  dy_k = rank k's rows of dx^0 + ... + dx^{p-1}, where dx^j is the gradient on rank j
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Ranks, shards: tuple[Shard, ...], dim: int) -> Tensor:
        ctx.ranks = ranks
        ctx.shards = shards
        ctx.dim = dim
        return _all_rows(x, ranks, shards, dim, "unshard")

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        moment = "backward of unshard"
        (grad,) = grads
        ctx.ranks.agree(grad.shape[ctx.dim], rows_fields(moment, grad, ctx.dim))
        with ctx.ranks.all_or_none():
            rows_by_rank = [own_rows(grad, shard, ctx.dim) for shard in ctx.shards]
            shape = rows_by_rank[ctx.ranks.rank].shape
            sizes = [shape.numel()] * len(ctx.shards)
            received = ctx.ranks.scatter(
                [rows.flatten() for rows in rows_by_rank], sizes, grad, moment
            )
            # Sum in float32, because a 16-bit sum would be rounded each time that a rank's rows are added.
            total = grad.new_zeros(
                shape.numel(), dtype=torch.promote_types(grad.dtype, torch.float32)
            )
            for rows in received:
                total += rows
            return total.view(shape).to(grad.dtype), None, None, None
