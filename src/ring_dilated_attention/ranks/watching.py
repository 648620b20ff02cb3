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
    """A message to wait for. description: how an error names the message. peer: the rank that it goes to or comes
    from."""

    work: dist.Work
    description: str
    peer: int


with_threads: "weakref.WeakSet[Any]" = weakref.WeakSet()  # links that have threads
_threads: "weakref.WeakSet[Thread]" = weakref.WeakSet()


def start_thread(function: Callable[..., None], *args: object) -> Thread:
    # The thread gets a name, since it would otherwise use up a number of "Thread-N". Ranks compare the names of the
    # user's threads, and these numbers could then differ.
    thread = Thread(target=_run, args=(function, *args), daemon=True, name="rda")
    thread.start()
    _threads.add(thread)
    return thread


def _run(function: Callable[..., None], *args: object) -> None:
    # Record no profiler events in this thread. A message writes to its event as it ends, but torch's profiler frees all
    # events when the profiler stops.
    if hasattr(torch.autograd, "_enable_record_function"):
        torch.autograd._enable_record_function(False)
    function(*args)


def _forget() -> None:
    """In a forked process, forget the threads and connections of the parent process: the child must not end them."""
    with_threads.clear()
    _threads.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


@atexit.register
def end_all_threads() -> None:
    """End all threads: a thread that returns from gloo while Python ends would abort the process (std::terminate)."""
    for link in list(with_threads):
        link.end_threads()
    for thread in list(_threads):
        thread.join(timeout=2)


class Sentinel:
    """Watches the connection to a peer. For this it starts a receive that nobody answers, which ends with an error when
    the connection breaks.

    Each peer gets one sentinel and keeps it. A second sentinel would start a second receive, and gloo keeps every one.
    """

    def __init__(self, receive: Callable[[], dist.Work]) -> None:
        self.error: RuntimeError | None = None
        posted = Event()
        start_thread(self._watch, receive, posted)
        posted.wait()  # until the receive has started, so that no `close` comes before it

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
    """The number of messages that have completed, and the error of the first that failed."""

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
    """A thread that calls functions one after the other. It ends when the worker is freed."""

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
            # Free the function's messages now, since the next function may come much later.
            del function
