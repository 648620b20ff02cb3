"""Two hosts on one machine: what crosses between them by the plan, and that nothing of them is left behind."""

import os
import subprocess
import sys
import time

import pytest
from helpers import ROOT

from benchmarks import hosts, two_hosts
from benchmarks.measure import Sizes
from ring_dilated_attention.commands.local_ranks import RankFailedError
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
        "ring, dealt in turn": [0, 9 * c, 0, 9 * c],
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


@pytest.mark.parametrize(
    ("seconds", "function", "argument", "said"),
    [
        (60, int, "a word", r"host \d: ended with code 1\n(.*\n)+ValueError: invalid literal for int.*: 'a word'"),
        (0.5, time.sleep, 60, r"host 0: still ran after \d+ s\n(.*\n)*host 1: still ran"),
    ],
)
def test_a_torchrun_that_fails_or_takes_too_long_is_reported_with_its_words(seconds, function, argument, said):
    needs_hosts()
    with pytest.raises(RankFailedError, match=said), two_hosts.two_hosts(10**8, 1e-3) as made:
        two_hosts.run_ranks(made, 1, seconds, function, argument)
    assert not made.folder.exists()


def test_ranks_are_in_the_namespaces_of_their_hosts_which_end_with_a_killed_process(tmp_path):
    """Each host has one core. Torchruns and ranks end with their namespaces."""
    needs_hosts()
    started = tmp_path / "started"
    say = f"echo $RANK $(grep Cpus_allowed_list /proc/self/status) $(readlink /proc/self/ns/net) >> {started}; sleep 60"
    text = (
        "import subprocess, sys\nfrom benchmarks.two_hosts import run_ranks, two_hosts\n"
        "with two_hosts(10**8, 1e-3) as hosts:\n    run_ranks(hosts, 1, 60, subprocess.getoutput, sys.argv[1])\n"
    )
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    with subprocess.Popen([sys.executable, "-c", text, say], cwd=ROOT, env=environment) as process:
        started.touch()
        wait_until(lambda: started.read_text().count("net:") == 2)
        cores, places = sorted(os.sched_getaffinity(0)), sorted(started.read_text().splitlines())
        both = {place.split()[-1] for place in places}
        assert [place.split()[:-1] for place in places] == [
            [str(k), "Cpus_allowed_list:", str(cores[k % len(cores)])] for k in range(2)
        ]
        assert both <= namespaces()
        process.kill()
    assert len(both) == 2
    wait_until(lambda: not both & namespaces())  # it is read that an input is closed


def wait_until(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_what_is_missing_is_said_in_a_sentence(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    missing = "ip and tc and unshare and nsenter and taskset"
    assert hosts.why_not() == f"needs {missing} (Linux: packages iproute2 and util-linux)"
    for name in two_hosts.COMMANDS:
        (tmp_path / name).write_text("#!/bin/sh\necho 'unshare: Operation not permitted' >&2\nexit 1\n")
        (tmp_path / name).chmod(0o755)
    reason = hosts.why_not()
    assert reason.startswith("needs namespaces and a limited rate between them, which root may make on Linux: ")
    assert reason.endswith("unshare: Operation not permitted")
