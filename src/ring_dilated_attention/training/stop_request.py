"""Notes a request to stop (SIGINT or SIGTERM). The training loop acts on it between two steps.

`rda train --ranks P` holds the write end of a pipe that is every rank's stdin. It closes the pipe to ask them to stop.
A rank whose parent process has ended sends itself SIGTERM. If its step does not end in time, it exits at once, so that
none is left behind.
"""

import os
import select
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from threading import Thread
from types import FrameType

LAUNCHER = "RDA_TRAIN_LAUNCHER"  # the variable by which `rda train --ranks` tells ranks its process
STDERR = 2  # os.write writes to it: a signal may come while sys.stderr is in use
ORPHAN_SECONDS = 40  # for the end of a step, and a checkpoint
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_ORPHANED = b"\nrda train: the process that started this rank has ended, so the rank ends too\n"
_NOTICE = b"\nstopping after this step, to save; a second time stops at once\n"


class StopRequest:
    """A context in which SIGINT and SIGTERM are requests to stop. `number` counts them.

    second_aborts: a second signal ends the process at once.
    is_rank: prints no notice. After an error SIGTERM is still only noted: the rank has time to report the error.
    watch_stdin: the end of stdin is a request as well.
    """

    def __init__(self, *, second_aborts: bool = False, is_rank: bool = False, watch_stdin: bool = False) -> None:
        self._second_aborts, self._is_rank, self._watch_stdin = second_aborts, is_rank, watch_stdin
        self.number = 0

    def __enter__(self) -> "StopRequest":
        self._previous = {number: signal.signal(number, self._handle) for number in _SIGNALS}
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        for number, handler in self._previous.items():
            # When a rank is lost, torchrun ends the others by SIGTERM while they still say how to go on.
            if kind is None or not self._is_rank or number != signal.SIGTERM:
                signal.signal(number, handler)

    @property
    def requested(self) -> bool:
        # stdin is readable only at its end: nothing is written.
        return self.number > 0 or (self._watch_stdin and bool(select.select([sys.stdin.fileno()], [], [], 0)[0]))

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.number += 1
        if self.number == 1 and not self._is_rank:
            os.write(STDERR, _NOTICE)
        elif self.number > 1 and self._second_aborts:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)


def end_with_launcher(seconds: float = ORPHAN_SECONDS) -> None:
    """Let a thread send this process SIGTERM when its parent process has ended, and end it so many seconds later."""
    if _is_launched_by(parent := os.getppid()):
        Thread(target=_end_after, args=(parent, seconds), daemon=True, name="rda parent").start()
    else:  # the launcher ended before this
        _end_after(None, seconds)


def _end_after(parent: int | None, seconds: float) -> None:
    while os.getppid() == parent:
        time.sleep(0.05)  # few steps are done without it
    with suppress(OSError):  # nobody reads it
        if select.select([], [STDERR], [], 0)[1]:
            os.write(STDERR, _ORPHANED)
    os.kill(os.getpid(), signal.SIGTERM)  # outside a `StopRequest` it ends here, and meets no rank of a later start
    time.sleep(seconds)
    os._exit(1)


def _is_launched_by(pid: int) -> bool:
    """Whether `pid` is the launcher. torchrun leaves no number: it, or a process above it, has loaded torch."""
    if LAUNCHER in os.environ or not Path("/proc/self/maps").exists():
        return os.environ.get(LAUNCHER, str(pid)) == str(pid)
    with suppress(OSError):  # a process has ended, or it is another user's
        while pid:
            if b"libtorch" in Path(f"/proc/{pid}/maps").read_bytes():
                return True
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])  # its parent
    return False
