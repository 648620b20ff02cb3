"""The files of examples/launch start ranks, and start them again. For Slurm there are stand-ins here."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from helpers import ROOT, TEXT, TINY, free_port

LAUNCH = ROOT / "examples" / "launch"
TRAIN = f"train {TINY} --warmup-steps 2 --save-every 5 --steps 40 --timeout 20 "
TRAIN += "--data text.txt --run-folder run"
# Each task of a step is a process that Slurm starts with its number. `scontrol` prints the names of hosts.
STAND_INS = {
    "srun": 'shift 3\nfor task in 0 1; do "$@" & done\nwait -n\nwait -n\n',
    "scontrol": "printf 'localhost\\nlocalhost\\n'\n",
}


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_bytes(TEXT)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    folders = (str(tmp_path / "bin"), str(Path(sys.executable).parent), os.environ["PATH"])
    for name, value in {
        "PATH": os.pathsep.join(folders),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "ADDRESS": "127.0.0.1",
        "LAST_CALL": "2",
    }.items():
        monkeypatch.setenv(name, value)


def start(stack, file, words, **variables):
    """A process of a file in examples/launch, in a group of its own, which ends with the test."""
    with Path("said.txt").open("ab") as said:
        process = subprocess.Popen(
            ["bash" if file.endswith("sh") else sys.executable, LAUNCH / file, *words.split()],
            env={**os.environ, **variables},
            stdout=said,
            stderr=said,
            start_new_session=True,
        )
    stack.callback(end, process)
    return process


def end(process):
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            break
        time.sleep(0.5)
    process.wait()


def said():
    return Path("said.txt").read_text(errors="replace")


def kill_a_rank():
    """Once there is a checkpoint."""
    deadline = time.monotonic() + 120
    while not (ranks := ranks_here() if list(Path("run").glob("checkpoint-*")) else []):
        assert time.monotonic() < deadline, said()
        time.sleep(0.05)
    os.kill(ranks[-1], signal.SIGKILL)


def ranks_here():
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            is_rank = b"\0RANK=" in (path / "environ").read_bytes()
            is_rank = is_rank and b"\0train\0" in (path / "cmdline").read_bytes()
            if is_rank and (path / "cwd").readlink() == Path.cwd():
                found.append(int(path.name))
    return sorted(found)


def check_complete(num_ranks):
    record = json.loads(Path("run/record.json").read_text())
    assert (record["status"], record["step"], record["num_ranks"]) == (
        "complete",
        40,
        num_ranks,
    ), said()
    assert Path("run/metrics.jsonl").read_bytes().count(b"\n") == 40


def test_one_host():
    with ExitStack() as stack:
        # 1: this machine is no cluster
        assert start(stack, "one_host.sh", "doctor", RANKS="2").wait(120) in (0, 1), said()
        assert "ready" in said()
        process = start(stack, "one_host.sh", TRAIN, RANKS="2")
        kill_a_rank()
        assert process.wait(180) == 0, said()
    check_complete(2)


def test_several_hosts():
    port = free_port()
    meeting = {"STORE": f"127.0.0.1:{port}", "HOSTS": "2", "RANKS": "1"}
    with ExitStack() as stack:
        start(stack, "store.py", port)
        hosts = [start(stack, "several_hosts.sh", "doctor", **meeting) for _ in range(2)]
        assert all(host.wait(120) in (0, 1) for host in hosts), said()
        hosts = [start(stack, "several_hosts.sh", TRAIN, **meeting) for _ in range(2)]
        kill_a_rank()
        assert [host.wait(180) for host in hosts] == [0, 0], said()
    check_complete(2)


def test_slurm_with_stand_ins(tmp_path):
    (tmp_path / "bin").mkdir()
    for name, content in STAND_INS.items():
        (tmp_path / "bin" / name).write_text(f"#!/usr/bin/env bash\n{content}")
        (tmp_path / "bin" / name).chmod(0o755)
    variables = {
        "SLURM_JOB_NODELIST": "two",
        "SLURM_JOB_ID": free_port(),
        "SLURM_JOB_NUM_NODES": "2",
    }
    variables |= {"SLURM_CPUS_PER_TASK": "1", "RANKS": "1"}
    with ExitStack() as stack:
        assert start(stack, "slurm.sh", TRAIN, **variables).wait(180) == 0, said()
    check_complete(2)
