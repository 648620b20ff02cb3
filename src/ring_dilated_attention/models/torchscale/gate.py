"""Dilated attention with torchscale's zero rows in the softmax: `dilated_attention`, and a gate on its output.

    out' = out * sigmoid(lse - log C)         lse' = log(exp(lse) + C)

C(t, h): the number of zero rows (keys of score 0 and value 0) that query t of head h sees. Misaligned branches (see
`zero_rows.py`) are computed one by one; their rows are moved to where torchscale puts them; then they are merged.

B batch, N positions of this rank, H heads, G key/value heads, D head dim, Z zero queries, M rows of one of them, P
places that they fill.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...attention import dilated_attention
from ...attention.sinks import with_sinks
from ...attention.validate import refuse_others, why_no_rows
from ...pattern import Branch, DilatedPattern, why_no_pattern
from ...ranks.context import ContextParallel
from ...ranks.ranks import ALONE, Ranks
from ...ranks.reduce import SumOverRanks
from ...ranks.reshard import rows_fields
from ..documents import Documents, DocumentSpan, agree_on_documents
from .zero_rows import Move, ZeroQuery, is_misaligned, moves, zero_keys, zero_queries


class LocalZeroQuery(NamedTuple):
    """A zero query, and a span of this rank."""

    number: int  # among the zero queries of all ranks
    query: ZeroQuery
    span: DocumentSpan


class Misplaced(NamedTuple):
    """Where the rows of a misaligned branch move, and the zero queries in the places between."""

    num_seen: int  # m: the keys of a zero query
    moves: list[Move]
    num_zero_queries: int  # of all ranks
    local_queries: list[LocalZeroQuery]


class BranchCall(NamedTuple):
    """Branches that one call computes, how many zero keys it leaves out, and where its rows go."""

    pattern: DilatedPattern
    log_num_zero_keys_NH: Tensor | None  # None if there are none at all
    misplaced: Misplaced | None  # None if rows stay where they are


@dataclass(frozen=True)
class ZeroRows:
    """The calls that compute one pattern with zero rows, for the shards of one sequence. All layers use them."""

    pattern: DilatedPattern
    calls: tuple[BranchCall, ...]


def zero_rows(
    pattern: DilatedPattern, num_heads: int, documents: Documents, like: Tensor
) -> ZeroRows:
    """Count the zero rows for `torchscale_attention`, whose tensors have the dtype and the device of `like`."""

    def call_of(branches: Sequence[Branch], misplaced: Misplaced | None) -> BranchCall:
        lengths, rates, _ = zip(*branches, strict=True)
        call_pattern = DilatedPattern(
            lengths, rates, is_causal=pattern.is_causal, phase=pattern.phase
        )
        logs_NH = None
        if not pattern.is_causal:  # causal patterns hide the zero rows
            counts_NH = _num_zero_keys(call_pattern, num_heads, documents)
            if counts_NH is not None:
                # as lse
                logs_NH = counts_NH.log().to(
                    like.device, torch.promote_types(like.dtype, torch.float32)
                )
        return BranchCall(call_pattern, logs_NH, misplaced)

    aligned, calls = [], []
    for branch in pattern.branches:
        if is_misaligned(branch, documents.longest):
            calls.append(call_of([branch], _misplaced(branch, num_heads, documents)))
        else:
            aligned.append(branch)
    if aligned:
        calls.insert(0, call_of(aligned, None))
    return ZeroRows(pattern, tuple(calls))


def torchscale_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pattern: DilatedPattern,
    *,
    parallel: ContextParallel | None = None,
    scale: float | None = None,
    backend: str = "auto",
    return_lse: bool = False,
    counted: ZeroRows | None = None,
    **others: object,
) -> Tensor | tuple[Tensor, Tensor]:
    """`dilated_attention` with the zero rows that torchscale pads with, as its published weights were trained.

    The output is torchscale's, with one exception: torchscale drops a branch whose lse rounds to 0. In float32 this
    happens where a query sees one zero row, and all its other scores are below about -17. The gradient is the
    derivative of this forward. torchscale's gradient takes the weights of the branches as constants.

    Args:
        pattern: with phase="blocked", torchscale's rule, and heads="all".
        counted: what `zero_rows` made for this pattern, sequence and number of heads; by default it is made here.

    The other arguments, the result and the errors are those of `dilated_attention`. Its cu_seqlens, heads_held,
    num_heads, cache and lengths are not taken: zero rows are counted for all heads and positions of one sequence.
    """
    refuse_others("torchscale_attention", others)
    if counted is None:
        failure = pattern_failure(pattern) or why_no_rows("query", query)
        if not isinstance(return_lse, bool):
            failure = f"return_lse must be True or False, got {return_lse!r}"
        documents = agree_on_documents(
            "torchscale_attention",
            query,
            parallel=parallel,
            fields={"pattern": pattern},
            failure=failure,
        )
        counted = zero_rows(pattern, query.shape[2], documents, query)
    assert counted.pattern == pattern, "counted for another pattern"
    options: Any = {"parallel": parallel, "scale": scale, "backend": backend}
    merged: tuple[Tensor, Tensor] | None = None
    for call in counted.calls:
        out_BNHD, lse_BNH = dilated_attention(
            query, key, value, call.pattern, return_lse=True, **options
        )
        if call.log_num_zero_keys_NH is not None:
            out_BNHD, lse_BNH = with_sinks(out_BNHD, lse_BNH, call.log_num_zero_keys_NH)
        if call.misplaced is not None:
            out_BNHD, lse_BNH = _put_in_place(out_BNHD, lse_BNH, value, call.misplaced, parallel)
        if merged is None:
            merged = out_BNHD, lse_BNH
        else:
            merged = _merged(*merged, out_BNHD, lse_BNH)
    assert merged is not None
    return merged if return_lse else merged[0]


def pattern_failure(pattern: DilatedPattern) -> str | None:
    """Why a pattern is not torchscale's, or None."""
    if failure := why_no_pattern(pattern):
        return failure
    if pattern.window is not None:
        return f"torchscale has no sliding window, and the pattern has window={pattern.window}: call dilated_attention"
    if pattern.phase == "blocked" and pattern.heads == "all":
        return None
    return (
        f"torchscale's heads read phases by blocks and run all branches, but the pattern has phase={pattern.phase!r} "
        f"and heads={pattern.heads!r}: make it with phase='blocked' and heads='all', or call dilated_attention"
    )


def _num_zero_keys(pattern: DilatedPattern, num_heads: int, documents: Documents) -> Tensor | None:
    """C (N, H), float64 on the CPU. None if it is 0 everywhere."""
    counts_NH = None
    for branch in pattern.branches:
        for span in documents.spans:
            for keys in zero_keys(branch, num_heads, span.length, span.positions):
                if counts_NH is None:
                    num_rows = sum(len(each.positions) for each in documents.spans)
                    counts_NH = torch.zeros(num_rows, num_heads, dtype=torch.float64, device="cpu")
                counts_NH[span.rows(keys.queries), keys.heads.start : keys.heads.stop] += (
                    keys.num_zeros
                )
    return counts_NH


def _misplaced(branch: Branch, num_heads: int, documents: Documents) -> Misplaced:
    length = documents.longest
    queries = list(zero_queries(branch, num_heads, length))
    local_queries = [
        LocalZeroQuery(number, query, span)
        for number, query in enumerate(queries)
        for span in documents.spans
    ]
    num_seen = -(-branch.segment_length // branch.dilation_rate)
    return Misplaced(num_seen, moves(branch, documents.shards, length), len(queries), local_queries)


def _put_in_place(
    out_BNHD: Tensor,
    lse_BNH: Tensor,
    value_BNGD: Tensor,
    misplaced: Misplaced,
    parallel: ContextParallel | None,
) -> tuple[Tensor, Tensor]:
    """Move rows to where torchscale has them. The places between get zero queries' outputs: sums of values / m."""
    ranks = ALONE if parallel is None else parallel.ranks
    moved_BNHD = MoveRows.apply(out_BNHD, misplaced.moves, ranks, 0.0)
    moved_lse_BNH = MoveRows.apply(lse_BNH, misplaced.moves, ranks, -math.inf)
    if not misplaced.num_zero_queries:
        return moved_BNHD, moved_lse_BNH
    sums_BZHD = SumOverRanks.apply(_sums(value_BNGD, out_BNHD.shape[2], misplaced), ranks)
    places = []
    for number, query, span in misplaced.local_queries:
        if query.position in span.positions:
            row = span.row + query.position - span.positions.start
            places += [(number, row, head) for head in query.heads]
    # All places in one assignment: the backward of each assignment copies all rows.
    places_P3 = torch.tensor(places, dtype=torch.int64, device=out_BNHD.device).view(-1, 3)
    numbers, rows, heads = places_P3.unbind(1)
    moved_BNHD[:, rows, heads] = (sums_BZHD[:, numbers, heads] / misplaced.num_seen).to(
        moved_BNHD.dtype
    )
    moved_lse_BNH[:, rows, heads] = math.log(misplaced.num_seen)
    return moved_BNHD, moved_lse_BNH


def _sums(value_BNGD: Tensor, num_heads: int, misplaced: Misplaced) -> Tensor:
    """For each zero query the sum of this rank's values that it sees, (B, Z, H, D); 0 in heads without the query."""
    batch, _, num_kv_heads, head_dim = value_BNGD.shape
    wide = torch.promote_types(value_BNGD.dtype, torch.float32)
    sums_BZHD = value_BNGD.new_zeros(
        batch, misplaced.num_zero_queries, num_heads, head_dim, dtype=wide
    )
    # a rank without such rows takes part in backward too
    sums_BZHD = sums_BZHD + value_BNGD[:, :0].sum(dtype=wide)
    for number, query, span in misplaced.local_queries:
        kv_heads = [head * num_kv_heads // num_heads for head in query.heads]
        rows_BMHD = value_BNGD[:, span.rows(query.rows)][:, :, kv_heads]
        sums_BZHD[:, number, query.heads.start : query.heads.stop] += rows_BMHD.sum(1, dtype=wide)
    return sums_BZHD


def _merged(
    out_BNHD: Tensor, lse_BNH: Tensor, other_BNHD: Tensor, other_lse_BNH: Tensor
) -> tuple[Tensor, Tensor]:
    """Two partials as one: `run.merge`, but not in place, so that autograd sees it."""
    # An empty partial has no weight. Where both are empty, the difference would be NaN.
    is_empty_BNH = other_lse_BNH == -torch.inf
    difference_BNH = (other_lse_BNH - lse_BNH).masked_fill(is_empty_BNH, -torch.inf)
    weight_BNH1 = torch.sigmoid(difference_BNH).unsqueeze(-1)
    wide = weight_BNH1.dtype
    merged_BNHD = torch.lerp(out_BNHD.to(wide), other_BNHD.to(wide), weight_BNH1)
    are_empty_BNH = is_empty_BNH & (lse_BNH == -torch.inf)
    merged_lse_BNH = torch.logaddexp(
        lse_BNH.masked_fill(are_empty_BNH, 0),
        other_lse_BNH.masked_fill(are_empty_BNH, 0),
    )
    return merged_BNHD.to(out_BNHD.dtype), merged_lse_BNH.masked_fill(are_empty_BNH, -torch.inf)


class MoveRows(torch.autograd.Function):
    """Rows of x (B, N, ...) as rows of y (B, N, ...), on this rank or another.

    forward:   y[t] = x[s] of the rank whose row s moves to row t here; `fill` if there is none
    backward:  dx[s] = dy[t] of the rank to which row s moved; 0 if it moved nowhere
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, moves: Sequence[Move], ranks: Ranks, fill: float) -> Tensor:
        ctx.moves, ctx.ranks = moves, ranks
        return _carry(x, moves, ranks, fill, "rows to their places")

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        back = [move.back() for move in ctx.moves]
        return (
            _carry(grads[0], back, ctx.ranks, 0, "backward of rows to their places"),
            None,
            None,
            None,
        )


def _carry(x: Tensor, moves: Sequence[Move], ranks: Ranks, fill: float, moment: str) -> Tensor:
    """Each rank sends the rows that leave it, in the order of `moves`, and places those that come to it."""
    leaving: list[list[Tensor]] = [[] for _ in range(ranks.world_size)]
    coming: list[list[Move]] = [[] for _ in range(ranks.world_size)]
    with ranks.refusing():
        y = x.new_full(x.shape, fill)
        for move in moves:
            if move.source_rank == ranks.rank:
                leaving[move.target_rank].append(x.narrow(1, move.source_row, move.num_rows))
            if move.target_rank == ranks.rank:
                coming[move.source_rank].append(move)
        for move, rows in zip(coming[ranks.rank], leaving[ranks.rank], strict=True):
            _place(y, move, rows)
    if ranks.world_size == 1:
        return y
    leaving[ranks.rank] = []
    coming[ranks.rank] = []
    ranks.check_all_here(moment)
    ranks.agree(x.shape[1], rows_fields(moment, x, 1), None)
    with ranks.all_or_none():
        nothing = x.new_empty(0)
        row_size = x.shape[0] * math.prod(x.shape[2:])
        sent = [torch.cat([nothing, *(rows.flatten() for rows in group)]) for group in leaving]
        sizes = [[move.num_rows * row_size for move in group] for group in coming]
        received = ranks.scatter(sent, [sum(group) for group in sizes], x, moment)
        for flat, group, group_sizes in zip(received, coming, sizes, strict=True):
            if not group:
                continue
            for move, rows in zip(group, flat.split(group_sizes), strict=True):
                _place(y, move, rows.view(x.shape[0], move.num_rows, *x.shape[2:]))
    return y


def _place(y: Tensor, move: Move, rows: Tensor) -> None:
    y.narrow(1, move.target_row, move.num_rows).copy_(rows)
