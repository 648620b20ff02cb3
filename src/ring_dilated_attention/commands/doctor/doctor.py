"""`rda doctor`: examines a machine or cluster, in one process, in `--ranks` processes, or in a launcher's ranks."""

import argparse
import json
import math
import os
import socket
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from ...forecast.clock import Hardware, time_text
from ...training.files import check_mine, in_words, write_whole
from ...training.rank_launcher import check_meeting, share_of_cores, started
from ..hardware import ITEMSIZE, LARGE_MESSAGE, MAKER, NO_NETWORK, Machine, as_toml, is_saved, known
from ..numbers import amount, check_at_least, check_memory, check_seconds, count, counted, scaled, size_text
from ..output import aligned, check_writable, wrapped
from ..terminal import leaving_at_once, say

LEAST_FREE = 10**9  # free bytes on a disk
BYTES_OF_A_RANK = 10**8  # the least memory that a rank takes
SLOW_PAIR = 0.5  # a pair with less than this share of the median pair's bandwidth is reported
MOST_SECONDS_APART = 1.0
MOST_TAKEN = 0.1  # share of the processors' time: with more, other processes are reported
MEASURING_SECONDS = 120.0  # at most, once all ranks have joined
MOST_NAMED = 8  # ranks in one line
UNSET = "not set"
IFNAMES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
EXAMPLES = """examples:
  rda doctor                              this machine, one process
  rda doctor --ranks 2 --save here.toml   two processes; file for rda plan
  torchrun --nproc-per-node 8 -m ring_dilated_attention doctor
                                          a job's ranks, also over several hosts
  srun python -m ring_dilated_attention doctor
                                  Slurm, with MASTER_ADDR and MASTER_PORT set

Once all ranks have joined, they have two minutes to measure. The answer ends with "ready", or with a list of what to
mend, the most urgent first. Exit codes: 0 ready, 1 not ready, 2 refused.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--ranks", type=count, metavar="P", help="processes on this machine (default 1)")
    add("--run-folder", type=Path, default=Path("runs"), metavar="DIR", help="where runs will be written")
    add("--save", type=Path, metavar="FILE", help="write what rda plan --hardware reads")
    add("--timeout", type=amount, default=60.0, metavar="S", help="seconds in which all ranks must join (default 60)")
    add("--json", action="store_true", help="print the findings as JSON")


def run(arguments: argparse.Namespace) -> int:
    rank, num_started = started()
    check(arguments, num_started)
    try:
        everyone = examined_here(arguments) if num_started == 1 else examined_with(rank, num_started, arguments)
    except (ValueError, RuntimeError) as error:
        who = f"rank {rank}: " if num_started > 1 else ""
        say(f"rda doctor: not ready: {who}{in_words(error)}")
        return 1
    return report(arguments, everyone) if rank == 0 else int(bool(to_mend(everyone)))


def check(arguments: argparse.Namespace, num_started: int) -> None:
    """Raise ValueError for what can be refused before anything is measured."""
    if num_started > 1:
        check_meeting()
    check_seconds("--timeout", arguments.timeout, 3600)
    if arguments.ranks is not None:
        check_at_least("--ranks", arguments.ranks)
        needed = BYTES_OF_A_RANK * arguments.ranks
        check_memory(f"{arguments.ranks:,} processes with torch in each take", needed, "use fewer --ranks")
        if num_started > 1:
            raise ValueError(f"--ranks {arguments.ranks}, but a launcher started {num_started} ranks: leave it out")
    if arguments.save is not None:
        check_writable("--save", arguments.save.parent, arguments.save.name)
        check_mine(arguments.save, is_saved, MAKER)


def examined_here(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """The findings of ranks that are started on this machine. Raises RuntimeError if one of them fails."""
    with leaving_at_once("rda doctor"):
        import torch

        from ..local_ranks import Launch, run_ranks
        from .examination import examine_on

    num_ranks = arguments.ranks or 1
    has_gpus = torch.cuda.is_available() and torch.cuda.device_count() >= num_ranks
    threads, joining = share_of_cores(num_ranks), arguments.timeout
    launch = Launch(num_ranks, threads, has_gpus=has_gpus, seconds=MEASURING_SECONDS, join_seconds=joining)
    # Pass the user's environment: a started rank changes GLOO_SOCKET_IFNAME in its own, to keep gloo on this host.
    return run_ranks(launch, examine_on, arguments.run_folder, launch.seconds, dict(os.environ))[0]


def examined_with(rank: int, num_ranks: int, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """The findings of a launcher's ranks, of which this is one. Raises ValueError if a variable names a missing network
    interface, and RuntimeError if not all ranks join or one of them fails."""
    # Checked before torch is imported, because `join` must silence torch's log before the import.
    if said := unmet(os.environ, sorted(name for _, name in socket.if_nameindex()), socket.gethostname()):
        raise ValueError("; ".join(said))
    join(rank, num_ranks, arguments.timeout)
    from torch.distributed import destroy_process_group

    from .examination import examine

    everyone = examine(arguments.run_folder, MEASURING_SECONDS, os.environ)
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
    limit = timedelta(seconds=seconds)
    try:
        meeting = dist.TCPStore(address, port, None, is_host, limit, wait_for_workers=False)
    except RuntimeError as error:
        raise RuntimeError(f"rank 0 could not be met at {address}:{port} within {seconds:g} s") from error
    store = dist.PrefixStore("rda doctor", meeting)
    missing = [other for other in range(num_ranks) if other != rank]
    deadline = time.monotonic() + seconds
    try:
        store.set(f"rank {rank}", "here")
        while missing and time.monotonic() < deadline:
            missing = [other for other in missing if not store.check([f"rank {other}"])]
            time.sleep(0.05 if missing else 0)
    except RuntimeError as error:  # the store has ended, and rank 0 with it
        raise RuntimeError("rank 0 ended: not all ranks joined; rank 0 says which are missing") from error
    if missing:
        time.sleep(min(1.0, seconds / 10) if is_host else 0)  # rank 0 has the store: the others still read it
        raise RuntimeError(f"{len(missing)} of {num_ranks} ranks did not join within {seconds:g} s: {names(missing)}")
    if has_gpu := torch.cuda.is_available():
        torch.cuda.set_device(card_of(None))
    dist.init_process_group(TRANSPORTS[has_gpu], store=store, rank=rank, world_size=num_ranks, timeout=limit)


def to_mend(everyone: list[dict[str, Any]]) -> list[str]:
    """The problems, the most urgent first."""
    found, bad = [], everyone[0]["agreement"]
    if not bad["passed"]:
        off = "{quantity} is off by {error:.1e}, more than {tolerance:.1e}".format_map(bad)
        found.append(f"{off}: results are wrong here; rda check says which backend")
    for name in everyone[0]["versions"]:
        found += _differing(everyone, name, [x["versions"][name] for x in everyone], "Install the same everywhere")
    models = [one["gpu"]["name"] if one["gpu"] else "none" for one in everyone]
    found += _differing(everyone, "GPU", models, "Every step waits for the slowest: take ranks with the same GPU")
    found += _told_by_all(everyone)
    algorithms = [one["matter"].get("NCCL_ALGO", UNSET) for one in everyone]
    found += _differing(everyone, "NCCL_ALGO", algorithms, "Ranks that do not choose alike may hang: unset it")
    pairs = pairs_of(everyone)
    if len(pairs) > 2 and pairs[0][2] < SLOW_PAIR * pairs[len(pairs) // 2][2]:
        a, b, rate = pairs[0]
        slow = f"ranks {a} and {b} reach {scaled(rate, 'B/s')}, less than half of the median pair's"
        found.append(f"{slow}: look at the network between them ({everyone[a]['host']} and {everyone[b]['host']})")
    clocks = [one["clock"] for one in everyone]
    if (apart := max(clocks) - min(clocks)) > MOST_SECONDS_APART:
        found.append(f"clocks are {apart:.1f} s apart: times in the logs of two hosts will not agree; set up NTP")
    return found


def _told_by_all(everyone: list[dict[str, Any]]) -> list[str]:
    """The problems that can be seen on one rank alone, each with the ranks that have it."""
    found: dict[str, list[int]] = {}
    for one in everyone:
        said = unmet(one["matter"], one["interfaces"], one["host"])
        said += [f"{name} is set: {why}" for name, why in one["harmful"].items()]
        folder = one["folder"]
        if "failure" in folder:
            said.append(f"nothing can be written to {folder['path']}: {folder['failure']}. Choose another --run-folder")
        elif folder["free_bytes"] < LEAST_FREE:
            said.append(f"{folder['path']} has {size_text(folder['free_bytes'])} left: make room for checkpoints")
        if all(one["backends"].values()):
            said.append("no backend can serve: rda check says why")
        for text in said:
            found.setdefault(text, []).append(one["rank"])
    return [text + f" (ranks {names(who)})" * (len(who) < len(everyone)) for text, who in found.items()]


def unmet(environment: Mapping[str, str], there: Sequence[str], host: str) -> list[str]:
    """A sentence for each variable that names network interfaces which a host does not have."""
    named = {name: absent(name, environment.get(name, ""), there) for name in IFNAMES}
    listed = ", ".join(there)
    return [f"{name}={value} is no interface of host {host}: {listed}" for name, value in named.items() if value]


def absent(name: str, value: str, there: Sequence[str]) -> str:
    """The names in a variable's value that match no interface, or "". gloo needs every name to be an interface. NCCL
    reads prefixes, or names after "=", and needs one to match. Those after "^" are to be avoided, and may be absent."""
    words = [word for word in value.removeprefix("=").split(",") if word]
    if name == "GLOO_SOCKET_IFNAME":
        return ",".join(word for word in value.split(",") if word and word not in there)
    is_found = any(x in words if value.startswith("=") else x.startswith(tuple(words)) for x in there)
    return "" if not words or value.startswith("^") or is_found else value


def _differing(everyone: list[dict[str, Any]], name: str, values: Sequence[str], remedy: str) -> list[str]:
    return [f"{name} differs: {said_by(everyone, values)}. {remedy}"] if len(set(values)) > 1 else []


def said_by(everyone: list[dict[str, Any]], values: Sequence[str]) -> str:
    """The value that all ranks have; or, if the values differ, each value with its ranks."""
    ranks: dict[str, list[int]] = {}
    for one, value in zip(everyone, values, strict=True):
        ranks.setdefault(value, []).append(one["rank"])
    return values[0] if len(ranks) == 1 else "; ".join(f"{x} on ranks {names(who)}" for x, who in ranks.items())


def names(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks[:MOST_NAMED])) + ", ..." * (len(ranks) > MOST_NAMED)


def hardware_of(everyone: list[dict[str, Any]]) -> Hardware:
    """The hardware that a plan assumes for each rank: the lowest rates, and the slowest network between neighbours."""
    rates = [one["rates"] for one in everyone]
    forward, backward = (min(x[name] for x in rates) for name in ("flops_per_second", "backward_flops_per_second"))
    call = max(x["call_seconds"] for x in rates)
    if "messages" not in everyone[0]:
        return Hardware(forward, NO_NETWORK, 0.0, backward, call)
    measured = [one["messages"] for one in everyone]
    small, large = (max(x[size]["1"] for x in measured) for size in ("small", "large"))
    # The work of a call outside its tiles takes time once in a forward and once in a backward, as the handshake does.
    handshake = max(x["handshake_seconds"] + y["around_seconds"] for x, y in zip(measured, rates, strict=True))
    # If others use the machine, the small message may have taken about as long as the large one. Then do not subtract.
    bandwidth = LARGE_MESSAGE / (large - small) if large > 2 * small else LARGE_MESSAGE / large
    further = Hardware(forward, bandwidth, small, handshake_seconds=0.0).handshake(len(everyone))  # its other rounds
    return Hardware(forward, bandwidth, small, backward, call, max(handshake - further, 0.0))


def pairs_of(everyone: list[dict[str, Any]]) -> list[tuple[int, int, float]]:
    """(rank, peer, bytes per second) of each pair that was measured, the slowest first."""
    p = len(everyone)
    found = [
        (place, (place + int(distance)) % p, LARGE_MESSAGE / seconds)
        for place, one in enumerate(everyone)
        for distance, seconds in one.get("messages", {"large": {}})["large"].items()
    ]
    return sorted(found, key=lambda x: x[2])


def report(arguments: argparse.Namespace, everyone: list[dict[str, Any]]) -> int:
    problems, hardware = to_mend(everyone), hardware_of(everyone)
    if busy := taken_by_others(everyone):
        busy += " while it measured: rates may be too low; measure again when the machine is quiet"
    if arguments.json:
        print(json.dumps({"ranks": everyone, "hardware": known(hardware), "to_mend": problems}, indent=1), flush=True)
        if busy:
            say(f"rda doctor: {busy}")
    else:
        listed = [f"  {i + 1}. {problem}" for i, problem in enumerate(problems)]
        ends = ["not ready; mend, in this order:", *listed, busy] if problems else [f"ready{busy and f', but {busy}'}"]
        print(text(everyone), *map(wrapped, filter(None, ends)), sep="\n")
    if arguments.save is not None:
        save(arguments.save, everyone, hardware)
    return 1 if problems else 0


def save(path: Path, everyone: list[dict[str, Any]], hardware: Hardware) -> None:
    """Write the TOML file that `rda plan --hardware` reads."""
    first, memory = everyone[0], memory_of_each(everyone)
    source = f"{MAKER} on {len(everyone)} rank{'s' * (len(everyone) > 1)}, {first['hardware']['processor']}"
    source += f", while {busy}" if (busy := taken_by_others(everyone)) else ""
    machine = Machine(hardware, ITEMSIZE[first["dtype"]], int(memory) if memory < math.inf else None, source)
    notes = [time.strftime("measured %Y-%m-%d"), f"torch {first['versions']['torch']}"]
    if len(everyone) == 1:
        notes.append("one rank: no bytes_per_second and no latency_seconds; --ranks 2 measures them")
    write_whole(path, as_toml(machine, notes).encode(), is_saved, MAKER)


def taken_by_others(everyone: list[dict[str, Any]]) -> str:
    """On the busiest host, the share of processor time that was taken from the ranks; "" if it is small."""
    share = 0.0
    for host in {one["host"] for one in everyone}:
        there = [one["processors"] for one in everyone if one["host"] == host]
        others = max(x["busy"] for x in there) - sum(x["own"] for x in there)
        share = max(share, others / (there[0]["all"] or 1))
    return f"other processes took {share:.0%} of the processors" if share > MOST_TAKEN else ""


def memory_of_each(everyone: list[dict[str, Any]]) -> float:
    """The bytes that every rank may fill. A rank has its GPU's memory, or its share of the host's; the least counts."""
    num_there = Counter(one["host"] for one in everyone if one["gpu"] is None)
    return min(float(one["memory_bytes"] / num_there.get(one["host"], 1)) for one in everyone)


def _device(one: dict[str, Any]) -> str:
    if card := one["gpu"]:
        return f"{card['name']}, compute capability {'.'.join(map(str, card['capability']))}"
    return f"CPU, {counted(one['threads'], 'thread')}"


def text(everyone: list[dict[str, Any]]) -> str:
    from .examination import dtype_advice

    first = everyone[0]
    headers = ("rank", "memory", "forward", "backward", "clock", "free", "written")
    rows = []
    for one in everyone:
        folder = one["folder"]
        rates = [scaled(one["rates"][f"{name}flops_per_second"], "FLOP/s") for name in ("", "backward_")]
        clock = f"{1e3 * (one['clock'] - first['clock']):+,.0f} ms"
        disk = (size_text(folder.get("free_bytes", 0)), scaled(folder.get("bytes_per_second", 0), "B/s"))
        rows.append((str(one["rank"]), size_text(one["memory_bytes"]), *rates, clock, *disk))
    speedup = min((one["bfloat16_speedup"] for one in everyone if one["gpu"] is None), default=1.0)
    advice = dict.fromkeys(dtype_advice(one["gpu"], speedup) for one in everyone)
    columns = {"host": [one["host"] for one in everyone], "device": [_device(one) for one in everyone]}
    columns |= {f"backend {x}": [one["backends"][x] or "can serve" for one in everyone] for x in first["backends"]}
    columns["interfaces"] = [", ".join(one["interfaces"]) for one in everyone]
    matter = dict.fromkeys(name for one in everyone for name in one["matter"])
    columns |= {name: [one["matter"].get(name, UNSET) for one in everyone] for name in matter}
    found = first["agreement"]
    lines = [
        ", ".join(f"{name} {value}" for name, value in first["versions"].items()),
        aligned(headers, rows),
        *(f"dtype: {line}" for line in advice),
        *(f"{name}: {said_by(everyone, values)}" for name, values in columns.items()),
        "against the definition: worst error {error:.1e} ({quantity}), allowed {tolerance:.1e}".format_map(found),
    ]
    if pairs := pairs_of(everyone):
        hardware, (a, b, rate) = hardware_of(everyone), pairs[0]
        late, handshake = map(time_text, (hardware.latency_seconds, hardware.handshake(len(everyone))))
        times = f"latency {late}, handshake {handshake}"
        lines.append(f"neighbouring ranks: {scaled(hardware.bytes_per_second, 'B/s')} one way, {times}")
        lines.append(f"slowest pair: ranks {a} and {b}, {scaled(rate, 'B/s')}")
    return wrapped("\n".join(lines))
