"""`rda train` whose processes are forked from one that has imported what they need: a trial takes a second, not ten."""

import ctypes
import os
import runpy
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from unittest import mock

from distributed import PR_SET_PDEATHSIG, START, keep_open, preload
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from ring_dilated_attention.commands import train
from ring_dilated_attention.commands.cli import main

_ROOMS = ("commands.train", "training.loop", "training.agreement", "training.run_report")
_ROOMS += ("training.sharded", "commands.generate")
preload(
    "torch.distributed.run",
    "torch.distributed.launcher.api",
    "torch.distributed.checkpoint",
    "filelock",
)
preload(
    *(f"ring_dilated_attention.{name}" for name in _ROOMS),
)


class Forked:
    """A rank, started as `subprocess.Popen` starts one for torch's elastic launcher."""

    def __init__(
        self,
        args: Sequence[str],
        env: dict[str, str],
        stdout: None,
        stderr: None,
        start_new_session: bool,
    ) -> None:
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            assert start_new_session
            os.setsid()
            # those of the launcher, which a new Python does not have
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(
                    number,
                    signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL,
                )
            keep_open([])
            os._exit(_main(args[3:], env))

    def poll(self) -> int | None:
        if self.returncode is None:
            found, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if found else None
        return self.returncode

    def wait(self, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("rank", timeout)
            time.sleep(0.005)


def _main(
    words: Sequence[str], environment: dict[str, str], main: Callable[[Sequence[str]], int] = main
) -> int:
    os.environ |= environment
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    try:
        return main(words)
    except SystemExit as error:
        return int(error.code or 0)
    except Exception:  # noqa: BLE001  as Python does with what nobody caught
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def _saying_to(said: str, folder: str) -> None:
    os.chdir(folder)
    file = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    sys.stdout, sys.stderr = (open(n, "w", closefd=False, buffering=1) for n in (1, 2))  # noqa: SIM115


def main_with_forked_ranks(words: Sequence[str]) -> int:
    """For a process that was itself forked from the server."""
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler
    from torch.distributed.elastic.rendezvous import dynamic_rendezvous

    # It reads the sources of a whole stack to name a function in its log. Where all tests are loaded, that takes long.
    dynamic_rendezvous.get_method_name = lambda depth=2: ""
    with mock.patch.object(subprocess_handler, "Popen", Forked):
        return main(words)


def _launcher(
    words: Sequence[str],
    said: str,
    environment: dict[str, str],
    folder: str,
    change: Callable[[], object],
) -> None:
    _saying_to(said, folder)
    from torch.distributed.elastic.multiprocessing.api import PContext

    PContext.close.__defaults__ = (None, 4)  # seconds from SIGTERM to SIGKILL, not 30
    # a second is too short where cores are busy
    with mock.patch.object(train, "GRACE_SECONDS", 4.0):
        change()
        os._exit(_main(words, environment, main_with_forked_ranks))


def _rank(words: Sequence[str]) -> None:
    # only ranks that torchrun forks are told when it dies
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, 0)
    if code := _main(words, {}):
        sys.exit(code)


def _torchrun(words: Sequence[str], said: str, environment: dict[str, str], folder: str) -> None:
    """torchrun, by its API: the ranks are forked."""
    from torch.distributed import run
    from torch.distributed.elastic.rendezvous import dynamic_rendezvous
    from torch.distributed.launcher.api import elastic_launch

    # It reads the sources of a whole stack to name a function in its log. Where all tests are loaded, that takes long.
    dynamic_rendezvous.get_method_name = lambda depth=2: ""

    _saying_to(said, folder)
    os.environ |= environment
    config, _, more = run.config_from_args(run.parse_args(["--start-method", "fork", *words]))
    if "--standalone" in words:
        config.rdzv_backend, config.rdzv_endpoint = "c10d", "localhost:0"
    try:
        elastic_launch(config, _rank)(more[more.index("train") :])
    except ChildFailedError as error:
        print(error, file=sys.stderr)
        os._exit(1)
    os._exit(0)


def _store(words: Sequence[str], said: str, environment: dict[str, str], folder: str) -> None:
    _saying_to(said, folder)
    sys.argv = list(words)
    runpy.run_path(words[0])


class ForkedLauncher:
    """The launcher: `restart_trials.started`, for a command of `rda train`, of torchrun, or of a store."""

    def __init__(
        self,
        words: Sequence[str],
        said: Path,
        environment: dict[str, str],
        change: Callable[[], object] = int,
    ) -> None:
        """change: called in the process of `rda train` before it begins."""
        self.said = said
        # The first two words are -m and the module of the command. A store has its file and a port.
        args = (words[2:] if words[0] == "-m" else words, str(said), environment, os.getcwd())
        if words[0] != "-m":
            self._process = START.Process(target=_store, args=args)
        elif words[1] == "torch.distributed.run":
            self._process = START.Process(target=_torchrun, args=args)
        else:
            self._process = START.Process(target=_launcher, args=(*args, change))
        self._process.start()
        self.pid = self._process.pid

    def poll(self) -> int | None:
        code: int | None = self._process.exitcode
        return code

    def end(self, seconds: float = 60) -> str:
        """What it and its ranks said to the end."""
        self._process.join(seconds)
        assert self.poll() is not None, self.said.read_text()
        return self.said.read_text()
