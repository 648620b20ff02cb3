"""Sends the package's messages between the ranks of one process group.

All other messages are sent by torch itself: by DTensor (integrations/torch.py), and by FSDP2 and its sharded
checkpoints (training/loop.py).
"""

import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from ..plan.rounds import rounds_of
from ..run.link_contract import Messages
from .cards import card_of
from .failures import ExchangeError, reason_of, usual_cause
from .watching import Handle, Progress, Sentinel, Worker, with_threads

_WATCH_SECONDS = 0.1
_GRACE_SECONDS = 1.0
# Messages of at most this many bytes to the same peer are joined.
_SHORT_BYTES = 64 * 1024
_UNUSED_TAG = 1  # the tag of receives that nobody answers; all messages have tag 0
_TEXT_BYTES = 1024
Addressed = Sequence[tuple[Tensor, int]]  # pairs (tensor, the peer that sends or gets it)


class WaitTimes(NamedTuple):
    """When this rank began and ended a wait for messages, in seconds of time.perf_counter.

    The time in which this rank computes does not count as a wait, even if messages travel meanwhile. moment: the call
    in which the rank waited, such as "forward 3".
    """

    moment: str
    start: float
    end: float


class Transfer(NamedTuple):
    """A send or receive that has not been started yet. operation: `dist.isend` or `dist.irecv`. peer: the rank that
    gets or sends `tensor`. description: what an error says if this message fails."""

    operation: Callable[..., dist.Work | None]
    tensor: Tensor
    peer: int
    description: str


@dataclass(eq=False)
class GroupPending:
    """Messages that have been started, with their tensors. `wait` waits for each message only once, because gloo hangs
    if a message is waited for again."""

    link: "GroupLink"
    moment: str
    handles: list[Handle] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)
    # Pairs (tensor, buffer). A message arrives in the buffer, and `wait` copies the buffer to the tensor.
    copies: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def wait(self) -> None:
        if not self.handles:
            return
        start = time.perf_counter()
        self.link.wait_for(self)
        self.handles.clear()
        for tensor, arrived_copy in self.copies:
            tensor.copy_(arrived_copy, non_blocking=True)
        self.tensors.clear()
        self.copies.clear()
        if self.link.waits is not None:
            self.link.waits.append(WaitTimes(self.moment, start, time.perf_counter()))


class GroupLink:
    """Sends messages within one process group. A rank or peer is an index into `members`, the list of global ranks.

    Two ranks must start the messages between them in the same order, because NCCL has no tags. A plan lists messages in
    this order.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        name: str,
        members: Sequence[int],
        links: "list[GroupLink]",
    ) -> None:
        self.group = group
        self.name = name
        self.world_size = len(members)
        self.reorder(members)
        self.failure: str | None = None
        self.links = links  # all links of the context: if a link fails, `fail` breaks all links
        # For each kind of call (forward, shard, ...): the `length` that each rank last passed to `handshake.agree`.
        self.agreed: dict[str, tuple[int, ...]] = {}
        # Whether ranks compare the numbers of the calling modules. `_raise_alike` (handshake.py) clears the flag once
        # some ranks have made more modules than others. A layer may then have a different number on each rank.
        self.counts_modules = True
        links.append(self)
        # The backend of each type of device, such as {"cpu": "gloo", "cuda": "nccl"}.
        self.backends = dict(pair.split(":") for pair in dist.get_backend_config(group).split(","))
        self._pending: weakref.WeakSet[GroupPending] = weakref.WeakSet()
        self._worker: Worker | None = None
        # Watchers of the connections to peers (watching.py), by the peer's rank in torch's group.
        self._sentinels: dict[int, Sentinel] = {}
        self.waits: list[WaitTimes] | None = None  # set by `recorded_waits` (processes.py)

    def open(self) -> None:
        """Make the first NCCL call, on all ranks. torch does not define what happens if only some ranks make it."""
        if self.backends.get("cuda") == "nccl":
            dist.all_reduce(torch.zeros(1, device=card_of(self.group)), group=self.group)

    def reorder(self, members: Sequence[int]) -> None:
        """Reorder the group's members. members: their global ranks in the new order."""
        self.members = list(members)
        # `order[i]` is the rank of `members[i]` in torch's group.
        self.order = [dist.get_group_rank(self.group, member) for member in members]
        self.rank = self.order.index(dist.get_rank(self.group))

    def on_gloo(self, x: Tensor) -> bool:
        """Whether gloo sends a tensor. It does if gloo is the backend for the tensor's device, or if that device has no
        backend in this group."""
        return self.backends.get(x.device.type, "gloo") == "gloo"

    # Waiting for messages, and breaking the groups if a message does not come.

    def wait_for(self, pending: GroupPending) -> None:
        """Wait for messages, one after the other. On gloo another thread waits, and this thread watches the peer.

        When a connection breaks, gloo ends the wait for a message that has not begun to travel. But the wait for a
        message that is under way lasts until its timeout (signalException in gloo/transport/tcp/pair.cc). A `Sentinel`
        notices the break immediately.
        """
        handles = tuple(pending.handles)
        progress = Progress()
        if self.on_gloo(pending.tensors[0]):
            if self._worker is None:
                self._worker = Worker()
                with_threads.add(self)
            self._worker.submit(partial(progress.follow, handles))
        else:
            progress.follow(handles)
        while not progress.ended.wait(_WATCH_SECONDS):
            self._watch(handles, progress, pending.moment)
        if progress.error is not None:
            self.fail(pending.moment, handles[progress.num_done].description, progress.error)

    def _watch(self, handles: Sequence[Handle], progress: Progress, moment: str) -> None:
        """Raise ExchangeError if the peer of the next message has closed its connection."""
        num_done = progress.num_done
        if num_done == len(handles):
            return
        peer = self.order[handles[num_done].peer]
        if peer not in self._sentinels:
            self._sentinels[peer] = Sentinel(partial(self._receive_nothing, peer))
        error = self._sentinels[peer].error
        # Give the message another second: the peer may have sent its last message and then closed the connection, and
        # this rank may notice the closing before the message.
        if (
            error is not None
            and not progress.ended.wait(_GRACE_SECONDS)
            and progress.num_done == num_done
        ):
            self.fail(moment, handles[num_done].description, error)

    def fail(self, moment: str, description: str, error: Exception) -> NoReturn:
        """Raise ExchangeError, and break all groups of the context: other ranks may wait for this rank in any group."""
        if self.failure is None:
            reason = reason_of(error)
            failure = (
                f"{moment}: {description} (group {self.name!r}, rank {self.members[self.rank]}): {reason}"
                f"{usual_cause(description, reason)}"
            )
            for link in self.links:
                link.abandon(failure)
        # `failure` is already set if this rank called `abandon` during the wait, because `abandon` makes the wait fail.
        raise ExchangeError(self.failure) from error

    def abandon(self, reason: str) -> None:
        """Break the group after a failure of this rank, so that other ranks fail immediately and do not wait for it."""
        if self.failure or self.world_size == 1:
            return
        self.failure = reason
        if set(self.backends.values()) != {"gloo"}:
            self.group.abort()
        self._disconnect()
        # End messages that are stuck in gloo: if they ended later, they might write to events that torch's profiler has
        # freed.
        for pending in list(self._pending):
            for handle in pending.handles:
                if self.on_gloo(pending.tensors[0]) and not handle.work.is_completed():
                    with suppress(RuntimeError):
                        handle.work.wait(timedelta(milliseconds=1))

    def _disconnect(self) -> None:
        """Close gloo's connections.

        `abort`, `shutdown` and destroying the group leave the connections open. But if a receive times out, gloo closes
        all connections of the group. So this rank starts receives that nobody answers, one from each peer, which time
        out after 1 ms. One receive alone is not enough: over a connection that is already broken, a receive does not
        time out.
        """
        if self.backends.get("cpu") != "gloo":
            return
        for peer in self._others():
            with suppress(RuntimeError):
                self._receive_nothing(self.order[peer]).wait(timedelta(milliseconds=1))

    def _receive_nothing(self, peer: int) -> dist.Work:
        """Start a receive that nobody answers. peer: the peer's rank in torch's group.

        The receive has a tag that no message has. Otherwise it might get a message of a different size, and gloo would
        end the process.
        """
        return self.group.recv([torch.empty(1, device="cpu")], peer, _UNUSED_TAG)

    def close(self) -> None:
        """Destroy the group. Its sockets and threads live while any object, such as a sentinel, refers to the group."""
        if not self.failure and self._sentinels:
            self.end_threads()
        self._worker = None
        with_threads.discard(self)
        self.failure = self.failure or "it was closed"
        # Ignore the errors that torch raises if torch.distributed is already shut down.
        with suppress(ValueError, AssertionError):
            dist.destroy_process_group(self.group)
        del self.group

    def end_threads(self) -> None:
        """End the threads of this link, by closing the connections on which the threads wait."""
        self._disconnect()
        self._sentinels.clear()
        self._worker = None

    # Starting messages.

    def exchange(self, sends: Addressed, receives: Addressed, moment: str) -> GroupPending:
        """Start sending and receiving contiguous tensors, each with its peer. Errors quote `moment`.

        Receives are started first. With gloo a rank notifies the sender when it starts a receive, and the sender waits
        for this notice. If a rank started its sends first, its notices would queue behind its data. Then data would
        flow one way at a time.
        """
        transfers = []
        for x, peer in receives:
            transfers.append(
                Transfer(dist.irecv, x, peer, f"waiting for rank {self.members[peer]}")
            )
        for x, peer in sends:
            transfers.append(Transfer(dist.isend, x, peer, f"sending to rank {self.members[peer]}"))
        return self._post(transfers, moment)

    def carry(self, sends: Messages, receives: Messages, moment: str) -> GroupPending:
        """Start sending and receiving the messages of a plan, by `exchange`."""
        sends_to_peers = [(x, message.peer) for x, message in sends]
        receives_from_peers = [(x, message.peer) for x, message in receives]
        return self.exchange(sends_to_peers, receives_from_peers, moment)

    def carry_apart(
        self, sends: Messages, receives: Messages, moment: str
    ) -> tuple[GroupPending, GroupPending]:
        """Like `carry`, but returns two objects to wait for: one for the sends, and one for the receives.

        On NCCL the two are the same object, because sends and receives must be one batch. In two batches every rank's
        receives would queue behind its sends in NCCL's stream, and all ranks of a ring would wait for ever.
        """
        if all(self.on_gloo(x) for x, _ in (*sends, *receives)):
            # Start receives first (`exchange` says why).
            received = self.carry((), receives, moment)
            return self.carry(sends, (), moment), received
        both = self.carry(sends, receives, moment)
        return both, both

    def _post(self, transfers: Sequence[Transfer], moment: str) -> GroupPending:
        """Start messages: one by one if gloo sends all messages, else in one batch."""
        if self.failure:
            raise ExchangeError(
                f"this group has failed before ({self.failure}). Make a new ContextParallel."
            )
        on_gloo = all(self.on_gloo(transfer.tensor) for transfer in transfers)
        pending = GroupPending(self, moment)
        self._pending.add(pending)
        joined = self._join_short(transfers, pending)
        pending.tensors = [transfer.tensor for transfer in joined]
        if on_gloo:  # start messages one by one, so that an error can name the message that failed
            for transfer in joined:
                pending.handles += self._post_batch([transfer], moment)
        else:
            pending.handles += self._post_batch(joined, moment)
        return pending

    def _post_batch(self, batch: Sequence[Transfer], moment: str) -> list[Handle]:
        peers = [transfer.peer for transfer in batch]
        descriptions = [transfer.description for transfer in batch]
        try:
            operations = []
            for operation, x, peer, _ in batch:
                operations.append(
                    dist.P2POp(operation, x, group=self.group, group_peer=self.order[peer])
                )
            works = dist.batch_isend_irecv(operations)
        except RuntimeError as error:
            self.fail(moment, ", ".join(descriptions), error)
        except ValueError as error:
            # torch raises ValueError if it does not know the group any more, because torch.distributed was shut down.
            self.failure = "torch.distributed was shut down after this context was made"
            raise ExchangeError(f"{moment}: {self.failure}. Make a new ContextParallel.") from error
        if len(works) != len(batch):  # NCCL returns one handle for all messages of a batch
            descriptions = [", ".join(descriptions)] * len(works)
        return list(map(Handle, works, descriptions, peers))

    def _join_short(self, transfers: Sequence[Transfer], pending: GroupPending) -> list[Transfer]:
        """The transfers, with all short sends to a peer joined into one send, and all short receives from a peer into
        one receive. The peer knows the sizes of these messages too, so it joins the same messages."""
        joined: dict[tuple[object, ...], list[Transfer]] = {}
        for number, transfer in enumerate(transfers):
            own_number = number if transfer.tensor.nbytes > _SHORT_BYTES else None
            key = (transfer.operation, transfer.peer, transfer.tensor.dtype, own_number)
            joined.setdefault(key, []).append(transfer)
        result = []
        for together in joined.values():
            first = together[0]
            tensors = [transfer.tensor for transfer in together]
            one = self._as_one(tensors, first.operation is dist.isend, pending)
            result.append(first._replace(tensor=one))
        return result

    def _needs_host(self, x: Tensor) -> bool:
        """Whether a tensor must pass through host memory, because gloo cannot send CUDA tensors. (No GPU has run
        this.)"""
        return x.is_cuda and self.on_gloo(x)

    def _as_one(self, tensors: Sequence[Tensor], is_sent: bool, pending: GroupPending) -> Tensor:
        """One tensor to send or receive instead of `tensors`.

        A single tensor that need not pass through host memory is returned unchanged. Otherwise the result is a buffer.
        `GroupPending.wait` copies a received buffer to `tensors`.
        """
        first = tensors[0]
        on_host = self._needs_host(first)
        if len(tensors) == 1 and not on_host:
            return first
        device = first.device
        pin_memory = False
        if on_host:
            device = torch.device("cpu")
            pin_memory = torch.cuda.is_available()
        sizes = [x.numel() for x in tensors]
        one = torch.empty(sum(sizes), dtype=first.dtype, device=device, pin_memory=pin_memory)
        for x, copy in zip(tensors, one.split(sizes), strict=True):
            if is_sent:
                # A copy to the host is blocking, so it waits for the kernels that write `x`.
                copy.copy_(x.view(-1))
            else:
                pending.copies.append((x.view(-1), copy))
        return one

    # The messages of handshakes.

    def records(self, record: Tensor, moment: str) -> list[Tensor]:
        """Send this rank's record to all other ranks, and return every rank's record. All records have the same shape
        and dtype. No rank returns before all ranks have called this method.

        All messages are point to point, so that an error can name the rank that did not call.
        """
        # `known[i]` is the record of rank `self.rank - i` (modulo `world_size`).
        known = record[None]
        for peers in rounds_of(self.rank, self.world_size):
            needed = known[: self.world_size - len(known)]
            others = self._pass_on(needed, peers, moment, is_first=len(known) == 1)
            known = torch.cat([known, *others])
        return [known[(self.rank - peer) % self.world_size] for peer in range(self.world_size)]

    def largest(self, record: Tensor, moment: str) -> Tensor:
        """The elementwise maximum of all ranks' records. No rank returns before all ranks have called this method."""
        for number, peers in enumerate(rounds_of(self.rank, self.world_size)):
            others = self._pass_on(record, peers, moment, is_first=number == 0)
            record = torch.stack([record, *others]).amax(0)
        return record

    def _pass_on(
        self, known: Tensor, peers: list[tuple[int, int]], moment: str, *, is_first: bool
    ) -> list[Tensor]:
        """Run one round of messages: send `known` to each target, and return the tensors that come from the sources.

        peers: pairs (target, source).
        """

        def description(peer: int) -> str:
            absence = f"rank {self.members[peer]} did not enter {moment}"
            return absence if is_first else f"{absence}, or waits there for another rank"

        received = [torch.empty_like(known) for _ in peers]
        transfers = []
        for x, (_, source) in zip(received, peers, strict=True):
            transfers.append(Transfer(dist.irecv, x, source, description(source)))
        for target, _ in peers:
            transfers.append(Transfer(dist.isend, known, target, description(target)))
        self._post(transfers, f"{moment}, handshake").wait()
        return received

    def texts(self, text: str, moment: str) -> list[str]:
        """Send this rank's text to all other ranks, and return every rank's text. Texts are cut to 1,024 bytes."""
        record = torch.zeros(_TEXT_BYTES, dtype=torch.uint8, device="cpu")
        # Escape surrogates, which a name in the text may contain and UTF-8 cannot encode.
        encoded = text.encode(errors="backslashreplace")[:_TEXT_BYTES]
        record[: len(encoded)] = torch.tensor(list(encoded), dtype=torch.uint8, device="cpu")
        texts = []
        for other in self.records(record, moment):
            texts.append(bytes(other[other != 0].tolist()).decode(errors="replace"))
        return texts

    # Exchanges of each rank with all other ranks.

    def _others(self) -> list[int]:
        return [peer for peer in range(self.world_size) if peer != self.rank]

    def all_gather(self, x: Tensor, lengths: Sequence[int], dim: int, moment: str) -> list[Tensor]:
        """Send this rank's tensor to all other ranks, and return every rank's tensor. Tensors may differ only in their
        length along `dim`, which is `lengths[k]` on rank k."""
        x = x.contiguous()
        gathered = []
        for peer, length in enumerate(lengths):
            shape = list(x.shape)
            shape[dim] = length
            gathered.append(x if peer == self.rank else x.new_empty(shape))
        self._exchange_rows([x] * self.world_size, gathered, moment)
        return gathered

    def all_to_all_single(
        self, tensors: Sequence[Tensor], sizes: Sequence[int], like: Tensor, moment: str
    ) -> list[Tensor]:
        """Send the flat tensor `tensors[k]` to each rank k, and receive a tensor of `sizes[k]` entries from rank k.
        Returns the received tensors in the order of ranks, with the dtype and device of `like`."""
        received = list(
            torch.empty(sum(sizes), dtype=like.dtype, device=like.device).split(list(sizes))
        )
        received[self.rank].copy_(tensors[self.rank])
        self._exchange_rows([x.contiguous() for x in tensors], received, moment)
        return received

    def _exchange_rows(
        self, leaving: Sequence[Tensor], arriving: Sequence[Tensor], moment: str
    ) -> None:
        """For every other rank k, send `leaving[k]` and receive `arriving[k]`. Then wait. Empty tensors are skipped."""
        others = self._others()
        sends = [(leaving[peer], peer) for peer in others if leaving[peer].numel()]
        receives = [(arriving[peer], peer) for peer in others if arriving[peer].numel()]
        self.exchange(sends, receives, moment).wait()
