"""`rda plan`: what each rank would compute, send and hold, without computing, sending or holding it. No torch."""

import argparse
import json
import sys
from itertools import accumulate
from pathlib import Path

from ..kernels.traits import TRAITS
from ..pattern import PHASE_RULES, DilatedPattern
from ..plan.advice import Waiting, advice, exposed_of
from ..plan.clock import Bounds, Hardware, StepTime, model_step
from ..plan.exchange import EXCHANGES, Choice, RankPlan, choose_exchange, plan_exchange
from ..plan.job import Job
from ..plan.lockstep import EqualJob
from ..plan.memory import AttentionMemory, Sizes, attention_memory
from ..plan.sharding import SHARDINGS, Shard, default_lengths, make_shards
from ..plan.sharing import branch_shares
from . import plan_alternatives, plan_model
from .figures import draw, draw_counted, why_no_ring
from .hardware import ITEMSIZE, Machine, described, machine_for
from .hardware import add_options as add_hardware_options
from .limits import check_ranks_fit
from .numbers import count
from .output import progress_bar
from .plan_checks import (
    check_documents,
    check_numbers,
    check_picture,
    check_shards,
    check_together,
    check_work,
    complete,
)
from .plan_large import (
    MOST_COMPARED,
    MOST_SECONDS,
    Large,
    add_options,
    closed,
    sampled,
    say_before,
    seconds_of_counting,
    seconds_of_planning,
    text,
    with_exchange,
)
from .plan_report import (
    MOST_ROWS,
    BranchRow,
    RankRow,
    ShardingRow,
    as_json,
    branch_lines,
    model_json,
    model_line,
    sharding_lines,
    summary,
    table,
)
from .sketch import shares_of_form

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

  rda plan --seq-len 1Mi --ranks 8 --segment-lengths 2Ki 128Ki 1Mi --dilation-rates 1 16 64 --causal --heads 16 \\
           --head-dim 128 --dtype bfloat16 --hardware h100-infiniband --alternatives
        the same by ring, all-gather, all-to-all and both, on both shardings, and dense; which to take, and why
  rda plan --layers 24 --embed-dim 2048 --heads 16 --vocab 32K --seq-len 1Mi --mesh 8x8 --segment-lengths 2Ki 128Ki \\
           --dilation-rates 1 16 --causal --dtype bfloat16 --hardware h100-infiniband --tokens 1e11
        a whole model: memory by part, with activations kept, checkpointed and offloaded; days; what would fit

One attention call, forward and backward. FLOPs count the pairs of the pattern (2 products forward, 5 backward); memory
counts the rank's query, key, value and out, their gradients, the buffers of the ring and the kernel's partials. The
time is a model: the ring loop of all ranks in virtual time, where a rank computes at --flops and sends and receives at
--bandwidth each. Presets are rates that kernels and links were seen to reach, printed with their source; rda doctor
--save FILE.toml measures those of your machines.

Closed forms answer for many ranks at once, up to 65,536 and more, where shards are equal and each segment length
divides a shard or is a multiple of it (docs/planning.md has the rest). Of other jobs every rank is planned, if there
are at most {MOST_COMPARED} or that takes at most {MOST_SECONDS} s; else some are, and the figures are marked as bounds.
--every-rank plans them all.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EXAMPLES
    parser.add_argument("--seq-len", type=count, metavar="N", help="positions of the whole sequence")
    parser.add_argument("--ranks", type=count, metavar="P", help="ranks that share it (default 1)")
    parser.add_argument("--segment-lengths", type=count, nargs="+", metavar="W", help="one per branch")
    parser.add_argument("--dilation-rates", type=count, nargs="+", metavar="R", help="one per branch")
    parser.add_argument("--causal", action="store_true", help="a query sees no later key")
    parser.add_argument("--phase", choices=PHASE_RULES, default="modulo", help="which phase a head reads")
    parser.add_argument("--split-heads", action="store_true", help="each branch has heads of its own")
    parser.add_argument("--batch", type=count, default=1, metavar="B", help="sequences at a time (default 1)")
    parser.add_argument("--heads", type=count, metavar="H", help="query heads (default 12)")
    parser.add_argument("--kv-heads", type=count, metavar="G", help="key/value heads (default as many)")
    parser.add_argument("--head-dim", type=count, metavar="D", help="default 64")
    parser.add_argument("--dtype", choices=ITEMSIZE, default="float32", help="of query, key and value")
    parser.add_argument(
        "--kernel",
        choices=TRAITS,
        default="cpu",
        help="for the memory: what computes (default cpu; triton-fused serves one rank)",
    )
    parser.add_argument(
        "--exchange",
        choices=("auto", *EXCHANGES),
        default="auto",
        help="how chunks travel (default auto: chosen, with the reason)",
    )
    parser.add_argument("--sharding", choices=SHARDINGS, default="contiguous", help="who owns which positions")
    parser.add_argument("--align", type=count, default=1, metavar="A", help="borders of shards at multiples of it")
    parser.add_argument(
        "--documents", type=count, nargs="+", metavar="N", help="lengths of packed documents, which add up to --seq-len"
    )
    add_hardware_options(parser)
    add_options(parser)
    parser.add_argument("--alternatives", action="store_true", help="by every exchange and sharding, side by side")
    plan_model.add_options(parser)
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")
    parser.add_argument("--picture", type=Path, metavar="DIR", help="draw the pattern and the ring into a folder")


def run(arguments: argparse.Namespace) -> int:
    try:
        is_model = plan_model.is_asked_for(arguments)
        check_together(arguments, is_model=is_model)
        if is_model:
            plan_model.fill_in(arguments)
        complete(arguments)
        check_numbers(arguments)
        pattern, machine = pattern_of(arguments), machine_for(arguments)
        if is_model:
            print_model(arguments, pattern, machine)
        else:
            call(arguments, pattern, machine)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def call(arguments: argparse.Namespace, pattern: DilatedPattern, machine: Machine | None) -> None:
    """Print what is asked about one attention call."""
    arguments.ranks = 1 if arguments.ranks is None else arguments.ranks
    check_ranks_fit(arguments.ranks, arguments.seq_len)
    check_documents(arguments)
    check_picture(arguments)
    if arguments.alternatives:
        print_alternatives(arguments, pattern, machine)
        return
    shards = split(arguments, arguments.seq_len)
    check_shards(shards, arguments.align)
    large = large_of(pattern, shards, arguments)
    is_small = arguments.ranks <= MOST_COMPARED and not large.answers_at_once()
    is_planned = arguments.every_rank or is_small
    if is_planned or is_drawn_from_plans(large, arguments):
        seconds = seconds_of_planning(large)
        if not is_planned and seconds > MOST_SECONDS:
            print("--picture takes the plan of every rank here: without it there are figures sooner", file=sys.stderr)
        say_before(seconds, large, is_sampled=False)
    elif print_large(large, machine, arguments):
        return
    check_work(pattern, arguments)
    exchange = exchange_of(pattern, shards, arguments)
    print_each(arguments, pattern, shards, exchange, machine)
    if arguments.picture is not None:
        heads = heads_and_documents(arguments)[:2]
        say_drawn(draw(arguments.picture, pattern, shards, heads, exchange.exchange), arguments, exchange.exchange)


def is_drawn_from_plans(large: Large, arguments: argparse.Namespace) -> bool:
    """Whether a picture is asked for that closed forms cannot tell."""
    if arguments.picture is None:
        return False
    exchange = large.exchange if arguments.exchange == "auto" else arguments.exchange
    large = large._replace(exchange=exchange)
    return why_no_ring(large.job.num_ranks, exchange) is None or large.obstacle() is not None


def say_drawn(paths: list[Path], arguments: argparse.Namespace, exchange: str) -> None:
    print(*paths, sep="\n", file=sys.stderr)
    if (why := why_no_ring(arguments.ranks, exchange)) is not None:
        print(f"no ring.png: {why}", file=sys.stderr)


def print_each(
    arguments: argparse.Namespace,
    pattern: DilatedPattern,
    shards: tuple[Shard, ...],
    exchange: Choice,
    machine: Machine | None,
) -> None:
    """The plan of every rank: its rows, what each branch sends, the step's time, and the shardings compared."""
    hardware = None if machine is None else machine.hardware
    plans = make_plans(pattern, shards, exchange.exchange, arguments)
    memories = [attention_memory(x.plan, sizes_of(arguments), TRAITS[arguments.kernel], x.dealing) for x in plans]
    rows = rank_rows(plans, memories, arguments)
    branches = branch_rows(pattern, shards, plans, arguments)
    step = step_of(plans, arguments, hardware)
    # Planning many ranks once more for each sharding takes minutes, and the comparison says little new there.
    is_compared = 1 < arguments.ranks <= MOST_COMPARED
    compared = compare_shardings(pattern, exchange.exchange, arguments, hardware) if is_compared else []
    said = None if step is None else advised(pattern, exchange.exchange, step, branches, arguments, hardware)
    if arguments.json:
        found = as_json(rows, memories, branches) | {"shardings": [row._asdict() for row in compared]}
        found["exchange"] = exchange._asdict()
        found |= {} if step is None else {"model": model_json(step, hardware), "advice": said}
        print(json.dumps(found, indent=1))
        return
    print(pattern.explain(arguments.heads, arguments.documents or [arguments.seq_len]))
    print(table(rows, step))
    print(summary(rows, memories))
    if arguments.ranks > 1:
        print(f"exchange: {exchange.exchange}: {exchange.reason}")
        print(branch_lines(branches, is_dealt=exchange.exchange == "all_to_all"))
    if step is not None and machine is not None:
        print(described(machine.hardware, machine.source))
        print(model_line(step))
        print_if_any(said)
    if compared:
        print(sharding_lines(compared))


def large_of(pattern: DilatedPattern, shards: tuple[Shard, ...], arguments: argparse.Namespace) -> Large:
    documents = heads_and_documents(arguments)[2]
    return Large(job_of(pattern, arguments), shards, arguments.sharding, documents, arguments.kernel)


def job_of(pattern: DilatedPattern, arguments: argparse.Namespace) -> EqualJob:
    heads = heads_and_documents(arguments)[:2]
    return EqualJob(pattern, arguments.seq_len, arguments.ranks, *heads, sizes_of(arguments))


def print_large(large: Large, machine: Machine | None, arguments: argparse.Namespace) -> bool:
    """Print the figures of a job of many ranks without planning each; False if that takes no longer."""
    hardware = None if machine is None else machine.hardware
    large, choice = with_exchange(large, arguments.exchange)
    if large.obstacle() is None:
        say_before(seconds_of_counting(large), large, is_sampled=False)
        found = closed(large, hardware)
    else:
        seconds = seconds_of_planning(large)
        is_sampled = seconds > MOST_SECONDS
        say_before(seconds, large, is_sampled=is_sampled)
        if not is_sampled:
            return False
        found = sampled(large, hardware)
    found["exchange"] = choice._asdict() if choice.reason else found["auto"]
    if arguments.json:
        print(json.dumps(found, indent=1))
    else:
        print(large.job.pattern.explain(arguments.heads, arguments.documents or [arguments.seq_len]))
        print(text(large, found))
        if machine is not None:
            print(described(machine.hardware, machine.source))
            print_if_any(found["advice"])
    if arguments.picture is not None:  # never of a sample: `is_drawn_from_plans`
        job, shares = large.job, shares_of_form(large.form)
        paths = draw_counted(arguments.picture, job.pattern, large.shards, job.num_heads, shares, large.exchange)
        say_drawn(paths, arguments, large.exchange)
    return True


def print_if_any(said: str | None) -> None:
    if said is not None:
        print(said)


def pattern_of(arguments: argparse.Namespace) -> DilatedPattern:
    return DilatedPattern(
        arguments.segment_lengths,
        arguments.dilation_rates,
        is_causal=arguments.causal,
        phase=arguments.phase,
        heads="split" if arguments.split_heads else "all",
    )


def print_model(arguments: argparse.Namespace, pattern: DilatedPattern, machine: Machine | None) -> None:
    question = plan_model.asked(arguments, pattern, machine)
    found = plan_model.figures(question)
    print(json.dumps(found, indent=1) if arguments.json else plan_model.text(question, found))


def print_alternatives(arguments: argparse.Namespace, pattern: DilatedPattern, machine: Machine | None) -> None:
    if machine is None:
        raise ValueError("--alternatives compares times: give --hardware, or --flops and --bandwidth")
    job = job_of(pattern, arguments)
    memory_bytes = arguments.memory or machine.memory_bytes
    found = plan_alternatives.found_for(
        job, machine.hardware, machine.source, TRAITS[arguments.kernel], memory_bytes, every_rank=arguments.every_rank
    )
    print(json.dumps(found, indent=1) if arguments.json else plan_alternatives.text(found))


def split(arguments: argparse.Namespace, seq_len: int) -> tuple[Shard, ...]:
    """The default split of a sequence, as `ContextParallel` makes it."""
    return make_shards(
        arguments.sharding, default_lengths(arguments.sharding, seq_len, arguments.ranks, arguments.align)
    )


def exchange_of(pattern: DilatedPattern, shards: tuple[Shard, ...], arguments: argparse.Namespace) -> Choice:
    """The exchange that was asked for, or that a call would choose, and why."""
    if arguments.ranks == 1:
        return Choice("none", "one rank: nothing to send")
    if arguments.exchange != "auto":
        return Choice(arguments.exchange, "asked for")
    return choose_exchange(Job(pattern, shards, *heads_and_documents(arguments)), sizes_of(arguments))


def sizes_of(arguments: argparse.Namespace) -> Sizes:
    return Sizes(arguments.batch, arguments.head_dim, ITEMSIZE[arguments.dtype])


def make_plans(
    pattern: DilatedPattern, shards: tuple[Shard, ...], exchange: str, arguments: argparse.Namespace
) -> list[RankPlan]:
    """Every rank's plan. A ring of a thousand ranks takes a moment for each, so that many show their progress."""
    others = heads_and_documents(arguments)
    plans = []
    with progress_bar(len(shards), "rank", is_shown=len(shards) > MOST_ROWS) as bar:
        for rank in range(len(shards)):
            plans.append(plan_exchange(exchange, Job(pattern, shards, *others), rank))
            bar.update()
    return plans


def heads_and_documents(arguments: argparse.Namespace) -> tuple[int, int, tuple[int, ...] | None]:
    """Query heads, key/value heads, and borders of documents, as a plan takes them."""
    num_kv_heads = arguments.heads if arguments.kv_heads is None else arguments.kv_heads
    documents = None if arguments.documents is None else tuple(accumulate(arguments.documents, initial=0))
    return arguments.heads, num_kv_heads, documents


def step_of(plans: list[RankPlan], arguments: argparse.Namespace, hardware: Hardware | None) -> StepTime | None:
    if hardware is None:
        return None
    dealings = [x.dealing for x in plans if x.dealing is not None]
    return model_step([x.plan for x in plans], sizes_of(arguments), hardware, dealings or None)


def advised(
    pattern: DilatedPattern,
    exchange: str,
    step: StepTime,
    branches: list[BranchRow],
    arguments: argparse.Namespace,
    hardware: Hardware | None,
) -> str | None:
    def again(other: DilatedPattern) -> Bounds:
        plans = make_plans(other, split(arguments, arguments.seq_len), exchange, arguments)
        then = step_of(plans, arguments, hardware)
        assert then is not None
        return Bounds.exactly(then.step_seconds)

    sent = [row.forward_sent_bytes for row in branches]
    waiting = Waiting(exposed_of(step), Bounds.exactly(step.step_seconds), sent, is_dealt=exchange == "all_to_all")
    borders = heads_and_documents(arguments)[2] or (0, arguments.seq_len)
    return advice(pattern, arguments.heads, borders, waiting, again)


def rank_rows(plans: list[RankPlan], memories: list[AttentionMemory], arguments: argparse.Namespace) -> list[RankRow]:
    batch, head_dim = arguments.batch, arguments.head_dim
    flops = [sum(x.plan.flops(batch, head_dim, backward=backward) for backward in (False, True)) for x in plans]
    rows = []
    for rank, (rank_plan, memory, work) in enumerate(zip(plans, memories, flops, strict=True)):
        sent = [rank_plan.bytes_sent(sizes_of(arguments), backward=backward) for backward in (False, True)]
        rows.append(
            RankRow(
                rank=rank,
                positions=rank_plan.num_rows,
                flops=work,
                share=work / sum(flops) if sum(flops) else 0.0,
                forward_sent_bytes=sent[0],
                sent_bytes=sum(sent),
                forward_peak_bytes=memory.forward.num_bytes,
                peak_bytes=memory.forward_backward.num_bytes,
            )
        )
    return rows


def branch_rows(
    pattern: DilatedPattern, shards: tuple[Shard, ...], plans: list[RankPlan], arguments: argparse.Namespace
) -> list[BranchRow]:
    """What each branch sends, in bytes."""
    row_bytes = arguments.batch * arguments.head_dim * ITEMSIZE[arguments.dtype]
    shares = branch_shares(Job(pattern, shards, *heads_and_documents(arguments)), [x.plan for x in plans])
    return [
        BranchRow(share.segment_length, share.dilation_rate, share.num_sharing, share.sent * row_bytes)
        for share in shares
    ]


def compare_shardings(
    pattern: DilatedPattern, exchange: str, arguments: argparse.Namespace, hardware: Hardware | None
) -> list[ShardingRow]:
    """Every sharding of the same sequence: none is always better (zigzag is not for causal w = 0.6 n on 4 ranks)."""
    found = []
    for sharding in SHARDINGS:
        lengths = default_lengths(sharding, arguments.seq_len, arguments.ranks)
        plans = make_plans(pattern, make_shards(sharding, lengths), exchange, arguments)
        sent = max(sum(x.bytes_sent(sizes_of(arguments), backward=b) for b in (False, True)) for x in plans)
        pairs = [x.plan.pairs for x in plans]
        even = sum(pairs) / (len(pairs) * max(pairs)) if max(pairs) else 1.0
        step = step_of(plans, arguments, hardware)
        found.append(ShardingRow(sharding, even, sent, None if step is None else step.step_seconds))
    return found
