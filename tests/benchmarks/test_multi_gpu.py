"""What is for several GPUs, rehearsed on two CPU ranks, and proofs that what goes wrong there is noticed."""

import json
import os
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist

from benchmarks import device
from benchmarks.multi_gpu import command as multi_gpu
from benchmarks.multi_gpu import faults, right, speed
from benchmarks.multi_gpu.settings import KILLED, KILLED_WAITING, QUICK, TOLD_BY, Settings
from benchmarks.parts import Part
from ring_dilated_attention.commands import local_ranks
from ring_dilated_attention.ranks.link import GroupPending


def rows_of(folder):
    return json.loads((folder / "multi_gpu.json").read_text())["rows"]


def test_every_part_leaves_its_rows(tmp_path, capsys):
    """Catches whatever a part does wrong on any device."""
    assert multi_gpu.main(["--quick", "--results", str(tmp_path)]) == 0
    said, rows = capsys.readouterr().out, rows_of(tmp_path)
    assert list(dict.fromkeys(row["part"] for row in rows)) == [
        part.name for part in multi_gpu.parts(QUICK)
    ]
    for row in rows:
        assert row["passed"] is (None if row["what"] == "latency" else True)
        assert row["part"] in said
    usual = [row["what"] for row in rows if row["part"].startswith("right, LongNetLM")]
    # in place of "nccl"
    of_each = ["loss, float32, cuda:gloo", "gradients, float32, cuda:gloo", "contexts on cards"]
    assert usual == 3 * of_each
    speeds = [row for row in rows if row["part"].startswith("speed")]
    assert [row["what"] for row in speeds] == ["dense causal", "dilated"]
    assert all(share > 0 for row in speeds for share in row["shares"].values())
    for row in rows[-2:]:
        [other] = row["others"]
        assert (other["rank"], other["error"]) == (0, "ExchangeError")
        assert "rank 1" in other["message"]


@pytest.mark.parametrize("num_ranks", [2, 3, 4, 8])
def test_it_ends_within_ten_minutes(num_ranks):
    parts = multi_gpu.parts(Settings(num_ranks))
    assert sum(part.seconds for part in parts) <= 580
    assert {"speed, ring", "speed, all_gather", "right, all_gather"} < {part.name for part in parts}
    assert ("right, 2-D mesh" in [part.name for part in parts]) == (num_ranks in (4, 8))
    assert Settings(num_ranks).sizes.num_heads % num_ranks == 0


def test_a_context_on_another_card_is_noticed():
    """Catches memory on card 0 for each rank, which a tensor on "cuda" costs where no code calls set_device."""
    settings = Settings(2)
    assert right.contexts(settings, [[0], [1]])["passed"]
    for cards in ([[0], [0, 1]], [[0], [0]], [[0], []]):
        assert not right.contexts(settings, cards)["passed"]


@pytest.mark.parametrize("told_by", TOLD_BY)
def test_what_tells_a_rank_its_card(monkeypatch, tmp_path, told_by):
    """Catches a rank that is told by two things, which hides that one of them does not do."""
    told = []
    monkeypatch.setattr(torch.cuda, "set_device", lambda card: told.append(("set_device", card)))

    def made(backend, *, device_id, **options):
        told.append((backend, device_id and device_id.index, os.environ.get("LOCAL_RANK")))
        raise OSError("no such group here")

    monkeypatch.setattr(dist, "init_process_group", made)
    monkeypatch.setattr(local_ranks, "Thread", Mock())
    monkeypatch.setattr(local_ranks.signal, "signal", Mock())
    monkeypatch.setattr(torch, "set_num_threads", Mock())
    monkeypatch.setattr(os, "environ", {})
    launch = local_ranks.Launch(2, has_gpus=True, transport="nccl", told_by=told_by)
    local_ranks._rank(Mock(), 1, launch, str(tmp_path), Mock(), ())
    expected = {
        "device_id": [("nccl", 1, None)],
        "set_device": [("set_device", 1), ("nccl", None, None)],
        "LOCAL_RANK": [("nccl", None, "1")],
    }
    assert told == expected[told_by]


class Wrong(Settings):
    """Ranks whose messages change while they wait for them."""

    def run_ranks(self, seconds, function, *args, **options):
        return Settings.run_ranks(self, seconds, with_wrong_messages, function, *args, **options)


def with_wrong_messages(worker, settings, function, *args):
    wait = GroupPending.wait

    def spoil(pending):
        tensors = [x for x in pending.tensors if x.is_floating_point()]
        wait(pending)
        for x in tensors:
            x += 1

    GroupPending.wait = spoil
    return function(worker, settings, *args)


def dies(worker, settings):
    dist.barrier()  # who dies earlier closes connections that the other still makes
    os._exit(1)


def test_what_is_wrong_is_noticed(monkeypatch, tmp_path, capsys):
    """Proof that judgements can fail, and that a part that dies costs its own rows alone."""
    parts = [
        Part("dies", 30, lambda settings, seconds: settings.run_ranks(seconds, dies)),
        Part("right", 30, lambda settings, seconds: right.right(Wrong(*settings), seconds, "ring")),
        Part("speed", 30, lambda settings, seconds: speed.speed(Wrong(*settings), seconds, "ring")),
    ]
    monkeypatch.setattr(multi_gpu, "parts", lambda settings: parts)
    assert multi_gpu.main(["--quick", "--results", str(tmp_path)]) == 1
    assert "FAILED dies: all of it" in capsys.readouterr().out
    found = {(row["part"], row["what"]): (row["passed"], row["found"]) for row in rows_of(tmp_path)}
    assert found.pop(("dies", "all of it")) == (False, "it failed: rank 1: died without a word")
    assert {part for part, _ in found} == {"right", "speed"}
    assert not any(passed for passed, _ in found.values())


TOLD = {"error": "ExchangeError", "message": "", "seconds": 1.0, "device_seconds": 0.0}
ENDED = {
    "error": "no error",
    "message": "died without a word",
    "seconds": 12.0,
    "device_seconds": None,
}


@pytest.mark.parametrize(
    ("found", "if_killed", "if_killed_waiting"),
    [
        (TOLD, True, True),
        (ENDED, False, True),
        (ENDED | {"message": "no answer within 40 s"}, False, False),
        (TOLD | {"seconds": 16}, False, True),
        (TOLD | {"device_seconds": None}, False, False),
    ],
)
def test_who_was_told_in_time(found, if_killed, if_killed_waiting):
    """Catches a hang that counts as an answer."""
    assert faults.is_told(QUICK, KILLED, found) == if_killed
    assert faults.is_told(QUICK, KILLED_WAITING, found) == if_killed_waiting


@pytest.mark.parametrize(
    ("messages", "kernels", "seconds"),
    [
        ([(0, 10), (5, 20)], [], 20),
        ([(0, 10)], [(2, 4), (3, 6)], 6),
        ([(0, 10), (20, 30)], [(5, 25)], 10),
        ([(5, 6)], [(0, 10)], 0),
        ([], [(0, 10)], 0),
    ],
)
def test_what_no_kernel_hides(messages, kernels, seconds):
    """Catches messages behind kernels that count as exposed, or time that is counted twice."""
    assert device.uncovered(messages, kernels) == seconds
