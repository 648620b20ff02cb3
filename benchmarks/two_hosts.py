"""Two hosts on one machine: namespaces, joined by a pair of virtual interfaces with a limited rate (Linux).

A host has a network, a name and processes of its own. Its first process ends with this one, however this one ends, and
Linux ends the other processes of the host with it. So nothing is left behind, not even by `kill -9`.

Run by torchrun as a program, it is a rank: it makes the call that `run_ranks` left, and leaves the result.
"""

import os
import pickle
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from ring_dilated_attention.commands.local_ranks import RankFailedError

ROOT = Path(__file__).parents[1]
INTERFACE = "eth0"
COMMANDS = ("ip", "tc", "unshare", "nsenter", "taskset")
BURST_BYTES = 128 * 1024  # what may pass at once, without the limit
QUEUE = "50ms"  # what a host may have ready to leave; packets beyond it are dropped


class Hosts(NamedTuple):
    """pids: of the process that holds each host. why_no_delay: why messages are not delayed, or None. folder: for files
    of their other processes. ended: waits for these, after the hosts have ended."""

    pids: tuple[int, ...]
    why_no_delay: str | None
    folder: Path
    ended: ExitStack


@contextmanager
def two_hosts(bits_per_second: int, delay_seconds: float) -> Iterator[Hosts]:
    """Two hosts, with this rate each way. The delay is left out where the kernel has none.

    Raises:
        OSError: if this machine or this user cannot have them.
    """
    with TemporaryDirectory(prefix="rda-hosts-") as folder, ExitStack() as ended, ExitStack() as stack:
        first, second = pids = tuple(stack.enter_context(_holder()) for _ in range(2))
        pair = ("type", "veth", "peer", "name", INTERFACE, "netns", str(second))
        _run("ip", "link", "add", "name", INTERFACE, "netns", str(first), *pair)
        why_no_delay = None
        for number, pid in enumerate(pids, start=1):
            _within(pid, "ip", "address", "add", f"10.0.0.{number}/24", "dev", INTERFACE)
            for name in (INTERFACE, "lo"):
                _within(pid, "ip", "link", "set", name, "up")
            limit = ("tbf", "rate", f"{bits_per_second}bit", "burst", f"{BURST_BYTES}b", "latency", QUEUE)
            _within(pid, "tc", "qdisc", "add", "dev", INTERFACE, "root", "handle", "1:", *limit)
            delay = ("netem", "delay", f"{delay_seconds * 1e6:.0f}us")
            try:
                _within(pid, "tc", "qdisc", "add", "dev", INTERFACE, "parent", "1:1", *delay)
            except OSError as error:
                why_no_delay = "netem: " + str(error).rpartition(": ")[2].rstrip(".")
        yield Hosts(pids, why_no_delay, Path(folder), ended)


@contextmanager
def _holder() -> Iterator[int]:
    """The first process of a host. It ends when its input is closed, which the end of this process does."""
    command = ["unshare", "--net", "--uts", "--pid", "--fork", "--kill-child", "sh", "-c", "echo && exec cat"]
    with subprocess.Popen(command, stdin=-1, stdout=-1, stderr=-1, text=True, start_new_session=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        try:
            if not process.stdout.readline():
                raise OSError(process.stderr.read().strip() or "no namespaces")
            yield process.pid
        finally:
            process.stdin.close()
            process.wait()  # until Linux has ended all processes of the host


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    if done.returncode:
        said = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[0]
        raise OSError(f"{' '.join(command)}: {said}")


def _into(pid: int) -> tuple[str, ...]:
    return "nsenter", *(f"--{x}=/proc/{pid}/ns/{x}" for x in ("net", "uts")), f"--pid=/proc/{pid}/ns/pid_for_children"


def _within(pid: int, *command: str) -> None:
    _run(*_into(pid), *command)


def why_not(bits_per_second: int, delay_seconds: float) -> str | None:
    """Why this machine cannot have two hosts, or None."""
    if missing := [command for command in COMMANDS if shutil.which(command) is None]:
        return f"needs {' and '.join(missing)} (Linux: packages iproute2 and util-linux)"
    try:
        with two_hosts(bits_per_second, delay_seconds):
            return None
    except OSError as error:
        return f"needs namespaces and a limited rate between them, which root may make on Linux: {error}"


def run_ranks(hosts: Hosts, per_host: int, seconds: float, function: Callable[..., Any], *args: Any) -> list[Any]:
    """Call function(*args) on every rank. Each host has one core, and one torchrun, which numbers ranks host by host.

    Returns:
        The results in the order of these numbers.

    Raises:
        RankFailedError: with all that was said, if a torchrun fails or time is up. The caller then ends the hosts, for
            ranks may still run there.
    """
    (hosts.folder / "call").write_bytes(pickle.dumps((function, args)))
    environment = os.environ | {"GLOO_SOCKET_IFNAME": INTERFACE, "OMP_NUM_THREADS": "1", "TMPDIR": str(hosts.folder)}
    # They meet at a fixed place: torchruns that find each other go on talking, and the link is to carry ranks alone.
    place = ("--nnodes", str(len(hosts.pids)), "--master-addr", "10.0.0.1", "--master-port", "29500")
    program = ("--nproc-per-node", str(per_host), "-m", "benchmarks.two_hosts", str(hosts.folder))
    cores, began = sorted(os.sched_getaffinity(0)), time.monotonic()
    agents: list[subprocess.Popen[bytes]] = []
    for host, pid in enumerate(hosts.pids):
        on_host = ("taskset", "--cpu-list", str(cores[host % len(cores)]), *_into(pid))
        torchrun = (sys.executable, "-m", "torch.distributed.run", *place, "--node-rank", str(host), *program)
        with (hosts.folder / f"host-{host}").open("wb") as said:
            options: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": said, "stderr": said, "cwd": ROOT}
            # A session of its own: Ctrl-C is not to end nsenter, which reaps its torchrun when the host has ended.
            agent = subprocess.Popen((*on_host, *torchrun), env=environment, start_new_session=True, **options)
        agents.append(hosts.ended.enter_context(agent))
    while None in (codes := [agent.poll() for agent in agents]) and not any(codes):
        if time.monotonic() - began > seconds:
            break
        time.sleep(0.1)
    if codes != [0] * len(agents):
        lines, late = [], f"still ran after {time.monotonic() - began:.0f} s"
        for host, code in enumerate(codes):
            lines.append(f"host {host}: {late if code is None else f'ended with code {code}'}")
            lines.append((hosts.folder / f"host-{host}").read_text(errors="replace"))
        raise RankFailedError("\n".join(lines))
    return [pickle.loads((hosts.folder / str(rank)).read_bytes()) for rank in range(len(agents) * per_host)]


def left_bytes() -> int:
    """Bytes that have left this thread's host, by the counter of its interface: headers and repeats included."""
    lines = Path("/proc/thread-self/net/dev").read_text().splitlines()
    [counters] = [line.split(":")[1].split() for line in lines if line.strip().startswith(f"{INTERFACE}:")]
    return int(counters[8])  # after eight counters of what came


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    function, args = pickle.loads((folder / "call").read_bytes())
    (folder / os.environ["RANK"]).write_bytes(pickle.dumps(function(*args)))
