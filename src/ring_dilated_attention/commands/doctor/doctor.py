"""`rda doctor`: is this machine, or cluster, ready? Alone, with `--ranks`, or on the ranks of torchrun or Slurm."""

import argparse
import json
import os
import socket
import sys
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from ...forecast.clock import time_text
from ...training.files import check_mine, write_whole
from ...training.rank_launcher import check_meeting, started
from ..hardware import MAKER, Machine, as_toml, is_saved, known
from ..interrupts import leaving_at_once
from ..limits import check_at_least, check_memory
from ..numbers import amount, count, scaled, size_text
from ..output import aligned, check_writable

LEAST_FREE = 10**9
BYTES_OF_A_RANK = 10**8  # at least
SLOW_PAIR = 0.5  # of the median pair's bandwidth
MOST_SECONDS_APART = 1.0
MEASURING_SECONDS = 120.0  # at most, once all have joined
MOST_NAMED = 8  # ranks, of those that a line names
UNSET = "not set"
IFNAMES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
SAME_EVERYWHERE = ("NCCL_ALGO",)
EXAMPLES = """examples:
  rda doctor                                    this machine, one process
  rda doctor --ranks 2 --save here.toml         two ranks of this machine; rda plan --hardware here.toml reads it
  torchrun --nproc-per-node 8 -m ring_dilated_attention.commands.cli doctor
                                                the ranks of a job, also over several hosts
  srun python -m ring_dilated_attention.commands.cli doctor
                                                the same under Slurm, with MASTER_ADDR and MASTER_PORT set

It ends with "ready", or with what to mend, the most urgent first. Exit codes: 0 ready, 1 not, 2 refused.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EXAMPLES
    parser.add_argument("--ranks", type=count, metavar="P", help="processes of this machine (default 1)")
    parser.add_argument(
        "--run-folder", type=Path, default=Path("runs"), metavar="DIR", help="where runs will be written"
    )
    parser.add_argument("--save", type=Path, metavar="FILE", help="write what rda plan --hardware reads")
    parser.add_argument(
        "--timeout",
        type=amount,
        default=60.0,
        metavar="S",
        help="for all ranks to join (default 60 s); they then have two minutes",
    )
    parser.add_argument("--json", action="store_true", help="print all that was found as JSON")


def run(arguments: argparse.Namespace) -> int:
    try:
        rank, num_started = started()
        if num_started > 1:
            check_meeting()
        if not 0 < arguments.timeout <= 3600:
            raise ValueError(f"--timeout must be from 0 to 3,600 seconds, got {arguments.timeout:g}")
        if arguments.ranks is not None:
            check_at_least("--ranks", arguments.ranks)
            needed = BYTES_OF_A_RANK * arguments.ranks
            check_memory(f"{arguments.ranks:,} processes with torch in each take", needed, "use fewer --ranks")
        if arguments.ranks is not None and num_started > 1:
            raise ValueError(f"--ranks {arguments.ranks}, but a launcher started {num_started} ranks: leave it out")
        if arguments.save is not None:
            check_writable("--save", arguments.save.parent, arguments.save.name)
            check_mine(arguments.save, is_saved, MAKER)
    except ValueError as error:
        print(f"rda doctor: {error}", file=sys.stderr)
        return 2
    with leaving_at_once("rda doctor"):
        from ..local_ranks import Launch, RankFailedError, run_ranks

    if num_started == 1:
        num_ranks = arguments.ranks or 1
        threads = max(1, len(os.sched_getaffinity(0)) // num_ranks) if hasattr(os, "sched_getaffinity") else 1
        try:
            launch = Launch(
                num_ranks,
                num_threads=threads,
                backend=backend_for(num_ranks),
                seconds=MEASURING_SECONDS,
                join_seconds=arguments.timeout,
            )
            # Taken here: what it started a rank may read otherwise, with what keeps gloo on this host.
            environment = dict(os.environ)
            everyone = run_ranks(launch, examine_here, arguments.run_folder, MEASURING_SECONDS, environment)[0]
        except RankFailedError as error:
            print(f"rda doctor: not ready: {error}", file=sys.stderr)
            return 1
        return report(arguments, everyone)
    try:
        # Not from `doctor_facts`, which imports torch: `join` has to silence its log first.
        if said := unmet(os.environ, sorted(name for _, name in socket.if_nameindex()), socket.gethostname()):
            raise ValueError("; ".join(said))
        join(rank, num_started, arguments.timeout)
        everyone = examine(arguments.run_folder, MEASURING_SECONDS, os.environ)
    except (ValueError, RuntimeError) as error:
        print(f"rda doctor: not ready: rank {rank}: {error}", file=sys.stderr)
        return 1
    code = report(arguments, everyone) if rank == 0 else int(bool(to_mend(everyone)))
    from torch.distributed import destroy_process_group

    destroy_process_group()
    return code


def join(rank: int, num_ranks: int, seconds: float) -> None:
    """Meet the other ranks, or say which are missing.

    Raises:
        RuntimeError: if some do not come in time.
    """
    # Before torch is there: its log would say in forty lines of C++ frames what is raised below in one.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    import torch
    import torch.distributed as dist

    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    is_host = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    limit = timedelta(seconds=seconds)
    try:
        meeting = dist.TCPStore(address, port, None, is_host, limit, wait_for_workers=False)
    except RuntimeError as error:
        raise RuntimeError(f"rank 0 could not be met at {address}:{port} within {seconds:g} s") from error
    store = dist.PrefixStore("rda doctor", meeting)
    try:
        missing = missing_from(store, rank, num_ranks, seconds)
    except RuntimeError as error:  # the store has gone, and rank 0 with it
        raise RuntimeError("rank 0 ended: not all ranks joined; it says which") from error
    if missing:
        time.sleep(min(1.0, seconds / 10) if is_host else 0)  # so that the others can say the same
        raise RuntimeError(f"{len(missing)} of {num_ranks} ranks did not join within {seconds:g} s: {names(missing)}")
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", "0"))))
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=num_ranks, timeout=limit)


def missing_from(store: Any, rank: int, num_ranks: int, seconds: float) -> list[int]:
    """The ranks that did not come to the store in time.

    Args:
        store: torch's.

    Raises:
        RuntimeError: torch's, if the store goes away meanwhile.
    """
    store.set(f"rank {rank}", "here")
    deadline = time.monotonic() + seconds
    missing = [k for k in range(num_ranks) if k != rank]
    while missing and time.monotonic() < deadline:
        missing = [k for k in missing if not store.check([f"rank {k}"])]
        time.sleep(0.05 if missing else 0)
    return missing


def backend_for(num_ranks: int) -> str:
    import torch

    return "cpu:gloo,cuda:nccl" if torch.cuda.is_available() and torch.cuda.device_count() >= num_ranks else "gloo"


def examine_here(worker: Any, folder: Path, seconds: float, environment: Mapping[str, str]) -> list[dict[str, Any]]:
    return examine(folder, seconds, environment)


def examine(folder: Path, seconds: float, environment: Mapping[str, str]) -> list[dict[str, Any]]:
    """Everybody's findings, in the order of the ring, on every rank. environment: as the user set it.

    seconds: that a rank waits for another.
    """
    import torch

    from ...ranks.context import ContextParallel
    from .doctor_facts import facts
    from .doctor_ranks import agreement, speeds, told

    parallel = ContextParallel(exchange="ring", timeout=timedelta(seconds=seconds))
    device = f"cuda:{torch.cuda.current_device()}" if torch.cuda.is_available() else "cpu"
    own = facts(parallel.rank, device, folder, environment)
    parallel.ranks.handshake(1, {"call": "rda doctor"})
    own["clock"] = time.time()  # all have just met
    own["agreement"] = agreement(parallel, device)
    own |= speeds(parallel, device)
    everyone = told(parallel, own)
    parallel.close()
    return everyone


def to_mend(everyone: list[dict[str, Any]]) -> list[str]:
    """What is wrong, the most urgent first."""
    from .doctor_ranks import pairs_of

    found = []
    first = everyone[0]
    if not first["agreement"]["passed"]:
        bad = first["agreement"]
        found.append(
            f"{bad['quantity']} is off by {bad['error']:.1e}, more than {bad['tolerance']:.1e}: results are wrong "
            "here; rda check says which backend"
        )
    for name in first["versions"]:
        versions = by_value((one["rank"], one["versions"][name]) for one in everyone)
        if len(versions) > 1:
            found.append(f"{name} differs: {listed(versions)}. Install the same everywhere")
    models = by_value((one["rank"], one["gpu"]["name"] if one["gpu"] else "none") for one in everyone)
    if len(models) > 1:
        found.append(f"GPU differs: {listed(models)}. Every step waits for the slowest: take ranks of one model")
    found += _told_by_all(everyone)
    for name in SAME_EVERYWHERE:
        values = by_value((one["rank"], one["matter"].get(name, UNSET)) for one in everyone)
        if len(values) > 1:
            found.append(f"{name} differs: {listed(values)}. Ranks that do not choose alike may hang: unset it")
    pairs = pairs_of(everyone)
    if len(pairs) > 2 and pairs[0][2] < SLOW_PAIR * pairs[len(pairs) // 2][2]:
        a, b, rate = pairs[0]
        found.append(
            f"ranks {a} and {b} reach {scaled(rate, 'B/s')}, less than half of the median pair's: look at their link "
            f"({everyone[a]['host']} and {everyone[b]['host']})"
        )
    clocks = [one["clock"] for one in everyone]
    if max(clocks) - min(clocks) > MOST_SECONDS_APART:
        found.append(f"clocks are {max(clocks) - min(clocks):.1f} s apart: logs of hosts will not fit; set up NTP")
    return found


def _told_by_all(everyone: list[dict[str, Any]]) -> list[str]:
    found = []
    for one in everyone:
        said = unmet(one["matter"], one["interfaces"], one["host"])  # with these no rank meets another
        said += [f"{name} is set: {why}" for name, why in one["harmful"].items()]
        folder = one["folder"]
        if "failure" in folder:
            said.append(f"nothing can be written to {folder['path']}: {folder['failure']}. Choose another --run-folder")
        elif folder["free_bytes"] < LEAST_FREE:
            said.append(f"{folder['path']} has {size_text(folder['free_bytes'])} left: make room for checkpoints")
        if all(one["backends"].values()):
            said.append("no backend can serve: rda check says why")
        found += [(one["rank"], text) for text in said]
    return [
        text + ("" if len(ranks) == len(everyone) else f" (ranks {names(ranks)})")
        for text, ranks in by_value(found).items()
    ]


def unmet(environment: Mapping[str, str], interfaces: Sequence[str], host: str) -> list[str]:
    """The variables that name interfaces which a host does not have."""
    named = {name: absent(name, environment.get(name, ""), interfaces) for name in IFNAMES}
    listed_here = ", ".join(interfaces)
    return [f"{name}={value} is no interface of host {host}: {listed_here}" for name, value in named.items() if value]


def absent(name: str, value: str, interfaces: Sequence[str]) -> str:
    """The part of a variable that names no interface, "" if there is none. gloo takes names, and needs each of them;
    NCCL takes prefixes (after "=" names, after "^" what it shall not use), and needs one that fits."""
    if name == "GLOO_SOCKET_IFNAME":
        return ",".join(part for part in value.split(",") if part and part not in interfaces)
    wanted = tuple(part for part in value.removeprefix("=").split(",") if part)
    is_found = any(x in wanted if value.startswith("=") else x.startswith(wanted) for x in interfaces)
    return "" if not wanted or value.startswith("^") or is_found else value


def by_value(said: Iterable[tuple[int, str]]) -> dict[str, list[int]]:
    """The ranks that say each thing."""
    found: dict[str, list[int]] = {}
    for rank, value in said:
        found.setdefault(value, []).append(rank)
    return found


def names(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks[:MOST_NAMED])) + (", ..." if len(ranks) > MOST_NAMED else "")


def listed(values: dict[str, list[int]]) -> str:
    """What all ranks say, or else who says what."""
    if len(values) == 1:
        return next(iter(values))
    return "; ".join(f"{value} on ranks {names(ranks)}" for value, ranks in values.items())


def report(arguments: argparse.Namespace, everyone: list[dict[str, Any]]) -> int:
    from .doctor_ranks import hardware_of

    problems = to_mend(everyone)
    hardware = hardware_of(everyone)
    if arguments.json:
        print(json.dumps({"ranks": everyone, "hardware": known(hardware), "to_mend": problems}, indent=1))
    else:
        print(text(everyone))
        print("ready" if not problems else "not ready; mend, in this order:")
        print("".join(f"  {i + 1}. {problem}\n" for i, problem in enumerate(problems)), end="")
    if arguments.save is not None:
        memory = memory_of_each(everyone)
        source = f"{MAKER} on {len(everyone)} rank{'s' * (len(everyone) > 1)}, {everyone[0]['hardware']['processor']}"
        itemsize = 4 if everyone[0]["gpu"] is None else 2
        machine = Machine(hardware, itemsize, int(memory) if memory < float("inf") else None, source)
        notes = [time.strftime("measured %Y-%m-%d"), f"torch {everyone[0]['versions']['torch']}"]
        if len(everyone) == 1:
            notes.append(
                "one rank: bytes_per_second and latency_seconds of a link are left out; --ranks 2 measures them"
            )
        arguments.save.parent.mkdir(parents=True, exist_ok=True)
        write_whole(arguments.save, as_toml(machine, notes).encode(), is_saved, MAKER)
    return 1 if problems else 0


def memory_of_each(everyone: list[dict[str, Any]]) -> float:
    """Bytes that the rank with least may fill: a GPU's, or its share of its host's."""
    num_there = Counter(one["host"] for one in everyone if one["gpu"] is None)
    return min(float(one["memory_bytes"] / num_there.get(one["host"], 1)) for one in everyone)


def text(everyone: list[dict[str, Any]]) -> str:
    from .doctor_facts import dtype_advice
    from .doctor_ranks import hardware_of, pairs_of

    first = everyone[0]
    lines = [", ".join(f"{name} {value}" for name, value in first["versions"].items())]
    headers = ("rank", "host", "device", "memory", "forward", "backward", "clock", "free", "written")
    rows = []
    for one in everyone:
        folder = one["folder"]
        device = f"CPU, {one['threads']} threads"
        if one["gpu"]:
            device = f"{one['gpu']['name']}, compute capability {'.'.join(map(str, one['gpu']['capability']))}"
        rates = one["rates"]
        free = size_text(folder.get("free_bytes", 0))
        written = scaled(folder.get("bytes_per_second", 0), "B/s")
        speeds = (scaled(rates["flops_per_second"], "FLOP/s"), scaled(rates["backward_flops_per_second"], "FLOP/s"))
        clock = f"{1e3 * (one['clock'] - first['clock']):+,.0f} ms"
        place = (str(one["rank"]), one["host"], device, size_text(one["memory_bytes"]))
        rows.append((*place, *speeds, clock, free, written))
    lines.append(aligned(headers, rows))
    speedup = min((one["bfloat16_speedup"] for one in everyone if one["gpu"] is None), default=1.0)
    lines += [f"dtype: {advice}" for advice in dict.fromkeys(dtype_advice(one["gpu"], speedup) for one in everyone)]
    lines += [
        f"backend {name}: {listed(by_value((one['rank'], one['backends'][name] or 'can serve') for one in everyone))}"
        for name in first["backends"]
    ]
    lines.append(f"interfaces: {listed(by_value((one['rank'], ', '.join(one['interfaces'])) for one in everyone))}")
    for name in dict.fromkeys(name for one in everyone for name in one["matter"]):
        lines.append(f"{name}: {listed(by_value((one['rank'], one['matter'].get(name, UNSET)) for one in everyone))}")
    found = first["agreement"]
    lines.append(
        f"against the definition: worst error {found['error']:.1e} ({found['quantity']}), allowed "
        f"{found['tolerance']:.1e}"
    )
    pairs = pairs_of(everyone)
    if pairs:
        hardware = hardware_of(everyone)
        lines.append(
            f"neighbours in the ring: {scaled(hardware.bytes_per_second, 'B/s')} one way, latency "
            f"{time_text(hardware.latency_seconds)}, handshake {time_text(hardware.handshake)}"
        )
        lines.append(f"slowest pair: ranks {pairs[0][0]} and {pairs[0][1]}, {scaled(pairs[0][2], 'B/s')}")
    return "\n".join(lines)
