"""The doctor: what it shows and saves, what it finds wrong, and a rank that does not come."""

import os
import re
import subprocess
import sys
from pathlib import Path
from shlex import split
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from forked import ForkedLauncher
from helpers import free_port
from transcripts import PREPARED, play

from ring_dilated_attention.commands import cli
from ring_dilated_attention.commands import local_ranks as processes
from ring_dilated_attention.commands.console import PREFIXES
from ring_dilated_attention.commands.doctor import examination
from ring_dilated_attention.commands.hardware import machine_of
from ring_dilated_attention.commands.local_ranks import RankFailedError

examine = examination.examine


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def examine_few_rows(*arguments):
    """As `rda doctor` examines, but rates by a matrix of a sixty-fourth of the size: these tests read none. And with
    made-up latencies: on a busy machine a plan may refuse those that were measured."""
    with mock.patch.object(examination, "ROWS", 256):
        found = examine(*arguments)
    for findings in found:
        findings["messages"] = one(0)["messages"]
        findings["rates"]["call_seconds"] = 1e-5
    return found


def test_two_ranks_are_examined_and_a_plan_reads_it(monkeypatch, capsys):
    monkeypatch.setattr(examination, "examine", examine_few_rows)
    assert cli.main(split("doctor --ranks 2 --save here.toml")) == 0
    out = capsys.readouterr().out
    assert out.endswith("\nready\n")
    ranks = re.findall(r"^(\d) .*B +([\d.]+) ([GMT])FLOP/s +\S+ \S+FLOP/s$", out, re.M)
    assert [rank for rank, _, _ in ranks] == ["0", "1"]
    least = min(float(number) * PREFIXES[prefix] for _, number, prefix in ranks)
    machine = machine_of("here.toml")
    assert machine.source.startswith("rda doctor on 2 ranks, ")
    assert machine.hardware.flops_per_second == pytest.approx(least, rel=0.01)
    assert cli.main(split("plan --seq-len 4Ki --ranks 2 --window 9 --hardware here.toml")) == 0


@pytest.mark.parametrize(("major", "dtype"), [(7, "float16"), (8, "bfloat16")])
def test_facts_of_a_card(major, dtype, monkeypatch):
    """As a machine with GPUs would tell them; no such machine has."""
    card = SimpleNamespace(name="A100", total_memory=8 * 10**10, major=major)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 27, 3))
    found = examination.facts(0, "cuda:0")
    versions = {"CUDA": "12.8", "NCCL": "2.27.3", "GPU": "A100", "torch": torch.__version__}
    assert versions.items() <= found["versions"].items()
    assert (found["dtype"], found["kernel"], found["memory_bytes"]) == (dtype, "sdpa", 8 * 10**10)


def one(rank, flops=1e12, **more):
    fine = {
        "rank": rank, "host": f"h{rank // 2}", "versions": {"torch": "2.13.0", "GPU": "none"}, "interfaces": ["lo"],
        "dtype": "float32", "memory_bytes": 8e9, "device": "CPU", "processor": "CPU", "kernel": "cpu",
        "messages": {"small_seconds": 1e-4, "large_seconds": 1.0, "handshake_seconds": 0.0},
        "rates": {
            "flops_per_second": flops, "backward_flops_per_second": 5e11, "call_seconds": 1e-5, "around_seconds": 0.0,
        },
    }  # fmt: skip
    return fine | more


def play_with(monkeypatch, capsys, name, *everyone):
    """A session with a doctor whose ranks find this."""
    monkeypatch.setattr(processes, "run_ranks", lambda *arguments: [everyone])
    play(PREPARED / f"doctor_{name}.txt", capsys)


def test_what_is_wrong_ends_the_answer(monkeypatch, capsys):
    """And "ready" is not said. Ranks of a launcher are not started again."""
    card = {"device": "P100", "memory_bytes": 16e9, "kernel": "sdpa", "interfaces": ["ib0", "lo"]}
    other = one(2, versions={"torch": "2.12.0", "GPU": "P100"}, **card)
    play_with(monkeypatch, capsys, "wrong", one(0), one(1, flops=1e11), other)


@pytest.mark.parametrize(("kernel", "memory"), [("cpu", 4e9), ("sdpa", 8e9)])
def test_what_is_saved(kernel, memory, monkeypatch, capsys):
    """Catches a host's memory divided among the ranks of others too, and the rates of the rank that ended first: all
    others are waited for."""
    everyone = [one(rank, flops=1e12 / (1 + rank), kernel=kernel) for rank in range(4)]
    play_with(monkeypatch, capsys, "saves", *everyone)
    found = machine_of("here.toml")
    assert (found.memory_bytes, found.hardware.flops_per_second) == (memory, 2.5e11)


def test_one_rank_has_measured_no_network(monkeypatch, capsys):
    """Catches a network that nobody measured, on which eight ranks would never wait; and a batch script that waits for
    tasks which nobody started: Slurm's variables outside of a step."""
    play_with(monkeypatch, capsys, "alone", one(0, messages=None))


def launched(ranks, num_ranks, more):
    """The environment of each rank, as torchrun or srun gives it."""
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), **more}
    rank_name, size_name = "RANK", "WORLD_SIZE"
    if "SLURM_STEP_ID" in more:
        rank_name, size_name = "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"
    return [place | {rank_name: str(rank), size_name: str(num_ranks)} for rank in ranks]


@pytest.mark.parametrize(
    ("ranks", "num_ranks", "more", "why"),
    [
        ([0], 3, {}, "1/3 clients joined"),
        ([0], 3, {"SLURM_STEP_ID": "0"}, "1/3 clients"),
        ([0, 1], 2, {"GLOO_SOCKET_IFNAME": "eth9"}, "eth9"),
    ],
)
def test_ranks_that_do_not_meet(ranks, num_ranks, more, why):
    """The sentence counts those who joined, or passes on what gloo says of an interface."""
    words = split("-m ring_dilated_attention doctor --timeout 1")
    places = launched(ranks, num_ranks, more)
    started = [
        ForkedLauncher(words, Path(f"said {rank}"), place)
        for rank, place in zip(ranks, places, strict=True)
    ]
    met = f"some of {num_ranks} ranks did not connect at 127.0.0.1:{places[0]['MASTER_PORT']} within 1 s: "
    for rank, process in zip(ranks, started, strict=True):
        said = process.end()
        assert f"rda doctor: not ready: rank {rank}: {met}" in said
        assert why in said
        assert process.poll() == 1


def test_without_rank_0_one_sentence_is_said():
    """Catches torch's log, whose frames of C++ hide it."""
    [place] = launched([1], 2, {})
    words = [sys.executable, *split("-m ring_dilated_attention doctor --timeout 1")]
    ended = subprocess.run(words, env=os.environ | place, capture_output=True, text=True)
    assert ended.returncode == 1
    sentence = "rda doctor: not ready: rank 1: some of 2 ranks did not connect at 127.0.0.1:"
    assert ended.stderr.startswith(sentence)
    assert ended.stderr.count("\n") == 1


def test_the_reason_of_a_failed_rank_is_said(capsys):
    error = RankFailedError("rank 1: no device")
    with mock.patch.object(processes, "run_ranks", side_effect=error):
        assert cli.main(split("doctor --ranks 2")) == 1
    assert capsys.readouterr().err == f"rda doctor: not ready: {error}\n"


def test_no_time_is_below_zero(monkeypatch):
    """Catches a small call that seems to take less than one of its tiles, on a machine that is busy now and then."""
    times = iter([(8.0, 8.0), (1.0, 1.0), (90.0, 90.0)])
    monkeypatch.setattr(examination, "_times", lambda *arguments: next(times))
    found = examination.rates(None, "cpu", torch.float32)
    assert found["call_seconds"] > 1
    assert found["around_seconds"] == 0
