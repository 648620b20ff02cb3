"""The doctor: what it shows and saves, what it finds wrong, and a rank that does not come."""

import os
import re
import subprocess
import sys
from shlex import split
from unittest import mock

import pytest
import torch
from forked import ForkedLauncher
from helpers import free_port

from ring_dilated_attention.commands import cli
from ring_dilated_attention.commands import local_ranks as processes
from ring_dilated_attention.commands.console import PREFIXES
from ring_dilated_attention.commands.doctor import doctor, examination
from ring_dilated_attention.commands.hardware import machine_of
from ring_dilated_attention.commands.local_ranks import RankFailedError

examine = examination.examine


def examine_few_rows(*arguments):
    """As `rda doctor` examines, but rates by a matrix of a sixty-fourth of the size: these tests read none."""
    with mock.patch.object(examination, "ROWS", 256):
        return examine(*arguments)


def test_two_ranks_are_examined_and_a_plan_reads_it(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(examination, "examine", examine_few_rows)
    file = tmp_path / "here.toml"
    assert cli.main(["doctor", "--ranks", "2", "--save", str(file)]) == 0
    out = capsys.readouterr().out
    assert out.endswith("\nready\n")
    ranks = re.findall(r"^(\d) .*B +([\d.]+) ([GMT])FLOP/s +\S+ \S+FLOP/s$", out, re.M)
    assert [rank for rank, _, _ in ranks] == ["0", "1"]
    rates = [float(number) * PREFIXES[prefix] for _, number, prefix in ranks]
    assert machine_of(str(file)).hardware.flops_per_second == pytest.approx(min(rates), rel=0.01)
    argv = [
        "plan",
        "--seq-len",
        "4Ki",
        "--ranks",
        "2",
        "--segment-lengths",
        "4Ki",
        "--dilation-rates",
        "1",
    ]
    assert cli.main([*argv, "--hardware", str(file)]) == 0
    assert "rda doctor on 2 ranks" in " ".join(capsys.readouterr().out.split())


class Card:
    name, total_memory = "A100", 8 * 10**10

    def __init__(self, major):
        self.major = major


@pytest.mark.parametrize(("major", "dtype"), [(7, "float16"), (8, "bfloat16"), (9, "bfloat16")])
def test_facts_of_a_card(major, dtype, monkeypatch):
    """As a machine with GPUs would tell them; no such machine has."""
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Card(major))
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 27, 3))
    found = examination.facts(0, "cuda:0")
    versions = {"CUDA": "12.8", "NCCL": "2.27.3", "GPU": "A100"}
    assert versions.items() <= found["versions"].items()
    assert "torch" in found["versions"]
    assert (found["dtype"], found["kernel"], found["memory_bytes"]) == (dtype, "sdpa", 8 * 10**10)


def one(rank, **more):
    fine = {
        "rank": rank, "host": f"h{rank}", "versions": {"torch": "2.13.0", "GPU": "none"}, "interfaces": ["eth0", "lo"],
        "dtype": "float32", "memory_bytes": 8e9, "device": "CPU", "processor": "CPU", "rates": RATES, "kernel": "cpu",
        "messages": {"small_seconds": 1e-4, "large_seconds": 1.0, "handshake_seconds": 0.0},
    }  # fmt: skip
    return fine | more


RATES = {
    "flops_per_second": 1e12,
    "backward_flops_per_second": 5e11,
    "call_seconds": 1e-5,
    "around_seconds": 0.0,
}


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (
            {"versions": {"torch": "2.12.0", "GPU": "none"}},
            "torch differs: 2.13.0 on rank 0, 2.12.0 on rank 3. Take the",
        ),
        (
            {"versions": {"torch": "2.13.0", "GPU": "A100"}},
            "GPU differs: none on rank 0, A100 on rank 3. Take the",
        ),
    ],
)
def test_what_is_wrong_is_said(fault, said):
    assert doctor.to_mend([one(k) for k in range(4)]) == []
    [problem] = doctor.to_mend([*(one(k) for k in range(3)), one(3, **fault)])
    assert said in problem


def test_the_table_has_every_rank():
    versions = dict.fromkeys(
        ("python", "torch", "numpy", "safetensors", "CUDA", "NCCL"), "12.3.4+cpu"
    )
    card = {"device": "P100", "memory_bytes": 16e9, "kernel": "sdpa"}
    everyone = [one(0, versions=versions, **card), one(1, interfaces=["ib0"])]
    text = doctor.text(everyone, doctor.hardware_of(everyone))
    lines = text.splitlines()
    assert all(len(line) <= 80 for line in lines)
    assert "network interfaces of h0: eth0, lo" in lines
    assert "network interfaces of h1: ib0" in lines
    assert re.search(r"^0 +h0 +P100 +16\.0 GB +1\.00 TFLOP/s +500 GFLOP/s$", text, re.M)
    assert re.search(r"^1 +h1 +CPU +8\.00 GB ", text, re.M)
    assert lines[-1] == "neighbouring ranks: 16.8 MB/s one way, latency 100.0 µs"


def test_ranks_of_a_host_share_its_memory():
    """Catches a host's memory divided among the ranks of others too."""
    everyone = [one(k, host=f"h{k // 2}") for k in range(4)]
    hardware = doctor.hardware_of(everyone)
    assert doctor.machine_found(everyone, hardware).memory_bytes == 4e9
    cards = [one(k, host="h", kernel="sdpa") for k in range(4)]
    assert doctor.machine_found(cards, hardware).memory_bytes == 8e9


def test_the_slowest_rank_counts():
    """Catches a forecast for the rank that ended first: all others are waited for."""
    slow = one(1, rates=RATES | {"flops_per_second": 1e11})
    assert doctor.hardware_of([one(0), slow, one(2)]).flops_per_second == 1e11


def test_one_rank_has_measured_no_network(tmp_path, monkeypatch, capsys):
    """Catches a network that nobody measured, on which eight ranks would never wait."""
    alone = one(0)
    del alone["messages"]
    monkeypatch.setattr(processes, "run_ranks", lambda *arguments: [[alone]])
    assert cli.main(["doctor"]) == 0
    assert capsys.readouterr().out.endswith("attention in float32\nready\n")
    assert cli.main(["doctor", "--save", str(tmp_path / "here.toml")]) == 2
    assert "here.toml needs two ranks or more" in " ".join(capsys.readouterr().err.split())


TORCHRUN = ("RANK", "WORLD_SIZE")


@pytest.mark.parametrize(
    ("ranks", "num_ranks", "names", "more", "why"),
    [
        ([0], 3, TORCHRUN, {}, "1/3 clients joined"),
        ([0], 3, ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"), {"SLURM_STEP_ID": "0"}, "1/3 clients"),
        ([0, 1], 2, TORCHRUN, {"GLOO_SOCKET_IFNAME": "eth9"}, "eth9"),
    ],
)
def test_ranks_that_do_not_meet(ranks, num_ranks, names, more, why, tmp_path):
    """The sentence counts those who joined, or passes on what gloo says of an interface."""
    port = free_port()
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port} | more
    words = split("-m ring_dilated_attention doctor --timeout 2")
    started = [
        ForkedLauncher(
            words,
            tmp_path / f"said {rank}",
            place | dict(zip(names, (str(rank), str(num_ranks)), strict=True)),
        )
        for rank in ranks
    ]
    for rank, process in zip(ranks, started, strict=True):
        said = process.end()
        met = f"not all {num_ranks} ranks met at 127.0.0.1:{port} within 2 s: "
        assert f"rda doctor: not ready: rank {rank}: {met}" in said
        assert why in said
        assert process.poll() == 1


def test_without_rank_0_one_sentence_is_said():
    """Catches torch's log, whose frames of C++ hide it."""
    place = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    words = [sys.executable, *split("-m ring_dilated_attention doctor --timeout 1")]
    ended = subprocess.run(words, env=os.environ | place, capture_output=True, text=True)
    assert ended.returncode == 1
    assert ended.stderr.startswith(
        "rda doctor: not ready: rank 1: not all 2 ranks met at 127.0.0.1:"
    )
    assert ended.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "error", [RankFailedError("rank 1: no such device"), ValueError("no such device")]
)
def test_the_reason_of_a_failed_rank_is_said(error, capsys, monkeypatch):
    monkeypatch.setattr(processes, "run_ranks", mock.Mock(side_effect=error))
    assert cli.main(["doctor", "--ranks", "2"]) == 1
    assert capsys.readouterr().err == f"rda doctor: not ready: {error}\n"


def test_tasks_outside_of_a_step_are_ignored(monkeypatch, capsys):
    """Catches a batch script that waits for tasks which nobody started."""
    monkeypatch.setenv("SLURM_PROCID", "0")
    monkeypatch.setenv("SLURM_NTASKS", "4")
    monkeypatch.setattr(processes, "run_ranks", lambda *arguments: [[one(0)]])
    monkeypatch.setattr(doctor, "report", lambda *arguments: None)
    assert cli.main(["doctor"]) == 0
    assert capsys.readouterr().err == ""


PLACE = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("arguments", "environment", "message"),
    [
        (["--ranks", "0"], {}, "--ranks: must be at least 1"),
        (["--ranks", "1M"], {}, "--ranks: must be at most 256"),
        (["--timeout", "0"], {}, "--timeout: must be at least 1, got 0"),
        (["--ranks", "2"], PLACE, "a launcher started 2 ranks: leave --ranks out"),
    ],
)
def test_bad_requests_are_refused(arguments, environment, message, monkeypatch, capsys):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert cli.main(["doctor", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_no_time_is_below_zero(monkeypatch):
    """Catches a small call that seems to take less than one of its tiles, on a machine that is busy now and then."""
    times = iter([(8.0, 8.0), (1.0, 1.0), (90.0, 90.0)])
    monkeypatch.setattr(examination, "_times", lambda *arguments: next(times))
    found = examination.rates(None, "cpu", torch.float32)
    assert found["call_seconds"] > 1
    assert found["around_seconds"] == 0


def test_what_it_did_not_write_is_not_overwritten(tmp_path, capsys, monkeypatch):
    """Before anything is measured."""
    monkeypatch.setattr(processes, "run_ranks", None)
    file = tmp_path / "mine.toml"
    file.write_text(
        '[hardware]\nflops_per_second = 1e12\nbytes_per_second = 1e9\nsource = "my own"\n'
    )
    before = file.read_bytes()
    assert cli.main(["doctor", "--ranks", "2", "--save", str(file)]) == 2
    assert f"{file} was not made by this run of rda doctor" in capsys.readouterr().err
    assert file.read_bytes() == before


def test_what_is_wrong_ends_the_answer(capsys, monkeypatch):
    """And "ready" is not said."""
    everyone = [one(0), one(1, versions={"torch": "2.12.0", "GPU": "none"})]
    monkeypatch.setattr(processes, "run_ranks", lambda *arguments: [everyone])
    assert cli.main(["doctor", "--ranks", "2"]) == 1
    said = " ".join(capsys.readouterr().out.split())
    problem = "torch differs: 2.13.0 on rank 0, 2.12.0 on rank 1. Take the same everywhere"
    assert said.endswith(f" not ready: {problem}")
