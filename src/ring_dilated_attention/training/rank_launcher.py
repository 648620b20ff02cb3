"""`rda train --ranks P`: the ranks are processes of this machine, and no other machine can reach them.

torchrun opens its stores on every interface and unpickles what it gets. Here ranks meet by a file. No torch.
"""

import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, NamedTuple

from .files import named_in_errors
from .options import in_short
from .stop_request import LAUNCHER, StopRequest

# Within this time after a rank failed, the others notice by their connections and say so. Then they are ended.
GRACE_SECONDS, POLL_SECONDS = 10, 0.05
STORE_BYTES = 1500  # about what two ranks write to the store
LOOPBACK = {"linux": "lo", "darwin": "lo0"}
MOST_STARTED = 10**6  # ranks
LOST_ANOTHER = "lost another"  # the reason of a rank that failed only because another rank did


class Ended(NamedTuple):
    """How the ranks ended."""

    codes: tuple[int, ...]  # negative: the signal that killed the rank
    was_aborted: bool  # by a second request to stop
    reasons: tuple[str, ...]  # what each left with `leave_reason`, or ""
    was_asked: bool = False  # to stop, once or twice


class Place(NamedTuple):
    """The place of this process among those that a launcher started."""

    rank: int
    num_ranks: int


def started() -> Place:
    """The place that torchrun or srun gives to this process, or rank 0 of 1 if neither started several.

    Outside a job step (in a batch script) Slurm's variables describe the whole job. A ValueError refuses bad numbers.
    """
    rank, size = "RANK", "WORLD_SIZE"
    if not _is_under_torchrun() and "SLURM_STEP_ID" in os.environ:
        rank = "SLURM_PROCID"
        size = next((name for name in ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS") if name in os.environ), "")
    if rank in os.environ and size in os.environ and (num_ranks := _number_in(size, 1)) > 1:
        return Place(_number_in(rank, 0, num_ranks - 1), num_ranks)
    return Place(0, 1)


def _is_under_torchrun() -> bool:
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def unjoined(*, joins: bool) -> str:
    """A warning if a launcher's processes do not work together, else "". joins: whether the command joins them."""
    (rank, num_ranks), tasks = started(), os.environ.get("SLURM_NTASKS", "1")
    if joins and num_ranks == 1 and tasks != "1" and not _is_under_torchrun():
        return f"SLURM_NTASKS={in_short(tasks)} is ignored: this is a single task, and srun starts several"
    is_repeated = not joins and num_ranks > 1 and rank == 0
    return f"a launcher started {num_ranks} of these, and each does all of the work: start one" if is_repeated else ""


def check_meeting() -> None:
    """Raise ValueError if the environment does not say where the ranks of torchrun or srun meet."""
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        remedy = "export MASTER_ADDR=$(scontrol show hostnames | head -n 1) MASTER_PORT=29500"
        raise ValueError(f"{started().num_ranks} ranks need {' and '.join(missing)} to meet: {remedy}")
    _number_in("MASTER_PORT", 1, 65_535)


def _number_in(name: str, least: int, most: int = MOST_STARTED) -> int:
    """An environment variable's number, which a launcher or a user set."""
    text = os.environ[name]
    is_number = text.isascii() and text.isdigit() and len(text) <= 20
    if not (is_number and least <= int(text) <= most):
        raise ValueError(f"{name} must be a number from {least:,} to {most:,}, got {in_short(text)!r}: mend it")
    return int(text)


def loopback_only() -> dict[str, str]:
    """The environment variables that keep gloo's connections on this machine."""
    return {"GLOO_SOCKET_IFNAME": LOOPBACK[sys.platform]} if sys.platform in LOOPBACK else {}


def share_of_cores(num_ranks: int) -> int:
    """The most threads of a rank for which no two ranks share a core; 1 if there are fewer cores than ranks."""
    num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, num_cores // num_ranks)


def launch(arguments: Sequence[str], num_ranks: int, lock: int, variables: Mapping[str, str]) -> Ended:
    """Run `python <arguments> --launched FOLDER` on every rank, until all have ended.

    Each rank has a session of its own: Ctrl-C reaches only the launcher, which then closes the ranks' stdin. They are
    killed by a second Ctrl-C, or 10 seconds after one failed. They inherit the descriptor of the folder's `lock`.
    """
    environment = {**os.environ, **loopback_only(), **variables}
    environment |= {"WORLD_SIZE": str(num_ranks), "LOCAL_WORLD_SIZE": str(num_ranks), LAUNCHER: str(os.getpid())}
    environment.setdefault("OMP_NUM_THREADS", str(share_of_cores(num_ranks)))
    processes: list[subprocess.Popen[bytes]] = []
    read_end, write_end = os.pipe()
    with (
        StopRequest() as stop,
        tempfile.TemporaryDirectory(prefix="rda-train-") as folder,
        open(read_end, "rb") as asked,
        open(write_end, "wb") as asking,
    ):
        with named_in_errors(Path(folder)):
            (Path(folder) / "room").write_bytes(bytes(STORE_BYTES))  # on a full disk torch's store waits for ever
        try:
            for rank in range(num_ranks):
                own = {**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}
                words = [sys.executable, *arguments, "--launched", folder]
                processes.append(subprocess.Popen(words, stdin=asked, env=own, start_new_session=True, pass_fds=[lock]))
            until_all_ended(processes, stop, asking)
            # A rank that is ended here waited for another one: it did not fail.
            default = ["" if process.poll() is not None else LOST_ANOTHER for process in processes]
            reasons = tuple(_reason(Path(folder), rank) or text for rank, text in enumerate(default))
        finally:
            for process in processes:
                process.kill()
                process.wait()
    return Ended(tuple(process.returncode for process in processes), stop.number > 1, reasons, stop.requested)


def until_all_ended(processes: Sequence[subprocess.Popen[bytes]], stop: StopRequest, asking: BinaryIO) -> None:
    """Return when all have ended, on a second request to stop, or GRACE_SECONDS after a rank failed."""
    deadline = math.inf
    while None in [process.poll() for process in processes] and stop.number < 2 and time.monotonic() < deadline:
        if stop.requested:
            asking.close()
        if deadline == math.inf and any(process.returncode for process in processes):
            deadline = time.monotonic() + GRACE_SECONDS
        time.sleep(POLL_SECONDS)


def leave_reason(folder: Path, reason: str) -> None:
    """Tell the launcher in one line why this rank fails."""
    with suppress(OSError):  # if the disk is full, the launcher has only the exit code
        (folder / f"failed-{started().rank}").write_text(reason, errors="backslashreplace")


def _reason(folder: Path, rank: int) -> str:
    with suppress(OSError, ValueError):  # there is no file, or it was cut short
        return (folder / f"failed-{rank}").read_text()
    return ""
