"""Ends a command with its exit code, and copes with closed streams, full disks and letters that terminals lack."""

import io
import os
import signal
import sys
from collections.abc import Callable
from typing import TextIO

from ..training.files import in_words
from .interrupts import INTERRUPTED_EXIT_CODE

UNREAD_EXIT_CODE = 141  # as a shell reports SIGPIPE
NO_MEMORY = "there is not enough memory"


def guarded(command: str, run: Callable[[], int], *, is_process: bool) -> int:
    """The exit code of run(). It is 130 after Ctrl-C. It is 2 if memory, a disk or a file fails, with a message.
    is_process: the process ends with this command."""
    try:
        try:
            prepare_streams()
            return run()
        finally:
            sys.stdout.flush()  # an error can be caught here, but not at exit
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
        say(f"{command}: {in_words(error) if isinstance(error, OSError) else NO_MEMORY}")
        return 2
    finally:
        drop_unwritten()  # what argparse or a progress bar could not write to stderr: neither raises
        if is_process:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # or Ctrl-C shows a traceback while Python shuts down


def is_out_of_memory(error: Exception) -> bool:
    """Whether memory has run out: Python says MemoryError, and torch a RuntimeError with one of these texts."""
    texts = ("can't allocate memory", "not enough memory", "out of memory")
    return isinstance(error, MemoryError) or any(text in str(error) for text in texts)


def prepare_streams() -> None:
    """Make sure that printing never ends a command.

    If a terminal cannot show a letter (of a path, say), the letter's number is shown. A closed stream is opened on
    /dev/null: otherwise the first file that the command opens gets the stream's number, and the printed text.
    """
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number, this one
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
        drop_unwritten(sys.stderr)  # not stdout: if nobody reads it, the command must end


def drop_unwritten(*streams: TextIO) -> None:
    """Drop text that cannot be written. Otherwise Python writes it at exit, fails, and prints a traceback."""
    for stream in streams or (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
