"""Threads that watch messages and peers, because gloo's own waits can last until their timeout when a peer dies."""

import atexit
import os
import weakref
from collections.abc import Callable, Iterable
from datetime import timedelta
from queue import SimpleQueue
from threading import Event, Thread
from typing import Any, NamedTuple

import torch
import torch.distributed as dist


class Handle(NamedTuple):
    """A message to wait for. work: torch's handle of the message. description: what an error says if the message fails.
    peer: the rank that gets or sends the message."""

    work: dist.Work
    description: str
    peer: int


with_threads: "weakref.WeakSet[Any]" = weakref.WeakSet()  # links that have a `Worker`
_threads: "weakref.WeakSet[Thread]" = weakref.WeakSet()


def start_thread(function: Callable[..., None], *args: object) -> Thread:
    # Name the thread, because an unnamed thread would take one of Python's names "Thread-1", "Thread-2", ... The user's
    # threads could then have different names on different ranks, and ranks compare these names.
    thread = Thread(target=_run, args=(function, *args), daemon=True, name="rda")
    thread.start()
    _threads.add(thread)
    return thread


def _run(function: Callable[..., None], *args: object) -> None:
    # Record no profiler events in this thread. Otherwise each message would write to its event when the message ends,
    # and torch's profiler may have freed all events by then.
    if hasattr(torch.autograd, "_enable_record_function"):
        torch.autograd._enable_record_function(False)
    function(*args)


def _forget() -> None:
    """In a forked process, forget the parent's links and threads: only the parent may end these threads."""
    with_threads.clear()
    _threads.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


@atexit.register
def end_all_threads() -> None:
    """End all threads: a thread that returns from gloo while Python exits would abort the process (std::terminate)."""
    for link in list(with_threads):
        link.end_threads()
    for thread in list(_threads):
        thread.join(timeout=2)


class Sentinel:
    """Watches the connection to a peer. For this it starts a receive that nobody answers, which ends with an error when
    the connection breaks.

    Make only one sentinel for each peer, and keep it. Each sentinel starts a receive, and gloo never frees a receive
    that nobody answers.
    """

    def __init__(self, receive: Callable[[], dist.Work]) -> None:
        self.error: RuntimeError | None = None
        posted = Event()
        start_thread(self._watch, receive, posted)
        posted.wait()  # wait until the receive has started, so that no `close` comes before the receive

    def _watch(self, receive: Callable[[], dist.Work], posted: Event) -> None:
        try:
            work = receive()
            posted.set()
            work.wait(timedelta(days=3650))
        except RuntimeError as error:
            self.error = error
        finally:
            posted.set()


class Progress:
    """The number of messages that have completed, and the error of the first message that failed."""

    def __init__(self) -> None:
        self.num_done = 0
        self.error: RuntimeError | None = None
        self.ended = Event()

    def follow(self, handles: Iterable[Handle]) -> None:
        try:
            for handle in handles:
                handle.work.wait()
                self.num_done += 1
        except RuntimeError as error:
            self.error = error
        self.ended.set()


class Worker:
    """Calls functions in a thread, one after the other. The thread ends when the worker is freed."""

    def __init__(self) -> None:
        self.queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        start_thread(self._serve, self.queue)
        weakref.finalize(self, self.queue.put, None)

    def submit(self, function: Callable[[], None]) -> None:
        self.queue.put(function)

    @staticmethod
    def _serve(queue: SimpleQueue[Callable[[], None] | None]) -> None:
        while (function := queue.get()) is not None:
            function()
            # Free the messages that `function` refers to, because `queue.get` may block for a long time.
            del function
