"""`rda plan`: shows what each rank of an attention call would compute, send and hold, without a run. No torch."""

import argparse
import json
from collections.abc import Callable
from pathlib import Path

from ...forecast.call_cost import MOST_COMPARED, MOST_PLANNED, Counted, Way, count, forecast
from ...forecast.clock import Hardware
from ...forecast.exchanges import UncutJob, advice
from ...kernels.traits import TRAITS
from ...plan.collection import without_collection
from ...plan.exchange import EXCHANGES, Choice, choice_by
from ...plan.job import Job
from ...plan.sharding import SHARDINGS, WITHOUT_DOCUMENTS, shard_length, sharding_of
from ...plan.sizes import Sizes
from ..hardware import add_hardware_options, machine_for
from ..numbers import count as whole_number
from ..output import progress_bar, wrapped
from . import report
from .figures import check_picture, draw
from .job_options import add_call, call_of, documents_of

MOST_DEALT = 2**17  # documents times ranks squared
EXAMPLES = f"""examples:
  rda plan --seq-len 1Mi --ranks 8 --segment-lengths 2Ki 64Ki 1Mi \\
           --dilation-rates 1 16 256
      which branches stay at home and which travel: with shards of 131,072
      positions only the longest branch travels
  rda plan --seq-len 128Ki --ranks 4 --segment-lengths 128Ki \\
           --dilation-rates 1 --causal
      dense ring attention; the last rank has seven times the work of the first
  the same with
      --sharding zigzag           balanced
      --documents 100000 31072    packed; the shardings are compared on them
      --picture docs              also draws the pattern and the ring
      --dtype bfloat16 --hardware h100-infiniband --flops 500e12 --latency 20e-6
                                  how long a step takes, and how much of it each
                                  rank waits, where kernels reach 500 TFLOPS

One attention call, forward and backward; rda plan model plans a whole model, and rda plan compare compares exchanges.
The time is a model: a rank computes at --flops, and sends and receives at --bandwidth each. The rates of presets are
presumed; rda doctor --save FILE.toml measures those of your machines. With more than {MOST_PLANNED} ranks, memory and
time are estimates, marked "about". docs/planning.md says what is counted, and how far off estimates may be.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_call(parser)
    add = parser.add_argument
    exchange_help = "how chunks travel (default auto: chosen, with the reason)"
    add("--exchange", choices=("auto", *EXCHANGES), default="auto", help=exchange_help)
    sharding_help = "who owns what (default contiguous). On up to 4,096 ranks others are compared with it"
    add("--sharding", choices=SHARDINGS, default="contiguous", help=sharding_help)
    add("--align", type=whole_number, default=1, metavar="A", help="borders of shards at multiples of A")
    documents_help = "lengths of packed documents, which add up to --seq-len"
    add("--documents", type=whole_number, nargs="+", metavar="N", help=documents_help)
    add_hardware_options(parser)
    picture_help = "draw the pattern and the ring into a folder, or as NAME.png and NAME-ring.png"
    add("--picture", type=Path, metavar="PATH", help=picture_help)


@without_collection()
def run(arguments: argparse.Namespace) -> int:
    """Print the plan. Raises ValueError for a call that is not possible."""
    call, machine = call_of(arguments), machine_for(arguments)
    job, hardware = job_of(call, arguments), None if machine is None else machine.hardware
    if arguments.picture is not None:
        check_picture(arguments.picture)
    is_compared = 1 < job.num_ranks <= MOST_COMPARED
    times = 1 + is_compared * (len(_comparable(job)) - 1 + (hardware is not None))
    with progress_bar(job.num_ranks * times, "rank", delay=2) as bar:
        counted, choice = counted_of(job, call.sizes, arguments.exchange, bar.update)
        traits, way = TRAITS[arguments.kernel], counted.way
        said = forecast(job, way, call.sizes, traits=traits, hardware=hardware, counted=counted)
        found = report.of_each(said, call.sizes) if said.is_planned else report.of_many(said, job.num_ranks, call.sizes)
        if hardware is not None:
            if said.step is not None:
                found["model"] = report.model_json(said.step, hardware)
            found["advice"] = advice(job, way, call.sizes, said, hardware, bar.update)
        found["exchange"] = choice._asdict()
        found["shardings"] = compared(call, counted, hardware, bar.update) if is_compared else []
    if arguments.json:
        print(json.dumps(found, indent=1))
    else:
        lengths = arguments.documents or [arguments.seq_len]
        print(wrapped(job.pattern.explain(arguments.heads, lengths)))
        print(report.text(found, machine))
    if arguments.picture is not None:
        draw(arguments.picture, job, choice.exchange)
    return 0


def job_of(call: UncutJob, arguments: argparse.Namespace) -> Job:
    documents = documents_of(arguments)
    if not sharding_of(arguments.sharding).takes_lengths and arguments.align != 1:
        raise ValueError(f"--align {arguments.align} is for contiguous shards; {arguments.sharding}'s are near-equal")
    if sharding_of(arguments.sharding).needs_documents and (documents is None or call.num_ranks > MOST_PLANNED):
        raise ValueError(f"--sharding {arguments.sharding} needs --documents, and at most {MOST_PLANNED} ranks")
    job = call.job(arguments.sharding, align=arguments.align, documents=documents)
    if empty := sum(not shard_length(shard) for shard in job.shards):
        left = f"{empty:,} of {job.num_ranks:,} ranks without positions"
        cause = f"--sharding {arguments.sharding}" if arguments.align == 1 else f"--align {arguments.align}"
        raise ValueError(f"{cause} leaves {left}: choose fewer ranks, or a smaller --align")
    return job


def counted_of(job: Job, sizes: Sizes, asked_for: str, step: Callable[[], object]) -> tuple[Counted, Choice]:
    """The counts of all ranks, and the exchange: the one asked for, or the one that a call would choose."""
    if job.num_ranks > 1 and asked_for != "auto":
        return count(job, Way(asked_for), step), Choice(asked_for, "asked for")
    undealt = count(job, Way(), step)
    if job.num_ranks == 1:
        return undealt, Choice("none", "one rank: nothing to send")
    choice = choice_by(undealt.places[0].counted, job, sizes)
    way = Way(choice.exchange)
    return count(job, way, step) if way.is_dealt else undealt._replace(way=way), choice


def _comparable(job: Job) -> list[str]:
    """The shardings to compare. zigzag_documents makes each document a ring of all ranks, which takes long to plan."""
    most = MOST_DEALT // job.num_ranks**2 if job.num_ranks <= MOST_PLANNED else 0
    return list(SHARDINGS) if 2 < len(job.documents or ()) <= most else WITHOUT_DOCUMENTS


def compared(call: UncutJob, counted: Counted, hardware: Hardware | None, step: Callable[[], object]) -> list[dict]:
    """Figures of every sharding. No sharding is always best: zigzag is worse for causal w = 0.6 n on 4 ranks."""
    found = []
    for sharding in _comparable(counted.job):
        job = call.job(sharding, documents=counted.job.documents)
        same = counted if job == counted.job else None
        row = forecast(job, counted.way, call.sizes, hardware=hardware, counted=same, step=step)
        seconds, figures = row.time and row.seconds, {"balance": row.balance, "sent_bytes": row.sent_bytes}
        found.append({"sharding": sharding, **figures, "step_seconds": seconds})
    return found
