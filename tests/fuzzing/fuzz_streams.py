"""Commands whose streams are closed, full, unread, or read for some bytes only: `rda ... | head`, `> /dev/full`, `>&-`.

Each case runs a command line twice, in children of this process: with files for streams, and with what is drawn. A
child ends as Python does, which flushes its streams last; some cases are processes of their own.

What must hold: never a traceback, nor anything that the command left unfinished; what is written to one stream does not
depend on another; an unread stdout ends with 141, as a shell reports SIGPIPE, and a full one with 2 and a sentence,
wherever there was something to print; a broken stderr, and a closed stdout, change nothing else.
"""

import functools
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import fuzz_commands
from fuzz import BAR, Output, Trial, listing
from fuzz_commands import COMMANDS, THEIRS, a_quick_doctor, all_passed, broken, shown, spoil

from ring_dilated_attention.commands import check, cli, terminal

SECONDS = 8
WEIGHTS = {
    "suggest": 8,
    "doctor": 6,
    "plan": 6,
    "generate": 2,
    "evaluate": 2,
    "train": 2,
    "check": 1,
    "embed": 1,
}
# Whose output says nothing of time or place.
STEADY = ("suggest", "plan", "generate")
OUT = ["file"] * 3 + [
    "closed",
    "full",
    "full",
    "unread",
    "unread",
    "head",
    "head",
    "unwritable",
    "short",
]
ERROR = ["file"] * 6 + ["closed", "full", "unread", "out"]
UNREAD, REFUSED = 141, 2
FEW_BYTES = 200  # that a file may hold, where it is short
PIPE_BYTES = 2**16  # that a pipe holds unread


def prepare(folder: Path) -> None:
    where = Path.cwd()
    child = os.fork()  # torch's threads, which a backward starts, do not live on in children
    if not child:
        fuzz_commands.prepare(folder)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    os.chdir(where)


def try_case(rng: random.Random, folder: Path) -> Trial:
    arguments = draw(rng)
    out, error, stdin = rng.choice(OUT), rng.choice(ERROR), rng.choice(["null", "closed"])
    num_read = rng.choice([0, 1, 10, 300, 5000]) if out == "head" else 0
    run = as_process if arguments[0] == "suggest" and rng.random() < 0.1 else as_child
    plain = fresh(folder, "plain", functools.partial(run, arguments, "file", "file", "null", 0))
    other = fresh(folder, "other", functools.partial(run, arguments, out, error, stdin, num_read))
    description = (
        f"{shown(arguments)}: out {out} {num_read or ''}, error {error}, stdin {stdin}: {other[0]}"
    )
    complaint = why_wrong(arguments, plain, other, out, error, num_read)
    return Trial(f"{arguments[0]}, out {out}, error {error}", description, complaint)


def draw(rng: random.Random) -> list[str]:
    """A command line that is right, or spoilt in one place."""
    name = rng.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
    if rng.random() < 0.05:
        return [name, "--help"]
    _, always, maybe = COMMANDS[name]
    groups = [
        list(group) for group in [*always, *rng.sample(maybe, rng.randint(0, min(2, len(maybe))))]
    ]
    if name == "generate":
        groups += [["--temperature", "0"]]
    if name in ("suggest", "plan", "doctor") and rng.random() < 0.4:
        groups.append(["--json"])
    if rng.random() < 0.15:
        spoil(rng, groups)
    for group in groups:
        if group[:1] in (["--steps"], ["--tokens"], ["--num-layers"]) and group[1:]:
            group[1] = group[1] if group[1] in ("0", "-1", "2", "3") else "2"
    return [name, *(word for group in groups for word in group)]


Left = tuple[Output, dict[str, Any], dict[str, Any]]


def fresh(folder: Path, name: str, run: Callable[[], Output]) -> Left:
    """How it ends in a folder of its own, and what was there before and after."""
    shutil.copytree(folder.parent / "start", folder / name, symlinks=True)
    os.chdir(folder / name)
    before = listing(Path())
    return run(), before, listing(Path())


class Streams:
    """The three streams of a child, as they are drawn, and what reads them."""

    def __init__(self, out: str, error: str, stdin: str, num_read: int) -> None:
        self.kinds, self.num_read = (stdin, out, error), num_read
        self.files = [open(f"../{name}", "w+b") for name in ("out", "error")]  # noqa: SIM115
        self.pipe = os.pipe() if "head" in self.kinds else None
        self.read = b""

    def take(self) -> None:
        """In the child: what the descriptors 0 to 2 are."""
        stdin, out, error = self.kinds
        for number, kind in ((0, stdin), (1, out), (2, error)):
            os.dup2(self._descriptor(number, kind), number)
        for number, kind in enumerate(self.kinds):  # last: what is opened would take its number
            if kind == "closed":
                os.close(number)
        if out == "short":
            resource.setrlimit(resource.RLIMIT_FSIZE, (FEW_BYTES, FEW_BYTES))

    def _descriptor(self, number: int, kind: str) -> int:
        if kind in ("file", "short"):
            return self.files[number - 1].fileno()
        if kind == "full":
            return os.open("/dev/full", os.O_WRONLY)
        if kind == "out":
            return 1
        if kind in ("unread", "head"):
            read, write = self.pipe if kind == "head" and self.pipe else os.pipe()
            os.close(read)
            return write
        return os.open(
            os.devnull, os.O_RDONLY if kind == "unwritable" or number == 0 else os.O_WRONLY
        )

    def watch(self) -> None:
        """In the parent: read what `head` reads, and close."""
        if self.pipe is None:
            return
        os.close(self.pipe[1])
        while len(self.read) < self.num_read:
            some = os.read(self.pipe[0], self.num_read - len(self.read))
            if not some:
                break
            self.read += some
        os.close(self.pipe[0])

    def ended(self, code: int) -> Output:
        texts = []
        for file in self.files:
            file.seek(0)
            texts.append(file.read().decode(errors="backslashreplace"))
            file.close()
        return Output(code, self.read.decode(errors="backslashreplace") or texts[0], texts[1])


def as_child(arguments: list[str], *kinds: Any) -> Output:
    """The command in a fork of this process, which has torch already."""
    streams = Streams(*kinds)
    sys.stdout.flush()
    child = os.fork()
    if not child:
        code = 99
        try:
            streams.take()
            code = end_of(arguments)
        finally:
            os._exit(code)
    streams.watch()
    return streams.ended(code_of(child))


def end_of(arguments: list[str]) -> int:
    """As Python begins, runs and ends a process."""
    os.setsid()
    sys.argv = ["rda", *arguments]
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        setattr(sys, name, opened(number))
    try:
        with (
            mock.patch.object(check, "run_trials", all_passed),
            a_quick_doctor(),
        ):
            code = cli.main()
    except SystemExit as end:
        code = end.code
        if not isinstance(code, int):
            code = 0 if code is None else 1
    except BaseException:  # noqa: BLE001  what nobody caught is what is looked for
        traceback.print_exc()
        code = 1
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            code = 120
    return code


def opened(number: int) -> Any:
    try:
        os.fstat(number)
    except OSError:
        return None
    return open(
        number, "r" if number == 0 else "w", buffering=1 if number == 2 else -1, closefd=False
    )


def code_of(child: int) -> int:
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return -99


def as_process(arguments: list[str], *kinds: Any) -> Output:
    streams = Streams(*kinds)
    words = [sys.executable, "-m", "ring_dilated_attention", *arguments]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    process = subprocess.Popen(words, preexec_fn=streams.take, close_fds=False, env=environment)
    streams.watch()
    return streams.ended(process.wait(timeout=SECONDS))


def said(text: str) -> list[str]:
    """Lines without bars, which are there or not."""
    return [line for line in text.splitlines() if line.strip() and not BAR.search(line)]


def why_wrong(
    arguments: list[str], plain: Left, other: Left, out: str, error: str, num_read: int
) -> str | None:
    ends, begins, leaves = other
    (right, _, left) = plain
    if right.code not in (0, 1, 2):
        return f"it ends with {right.code}: {right.error[-2000:]}"
    for text in (ends.out, ends.error):
        if "Traceback" in text or "Exception ignored" in text:
            return f"a traceback: {text[-3000:]}"
    for name, content in THEIRS.items():
        if leaves.get(name) != content:
            return f"{name} was {'changed' if name in leaves else 'removed'}"
    codes = {right.code}
    prints = bool(right.out) or (error == "out" and bool(right.error))
    if out in ("full", "unwritable") and prints:
        codes = {REFUSED}
    if out == "short" and len(right.out) + len(right.error) * (error == "out") > FEW_BYTES:
        codes = {REFUSED}
    elif out == "short":
        codes |= {REFUSED}  # other files are as short
    if out == "unread" and prints:
        codes = {UNREAD} if right.out else {UNREAD, right.code}
    if out == "head" and prints:
        codes = {UNREAD, right.code} if len(right.out) < num_read + PIPE_BYTES else {UNREAD}
    if error == "unread" or (error == "out" and out in ("unread", "head")):
        codes |= {UNREAD} if right.error or ends.code == UNREAD else set()
    if error == "out" and out != "file":
        codes |= {right.code}
    if ends.code not in codes:
        return f"it ends with {ends.code}, not {sorted(codes)}: {ends.error[-1000:]}"
    if (
        ends.code == right.code
        and out in ("file", "closed")
        and leaves.keys() - {"runs"} != left.keys() - {"runs"}
    ):
        mine, theirs = sorted(leaves.keys() - left.keys()), sorted(left.keys() - leaves.keys())
        if not all(name.startswith("runs") for name in mine + theirs):  # folders by the time of day
            return f"files differ: {mine} are there, {theirs} are not"
    unfinished = [
        name
        for name in leaves.keys() - begins.keys()
        if ".lock" in name or "/unfinished-" in f"/{name}"
    ]
    if unfinished:
        return f"left behind: {unfinished}"
    return why_other_words(arguments, right, ends, out, error)


def why_other_words(
    arguments: list[str], right: Output, ends: Output, out: str, error: str
) -> str | None:
    """What was printed although another stream was broken, or because of it."""
    if error == "file":
        lines, expected = said(ends.error), said(right.error)
        more = lines[len(expected) :] if lines[: len(expected)] == expected else lines
        if ends.code == UNREAD and more and arguments[0] in STEADY:
            return f"it says {more} of a reader that went away"
        # a progress bar may fill that file too
        is_cut = out == "short" and len(ends.error.encode()) >= FEW_BYTES
        is_refused = (
            out in ("full", "unwritable", "short")
            and ends.code == REFUSED
            and right.code != REFUSED
        )
        if is_refused and not is_cut and len(more) != 1:
            return f"{len(more)} lines where a sentence belongs: {ends.error[-1000:]}"
    if error == "out" or arguments[0] not in STEADY:
        return None
    if out == "file" and ends.out != right.out:
        return f"it prints {ends.out[:300]!r}, not {right.out[:300]!r}"
    if out in ("head", "short") and not right.out.startswith(ends.out):
        return f"{ends.out[:300]!r} is not how {right.out[:300]!r} begins"
    return None


def _open_streams_only(*_: object) -> None:
    """As it would be without closed streams."""


BREAKAGES: dict[str, Callable[[], Any]] = {
    "closed streams stay closed": broken("prepare_streams", _open_streams_only, terminal),
    "what was not written is written at exit": broken(
        "drop_unwritten", _open_streams_only, terminal
    ),
    "a broken pipe is an error as others": broken("UNREAD_EXIT_CODE", 2, terminal),
    "full streams are not caught": broken("in_words", None, terminal),
}
