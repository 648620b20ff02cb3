"""Next-token labels of sharded sequences: the last label of a shard may be on another rank."""

import torch
from torch import Tensor

from ..plan.sharding import first_rows
from ..ranks.context import ContextParallel


def shift_left(parallel: ContextParallel, x: Tensor, fill: int, documents: tuple[int, ...] | None = None) -> Tensor:
    """For each position of x (B, N_local) the integer at the next one, on any rank; `fill` at the sequence's last."""
    parallel.ranks.check_all_here("shift_left")
    failure = None
    if not isinstance(x, Tensor) or x.dim() != 2 or x.is_floating_point() or x.is_complex():
        got = f"{x.dtype} {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
        failure = f"shift_left takes integers (batch, N), got {got}"
    batch, length = (0, 0) if failure else x.shape
    with parallel.ranks.turn:
        lengths = parallel.ranks.handshake(length, {"call": "shift_left", "batch": batch, "fill": fill}, failure)
        shards = parallel.ranks.shards(lengths, documents)
        shard = shards[parallel.rank]
        with parallel.ranks.all_or_none():
            own = torch.zeros(
                max(2, *map(len, shards)), batch, 1, dtype=torch.int64, device="cpu"
            )  # the first column of each span
            for first, row, _ in zip(own, first_rows(shard), shard, strict=False):
                first.copy_(x[:, row : row + 1])
            records = parallel.ranks.records(own, "the exchange of labels")
    firsts: dict[int, Tensor] = {}  # the first column (B, 1) of every span of every rank, by its global position
    for spans, record in zip(shards, records, strict=True):
        firsts |= zip((span.start for span in spans), record, strict=False)
    columns = [x[:, :0]]
    for row, span in zip(first_rows(shard), shard, strict=False):
        stop = row + span.stop - span.start
        last = firsts.get(span.stop, torch.full_like(x[:, :1], fill))
        columns += [x[:, row + 1 : stop], last.to(x)]
    return torch.cat(columns, dim=1)
