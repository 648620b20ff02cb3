"""Starts ranks by torch's elastic launcher, which torchrun uses too, and says which rank this process is.

The launcher keeps a key-value store, and the ranks find each other through a second store. torchrun opens its store on
every network interface, and unpickles what it receives. Here both stores are files, which no other machine can reach.

This module imports torch only to start ranks.
"""

import ctypes
import json
import logging
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from .files import named_in_errors

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

STORE_BYTES = 2**14  # an upper bound on the bytes that are written to the two stores
LOOPBACK = {"linux": "lo", "darwin": "lo0"}
LAUNCHER = "RDA_TRAIN_LAUNCHER"  # environment variable: the process id of the launcher
RESTART = "TORCHELASTIC_RESTART_COUNT"  # torch's variable: how often the launcher restarted ranks
PR_SET_PDEATHSIG = 1  # a constant of linux/prctl.h
# torch's variable: how many seconds after a signal the launcher kills the ranks. Until then the ranks can save.
SECONDS_TO_SAVE = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
CODE_FILE = "exit-code"  # the file in FOLDER (see `launch`) with the command's exit code
# If a rank fails, the other ranks lose the connection to it and fail too. These other ranks add LATER_SECONDS to the
# timestamps of their failures, so that the rank that failed first has the earliest timestamp.
LATER_SECONDS = 3600


class Place(NamedTuple):
    """The rank of this process, and the number of ranks that the launcher started."""

    rank: int
    num_ranks: int


def started() -> Place:
    """The rank that torchrun or srun gave this process, or rank 0 of 1 if neither started several processes.

    Slurm's variables are read only in a job step. In a batch script they describe the whole job.
    """
    names = [("RANK", "WORLD_SIZE")]
    if "SLURM_STEP_ID" in os.environ:
        names += [("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"), ("SLURM_PROCID", "SLURM_NTASKS")]
    for rank, size in names:
        if rank in os.environ and size in os.environ:
            return Place(int(os.environ[rank]), int(os.environ[size]))
    return Place(0, 1)


def loopback_only() -> dict[str, str]:
    """The environment variables that keep gloo's connections on this machine."""
    return {"GLOO_SOCKET_IFNAME": LOOPBACK[sys.platform]} if sys.platform in LOOPBACK else {}


def share_of_cores(num_ranks: int) -> int:
    """How many threads a rank may have if no two ranks share a core; 1 if there are fewer cores than ranks."""
    num_cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    return max(1, num_cores // num_ranks)


class Ended(NamedTuple):
    """How the ranks ended: the exit code of the command, and why the ranks failed.

    The reason is "" if the ranks did not fail, or have printed the reason themselves.
    """

    code: int
    reason: str = ""


def launch(words: Sequence[str], num_ranks: int, num_restarts: int, seconds_to_save: int) -> Ended:
    """Run `python <words> --launched FOLDER` on every rank until all ranks have ended. Returns how they ended.

    FOLDER is temporary. The launcher passes SIGINT and SIGTERM on to the ranks, and kills them `seconds_to_save` later.

    If a rank ends with a code other than 0, the launcher ends the other ranks and starts all of them again, up to
    `num_restarts` times. So a rank that wants no restart writes its exit code to a file in FOLDER (`leave_code`), and
    ends with 0.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    # Hide the line that torch logs when it sends a signal to a rank.
    logging.disable(logging.WARNING)
    os.environ.setdefault("OMP_NUM_THREADS", str(share_of_cores(num_ranks)))
    # Set how long torch waits before it kills ranks. torch before 2.12 does not read this variable, and waits 30 s.
    os.environ.setdefault(SECONDS_TO_SAVE, str(seconds_to_save))
    # Set TORCH_DISABLE_SHARE_RDZV_TCP_STORE, because otherwise the launcher opens a second store, on every network
    # interface.
    os.environ |= {
        **loopback_only(),
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        LAUNCHER: str(os.getpid()),
    }
    with tempfile.TemporaryDirectory(prefix="rda-train-") as folder:
        with named_in_errors(Path(folder)):
            # Fail here if the disk is full, because torch's store would wait for ever.
            Path(folder, "room").write_bytes(bytes(STORE_BYTES))
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=num_ranks,
            run_id="rda-train",
            max_restarts=num_restarts,
            rdzv_backend="c10d",
            rdzv_endpoint=f"{folder}/launcher",
            # Send a keep-alive message only once an hour, because each message makes the store's file longer, and no
            # other launcher reads the messages.
            rdzv_configs={"store_type": "file", "keep_alive_interval": 3600},
            signals_to_handle="SIGINT,SIGTERM",
            logs_specs=DefaultLogsSpecs(log_dir=folder),
        )
        ended = Ended(0)
        try:
            elastic_launch(config, sys.executable)(*words, "--launched", folder)
        except ChildFailedError as error:
            ended = Ended(1, f"the ranks failed: {cause(error)}")
        except SignalException:
            ended = Ended(130, "stopped at once")
        finally:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        path = Path(folder, CODE_FILE)
        return Ended(int(path.read_text())) if path.exists() else ended


def leave_code(folder: Path, code: int) -> None:
    """Write the exit code of the command to a file for the launcher. This rank then ends with 0, so that no restart
    follows."""
    unfinished = folder / f"{CODE_FILE}-{os.getpid()}"
    unfinished.write_text(str(code))
    unfinished.replace(folder / CODE_FILE)  # no other rank sees a file that is only partly written


def leave_reason(reason: str, *, is_cause: bool) -> None:
    """Tell the elastic launcher in one line why this rank fails.

    The launcher takes the failure with the earliest timestamp for the cause of all failures. is_cause: False for a rank
    that fails only because another rank has ended.
    """
    timestamp = 0 if is_cause else int(time.time()) + LATER_SECONDS
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        with suppress(OSError):  # if the disk is full, the launcher gets only the exit code
            Path(path).write_text(json.dumps({"message": reason, "timestamp": timestamp}))


def cause(error: "ChildFailedError") -> str:
    """A text that says which rank failed first, and why.

    The reason is what the rank wrote by `leave_reason`. If the rank wrote no reason, the text has the signal that ended
    the rank, or the rank's exit code.
    """
    rank, failure = error.get_first_failure()
    if Path(failure.error_file).exists():
        return f"rank {rank}: {failure.message}"
    if failure.exitcode < 0:
        return f"rank {rank} was ended by {failure.signal_name()}"
    return f"rank {rank} ended with code {failure.exitcode}"


def end_with_launcher() -> None:
    """Let Linux send SIGTERM to this rank when the process that started it ends.

    A rank that is training then saves and ends. A rank that is not training ends immediately, so that it cannot connect
    to ranks of a later start.
    """
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    # End this rank if the launcher ended before prctl was called: in that case the parent process has changed.
    if os.environ.get(LAUNCHER, str(os.getppid())) != str(os.getppid()):
        os.kill(os.getpid(), signal.SIGTERM)
