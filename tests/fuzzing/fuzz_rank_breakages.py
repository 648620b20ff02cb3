"""Ways to break ranks, to prove that `fuzz_ranks` notices. They are broken in their own processes."""

from collections.abc import Callable
from typing import Any

import torch
from fuzz_commands import broken, nothing
from fuzz_simulated import RING_BREAKAGES
from torch import Tensor

from ring_dilated_attention.attention import attention
from ring_dilated_attention.layers import multihead
from ring_dilated_attention.models import longnet
from ring_dilated_attention.plan.sharding import Span
from ring_dilated_attention.ranks import context, handshake, processes, reshard


def _fail_at_home(self: Any, cut: Any, exchange: str, failure: str | None) -> None:
    if failure is not None:
        raise ValueError(failure)
    _connect(self, cut, exchange, failure)


def mean_of_each_shard(
    ranks: Any, local_sum: Tensor, local_count: int | Tensor, step_count: Any = None
) -> Tensor:
    return _mean_loss(ranks, local_sum / max(int(local_count), 1), 1)


def _shift_within(parallel: Any, x: Tensor, fill: int) -> Tensor:
    return torch.nn.functional.pad(x[:, 1:], (0, 1), value=fill)


def _own_rows_from_the_end(x: Tensor, shard: tuple[Span, ...], dim: int) -> Tensor:
    return _own_rows(x, tuple(reversed(shard)), dim)


_connect, _mean_loss, _own_rows = processes.Processes.connect, context.mean_loss, reshard.own_rows

RANK_BREAKAGES: dict[str, Callable[[], Any]] = {
    "a refusal stays at home": broken("refuse", nothing, attention, multihead),
    "calls are not compared": broken("_fingerprint", lambda value: 0, handshake),
    "a constructor fails at home": broken("connect", _fail_at_home, processes.Processes),
    "the mean of each shard": broken("mean_loss", mean_of_each_shard, context),
    "labels end with shards": broken("shift_left", _shift_within, longnet),
    "zigzag shards are turned round": broken("own_rows", _own_rows_from_the_end, reshard),
    **RING_BREAKAGES,
}
