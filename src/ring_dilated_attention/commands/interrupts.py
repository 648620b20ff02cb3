"""At any moment Ctrl-C ends a command with one line and exit code 130. No torch."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from ..training.stop_request import STDERR

INTERRUPTED_EXIT_CODE = 130  # as a shell reports SIGINT


@contextmanager
def leaving_at_once(command: str) -> Iterator[None]:
    """Ctrl-C ends the process without any clean-up. Only for imports. There a KeyboardInterrupt may become another
    error (numpy makes a RecursionError of it) or leave a module half made."""

    def leave(number: int, frame: FrameType | None) -> None:
        os.write(STDERR, f"\n{command}: interrupted\n".encode())
        os._exit(INTERRUPTED_EXIT_CODE)

    with _handled(leave):
        yield


@contextmanager
def held_back() -> Iterator[None]:
    """Ctrl-C is raised at the end of the block. It never reaches processes that are started in the block."""
    came: list[int] = []
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # inherited by whatever is started
    with _handled(lambda number, frame: came.append(number)):
        try:
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
    if came:
        raise KeyboardInterrupt


def ignore_from_now_on() -> None:
    """Call this at the end of a command: Ctrl-C while Python shuts down is not worth a traceback."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


@contextmanager
def _handled(handler: "signal._HANDLER") -> Iterator[None]:
    """Another handler during a block. Only the main thread may set one, and an ignored signal stays ignored."""
    before = signal.getsignal(signal.SIGINT)
    is_ours = threading.current_thread() is threading.main_thread() and before not in (signal.SIG_IGN, None)
    try:
        if is_ours:
            signal.signal(signal.SIGINT, handler)
        yield
    finally:
        if is_ours:
            signal.signal(signal.SIGINT, before)
