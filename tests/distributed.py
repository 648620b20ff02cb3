"""Runs a function on several gloo ranks, each a process of its own, and fails unless every rank succeeds."""

import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

_START = multiprocessing.get_context("forkserver")
_START.set_forkserver_preload(
    ["torch", "torch.distributed", "torch._dynamo", "ring_dilated_attention.attention", "distributed"]
)


class RankFailedError(AssertionError):
    """What the ranks reported, with their tracebacks."""


def run(world_size: int, function: Callable[..., Any], *args: Any, seconds: float = 60) -> list[Any]:
    """function(rank, world_size, *args) on every rank; its results in the order of ranks.

    `function` must be importable (a module's own). Ends every process, also when a rank fails or time is up.
    """
    with tempfile.TemporaryDirectory() as folder:
        processes, pipes = [], []
        for rank in range(world_size):
            ours, theirs = _START.Pipe(duplex=False)
            process = _START.Process(target=_rank, args=(theirs, rank, world_size, folder, function, args), daemon=True)
            process.start()
            theirs.close()
            processes.append(process)
            pipes.append(ours)
        try:
            return _collect(pipes, time.monotonic() + seconds)
        finally:
            for process in processes:
                process.kill()
                process.join()


def _collect(pipes: list[Connection], deadline: float) -> list[Any]:
    results: dict[int, Any] = {}
    failures: dict[int, str] = {}
    open_pipes = {pipe: rank for rank, pipe in enumerate(pipes)}
    while open_pipes:
        ready = wait(list(open_pipes), timeout=max(0, deadline - time.monotonic()))
        if not ready:
            failures.update({rank: "no answer in time" for rank in open_pipes.values()})
            break
        for pipe in ready:
            rank = open_pipes.pop(pipe)
            try:
                succeeded, value = pipe.recv()
            except EOFError:
                succeeded, value = False, "died without a word"
            (results if succeeded else failures)[rank] = value
    if failures:
        raise RankFailedError("\n".join(f"rank {rank}: {text}" for rank, text in sorted(failures.items())))
    return [results[rank] for rank in range(len(pipes))]


def _rank(pipe: Connection, rank: int, world_size: int, folder: str, function: Callable[..., Any], args: tuple) -> None:
    try:
        torch.set_num_threads(1)
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        store = dist.FileStore(str(Path(folder) / "store"), world_size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=60))
        pipe.send((True, function(rank, world_size, *args)))
    except BaseException:  # noqa: BLE001  whatever it was, the parent reports it
        pipe.send((False, traceback.format_exc()))
