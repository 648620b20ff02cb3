"""Dilated attention with torchscale's padding: rows of zeros that take part in the softmax.

A zero row is a key of score 0 and value 0. Query t of head h attends to C(t, h) zero rows. `dilated_attention` computes
out and lse without the zero rows, and then a gate includes the zero rows:

    out' = out * sigmoid(lse - log C)         lse' = log(exp(lse) + C)

In a misaligned branch (see `zero_rows.py`) torchscale moves rows to other positions. Each misaligned branch is computed
by a call of its own, over rows that are padded with zero rows as in torchscale.

B batch, N positions of this rank, H heads, G key/value heads, D head dim, P rows of this rank with its zero rows.
"""

import math
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...attention import dilated_attention
from ...attention.sinks import with_sinks
from ...attention.validate import refuse_others, why_no_rows
from ...pattern import Branch, DilatedPattern, why_no_pattern
from ...plan.sharding import shard_length
from ...ranks.context import ContextParallel
from ...ranks.ranks import ALONE, Ranks
from ...ranks.reshard import rows_fields
from ..documents import Documents, agree_on_documents
from .zero_rows import (
    is_misaligned,
    last_segment_start,
    num_zero_keys,
    padded_position,
    padded_segment,
)

# Where each rank's shard begins: rank c holds the positions from `borders[c]` to `borders[c + 1] - 1`.
Borders = tuple[int, ...]


class Padding(NamedTuple):
    """Where rows lie in a misaligned branch after torchscale has added zero rows to every segment.

    borders: where the ranks' shards begin, counted without zero rows. padded_borders: the same, counted with zero rows.
    A rank adds the zero rows of each segment that ends in its shard.
    """

    branch: Branch
    borders: Borders
    padded_borders: Borders
    ranks: Ranks

    @property
    def positions(self) -> range:
        """The positions of this rank's rows."""
        return range(*self.borders[self.ranks.rank : self.ranks.rank + 2])

    @property
    def padded_positions(self) -> range:
        """The positions of this rank's padded rows (with zero rows) among the padded rows of all ranks."""
        return range(*self.padded_borders[self.ranks.rank : self.ranks.rank + 2])


class BranchCall(NamedTuple):
    """One call of `dilated_attention`, for some branches of the pattern, and the gate that follows the call."""

    pattern: DilatedPattern
    # log C, where C is the number of zero rows that each query attends to. The shape is (P, H) if `padding` is given.
    # None if C is 0 for every query: no gate is needed.
    log_num_zero_keys_NH: Tensor | None
    padding: Padding | None  # None if the branches are not misaligned


def zero_rows(
    pattern: DilatedPattern, num_heads: int, documents: Documents, like: Tensor, ranks: Ranks
) -> list[BranchCall]:
    """Split a pattern into calls of `dilated_attention`, and count the zero rows that queries attend to in each call.

    The returned calls are for one sequence, and all layers of a model can use them. like: a tensor with the dtype and
    the device of the queries.
    """

    def call_of(
        branches: Sequence[Branch], length: int, positions_N: Tensor, padding: Padding | None
    ) -> BranchCall:
        lengths, rates, _ = zip(*branches, strict=True)
        call_pattern = DilatedPattern(
            lengths, rates, is_causal=pattern.is_causal, phase=pattern.phase
        )
        logs_NH = None
        if length and not pattern.is_causal:  # causal queries attend to no zero rows
            counts_NH = _num_zero_keys(call_pattern, num_heads, length, positions_N)
            if counts_NH is not None:
                # Move `logs_NH` to the device and the dtype that lse will have.
                logs_NH = counts_NH.log().to(
                    like.device, torch.promote_types(like.dtype, torch.float32)
                )
        return BranchCall(call_pattern, logs_NH, padding)

    length = documents.borders[-1]  # there is one document
    aligned, calls = [], []
    for branch in pattern.branches:
        if not is_misaligned(branch, length):
            aligned.append(branch)
            continue
        padding = _padding(branch, documents, ranks)
        padded_branch = Branch(padded_segment(branch), branch.dilation_rate)
        padded_length = padding.padded_borders[-1]
        positions_P = _arange(padding.padded_positions, "cpu")
        calls.append(call_of([padded_branch], padded_length, positions_P, padding))
    if aligned:
        spans = [_arange(range(start, stop), "cpu") for start, stop in documents.shard]
        # Put an empty tensor first, because `cat` needs a tensor, and an empty shard has no spans.
        positions_N = torch.cat([_arange(range(0), "cpu"), *spans])
        calls.insert(0, call_of(aligned, length, positions_N, None))
    return calls


def torchscale_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pattern: DilatedPattern,
    *,
    parallel: ContextParallel | None = None,
    return_lse: bool = False,
    counted: list[BranchCall] | None = None,
    **others: object,
) -> Tensor | tuple[Tensor, Tensor]:
    """`dilated_attention` with torchscale's padding by zero rows, with which published weights were trained.

    The output is torchscale's, with one exception: torchscale drops a branch whose lse rounds to 0. In float32 this
    happens where a query attends to one zero row, and the query's other scores are all below about -17. The gradient is
    the exact derivative of the forward. torchscale's gradient is not exact, because torchscale treats the branches'
    weights as constants.

    The arguments parallel and return_lse, the result and the errors are those of `dilated_attention`.

    Args:
        pattern: with phase="blocked", which is torchscale's rule, and heads="all".
        counted: the calls that `zero_rows` returned for this pattern, sequence and number of heads. By default
            `zero_rows` is called here.

    If a dilation rate does not divide its segment length, and there are several segments, `parallel` must have
    contiguous shards, and be made without lengths.
    """
    refuse_others("torchscale_attention", others)
    ranks = parallel.ranks if isinstance(parallel, ContextParallel) else ALONE
    if counted is None:
        failure = pattern_failure(pattern) or why_no_rows("query", query)
        documents = agree_on_documents(
            "torchscale_attention",
            query,
            parallel=parallel,
            fields={"pattern": pattern},
            failure=failure,
        )
        counted = zero_rows(pattern, query.shape[2], documents, query, ranks)
    outs, lses = [], []
    for call in counted:
        rows = [query, key, value]
        if call.padding is not None:
            with ranks.refusing():  # an error of `_pad` on one rank is raised on all ranks
                rows = [_pad(x, call.padding) for x in rows]
        q, k, v = rows
        out, lse = dilated_attention(q, k, v, call.pattern, parallel=parallel, return_lse=True)
        if call.log_num_zero_keys_NH is not None:
            out, lse = with_sinks(out, lse, call.log_num_zero_keys_NH)
        if call.padding is not None:
            lse = _without_lone_zeros(lse, call.padding)
            out = _cut(out, call.padding)
            lse = _cut(lse, call.padding)
        outs.append(out)
        lses.append(lse)
    merged = _merged(outs, lses)
    return merged if return_lse else merged[0]


def pattern_failure(pattern: DilatedPattern) -> str | None:
    """Why torchscale cannot compute this pattern, as a text. None if torchscale can compute the pattern."""
    if failure := why_no_pattern(pattern):
        return failure
    if pattern.phase == "blocked" and pattern.heads == "all" and pattern.window is None:
        return None
    return (
        "torchscale's heads read phases by blocks, and run all branches, without a window, but the pattern has "
        f"phase={pattern.phase!r}, heads={pattern.heads!r} and window={pattern.window}: make it with phase='blocked', "
        "heads='all' and window=None, or call dilated_attention"
    )


def _num_zero_keys(
    pattern: DilatedPattern, num_heads: int, length: int, positions_N: Tensor
) -> Tensor | None:
    """C (N, H), float64 on the CPU: how many zero rows the query at each position attends to.

    Here all zero rows come after the sequence's `length` rows. So only queries in the last segment of a branch attend
    to zero rows. The result is None if no branch has zero rows.
    """
    counts_NH = torch.zeros(len(positions_N), num_heads, dtype=torch.float64, device="cpu")
    has_zeros = False
    for i, branch in enumerate(pattern.branches):
        offsets_N = positions_N - last_segment_start(branch, length)
        for head in range(num_heads):
            phase = pattern.phase_of(i, head, num_heads)
            assert phase is not None  # because heads="all": each head runs each branch
            num_zeros = num_zero_keys(branch, length, phase)
            if num_zeros:
                has_zeros = True
                reads_N = (offsets_N >= 0) & (offsets_N % branch.dilation_rate == phase)
                counts_NH[:, head] += num_zeros * reads_N
    return counts_NH if has_zeros else None


def _padding(branch: Branch, documents: Documents, ranks: Ranks) -> Padding:
    if ranks.world_size > 1 and (ranks.cut.sharding != "contiguous" or ranks.cut.lengths):
        raise ValueError(
            f"dilation rate {branch.dilation_rate} does not divide segment length {branch.segment_length}: torchscale "
            "then moves rows to later positions. Ranks can do so only with contiguous shards, but these are "
            f"{ranks.cut}. Make the ContextParallel with sharding='contiguous' and without lengths."
        )
    lengths = [shard_length(shard) for shard in documents.shards]
    borders = tuple(accumulate(lengths, initial=0))
    padded_borders = tuple(padded_position(branch, border) for border in borders)
    ranks.expect_lengths([stop - start for start, stop in pairwise(padded_borders)])
    return Padding(branch, borders, padded_borders, ranks)


def _pad(x: Tensor, padding: Padding) -> Tensor:
    """This rank's rows (B, N, ...) with zero rows added after each segment that ends in its shard: (B, P, ...)."""
    padded_positions = padding.padded_positions
    positions_N = _arange(padding.positions, x.device)
    rows_N = padded_position(padding.branch, positions_N) - padded_positions.start
    padded = x.new_zeros(x.shape[0], len(padded_positions), *x.shape[2:])
    return padded.index_copy(1, rows_N, x)


def _without_lone_zeros(lse_BPH: Tensor, padding: Padding) -> Tensor:
    """Replace lse by -inf at zero rows that attend only to themselves.

    The lse of such a row is 0, and torchscale drops a branch wherever the branch's lse is 0.
    """
    segment_length, rate, _ = padding.branch
    if segment_length > rate:
        return lse_BPH
    positions_P = _arange(padding.padded_positions, lse_BPH.device)
    is_zero_P = positions_P % rate >= segment_length
    return lse_BPH.masked_fill(is_zero_P[:, None], -torch.inf)


def _cut(x: Tensor, padding: Padding) -> Tensor:
    """The rows at this rank's positions, (B, N, ...), taken from the padded rows (B, P, ...) of all ranks.

    The row at position t is the t-th padded row. (For a sequence of L rows torchscale returns the first L padded rows.)
    """
    if padding.ranks.world_size == 1:
        return x[:, : padding.borders[-1]]
    return CutAnew.apply(x, padding.ranks, padding.padded_borders, padding.borders)


def _arange(positions: range, device: torch.device | str) -> Tensor:
    return torch.arange(positions.start, positions.stop, device=device)


def _merged(outs: list[Tensor], lses: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Merge the results of several calls into out (B, N, H, D) and lse (B, N, H), as if one call had all keys.

    `merge_` in run/merge.py does the same in place, but autograd cannot differentiate `merge_`.
    """
    if len(outs) == 1:
        return outs[0], lses[0]
    all_lses = torch.stack(lses)
    # Replace lse by 0 where a query attends to no key in any call, because (-inf) - (-inf) would be NaN below.
    is_empty_BNH = (all_lses == -torch.inf).all(0)
    lse_BNH = all_lses.masked_fill(is_empty_BNH, 0).logsumexp(0)
    merged_BNHD = torch.zeros_like(outs[0], dtype=lse_BNH.dtype)
    for out_BNHD, weight_BNH in zip(outs, (all_lses - lse_BNH).exp(), strict=True):
        merged_BNHD = merged_BNHD + out_BNHD * weight_BNH.unsqueeze(-1)
    return merged_BNHD.to(outs[0].dtype), lse_BNH.masked_fill(is_empty_BNH, -torch.inf)


class CutAnew(torch.autograd.Function):
    """Moves rows between ranks, from shards with the borders `before` to shards with the borders `after`.

    forward on rank c:    x (B, before[c + 1] - before[c], ...) -> y (B, after[c + 1] - after[c], ...)
    backward on rank c:   dy -> dx, by moving rows back; dx is 0 at positions that no rank holds after the forward
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Ranks, before: Borders, after: Borders) -> Tensor:
        ctx.ranks, ctx.before, ctx.after = ranks, before, after
        return _cut_anew(x, ranks, before, after, "rows to their places")

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        moment = "backward of rows to their places"
        return _cut_anew(grads[0], ctx.ranks, ctx.after, ctx.before, moment), None, None, None


def _cut_anew(x: Tensor, ranks: Ranks, before: Borders, after: Borders, moment: str) -> Tensor:
    """This rank's rows after the move from the borders `before` to the borders `after`.

    Each rank sends to every rank the rows that the receiver holds after the move. A position that no rank holds before
    the move gets zeros.
    """
    ranks.check_all_here(moment)
    ranks.agree(x.shape[1], rows_fields(moment, x, 1))
    row_size = x.shape[0] * math.prod(x.shape[2:])
    with ranks.all_or_none():
        sent = []
        for target in range(ranks.world_size):
            start, stop = _common(before, ranks.rank, after, target)
            first = start - before[ranks.rank]
            sent.append(x[:, first : first + stop - start].flatten())
        lengths = []
        for source in range(ranks.world_size):
            start, stop = _common(before, source, after, ranks.rank)
            lengths.append(stop - start)
        received = ranks.scatter(sent, [length * row_size for length in lengths], x, moment)
        y = x.new_zeros(x.shape[0], after[ranks.rank + 1] - after[ranks.rank], *x.shape[2:])
        row = 0
        for rows, length in zip(received, lengths, strict=True):
            y[:, row : row + length] = rows.view(x.shape[0], length, *x.shape[2:])
            row += length
    return y


def _common(before: Borders, source: int, after: Borders, target: int) -> tuple[int, int]:
    """The start and stop of the positions that rank `source` holds before the move and rank `target` holds after it.

    Start and stop are equal if there are no such positions.
    """
    start = max(before[source], after[target])
    stop = min(before[source + 1], after[target + 1])
    return start, max(start, stop)
