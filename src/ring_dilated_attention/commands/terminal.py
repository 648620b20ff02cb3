"""Ends commands without a traceback after Ctrl-C, on a closed stream or on a full disk.

If a terminal cannot show a character, the character's code is printed. This module imports no torch.
"""

import io
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TextIO

from ..training.files import in_words
from ..training.stop_request import STDERR

# The exit codes by which a shell reports SIGINT and SIGPIPE.
INTERRUPTED_EXIT_CODE, UNREAD_EXIT_CODE = 130, 141
NO_MEMORY = "there is not enough memory"


def guarded(command: str, run: Callable[[], int], *, is_process: bool) -> int:
    """Call run(), and return the exit code of the command:

    - the code that run() returns;
    - 130 after Ctrl-C;
    - 141 if the program that reads the output has ended;
    - 2, with a message, if memory runs out or a file cannot be read or written.

    is_process: whether the process ends after this command.
    """
    try:
        try:
            prepare_streams()
            return run()
        finally:
            sys.stdout.flush()  # flush now, because errors of Python's flush at exit cannot be caught
    except BrokenPipeError:  # the reader of the output has ended, as in `rda plan ... | head`
        drop_unwritten()
        return UNREAD_EXIT_CODE
    except KeyboardInterrupt:
        say(f"\n{command}: interrupted")
        return INTERRUPTED_EXIT_CODE
    except (OSError, MemoryError, RuntimeError) as error:
        if not isinstance(error, OSError) and not is_out_of_memory(error):
            raise
        drop_unwritten()
        reason = in_words(error) if isinstance(error, OSError) else NO_MEMORY
        say(f"{command}: {reason}")
        return 2
    finally:
        # Drop text that could not be written to stderr. argparse and progress bars raise no error for such text.
        drop_unwritten()
        if is_process:
            # Ignore Ctrl-C from now on, because otherwise it would show a traceback while Python shuts down.
            signal.signal(signal.SIGINT, signal.SIG_IGN)


def is_out_of_memory(error: Exception) -> bool:
    """Whether memory ran out: a MemoryError, or an error with a text about memory, such as torch's RuntimeError."""
    texts = ("can't allocate memory", "not enough memory", "out of memory")
    return isinstance(error, MemoryError) or any(text in str(error) for text in texts)


def prepare_streams() -> None:
    """Make sure that neither an unusual character nor a closed stream makes printing fail.

    If a terminal cannot show a character (of a path, say), the character's code is shown.

    If stdin, stdout or stderr is closed, it is opened on /dev/null. Otherwise the first file that the command opens
    would get the descriptor of the closed stream, and printed text would be written into that file.
    """
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # opens `descriptor`, the lowest free one
        if getattr(sys, name) is None:
            setattr(sys, name, open(descriptor, "r" if name == "stdin" else "w", closefd=False))  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def say(text: str) -> None:
    """Print a line on stderr, unless stderr fails."""
    try:
        print(text, file=sys.stderr, flush=True)
    except OSError:
        # Drop text for stderr only. Text for stdout is kept, because the command must end with an error if nobody reads
        # stdout.
        drop_unwritten(sys.stderr)


def drop_unwritten(*streams: TextIO) -> None:
    """Drop buffered text that cannot be written. Otherwise Python tries to write the text at exit, fails, and prints a
    traceback."""
    for stream in streams or (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


@contextmanager
def leaving_at_once(command: str) -> Iterator[None]:
    """In this block Ctrl-C ends the process without any clean-up. Use it only around imports.

    During an import a KeyboardInterrupt may become another error (numpy makes a RecursionError of it), or leave a
    half-made module.
    """

    def leave(number: int, frame: FrameType | None) -> None:
        os.write(STDERR, f"\n{command}: interrupted\n".encode())
        os._exit(INTERRUPTED_EXIT_CODE)

    with _handled(leave):
        yield


@contextmanager
def held_back() -> Iterator[None]:
    """Delay Ctrl-C to the end of the block. Processes that are started in the block never receive it."""
    came: list[int] = []
    # Mask SIGINT. Every process that is started while SIGINT is masked inherits the mask, and keeps it.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    with _handled(lambda number, frame: came.append(number)):
        try:
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
    if came:
        raise KeyboardInterrupt


@contextmanager
def _handled(handler: "signal._HANDLER") -> Iterator[None]:
    """Set a SIGINT handler for a block. In threads other than the main thread, or if SIGINT is ignored, nothing is
    changed."""
    before = signal.getsignal(signal.SIGINT)
    is_ours = threading.current_thread() is threading.main_thread() and before not in (
        signal.SIG_IGN,
        None,
    )
    try:
        if is_ours:
            signal.signal(signal.SIGINT, handler)
        yield
    finally:
        if is_ours:
            signal.signal(signal.SIGINT, before)
