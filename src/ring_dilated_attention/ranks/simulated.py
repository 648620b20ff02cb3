"""All ranks of a ring in one process: the same plans, the same loop, the same numbers, and nothing is sent.

Each rank is a thread, but only one runs at a time: it hands on when it has to wait for a message. What a message would
carry is copied from the sender's buffer into the receiver's.
"""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from .link import Link, Pending


class _Stopped(RuntimeError):
    """Another rank has failed."""


class _Post:
    """One side of a message, until the other side comes."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self.done = tensor, threading.Event()


class Wires:
    """What the simulated ranks share: the posts that wait for their other side, and whose turn it is."""

    def __init__(self) -> None:
        self.turn = threading.Lock()
        self.sends: dict[tuple[int, int], deque[_Post]] = {}
        self.receives: dict[tuple[int, int], deque[_Post]] = {}
        self.waiting: list[threading.Event] = []
        self.error: BaseException | None = None
        self.bytes_sent: dict[int, int] = {}

    def post(self, pair: tuple[int, int], tensor: Tensor, is_send: bool) -> threading.Event:
        """Post one side; the message is delivered, in the order of posting, when both are there."""
        mine, theirs = (self.sends, self.receives) if is_send else (self.receives, self.sends)
        post = _Post(tensor)
        mine.setdefault(pair, deque()).append(post)
        if theirs.get(pair):
            send, receive = self.sends[pair].popleft(), self.receives[pair].popleft()
            receive.tensor.copy_(send.tensor)
            self.bytes_sent[pair[0]] = self.bytes_sent.get(pair[0], 0) + send.tensor.nbytes
            send.done.set()
            receive.done.set()
        return post.done

    def wait(self, event: threading.Event) -> None:
        """Let others run until the event is there."""
        if event.is_set():
            return
        if self.error is not None:
            raise _Stopped
        self.waiting.append(event)
        self.turn.release()
        event.wait()
        self.turn.acquire()
        self.waiting.remove(event)
        if self.error is not None:
            raise _Stopped


class SimulatedPending(Pending):
    """Messages of a simulated rank. Their tensors are kept until they are waited for, as those of a real one."""

    def __init__(self, wires: Wires, moment: str, events: list[threading.Event], tensors: list[Tensor]) -> None:
        super().__init__(None, moment, tensors=tensors)
        self.wires, self.events = wires, events

    def wait(self) -> None:
        while self.events:
            self.wires.wait(self.events.pop(0))
        self.tensors.clear()


class SimulatedLink(Link):
    """The link of one simulated rank."""

    def __init__(self, wires: Wires, rank: int, world_size: int) -> None:
        self.wires, self.rank, self.world_size = wires, rank, world_size
        self.failure, self.backends = None, {}

    @property
    def bytes_sent(self) -> int:
        return self.wires.bytes_sent.get(self.rank, 0)

    def exchange(
        self, sends: Sequence[tuple[Tensor, int]], receives: Sequence[tuple[Tensor, int]], moment: str
    ) -> Pending:
        events = [self.wires.post((self.rank, peer), x, True) for x, peer in sends]
        events += [self.wires.post((peer, self.rank), x, False) for x, peer in receives]
        return SimulatedPending(self.wires, moment, events, [x for x, _ in (*sends, *receives)])


def run_ranks(world_size: int, work: Callable[[int, SimulatedLink], Any]) -> list[Any]:
    """work(rank, link) for every rank; the results in the order of ranks."""
    wires, results = Wires(), [None] * world_size
    # A thread begins with the first device and its default stream, which waits for no other.
    stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None

    def one(rank: int) -> None:
        with wires.turn, torch.no_grad(), nullcontext() if stream is None else torch.cuda.stream(stream):
            try:
                if wires.error is None:
                    results[rank] = work(rank, SimulatedLink(wires, rank, world_size))
            except _Stopped:
                pass
            except BaseException as error:  # noqa: BLE001  raised again below, on the caller's thread
                wires.error = error
                for event in wires.waiting:
                    event.set()

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if wires.error is not None:
        raise wires.error
    return results
