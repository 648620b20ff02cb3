"""Handles Ctrl-C, so that at any moment it ends a command with one line and exit code 130. No torch."""

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
    """Ctrl-C ends the process without any clean-up. Use it only around imports: there a KeyboardInterrupt may become
    another error (numpy makes a RecursionError of it) or leave a half-made module."""

    def leave(number: int, frame: FrameType | None) -> None:
        os.write(STDERR, f"\n{command}: interrupted\n".encode())
        os._exit(INTERRUPTED_EXIT_CODE)

    with _handled(leave):
        yield


@contextmanager
def held_back() -> Iterator[None]:
    """Delay Ctrl-C to the end of the block. Processes that are started in the block never receive it."""
    came: list[int] = []
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # inherited by whatever is started
    with _handled(lambda number, frame: came.append(number)):
        try:
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
    if came:
        raise KeyboardInterrupt


@contextmanager
def _handled(handler: "signal._HANDLER") -> Iterator[None]:
    """Set a SIGINT handler for a block. Only the main thread may set one. If SIGINT is ignored, it stays ignored."""
    before = signal.getsignal(signal.SIGINT)
    is_ours = threading.current_thread() is threading.main_thread() and before not in (signal.SIG_IGN, None)
    try:
        if is_ours:
            signal.signal(signal.SIGINT, handler)
        yield
    finally:
        if is_ours:
            signal.signal(signal.SIGINT, before)
