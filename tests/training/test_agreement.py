"""What one rank refuses, or has otherwise than the others, all ranks say or hear of, at once and once."""

import contextlib
import io
import os
import re
import socket
from pathlib import Path
from unittest import mock

import pytest
from distributed import run as run_ranks
from helpers import TEXT, TINY

from ring_dilated_attention import ContextParallel
from ring_dilated_attention.commands.cli import main
from ring_dilated_attention.ranks import processes
from ring_dilated_attention.training import checkpoint
from ring_dilated_attention.training.agreement import (
    Refusal,
    check_alike,
    together,
    values_of_all,
)

TRAIN = ["train", "--data", "text.txt", "--steps", "4", *TINY.split()]


def refuse_on(rank, world_size):
    """What ranks raise when the last one refuses, when they differ, and when none of both is so."""
    parallel, found = ContextParallel(), []

    def action():
        if rank == world_size - 1:
            raise OSError(28, "No space left on device", "Bücher")
        return rank

    for attempt in (
        lambda: together(parallel, action),
        lambda: check_alike(parallel, {"the code": "old" if rank else "new"}),
        lambda: check_alike(parallel, {"the code": "new"}),
        lambda: found.append(together(parallel, lambda: rank)),
    ):
        try:
            attempt()
        except Refusal as refusal:
            found.append(str(refusal))
    return found


def refuse_under_a_launcher(rank, world_size):
    with mock.patch.dict(os.environ, {"LOCAL_RANK": str(rank % 2)}):
        return refuse_on(rank, world_size)[:2]


def test_each_reason_is_said_once_by_each_launcher():
    """Two launchers of two ranks: the first rank of each speaks. A reason of several ranks is named once."""
    results = run_ranks(4, refuse_under_a_launcher)
    assert results[1] == results[3] == ["", ""]
    assert results[0] == results[2]
    assert results[0][0].count("rank 3 on host") == 1
    assert results[0][1].count("rank ") == 2  # of four ranks, three of which have the same code


def told(rank, world_size):
    return values_of_all(ContextParallel(), (rank, rank * "Prüfung \udcff"))


def test_all_hear_what_all_say():
    """Texts of any length, also of paths that hold no letters."""
    assert run_ranks(3, told) == [[[k, k * "Prüfung \udcff"] for k in range(3)]] * 3


def test_ranks_learn_what_another_refuses():
    host = socket.gethostname()
    results = run_ranks(3, refuse_on)
    reason = "Bücher: No space left on device"
    for rank, found in enumerate(results):
        assert found[0] == f"rank 2 on host {host}: {reason}"
        assert f"the code (rank 0 on host {host}: new, rank 1 on host {host}: old)" in found[1]
        assert found[2:] == [rank]


def as_rank(rank, world_size, folder, arguments):
    """`rda train` as one of a launcher's ranks, in a folder of its own as on a host of its own: code and stderr."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world_size)}
    os.chdir(folder / str(rank))
    error = io.StringIO()
    with contextlib.redirect_stderr(error), contextlib.redirect_stdout(io.StringIO()):
        code = main([*TRAIN, *arguments[rank]])
    return code, error.getvalue(), sorted(path.name for path in Path().rglob("*"))


@pytest.fixture
def hosts(tmp_path):
    for rank in range(2):
        (tmp_path / str(rank)).mkdir()
        (tmp_path / str(rank) / "text.txt").write_bytes(TEXT)
    return tmp_path


def test_other_bytes_behind_the_same_path(hosts):
    (hosts / "1" / "text.txt").write_bytes(TEXT[1:])
    for code, error, files in run_ranks(2, as_rank, hosts, ([], [])):
        assert (code, files) == (2, ["text.txt"])
        difference = r"\(rank 0 on host \S+: 9,890 bytes .*, rank 1 on host \S+: 9,889 bytes .*\)"
        assert re.fullmatch(rf"rda train: .* in the document {difference}\n", error)


def test_other_options(hosts):
    for code, error, files in run_ranks(
        2, as_rank, hosts, ([], ["--seed", "1", "--save-every", "2"])
    ):
        assert (code, files) == (2, ["text.txt"])
        assert "--seed (rank 0 on" in error
        assert "--save-every (rank 0 on" in error


def test_a_file_that_is_missing_on_the_second_rank(hosts):
    (hosts / "1" / "text.txt").unlink()
    (first, second) = run_ranks(2, as_rank, hosts, ([], []))
    assert (first[0], second[0]) == (2, 2)
    for _, error, _ in (first, second):
        assert re.fullmatch(
            r"rda train: rank 1 on host \S+: cannot read .*/1/text\.txt: No such file.*\n", error
        )
    assert (first[2], second[2]) == (["text.txt"], [])


def test_a_folder_that_another_run_has(hosts):
    """Refused by the first rank alone, after all had agreed."""
    for code, error, files in run_ranks(2, as_rank_of_an_owned_folder, hosts):
        assert code == 2
        assert re.search(r"rank 0 on host .*run is in use by another run: let it end", error)
        assert "record.json" not in files


def test_the_first_rank_owns_and_writes_all(hosts):
    """Catches a folder that one rank claims, and to which another writes, where ranks have an order of their own."""
    (first, second) = run_ranks(2, as_rank_of_an_order_turned_round, hosts)
    assert (first[0], second[0]) == (0, 0), (first[1], second[1])
    assert first[2] == ["text.txt"]
    assert {"record.json", "metrics.jsonl"} < set(second[2])


def as_rank_of_an_order_turned_round(rank, world_size, folder):
    processes.order_by_host = lambda hosts: range(len(hosts))[::-1]
    return as_rank(rank, world_size, folder, ([], []))


def as_rank_of_an_owned_folder(rank, world_size, folder):
    from ring_dilated_attention.training.run_folder import own_folder

    with own_folder(folder / "0" / "run") if rank == 0 else contextlib.nullcontext():
        return as_rank(rank, world_size, folder, [["--run-folder", "run"]] * 2)


def as_rank_on_a_full_disk(rank, world_size, folder):
    def full(*_, **__):
        raise ValueError("checkpoint-000004 cannot be written: No space left on device")

    checkpoint._write = full
    return as_rank(rank, world_size, folder, ([], []))


def test_a_disk_that_is_full_on_the_first_rank(hosts):
    first, second = run_ranks(2, as_rank_on_a_full_disk, hosts)
    assert (first[0], second[0]) == (2, 2)
    reason = "checkpoint-000004 cannot be written: No space left on device"
    for _, error, *_ in (first, second):
        assert re.search(rf"(^|\n)rda train: rank 0 on host \S+: {reason}\n$", error)
    assert first[2] == ["text.txt"]  # what the run made and left empty is gone
