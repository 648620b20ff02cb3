"""A run that goes on after its ranks or its launcher were lost. `make faults` has 20 trials of each kind."""

import argparse
import json
import os
import random
import re
import signal
import time
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from threading import Timer
from types import SimpleNamespace
from unittest import mock

import pytest
import torch.distributed as dist
from distributed import START
from forked import ForkedLauncher
from helpers import free_port
from restart_trials import (
    OPTIONS,
    TEXT,
    Job,
    Size,
    is_running,
    newest_step,
    result,
    run_trial,
    whole_result,
)

from ring_dilated_attention.commands.cli import main
from ring_dilated_attention.commands.train import own
from ring_dilated_attention.models.saved_run import STATE_FILE
from ring_dilated_attention.training import checkpoint, loop
from ring_dilated_attention.training.agreement import store_of_launcher
from ring_dilated_attention.training.checkpoint import signed
from ring_dilated_attention.training.metrics import Metrics
from ring_dilated_attention.training.rank_launcher import LAUNCHER, RESTART, end_with_launcher
from ring_dilated_attention.training.run_folder import STARTS_FILE, count_start, own_folder
from ring_dilated_attention.training.stop_request import StopRequest

SIZE = Size(steps=30, timeout=4)


def slow_writes():
    """A checkpoint of 30 steps is written within milliseconds: a fault may come too late each time."""
    finish = checkpoint._finish

    def late(*args):
        time.sleep(0.05)
        finish(*args)

    checkpoint._finish = late


def new_job(launcher="rda", change=int, **size):
    Path("text.txt").write_bytes(TEXT)
    return Job(launcher, SIZE._replace(**size), partial(ForkedLauncher, change=change))


@contextmanager
def begun(job):
    try:
        job.begin()
        yield
    finally:
        job.clear()


@pytest.fixture
def in_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def whole_folder(tmp_path_factory):
    """Where a run ended that was never struck."""
    return tmp_path_factory.mktemp("whole")


@pytest.fixture(scope="module")
def whole(whole_folder):
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(whole_folder)
        return whole_result(new_job())


@pytest.mark.usefixtures("in_a_folder")
def test_a_run_that_is_struck_goes_on_to_the_bit_and_with_another_number_of_ranks(whole):
    """Both ranks are killed, then the launcher. `make faults` has 20 trials of each kind of fault.

    Three ranks go on. Their first loss agrees within 1e-5 with that of the ranks before, and the final one within 1 %.
    """
    job = new_job()
    with begun(job):
        assert job.wait_until(lambda: newest_step() >= 5 and len(job.ranks()) == 2)
        job.kill(struck := job.ranks())
        assert job.wait_until(
            lambda: newest_step() >= 10 and len(set(job.ranks()) - set(struck)) == 2
        )
        job.kill(head.pid for head in job.heads)
        job.num_ranks = 3
        job.begin()  # waits for the ranks of the first
        assert job.end() == [0], job.said.read_text()
    assert "rda train: restart 1 of 4 from run/checkpoint-0000" in job.said.read_text()
    steps = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    first = [len(step["resident_bytes"]) for step in steps].index(3)
    found = result()
    assert 10 <= first < SIZE.steps
    assert found.losses[:first] == whole.losses[:first]
    assert found.losses[first] == pytest.approx(whole.losses[first], abs=1e-5)
    assert found.held_out == pytest.approx(whole.held_out, rel=0.01)


@pytest.mark.parametrize(
    ("kind", "launcher"),
    [("worker", "torchrun"), ("rank 0", "rda"), ("agent", "torchrun"), ("writing", "rda"),
     ("restarting", "rda"), ("stop", "rda"), ("disk", "rda")],
)  # fmt: skip
@pytest.mark.usefixtures("in_a_folder")
def test_one_of_each_fault(kind, launcher, whole):
    """`two` is in the test above, with a launcher that is killed after it. `fsdp` takes longer: it is in `make faults`
    alone. The test above kills rda's own launcher, `agent` a torchrun."""
    job = new_job(launcher, change=slow_writes if kind == "writing" else int)
    trial = run_trial(kind, job, random.Random(0), whole)
    assert trial.complaints == [], "\n".join(trial.complaints)
    assert trial.outcome == "went on" or kind != "worker"


@pytest.mark.usefixtures("in_a_folder")
def test_the_only_rank_of_a_torchrun_without_restarts_ends_with_it():
    """Catches one that trains alone, and on."""
    job = new_job("torchrun", steps=2000, restarts=0)
    job.num_ranks = 1
    with begun(job):
        assert job.wait_until(partial(is_running, job, 3)), job.said.read_text()
        job.lose_head(random.Random(0))
        deadline = time.monotonic() + 20
        while job.orphans() and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not job.orphans()
    assert "saved at step" in job.said.read_text()


def test_a_finished_run_is_reported(whole, whole_folder, monkeypatch):
    """And not repeated: its checkpoint is the one that was there."""
    monkeypatch.chdir(whole_folder)
    newest = Path(f"run/checkpoint-{SIZE.steps:06d}")
    inode = newest.stat().st_ino
    torchrun = {"RANK": "0", "WORLD_SIZE": "1", "TORCHELASTIC_MAX_RESTARTS": "3"}
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    Path("run/record.json").unlink()
    with mock.patch.dict(os.environ, torchrun | place):
        assert main(["train", *OPTIONS.split(), "--steps", str(SIZE.steps)]) == 0
    assert json.loads(Path("run/record.json").read_text())["status"] == "complete"
    assert newest.stat().st_ino == inode


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            "--restarts 2 --run-folder run",
            "--restarts 2, but another launcher started these ranks, and it alone",
        ),
        (
            "",
            "torchrun --max-restarts needs --run-folder: in it restarted ranks find their run",
        ),
    ],
)
def test_torchrun_counts_restarts_itself(words, said, capsys):
    torchrun = {"RANK": "0", "WORLD_SIZE": "2", "TORCHELASTIC_MAX_RESTARTS": "3"}
    with mock.patch.dict(os.environ, torchrun):
        assert main(["train", *words.split()]) == 2
    assert said in capsys.readouterr().err


def leave_checkpoint(step):
    folder = Path(f"run/checkpoint-{step:06d}")
    folder.mkdir(parents=True)
    (folder / STATE_FILE).write_text(signed({}, {"run": "a", "step": step}))


def die_before_a_checkpoint():
    """The ranks of each start end after the second step."""
    rate = loop.share_of_peak

    def dying(options, step):
        if step == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return rate(options, step)

    loop.share_of_peak = dying


@pytest.mark.parametrize(
    ("restarts", "code", "said"),
    [
        (
            9,
            2,
            "run: 3 starts in a row ended without a first checkpoint: find and mend the cause first",
        ),
        (1, 1, "was ended by SIGKILL; newest checkpoint: none; go on with: rda train {command}"),
    ],
)
@pytest.mark.usefixtures("in_a_folder")
def test_restarts_end(restarts, code, said):
    """When they are used up, or when three starts left no new checkpoint."""
    job = new_job(change=die_before_a_checkpoint, restarts=restarts)
    with begun(job):
        assert job.end() == [code], job.said.read_text()
    error = job.said.read_text()
    words = f"{OPTIONS} --steps {SIZE.steps} --timeout {SIZE.timeout}"
    words += f" --ranks 2 --restarts {restarts}"
    assert error.endswith(said.format(command=words) + "\n"), error
    assert error.count("rda train: restart ") == min(restarts, 2)


def refuse_at_the_third_step():
    """Rank 0 alone: no disk has room for its metrics."""
    add = Metrics.add

    def full(metrics, step):
        if step.step == 3 and metrics.file is not None:
            raise OSError(28, "No space left on device", "run/metrics.jsonl")
        add(metrics, step)

    Metrics.add = full


@pytest.mark.usefixtures("in_a_folder")
def test_ranks_that_refuse_are_not_started_again():
    """Although the other one ends with an error, since it lost the one that refused. A new run leaves nothing."""
    job = new_job(change=refuse_at_the_third_step)
    with begun(job):
        assert job.end() == [2], job.said.read_text()
    said = job.said.read_text()
    sentence = r"rda train: rank 0 on host \S+: run/metrics.jsonl: No space left on device\n"
    assert re.search(sentence, said), said
    assert "restart" not in said
    assert not Path("run").exists()


def start(number):
    """The start of a run by a launcher that has started ranks so often before. Whether it may train."""
    try:
        count_start(Path("run"), anew=number == 0)
    except ValueError as error:
        assert str(error).startswith("run: 3 starts in a row ended without a ")  # noqa: PT017
        return False
    return True


@pytest.mark.usefixtures("in_a_folder")
def test_what_counts_is_starts_without_a_checkpoint_not_the_count_of_a_launcher():
    """Each torchrun counts its own restarts, and rank 0 may be of another one after each. The first start of a command
    counts anew."""
    leave_checkpoint(5)
    assert [start(number) for number in (0, 1, 7, 8)] == [True, True, True, False]
    assert [start(number) for number in (0, 1, 2, 3, 4)] == [True, True, True, False, False]
    # the torchrun that had restarted least goes on: its 2 is less than 7, and no repetition
    leave_checkpoint(10)
    assert [start(number) for number in (9, 2, 3, 4)] == [True, True, True, False]


@pytest.mark.parametrize("content", [b"", b"mine\n", b"\xff"])
def test_a_file_of_somebody_else_counts_no_start(content, tmp_path):
    (tmp_path / STARTS_FILE).write_bytes(content)
    said = r"was not made by rda train, and nothing is written over it"
    with pytest.raises(ValueError, match=said):
        count_start(tmp_path, anew=False)


def test_a_folder_is_waited_for(tmp_path):
    """A run whose launcher was killed saves, and leaves its folder."""
    first = own_folder(tmp_path / "run")
    folder = first.__enter__()
    (folder / "file").touch()
    Timer(0.2, first.__exit__, (None, None, None)).start()
    with own_folder(folder, seconds=30) as again:
        assert again == folder


def orphan(tells, moment):
    """A process that starts one that waits for ever, and ends."""
    os.environ[LAUNCHER] = str(os.getpid())
    if os.fork() == 0:
        while moment == "begins" and os.environ[LAUNCHER] == str(os.getppid()):
            time.sleep(0.01)
        end_with_launcher()
        trains = moment == "trains"
        with StopRequest() if trains else nullcontext() as stop:
            tells.send("started")
            while not (trains and stop.requested):
                time.sleep(0.01)
            tells.send("stopping")
            os._exit(0)
    time.sleep(0 if moment == "begins" else 0.1)
    os._exit(0)


@pytest.mark.parametrize("moment", ["begins", "meets", "trains"])
def test_a_rank_ends_after_its_parent(moment):
    """At once, where it takes a place at the meeting; where it trains, it may save first.

    One that looks for the first time when its parent has ended must not take the process that adopted it for one.
    """
    hears, tells = START.Pipe(duplex=False)
    START.Process(target=orphan, args=(tells, moment)).start()
    tells.close()
    for said in {"begins": [], "meets": ["started"], "trains": ["started", "stopping"]}[moment]:
        assert hears.recv() == said
    assert hears.poll(30)  # the pipe closes with the process
    with pytest.raises(EOFError):
        hears.recv()


def test_ranks_meet_apart_from_those_of_an_earlier_start(monkeypatch):
    """Catches ranks that find addresses of dead ones in torchrun's store, which stays."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(server.port)}
    environment |= {"RANK": "0", "WORLD_SIZE": "2"}
    environment |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_MAX_RESTARTS": "3"}
    with mock.patch.dict(os.environ, environment):
        for restart in ("0", "1"):
            os.environ[RESTART] = restart
            first, second = (store_of_launcher(rank, 2) for rank in range(2))
            assert not second.check(["address"])
            first.set("address", "here")
            assert second.get("address") == b"here"
        os.environ["GROUP_WORLD_SIZE"] = "2"
        remedy = "export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for each torchrun"
        with pytest.raises(ValueError, match=remedy):
            store_of_launcher(0, 2)


def test_the_other_ranks_do_not_wait_longer_than_the_first_one(tmp_path):
    """It waits for the folder less long than they wait for it."""
    arguments = argparse.Namespace(run_folder=tmp_path, restarts=1, timeout=8)
    with mock.patch("ring_dilated_attention.commands.train.own_folder") as claim:
        own(arguments, SimpleNamespace(folder=tmp_path), mock.Mock())
    claim.assert_called_once_with(tmp_path, 4)
