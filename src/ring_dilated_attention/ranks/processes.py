"""Several processes that share sequences: their groups, in the order of the ring, and the handshake of a call."""

import socket
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist
from torch import Tensor

from ..plan.dealing import check_dealing
from ..plan.exchange import Choice, choose_exchange
from ..plan.memory import Sizes
from ..plan.sharding import Cut, ring_order
from .contract import Call
from .handshake import agree
from .link import ExchangeError, GroupLink
from .own_rows import Links, OwnRows, call_fields


def host_name() -> str:
    return socket.gethostname()


class Processes(OwnRows):
    """The processes of a group. Their communicators are their own: a failed message breaks its group, and the user's
    must stay whole.

    control: all ranks, over gloo. all: all ranks, for data. inner: those that deal heads to each other, on a 2-D mesh.
    outer: those of the ring.
    """

    def __init__(self, members: list[int], cut: Cut, exchange: str, timeout: timedelta) -> None:
        super().__init__(cut)
        self.exchange, self.timeout, self.world_size = exchange, timeout, len(members)
        self.opened: list[GroupLink] = []  # they break together
        self.control = self._open("control", "gloo", members)
        hosts = self.control.texts(host_name(), "the exchange of host names")
        rows = [range(i, i + cut.inner) for i in range(0, len(members), cut.inner)]  # of a 2-D mesh
        order = ring_order([", ".join(hosts[k] for k in row) for row in rows])
        members = [members[k] for i in order for k in rows[i]]
        self.control.reorder(members)
        self.all = self._open("data", None, members)
        self.rank = self.all.rank
        self.inner: GroupLink | None = None
        self.outer: GroupLink | None = self.all
        if cut.inner > 1:
            row, column = divmod(self.rank, cut.inner)
            self.inner = self._open("heads", None, members[row * cut.inner :][: cut.inner])
            chunks = members[column :: cut.inner]
            self.outer = self._open("chunks", None, chunks) if len(chunks) > 1 else None

    def _open(self, purpose: str, backend: str | None, members: list[int]) -> GroupLink:
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
            link = GroupLink(group, f"{purpose} of {self.name}", members, self.opened)
            link.open()
        except RuntimeError as error:
            raise ExchangeError(
                f"making a ContextParallel: not all of the ranks {members} did (group {purpose!r}, "
                f"rank {dist.get_rank()}): {error}"
            ) from error
        return link

    def agree(self, length: int, fields: dict[str, object], failure: str | None) -> tuple[int, ...]:
        cut = self.cut
        how = {"sharding": cut.sharding, "align": cut.align, "lengths": cut.lengths, "exchange": self.exchange}
        return agree(self.control, length, {**fields, **how}, failure)

    def fields(
        self, call: Call, stage: str, number: int, query: Tensor, key: Tensor, cu_seqlens: Tensor | None
    ) -> dict[str, object]:
        return call_fields(call, stage, number, query, key, cu_seqlens)

    def records(self, record: Tensor, moment: str) -> list[Tensor]:
        return self.control.all_to_all(record, moment)

    def gather(self, x: Tensor, lengths: Sequence[int], dim: int, moment: str) -> list[Tensor]:
        return self.all.all_gather(x, lengths, dim, moment)

    def choose(
        self,
        call: Call,
        lengths: Sequence[int],
        num_kv_heads: int,
        sizes: Sizes,
        documents: tuple[int, ...] | None,
    ) -> Choice:
        num_kv_held = num_kv_heads * len(call.heads) // call.num_heads
        if self.cut.inner > 1:
            check_dealing(num_kv_held, self.cut.inner)
        if self.exchange == "all_to_all":
            check_dealing(num_kv_held, self.world_size)
        if self.exchange != "auto":
            return Choice(self.exchange, "asked for")
        if self.cut.inner > 1:
            return Choice("ring", "the outer axis of a 2-D mesh; the inner one deals heads")
        heads = (call.num_heads, num_kv_heads)
        return choose_exchange(call.pattern, self.shards(lengths), *heads, documents, sizes, call.held)

    def links(self, exchange: str, plan_arguments: tuple) -> Links:
        return Links(None, self.all) if exchange == "all_to_all" else Links(self.outer, self.inner)

    def abandon(self, reason: str) -> None:
        for link in self.opened:
            link.abandon(reason)

    def close(self) -> None:
        for link in self.opened:
            link.close()
        self.opened.clear()
