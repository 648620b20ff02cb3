"""The only file that sends. Messages between the ranks of one process group, awaited exactly once, with errors that name
the group, the moment and the peer."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import Tensor


_UNUSED_TAG = 1  # all messages have tag 0


class ExchangeError(RuntimeError):
    """A peer died, is stuck, or left the group. The group cannot be used any more; make a new ContextParallel."""


@dataclass
class Pending:
    """Messages in flight. `wait` returns when they have been sent and received; waiting again returns at once.

    The tensors are kept alive, and a handle is awaited exactly once: gloo hangs on a second wait.
    """

    link: "Link | None"
    moment: str
    handles: list[tuple[dist.Work, str]] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)

    def wait(self) -> None:
        while self.handles:
            handle, deed = self.handles.pop(0)
            try:
                handle.wait()
            except RuntimeError as error:
                assert self.link is not None
                self.link.fail(self.moment, deed, error)
        self.tensors.clear()

    def join(self, other: "Pending") -> None:
        """Wait for the other's messages too."""
        self.link, self.moment = other.link, other.moment
        self.handles += other.handles
        self.tensors += other.tensors


class Link:
    """Messages within one process group. Peers are ranks of the group.

    Every pair of ranks must post its messages in the same order (the plan sees to it); no tags are used, because NCCL
    knows none.
    """

    def __init__(self, group: dist.ProcessGroup, name: str) -> None:
        self.group, self.name = group, name
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        self.failure: str | None = None

    def fail(self, moment: str, deed: str, error: Exception) -> NoReturn:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        failure = f"group {self.name!r}, rank {self.rank}, {moment}: {deed}: {reason}"
        self.abandon(failure)
        raise ExchangeError(failure) from error

    def abandon(self, reason: str) -> None:
        """Break the group after a failure of this rank, so that the others fail at once instead of waiting for it.

        On gloo neither abort, shutdown nor destroying the group closes its connections. A receive that runs out of time
        closes them all; its tag is one that nobody sends with, since a message that does not fit would end the process.
        """
        if self.failure or self.world_size == 1:
            return
        self.failure = reason
        if dist.get_backend(self.group) != "gloo":
            self.group.abort()
            return
        peer, nothing = (self.rank + 1) % self.world_size, torch.empty(1)
        with suppress(RuntimeError):
            work = dist.irecv(nothing, group=self.group, group_src=peer, tag=_UNUSED_TAG)
            work.wait(timedelta(milliseconds=1))

    def exchange(
        self, sends: Sequence[tuple[Tensor, int]], receives: Sequence[tuple[Tensor, int]], moment: str
    ) -> Pending:
        """Start sending and receiving contiguous tensors, each with its peer. `moment` is quoted in errors."""
        if self.failure:
            raise ExchangeError(f"this group has failed before ({self.failure}). Make a new ContextParallel.")
        messages = [(dist.isend, x, peer, f"sending to rank {peer}") for x, peer in sends]
        messages += [(dist.irecv, x, peer, f"waiting for rank {peer}") for x, peer in receives]
        pending = Pending(self, moment, tensors=[x for _, x, _, _ in messages])
        if not messages:
            return pending
        deeds = [deed for *_, deed in messages]
        try:
            works = dist.batch_isend_irecv(
                [dist.P2POp(op, x, group=self.group, group_peer=peer) for op, x, peer, _ in messages]
            )
        except RuntimeError as error:
            self.fail(moment, ", ".join(deeds), error)
        if len(works) != len(messages):  # a transport that answers for all of them at once
            deeds = [", ".join(deeds)] * len(works)
        pending.handles = list(zip(works, deeds, strict=True))
        return pending

    def all_to_all(self, record: Tensor, moment: str) -> list[Tensor]:
        """Everybody's record (all of one shape and dtype), in the order of ranks. Point to point, so that errors can
        name the rank that did not come."""
        records = [record if peer == self.rank else torch.empty_like(record) for peer in range(self.world_size)]
        others = [peer for peer in range(self.world_size) if peer != self.rank]
        self.exchange([(record, peer) for peer in others], [(records[peer], peer) for peer in others], moment).wait()
        return records

    def all_gather(self, x: Tensor, lengths: Sequence[int], dim: int, moment: str) -> list[Tensor]:
        """Every rank's tensor; they differ only in their length along `dim`. One collective, padded to the longest."""
        longest = max(lengths)
        padded = x.movedim(dim, 0).new_zeros(longest, *x.movedim(dim, 0).shape[1:])
        padded[: x.shape[dim]] = x.movedim(dim, 0)
        gathered = [torch.empty_like(padded) for _ in lengths]
        try:
            dist.all_gather(gathered, padded, group=self.group)
        except RuntimeError as error:
            self.fail(moment, "in an all-gather", error)
        return [part[:length].movedim(0, dim) for part, length in zip(gathered, lengths, strict=True)]

    def all_reduce(self, x: Tensor, moment: str) -> Tensor:
        """The sum of all ranks' tensors."""
        total = x.clone()
        try:
            dist.all_reduce(total, group=self.group)
        except RuntimeError as error:
            self.fail(moment, "in an all-reduce", error)
        return total
