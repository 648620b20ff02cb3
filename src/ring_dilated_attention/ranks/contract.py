"""What differs between processes, all ranks simulated, and one rank of a larger job; and what a call is."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from ..kernels.contract import BackwardRows
from ..pattern import DilatedPattern
from ..plan.exchange import Choice
from ..plan.memory import Sizes
from ..plan.sharding import Shard


@dataclass(frozen=True)
class Call:
    """What a call is beside its tensors. heads: those that the tensors hold, of num_heads query heads in all."""

    pattern: DilatedPattern
    scale: float
    backend: str
    needs_grad: str
    return_lse: bool
    heads: range
    num_heads: int

    @property
    def held(self) -> range | None:
        """The heads, if they are not all."""
        return None if len(self.heads) == self.num_heads else self.heads

    def num_kv_heads(self, num_held: int) -> int:
        """Key/value heads in all, given those that the tensors hold."""
        return num_held * self.num_heads // len(self.heads)

    @property
    def kernel_scale(self) -> float:
        """Kernels put -inf at masked scores and scale afterwards: NaN for 0, +inf for negative scales."""
        return abs(self.scale) or 1.0

    def signed(self, x: Tensor) -> Tensor:
        """query, or dq, times what `kernel_scale` leaves out: the sign of the scale, or 0."""
        return x if self.scale > 0 else x * math.copysign(self.scale != 0, self.scale)


class Ranks(Protocol):
    """The ranks that share sequences, seen from this process.

    rank: its place in the ring. world_size: processes. name: by which errors call them, "" for one alone.
    """

    rank: int
    world_size: int
    name: str
    calls: int  # forwards so far, the same on every rank

    def lengths_of(self, seq_len: int) -> tuple[int, ...]:
        """Every process's number of rows of a sequence that it cuts."""

    def shards(self, lengths: Sequence[int]) -> tuple[Shard, ...]:
        """Every process's shard, given every process's number of rows."""

    def agree(self, length: int, fields: dict[str, object], failure: str | None) -> tuple[int, ...]:
        """Every process's number of rows, once all turn out to make the same call.

        Raises:
            ValueError: on every rank, if any refuses or fields differ.
        """

    def check_all_here(self, method: str) -> None:
        """Raise ValueError where other ranks' tensors cannot be had."""

    def records(self, record: Tensor, moment: str) -> list[Tensor]:
        """Every process's record, all of one shape and dtype, on the CPU."""

    def gather(self, x: Tensor, lengths: Sequence[int], dim: int, moment: str) -> list[Tensor]:
        """Every process's tensor; they differ only in their length along `dim`."""

    def choose(
        self,
        call: Call,
        lengths: Sequence[int],
        num_kv_heads: int,
        sizes: Sizes,
        documents: tuple[int, ...] | None,
    ) -> Choice:
        """The exchange of a call over rows of these lengths, and why. """  # fmt: skip

    def forward(
        self, call: Call, query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor | None
    ) -> tuple[Tensor, Tensor, int]:
        """out (B, N, H, D), lse (B, N, H), and the number of the call, by which its backward is recognised."""

    def backward(
        self, call: Call, number: int, rows: BackwardRows, cu_seqlens: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """dq (B, N, H, D), dk and dv (B, N, G, D)."""

    def abandon(self, reason: str) -> None:
        """Break the connections, so that other ranks fail at once instead of waiting for this one."""

    def close(self) -> None:
        """Give the connections back."""
