"""`python -m benchmarks gpu`: runs one part after the other, each in a process of its own.

The record is written anew after each part.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch

from ring_dilated_attention.commands.local_ranks import Launch, RankFailedError, Worker, run_ranks

from ..parts import Part, Row, failed_row, folder_of, parser_of, print_rows, run_parts
from .right import beyond, card, one_rank, run_tests
from .settings import QUICK, Settings
from .speed import memory, model, ops, share, small

SUMMARY = "one GPU: right, how fast, how much memory (make gpu)"
NAME = "gpu"


def reported(
    settings: Settings, seconds: float, function: Callable[[Worker, Settings], None]
) -> list[Row]:
    """Run a function in a new process. Returns the rows that it reported, and a row for its failure if it failed.

    seconds: after this time the process is ended, which counts as a failure.
    """
    rows: list[Row] = []
    launch = Launch(1, num_threads=torch.get_num_threads(), seconds=seconds)
    try:
        run_ranks(launch, function, settings, on_report=lambda rank, row: rows.append(row))
    except RankFailedError as error:
        rows.append(failed_row(error))
    return rows


def tested(settings: Settings, seconds: float) -> list[Row]:
    """The tests of the kernels: values and gradients of all features, poisoned memory, streams, graphs, compilation."""
    return run_tests(settings, seconds, settings.tests)


def shared(settings: Settings, seconds: float) -> list[Row]:
    """The tests of two processes on one card. Their messages go through the host's memory."""
    return run_tests(settings, seconds, settings.tests_of_ranks)


# Each part with its limit in seconds. All limits together are less than nine minutes. Up to the end of "share" they are
# five.
PARTS = (
    Part("card", 25, partial(reported, function=card)),
    Part("right", 90, tested),
    Part("ops", 40, partial(reported, function=ops)),
    Part("beyond", 35, partial(reported, function=beyond)),
    Part("share", 110, partial(reported, function=share)),
    Part("memory", 30, partial(reported, function=memory)),
    Part("small", 40, partial(reported, function=small)),
    Part("ranks", 70, shared),
    Part("nccl", 20, partial(reported, function=one_rank)),
    Part("model", 50, partial(reported, function=model)),
)


def main(words: Sequence[str]) -> int:
    names = [part.name for part in PARTS]
    description = f"Measure {SUMMARY}. It takes nine minutes at most."
    parser = parser_of(NAME, description, "tiny sizes on a CPU")
    parts_help = f"of {', '.join(names)} (default: all)"
    parser.add_argument("parts", nargs="*", metavar="PART", help=parts_help)
    arguments = parser.parse_args(words)
    for name in arguments.parts:
        if name not in names:
            raise ValueError(f"unknown part {name!r}; choose from {', '.join(names)}")
    why_not = None
    if not torch.cuda.is_available():
        why_not = "needs a CUDA GPU, and torch sees none; --quick rehearses on a CPU"
    folder = folder_of(NAME, arguments, why_not)
    parts = [part for part in PARTS if part.name in (arguments.parts or names)]
    settings = Settings()
    if arguments.quick:
        settings = QUICK
        # The limits are for a card. A rehearsal may have to share its cores.
        parts = [part._replace(seconds=10 * part.seconds) for part in parts]
    rows = run_parts(NAME, parts, settings, folder, is_quick=arguments.quick)
    return print_rows(rows)
