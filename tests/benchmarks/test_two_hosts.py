"""Two hosts on one machine: what crosses between them by the plan, and that nothing of them is left behind."""

import os
import signal
import subprocess
import sys
import time

import pytest
from helpers import ROOT

from benchmarks import hosts, two_hosts
from benchmarks.measure import Sizes
from ring_dilated_attention.pattern import DilatedPattern

SETUP = hosts.Setup(Sizes(1024, 4, 16), DilatedPattern.dense(), 2, hosts.WAYS)


def needs_hosts():
    if reason := hosts.why_not():
        pytest.skip(f"this machine {reason}")


def crossing(setup, way):
    by_place = [0, 0, 1, 1] if way.is_told else [0, 1, 0, 1]
    inner = setup.ranks_per_host if way.deals else 1
    return hosts.crossing_bytes(hosts.plans_of(setup, way), by_place, inner, setup.sizes.planned())


def test_what_crosses_by_the_plan():
    """p ranks, g of them on a host, chunks of c bytes: p - 1 hops, of which one rank's cross if neighbours share a
    host, and all ranks' if not; an all-gather sends to p - g ranks; a mesh has p / g - 1 hops of chunks of c bytes."""
    c = 2 * 256 * 4 * 16 * 4  # keys and values in float32. A backward sends chunks again, and as many gradients.
    found = dict(zip([way.name for way in hosts.WAYS], (crossing(SETUP, way) for way in hosts.WAYS), strict=True))
    assert found == {
        "ring, by host": [0, 9 * c, 0, 9 * c],
        "ring, hosts alternate": [9 * c] * 4,
        "all-gather": [6 * c] * 4,
        "2-D mesh": [3 * c] * 4,
    }


def namespaces():
    """Network namespaces that processes of this machine live in."""
    found = set()
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            found.add(os.readlink(f"/proc/{name}/ns/net"))
        except OSError:  # it has ended
            continue
    return found


@pytest.mark.parametrize("error", [None, KeyboardInterrupt, SystemExit])
def test_no_namespace_is_left(error):
    needs_hosts()
    before = namespaces()
    try:
        with two_hosts.two_hosts(10**8, 1e-3) as made:
            both = {os.readlink(f"/proc/{pid}/ns/net") for pid in made.pids}
            assert len(both) == 2
            assert both <= namespaces() - before
            if error is not None:
                raise error
    except (KeyboardInterrupt, SystemExit) as raised:
        assert type(raised) is error  # noqa: PT017  as it was raised, whatever is cleaned up
    assert not both & namespaces()


def test_no_namespace_is_left_by_a_killed_process():
    needs_hosts()
    text = (
        "from benchmarks.two_hosts import two_hosts\n"
        "with two_hosts(10**8, 1e-3) as hosts:\n    print(*hosts.pids, flush=True)\n    input()\n"
    )
    process = subprocess.Popen([sys.executable, "-c", text], cwd=ROOT, stdin=-1, stdout=-1)
    holders = process.stdout.readline().split()
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    assert len(holders) == 2
    for pid in holders:
        for _ in range(1000):  # it reads that its input is closed
            if not os.path.exists(f"/proc/{int(pid)}/ns/net"):
                break
            time.sleep(0.01)
        assert not os.path.exists(f"/proc/{int(pid)}/ns/net")


def test_what_is_missing_is_said_in_a_sentence(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert hosts.why_not() == "needs ip and tc and unshare and nsenter (Linux: packages iproute2 and util-linux)"
    for name in two_hosts.COMMANDS:
        (tmp_path / name).write_text("#!/bin/sh\necho 'unshare: Operation not permitted' >&2\nexit 1\n")
        (tmp_path / name).chmod(0o755)
    reason = hosts.why_not()
    assert reason.startswith("needs network namespaces with a limited rate, which root may make on Linux: ")
    assert reason.endswith("unshare: Operation not permitted")
