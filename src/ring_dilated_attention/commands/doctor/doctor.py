"""`rda doctor`: examines a machine or cluster, in one process, in `--ranks` processes, or in a launcher's ranks."""

import argparse
import json
import math
import os
import socket
import time
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from ...forecast.clock import Hardware, time_text
from ...training.files import check_mine, in_words, write_whole
from ...training.rank_launcher import check_meeting, share_of_cores, started
from ..arguments import amount, check_at_least, check_memory, check_seconds, check_writable, count
from ..console import counted, scaled, size_text, table, wrapped
from ..hardware import ITEMSIZE, LARGE_MESSAGE, MAKER, NO_NETWORK, Machine, as_toml, is_saved, known
from ..terminal import leaving_at_once, say

BYTES_OF_A_RANK = 10**8  # the least memory that a rank takes
MEASURING_SECONDS = 120.0  # at most, once all ranks have joined
MOST_NAMED = 8  # ranks in one line
MOST_LOAD = 0.5  # processes that wanted to run during the last minute
INTERFACES = "GLOO_SOCKET_IFNAME"
EXAMPLES = """examples:
  rda doctor                              this machine, one process
  rda doctor --ranks 2 --save here.toml   two processes; file for rda plan
  torchrun --nproc-per-node 8 -m ring_dilated_attention doctor
                                          a job's ranks, also over several hosts
  srun python -m ring_dilated_attention doctor
                                  Slurm, with MASTER_ADDR and MASTER_PORT set

Once all ranks have joined, they have two minutes to measure. Let nothing else run meanwhile. The answer ends with
"ready", or with what to mend: versions or GPUs that differ between ranks, or a network interface in GLOO_SOCKET_IFNAME
that a host does not have. rda check tells whether results are right.

Exit codes: 0 ready, 1 not ready, 2 refused.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--ranks", type=count, metavar="P", help="processes on this machine (default 1)")
    dtype = "that attention is measured in (default float32 on a CPU, 16 bits on a GPU)"
    add("--dtype", choices=("float32", "bfloat16", "float16"), help=dtype)
    add("--save", type=Path, metavar="FILE", help="write what rda plan --hardware reads")
    add(
        "--timeout",
        type=amount,
        default=60.0,
        metavar="S",
        help="seconds in which all ranks must join (default 60)",
    )
    add("--json", action="store_true", help="print the findings as JSON")


def run(arguments: argparse.Namespace) -> int:
    rank, num_started = started()
    check(arguments, num_started)
    try:
        check_interfaces(
            os.environ.get(INTERFACES, ""), sorted(name for _, name in socket.if_nameindex())
        )
        if num_started == 1:
            everyone = examined_here(arguments)
        else:
            everyone = examined_with(rank, num_started, arguments)
    except (ValueError, RuntimeError) as error:
        who = f"rank {rank}: " if num_started > 1 else ""
        say(f"rda doctor: not ready: {who}{in_words(error)}")
        return 1
    problems = to_mend(everyone)
    if rank == 0:
        report(arguments, everyone, problems)
    return 1 if problems else 0


def check(arguments: argparse.Namespace, num_started: int) -> None:
    """Raise ValueError for what can be refused before anything is measured."""
    if num_started > 1:
        check_meeting()
    check_seconds("--timeout", arguments.timeout, 3600)
    if arguments.ranks is not None:
        check_at_least("--ranks", arguments.ranks)
        needed = BYTES_OF_A_RANK * arguments.ranks
        check_memory(
            f"{arguments.ranks:,} processes with torch in each take", needed, "use fewer --ranks"
        )
        if num_started > 1:
            raise ValueError(
                f"--ranks {arguments.ranks}, but a launcher started {num_started} ranks: leave it out"
            )
    if arguments.save is not None:
        check_writable("--save", arguments.save.parent, arguments.save.name)
        check_mine(arguments.save, is_saved, MAKER)


def check_interfaces(listed: str, interfaces: Sequence[str]) -> None:
    """Raise ValueError if GLOO_SOCKET_IFNAME lists an interface that this host does not have. gloo would end with a
    line of its C++, which names no variable."""
    missing = [name for name in listed.split(",") if name and name not in interfaces]
    if missing:
        there = f"{socket.gethostname()}: {', '.join(interfaces)}"
        raise ValueError(
            f"{INTERFACES}={','.join(missing)} is no interface of host {there}. Name one, or unset it"
        )


def examined_here(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """The findings of ranks that are started on this machine. Raises RuntimeError if one of them fails."""
    with leaving_at_once("rda doctor"):
        import torch

        from ..local_ranks import Launch, run_ranks
        from .examination import examine_on

    num_ranks = arguments.ranks or 1
    has_gpus = torch.cuda.is_available() and torch.cuda.device_count() >= num_ranks
    seconds = arguments.timeout + MEASURING_SECONDS
    launch = Launch(num_ranks, share_of_cores(num_ranks), has_gpus=has_gpus, seconds=seconds)
    return run_ranks(launch, examine_on, launch.seconds, arguments.dtype)[0]


def examined_with(rank: int, num_ranks: int, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """The findings of a launcher's ranks, of which this is one. Raises RuntimeError if not all ranks join or one of
    them fails."""
    join(rank, num_ranks, arguments.timeout)
    from torch.distributed import destroy_process_group

    from .examination import examine

    everyone = examine(MEASURING_SECONDS, arguments.dtype)
    destroy_process_group()
    return everyone


def join(rank: int, num_ranks: int, seconds: float) -> None:
    """Meet the other ranks. Raises RuntimeError with the names of those that do not come in time."""
    # Set before torch is imported: otherwise its log shows forty lines of C++ frames for the one-line error below.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    import torch
    import torch.distributed as dist

    from ...ranks.cards import card_of
    from ..local_ranks import TRANSPORTS

    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    is_host = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    limit, deadline = timedelta(seconds=seconds), time.monotonic() + seconds
    missing = [other for other in range(num_ranks) if other != rank]
    try:
        meeting = dist.TCPStore(address, port, None, is_host, limit, wait_for_workers=False)
        store = dist.PrefixStore("rda doctor", meeting)
        store.set(f"rank {rank}", "here")
        while missing and time.monotonic() < deadline:
            time.sleep(0.05)
            missing = [other for other in missing if not store.check([f"rank {other}"])]
    except RuntimeError as error:
        where = f"at {address}:{port} within {seconds:g} s"
        raise RuntimeError(f"rank 0 could not be met {where}, or it ended and says why") from error
    if missing:
        if is_host:  # the others still read its store
            time.sleep(min(1.0, seconds / 10))
        raise RuntimeError(
            f"{len(missing)} of {num_ranks} ranks did not join within {seconds:g} s: {names(missing)}"
        )
    has_gpu = torch.cuda.is_available()
    if has_gpu:
        torch.cuda.set_device(card_of(None))
    dist.init_process_group(
        TRANSPORTS[has_gpu], store=store, rank=rank, world_size=num_ranks, timeout=limit
    )


def to_mend(everyone: list[dict[str, Any]]) -> list[str]:
    """What differs between ranks, and should not."""
    problems = []
    for name in everyone[0]["versions"]:
        versions = [one["versions"][name] for one in everyone]
        if len(set(versions)) > 1:
            problems.append(f"{name} differs: {by_rank(versions)}. Install the same everywhere")
    cards = [one["gpu"]["name"] if one["gpu"] else "none" for one in everyone]
    if len(set(cards)) > 1:
        problems.append(
            f"GPU differs: {by_rank(cards)}. Every step waits for the slowest: take ranks with the same"
        )
    return problems


def by_rank(values: Sequence[str]) -> str:
    """The value that all ranks have; or, if the values differ, each value with its ranks."""
    if len(set(values)) == 1:
        return values[0]
    groups = []
    for value in dict.fromkeys(values):
        ranks = [rank for rank, other in enumerate(values) if other == value]
        groups.append(f"{value} on ranks {names(ranks)}")
    return "; ".join(groups)


def names(ranks: Sequence[int]) -> str:
    listed = ", ".join(map(str, ranks[:MOST_NAMED]))
    return f"{listed}, ..." if len(ranks) > MOST_NAMED else listed


def hardware_of(everyone: list[dict[str, Any]]) -> Hardware:
    """The hardware that a plan assumes for each rank: the lowest rates, and the slowest network between neighbours."""
    rates = [one["rates"] for one in everyone]
    forward = min(x["flops_per_second"] for x in rates)
    backward = min(x["backward_flops_per_second"] for x in rates)
    call = max(x["call_seconds"] for x in rates)
    if "messages" not in everyone[0]:
        return Hardware(forward, NO_NETWORK, 0.0, backward, call)
    messages = [one["messages"] for one in everyone]
    small = max(x["small_seconds"] for x in messages)
    large = max(x["large_seconds"] for x in messages)
    # If others use the machine, the small message may have taken about as long as the large one. Then do not subtract.
    bandwidth = LARGE_MESSAGE / (large - small) if large > 2 * small else LARGE_MESSAGE / large
    # The work of a call outside its tiles takes time once in a forward and once in a backward, as the handshake does.
    handshake = max(
        x["handshake_seconds"] + y["around_seconds"] for x, y in zip(messages, rates, strict=True)
    )
    other_rounds = Hardware(forward, bandwidth, small, handshake_seconds=0.0).handshake(
        len(everyone)
    )
    return Hardware(forward, bandwidth, small, backward, call, max(handshake - other_rounds, 0.0))


def report(
    arguments: argparse.Namespace, everyone: list[dict[str, Any]], problems: list[str]
) -> None:
    hardware = hardware_of(everyone)
    if arguments.json:
        print(
            json.dumps(
                {"ranks": everyone, "hardware": known(hardware), "to_mend": problems}, indent=1
            ),
            flush=True,
        )
    else:
        print(text(everyone, hardware))
        for problem in problems:
            print(wrapped(f"not ready: {problem}"))
        if not problems:
            print("ready")
    if arguments.save is not None:
        save(arguments.save, everyone, hardware)


def text(everyone: list[dict[str, Any]], hardware: Hardware) -> str:
    versions = []
    for name in everyone[0]["versions"]:
        versions.append(f"{name} {by_rank([one['versions'][name] for one in everyone])}")
    interfaces = by_rank([", ".join(one["interfaces"]) for one in everyone])
    rows = []
    for one in everyone:
        card, rates = one["gpu"], one["rates"]
        if card:
            device = f"{card['name']}, compute capability {'.'.join(map(str, card['capability']))}"
        else:
            device = f"CPU, {counted(one['threads'], 'thread')}"
        forward = scaled(rates["flops_per_second"], "FLOP/s")
        backward = scaled(rates["backward_flops_per_second"], "FLOP/s")
        rows.append(
            (
                str(one["rank"]),
                one["host"],
                device,
                size_text(one["memory_bytes"]),
                forward,
                backward,
            )
        )
    lines = [
        wrapped(", ".join(versions)),
        wrapped(f"network interfaces: {interfaces}"),
        table(("rank", "host", "device", "memory", "forward", "backward"), rows, num_left=3),
        f"attention in {everyone[0]['dtype']}, {time_text(hardware.call_seconds)} a kernel call",
    ]
    if "messages" in everyone[0]:
        late, handshake = (
            time_text(hardware.latency_seconds),
            time_text(hardware.handshake(len(everyone))),
        )
        rate = scaled(hardware.bytes_per_second, "B/s")
        lines.append(f"neighbouring ranks: {rate} one way, latency {late}, handshake {handshake}")
    if busy := load_in_words(everyone):
        lines.append(busy)
    return "\n".join(lines)


def load_in_words(everyone: list[dict[str, Any]]) -> str:
    """A line if a machine was busy before anything was measured, or ""."""
    load = max(one["load"] for one in everyone)
    return (
        f"load average {load:.1f} before measuring: rates may be too low"
        if load > MOST_LOAD
        else ""
    )


def save(path: Path, everyone: list[dict[str, Any]], hardware: Hardware) -> None:
    """Write the TOML file that `rda plan --hardware` reads."""
    first, memory = everyone[0], memory_of_each(everyone)
    source = f"{MAKER} on {counted(len(everyone), 'rank')}, {first['processor']}"
    machine = Machine(
        hardware, ITEMSIZE[first["dtype"]], int(memory) if memory < math.inf else None, source
    )
    notes = [time.strftime("measured %Y-%m-%d"), f"torch {first['versions']['torch']}"]
    if len(everyone) == 1:
        notes.append(
            "one rank: no bytes_per_second and no latency_seconds; --ranks 2 measures them"
        )
    if busy := load_in_words(everyone):
        notes.append(busy)
    write_whole(path, as_toml(machine, notes).encode(), is_saved, MAKER)


def memory_of_each(everyone: list[dict[str, Any]]) -> float:
    """The bytes that every rank may fill. A rank has its GPU's memory, or its share of the host's; the least counts."""
    ranks_of_host = Counter(one["host"] for one in everyone if one["gpu"] is None)
    return min(float(one["memory_bytes"] / ranks_of_host.get(one["host"], 1)) for one in everyone)
