"""Appends new rows to a cache. The queries of the new rows attend to cached rows and to new rows. The cache then keeps
the new rows to which a later query can attend.

A *buffer* holds the cached rows of one branch, phase and key/value head (`pattern.py` defines branches and phases). Row
number c of the phase lies in slot c mod capacity (`plan/cache_plan.py`).

An example: three rows are appended at position 12, in a branch with segments of w = 8 positions and the rate r = 2. A
head of phase 0 reads two of the three rows:

                        cached  |   new
    position            8   10  |  12   14
    row number          4    5  |   6    7
    slot                0    1  |   2    3      the capacity is 4

    queries 12, 14 x keys 8, 10         every query sees every key (the plan's `cached` tiles)
    queries 12, 14 x keys 12, 14        causal (the plan's `local` tiles)

Then rows 6 and 7 are written to slots 2 and 3. If only one row is appended, the row is written first, and the row's
query reads it from its slot.

P partials, B batch, M new positions, H query heads, G key/value heads, C slots of a buffer, L rows that are read or
written in a buffer, m query heads that share a key/value head, D head dim. Memory is (2, B, rows, D): keys and values
of all buffers.
"""

import math
from collections.abc import Iterator, Sequence
from itertools import groupby

import torch
from torch import Tensor

from ..kernels.choose import choose
from ..kernels.contract import Kernel
from ..plan.cache_plan import Buffers, CachePlan, check_append, plan_append
from ..plan.exchange import RankPlan
from ..plan.sharding import Shard, first_rows
from . import executor
from .merge import merge_, merged
from .views import accumulator_dtype, with_unit_stride


def append(
    plan: CachePlan,
    backend: str,
    scale: float,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    memory: Tensor,
    progress: Tensor,
    lengths: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Append M new rows to every sequence of a cache. Returns out (B, M, H, D) and lse (B, M, H) of these rows.

    Each sequence of the batch goes on from its own position. The host waits for the GPU, because it must read the
    positions.

    Args:
        memory: the keys and values of the cache. The new rows are written into it.
        progress: (2, B) int64: for each sequence, the number of positions so far, and the smallest number of positions
            to which `crop` may shorten the sequence. Both numbers are updated.
        lengths: (B,): for each sequence, how many of the M rows are appended. None: all M rows. The other rows are
            padding, for which out is 0 and lse is -inf.

    Raises:
        ValueError: before anything is written, if a sequence becomes too long.
    """
    kernel = choose(backend, query)
    query, key, value = map(with_unit_stride, (query, key, value))
    batch, num_new = query.shape[:2]

    # `positions`, `floors` and `counts` contain a number for each sequence of the batch.
    positions, floors = progress.tolist()
    counts = [num_new] * batch if lengths is None else lengths.tolist()
    if min(counts) < 0 or max(counts) > num_new:
        raise ValueError(
            f"lengths must be between 0 and the {num_new} rows that are given, got {counts}."
        )
    check_append(plan, positions, counts)
    runs = list(_alike(positions, counts))

    # If plan.keep > 0, copy each row that `_one` overwrites, and put the row back if this call fails: after a `crop` a
    # query may attend to the row again. (`_one` writes a new row before the row's query is computed.)
    written_over: list[tuple[Tensor, Tensor]] = []
    for entries, position, count in runs:
        if count == 1 and plan.keep > 0:
            for buffers in plan.of_position(position):
                buffer_2BGCD = buffer_view(memory[:, entries], buffers)
                # the keys and values that the new row overwrites, (2, B, G, D)
                slot = buffer_2BGCD[:, :, :, buffers.before(position) % buffers.capacity]
                written_over.append((slot, slot.clone()))

    results: list[tuple[Tensor, Tensor]] = []
    try:
        for entries, position, count in runs:
            attend = _one if count == 1 else _many
            result = attend(
                plan,
                kernel,
                scale,
                query[entries, :count],
                key[entries, :count],
                value[entries, :count],
                memory[:, entries],
                position,
            )
            results.append(result)
    except BaseException:  # catch Ctrl-C too, because the cache must be as it was before the call
        for slot, rows in written_over:
            slot.copy_(rows)
        raise

    # If a sequence gets several new rows, write them only now that all computations have succeeded, because the new
    # rows overwrite old rows.
    for entries, position, count in runs:
        if count > 1:
            write(plan, key[entries, :count], value[entries, :count], memory[:, entries], position)

    ends = [position + count for position, count in zip(positions, counts, strict=True)]
    new_floors = [max(floor, plan.floor(end)) for floor, end in zip(floors, ends, strict=True)]
    progress.copy_(torch.tensor([ends, new_floors], device="cpu"))

    # Return the results without a copy if, as usual, all sequences have the same position and number of new rows.
    if len(runs) == 1 and counts == [num_new] * batch:
        return results[0]

    out = torch.zeros_like(query, memory_format=torch.contiguous_format)
    lse = torch.full(
        query.shape[:3],
        -torch.inf,
        dtype=accumulator_dtype(query.dtype),
        device=query.device,
    )
    for (entries, _, count), (run_out, run_lse) in zip(runs, results, strict=True):
        out[entries, :count] = run_out
        lse[entries, :count] = run_lse
    return out, lse


def _alike(positions: Sequence[int], counts: Sequence[int]) -> Iterator[tuple[slice, int, int]]:
    """Yield runs of neighbouring batch entries with the same position and the same number of new rows.

    Each run is (its entries, the position, the number of new rows). Entries without new rows are left out. An example:

        positions    12  12  12  40  40
        counts        1   1   1   1   0       two runs: entries 0 to 2 at position 12, and entry 3 at position 40
    """
    start = 0
    for (position, count), run in groupby(zip(positions, counts, strict=True)):
        stop = start + len(list(run))
        if count:
            yield slice(start, stop), position, count
        start = stop


def buffer_view(memory: Tensor, buffers: Buffers) -> Tensor:
    """A view of the memory: the keys and values of some buffers, (2, B, G, C, D)."""
    _, batch, _, head_dim = memory.shape
    num_heads = len(buffers.kv_heads)
    capacity = buffers.capacity
    stop = buffers.offset + num_heads * capacity
    rows = memory[:, :, buffers.offset : stop]  # (2, B, G · C, D)
    return rows.view(2, batch, num_heads, capacity, head_dim)


def _one(
    plan: CachePlan,
    kernel: Kernel,
    scale: float,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    memory: Tensor,
    t: int,
) -> tuple[Tensor, Tensor]:
    """Append a single row at position t: out (B, 1, H, D) and lse (B, 1, H) of the row.

    The row is first written to its buffers, where the row's query then reads it. The buffers are read one after the
    other, without a `Plan` and without a program of steps.
    """
    batch, _, num_heads, head_dim = query.shape
    buffers_of_row = list(plan.of_position(t))
    branches = sorted({buffers.number for buffers in buffers_of_row})

    # Make one partial (out and lse) for each branch. A head without keys in a branch keeps (0, -inf), which changes
    # nothing in a merge.
    shape = (max(len(branches), 1), batch, num_heads)
    dtype = accumulator_dtype(query.dtype)
    outs_PBHD = torch.zeros((*shape, head_dim), dtype=dtype, device=query.device)
    lses_PBH = torch.full(shape, -torch.inf, dtype=torch.float64, device=query.device)

    new_2BGD = torch.stack((key[:, 0], value[:, 0]))
    for buffers in buffers_of_row:
        # Write the row into its slot.
        number = buffers.before(t)
        slot = number % buffers.capacity
        both_2BGCD = buffer_view(memory, buffers)
        both_2BGCD[:, :, :, slot] = new_2BGD[:, :, _slice(buffers.kv_heads)]

        # Pass the m query heads that share a key/value head to the kernel as m query rows of one head, so that the
        # kernel reads the keys once.
        heads = _slice(buffers.query_heads)
        num_kv_heads = len(buffers.kv_heads)
        partial = branches.index(buffers.number)
        q_BGmD = query[:, 0, heads].view(batch, num_kv_heads, -1, head_dim)
        out_BGmD = outs_PBHD[partial, :, heads].view(batch, num_kv_heads, -1, head_dim)
        lse_BGm = lses_PBH[partial, :, heads].view(batch, num_kv_heads, -1)

        # `numbers`: the numbers of the rows to which the query attends, including the new row. If these rows wrap
        # around the end of the buffer, the kernel is called twice.
        numbers = range(buffers.seen(t).start, number + 1)
        for i, slots in enumerate(buffers.slots(numbers)):
            k_BGLD, v_BGLD = both_2BGCD[:, :, :, _slice(slots)]
            partial_out, partial_lse = kernel.forward(q_BGmD, k_BGLD, v_BGLD, False, scale)
            if i == 0:
                out_BGmD.copy_(partial_out)
                lse_BGm.copy_(partial_lse)
            else:
                merge_(out_BGmD, lse_BGm, partial_out, partial_lse)

    if len(branches) > 1:
        out_BHD, lse_BH = merged(outs_PBHD, lses_PBH)
    else:
        out_BHD = outs_PBHD[0]
        lse_BH = lses_PBH[0]
    return out_BHD.unsqueeze(1).to(query.dtype), lse_BH.unsqueeze(1).to(dtype)


def _many(
    plan: CachePlan,
    kernel: Kernel,
    scale: float,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    memory: Tensor,
    t: int,
) -> tuple[Tensor, Tensor]:
    """out (B, M, H, D) and lse (B, M, H) of M new rows, the first at position t. Nothing is written to the memory."""
    rank_plan = RankPlan(plan_append(plan, t, query.shape[1]), None)
    options = executor.ExecutorOptions(kernel, scale)

    # The memory has no dim of heads: a cached tile finds the rows of a head by their offset from the start of the
    # memory. Give each head a view of the whole memory, because the executor expects a dim of heads.
    cached = memory.unsqueeze(3).expand(-1, -1, -1, plan.num_kv_held, -1).unbind(0)
    return executor.forward(rank_plan, options, query, key, value, cached=cached)


def write(plan: CachePlan, key: Tensor, value: Tensor, memory: Tensor, t: int) -> None:
    """Write into the memory the new rows to which a later query can attend. key and value begin at position t."""
    end = t + key.shape[1]
    for buffers in plan.buffers:
        # `numbers`: the numbers of the new rows that the cache keeps.
        kept = plan.kept(buffers, end)
        numbers = range(max(kept.start, buffers.before(t)), kept.stop)

        key_BGLD = rows_at(key, buffers, numbers, t)
        value_BGLD = rows_at(value, buffers, numbers, t)
        place(buffers, numbers, memory, torch.stack([key_BGLD, value_BGLD]))


def rows_at(x_BNHD: Tensor, buffers: Buffers, numbers: range, first: int) -> Tensor:
    """Pick the rows with these numbers from a tensor of keys or values. Returns (B, G, L, D).

    Rows are numbered within the phase of the buffers. If each segment has k rows of the phase, row number c is
    row c mod k of segment c // k, as in `Buffers.position_of`. first: the position at which the tensor begins.
    """
    number_L = torch.arange(numbers.start, numbers.stop, device=x_BNHD.device)
    segment_L = number_L // buffers.rows_per_segment
    row_L = number_L % buffers.rows_per_segment
    position_L = segment_L * buffers.segment_length + buffers.phase + row_L * buffers.rate

    x_BNGD = x_BNHD[:, :, _slice(buffers.kv_heads)]
    return x_BNGD.index_select(1, position_L - first).transpose(1, 2)


def place(buffers: Buffers, numbers: range, memory: Tensor, both_2BGLD: Tensor) -> None:
    """Write keys and values of the rows with these numbers into their slots."""
    buffer_2BGCD = buffer_view(memory, buffers)
    start = 0
    for slots in buffers.slots(numbers):
        stop = start + len(slots)
        buffer_2BGCD[:, :, :, _slice(slots)] = both_2BGLD[:, :, :, start:stop]
        start = stop


def placed(buffers: Buffers, numbers: range, memory: Tensor) -> Tensor:
    """Read the keys and values of the rows with these numbers from their slots: (2, B, G, L, D)."""
    buffer_2BGCD = buffer_view(memory, buffers)
    runs = [buffer_2BGCD[:, :, :, :0]]  # `cat` needs a tensor even if there are no rows
    for slots in buffers.slots(numbers):
        runs.append(buffer_2BGCD[:, :, :, _slice(slots)])
    return torch.cat(runs, dim=3)


def packed(plan: CachePlan, shard: Shard, position: int, key: Tensor, value: Tensor) -> Tensor:
    """Copy rows of a rank's shard into a flat tensor: only the rows that a cache of the whole sequence keeps.

    A span is a run of consecutive positions of the shard. The tensor contains, for each buffer and each span, the keys
    (B, G, L, D), then the values.

    key, value: (B, N, G, D), the rows of the shard. position: the length of the whole sequence.
    """
    first_row = dict(zip(shard, first_rows(shard), strict=False))
    flat_rows = [key.new_empty(0)]
    for buffers, numbers, span in plan.kept_of(shard, position):
        for x in (key, value):
            # Pass the shard's rows from the span's first row on, because `rows_at` counts from the position
            # `span.start`.
            rows_BGLD = rows_at(x[:, first_row[span] :], buffers, numbers, span.start)
            flat_rows.append(rows_BGLD.flatten())
    return torch.cat(flat_rows)


def packed_size(plan: CachePlan, shard: Shard, position: int, like: Tensor) -> int:
    """The number of elements of the tensor that `packed` returns. like: a key tensor (B, N, G, D)."""
    kept = plan.kept_of(shard, position)
    num_rows = sum(len(buffers.kv_heads) * len(numbers) for buffers, numbers, _ in kept)
    batch, _, _, head_dim = like.shape
    return 2 * batch * num_rows * head_dim


def unpack(plan: CachePlan, shard: Shard, position: int, flat: Tensor, memory: Tensor) -> None:
    """Write the rows in `flat`, which `packed` made for this shard, into the memory of a cache."""
    _, batch, _, head_dim = memory.shape
    for buffers, numbers, _ in plan.kept_of(shard, position):
        # Take the keys and values of one buffer and span, (2, B, G, L, D), from the start of `flat`.
        shape = (2, batch, len(buffers.kv_heads), len(numbers), head_dim)
        size = math.prod(shape)
        both_2BGLD = flat[:size].view(shape)
        place(buffers, numbers, memory, both_2BGLD)
        flat = flat[size:]


def _slice(x: range) -> slice:
    return slice(x.start, x.stop, x.step)
