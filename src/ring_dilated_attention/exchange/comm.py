"""The only file that sends: messages between the ranks of one process group.

Each is awaited exactly once, and errors name the group, the moment and the peer.
"""

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

_UNUSED_TAG = 1  # all messages have tag 0


class ExchangeError(RuntimeError):
    """A peer died, is stuck, or left the group. The group cannot be used any more; make a new ContextParallel."""


class Wait(NamedTuple):
    """When messages were posted, when their rank began to wait for them, and when they were there, in seconds.

    end - start is *exposed* communication: time in which the rank did nothing else.
    """

    moment: str
    posted: float
    start: float
    end: float


@dataclass
class Pending:
    """Messages in flight. `wait` returns when they have been sent and received; waiting again returns at once.

    The tensors are kept alive, and a handle is awaited exactly once: gloo hangs on a second wait.
    """

    link: "Link | None"
    moment: str
    handles: list[tuple[dist.Work, str]] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)
    unstaged: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    posted: float = field(default_factory=time.perf_counter)

    def wait(self) -> None:
        if not self.handles:
            return
        assert self.link is not None
        start = time.perf_counter()
        while self.handles:
            handle, deed = self.handles.pop(0)
            try:
                handle.wait()
            except RuntimeError as error:
                self.link.fail(self.moment, deed, error)
        for tensor, staged in self.unstaged:
            tensor.copy_(staged, non_blocking=True)
        self.tensors.clear()
        self.unstaged.clear()
        if self.link.waits is not None:
            self.link.waits.append(Wait(self.moment, self.posted, start, time.perf_counter()))


class Link:
    """Messages within one process group. Ranks and peers are places in the ring, in the order of `members`.

    Every pair of ranks must post its messages in the same order (the plan sees to it); no tags are used, because NCCL
    knows none.
    """

    def __init__(self, group: dist.ProcessGroup, name: str, members: Sequence[int]) -> None:
        self.group, self.name = group, name
        self.world_size = len(members)
        self.reorder(members)
        self.failure: str | None = None
        self.waits: list[Wait] | None = None  # a list while waits are recorded

    def reorder(self, members: Sequence[int]) -> None:
        """Put the group's members, given by their global ranks, in this order."""
        self.members = list(members)
        self.order = [dist.get_group_rank(self.group, member) for member in members]  # rank in the group, by place
        self.rank = self.order.index(dist.get_rank(self.group))

    def fail(self, moment: str, deed: str, error: Exception) -> NoReturn:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        failure = f"group {self.name!r}, rank {self.members[self.rank]}, {moment}: {deed}: {reason}"
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
        peer, nothing = self.order[(self.rank + 1) % self.world_size], torch.empty(1)
        with suppress(RuntimeError):
            work = dist.irecv(nothing, group=self.group, group_src=peer, tag=_UNUSED_TAG)
            work.wait(timedelta(milliseconds=1))

    def _refuse_if_broken(self) -> None:
        if self.failure:
            raise ExchangeError(f"this group has failed before ({self.failure}). Make a new ContextParallel.")

    def exchange(
        self, sends: Sequence[tuple[Tensor, int]], receives: Sequence[tuple[Tensor, int]], moment: str
    ) -> Pending:
        """Start sending and receiving contiguous tensors, each with its peer. `moment` is quoted in errors."""
        self._refuse_if_broken()
        messages = [(dist.isend, x, peer, f"sending to rank {self.members[peer]}") for x, peer in sends]
        messages += [(dist.irecv, x, peer, f"waiting for rank {self.members[peer]}") for x, peer in receives]
        pending = Pending(self, moment)
        if not messages:
            return pending
        messages = [(op, self._staged(x, op is dist.isend, pending), peer, deed) for op, x, peer, deed in messages]
        pending.tensors = [x for _, x, _, _ in messages]
        deeds = [deed for *_, deed in messages]
        try:
            works = dist.batch_isend_irecv(
                [dist.P2POp(op, x, group=self.group, group_peer=self.order[peer]) for op, x, peer, _ in messages]
            )
        except RuntimeError as error:
            self.fail(moment, ", ".join(deeds), error)
        if len(works) != len(messages):  # a transport that answers for all of them at once
            deeds = [", ".join(deeds)] * len(works)
        pending.handles = list(zip(works, deeds, strict=True))
        return pending

    def _stages(self, x: Tensor) -> bool:
        """Whether a tensor must travel through host memory: gloo cannot send CUDA tensors."""
        return x.is_cuda and dist.get_backend(self.group) == "gloo"

    def _staged(self, x: Tensor, is_filled: bool, pending: Pending | None = None) -> Tensor:
        """The tensor, or a pinned copy of it on the host; a received copy is brought back when it is there."""
        if not self._stages(x):
            return x
        host = torch.empty(x.shape, dtype=x.dtype, pin_memory=torch.cuda.is_available())
        if is_filled:
            host.copy_(x)  # waits for the kernels that write x
        elif pending is not None:
            pending.unstaged.append((x, host))
        return host

    def all_to_all(self, record: Tensor, moment: str) -> list[Tensor]:
        """Everybody's record (all of one shape and dtype), in the order of ranks. Point to point, so that errors can
        name the rank that did not come."""
        records = [record if peer == self.rank else torch.empty_like(record) for peer in range(self.world_size)]
        others = [peer for peer in range(self.world_size) if peer != self.rank]
        self.exchange([(record, peer) for peer in others], [(records[peer], peer) for peer in others], moment).wait()
        return records

    def texts(self, text: str, moment: str) -> list[str]:
        """Everybody's text, up to 1,024 bytes each."""
        record = torch.zeros(1024, dtype=torch.uint8)
        encoded = text.encode()[: len(record)]
        record[: len(encoded)] = torch.tensor(list(encoded), dtype=torch.uint8)
        return [bytes(r[r != 0].tolist()).decode(errors="replace") for r in self.all_to_all(record, moment)]

    def all_gather(self, x: Tensor, lengths: Sequence[int], dim: int, moment: str) -> list[Tensor]:
        """Every rank's tensor; they differ only in their length along `dim`. One collective, padded to the longest."""
        longest = max(lengths)
        padded = x.movedim(dim, 0).new_zeros(longest, *x.movedim(dim, 0).shape[1:])
        padded[: x.shape[dim]] = x.movedim(dim, 0)
        padded = self._staged(padded, True)
        gathered = [torch.empty_like(padded) for _ in lengths]
        try:
            dist.all_gather(gathered, padded, group=self.group)
        except RuntimeError as error:
            self.fail(moment, "in an all-gather", error)
        return [
            gathered[rank][:length].movedim(0, dim).to(x.device)
            for rank, length in zip(self.order, lengths, strict=True)
        ]

    def all_to_all_single(
        self, parts: Sequence[Tensor], sizes: Sequence[int], like: Tensor, moment: str
    ) -> list[Tensor]:
        """Send a flat part to every rank (parts may be empty) and receive one from each, of the given sizes."""
        by_rank = sorted(range(self.world_size), key=lambda place: self.order[place])
        sent = self._staged(torch.cat([parts[place] for place in by_rank]), True)
        received = torch.empty(sum(sizes), dtype=like.dtype, device=sent.device)
        receive_splits = [sizes[place] for place in by_rank]
        self._refuse_if_broken()
        try:
            dist.all_to_all_single(received, sent, receive_splits, [len(parts[k]) for k in by_rank], group=self.group)
        except RuntimeError as error:
            self.fail(moment, "in an all-to-all", error)
        pieces = received.to(like.device).split(receive_splits)
        return [pieces[by_rank.index(place)] for place in range(self.world_size)]

    def all_reduce(self, x: Tensor, moment: str) -> Tensor:
        """The sum of all ranks' tensors."""
        total = self._staged(x.clone(), True)
        try:
            dist.all_reduce(total, group=self.group)
        except RuntimeError as error:
            self.fail(moment, "in an all-reduce", error)
        return total.to(x.device)
