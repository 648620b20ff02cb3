"""Stopping in good order: a request is noted, and the loop acts on it between two steps.

Whoever started the ranks decides how a request reaches them. `rda train --ranks P` holds the write end of a pipe that
is every rank's stdin: it closes the pipe to ask, and if it is killed the pipe closes too, so that no rank is left
alone.
"""

import os
import select
import signal
import sys
from types import FrameType, TracebackType

SIGNALS = (signal.SIGINT, signal.SIGTERM)
INTERRUPTED_EXIT_CODE = 130  # as a shell reports SIGINT
STDERR = 2  # written to directly: a signal may come while sys.stderr is in use
NOTICE = b"\nstopping after this step, to save; a second time stops at once\n"


class StopRequest:
    """A context in which SIGINT and SIGTERM are requests to stop, shown by `requested`.

    Args:
        watch_stdin: the end of stdin is a request, too.
        second_aborts: a second signal ends the process at once. Not under torchrun, which passes on a signal that its
            ranks may have got already; and after an error SIGTERM stays no more than noted, so that it can be said.
    """

    def __init__(self, *, watch_stdin: bool = False, second_aborts: bool = True) -> None:
        self._watch_stdin = watch_stdin
        self._second_aborts = second_aborts
        self._signalled = False

    def __enter__(self) -> "StopRequest":
        self._previous = {number: signal.signal(number, self._handle) for number in SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            # When a rank is lost torchrun ends the others by SIGTERM, just while they say what goes on with the run.
            if kind is None or self._second_aborts or number != signal.SIGTERM:
                signal.signal(number, handler)

    @property
    def requested(self) -> bool:
        return self._signalled or (self._watch_stdin and _at_end(sys.stdin.fileno()))

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._second_aborts:
            if self._signalled:
                signal.signal(number, signal.SIG_DFL)
                signal.raise_signal(number)
            os.write(STDERR, NOTICE)
        self._signalled = True


def _at_end(descriptor: int) -> bool:
    readable, _, _ = select.select([descriptor], [], [], 0)
    return bool(readable)  # nothing is ever written to it
