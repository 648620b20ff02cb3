"""`rda train`: trains alone, starts ranks, or is one of them. It refuses bad requests before it imports torch."""

import argparse
import json
import os
import re
import shlex
import signal
import socket
import sys
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from datetime import timedelta
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ..models.saved_run import find_checkpoint, step_of
from ..plan.dealing import check_dealing
from ..plan.exchange import EXCHANGES
from ..training.files import in_words
from ..training.options import add_hyperparameters, flag
from ..training.ownership import own_folder
from ..training.rank_launcher import LOST_ANOTHER, Ended, launch, leave_reason, started
from ..training.restarts import MOST_STARTS, RESTART, STARTS_FILE, are_by_torchrun, are_meant, count_start, no_progress
from ..training.run import RECORD_FILE, Run, fingerprint, prepare
from ..training.stop_request import StopRequest, end_with_launcher
from .generate import sample
from .numbers import check_at_least, check_memory, check_ranks_fit, check_seconds, count
from .output import check_installed
from .terminal import INTERRUPTED_EXIT_CODE, NO_MEMORY, UNREAD_EXIT_CODE, is_out_of_memory, leaving_at_once, say

FAILED_EXIT_CODE, USER_ERROR_EXIT_CODE = 1, 2
# The options that a checkpoint does not hold: the command that resumes a run repeats them.
DEFAULTS = {"ranks": None, "exchange": "auto", "save_every": 30, "eval_every": None}
DEFAULTS |= {"activation_checkpointing": False, "fsdp": False, "tensorboard": False, "restarts": None, "timeout": 600}
# What is said of the command that goes on from the parameters of a run.
FROM = """(a new run that reads as many bytes again; --seq-len, --segment-lengths and
--data may be others. The learning rate rises to its peak again, so a run of few
steps makes the model worse)"""
PACKAGES = ("matplotlib", "numpy", "safetensors", "tqdm")
# The errors of gloo in DDP's all-reduce of gradients, and of a store, when another rank has ended.
LOST_CONNECTION = re.compile(r"[Cc]onnection (closed|reset|refused)|Broken pipe|[Tt]imed? ?out|gloo/transport")
EXAMPLES = """examples:
  rda train                                  one process; the document is
                                             Python's standard library
  rda train --ranks 2                        two processes share every sequence
  rda train --data genome.fa.gz --seq-len 64Ki   any files; unpacks gzip, bzip2
                                             and xz; strips the headers of
                                             FASTA, known by its name: .fa
  rda train --segment-lengths 32768 --dilation-rates 1           dense attention
  rda train --resume runs/20250131-120000    go on after Ctrl-C
  rda train --from runs/a --steps 120        a new run from trained parameters;
                                             --data, --seq-len and
                                             --segment-lengths may be others
  rda train --steps 5                        a quick look: 5 steps of --seq-len
  rda train --ranks 2 --restarts 9 --run-folder runs/a   go on if a rank is lost
  torchrun --nproc-per-node 2 -m ring_dilated_attention train
                                             your own launcher, any hosts
  srun python -m ring_dilated_attention train
                                  Slurm, with MASTER_ADDR and MASTER_PORT set

The sequence is cut among the ranks; each holds its part of every activation. The run folder gets checkpoints
(safetensors and JSON) and metrics.jsonl, and at the end a README.txt that says what each of its files is. Only one run
at a time can use it. Exit codes of the run, or of the ranks under a torchrun of your own: 0 done, 1 a rank was lost or
memory ran out, 2 a sentence says what is wrong, 130 interrupted and saved.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(**DEFAULTS)
    add = parser.add_argument
    add("--ranks", type=count, metavar="P", help="processes that share every sequence (default 1)")
    add("--exchange", choices=("auto", *EXCHANGES), help="how chunks travel (default auto)")
    add("--activation-checkpointing", action="store_true", help="recompute blocks to save memory")
    add("--fsdp", action="store_true", help="cut parameters and optimiser state over ranks, in checkpoints too (FSDP2)")
    add("--run-folder", type=Path, metavar="DIR", help="where to write (default runs/<date and time>)")
    again = "start the ranks again up to K times when one is lost, from the newest checkpoint. "
    again += "An unfinished run of this command in --run-folder goes on"
    add("--restarts", type=count, metavar="K", help=again)
    late = "after so many seconds a rank that does not answer is lost (default 600)"
    add("--timeout", type=count, metavar="S", help=late)
    add("--resume", type=Path, metavar="DIR", help="go on from the newest checkpoint of a run folder")
    new = "begin anew from another run's newest parameters. Its hyperparameters are the defaults, but no --phases. "
    new += "The learning rate rises to its peak again: a run of few steps makes the model worse"
    add("--from", dest="origin", type=Path, metavar="DIR", help=new)
    add("--save-every", type=count, metavar="N", help="steps between checkpoints; older ones are deleted (default 30)")
    steps = "steps between scores on the held-out bytes (default: a fifth of all)"
    add("--eval-every", type=count, metavar="N", help=steps)
    add("--tensorboard", action="store_true", help="also write metrics for TensorBoard (its package)")
    add("--json", action="store_true", help="print the record on stdout, all else on stderr")
    add("--launched", type=Path, help=argparse.SUPPRESS)  # set by `launch`: where the ranks meet
    add_hyperparameters(parser.add_argument_group("hyperparameters", "kept by a resumed run"), count)


def run(arguments: argparse.Namespace) -> int:
    if RESTART in os.environ:  # also where a torchrun starts a single rank
        end_with_launcher()  # before the seconds that the imports take
    if arguments.launched is not None or started().num_ranks > 1 or are_by_torchrun():
        return run_rank(arguments)
    run, num_ranks = prepare_checked(arguments), arguments.ranks or 1
    with own(arguments, run, is_rank=False) as (folder, lock):
        run = replace(run, folder=folder)
        is_alone = num_ranks == 1 and arguments.restarts is None
        return train_alone(arguments, run) if is_alone else launch_ranks(arguments, run, lock)


def own(arguments: argparse.Namespace, run: Run, *, is_rank: bool) -> AbstractContextManager[tuple[Path, int]]:
    """Own the run's folder. If its name is taken, and the user did not choose it, another folder is made."""
    is_new = arguments.resume is None and arguments.run_folder is None
    # A run ends at most a minute after its launcher. The ranks wait --timeout for the one that waits for the folder.
    seconds = 0 if not are_meant(arguments) else min(60, arguments.timeout / 2) if is_rank else 60
    return own_folder(run.folder, must_be_new=is_new, seconds=seconds)


def prepare_checked(arguments: argparse.Namespace) -> Run:
    """The run that the user asks for, or a ValueError that says why it is impossible."""
    check_installed(PACKAGES, "train")
    if arguments.tensorboard and find_spec("tensorboard") is None:
        raise ValueError("--tensorboard lacks its extra: pip install 'ring-dilated-attention[tensorboard]'")
    num_started, num_asked = started().num_ranks, 1 if arguments.ranks is None else arguments.ranks
    check_at_least("--ranks", num_asked)
    check_at_least("--save-every", arguments.save_every)
    check_seconds("--timeout", arguments.timeout, 86_400)
    check_at_least("--restarts", arguments.restarts, 0)
    check_at_least("--eval-every", arguments.eval_every)
    if num_started > 1 and arguments.ranks not in (None, num_started):
        raise ValueError(f"--ranks {num_asked}, but a launcher started {num_started} ranks: leave --ranks out")
    if arguments.restarts is not None and arguments.launched is None and (num_started > 1 or are_by_torchrun()):
        rule = "another launcher started these ranks, and it alone can start them again: use torchrun --max-restarts"
        raise ValueError(f"--restarts {arguments.restarts}, but {rule}")
    if are_by_torchrun() and arguments.resume is None and arguments.run_folder is None:
        raise ValueError("torchrun --max-restarts needs --run-folder: by it, ranks that start again find their run")
    run, num_ranks = prepare(arguments), max(num_started, num_asked)
    options = run.hyperparameters
    positions = [phase.num_positions for phase in options.schedule]
    check_ranks_fit(num_ranks, min(positions), "--seq-len" if len(positions) == 1 else "--phases")
    if arguments.exchange == "all_to_all":  # otherwise every rank refuses it only in its first attention
        check_dealing(options.num_kv_heads or options.num_heads, num_ranks)
    num_bytes = options.num_training_bytes() * (num_ranks if num_started == 1 else 1) // (num_ranks if run.fsdp else 1)
    where = "in parts" if run.fsdp else "on every rank"
    remedy = "use a smaller --embed-dim, fewer --num-layers, or --fsdp over more hosts"
    check_memory(f"parameters, gradients and optimiser state, {where}, take", num_bytes, remedy)
    activations = 4 * options.embed_dim * options.num_layers * max(positions) // (num_ranks if num_started > 1 else 1)
    check_memory("the inputs of the blocks in one step take", activations, "use a smaller batch or shorter sequences")
    return run


def launch_ranks(arguments: argparse.Namespace, run: Run, lock: int) -> int:
    """Start the ranks; if one is lost, again, up to --restarts times. Returns the exit code."""
    folder = [] if arguments.resume else ["--run-folder", str(run.folder)]
    command = ["-m", "ring_dilated_attention", "train", *arguments.argv, *folder]
    newest, num_idle = find_checkpoint(run.folder), 0
    for restart in range((restarts := arguments.restarts or 0) + 1):
        ended = launch(command, arguments.ranks or 1, lock, {RESTART: str(restart)})
        if not any(ended.codes):
            return code_of(json.loads((run.folder / RECORD_FILE).read_text()))
        for code in (USER_ERROR_EXIT_CODE, UNREAD_EXIT_CODE):
            if not ended.was_aborted and set(ended.codes) <= {0, code}:
                return code  # the ranks have printed the reason, or nobody reads the output
        reason = "stopped at once" if ended.was_aborted else f"the ranks failed: {'; '.join(causes(ended))}"
        if ended.was_asked or USER_ERROR_EXIT_CODE in ended.codes or restart == restarts:
            break
        before, newest = newest, find_checkpoint(run.folder)
        num_idle = num_idle + 1 if newest == before else 0
        if num_idle == MOST_STARTS:  # those of ranks that died before they met, too
            raise ValueError(f"{reason}; {no_progress(run.folder)}")
        say(f"rda train: {reason}; restart {restart + 1} of {restarts} from {newest or 'the beginning'}")
    say(f"rda train: {reason}; {what_is_left(arguments, run.folder)}")
    return INTERRUPTED_EXIT_CODE if ended.was_aborted else FAILED_EXIT_CODE


def code_of(record: dict[str, Any]) -> int:
    return 0 if record["status"] == "complete" else INTERRUPTED_EXIT_CODE


def what_is_left(arguments: argparse.Namespace, folder: Path) -> str:
    """A sentence: the newest checkpoint, and the command that resumes from it."""
    checkpoint = find_checkpoint(folder)
    onward = f"go on with: {train_command(arguments, '--resume', folder)}" if checkpoint else "start it again"
    return f"newest checkpoint: {checkpoint or 'none'}; {onward}"


def train_command(arguments: argparse.Namespace, *asked: object) -> str:
    """A command with these words, and with the options of this one that a checkpoint does not hold."""
    words = [*map(str, asked)]
    for name, default in DEFAULTS.items():
        value = getattr(arguments, name)
        if value != default:
            words += [flag(name)] if value is True else [flag(name), str(value)]
    is_launched = started().num_ranks > 1 and arguments.launched is None
    launcher = "torchrun ..." if "WORLD_SIZE" in os.environ else "srun python"
    start = f"{launcher} -m ring_dilated_attention train" if is_launched else "rda train"
    return f"{start} {shlex.join(words)}"


def causes(ended: Ended) -> list[str]:
    """How ranks failed, killed ranks first. Ranks that failed because another did come only if all are such."""
    ranks = zip(ended.codes, range(len(ended.codes)), ended.reasons, strict=True)
    failed = sorted((rank for rank in ranks if rank[0]), key=lambda rank: rank[0] > 0)
    said = []
    for code, rank, reason in [rank for rank in failed if rank[2] != LOST_ANOTHER] or failed:
        how = f" was ended by {signal.Signals(-code).name}" if code < 0 else f" ended with code {code}"
        said.append(f"rank {rank}" + (f": {reason}" if reason else how))
    return said


def train_alone(arguments: argparse.Namespace, run: Run) -> int:
    with leaving_at_once("rda train"):
        from ..ranks.context import ContextParallel
        from ..training.loop import train

    try:
        # The terminal signals torchrun and its rank. torchrun passes it on, so that the rank gets it twice.
        with StopRequest(second_aborts=RESTART not in os.environ) as stop:
            timeout = timedelta(seconds=arguments.timeout)
            record = train(run, ContextParallel(exchange=arguments.exchange, timeout=timeout), stop)
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        say(f"\nrda train: {NO_MEMORY}; {what_is_left(arguments, run.folder)}")
        return FAILED_EXIT_CODE
    report(arguments, run, record)
    return code_of(record)


def run_rank(arguments: argparse.Namespace) -> int:
    """Train in this process, which is one rank of several. If one rank refuses, all ranks do."""
    with leaving_at_once("rda train"):
        import torch.distributed as dist

        from ..ranks.context import ContextParallel
        from ..training.agreement import Refusal, agree, join_ranks, on_first, together, values_of_all
        from ..training.loop import TrainingDiverged, train

    folder = Path()
    try:
        try:
            join_ranks(arguments.launched, timeout := timedelta(seconds=arguments.timeout))
            parallel = ContextParallel(exchange=arguments.exchange, timeout=timeout)
        except (ValueError, RuntimeError):
            prepare_checked(arguments)  # if this rank refuses the request, its refusal is the reason to show
            raise
        run = together(parallel, partial(prepare_checked, arguments))
        with ExitStack() as stack:
            # The first rank owns the folder, unless the launcher does. If the user named no folder, each rank has made
            # up a name: take that of the first rank.
            claim = nullcontext((run.folder, 0)) if arguments.launched else own(arguments, run, is_rank=True)
            folder = Path(on_first(parallel, lambda: str(stack.enter_context(claim)[0])))
            # An owner that was waited for may have saved once more.
            is_newest = find_checkpoint(run.folder) == run.checkpoint
            run = together(parallel, lambda: run if is_newest else prepare_checked(arguments))
            run = replace(run, folder=folder)
            agree(parallel, together(parallel, partial(fingerprint, run)))
            if are_meant(arguments) and not arguments.launched:  # rda's launcher counts itself
                # Each torchrun counts its own ranks' failures alone. The first start of a command counts anew.
                is_first = not any(values_of_all(parallel, os.environ.get(RESTART, "0") != "0"))
                on_first(parallel, partial(count_start, folder, anew=is_first))
            with StopRequest(watch_stdin=arguments.launched is not None, is_rank=True) as stop:
                record = train(run, parallel, stop)
                if parallel.rank == 0:
                    report(arguments, run, record)
                    (folder / STARTS_FILE).unlink(missing_ok=True)
        dist.destroy_process_group()
    except (Refusal, TrainingDiverged) as error:  # raised on every rank
        if str(error) and (isinstance(error, Refusal) or parallel.rank == 0):
            say(f"rda train: {error}")
        return USER_ERROR_EXIT_CODE
    except BrokenPipeError:
        raise  # the reader of stdout has gone
    except Exception as error:  # noqa: BLE001  `failed` raises unforeseen errors again
        return failed(error, arguments, folder)
    # `launch_ranks` reads the record.
    return 0 if arguments.launched else code_of(record)


def failed(error: Exception, arguments: argparse.Namespace, folder: Path) -> int:
    """Tell the user and the launcher why this rank ends. An unforeseen error is raised, with its traceback."""
    from ..ranks.link import ExchangeError

    who = f"rda train: rank {started().rank} on host {socket.gethostname()}"
    first_line = next(iter(str(error).splitlines()), type(error).__name__)
    is_lost = isinstance(error, RuntimeError) and LOST_CONNECTION.search(str(error)) is not None
    code, said = FAILED_EXIT_CODE, ""
    if isinstance(error, (ValueError, OSError)):
        code, reason = USER_ERROR_EXIT_CODE, in_words(error)
        said = f"{who}: {reason}"
    elif isinstance(error, ExchangeError) or is_lost:
        reason, said = LOST_ANOTHER, f"{who} lost another: {first_line}"
    elif is_out_of_memory(error):
        reason, said = NO_MEMORY, f"\n{who}: {NO_MEMORY}"  # "\n": another rank's progress bar may be on this line
    else:
        reason = f"{type(error).__name__}: {first_line}"
    if arguments.launched is not None:
        leave_reason(arguments.launched, reason)
    if not said:
        raise error
    # Each rank prints how to resume, since any rank may be lost.
    goes_on = code == FAILED_EXIT_CODE and arguments.launched is None and find_checkpoint(folder) is not None
    say(said + f"\nrda train: go on with: {train_command(arguments, '--resume', folder)}" * goes_on)
    return code


def report(arguments: argparse.Namespace, run: Run, record: dict[str, Any]) -> None:
    from ..training.run_report import summary, write_report, write_sample

    write_report(record)
    folder, steps, is_complete = record["run_folder"], record["steps_done"], record["status"] == "complete"
    if run.checkpoint is not None and step_of(run.checkpoint) == run.hyperparameters.total_steps:
        say(f"rda train: the run in {folder} is complete, all {steps} steps of it; only its report was made again")
    for_people = sys.stderr if arguments.json else sys.stdout
    print(summary(record), file=for_people)
    if is_complete:
        text, more = sample(folder, run.document, is_cut=run.fsdp and record["num_ranks"] > 1)
        if text:
            write_sample(record, text)
        onward = train_command(arguments, "--from", folder, "--steps", run.hyperparameters.steps_again)
        written = [text, f"more of it: {more}"] if text else [f"what it writes: {more}"]
        print(*written, f"more steps: {onward}", FROM, sep="\n", file=for_people)
        print(f'in Python: LongNetLM.from_run("{folder}")\nanother pattern: docs/generation.md', file=for_people)
    print(f"README.txt says what is in {folder}", file=for_people)
    if arguments.json:
        print(json.dumps(record))
    if not is_complete:
        say(f"saved at step {steps}; go on with: {train_command(arguments, '--resume', folder)}")
