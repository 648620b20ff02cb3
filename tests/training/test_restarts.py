"""A run that goes on after its ranks or its launcher were lost. `make faults` has 20 trials of each kind."""

import argparse
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
from restart_trials import TEXT, Size, TrainingJob, is_running, run_trial, whole_result
from torch.distributed.elastic.multiprocessing.api import PContext

from ring_dilated_attention.commands import train
from ring_dilated_attention.models.saved_run import STATE_FILE
from ring_dilated_attention.training import checkpoint, loop
from ring_dilated_attention.training.agreement import store_of_launcher
from ring_dilated_attention.training.checkpoint import signed
from ring_dilated_attention.training.metrics import Metrics
from ring_dilated_attention.training.rank_launcher import LAUNCHER, RESTART, end_with_launcher
from ring_dilated_attention.training.run_folder import count_start, own_folder
from ring_dilated_attention.training.stop_request import StopRequest

SIZE = Size(26, timeout=4, restarts=9)
# By launcher: a fault, and after how many steps it strikes. Between two of them a checkpoint is written.
FAULTS = {
    "rda": {"agent": 4, "two": 7, "writing": 10, "restarting": 13, "stop": 16, "disk": 19},
    "torchrun": {"worker": 4, "rank 0": 7, "agent": 10},
}


def slow_writes_and_short_waits():
    """A checkpoint is written within milliseconds: a fault may come too late each time. A rank that is
    stopped is ended after all waits. Under load, other ranks may be killed too: no result depends on it."""
    finish = checkpoint._finish

    def late(*args):
        time.sleep(0.05)
        finish(*args)

    checkpoint._finish = late
    train.GRACE_SECONDS = 1
    PContext.close.__defaults__ = (None, 1)


def new_job(launcher="rda", change=int, *options, **size):
    Path("text.txt").write_bytes(TEXT)
    start = partial(ForkedLauncher, change=change)
    return TrainingJob(launcher, SIZE._replace(**size), start, "--save-every=3", *options)


@contextmanager
def begun(job):
    try:
        job.begin()
        yield
    finally:
        job.clear()


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """What a run comes to that is never struck."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("whole"))
        return whole_result(new_job())


@pytest.mark.parametrize(("launcher", "ranks_at_last"), [("rda", 2), ("torchrun", 3)])
def test_one_of_each_fault(launcher, ranks_at_last, whole):
    """One run is struck again and again, and comes to the bit to what it would have come to. Where three ranks go on
    from two, their first loss agrees within 1e-5, and the final one within 1 %."""
    job = new_job(launcher, change=slow_writes_and_short_waits)
    trial = run_trial(FAULTS[launcher], job, random.Random(0), whole, ranks_at_last)
    assert not trial.complaints, "\n".join(trial.complaints)
    assert trial.outcome == "the same command went on"
    assert "rda train: restart 1 of 9 from run/checkpoint-0000" in job.said.read_text()


def test_a_rank_of_a_sharded_run_is_lost():
    """With --fsdp each rank writes its part of a checkpoint."""
    whole = whole_result(new_job("rda", int, "--fsdp", steps=17))
    job = new_job("rda", slow_writes_and_short_waits, "--fsdp", steps=17)
    trial = run_trial({"worker": 4}, job, random.Random(0), whole)
    assert trial.complaints == [], "\n".join(trial.complaints)
    assert trial.outcome == "went on"


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


def test_restarts_end():
    """When three starts left no new checkpoint. (When they are used up, all is as without them.)"""
    job = new_job(change=die_before_a_checkpoint)
    with begun(job):
        assert job.end() == [2], job.said.read_text()
    said = job.said.read_text()
    sentence = (
        "run: 3 starts in a row ended without a first checkpoint: find and mend the cause first\n"
    )
    assert said.endswith(sentence), said
    assert said.count("rda train: restart ") == 2


def refuse_at_the_third_step():
    """Rank 0 alone: no disk has room for its metrics."""
    add = Metrics.add

    def full(metrics, step):
        if step.step == 3 and metrics.file is not None:
            raise OSError(28, "No space left on device", "run/metrics.jsonl")
        add(metrics, step)

    Metrics.add = full


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


def test_what_counts_is_starts_without_a_checkpoint_not_the_count_of_a_launcher():
    """Each torchrun counts its own restarts, and rank 0 may be of another one after each. The first start of a command
    counts anew."""
    leave_checkpoint(5)
    assert [start(number) for number in (0, 1, 7, 8)] == [True, True, True, False]
    assert [start(number) for number in (0, 1, 2, 3, 4)] == [True, True, True, False, False]
    # the torchrun that had restarted least goes on: its 2 is less than 7, and no repetition
    leave_checkpoint(10)
    assert [start(number) for number in (9, 2, 3, 4)] == [True, True, True, False]


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
    hears_child, tells_parent = os.pipe()
    if os.fork() == 0:
        while moment == "begins" and os.environ[LAUNCHER] == str(os.getppid()):
            time.sleep(0.01)
        end_with_launcher()
        trains = moment == "trains"
        with StopRequest() if trains else nullcontext() as stop:
            tells.send("started")
            os.write(tells_parent, b"started")
            while not (trains and stop.requested):
                time.sleep(0.01)
            tells.send("stopping")
            os._exit(0)
    os.close(tells_parent)
    if moment != "begins":
        os.read(hears_child, 1)
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
        train.own(arguments, SimpleNamespace(folder=tmp_path), mock.Mock())
    claim.assert_called_once_with(tmp_path, 4)
