"""Threads that wait for messages, and their end. gloo's own waits last until a timeout, whatever the peer does."""

import atexit
import time
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from queue import SimpleQueue
from threading import Event, Thread
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist


class Handle(NamedTuple):
    """A message to wait for, what an error says of it, and its peer."""

    work: dist.Work
    deed: str
    peer: int


class HasThreads(Protocol):
    def end_threads(self) -> None: ...


with_threads: "weakref.WeakSet[HasThreads]" = weakref.WeakSet()
_threads: "weakref.WeakSet[Thread]" = weakref.WeakSet()


def start_thread(function: Callable[..., None], *args: object) -> None:
    thread = Thread(target=function, args=args, daemon=True)
    _threads.add(thread)
    thread.start()


@atexit.register
def _end_all_threads() -> None:
    """A thread that comes back from gloo when Python is ending aborts the process (std::terminate)."""
    for link in list(with_threads):
        link.end_threads()
    for thread in list(_threads):
        thread.join(timeout=2)


class Sentinel:
    """A receive that nobody answers. It fails as soon as the connection does, also where an end closed its context.

    One for each peer that was ever waited for long, in a thread of its own: one for each look would stay with gloo.
    """

    def __init__(self, receive: Callable[[], dist.Work]) -> None:
        self.error: RuntimeError | None = None
        posted = Event()
        start_thread(self._wait, receive, posted)
        posted.wait()  # or a `close` might come before it

    def _wait(self, receive: Callable[[], dist.Work], posted: Event) -> None:
        # torch's profiler frees its events when it stops. A message that it has seen writes into its own when it ends.
        if hasattr(torch.autograd, "_enable_record_function"):
            torch.autograd._enable_record_function(False)  # in this thread
        try:
            work = receive()
            posted.set()
            work.wait(timedelta(days=3650))
        except RuntimeError as error:
            self.error = error
        finally:
            posted.set()


class Progress:
    """Of the waits for some messages."""

    def __init__(self) -> None:
        self.num_done = 0
        self.error: RuntimeError | None = None
        self.end = 0.0
        self.ended = Event()


_Queue = SimpleQueue[tuple[Sequence[Handle], Progress] | None]


class Waiter:
    """Waits for messages in a thread of its own, for as long as it lives."""

    def __init__(self) -> None:
        self.queue: _Queue = SimpleQueue()
        start_thread(_serve, self.queue)
        weakref.finalize(self, self.queue.put, None)


def _serve(queue: _Queue) -> None:
    while (entry := queue.get()) is not None:
        wait_for_each(*entry)
        del entry  # and with it the messages' memory


def wait_for_each(handles: Sequence[Handle], progress: Progress) -> None:
    try:
        for handle in handles:
            handle.work.wait()
            progress.num_done += 1
    except RuntimeError as error:
        progress.error = error
    progress.end = time.perf_counter()
    progress.ended.set()
