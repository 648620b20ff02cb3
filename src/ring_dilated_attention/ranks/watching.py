"""Threads that watch messages and peers, since gloo's own waits last until a timeout, whatever the peer does."""

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
    """Watches a peer by a receive that nobody answers: it fails as soon as the connection does.

    A thread for each peer that was ever waited for long; one for each look would stay with gloo.
    """

    def __init__(self, receive: Callable[[], dist.Work]) -> None:
        self.error: RuntimeError | None = None
        posted = Event()
        start_thread(self._watch, receive, posted)
        posted.wait()  # or a `close` might come before it

    def _watch(self, receive: Callable[[], dist.Work], posted: Event) -> None:
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
    """How many of some messages have come through, the error of the next, and when the last one ended."""

    def __init__(self) -> None:
        self.num_done, self.end = 0, 0.0
        self.error: RuntimeError | None = None
        self.ended = Event()

    def follow(self, handles: Sequence[Handle]) -> None:
        """Wait for each message."""
        try:
            for handle in handles:
                handle.work.wait()
                self.num_done += 1
        except RuntimeError as error:
            self.error = error
        self.end = time.perf_counter()
        self.ended.set()


_Queue = SimpleQueue[tuple[Progress, Sequence[Handle]] | None]


class Watcher:
    """Follows messages in a thread of its own, for as long as it lives."""

    def __init__(self) -> None:
        self.queue: _Queue = SimpleQueue()
        start_thread(_serve, self.queue)
        weakref.finalize(self, self.queue.put, None)


def _serve(queue: _Queue) -> None:
    while (entry := queue.get()) is not None:
        progress, handles = entry
        progress.follow(handles)
        del entry, progress, handles  # and with them the messages' memory
