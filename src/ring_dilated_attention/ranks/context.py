"""ContextParallel: the ranks that share a sequence, how it is cut, and the handshake of a call."""

from collections.abc import Sequence
from datetime import timedelta
from itertools import count
from typing import NoReturn
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ..plan.sharding import Cut, check_documents, document_positions
from .arguments import check_arguments, check_one_rank, resolve_group
from .contract import Ranks
from .link import ExchangeError
from .one_rank import OneRank, OtherRanks
from .own_rows import OwnRows
from .processes import Processes
from .reshard import ShardRows, UnshardRows, dim_failure, rows_fields
from .simulated import SimulatedRanks

# The custom ops know a context by its name: they take no objects. An entry lives as long as its context.
_contexts: "WeakValueDictionary[str, ContextParallel]" = WeakValueDictionary()
_made = count()


def context_named(key: str) -> "ContextParallel | None":
    """The context that an op was called with; "" is one device."""
    if key and key not in _contexts:
        raise RuntimeError(f"the ContextParallel {key!r} is gone. Keep it as long as it is in use.")
    return _contexts[key] if key else None


@torch.compiler.assume_constant_result  # a call that is refused while it is compiled: the others are told right away
def refuse(key: str, reason: str) -> None:
    """Tell the other ranks why this one refuses the call that they make. Raises a ValueError, as theirs do."""
    context = context_named(key)
    if context is not None:
        context.handshake(0, {}, failure=reason)


class ContextParallel:
    """Shares a sequence among the ranks of a group: each holds its shard of the positions, and all heads.

    Every rank of the group must make it at the same time, and run every forward and every backward, also a rank that
    owns no position. A backward runs only where the loss depends on the output of its forward: a rank that has no use
    for the output adds 0 * out.sum() to its loss. (A forward runs also where nothing uses its output, compiled or not.)

    Ranks of one host (over a 2-D mesh: rows of the mesh on one host) stand side by side in the ring, whatever their
    numbers; `rank` is the place in the ring. Errors name this context's groups by its `name`, the same on every rank.

    A copy of a module that holds a context (EMA, nn.TransformerEncoder) holds the same one. `close` gives its groups
    back. torch.compile(fullgraph=True) takes `dilated_attention` and `MultiheadDilatedAttention`; what else talks to
    other ranks (`shard`, `unshard`, `shift_left`, LongNetLM's loss) goes outside.

    Args:
        group: a ProcessGroup, a DeviceMesh, or None for all ranks (one, if torch.distributed is not initialised).
            Over a 2-D mesh heads are dealt (all-to-all) along the last axis and chunks travel along the first.
        sharding: "contiguous" shards in the order of ranks; "zigzag" gives rank k parts k and 2p-1-k of 2p.
        exchange: "ring", "all_gather" (all at once), "all_to_all" (heads for positions), or "auto", which chooses by
            bytes, memory and number of messages. "simulated" runs the ring of `world_size` ranks in this process, on
            full tensors; or, given `rank` and `others`, that rank alone, on its own rows, in a job of any size.
        timeout: how long a rank waits for another before it raises. (One that dies is noticed at once on gloo; with
            NCCL all depends on how its watchdog is configured.)
        align: the borders of contiguous shards are multiples of it.
        lengths: the lengths of contiguous shards, one for each rank, instead of near-equal ones.
        world_size: the number of simulated ranks.
        rank: the one simulated rank to run. All ranks have as many positions as this one, unless `lengths` says else.
        others: what the other ranks send to it, made on demand, and what takes what it sends
            (`exchange.one_rank.OtherRanks`).

    Raises:
        ValueError: for unknown names, an `align` below 1, and lengths that do not fit the group.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | DeviceMesh | None = None,
        *,
        sharding: str = "contiguous",
        exchange: str = "auto",
        timeout: timedelta = timedelta(minutes=10),
        align: int = 1,
        lengths: Sequence[int] | None = None,
        world_size: int | None = None,
        rank: int | None = None,
        others: OtherRanks | None = None,
    ) -> None:
        mesh = group if isinstance(group, DeviceMesh) else None
        self.group = resolve_group(group) if exchange != "simulated" else None
        members = dist.get_process_group_ranks(self.group) if self.group is not None else [0]
        if mesh is not None and mesh.ndim == 2:
            members = mesh.mesh.flatten().tolist()
        num_shards = world_size if exchange == "simulated" and world_size is not None else len(members)
        check_arguments(num_shards, mesh, sharding, exchange, timeout, align, lengths, world_size)
        check_one_rank(world_size, rank, others)
        inner = mesh.shape[1] if mesh is not None and mesh.ndim == 2 else 1
        self.cut = Cut(sharding, num_shards, align, None if lengths is None else tuple(lengths), inner)
        self.sharding, self.exchange = sharding, exchange
        self.ranks: Ranks
        if rank is not None and others is not None:
            self.ranks = OneRank(rank, others, self.cut)
        elif exchange == "simulated":
            self.ranks = SimulatedRanks(self.cut)
        elif len(members) > 1:
            self.ranks = Processes(members, self.cut, exchange, timeout)
        else:
            self.ranks = OwnRows(self.cut)
        self.rank, self.world_size, self.name = self.ranks.rank, self.ranks.world_size, self.ranks.name
        self.kept = torch.zeros((), dtype=torch.int64, device="cpu")  # what keeps calls in compiled graphs writes here
        # What the ops know it by: other than its name, never that of another in this process.
        self.key = f"{self.name}, number {next(_made)}"
        _contexts[self.key] = self

    def __deepcopy__(self, memo: dict[int, object]) -> "ContextParallel":
        """Itself: connections have no copies."""
        return self

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a ContextParallel holds connections of this process and cannot be pickled: save the module's state_dict, "
            "and make the context anew in every process."
        )

    def close(self) -> None:
        """Give the groups back, with their connections and threads. All ranks, when they need the context no more.

        Also after an error has broken it, before the survivors make another. The context is of no use afterwards.
        """
        self.ranks.close()

    @property
    def calls(self) -> int:
        """Forwards so far, the same on every rank."""
        return self.ranks.calls

    def shard(self, x: Tensor, dim: int = 1) -> Tensor:
        """This rank's rows of a full tensor that every rank holds. The gradient is the full one, gathered from all."""
        self.ranks.check_all_here("shard")
        if failure := dim_failure("shard", x, dim):
            raise ValueError(failure)
        shards = self.ranks.shards(self.ranks.lengths_of(x.shape[dim]))
        return x if len(shards) == 1 else ShardRows.apply(x, self.ranks, shards, dim)

    def unshard(self, x: Tensor, dim: int = 1) -> Tensor:
        """The full tensor, from every rank's rows. What follows is the same on every rank: the gradient is a slice."""
        self.ranks.check_all_here("unshard")
        failure = dim_failure("unshard", x, dim)
        length, fields = (0, {}) if failure else (x.shape[dim], rows_fields("unshard", x, dim))
        shards = self.ranks.shards(self.handshake(length, fields, failure))
        return x if len(shards) == 1 else UnshardRows.apply(x, self.ranks, shards, dim)

    def positions(self, seq_len: int, cu_seqlens: Tensor | None = None) -> Tensor:
        """Positions within their document of the rows that `shard` gives this rank. (N_local,), int64, on the CPU.

        Args:
            seq_len: the length of the whole sequence.
            cu_seqlens: global borders of packed documents.
        """
        return self.local_positions(self.ranks.lengths_of(seq_len), cu_seqlens)

    def local_positions(self, lengths: Sequence[int], cu_seqlens: Tensor | None = None) -> Tensor:
        """Like `positions`, given every rank's number of rows instead of the default split."""
        shard = self.ranks.shards(lengths)[self.rank]
        borders = [0, sum(lengths)]
        if cu_seqlens is not None:
            borders = cu_seqlens.tolist()
            check_documents(borders, sum(lengths))
        ranges = document_positions(shard, borders)
        return torch.cat([torch.arange(r.start, r.stop, device="cpu") for r in (range(0), *ranges)])

    def abandon(self, reason: str) -> None:
        """Break this context's groups, so that the other ranks fail at once instead of waiting for this one.

        A call that fails does so by itself. For errors between calls, in a program that goes on after them.
        """
        self.ranks.abandon(reason)

    def handshake(self, length: int, fields: dict[str, object], failure: str | None = None) -> tuple[int, ...]:
        """Every rank's local length, once all ranks turn out to make the same call.

        Args:
            length: this rank's number of positions.
            fields: what must agree, by name, beside how the context cuts and exchanges. Compared by fingerprint; only a
                mismatch is sent in words.
            failure: why this rank refuses the call, if it does.

        Raises:
            ValueError: on every rank, if any refuses or fields differ. Nothing of the call was sent.
        """
        return self.ranks.agree(length, fields, failure)


__all__ = ["ContextParallel", "ExchangeError", "context_named"]
