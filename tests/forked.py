"""`rda train` whose processes are forked from one that has imported what they need: a trial takes a second, not ten."""

import ctypes
import os
import runpy
import signal
import subprocess
import sys
import time
import traceback
from unittest import mock

from distributed import PR_SET_PDEATHSIG, START, keep_open, preload
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import dynamic_rendezvous

from ring_dilated_attention.commands import train
from ring_dilated_attention.commands.cli import main

_ROOMS = ("commands.train", "training.loop", "training.agreement", "training.run_report")
_ROOMS += ("commands.generate",)
preload(
    "torch.distributed.run",
    "torch.distributed.launcher.api",
    "torch.distributed.checkpoint",
    "filelock",
)
# It reads the sources of a whole stack to name a function in its log. Where all tests are loaded, that takes long.
dynamic_rendezvous.get_method_name = lambda depth=2: ""
preload(
    *(f"ring_dilated_attention.{name}" for name in _ROOMS),
)


class Forked:
    """A rank, started as `subprocess.Popen` starts one for torch's elastic launcher."""

    def __init__(self, args, env, stdout, stderr, start_new_session):
        self.returncode = None
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

    def poll(self):
        if self.returncode is None:
            found, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if found else None
        return self.returncode

    def wait(self, timeout):
        deadline = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("rank", timeout)
            time.sleep(0.005)


def _main(words, environment, main=main):
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


def main_with_forked_ranks(words):
    """For a process that was itself forked from the server."""
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

    with mock.patch.object(subprocess_handler, "Popen", Forked):
        return main(words)


def _begin(kind, words, said, environment, folder, change):
    """In place of a new process: what it says goes to a file."""
    os.chdir(folder)
    file = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    sys.stdout, sys.stderr = (open(n, "w", closefd=False, buffering=1) for n in (1, 2))  # noqa: SIM115
    os.environ |= environment
    kind(words, change)


def _launcher(words, change):
    from torch.distributed.elastic.multiprocessing.api import PContext

    PContext.close.__defaults__ = (None, 4)  # seconds from SIGTERM to SIGKILL, not 30
    # a second is too short where cores are busy
    with mock.patch.object(train, "GRACE_SECONDS", 4.0):
        change()
        os._exit(_main(words, {}, main_with_forked_ranks))


def _rank(words):
    # only ranks that torchrun forks are told when it dies
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, 0)
    launcher = os.getppid()
    code = _main(words, {})
    if os.getppid() != launcher:
        os._exit(code)  # a rank that is a function would wait for the launcher to take its result
    if code:
        sys.exit(code)


def _torchrun(words, change):
    """torchrun, by its API: the ranks are forked."""
    from torch.distributed import run
    from torch.distributed.launcher.api import elastic_launch

    change()
    config, _, more = run.config_from_args(run.parse_args(["--start-method", "fork", *words]))
    if "--standalone" in words:
        config.rdzv_backend, config.rdzv_endpoint = "c10d", "localhost:0"
    try:
        elastic_launch(config, _rank)(more[more.index("train") :])
    except ChildFailedError as error:
        print(error, file=sys.stderr)
        os._exit(1)
    os._exit(0)


def _store(words, change):
    change()
    sys.argv = list(words)
    runpy.run_path(words[0])


class ForkedLauncher:
    """The launcher: `restart_trials.started`, for a command of `rda train`, of torchrun, or of a store."""

    def __init__(self, words, said, environment, change=int):
        """change: called in the launcher's process before it begins."""
        self.said = said
        # The first two words are -m and the module of the command. A store has its file and a port.
        kind = _store
        if words[0] == "-m":
            kind = _torchrun if words[1] == "torch.distributed.run" else _launcher
            words = words[2:]
        args = (kind, words, str(said), environment, os.getcwd(), change)
        self._process = START.Process(target=_begin, args=args)
        self._process.start()
        self.pid = self._process.pid

    def poll(self):
        return self._process.exitcode

    def end(self, seconds=200):
        """What it and its ranks said to the end."""
        self._process.join(seconds)
        assert self.poll() is not None, self.said.read_text()
        return self.said.read_text()
