"""ContextParallel: the ranks that share a sequence, how it is cut, how chunks travel, and the handshake of a call."""

import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from itertools import count
from typing import NoReturn
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ..plan.sharding import (
    Shard,
    check_documents,
    default_lengths,
    document_positions,
    make_shards,
    ring_order,
    slice_shard,
)
from .arguments import check_arguments, check_one_rank, resolve_group
from .handshake import agree, all_or_none
from .held import Use
from .link import ExchangeError, Link, Wait
from .one_rank import OtherRanks
from .reshard import ShardRows, UnshardRows, dim_failure, rows_fields

# The custom ops know a context by its name: they take no objects. An entry lives as long as its context.
_contexts: "WeakValueDictionary[str, ContextParallel]" = WeakValueDictionary()
_made = count()


def host_name() -> str:
    return socket.gethostname()


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
        self.world_size = len(members)
        self.num_simulated = world_size if exchange == "simulated" and world_size is not None else 0
        num_ranks = self.num_simulated or self.world_size
        check_arguments(num_ranks, mesh, sharding, exchange, timeout, align, lengths, world_size)
        check_one_rank(world_size, rank, others)
        self.sharding, self.exchange, self.timeout = sharding, exchange, timeout
        self.align, self.lengths = align, tuple(lengths) if lengths is not None else None
        self.others = others
        self.rank, self.name, self.calls = rank or 0, "", 0  # calls: forwards so far, the same on every rank
        self.key = ""  # what the ops know it by: other than its name, never that of another in this process
        self.kept = torch.zeros((), dtype=torch.int64, device="cpu")  # what keeps calls in compiled graphs writes here
        self.uses: list[Use] | None = None  # of the simulated ranks, while they are measured
        self.link: Link | None = None  # all ranks
        self.inner: Link | None = None  # the ranks that deal heads to each other, on a 2-D mesh
        self.outer: Link | None = None  # the ranks of the ring
        self._control: Link | None = None
        self._links: list[Link] = []  # all of these; they break together
        self._inner_size = mesh.shape[1] if mesh is not None and mesh.ndim == 2 else 1
        if self.num_simulated:
            self.name = "simulated"
        elif self.world_size > 1:
            self._connect(members)
        if self.name:
            self.key = f"{self.name}, number {next(_made)}"
            _contexts[self.key] = self

    def _connect(self, members: list[int]) -> None:
        """Make the communicators. They are this context's own: a failed message breaks its group, and the user's must
        stay whole."""
        self._control = self._make_link("control", "gloo", members)
        hosts = self._control.texts(host_name(), "the exchange of host names")
        rows = [range(i, i + self._inner_size) for i in range(0, len(members), self._inner_size)]  # of a 2-D mesh
        order = ring_order([", ".join(hosts[k] for k in row) for row in rows])
        members = [members[k] for i in order for k in rows[i]]
        self._control.reorder(members)
        self.link = self._make_link("data", None, members)
        self.rank = self.link.rank
        self.outer = self.link
        if self._inner_size > 1:
            row, column = divmod(self.rank, self._inner_size)
            self.inner = self._make_link("heads", None, members[row * self._inner_size :][: self._inner_size])
            chunks = members[column :: self._inner_size]
            self.outer = self._make_link("chunks", None, chunks) if len(chunks) > 1 else None

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
        for link in self._links:
            link.close()
        self._links.clear()

    @property
    def runs_all(self) -> bool:
        """All ranks are simulated, on full tensors."""
        return self.num_simulated > 0 and self.others is None

    @contextmanager
    def measuring(self) -> Iterator[list[Use]]:
        """What each simulated rank sends and holds in the calls of a block: bytes sent in all, most bytes held at once.

            with parallel.measuring() as ranks:
                dilated_attention(query, key, value, pattern, parallel=parallel)
            print(*ranks, sep="\\n")

        A rank holds its rows of the call's tensors (in backward also of out, lse and the gradient of out) and all that
        it makes: buffers, accumulators, partial results. What one of torch's ops makes and frees by itself (a kernel's
        scratch) is not seen; `rda plan` lists it.

        Raises:
            ValueError: unless all ranks are simulated. (`python -m benchmarks memory` measures real ones.)
        """
        if not self.runs_all:
            which = f"exchange={self.exchange!r}" + (" and rank" if self.others is not None else "")
            raise ValueError(
                f"measuring needs all ranks in this process, and this context was made with {which}. Make one with "
                "exchange='simulated' and world_size alone."
            )
        self.uses = uses = [Use(rank, self.num_simulated) for rank in range(self.num_simulated)]
        try:
            yield uses
        finally:
            self.uses = None

    def shards(self, lengths: Sequence[int]) -> tuple[Shard, ...]:
        """Every rank's shard, given every rank's number of positions.

        Raises:
            ValueError: if they are not those that the context was made with.
        """
        if self.lengths is not None and tuple(lengths) != self.lengths:
            raise ValueError(f"ranks have {tuple(lengths)} positions, but lengths={self.lengths} was given.")
        inner = self._inner_size
        if inner == 1:
            return make_shards(self.sharding, lengths)
        groups = [lengths[i : i + inner] for i in range(0, len(lengths), inner)]
        outer = make_shards(self.sharding, [sum(group) for group in groups])
        return tuple(part for shard, group in zip(outer, groups, strict=True) for part in slice_shard(shard, group))

    def shard(self, x: Tensor, dim: int = 1) -> Tensor:
        """This rank's rows of a full tensor that every rank holds. The gradient is the full one, gathered from all."""
        self._refuse_one_rank("shard")
        if failure := dim_failure("shard", x, dim):
            raise ValueError(failure)
        shards = self.shards(self.default_lengths(x.shape[dim]))
        return x if self.num_simulated else ShardRows.apply(x, self, shards, dim)

    def unshard(self, x: Tensor, dim: int = 1) -> Tensor:
        """The full tensor, from every rank's rows. What follows is the same on every rank: the gradient is a slice."""
        self._refuse_one_rank("unshard")
        if self.num_simulated:
            return x
        failure = dim_failure("unshard", x, dim)
        length, fields = (0, {}) if failure else (x.shape[dim], rows_fields("unshard", x, dim))
        lengths = self.handshake(length, fields, failure)
        return UnshardRows.apply(x, self, self.shards(lengths), dim)

    def positions(self, seq_len: int, cu_seqlens: Tensor | None = None) -> Tensor:
        """Positions within their document of the rows that `shard` gives this rank. (N_local,), int64, on the CPU.

        Args:
            seq_len: the length of the whole sequence.
            cu_seqlens: global borders of packed documents.
        """
        return self.local_positions((seq_len,) if self.runs_all else self.default_lengths(seq_len), cu_seqlens)

    def local_positions(self, lengths: Sequence[int], cu_seqlens: Tensor | None = None) -> Tensor:
        """Like `positions`, given every rank's number of rows instead of the default split."""
        shard = self._own_shards(lengths)[self.rank]
        borders = [0, sum(lengths)]
        if cu_seqlens is not None:
            borders = cu_seqlens.tolist()
            check_documents(borders, sum(lengths))
        ranges = document_positions(shard, borders)
        return torch.cat([torch.arange(r.start, r.stop, device="cpu") for r in (range(0), *ranges)])

    def shift_left(self, x: Tensor, fill: int) -> Tensor:
        """For each local position the value at the next position of the whole sequence; `fill` after the last.

        Crosses the borders of shards, also over ranks that own nothing. For labels: not differentiable.

        Args:
            x: (B, N_local), any integer dtype.
        """
        self._refuse_one_rank("shift_left")
        failure = None
        if x.dim() != 2 or x.is_floating_point() or x.is_complex():
            failure = f"shift_left takes integers (batch, N), got {x.dtype} {tuple(x.shape)}"
        batch, length = (0, 0) if failure else x.shape
        lengths = self.handshake(length, {"call": "shift_left", "batch": batch, "fill": fill}, failure)
        shards = self._own_shards(lengths)
        with all_or_none(self):
            firsts = self._first_columns(x, shards)
        parts, row = [], 0
        for span in shards[self.rank]:
            stop = row + span.stop - span.start
            last = firsts.get(span.stop, torch.full_like(x[:, :1], fill))
            parts += [x[:, row + 1 : stop], last.to(x)]
            row = stop
        return torch.cat([x[:, :0], *parts], dim=1)

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of all ranks' tensors. Not differentiable."""
        self._refuse_one_rank("all_reduce")
        if self.link is None:
            return x.clone()
        call = {"call": "all_reduce", "shape": tuple(x.shape), "dtype": x.dtype, "device": x.device.type}
        self.handshake(0, call)
        with all_or_none(self):
            return self.link.all_reduce(x.detach(), "all_reduce")

    def deliver(
        self, make_parts: Callable[[], Sequence[Tensor]], sizes: Sequence[int], moment: str
    ) -> Sequence[Tensor]:
        """Send a flat part to every rank (parts may be empty) and receive one from each, of the given sizes.

        For the rows of a call that all ranks have agreed on, by `handshake`. If this one cannot make its parts, the
        others fail at once.
        """
        with all_or_none(self):
            parts = make_parts()
            return parts if self.link is None else self.link.all_to_all_single(parts, sizes, parts[self.rank], moment)

    def abandon(self, reason: str) -> None:
        """Break this context's groups, so that the other ranks fail at once instead of waiting for this one.

        A call that fails does so by itself. For errors between calls, in a program that goes on after them.
        """
        for link in self._links:
            link.abandon(reason)

    @contextmanager
    def recorded_waits(self) -> Iterator[list[Wait]]:
        """The waits of this rank for others, on every link of the context (the handshakes' too), as they end."""
        waits: list[Wait] = []
        for link in self._links:
            link.waits = waits
        try:
            yield waits
        finally:
            for link in self._links:
                link.waits = None

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
        if self._control is None:
            if failure:
                raise ValueError(failure)
            return (length,) if self.others is None else self._assumed_lengths(length)
        how = {"sharding": self.sharding, "exchange": self.exchange, "align": self.align, "lengths": self.lengths}
        return agree(self._control, length, {**fields, **how}, failure)

    def _first_columns(self, x: Tensor, shards: Sequence[Shard]) -> dict[int, Tensor]:
        """The first column (B, 1) of every span of every rank, by its global position."""
        own = torch.zeros(2, x.shape[0], dtype=torch.int64, device="cpu")
        row = 0
        for i, span in enumerate(shards[self.rank]):
            own[i] = x[:, row].cpu()
            row += span.stop - span.start
        records = self._control.all_to_all(own, "the exchange of labels") if self._control is not None else [own]
        return {
            span.start: record[i].unsqueeze(1)
            for shard, record in zip(shards, records, strict=True)
            for i, span in enumerate(shard)
        }

    def _own_shards(self, lengths: Sequence[int]) -> tuple[Shard, ...]:
        """The shards of processes: simulated ranks share the one of this process."""
        return make_shards("contiguous", lengths) if self.runs_all else self.shards(lengths)

    def _assumed_lengths(self, length: int) -> tuple[int, ...]:
        """The lengths of all ranks of a job of which one is run, with `length` positions."""
        lengths = self.lengths if self.lengths is not None else (length,) * self.num_simulated
        if lengths[self.rank] != length:
            raise ValueError(f"rank {self.rank} has {length} positions, but lengths gives it {lengths[self.rank]}.")
        return lengths

    def _refuse_one_rank(self, method: str) -> None:
        if self.others is not None:
            raise ValueError(
                f"{method} needs the tensors of all ranks, and only rank {self.rank} of {self.num_simulated} is run. "
                "Make its rows where they are needed, at the positions that `positions` tells."
            )

    def default_lengths(self, seq_len: int) -> tuple[int, ...]:
        """Every rank's number of positions of a sequence that `shard` cuts."""
        if self.lengths is not None:
            if sum(self.lengths) != seq_len:
                raise ValueError(
                    f"lengths={self.lengths} add up to {sum(self.lengths)}, but the sequence has {seq_len} positions."
                )
            return self.lengths
        return default_lengths(
            self.sharding, seq_len, self.num_simulated or self.world_size, self.align, self._inner_size
        )

    def _make_link(self, purpose: str, backend: str | None, members: list[int]) -> Link:
        """A communicator of these global ranks, in this order."""
        try:
            group = dist.new_group(
                members,
                timeout=self.timeout,
                backend=backend,
                use_local_synchronization=len(members) != dist.get_world_size(),
                group_desc=f"ring_dilated_attention:{purpose}",
            )
            self.name = self.name or f"context {group.group_name[:12]}"  # the first group's name, or hash
            link = Link(group, f"{purpose} of {self.name}", members, self._links)
            link.open()
        except RuntimeError as error:
            raise ExchangeError(
                f"making a ContextParallel: not all of the ranks {members} did (group {purpose!r}, "
                f"rank {dist.get_rank()}): {error}"
            ) from error
        return link


__all__ = ["ContextParallel", "ExchangeError", "context_named"]
