"""`rda train`: from options to a finished run, in one process, under torchrun, or as the launcher of torchrun.

What can be refused is refused before any rank starts and before torch is imported.
"""

import argparse
import json
import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ..plan.exchange import EXCHANGES
from ..training.checkpoint import find_checkpoint
from ..training.interrupt import INTERRUPTED_EXIT_CODE, StopRequest
from ..training.launch import ABORTED, launch, under_torchrun
from ..training.options import Hyperparameters, add_hyperparameters
from ..training.run import RECORD_FILE, Run, prepare
from .generate import sample

USER_ERROR_EXIT_CODE = 2
PACKAGES = ("matplotlib", "numpy", "safetensors", "tqdm")
EXAMPLES = """examples:
  rda train                                     one process, Python's standard library as the document
  rda train --ranks 2                           the same over two processes that share every sequence
  rda train --data genome.fa --seq-len 65536    any files; FASTA headers are stripped
  rda train --segment-lengths 32768 --dilation-rates 1
                                                dense attention
  rda train --resume runs/20250131-120000       go on after Ctrl-C
  torchrun --nproc-per-node 2 -m ring_dilated_attention.commands.cli train
                                                under a launcher of your own, also over several hosts

The sequence is cut among the ranks; each holds its part of every activation. The run folder gets checkpoints
(safetensors and JSON), record.json and loss.png. Exit codes: 0 done, 2 refused, 130 interrupted and saved; under a
torchrun of your own they are the ranks' codes.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EXAMPLES
    parser.add_argument("--ranks", type=int, metavar="P", help="processes that share every sequence (default 1)")
    exchanges = ("auto", *(name for name in EXCHANGES if name != "simulated"))
    parser.add_argument("--exchange", choices=exchanges, default="auto", help="how chunks travel (default auto)")
    parser.add_argument("--activation-checkpointing", action="store_true", help="recompute blocks to save memory")
    parser.add_argument("--run-folder", type=Path, metavar="DIR", help="where to write (default runs/<date and time>)")
    parser.add_argument("--resume", type=Path, metavar="DIR", help="go on from the newest checkpoint of a run folder")
    parser.add_argument(
        "--save-every",
        type=int,
        default=30,
        metavar="N",
        help="steps between checkpoints; older ones are deleted (default 30)",
    )
    parser.add_argument("--json", action="store_true", help="print the record on stdout, all else on stderr")
    parser.add_argument("--launched", action="store_true", help=argparse.SUPPRESS)  # by `launch`, see interrupt.py
    add_hyperparameters(parser.add_argument_group("hyperparameters", "kept by a resumed run"))


def run(arguments: argparse.Namespace) -> int:
    try:
        check_packages()
        check_ranks(arguments.ranks)
        prepared = prepare(arguments)
        check_exchange(arguments.exchange, prepared.hyperparameters, num_ranks_of(arguments))
        if is_first_rank():
            prepared.folder.mkdir(parents=True, exist_ok=True)
    except (ValueError, OSError) as error:
        return refuse(error)
    if prepared.is_complete and is_first_rank() and not arguments.launched:
        print(
            f"rda train: the run in {prepared.folder} is complete, all {prepared.hyperparameters.steps} steps of it; "
            "only its report is made again",
            file=sys.stderr,
        )
    if (arguments.ranks or 1) > 1 and not under_torchrun():
        return launch_ranks(arguments, prepared)
    try:
        record = train_here(arguments, prepared)
    except ValueError as error:  # the library's word to its user; anything else keeps its traceback
        return refuse(error)
    if record["status"] == "complete":
        return 0
    # The launcher reads the record; from any other code torchrun would make a traceback.
    return 0 if arguments.launched else INTERRUPTED_EXIT_CODE


def check_packages() -> None:
    missing = [name for name in PACKAGES if find_spec(name) is None]
    if missing:
        raise ValueError(f"needs {', '.join(missing)}: pip install -e '.[train]' in a clone of the repository")


def check_ranks(num_ranks: int | None) -> None:
    if num_ranks is None:
        return
    if num_ranks < 1:
        raise ValueError(f"--ranks {num_ranks} must be at least 1")
    if under_torchrun() and num_ranks != int(os.environ["WORLD_SIZE"]):
        raise ValueError(
            f"--ranks {num_ranks}, but torchrun started WORLD_SIZE={os.environ['WORLD_SIZE']} ranks: leave --ranks out"
        )


def num_ranks_of(arguments: argparse.Namespace) -> int:
    return int(os.environ["WORLD_SIZE"]) if under_torchrun() else arguments.ranks or 1


def check_exchange(exchange: str, options: Hyperparameters, num_ranks: int) -> None:
    """What every rank would refuse when it attends for the first time."""
    config = options.model_config()
    num_kv_heads = config.num_heads if config.num_kv_heads is None else config.num_kv_heads
    if exchange == "all_to_all" and num_kv_heads % num_ranks:
        raise ValueError(
            f"--exchange all_to_all deals heads to ranks, and {num_kv_heads} key/value heads do not divide among "
            f"{num_ranks} ranks: {num_kv_heads} mod {num_ranks} = {num_kv_heads % num_ranks}. Choose --exchange ring, "
            "which takes any number"
        )


def launch_ranks(arguments: argparse.Namespace, run: Run) -> int:
    """Start the ranks and turn what became of them into an exit code."""
    folder = [] if arguments.resume else ["--run-folder", str(run.folder)]
    code = launch([*arguments.argv, *folder, "--launched"], arguments.ranks)
    if code != 0:
        reason = "stopped at once" if code == ABORTED else f"the ranks failed ({code}), their first message says why"
        checkpoint = find_checkpoint(run.folder)
        print(f"rda train: {reason}; newest checkpoint: {checkpoint or 'none'}", file=sys.stderr)
        return INTERRUPTED_EXIT_CODE if code == ABORTED else 1
    record = json.loads((run.folder / RECORD_FILE).read_text())
    return 0 if record["status"] == "complete" else INTERRUPTED_EXIT_CODE


def train_here(arguments: argparse.Namespace, run: Run) -> dict[str, Any]:
    """Train in this process: one of torchrun's ranks, or all there is. Returns the record."""
    import torch.distributed as dist

    from ..ranks.context import ContextParallel
    from ..training.loop import train
    from ..training.report import summary, write_report

    if under_torchrun():
        dist.init_process_group("gloo")
    with StopRequest(watch_stdin=arguments.launched, second_aborts=not under_torchrun()) as stop:
        record = train(run, ContextParallel(exchange=arguments.exchange), stop)
    if is_first_rank():
        write_report(record)
        print(summary(record), file=sys.stderr if arguments.json else sys.stdout)
        if record["status"] == "complete":
            print(sample(run.folder, run.document), file=sys.stderr if arguments.json else sys.stdout)
        if arguments.json:
            print(json.dumps(record))
        if record["status"] == "interrupted":
            ranks = f" --ranks {record['num_ranks']}" if arguments.ranks else ""
            print(
                f"saved at step {record['steps_done']}; go on with: rda train --resume {run.folder}{ranks}",
                file=sys.stderr,
            )
    if dist.is_initialized():
        dist.destroy_process_group()
    return record


def refuse(error: Exception) -> int:
    if is_first_rank():
        print(f"rda train: {error}", file=sys.stderr)
    return USER_ERROR_EXIT_CODE


def is_first_rank() -> bool:
    return os.environ.get("RANK", "0") == "0"
