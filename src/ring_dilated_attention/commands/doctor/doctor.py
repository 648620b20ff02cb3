"""`rda doctor`: examines a machine or a cluster.

It runs in one process, in `--ranks` processes that it starts, or in the ranks that a launcher started.
"""

import os
import time
from argparse import ArgumentParser, Namespace
from datetime import timedelta
from pathlib import Path
from typing import Any

from ...forecast.clock import Hardware, time_text
from ...ranks.failures import first_line
from ...training.files import check_mine, in_words, write_whole
from ...training.rank_launcher import share_of_cores, started
from ..arguments import within
from ..console import scaled, size_text, table, wrapped
from ..hardware import LARGE_MESSAGE, Machine, as_toml
from ..terminal import leaving_at_once, say

MOST_RANKS = 256  # the most ranks that --ranks starts on this machine
MEASURING_SECONDS = 120.0  # the most seconds that all measurements take, once all ranks have joined
THIS_RUN = "this run of rda doctor"
EXAMPLES = """examples:
  rda doctor                              this machine, one process
  rda doctor --ranks 2 --save here.toml   two processes; file for rda plan
  torchrun --nproc-per-node 8 -m ring_dilated_attention doctor
                                          a job's ranks, also over several hosts
  srun python -m ring_dilated_attention doctor
                                  Slurm, with MASTER_ADDR and MASTER_PORT set

Once all ranks have joined, they have two minutes to measure. Let nothing else
run meanwhile. The answer ends with "ready", or with versions or GPUs that
differ between ranks. rda check tells whether results are right.

Exit codes: 0 ready, 1 not ready, 2 refused.
"""


def add_arguments(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--ranks",
        type=within(1, MOST_RANKS),
        metavar="P",
        help="processes on this machine (default 1)",
    )
    add("--save", type=Path, metavar="FILE", help="write what rda plan --hardware reads")
    add(
        "--timeout",
        type=within(1, 3600),
        default=60,
        metavar="S",
        help="seconds in which all ranks must join (default 60)",
    )


def run(arguments: Namespace) -> int:
    rank, num_started = started()
    check_options(arguments, num_started)
    try:
        if num_started == 1:
            everyone = examined_here(arguments)
        else:
            everyone = examined_with(rank, num_started, arguments.timeout)
    except (ValueError, RuntimeError) as error:
        who = f"rank {rank}: " if num_started > 1 else ""
        say(f"rda doctor: not ready: {who}{in_words(error)}")
        return 1
    problems = to_mend(everyone)
    if rank == 0:
        report(arguments, everyone, problems)
    return 1 if problems else 0


def check_options(arguments: Namespace, num_started: int) -> None:
    """Raise ValueError for options that can be refused before anything is measured."""
    if num_started > 1 and arguments.ranks is not None:
        raise ValueError(
            f"--ranks {arguments.ranks}, but a launcher started {num_started} ranks: leave --ranks out"
        )
    if arguments.save is not None:
        check_mine(arguments.save, lambda file: False, THIS_RUN)
        if max(num_started, arguments.ranks or 1) == 1:
            raise ValueError(
                f"--save {arguments.save} needs two ranks or more, which measure the network: give --ranks 2"
            )


def examined_here(arguments: Namespace) -> list[dict[str, Any]]:
    """Start ranks on this machine and examine them. Returns the findings of each rank. Raises RuntimeError if a rank
    fails."""
    with leaving_at_once("rda doctor"):
        import torch

        from ..local_ranks import Launch, run_ranks
        from .examination import examine

    num_ranks = arguments.ranks or 1
    has_gpus = torch.cuda.is_available() and torch.cuda.device_count() >= num_ranks
    launch = Launch(
        num_ranks,
        share_of_cores(num_ranks),
        has_gpus=has_gpus,
        seconds=arguments.timeout + MEASURING_SECONDS,
    )
    return run_ranks(launch, examine, launch.seconds)[0]


def examined_with(rank: int, num_ranks: int, seconds: float) -> list[dict[str, Any]]:
    """Examine the ranks that a launcher started; this process is one of them. Returns the findings of each rank.

    Raises RuntimeError if not all ranks join, or if a rank fails.
    """
    # Set this variable before torch is imported, because otherwise torch prints forty lines of C++ frames beside the
    # one-line error that is raised below.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    import torch
    import torch.distributed as dist

    from ...ranks.cards import card_of
    from ..local_ranks import TRANSPORTS
    from .examination import examine

    has_gpu = torch.cuda.is_available()
    if has_gpu:
        torch.cuda.set_device(card_of(None))
    try:
        dist.init_process_group(
            TRANSPORTS[has_gpu],
            rank=rank,
            world_size=num_ranks,
            timeout=timedelta(seconds=seconds),
        )
    except RuntimeError as error:
        raise RuntimeError(
            f"some of {num_ranks} ranks did not connect at {os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']} "
            f"within {seconds:g} s: {first_line(error)}"
        ) from error
    everyone = examine(None, MEASURING_SECONDS)
    dist.destroy_process_group()
    return everyone


def to_mend(everyone: list[dict[str, Any]]) -> list[str]:
    """One sentence for each name in "versions", such as "torch" or "GPU", whose value differs between ranks."""
    problems = {}
    first_versions = everyone[0]["versions"]
    for one in everyone:
        for name, version in one["versions"].items():
            if version != first_versions[name]:
                problems[name] = (
                    f"{name} differs: {first_versions[name]} on rank 0, {version} on rank {one['rank']}. "
                    "Take the same everywhere"
                )
    return list(problems.values())


def hardware_of(everyone: list[dict[str, Any]]) -> Hardware | None:
    """The rates that a plan assumes for every rank: the lowest that were measured, and the slowest network between
    neighbouring ranks.

    Returns None if there is only one rank, since one rank measures no network.
    """
    if len(everyone) == 1:
        return None
    rates = [one["rates"] for one in everyone]
    messages = [one["messages"] for one in everyone]
    small = max(x["small_seconds"] for x in messages)
    large = max(x["large_seconds"] for x in messages)
    # Subtract the time of the small message, which is nearly all latency, from the time of the large message. But
    # subtract nothing if the large message took less than twice as long as the small one, because then other programs
    # disturbed the network.
    bandwidth = LARGE_MESSAGE / (large - small) if large > 2 * small else LARGE_MESSAGE / large
    # A call also takes time outside its tiles (blocks of queries x keys). `Hardware` has no field for this time. So add
    # it to the time of the handshake: each forward and each backward has exactly one handshake.
    handshake = max(
        one["messages"]["handshake_seconds"] + one["rates"]["around_seconds"] for one in everyone
    )
    measured = Hardware(
        min(x["flops_per_second"] for x in rates),
        bandwidth,
        small,
        min(x["backward_flops_per_second"] for x in rates),
        max(x["call_seconds"] for x in rates),
        handshake_seconds=0.0,
    )
    first_round = max(handshake - measured.handshake(len(everyone)), 0.0)
    return measured._replace(handshake_seconds=first_round)


def report(arguments: Namespace, everyone: list[dict[str, Any]], problems: list[str]) -> None:
    hardware = hardware_of(everyone)
    print(report_text(everyone, hardware))
    for problem in problems:
        print(wrapped(f"not ready: {problem}"))
    if not problems:
        print("ready")
    if arguments.save is not None:
        assert hardware is not None
        content = as_toml(machine_found(everyone, hardware)).encode()
        write_whole(arguments.save, content, lambda file: False, THIS_RUN)


def report_text(everyone: list[dict[str, Any]], hardware: Hardware | None) -> str:
    versions = ", ".join(f"{name} {said}" for name, said in everyone[0]["versions"].items())
    lines = [wrapped(f"rank 0: {versions}")]
    interfaces = {one["host"]: ", ".join(one["interfaces"]) for one in everyone}
    for host, listed in interfaces.items():
        lines.append(wrapped(f"network interfaces of {host}: {listed}"))
    rows = []
    for one in everyone:
        rates = one["rates"]
        rows.append(
            (
                str(one["rank"]),
                one["host"],
                one["device"],
                size_text(one["memory_bytes"]),
                scaled(rates["flops_per_second"], "FLOP/s"),
                scaled(rates["backward_flops_per_second"], "FLOP/s"),
            )
        )
    headers = ("rank", "host", "device", "memory", "forward", "backward")
    lines += [table(headers, rows, num_left=3), f"attention in {everyone[0]['dtype']}"]
    if hardware is not None:
        rate = scaled(hardware.bytes_per_second, "B/s")
        latency = time_text(hardware.latency_seconds)
        lines.append(f"neighbouring ranks: {rate} one way, latency {latency}")
    return "\n".join(lines)


def machine_found(everyone: list[dict[str, Any]], hardware: Hardware) -> Machine:
    """The rates and the memory of a rank. --save writes them to a file, for `rda plan --hardware`.

    The memory is that of the rank with the least memory. Ranks that compute on a CPU share the memory of their host.
    """
    first = everyone[0]
    hosts = [one["host"] for one in everyone]
    memory = []
    for one in everyone:
        num_sharing = hosts.count(one["host"]) if one["kernel"] == "cpu" else 1
        memory.append(one["memory_bytes"] // num_sharing)
    source = (
        f"rda doctor on {len(everyone)} ranks, {first['processor']}, torch {first['versions']['torch']}, "
        f"{time.strftime('%Y-%m-%d')}"
    )
    return Machine(hardware, first["dtype"], int(min(memory)), source, first["kernel"])
