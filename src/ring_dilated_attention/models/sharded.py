"""Next-token labels of sharded sequences: the last label of a shard may be on another rank."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..plan.sharding import Shard
from ..ranks.context import ContextParallel


def shift_left(parallel: ContextParallel, x: Tensor, fill: int) -> Tensor:
    """For each position of x (B, N_local) the integer at the next position of the whole sequence. Another rank may
    hold that position. The last position gets `fill`. Not differentiable."""
    parallel.ranks.check_all_here("shift_left")
    failure = None
    if not isinstance(x, Tensor) or x.dim() != 2 or x.is_floating_point() or x.is_complex():
        got = f"{x.dtype} {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
        failure = f"shift_left takes integers (batch, N), got {got}"
    batch, length = (0, 0) if failure else x.shape
    with parallel.ranks.turn:
        lengths = parallel.ranks.handshake(length, {"call": "shift_left", "batch": batch, "fill": fill}, failure)
        shards = parallel.ranks.shards(lengths)
        with parallel.ranks.all_or_none():
            firsts = _first_columns(parallel, x, shards)
    columns, row = [x[:, :0]], 0
    for span in shards[parallel.rank]:
        stop = row + span.stop - span.start
        last = firsts.get(span.stop, torch.full_like(x[:, :1], fill))
        columns += [x[:, row + 1 : stop], last.to(x)]
        row = stop
    return torch.cat(columns, dim=1)


def _first_columns(parallel: ContextParallel, x: Tensor, shards: Sequence[Shard]) -> dict[int, Tensor]:
    """The first column (B, 1) of every span of every rank, by its global position."""
    own = torch.zeros(2, x.shape[0], dtype=torch.int64, device="cpu")
    row = 0
    for i, span in enumerate(shards[parallel.rank]):
        own[i] = x[:, row].cpu()
        row += span.stop - span.start
    records = parallel.ranks.records(own, "the exchange of labels")
    return {
        span.start: record[i].unsqueeze(1)
        for shard, record in zip(shards, records, strict=True)
        for i, span in enumerate(shard)
    }
