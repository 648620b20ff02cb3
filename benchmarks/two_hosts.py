"""Two hosts on one machine: network namespaces, joined by a pair of virtual interfaces with a limited rate (Linux).

A namespace has no name. It lives as long as a process that holds it, and that process ends with this one, however this
one ends. So nothing is left behind, not even by `kill -9`.
"""

import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

INTERFACE = "eth0"
COMMANDS = ("ip", "tc", "unshare", "nsenter")
BURST_BYTES = 128 * 1024  # what may pass at once, without the limit
QUEUE = "50ms"  # what a host may have ready to leave; packets beyond it are dropped
CLONE_NEWUTS, CLONE_NEWNET = 0x04000000, 0x40000000


class Hosts(NamedTuple):
    """pids: of the process that holds each host. why_no_delay: why messages are not delayed, or None."""

    pids: tuple[int, ...]
    why_no_delay: str | None


@contextmanager
def two_hosts(bits_per_second: int, delay_seconds: float) -> Iterator[Hosts]:
    """Two hosts, with this rate each way. The delay is left out where the kernel has none.

    Raises:
        OSError: if this machine or this user cannot have them.
    """
    with ExitStack() as stack:
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
        yield Hosts(pids, why_no_delay)


@contextmanager
def _holder() -> Iterator[int]:
    """A process in a network namespace of its own. It ends when its input is closed, which the end of this one does."""
    command = ["unshare", "--net", "sh", "-c", "echo && exec cat"]
    with subprocess.Popen(command, stdin=-1, stdout=-1, stderr=-1, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        try:
            if not process.stdout.readline():
                raise OSError(process.stderr.read().strip() or "no network namespace")
            yield process.pid
        finally:
            process.stdin.close()


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    if done.returncode:
        said = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[0]
        raise OSError(f"{' '.join(command)}: {said}")


def _within(pid: int, *command: str) -> None:
    _run("nsenter", f"--net=/proc/{pid}/ns/net", *command)


def why_not(bits_per_second: int, delay_seconds: float) -> str | None:
    """Why this machine cannot have two hosts, or None."""
    if missing := [command for command in COMMANDS if shutil.which(command) is None]:
        return f"needs {' and '.join(missing)} (Linux: packages iproute2 and util-linux)"
    try:
        with two_hosts(bits_per_second, delay_seconds):
            return None
    except OSError as error:
        return f"needs network namespaces with a limited rate, which root may make on Linux: {error}"


def enter(hosts: Hosts, host: int) -> None:
    """Move this thread, and threads and groups that it makes from now on, to a host. It may then set its host's name
    without changing that of the machine."""
    libc = ctypes.CDLL(None, use_errno=True)
    with Path(f"/proc/{hosts.pids[host]}/ns/net").open() as namespace:
        if libc.setns(namespace.fileno(), CLONE_NEWNET) or libc.unshare(CLONE_NEWUTS):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE


def left_bytes() -> int:
    """Bytes that have left this thread's host, by the counter of its interface: headers and repeats included."""
    lines = Path("/proc/thread-self/net/dev").read_text().splitlines()
    [counters] = [line.split(":")[1].split() for line in lines if line.strip().startswith(f"{INTERFACE}:")]
    return int(counters[8])  # after eight counters of what came
