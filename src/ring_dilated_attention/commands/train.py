"""`rda train`: trains in this process, alone or as one of several ranks, or starts the ranks.

Bad requests are refused before torch is imported.
"""

import os
import re
import shlex
import signal
import socket
import time
from argparse import SUPPRESS, ArgumentParser, Namespace
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..models.saved_run import find_checkpoint
from ..training.files import folder_made, in_words
from ..training.options import add_hyperparameters
from ..training.rank_launcher import (
    CODE_FILE,
    RESTART,
    end_with_launcher,
    launch,
    leave_code,
    leave_reason,
    started,
)
from ..training.run import Run, fingerprint, prepare
from ..training.run_folder import (
    STARTS_FILE,
    are_by_torchrun,
    count_start,
    may_start_again,
    own_folder,
)
from ..training.stop_request import StopRequest
from .arguments import check_installed, count, positive, within
from .console import progress
from .terminal import (
    INTERRUPTED_EXIT_CODE,
    NO_MEMORY,
    is_out_of_memory,
    leaving_at_once,
    say,
)

if TYPE_CHECKING:
    from ..ranks.context import ContextParallel
    from ..training.metrics import Step

FAILED_EXIT_CODE, USER_ERROR_EXIT_CODE = 1, 2
PACKAGES = ("filelock", "numpy", "rich", "safetensors")
# If a rank fails, the other ranks lose the connection to it. They wait GRACE_SECONDS before they end, so that the
# failed rank ends first, and the launcher names it as the cause.
GRACE_SECONDS = 10
# Matches the errors that a rank gets after another rank has ended. The errors come from gloo, while DDP averages
# gradients, or from a store of torch.distributed.
LOST_CONNECTION = re.compile(
    r"[Cc]onnection (closed|reset|refused)|Broken pipe|[Tt]imed? ?out|gloo/transport"
)
EXAMPLES = """examples:
  rda train                                  one process; the document is
                                             Python's standard library
  rda train --ranks 2                        two processes share long sequences
  rda train --data book.txt --seq-len 64Ki   the bytes of any files
  rda train --segment-lengths 32768 --dilation-rates 1           dense attention
  rda train --run-folder runs/a              begin a run, or go on with it
  rda train --steps 5                        a quick look: 5 steps of --seq-len
  rda train --ranks 2 --restarts 9 --run-folder runs/a   go on if a rank is lost
  torchrun --nproc-per-node 2 -m ring_dilated_attention train
                                             your own launcher, any hosts
  srun python -m ring_dilated_attention train
                                  Slurm, with MASTER_ADDR and MASTER_PORT set

A sequence of --seq-len is cut among the ranks; each holds its part of every
activation. Shorter ones of --phases are dealt out whole, if BATCH allows it.
The run folder gets checkpoints (safetensors and JSON) and metrics.jsonl, and at
the end record.json. Only one run at a time can use it. Exit codes of the run,
or of the ranks under a torchrun of your own: 0 done, 1 a rank was lost or
memory ran out, 2 a sentence says what is wrong, 130 interrupted and saved.
"""


def add_arguments(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--ranks",
        type=positive,
        metavar="P",
        help="processes that share every sequence of --seq-len (default 1)",
    )
    add("--activation-checkpointing", action="store_true", help="recompute blocks to save memory")
    add(
        "--fsdp",
        action="store_true",
        help="cut parameters and optimiser state over ranks, in checkpoints too (FSDP2)",
    )
    add(
        "--run-folder",
        type=Path,
        metavar="DIR",
        help="where to write (default runs/<date and time>). A run that is there goes on from its newest checkpoint",
    )
    add(
        "--restarts",
        type=within(0),
        metavar="K",
        help="start the ranks again up to K times when one is lost",
    )
    add(
        "--timeout",
        type=within(1, 86_400),
        default=600,
        metavar="S",
        help="after so many seconds a rank that does not answer is lost (default 600)",
    )
    add(
        "--save-every",
        type=positive,
        default=30,
        metavar="N",
        help="steps between checkpoints; older ones are deleted (default 30)",
    )
    # `launch` passes this option to the ranks that it starts. The option names the folder with the store through which
    # the ranks connect.
    add("--launched", type=Path, help=SUPPRESS)
    add_hyperparameters(
        parser.add_argument_group("hyperparameters", "kept by a run that goes on"), count
    )


def run(arguments: Namespace) -> int:
    if RESTART in os.environ:
        end_with_launcher()  # call this first: the launcher may end during the imports
    if arguments.launched is not None or started().num_ranks > 1 or are_by_torchrun():
        return train(arguments, None)
    run = prepare_checked(arguments)
    if arguments.ranks in (None, 1) and arguments.restarts is None:
        return train(arguments, run)
    return launch_ranks(arguments, run)


def prepare_checked(arguments: Namespace) -> Run:
    """The run that the user asks for. Raises a ValueError that says why the run is impossible."""
    check_installed(PACKAGES, "train")
    num_started = started().num_ranks
    if num_started > 1 and arguments.ranks not in (None, num_started):
        raise ValueError(
            f"--ranks {arguments.ranks}, but a launcher started {num_started} ranks: leave --ranks out"
        )
    is_launched_by_others = arguments.launched is None and (num_started > 1 or are_by_torchrun())
    if arguments.restarts is not None and is_launched_by_others:
        raise ValueError(
            f"--restarts {arguments.restarts}, but another launcher started these ranks, and it alone can start them "
            "again: use torchrun --max-restarts"
        )
    if are_by_torchrun() and arguments.run_folder is None:
        raise ValueError(
            "torchrun --max-restarts needs --run-folder: in it restarted ranks find their run"
        )
    return prepare(arguments)


def launch_ranks(arguments: Namespace, run: Run) -> int:
    """Let torch's elastic launcher start the ranks. Returns the exit code."""
    with folder_made(run.folder) as folder:
        words = ["-m", "ring_dilated_attention", "train", *arguments.argv]
        if arguments.run_folder is None:
            words += ["--run-folder", str(folder)]
        with leaving_at_once("rda train"):
            import torch.distributed.launcher  # noqa: F401
        code, reason = launch(
            words, arguments.ranks or 1, arguments.restarts or 0, arguments.timeout
        )
        if reason:
            say(f"rda train: {reason}; {what_is_left(arguments, folder)}")
    return code


def what_is_left(arguments: Namespace, folder: Path) -> str:
    """A text for the user of a failed run: the newest checkpoint, and the command that resumes the run from it."""
    checkpoint = find_checkpoint(folder) or "none"
    return f"newest checkpoint: {checkpoint}; go on with: {train_command(arguments, folder)}"


def train_command(arguments: Namespace, folder: Path) -> str:
    """The command that resumes the run: the user's own command, with the run's folder added if it is missing."""
    words = list(arguments.argv)
    if arguments.launched is not None:
        words = words[:-2]  # drop --launched and its folder
    if arguments.run_folder is None:
        words += ["--run-folder", str(folder)]
    start = "rda train"
    if started().num_ranks > 1 and arguments.launched is None:  # torchrun or srun started the ranks
        start = "... -m ring_dilated_attention train"
    return f"{start} {shlex.join(words)}"


def train(arguments: Namespace, run: Run | None) -> int:
    """Train in this process, alone or as one rank of several. Returns the exit code. If one rank refuses the run, all
    ranks refuse it.

    `rda train --ranks` starts its ranks again if one of them ends with a code other than 0. So a rank that wants no
    restart returns 0, and writes the exit code of the command to a file (`leave_code`).
    """
    with leaving_at_once("rda train"):
        import torch.distributed as dist

        from ..training import loop
        from ..training.agreement import Refusal

    folder = None
    with ExitStack() as stack:
        try:
            parallel = join(arguments)
            run = begin(arguments, run, parallel, stack)
            folder = run.folder
            with StopRequest(says=parallel.rank == 0) as stop:
                record = loop.train(
                    run, parallel, stop, partial(shown, run) if parallel.rank == 0 else loop.unseen
                )
                if parallel.rank == 0:
                    report(arguments, record)
            if parallel.world_size > 1:
                dist.destroy_process_group()
            code = 0 if record["status"] == "complete" else INTERRUPTED_EXIT_CODE
        except (Refusal, loop.TrainingDiverged) as error:  # raised by all ranks, or by none
            code = USER_ERROR_EXIT_CODE
            if str(error) and (isinstance(error, Refusal) or started().rank == 0):
                say(f"rda train: {error}")
        except Exception as error:  # noqa: BLE001  `failed` raises unforeseen errors again
            code = failed(error, arguments, folder)
        # A restart follows only after FAILED_EXIT_CODE. After any other code, delete the file with the count of starts.
        if folder is not None and parallel.rank == 0 and code != FAILED_EXIT_CODE:
            (folder / STARTS_FILE).unlink(missing_ok=True)
    if arguments.launched is None or code == FAILED_EXIT_CODE:
        return code
    # Pass the exit code on to the launcher. If the code means no error, only the first rank passes it on, because only
    # the first rank writes the report. If the report cannot be written, the command must not end with another rank's
    # code.
    if code not in (0, INTERRUPTED_EXIT_CODE) or parallel.rank == 0:
        leave_code(arguments.launched, code)
    return 0


def join(arguments: Namespace) -> "ContextParallel":
    from ..ranks.context import ContextParallel
    from ..training.agreement import join_ranks

    timeout = timedelta(seconds=arguments.timeout)
    try:
        join_ranks(arguments.launched, timeout)
        return ContextParallel(timeout=timeout)
    except (ValueError, RuntimeError):
        # If the request itself is wrong, raise an error that says so. The user learns more from it than from the error
        # that the ranks could not connect.
        prepare_checked(arguments)
        raise


def begin(
    arguments: Namespace, run: Run | None, parallel: "ContextParallel", stack: ExitStack
) -> Run:
    """Lock the run's folder, and make sure that all ranks train the same run. Returns the run.

    No other run can use the folder until the stack is closed.
    """
    from ..training.agreement import check_alike, on_first, together, values_of_all

    if run is None:
        run = together(parallel, partial(prepare_checked, arguments))
    # Take the folder of the first rank, because without --run-folder each rank has made up a name for the folder, and
    # the names may differ.
    folder = Path(on_first(parallel, partial(own, arguments, run, stack)))
    # Prepare the run again if the previous owner of the folder has saved another checkpoint while this run waited for
    # the folder.
    is_newest = find_checkpoint(run.folder) == run.checkpoint
    if not all(values_of_all(parallel, is_newest)):
        run = together(parallel, partial(prepare_checked, arguments))
    run = replace(run, folder=folder)
    if parallel.world_size > 1:
        check_alike(parallel, together(parallel, partial(fingerprint, run)))
    if may_start_again(arguments):
        # A launcher counts only the restarts of its own ranks. If any launcher has restarted its ranks, all ranks count
        # this start as a restart. The first start of a command begins a new count.
        is_again = any(values_of_all(parallel, os.environ.get(RESTART, "0") != "0"))
        on_first(parallel, partial(count_start, folder, anew=not is_again))
        if is_again and parallel.rank == 0:
            say(
                f"rda train: restart {os.environ[RESTART]} of {os.environ['TORCHELASTIC_MAX_RESTARTS']} from "
                f"{run.checkpoint or 'the beginning'}"
            )
    return run


def own(arguments: Namespace, run: Run, stack: ExitStack) -> str:
    """Keep other runs out of the run's folder until the stack is closed. Returns the folder's path."""
    seconds = 0.0
    if may_start_again(arguments):
        # Wait for the folder, because ranks of the previous start may still own it. These ranks end soon after their
        # launcher. Wait less than --timeout: when that time is over, the other ranks no longer wait for this one.
        seconds = min(60, arguments.timeout / 2)
    return str(stack.enter_context(own_folder(run.folder, seconds)))


@contextmanager
def shown(run: Run, num_done: int) -> "Iterator[Callable[[Step], None]]":
    """Show the size of the training text (the document), then the progress. Yields a function to call after each step.

    Nothing is shown before training begins: a refused run prints only the reason.
    """
    say(f"the document has {len(run.document.content):,} bytes")
    with progress(run.hyperparameters.total_steps, "step") as bar:
        bar.update(num_done)

        def show(step: "Step") -> None:
            bar.note(str(step))
            bar.update()

        yield show


def failed(error: Exception, arguments: Namespace, folder: Path | None) -> int:
    """Tell the user and the launcher why this rank ends. Returns the rank's exit code. An unforeseen error is raised
    again."""
    from ..ranks.failures import ExchangeError, first_line

    rank, num_ranks = started()
    who = (
        "rda train" if num_ranks == 1 else f"rda train: rank {rank} on host {socket.gethostname()}"
    )
    reason = first_line(error)
    # `onward` tells the user how to resume the run. Under `rda train --ranks` it is empty, because there `launch_ranks`
    # tells the user once for all ranks.
    onward = ""
    if arguments.launched is None and folder is not None:
        onward = f"; {what_is_left(arguments, folder)}"
    if isinstance(error, (ValueError, OSError)):
        say(f"{who}: {in_words(error)}")
        return USER_ERROR_EXIT_CODE
    if isinstance(error, ExchangeError) or (
        isinstance(error, RuntimeError) and LOST_CONNECTION.search(str(error))
    ):
        say(f"{who} lost another: {reason}{onward}")
        leave_reason("lost another", is_cause=False)
        return code_after_loss(arguments)
    if is_out_of_memory(error):
        say(f"\n{who}: {NO_MEMORY}{onward}")  # "\n": a progress bar may be on this line
        leave_reason(NO_MEMORY, is_cause=True)
        return FAILED_EXIT_CODE
    leave_reason(f"{type(error).__name__}: {reason}", is_cause=True)
    raise error


def code_after_loss(arguments: Namespace) -> int:
    """The exit code of a rank that has lost the connection to another rank and ends.

    Under `rda train --ranks` this waits up to GRACE_SECONDS, so that the rank that failed ends first. If a rank
    writes the exit code of the command to CODE_FILE meanwhile, that code is returned. Otherwise FAILED_EXIT_CODE is
    returned.
    """
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # so that the launcher's SIGTERM ends this rank
    deadline = time.monotonic() + GRACE_SECONDS
    while arguments.launched is not None and time.monotonic() < deadline:
        time.sleep(0.05)
        if (arguments.launched / CODE_FILE).exists():
            return int((arguments.launched / CODE_FILE).read_text())
    return FAILED_EXIT_CODE


def report(arguments: Namespace, record: dict[str, Any]) -> None:
    from ..training.run_report import summary, write_report

    write_report(record)
    folder = record["run_folder"]
    print(summary(record))
    if record["status"] == "complete":
        print(f"to write with it: rda generate {folder} --prompt 'def '")
    else:
        say(f"saved at step {record['step']}; go on with: {train_command(arguments, folder)}")
