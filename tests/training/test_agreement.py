"""What one rank refuses, or has otherwise than the others, all ranks say or hear of, at once and once."""

import gc
import io
import os
import re
import socket
import subprocess
import sys
from contextlib import nullcontext, redirect_stderr, redirect_stdout
from datetime import timedelta
from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist
from distributed import run as run_ranks
from helpers import TEXT, TINY, free_port

from ring_dilated_attention import ContextParallel
from ring_dilated_attention.commands.cli import main
from ring_dilated_attention.ranks import processes
from ring_dilated_attention.training import agreement, checkpoint
from ring_dilated_attention.training.agreement import (
    Refusal,
    check_alike,
    join_ranks,
    together,
    values_of_all,
)
from ring_dilated_attention.training.rank_launcher import RESTART
from ring_dilated_attention.training.run_folder import LOCK_FILE, own_folder

# Holds the lock of a file for 20 s at most. Then a rank that waits for it goes on, and the test fails.
HOLD = """
import fcntl, sys, time
file = open(sys.argv[1])
fcntl.flock(file, fcntl.LOCK_EX)
print("held", flush=True)
time.sleep(20)
"""
TRAIN = ["train", "--data", "text.txt", "--steps", "4", *TINY.split()]


def refuse_on(rank, world_size):
    """What ranks of two launchers raise when the last one refuses, when they differ, and what they hear without."""
    os.environ["LOCAL_RANK"] = str(rank % 2)
    parallel, found = ContextParallel(), []

    def action():
        if rank == world_size - 1:
            raise OSError(28, "No space left on device", "Bücher")

    for attempt in (
        lambda: together(parallel, action),
        lambda: check_alike(parallel, {"the code": "old" if rank else "new"}),
        lambda: check_alike(parallel, {"the code": "new"}),
        lambda: found.append(together(parallel, lambda: rank)),
        lambda: found.append(values_of_all(parallel, (rank, rank * "Prüfung \udcff"))),
    ):
        try:
            attempt()
        except Refusal as refusal:
            found.append(str(refusal))
    return found


def test_each_reason_is_said_once_by_each_launcher():
    """Two launchers of two ranks: the first rank of each speaks. A reason of several ranks is named once. All hear
    texts of any length, also of paths that hold no letters."""
    host = socket.gethostname()
    refused = f"rank 3 on host {host}: Bücher: No space left on device"
    for rank, found in enumerate(run_ranks(4, refuse_on)):
        if rank % 2 == 0:
            assert found[0] == refused
            assert f"the code (rank 0 on host {host}: new, rank 1 on host {host}: old)" in found[1]
        else:
            assert found[:2] == ["", ""]
        assert found[2:] == [rank, [[k, k * "Prüfung \udcff"] for k in range(4)]]


def as_rank(rank, world_size, folder, words, prepare=nullcontext):
    """`rda train` as one of a launcher's ranks, in a folder of its own as on a host of its own: code and stderr."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world_size)}
    os.chdir(folder / str(rank))
    error = io.StringIO()
    with prepare(rank), redirect_stderr(error), redirect_stdout(io.StringIO()):
        code = main([*TRAIN, *words[rank].split()])
    return code, error.getvalue(), sorted(path.name for path in Path().rglob("*"))


@pytest.fixture
def hosts(tmp_path):
    for rank in range(2):
        (tmp_path / str(rank)).mkdir()
        (tmp_path / str(rank) / "text.txt").write_bytes(TEXT)
    return tmp_path


def owned(rank):
    """Before any rank trains."""
    return own_folder(Path("run")) if rank == 0 else nullcontext()


def without_the_text(rank):
    if rank == 1:
        Path("text.txt").unlink()
    return nullcontext()


def with_other_bytes(rank):
    if rank == 1:
        Path("text.txt").write_bytes(TEXT[1:])
    return nullcontext()


def with_a_full_disk(rank):
    full = ValueError("checkpoint-000004 cannot be written: No space left on device")
    return mock.patch.object(checkpoint, "_write", side_effect=full)


@pytest.mark.parametrize(
    ("prepare", "words", "said"),
    [
        (
            with_other_bytes, ("", ""),
            r".* in the document \(rank 0 on host \S+: 9,890 bytes .*, rank 1 on host \S+: 9,889 bytes .*\)",
        ),
        (
            nullcontext, ("", "--seed 1 --save-every 2"),
            r".*--seed \(rank 0 on.*--save-every \(rank 0 on.*",
        ),
        (without_the_text, ("", ""), r"rank 1 on host \S+: cannot read .*/1/text\.txt: No such file.*"),
        # Refused by the first rank alone, after all had agreed.
        (owned, ("--run-folder run",) * 2, r"rank 0 on host .*run is in use by another run: let it end.*"),
        # What the run made and left empty is gone.
        (
            with_a_full_disk, ("", ""),
            r"rank 0 on host \S+: checkpoint-000004 cannot be written: No space left on device",
        ),
    ],
)  # fmt: skip
def test_what_one_rank_refuses_all_say(prepare, words, said, hosts):
    for rank, (code, error, files) in enumerate(run_ranks(2, as_rank, hosts, words, prepare)):
        assert code == 2
        assert re.search(rf"(^|\n)rda train: {said}\n$", error), error
        here = {"text.txt"} if rank == 0 or prepare is not without_the_text else set()
        assert set(files) - {"run", LOCK_FILE} == here


def test_the_first_rank_owns_and_writes_all(hosts):
    """Catches a folder that one rank claims, and to which another writes, where ranks have an order of their own."""
    first, second = run_ranks(2, as_rank, hosts, ("", ""), turned_round)
    assert (first[0], second[0]) == (0, 0), (first[1], second[1])
    assert first[2] == ["text.txt"]
    assert {"record.json", "metrics.jsonl"} < set(second[2])


def turned_round(rank):
    return mock.patch.object(processes, "order_by_host", lambda hosts: range(len(hosts))[::-1])


def test_a_rank_looks_for_a_dead_store_as_long_as_is_said(monkeypatch):
    """Half as long in each of torch's two tries: otherwise it is found dead after twice the time."""
    monkeypatch.setattr(agreement, "JOIN_TIME", timedelta(seconds=1))
    place = {"RANK": "1", "WORLD_SIZE": "2", RESTART: "0", "TORCHELASTIC_USE_AGENT_STORE": "False"}
    place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(dist.DistNetworkError, match="timed out after 500ms"):
        join_ranks(None, timedelta(seconds=60))


def test_a_rank_that_failed_ends_though_another_is_stopped(tmp_path, monkeypatch):
    """The other one may be stopped while it holds the lock of the file through which ranks connect."""
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", RESTART: "0"}.items():
        monkeypatch.setenv(name, value)
    path = tmp_path / "ranks-0"
    other = dist.FileStore(str(path), 2)
    other.set("here/1", "")
    holders = []

    def failing(*args, **options):
        words = [sys.executable, "-c", HOLD, str(path)]
        holder = subprocess.Popen(words, stdout=subprocess.PIPE)
        holders.append(holder)
        holder.stdout.readline()
        raise RuntimeError("no connection")

    monkeypatch.setattr(dist, "init_process_group", failing)
    with pytest.raises(RuntimeError) as caught:
        join_ranks(tmp_path, timedelta(seconds=1))
    del caught
    gc.collect()
    [holder] = holders
    assert holder.poll() is None
    holder.kill()
    holder.communicate()
