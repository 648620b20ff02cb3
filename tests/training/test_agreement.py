"""What one rank refuses, or has otherwise than the others, all ranks say or hear of, at once and once."""

import contextlib
import io
import os
import re
import socket
from pathlib import Path

import pytest
from distributed import run as run_ranks
from helpers import TEXT, TINY

from ring_dilated_attention import ContextParallel
from ring_dilated_attention.commands.cli import main
from ring_dilated_attention.ranks import processes
from ring_dilated_attention.training import checkpoint
from ring_dilated_attention.training.agreement import (
    Account,
    Refusal,
    check_alike,
    together,
    values_of_all,
    words_of_difference,
    words_of_refusal,
)

TRAIN = ["train", "--data", "text.txt", "--steps", "4", *TINY.split()]


def accounts(*refusals, hosts="aaaa", fields=None):
    fields = fields or [{}] * len(refusals)
    return [Account(k, hosts[k], hosts[k], refusals[k], fields[k]) for k in range(len(refusals))]


def test_each_reason_is_said_once_on_each_machine():
    table = accounts("no file", "", "no file", "no file", "", "empty", hosts="aaabbb")
    words = "rank 0 on host a: no file; rank 5 on host b: empty"
    assert [words_of_refusal(table, rank) for rank in range(6)] == [words, "", "", words, "", ""]


def test_a_difference_is_said_once_on_each_machine():
    fields = [{"--steps": "6", "--seed": "0"}] * 2 + [
        {"--steps": "7", "--seed": "0"},
        {"--steps": "6", "--seed": "1"},
    ]
    table = accounts("", "", "", "", hosts="aabb", fields=fields)
    words = (
        "the ranks would not train the same run: they differ in --steps (rank 0 on host a: 6, rank 2 on host b: 7); "
        "--seed (rank 0 on host a: 0, rank 3 on host b: 1)"
    )
    assert [words_of_difference(table, rank) for rank in range(4)] == [words, "", words, ""]
    table[3] = Account(3, "b", "b", "", {})
    assert "rank 3 on host b: nothing" in words_of_difference(table, 0)


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
    assert {"record.json", "loss.png", "metrics.jsonl"} < set(second[2])


def as_rank_of_an_order_turned_round(rank, world_size, folder):
    processes.order_by_host = lambda hosts: range(len(hosts))[::-1]
    return as_rank(rank, world_size, folder, ([], []))


def as_rank_of_an_owned_folder(rank, world_size, folder):
    from ring_dilated_attention.training.run_folder import own_folder

    with own_folder(folder / "0" / "run") if rank == 0 else contextlib.nullcontext():
        return as_rank(rank, world_size, folder, [["--run-folder", "run"]] * 2)


def as_rank_on_a_full_disk(rank, world_size, folder):
    def full(*_):
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
