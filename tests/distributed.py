"""Runs a function on several gloo ranks, each a process of its own, and fails unless every rank succeeds.

This process hosts the store, on a port that the system chooses, so that no rank is missed by the others as its host.
"""

import ctypes
import faulthandler
import fcntl
import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
import warnings
from contextlib import contextmanager
from datetime import timedelta
from functools import partial, partialmethod
from multiprocessing import forkserver, util
from multiprocessing.connection import wait
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

# A store asks for the name of whoever connects. Where many ranks start at once, a name server may answer none of them,
# and the C library asks again after this time: after five seconds by default.
os.environ.setdefault("RES_OPTIONS", "timeout:1")

START = multiprocessing.get_context("forkserver")
# A rank is forked from a server that has imported these, which its test needs: 0.03 s of work instead of 0.1 to 0.3,
# and where it compiles, a second less. The server passes by what it does not find, and Python 3.11 does not give it our
# sys.path: it finds what is installed, and what lies in the present folder.
_PRELOADED = [
    "tests.uncollected",  # the first
    "torch",
    "torch.distributed",
    "torch._dynamo",
    "pytest",
    "hypothesis",
    "benchmarks.measure",
    "ring_dilated_attention.attention",
    "ring_dilated_attention.layers",
    "ring_dilated_attention.models",
    "ring_dilated_attention.reference",
    "ring_dilated_attention.simulate",
    "tests.collected",  # the last
]
START.set_forkserver_preload(_PRELOADED)

PR_SET_PDEATHSIG = 1  # of linux/prctl.h

store: dist.Store  # in a rank: the one that the test hosts


def preload(*modules):
    """Import these installed modules once, and not in every rank. For while tests are collected: before the server."""
    _PRELOADED[-1:-1] = modules
    START.set_forkserver_preload(_PRELOADED)


def _start_method():
    """A process that was itself forked from the server has imported all that ranks need, and forks them: a server of
    its own would import it once more, for some seconds."""
    return (
        START if multiprocessing.parent_process() is None else multiprocessing.get_context("fork")
    )


def start_server():
    """Start the server now: there is one for a process, and whoever starts a process first says what it imports."""
    forkserver.ensure_running()


def fork_server():
    """Start the server as a copy of this process, in place of a new one: what is imported here need not be imported
    there, nor in each rank the module of its test. For a process that has tests and has run none."""
    with mock.patch.object(util, "spawnv_passfds", _fork):
        start_server()


def _fork(_, words, descriptors):
    """`multiprocessing.util.spawnv_passfds`, for Python's own words: python -c "..."."""
    with warnings.catch_warnings():
        # Python 3.12 warns of other threads. Here, one waits for words of pytest's.
        warnings.simplefilter("ignore")
        if pid := os.fork():
            return pid
    try:
        keep_open(descriptors)
        sys.stdout, sys.stderr = (open(n, "w", closefd=False, buffering=1) for n in (1, 2))  # noqa: SIM115
        for handler in filter(None, (reference() for reference in logging._handlerList)):
            # torch's, which write to what pytest put in place of stderr
            if type(handler) is logging.StreamHandler:
                handler.setStream(sys.stderr)
        forkserver._forkserver.__init__()  # its lock is taken while the server starts
        warnings.resetwarnings()
        faulthandler.disable()
        exec(words[-1])
    except Exception:  # noqa: BLE001  nobody else would say it
        traceback.print_exc()
    finally:
        os._exit(0)


def keep_open(descriptors):
    """For a process that was forked: these and its standard streams stay open. All others lead nowhere, and are not
    closed: whoever still writes to one would write to the file that gets its number."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for name in os.listdir("/proc/self/fd"):
        if int(name) not in (0, 1, 2, nowhere, *descriptors):
            os.dup2(nowhere, int(name))


class RankFailedError(AssertionError):
    """What the ranks reported, with their tracebacks."""


class Outcome(NamedTuple):
    """What became of a rank: what it returned, or the story of its failure."""

    succeeded: bool
    value: Any


LIKE_NCCL = "cuda:gloo"  # stands in for "nccl", which is short for "cuda:nccl": a default group without the CPU


@contextmanager
def over_gloo():
    """Where the default group is `LIKE_NCCL`, what torch itself sends goes over a gloo group, since tensors are on the
    CPU here. With NCCL it goes from card to card. What this library sends must find its own way."""
    dist.Backend._plugins.clear()  # if one is registered, torch warns at the end of such a group, and not of NCCL's
    group = dist.new_group(backend="gloo")
    init = DistributedDataParallel.__init__
    with (
        mock.patch.object(
            DistributedDataParallel, "__init__", partialmethod(init, process_group=group)
        ),
        mock.patch.object(dist, "broadcast", partial(dist.broadcast, group=group)),
    ):
        yield


def run(world_size, function, *args, seconds=60, backend="gloo"):
    """function(rank, world_size, *args) on every rank; its results in the order of ranks.

    `function` must be importable (a module's own). Ends every process, also when a rank fails or time is up.
    """
    with Ranks(world_size, function, *args, backend=backend) as ranks:
        outcomes = ranks.collect(range(world_size), seconds)
    failures = {
        rank: value for rank, (succeeded, value) in sorted(outcomes.items()) if not succeeded
    }
    if failures:
        raise RankFailedError("\n".join(f"rank {rank}: {text}" for rank, text in failures.items()))
    return [outcomes[rank].value for rank in range(world_size)]


class Ranks:
    """The processes of a group, for as long as the context lasts: whatever happens, none is left behind."""

    def __init__(self, world_size, function, *args, stay=False, backend="gloo"):
        """stay: a rank that is done stays alive, so that the others are not told of it by its connections."""
        self.world_size, self.task = world_size, (function, args, stay, backend)
        self.processes = []
        self.pipes = []

    def __enter__(self):
        try:
            start = _start_method()
            for rank in range(self.world_size):
                ours, theirs = start.Pipe()
                args = (theirs, rank, self.world_size, *self.task)
                self.processes.append(start.Process(target=_rank, args=args, daemon=True))
                self.pipes.append(ours)
                self.processes[-1].start()
                theirs.close()
            # Only now: its thread names whoever connects, under a lock of the C library's that a rank forked at that
            # moment would find taken for ever.
            self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            for pipe in self.pipes:
                pipe.send(self.store.port)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        for process in self.processes:
            if process.pid is not None:
                process.kill()
                process.join()
        for pipe in self.pipes:
            pipe.close()

    def collect(self, ranks, seconds):
        """The outcomes of these ranks, after at most this time."""
        deadline = time.monotonic() + seconds
        outcomes = {}
        while missing := {self.pipes[rank]: rank for rank in ranks if rank not in outcomes}:
            ready = wait(list(missing), timeout=max(0, deadline - time.monotonic()))
            if not ready:
                outcomes.update(
                    {rank: Outcome(False, "no answer in time") for rank in missing.values()}
                )
            for pipe in ready:
                try:
                    outcomes[missing[pipe]] = Outcome(*pipe.recv())
                except EOFError:
                    outcomes[missing[pipe]] = Outcome(False, "died without a word")
        return outcomes


def _rank(pipe, rank, world_size, function, args, stay, backend):
    global store
    try:
        _end_with_the_test()
        # its own, which a compiler takes, would outlive a process that is killed
        tqdm.set_lock(threading.RLock())
        torch.set_num_threads(1)
        torch.manual_seed(0)
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        store = dist.TCPStore("127.0.0.1", pipe.recv(), is_master=False)
        dist.init_process_group(
            backend, store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=60)
        )
        _meet(world_size)
        pipe.send((True, function(rank, world_size, *args)))
    except BaseException:  # noqa: BLE001  whatever it was, the parent reports it
        pipe.send((False, traceback.format_exc()))
    if not stay and (watching := sys.modules.get("ring_dilated_attention.ranks.watching")):
        watching.end_all_threads()  # as a Python does that ends by itself; this process ends without it
    if stay:
        threading.Event().wait()


def _meet(world_size):
    """Wait until every rank has made the group: one that leaves earlier closes connections that others still make."""
    if store.add("number of ranks that have met", 1) == world_size:
        store.set("all ranks have met", "")
    store.wait(["all ranks have met"])


def _end_with_the_test():
    """Should the test be killed, its end of a pipe closes, and Linux kills this process, be it stopped or stuck."""
    parent = multiprocessing.parent_process()
    if sys.platform == "linux" and parent is not None:
        fcntl.fcntl(parent.sentinel, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(parent.sentinel, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(parent.sentinel, fcntl.F_SETFL, os.O_ASYNC)
        # which forked all ranks itself: they hold each other's pipes
        if parent.pid == os.getppid():
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
