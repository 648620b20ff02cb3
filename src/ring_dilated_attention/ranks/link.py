"""Sends messages between the ranks of one process group. Beside it only torch's own parts send: DTensor
(integrations/torch.py), and FSDP2 with checkpoints that are cut over ranks (training/sharded.py)."""

import re
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from ..plan.rounds import rounds_of, turn_of
from ..run.link_contract import Messages
from .cards import card_of
from .last_words import DONE, LastWords, Words, usual_cause
from .watching import Handle, Progress, Sentinel, Worker, start_thread, with_threads

_WATCH_SECONDS, _GRACE_SECONDS = 0.1, 1.0
_SHORT_BYTES = 64 * 1024  # messages of at most so many bytes to one peer travel as one
_UNUSED_TAG, _FIRST_TAG = 1, 2  # every other message has tag 0
_HANDSHAKE, _CONNECTING = ", handshake", ", connecting"  # ends of moments
Addressed = Sequence[tuple[Tensor, int]]  # tensors, each with its peer
_Message = tuple[Callable[..., dist.Work | None], Tensor, int, str]  # isend or irecv, what, peer, what an error says


class ExchangeError(RuntimeError):
    """A rank died, is stuck, or gave up. The context stays broken: make a new ContextParallel of the ranks left."""


class WaitTimes(NamedTuple):
    """When messages were posted, when the last one arrived, and when this rank began and ended its wait, in seconds.

    end - start is *exposed* communication. Only on gloo can the host tell `arrived`; elsewhere it is `end`.
    """

    moment: str
    posted: float
    arrived: float
    start: float
    end: float


@dataclass(eq=False)
class GroupPending:
    """Messages in flight, with their tensors. A handle is awaited once: gloo hangs on a second wait."""

    link: "GroupLink"
    moment: str
    handles: list[Handle] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)
    copies: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # what is received, and where it arrives
    posted: float = field(default_factory=time.perf_counter)
    progress: Progress | None = None  # while waits are recorded, a thread updates it from the start

    def wait(self) -> None:
        if not self.handles:
            return
        start = time.perf_counter()
        self.link.wait_for(self)
        self.handles.clear()
        for tensor, come in self.copies:
            tensor.copy_(come, non_blocking=True)
            if come.is_cuda:  # a thread may have made it on a stream of its own
                come.record_stream(torch.cuda.current_stream(come.device))
        self.tensors.clear()
        self.copies.clear()
        if self.link.waits is not None:
            end = time.perf_counter()
            arrived = end if self.progress is None else self.progress.end
            self.link.waits.append(WaitTimes(self.moment, self.posted, arrived, start, end))


class GroupLink:
    """Messages within one process group. Ranks and peers are numbers, in the order of `members`.

    Both ranks of a pair must post their messages in the same order, as plans do: NCCL has no tags.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        name: str,
        members: Sequence[int],
        links: "list[GroupLink]",
        timeout: timedelta,
    ) -> None:
        self.group, self.name, self.world_size, self.timeout = group, name, len(members), timeout
        self.reorder(members)
        self.failure: str | None = None
        self.links = links  # if one of them breaks, all do
        self.last_words: LastWords = links[0].last_words if links else LastWords(group, dist.get_rank())
        self.agreed: dict[str, tuple[int, ...]] = {}  # lengths, by the kind of call (handshake.py)
        self.counts_modules = True  # False once ranks have made different modules: their numbers say nothing
        links.append(self)
        # The backend of each type of device. (dist.get_backend has one text for all types.)
        self.backends = dict(pair.split(":") for pair in dist.get_backend_config(group).split(","))
        self._pending: weakref.WeakSet[GroupPending] = weakref.WeakSet()
        self._worker: Worker | None = None
        self._sentinels: dict[int, Sentinel] = {}  # by peer's rank in the group
        self.reached: set[int] = set()  # ranks in the group that have exchanged a first message with this one
        self.waits: list[WaitTimes] | None = None  # None unless waits are recorded

    def open(self) -> None:
        """Make one NCCL call on all ranks: torch does not define what happens if only some ranks make the first one."""
        if self.backends.get("cuda") == "nccl":
            dist.all_reduce(torch.zeros(1, device=card_of(self.group)), group=self.group)

    def reorder(self, members: Sequence[int]) -> None:
        """Put the group's members, given by their global ranks, into this order."""
        self.members = list(members)
        self.order = [dist.get_group_rank(self.group, member) for member in members]  # rank in the group, by place
        self.rank = self.order.index(dist.get_rank(self.group))

    def on_gloo(self, x: Tensor) -> bool:
        """Whether gloo sends a tensor. It also sends for devices without a transport in this group (`_as_one`)."""
        return self.backends.get(x.device.type, "gloo") == "gloo"

    @property
    def worker(self) -> Worker:
        if self._worker is None:
            self._worker = Worker()
            with_threads.add(self)
        return self._worker

    def wait_for(self, pending: GroupPending) -> None:
        """Wait for messages, one after the other. On gloo another thread waits, and this thread watches the peer.

        When a connection breaks, gloo ends the waits for messages that have not begun. The wait for one that has begun
        lasts until its timeout (signalException in gloo/transport/tcp/pair.cc). So a `Sentinel` notices the break.
        """
        handles, progress = tuple(pending.handles), pending.progress or Progress()
        if not self.on_gloo(pending.tensors[0]):
            progress.follow(handles)
        elif pending.progress is None:
            self.worker.submit(partial(progress.follow, handles))
        while not progress.ended.wait(_WATCH_SECONDS):
            self._watch(handles, progress, pending.moment)
        if progress.error is not None:
            self.fail(pending.moment, *handles[progress.num_done][1:], progress.error)

    def _watch(self, handles: Sequence[Handle], progress: Progress, moment: str) -> None:
        """Fail if the peer of the next message has gone."""
        num_done = progress.num_done
        if num_done == len(handles):
            return
        error = self._sentinel(self.order[handles[num_done].peer]).error
        # A peer may leave without an error after its last message. Its leaving may be seen before that message.
        if error is not None and not progress.ended.wait(_GRACE_SECONDS) and progress.num_done == num_done:
            self.fail(moment, *handles[num_done][1:], error)

    def _sentinel(self, at: int) -> Sentinel:
        if at not in self._sentinels:
            self._sentinels[at] = Sentinel(partial(self._receive_nothing, at))
        return self._sentinels[at]

    def reach(self, peers: Iterable[int], moment: str) -> None:
        """Exchange a first message with the peers that this rank has not reached yet. The peers make this call too.

        A peer may have died, or given up, before it had anything to say. So a thread posts a message for each peer, in
        one order on all ranks, so that none waits in a circle. Meanwhile this thread looks for ranks that have failed
        (`who_left_in_vain`).
        """
        turn = partial(turn_of, self.order[self.rank])
        if not (new := sorted({self.order[peer] for peer in peers} - self.reached, key=turn)):
            return
        progress, pending = Progress(), GroupPending(self, moment, tensors=[torch.empty(0, device="cpu")])
        self._pending.add(pending)
        self.worker.submit(lambda: progress.follow(self._first_messages(new, pending)))
        until = time.monotonic() + self.timeout.total_seconds()
        found: tuple[int | None, Exception] | None = None
        while found is None and not progress.ended.wait(_WATCH_SECONDS):
            is_late = time.monotonic() > until
            found = (None, RuntimeError("Timed out")) if is_late else self.links[0].who_left_in_vain(progress)
        if found is None and progress.error is None:
            self.reached.update(new)
            pending.handles.clear()
            return
        failed, error = found or (None, progress.error)
        assert error is not None
        if failed is not None:
            self.links[0].fail(moment, *self.links[0]._waits_for(failed, moment), error)
        num_posted = len(pending.handles)
        missing = new[num_posted if num_posted < len(new) else min(progress.num_done, len(new) - 1)]
        self.fail(moment, *self._waits_for(missing, moment), error)

    def _first_messages(self, new: Sequence[int], pending: GroupPending) -> Iterator[Handle]:
        for at in new:
            post = self.group.send if self.order[self.rank] < at else self.group.recv
            pending.handles.append(Handle(post(pending.tensors, at, _FIRST_TAG), _CONNECTING, at))
            if self.failure:  # this rank gave up meanwhile
                self._end(pending.handles[-1])
                return
        yield from pending.handles

    def _end(self, handle: Handle) -> None:
        """End a message now. If it was the first between two ranks, close their connection."""
        with suppress(RuntimeError):
            if not handle.work.is_completed():
                handle.work.wait(timedelta(milliseconds=1))
            if handle.deed == _CONNECTING:
                self._receive_nothing(handle.peer).wait(timedelta(milliseconds=1))

    def who_left_in_vain(self, progress: Progress) -> tuple[int | None, Exception] | None:
        """None if no connected rank left too early (a rank that is done may leave). Else the rank that failed by
        itself, or None in its place if the one that left had only waited for another; and how this was noticed."""
        for at in sorted(self.reached):
            if (error := self._sentinel(at).error) is not None:
                words = self.last_words.of(self.members[self.order.index(at)])
                if progress.ended.is_set():
                    return None
                if words is None or (words.peer == -1 and words != DONE):
                    return at, error
                if words != DONE:
                    return None, RuntimeError(words.reason)
        return None

    def _waits_for(self, at: int, moment: str) -> tuple[str, int]:
        peer = self.order.index(at)
        member = self.members[peer]
        return _missing(member, moment) if moment.endswith(_HANDSHAKE) else f"waiting for rank {member}", peer

    def fail(self, moment: str, deed: str, peer: int, error: Exception) -> NoReturn:
        if self.failure:  # the other thread of this call has failed before, or gave up: this follows from it
            raise ExchangeError(self.failure) from error
        member, reason = self.members[peer], _reason(error)
        failure = self._failure(moment, deed, reason)
        self.last_words.leave(words := Words(failure, reason, moment, member))
        # The other ranks may be waiting for this one in another group of this context.
        for link in self.links:
            link.abandon(failure)
        if moment.endswith((_HANDSHAKE, _CONNECTING)):  # the peer may itself wait for another rank
            last, reason = self.last_words.who_did_not_come(words)
            failure = self._failure(moment, deed.replace(f"rank {member}", f"rank {last}", 1), reason)
            for link in self.links:
                link.failure = failure
        raise ExchangeError(failure) from error

    def _failure(self, moment: str, deed: str, reason: str) -> str:
        failure = f"{moment}: {deed} (group {self.name!r}, rank {self.members[self.rank]}): {reason}"
        return failure + usual_cause(deed, reason)

    def abandon(self, reason: str) -> None:
        """Break the group after a failure of this rank, so that the others fail at once and do not wait for it."""
        if self.failure or self.world_size == 1:
            return
        self.failure = reason
        if set(self.backends.values()) != {"gloo"}:
            self.group.abort()
        self._disconnect()
        # Messages may be stuck in gloo. End them now: after torch's profiler stops they would write to memory it freed.
        handles: list[Handle] = []
        with suppress(RuntimeError):  # a thread of this call posts just now
            pending = [x for x in list(self._pending) if x.handles and self.on_gloo(x.tensors[0])]
            handles = [handle for x in pending for handle in x.handles]
        for handle in handles:
            self._end(handle)

    def _disconnect(self) -> None:
        """Close gloo's connections.

        One receive that times out closes all of them. Abort, shutdown and destroying the group close none. Nobody sends
        with the tag of this receive, because a message of another size would end the process. Every peer is tried,
        because a receive over a broken connection does not time out.
        """
        if self.backends.get("cpu") != "gloo":
            return
        for peer in self._others():
            with suppress(RuntimeError):
                self._receive_nothing(self.order[peer]).wait(timedelta(milliseconds=1))

    def _receive_nothing(self, at: int) -> dist.Work:
        """A receive that nobody answers."""
        return self.group.recv([torch.empty(1, device="cpu")], at, _UNUSED_TAG)

    def close(self) -> None:
        """Give the group back. Its sockets and threads live while anything refers to it, as sentinels do."""
        if not self.failure:
            self.last_words.leave(DONE)
            if self._sentinels:
                self.end_threads()
        self._worker = None
        with_threads.discard(self)
        self.failure = self.failure or "it was closed"
        with suppress(ValueError, AssertionError):  # if torch.distributed is already shut down
            dist.destroy_process_group(self.group)
        del self.group

    def end_threads(self) -> None:
        """End the waits of threads, and with them the threads."""
        self.last_words.leave(DONE)
        self._disconnect()
        self._sentinels.clear()
        self._worker = None

    def exchange(self, sends: Addressed, receives: Addressed, moment: str) -> GroupPending:
        """Start sending and receiving contiguous tensors, each with its peer. Errors quote `moment`.

        Receives come first. A gloo sender waits for word that the receiver has posted its receive. If this rank sent
        first, its own word would queue behind its data: messages would go one way at a time.
        """
        leave = [(dist.isend, x, peer, f"sending to rank {self.members[peer]}") for x, peer in sends]
        come = [(dist.irecv, x, peer, f"waiting for rank {self.members[peer]}") for x, peer in receives]
        return self._post([*come, *leave], moment)

    def carry(self, sends: Messages, receives: Messages, moment: str) -> GroupPending:
        """`exchange`, for messages of a plan."""
        return self.exchange([(x, m.peer) for x, m in sends], [(x, m.peer) for x, m in receives], moment)

    def carry_apart(self, sends: Messages, receives: Messages, moment: str) -> tuple[GroupPending, GroupPending]:
        """`carry`, with one wait for what is sent and another for what is received.

        On NCCL both are one batch. In two batches every rank's receives would stand behind its sends in NCCL's stream,
        and all ranks of a ring would wait for ever.
        """
        if all(self.on_gloo(x) for x, _ in (*sends, *receives)):
            received = self.carry((), receives, moment)  # first, as in `exchange`
            return self.carry(sends, (), moment), received
        both = self.carry(sends, receives, moment)
        return both, both

    def _post(self, messages: Sequence[_Message], moment: str) -> GroupPending:
        """Post messages, in one batch unless gloo sends them."""
        if self.failure:
            raise ExchangeError(f"this group has failed before ({self.failure}). Make a new ContextParallel.")
        if on_gloo := all(self.on_gloo(x) for _, x, *_ in messages):
            self.reach({peer for *_, peer, _ in messages}, moment)
        pending = GroupPending(self, moment)
        self._pending.add(pending)
        joined: dict[tuple[object, ...], list[_Message]] = {}  # both ranks of a pair know the sizes, and join alike
        for number, message in enumerate(messages):
            op, x, peer, _ = message
            joined.setdefault((op, peer, x.dtype, number if x.nbytes > _SHORT_BYTES else None), []).append(message)
        messages = [
            (same[0][0], self._as_one([x for _, x, *_ in same], same[0][0] is dist.isend, pending), *same[0][2:])
            for same in joined.values()
        ]
        pending.tensors = [x for _, x, _, _ in messages]
        # On gloo messages are posted one by one, so that an error names one of them.
        for batch in [[message] for message in messages] if on_gloo else [messages]:
            peers, deeds = [peer for *_, peer, _ in batch], [deed for *_, deed in batch]
            try:
                ops = [dist.P2POp(op, x, group=self.group, group_peer=self.order[peer]) for op, x, peer, _ in batch]
                works = dist.batch_isend_irecv(ops)
            except RuntimeError as error:
                self.fail(moment, ", ".join(deeds), peers[0], error)
            except ValueError as error:  # torch does not know the group any more
                self.failure = "torch.distributed was shut down after this context was made"
                raise ExchangeError(f"{moment}: {self.failure}. Make a new ContextParallel.") from error
            if len(works) != len(batch):  # the transport returns one handle for all messages
                deeds = [", ".join(deeds)] * len(works)
            pending.handles += map(Handle, works, deeds, peers)
        if self.waits is not None and on_gloo and pending.handles:
            pending.progress = Progress()
            with_threads.add(self)
            start_thread(pending.progress.follow, list(pending.handles))
        return pending

    def _needs_host(self, x: Tensor) -> bool:
        """Whether host memory must carry a tensor: gloo cannot send CUDA tensors. (No GPU has run this.)"""
        return x.is_cuda and self.on_gloo(x)

    def _as_one(self, tensors: Sequence[Tensor], is_sent: bool, pending: GroupPending) -> Tensor:
        """The tensor that travels for these: the only one, or a copy of all. A copy is on the host where gloo sends for
        a GPU. What arrives in a copy is copied back after the wait."""
        first, on_host = tensors[0], self._needs_host(tensors[0])
        if len(tensors) == 1 and not on_host:
            return first
        device, pins = ("cpu", torch.cuda.is_available()) if on_host else (first.device, False)
        sizes = [x.numel() for x in tensors]
        one = torch.empty(sum(sizes), dtype=first.dtype, device=device, pin_memory=pins)
        for x, copy in zip(tensors, one.split(sizes), strict=True):
            if is_sent:
                copy.copy_(x.view(-1))  # to the host: waits for the kernels that write x
            else:
                pending.copies.append((x.view(-1), copy))
        return one

    def records(self, record: Tensor, moment: str) -> list[Tensor]:
        """Every rank's record (all of one shape and dtype). No rank returns before all ranks have entered.

        All messages are point to point, so that an error can name the rank that did not enter.
        """
        known = record[None]  # at i: that of the i-th rank before this one
        for turn in rounds_of(self.rank, self.world_size):
            some = known[: self.world_size - len(known)]
            come = [(torch.empty_like(some), source) for _, source in turn]
            self._meet([(some, to) for to, _ in turn], come, moment)
            known = torch.cat([known, *(x for x, _ in come)])
        return [known[(self.rank - peer) % self.world_size] for peer in range(self.world_size)]

    def largest(self, record: Tensor, moment: str) -> Tensor:
        """The largest of all ranks' records, entry by entry. No rank returns before all ranks have entered."""
        for turn in rounds_of(self.rank, self.world_size):
            come = [(torch.empty_like(record), source) for _, source in turn]
            self._meet([(record, to) for to, _ in turn], come, moment)
            record = torch.stack([record, *(x for x, _ in come)]).amax(0)
        return record

    def _meet(self, sends: Addressed, receives: Addressed, moment: str) -> None:
        moment += _HANDSHAKE
        come = [(dist.irecv, x, peer, _missing(self.members[peer], moment)) for x, peer in receives]
        leave = [(dist.isend, x, peer, _missing(self.members[peer], moment)) for x, peer in sends]
        self._post([*come, *leave], moment).wait()

    def _others(self) -> list[int]:
        return [peer for peer in range(self.world_size) if peer != self.rank]

    def texts(self, text: str, moment: str) -> list[str]:
        """Every rank's text, up to 1,024 bytes each."""
        record = torch.zeros(1024, dtype=torch.uint8, device="cpu")
        encoded = text.encode(errors="backslashreplace")[: len(record)]  # a name may hold surrogates
        record[: len(encoded)] = torch.tensor(list(encoded), dtype=torch.uint8, device="cpu")
        return [bytes(r[r != 0].tolist()).decode(errors="replace") for r in self.records(record, moment)]

    def all_gather(self, x: Tensor, lengths: Sequence[int], dim: int, moment: str) -> list[Tensor]:
        """All ranks' tensors, which differ only in their length along `dim`."""
        self.last_words.is_connecting = True
        x = x.contiguous()
        shapes = [(*x.shape[:dim], length, *x.shape[dim:][1:]) for length in lengths]
        gathered = [x if peer == self.rank else x.new_empty(shape) for peer, shape in enumerate(shapes)]
        sends = [(x, peer) for peer in self._others() if x.numel()]
        self.exchange(sends, [(gathered[k], k) for k in self._others() if gathered[k].numel()], moment).wait()
        return gathered

    def all_to_all_single(
        self, tensors: Sequence[Tensor], sizes: Sequence[int], like: Tensor, moment: str
    ) -> list[Tensor]:
        """As `link_contract.Dealer` says."""
        self.last_words.is_connecting = True
        received = list(torch.empty(sum(sizes), dtype=like.dtype, device=like.device).split(list(sizes)))
        received[self.rank].copy_(tensors[self.rank])
        sends = [(tensors[peer].contiguous(), peer) for peer in self._others() if len(tensors[peer])]
        self.exchange(sends, [(received[peer], peer) for peer in self._others() if sizes[peer]], moment).wait()
        return received


def _missing(member: int, moment: str) -> str:
    return f"rank {member} did not enter {moment.removesuffix(_HANDSHAKE)}"


def _reason(error: Exception) -> str:
    """The transport's error without its source line and its advice."""
    first = (str(error).splitlines() or [type(error).__name__])[0]
    reason = re.sub(r"^\[\S+:\d+\] ", "", first).split(". This is typically")[0].rstrip(".")
    if re.search("onnection (closed|reset|refused)", reason) and "that rank" not in reason:
        reason += ": that rank died, or gave up after an error of its own"
    return reason + "."
