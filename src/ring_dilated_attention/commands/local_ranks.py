"""Starts several ranks on this machine, each a process of its own, for `rda` and the benchmarks."""

import multiprocessing
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from threading import Thread
from typing import Any, NamedTuple

from ..training.rank_launcher import loopback_only
from .terminal import held_back

# The backends of torch.distributed for ranks without GPUs (False) and for ranks with GPUs (True).
TRANSPORTS = {False: "gloo", True: "cpu:gloo,cuda:nccl"}
_PRELOADED = ["torch", "torch.distributed", "ring_dilated_attention.attention"]


class RankFailedError(RuntimeError):
    """Ranks failed. The message contains the report of each failed rank, with the traceback."""


class Worker(NamedTuple):
    """A rank's number, and the number of ranks. `report` sends a value to the process that started the rank."""

    rank: int
    world_size: int
    report: Callable[[Any], None]


class Launch(NamedTuple):
    """How to start ranks."""

    world_size: int
    num_threads: int = 1  # the number of torch's threads in each rank
    # Whether rank k runs only on the k-th core that this process may use. Has an effect only on Linux.
    is_pinned: bool = False
    has_gpus: bool = False  # whether rank k uses the k-th GPU
    transport: str | None = None  # the backend of torch.distributed (None: as in TRANSPORTS)
    # What tells a rank its GPU: "set_device" (of torch.cuda), "device_id" (of init_process_group), or "LOCAL_RANK"
    # (only this environment variable, which torchrun sets).
    told_by: str = "set_device"
    seconds: float = 60  # ranks that still run after this time are ended


def run_ranks(
    launch: Launch,
    function: Callable[..., Any],
    *args: Any,
    on_report: Callable[[int, Any], object] | None = None,
) -> list[Any]:
    """Call function(worker, *args) on every rank. Returns the results in the order of ranks.

    `function` must be defined at the top level of a module. Every process has ended before this returns or raises, even
    if a rank fails, time runs out or Ctrl-C is pressed. A RankFailedError says which ranks raised, died or ran out of
    time.
    """
    start = multiprocessing.get_context("forkserver")
    start.set_forkserver_preload(_PRELOADED)
    # Start the resource tracker before SIGINT is blocked below, because starting the tracker unblocks SIGINT.
    resource_tracker.ensure_running()
    with tempfile.TemporaryDirectory() as folder:
        processes, pipes = [], []
        try:
            with held_back():  # delay Ctrl-C until every started process is in `processes`
                for rank in range(launch.world_size):
                    ours, theirs = start.Pipe(duplex=False)
                    pipes.append(ours)
                    arguments = (theirs, rank, launch, folder, function, args)
                    process = start.Process(target=_rank, args=arguments, daemon=True)
                    process.start()
                    processes.append(process)
                    theirs.close()
            return _collect(pipes, launch, on_report or (lambda rank, message: None))
        finally:
            for process in processes:
                process.kill()
                process.join()


def _collect(
    pipes: list[Connection], launch: Launch, on_report: Callable[[int, Any], object]
) -> list[Any]:
    deadline = time.monotonic() + launch.seconds
    results: dict[int, Any] = {}
    failures: dict[int, str] = {}
    open_pipes = {pipe: rank for rank, pipe in enumerate(pipes)}
    while open_pipes:
        ready = wait(list(open_pipes), timeout=max(0, deadline - time.monotonic()))
        if not ready:
            for rank in open_pipes.values():
                failures[rank] = f"no answer within {launch.seconds:.0f} s"
            break
        for pipe in ready:
            assert isinstance(pipe, Connection)
            rank = open_pipes[pipe]
            try:
                kind, value = pipe.recv()
            except EOFError:
                kind, value = "failure", "died without a word"
            if kind == "report":
                on_report(rank, value)
                continue
            del open_pipes[pipe]
            if kind == "result":
                results[rank] = value
            else:
                failures[rank] = value
    if failures:
        raise RankFailedError(
            "\n".join(f"rank {rank}: {text}" for rank, text in sorted(failures.items()))
        )
    return [results[rank] for rank in range(len(pipes))]


def _rank(
    pipe: Connection,
    rank: int,
    launch: Launch,
    folder: str,
    function: Callable[..., Any],
    args: tuple,
) -> None:
    import torch
    import torch.distributed as dist

    # Ignore Ctrl-C, because the process that started this rank receives Ctrl-C too, and ends this rank.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    Thread(target=_end_with_the_starter, daemon=True).start()
    try:
        torch.set_num_threads(launch.num_threads)
        if launch.is_pinned and hasattr(os, "sched_setaffinity"):
            cores = sorted(os.sched_getaffinity(0))
            os.sched_setaffinity(0, {cores[rank % len(cores)]})
        os.environ |= loopback_only()  # loopback is enough, because all ranks are on this host
        bound = None
        if launch.told_by == "LOCAL_RANK":
            os.environ["LOCAL_RANK"] = str(rank)
        elif launch.has_gpus and launch.told_by == "device_id":
            bound = torch.device("cuda", rank)
        elif launch.has_gpus:
            torch.cuda.set_device(rank)
        dist.init_process_group(
            launch.transport or TRANSPORTS[launch.has_gpus],
            store=dist.FileStore(f"{folder}/store", launch.world_size),
            rank=rank,
            world_size=launch.world_size,
            timeout=timedelta(seconds=launch.seconds),
            device_id=bound,
        )
        worker = Worker(rank, launch.world_size, lambda message: pipe.send(("report", message)))
        pipe.send(("result", function(worker, *args)))
    except Exception:  # noqa: BLE001  any error is sent to the starting process
        pipe.send(("failure", traceback.format_exc()))


def _end_with_the_starter() -> None:
    """End this rank when the process that started it ends, even if that process is killed."""
    if (starter := multiprocessing.parent_process()) is not None:
        wait([starter.sentinel])
        os._exit(1)
