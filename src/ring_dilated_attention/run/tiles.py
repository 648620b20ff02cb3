"""Carrying out tiles: strided views of tensors, and the accumulators that the results of tiles are merged into.

B batch, N positions, S segments, M rows of one segment and phase, H query heads, G key/value heads, D head dim.
"""

from collections.abc import Callable, Iterable, Iterator
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from ..plan.plan import Message, Plan, Tile
from ..plan.rows import Block, Rows
from .merge import merge_


def accumulator_dtype(dtype: torch.dtype) -> torch.dtype:
    """float32, or float64 for float64."""
    return torch.promote_types(dtype, torch.float32)


def rows_view(x_BNHD: Tensor, rows: Rows) -> Tensor:
    """The rows as a view (B·S, heads, M, D). No copy: the caller has cut the batch so that B·S is one stride."""
    batch, position, head, _ = x_BNHD.stride()
    view_BSHMD = x_BNHD.as_strided(
        (x_BNHD.shape[0], rows.segments, len(rows.heads), rows.num_rows, x_BNHD.shape[3]),
        (batch, rows.segment_step * position, rows.heads.step * head + rows.shift * position, rows.step * position, 1),
        x_BNHD.storage_offset() + rows.first * position + rows.heads.start * head,
    )
    return view_BSHMD.flatten(0, 1)


def _row_numbers(x_BNH: Tensor, rows: Rows) -> Tensor:
    """The same of a tensor with one number per row and head: (B·S, heads, M)."""
    return rows_view(x_BNH.unsqueeze(-1), rows).squeeze(-1)


def block_views(buffer: Tensor, block: Block, batch: int, head_dim: int) -> tuple[Tensor, Tensor]:
    """Keys and values (or their gradients) of a block of a flat buffer, each (B, heads, M, D)."""
    unit = batch * head_dim
    size = block.num_heads * block.num_rows * unit
    both = buffer[block.offset * unit : block.offset * unit + 2 * size]
    key, value = both.view(2, batch, block.num_heads, block.num_rows, head_dim)[:, :, block.start : block.stop]
    return key, value


def batch_slices(rows: Rows, *tensors_BNHD: Tensor) -> Iterator[slice]:
    """The whole batch if batch and segments fold into one stride in every tensor, else one entry at a time."""
    batch, length = tensors_BNHD[0].shape[:2]
    folds = length == rows.segments * rows.segment_step and all(
        x.stride(0) == length * x.stride(1) for x in tensors_BNHD
    )
    if batch == 1 or rows.segments == 1 or folds:
        yield slice(None)
    else:
        yield from (slice(b, b + 1) for b in range(batch))


def _adopted(partial_BHMD: Tensor, x_BNHD: Tensor, dtype: torch.dtype) -> Tensor | None:
    """A partial of all rows as an accumulator (B, N, H, D), if that is how it lies in memory: contiguous, so that later
    tiles' views are no copies and the custom ops return what their fakes say."""
    whole_BMHD = partial_BHMD.transpose(1, 2)
    if partial_BHMD.dtype != dtype or partial_BHMD.numel() != x_BNHD.numel() or not whole_BMHD.is_contiguous():
        return None
    return whole_BMHD.view(x_BNHD.shape)


class MergedPartial:
    """(out, lse) of all queries, merged from tiles. A first tile that covers everything is adopted as it is.

    lse is float64 until the end: rounded to float32 at each of 700 merges it made gradients wrong by 7e-6.
    """

    def __init__(self, query_BNHD: Tensor, covered: bool) -> None:
        self.like, self.covered = query_BNHD, covered
        self.dtype = accumulator_dtype(query_BNHD.dtype)
        self.out_BNHD: Tensor | None = None
        self.lse_BNH: Tensor | None = None

    def add(self, rows: Rows, batch: slice, first: bool, out_BHMD: Tensor, lse_BHM: Tensor) -> None:
        if self.out_BNHD is None and first:
            self.out_BNHD = _adopted(out_BHMD, self.like, self.dtype)
            if self.out_BNHD is not None:
                self.lse_BNH = lse_BHM.transpose(1, 2).double().contiguous().view(self.like.shape[:3])
                return
        out, lse = self.views(rows, batch)
        if first:
            out.copy_(out_BHMD)
            lse.copy_(lse_BHM)
        else:
            merge_(out, lse, out_BHMD, lse_BHM)

    def views(self, rows: Rows, batch: slice) -> tuple[Tensor, Tensor]:
        """out (B·S, heads, M, D) and lse (B·S, heads, M) of these rows, for kernels that merge in place."""
        out_BNHD, lse_BNH = self._allocated()
        return rows_view(out_BNHD[batch], rows), _row_numbers(lse_BNH[batch], rows)

    def _allocated(self) -> tuple[Tensor, Tensor]:
        """The accumulators: rows that no first tile writes must hold the identity (0, -inf)."""
        if self.out_BNHD is None or self.lse_BNH is None:
            self.out_BNHD = torch.empty(self.like.shape, dtype=self.dtype, device=self.like.device)
            self.lse_BNH = torch.empty(self.like.shape[:3], dtype=torch.float64, device=self.like.device)
            if not self.covered:
                self.out_BNHD.zero_()
                self.lse_BNH.fill_(-torch.inf)
        return self.out_BNHD, self.lse_BNH

    def result(self) -> tuple[Tensor, Tensor]:
        """out in the input's dtype, lse in the accumulator's."""
        out_BNHD, lse_BNH = self._allocated()
        return out_BNHD.to(self.like.dtype), lse_BNH.to(self.dtype)


class Sum:
    """The sum of tiles' gradients of one input. A first tile that covers everything is adopted as it is."""

    def __init__(self, x_BNHD: Tensor, covered: bool) -> None:
        self.like, self.covered = x_BNHD, covered
        self.dtype = accumulator_dtype(x_BNHD.dtype)
        self.sum_BNHD: Tensor | None = None

    def add(self, rows: Rows, batch: slice, first: bool, grad_BHMD: Tensor) -> None:
        if self.sum_BNHD is None and first:
            self.sum_BNHD = _adopted(grad_BHMD, self.like, self.dtype)
            if self.sum_BNHD is not None:
                return
        view = self.view(rows, batch)
        if first:
            view.copy_(grad_BHMD)
        else:
            view.add_(grad_BHMD)

    def view(self, rows: Rows, batch: slice) -> Tensor:
        """(B·S, heads, M, D) of these rows, for kernels that add in place."""
        return rows_view(self._allocated()[batch], rows)

    def _allocated(self) -> Tensor:
        if self.sum_BNHD is None:
            make = torch.empty if self.covered else torch.zeros
            self.sum_BNHD = make(self.like.shape, dtype=self.dtype, device=self.like.device)
        return self.sum_BNHD

    def result(self) -> Tensor:
        """The sum in the input's dtype. To be asked for once: the accumulator goes."""
        total, self.sum_BNHD = self._allocated(), None
        return total.to(self.like.dtype)


class OwnKeys(NamedTuple):
    """Where gradients of a rank's own keys and values are summed."""

    dk: Sum
    dv: Sum

    def add(self, tile: Tile, batch: slice, k_grad: Tensor, v_grad: Tensor) -> None:
        assert isinstance(tile.key, Rows)
        self.dk.add(tile.key, batch, tile.first_key, k_grad)
        self.dv.add(tile.key, batch, tile.first_key, v_grad)

    def views(self, tile: Tile, batch: slice) -> tuple[Tensor, Tensor]:
        assert isinstance(tile.key, Rows)
        return self.dk.view(tile.key, batch), self.dv.view(tile.key, batch)


class ChunkKeys(NamedTuple):
    """Where gradients of received chunks are summed: a flat buffer, for chunks of (B, heads, M, D)."""

    buffer: Tensor
    batch: int
    head_dim: int

    def add(self, tile: Tile, batch: slice, k_grad: Tensor, v_grad: Tensor) -> None:
        k_sum, v_sum = self.views(tile, batch)
        k_sum += k_grad
        v_sum += v_grad

    def views(self, tile: Tile, batch: slice) -> tuple[Tensor, Tensor]:
        assert isinstance(tile.key, Block)
        return block_views(self.buffer, tile.key, self.batch, self.head_dim)


class OwnRows(NamedTuple):
    """A rank's own keys and values (B, N, G, D), and the flat buffer of its own chunks while that holds them."""

    key: Tensor
    value: Tensor
    chunks: Tensor | None


def _key_views(tile: Tile, batch: slice, source: OwnRows | Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values of a tile: own rows, or a block of a buffer of chunks."""
    if isinstance(tile.key, Block):
        assert isinstance(source, Tensor)
        return block_views(source, tile.key, like.shape[0], like.shape[3])
    assert isinstance(source, OwnRows)
    if tile.packed is not None and source.chunks is not None:
        return block_views(source.chunks, tile.packed, like.shape[0], like.shape[3])
    return rows_view(source.key[batch], tile.key), rows_view(source.value[batch], tile.key)


def _own_tensors(source: OwnRows | Tensor) -> tuple[Tensor, ...]:
    return (source.key, source.value) if isinstance(source, OwnRows) else ()


def forward_tile(
    kernel: ModuleType, tile: Tile, scale: float, query: Tensor, source: OwnRows | Tensor, to: MergedPartial
) -> None:
    """Compute a tile and merge it. `source` is the own rows, or the flat buffer of received chunks."""
    for batch in batch_slices(tile.query, query, *_own_tensors(source)):
        q = rows_view(query[batch], tile.query)
        k, v = _key_views(tile, batch, source, query)
        if hasattr(kernel, "forward_into"):
            out, lse = to.views(tile.query, batch)
            kernel.forward_into(q, k, v, out, lse, tile.is_causal, scale, first=tile.first_query)
        else:
            to.add(tile.query, batch, tile.first_query, *kernel.forward(q, k, v, tile.is_causal, scale))


class QuerySide(NamedTuple):
    """What backward knows of a rank's queries, all (B, N, H, D) or (B, N, H); `out` and `lse` are the merged ones.

    delta: rowsum(dout * out) - dlse, for the kernels that take it ready; others make it of dout, dlse and out.
    """

    dout: Tensor
    dlse: Tensor | None
    query: Tensor
    out: Tensor
    lse: Tensor
    delta: Tensor | None


def query_side(
    kernel: ModuleType, dout: Tensor, dlse: Tensor | None, query: Tensor, out: Tensor, lse: Tensor
) -> QuerySide:
    if not (hasattr(kernel, "delta") and query.numel()):
        return QuerySide(dout, dlse, query, out, lse, None)
    return QuerySide(dout, dlse, query, out, lse.contiguous(), kernel.delta(dout, dlse, out))


def backward_tile(
    kernel: ModuleType,
    tile: Tile,
    scale: float,
    side: QuerySide,
    source: OwnRows | Tensor,
    dq: Sum,
    keys: OwnKeys | ChunkKeys,
    before_keys: Callable[[], None] = lambda: None,
) -> None:
    """Add a tile's gradients to `dq` and `keys`. `before_keys` is called when everything else is under way."""
    for batch in batch_slices(tile.query, side.query, side.dout, side.out, *_own_tensors(source)):
        dout, q, out = (rows_view(x[batch], tile.query) for x in (side.dout, side.query, side.out))
        dlse, lse, delta = (
            None if x is None else _row_numbers(x[batch], tile.query) for x in (side.dlse, side.lse, side.delta)
        )
        k, v = _key_views(tile, batch, source, side.query)
        if delta is not None:
            inputs = (dout, delta, q, k, v, lse)
            first_key = tile.first_key and isinstance(tile.key, Rows)
            kernel.query_gradient_into(
                *inputs, dq.view(tile.query, batch), tile.is_causal, scale, first=tile.first_query
            )
            before_keys()
            kernel.key_gradient_into(*inputs, *keys.views(tile, batch), tile.is_causal, scale, first=first_key)
        else:
            q_grad, k_grad, v_grad = kernel.backward(dout, dlse, q, k, v, out, lse, tile.is_causal, scale)
            dq.add(tile.query, batch, tile.first_query, q_grad)
            before_keys()
            keys.add(tile, batch, k_grad, v_grad)
            del q_grad, k_grad, v_grad  # before the next tile makes its own


def local_gradients(
    kernel: ModuleType, plan: Plan, scale: float, side: QuerySide, rows: OwnRows
) -> tuple[Sum, OwnKeys]:
    """The sums of gradients so far: of the tiles with own rows on both sides."""
    dq = Sum(side.query, plan.query_covered)
    keys = OwnKeys(Sum(rows.key, plan.key_covered), Sum(rows.value, plan.key_covered))
    for tile in plan.local:
        backward_tile(kernel, tile, scale, side, rows, dq, keys)
    return dq, keys


def pack(plan: Plan, key: Tensor, value: Tensor) -> Tensor:
    """A flat K‖V buffer with this rank's own chunks: the dilated rows of its straddling segments."""
    return _packed(plan.packs, 0, plan.chunk_size, key, value)


def pack_chunk(plan: Plan, message: Message, key: Tensor, value: Tensor) -> Tensor:
    """The own chunk that a message carries, alone."""
    return _packed(_packs_of(plan, message), message.offset, message.size, key, value)


def _packed(packs: Iterable[tuple[Rows, Block]], start: int, size: int, key: Tensor, value: Tensor) -> Tensor:
    batch, head_dim = key.shape[0], key.shape[3]
    buffer = torch.empty(size * batch * head_dim, dtype=key.dtype, device=key.device)
    for rows, block in packs:
        block = block._replace(offset=block.offset - start)
        for target, x in zip(block_views(buffer, block, batch, head_dim), (key, value), strict=True):
            target.copy_(rows_view(x, rows))
    return buffer


def _packs_of(plan: Plan, message: Message) -> Iterator[tuple[Rows, Block]]:
    """Which own rows lie where in an own chunk."""
    stop = message.offset + message.size
    return ((rows, block) for rows, block in plan.packs if message.offset <= block.offset < stop)


def add_home(plan: Plan, message: Message, arrived: Tensor, keys: OwnKeys, at: int) -> None:
    """Add the finished gradient of an own chunk, which lies at `at` in `arrived`, where it was dilated from."""
    batch, head_dim = keys.dk.like.shape[0], keys.dk.like.shape[3]
    for rows, block in _packs_of(plan, message):
        block = block._replace(offset=block.offset - message.offset + at)
        for total, part in zip(keys, block_views(arrived, block, batch, head_dim), strict=True):
            total.add(rows, slice(None), False, part)
