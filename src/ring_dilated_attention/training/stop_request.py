"""Notes a request to stop (SIGINT or SIGTERM). The training loop acts on it between two steps."""

import os
import signal
import time
from contextlib import suppress
from types import FrameType

# The descriptor of stderr. Signal handlers write to it by os.write, because sys.stderr may be in use at that moment.
STDERR = 2
# Slurm signals the launcher and its ranks, and the launcher passes the signal on. So a rank may get one request as two
# signals. Signals within this time count as one request.
TWICE_SECONDS = 1
_NOTICE = b"\nrda train: stopping after this step, to save; a second time stops at once\n"


class StopRequest:
    """A context manager. In its block SIGINT and SIGTERM only ask training to stop. A second request ends the process.

    A signal within TWICE_SECONDS of the first counts as the same request. says: whether this rank prints a notice.
    """

    def __init__(self, *, says: bool = True) -> None:
        self.says = says
        self.requested_at: float | None = None

    def __enter__(self) -> "StopRequest":
        self._previous = {
            number: signal.signal(number, self._handle)
            for number in (signal.SIGINT, signal.SIGTERM)
        }
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        # After an error, keep the handler of SIGTERM, so that SIGTERM does not end the process. If a rank is lost, an
        # elastic launcher sends SIGTERM to the other ranks, which need time to tell the user how to resume.
        signal.signal(signal.SIGINT, self._previous[signal.SIGINT])
        if kind is None:
            signal.signal(signal.SIGTERM, self._previous[signal.SIGTERM])

    @property
    def requested(self) -> bool:
        return self.requested_at is not None

    def _handle(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.requested_at is None:
            self.requested_at = now
            if self.says:
                with suppress(OSError):  # ignore the error of a terminal that was closed
                    os.write(STDERR, _NOTICE)
        elif now - self.requested_at > TWICE_SECONDS:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
