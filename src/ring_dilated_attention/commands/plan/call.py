"""`rda plan`: what each rank would compute, send and hold, without computing, sending or holding it. No torch."""

import argparse
import json
from pathlib import Path
from typing import Any, NamedTuple

from ...forecast.advice import advice
from ...forecast.call import MOST_PLANNED, Counted, Figures, Time, Way, all_plans, count, exposed_of, forecast, step_of
from ...forecast.clock import StepTime
from ...forecast.ledger import attention_memory
from ...kernels.traits import TRAITS
from ...pattern import DilatedPattern
from ...plan.exchange import EXCHANGES, Choice, choice_by
from ...plan.job import Job
from ...plan.sharding import SHARDINGS, default_lengths, make_shards
from ...plan.sizes import Sizes
from ..hardware import Machine, machine_for
from ..hardware import add_options as add_hardware_options
from ..limits import check_ranks_fit
from ..numbers import count as whole_number
from ..output import progress_bar, wrapped
from . import report
from .figures import check_picture, draw
from .options import (
    add_call,
    add_head_dim,
    answered,
    check_shards,
    complete,
    documents_of,
    pattern_of,
    sizes_of,
)

EXAMPLES = f"""examples:
  rda plan --seq-len 1Mi --ranks 8 --segment-lengths 2Ki 64Ki 1Mi --dilation-rates 1 16 256
        which branches stay at home and which travel: with shards of 131,072 positions only the longest one travels
  rda plan --seq-len 131072 --ranks 4 --segment-lengths 131072 --dilation-rates 1 --causal
        dense ring attention; the last rank has seven times the work of the first
  rda plan --seq-len 131072 --ranks 4 --segment-lengths 131072 --dilation-rates 1 --causal --sharding zigzag
        the same, balanced
  rda plan --seq-len 65536 --ranks 2 --segment-lengths 2048 65536 --dilation-rates 1 16 --picture docs
        also draws the pattern and the ring
  rda plan --seq-len 131072 --ranks 4 --segment-lengths 131072 --dilation-rates 1 --causal --documents 100000 31072
        packed documents; the shardings are compared on them
  rda plan --seq-len 131072 --ranks 8 --segment-lengths 131072 --dilation-rates 1 --causal --sharding zigzag \\
           --dtype bfloat16 --hardware h100-infiniband --flops 500e12 --latency 20e-6
        how long a step takes, and how much of it each rank waits, where kernels reach 500 TFLOPS

One attention call, forward and backward; a whole model is planned by rda plan model, and exchanges are compared by
rda plan compare. FLOPs count the pairs of the pattern (2 products forward, 5 backward). Memory counts the rank's query,
key, value and out, their gradients, the buffers of the ring and the kernel's partials. The time is a model: a rank
computes at --flops, and sends and receives at --bandwidth each. Presets are rates that kernels and links were seen to
reach, printed with their source; rda doctor --save FILE.toml measures those of your machines.

Up to {MOST_PLANNED} ranks are planned one by one. Of more the work and the received bytes are counted exactly; memory
and time are estimates, and are marked "about" (docs/planning.md says how far off they may be).
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EXAMPLES
    add_call(parser)
    add_head_dim(parser)
    parser.add_argument(
        "--exchange",
        choices=("auto", *EXCHANGES),
        default="auto",
        help="how chunks travel (default auto: chosen, with the reason)",
    )
    parser.add_argument("--sharding", choices=SHARDINGS, default="contiguous", help="who owns which positions")
    parser.add_argument(
        "--align", type=whole_number, default=1, metavar="A", help="borders of shards at multiples of it"
    )
    parser.add_argument(
        "--documents",
        type=whole_number,
        nargs="+",
        metavar="N",
        help="lengths of packed documents, which add up to --seq-len",
    )
    add_hardware_options(parser)
    parser.add_argument(
        "--picture",
        type=Path,
        metavar="PATH",
        help="draw the pattern and the ring into a folder, or as NAME.png and NAME-ring.png",
    )


def run(arguments: argparse.Namespace) -> int:
    return answered(lambda: answer(arguments))


class Asked(NamedTuple):
    """An attention call, and what is asked about it. asked_for: the exchange, or "auto"."""

    job: Job
    sharding: str
    asked_for: str
    sizes: Sizes
    kernel: str
    machine: Machine | None

    def with_sharding(self, sharding: str) -> Job:
        """The same over near-equal shards."""
        lengths = default_lengths(sharding, self.job.seq_len, self.job.num_ranks)
        return self.job._replace(shards=make_shards(sharding, lengths))


def answer(arguments: argparse.Namespace) -> None:
    """Print what is asked.

    Raises:
        ValueError: for a call that cannot be.
    """
    asked = asked_of(arguments)
    if arguments.picture is not None:
        check_picture(arguments.picture)
    found = figures(asked)
    if arguments.json:
        print(json.dumps(found, indent=1))
    else:
        lengths = arguments.documents or [arguments.seq_len]
        print(wrapped(asked.job.pattern.explain(arguments.heads, lengths)))
        print(report.text(found, asked.machine))
    if arguments.picture is not None:
        draw(arguments.picture, asked.job, found["exchange"]["exchange"])


def asked_of(arguments: argparse.Namespace) -> Asked:
    complete(arguments)
    arguments.ranks = 1 if arguments.ranks is None else arguments.ranks
    pattern, machine = pattern_of(arguments), machine_for(arguments)
    check_ranks_fit(arguments.ranks, arguments.seq_len)
    documents = documents_of(arguments)
    if arguments.sharding == "zigzag" and arguments.align != 1:
        raise ValueError(f"--align {arguments.align} is for contiguous shards; zigzag's are near-equal")
    lengths = default_lengths(arguments.sharding, arguments.seq_len, arguments.ranks, arguments.align)
    shards = make_shards(arguments.sharding, lengths)
    check_shards(shards, arguments.align)
    job = Job(pattern, shards, arguments.heads, arguments.kv_heads, documents)
    sizes, kernel = sizes_of(arguments), arguments.kernel
    return Asked(job, arguments.sharding, arguments.exchange, sizes, kernel, machine)


def figures(asked: Asked) -> dict[str, Any]:
    """All that is printed, as JSON has it."""
    job, hardware = asked.job, None if asked.machine is None else asked.machine.hardware
    with progress_bar(job.num_ranks * len(SHARDINGS), "rank", delay=2) as bar:
        counted, choice = counted_of(asked, bar.update)
        if job.num_ranks <= MOST_PLANNED:
            found, said = _each_rank(asked, counted)
        else:
            traits = TRAITS[asked.kernel]
            said = forecast(job, counted.way, asked.sizes, traits=traits, hardware=hardware, counted=counted)
            found = report.of_many(said, job, asked.sizes)
        shardings = compared(asked, counted, bar.update) if job.num_ranks > 1 else []
    found |= {"exchange": choice._asdict(), "shardings": [row._asdict() for row in shardings]}
    if hardware is not None:
        found["advice"] = advised(asked, counted.way, said)
    return found


def counted_of(asked: Asked, step: Any) -> tuple[Counted, Choice]:
    """All ranks, counted, and the exchange that was asked for or that a call would choose."""
    if asked.asked_for == "auto" and asked.job.num_ranks > 1:
        ring = count(asked.job, Way(), step)
        choice = choice_by(ring.rings[0].counted, asked.job, asked.sizes)
        if choice.exchange != "all_to_all":
            return ring._replace(way=Way(choice.exchange)), choice
    elif asked.job.num_ranks == 1:
        return count(asked.job, Way(), step), Choice("none", "one rank: nothing to send")
    else:
        choice = Choice(asked.asked_for, "asked for")
    return count(asked.job, Way(choice.exchange), step), choice


def _each_rank(asked: Asked, counted: Counted) -> tuple[dict[str, Any], Figures]:
    """By the plans of all ranks."""
    plans = all_plans(asked.job, counted.way)
    memories = [attention_memory(x.plan, asked.sizes, TRAITS[asked.kernel], x.dealing) for x in plans]
    rows = report.rank_rows(plans, memories, asked.sizes)
    figures = forecast(asked.job, counted.way, asked.sizes, counted=counted)
    found = report.of_each(rows, memories, figures, asked.sizes, is_dealt=counted.way.is_dealt)
    if asked.machine is not None:
        step: StepTime = step_of(plans, asked.sizes, asked.machine.hardware)
        found["model"] = report.model_json(step, asked.machine.hardware)
        figures = figures._replace(time=Time(step.step_seconds), exposed=exposed_of(step))
    return found, figures


def advised(asked: Asked, way: Way, said: Figures) -> str | None:
    assert asked.machine is not None
    hardware = asked.machine.hardware

    def again(pattern: DilatedPattern) -> Time | None:
        return forecast(asked.job._replace(pattern=pattern), way, asked.sizes, hardware=hardware).time

    return advice(asked.job, way, asked.sizes, said, again)


def compared(asked: Asked, counted: Counted, step: Any) -> list[report.ShardingRow]:
    """Every sharding of the same sequence: none is always better (zigzag is not for causal w = 0.6 n on 4 ranks)."""
    hardware, found = None if asked.machine is None else asked.machine.hardware, []
    for sharding in SHARDINGS:
        job = asked.with_sharding(sharding)
        same = counted if job == asked.job else None
        row = forecast(job, counted.way, asked.sizes, hardware=hardware, counted=same, step=step)
        seconds = None if row.time is None else row.time.seconds
        found.append(report.ShardingRow(sharding, row.balance, row.sent_bytes, seconds))
    return found
