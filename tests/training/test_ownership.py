"""A run's folder has one owner, who is named to whoever comes second; and it is free however that one ends."""

import contextlib
import fcntl
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from forked import ForkedLauncher

from ring_dilated_attention.commands.cli import main
from ring_dilated_attention.models.saved_run import find_checkpoint
from ring_dilated_attention.training.ownership import LOCK_FILE, own_folder
from ring_dilated_attention.training.run import RECORD_FILE

TEXT = b"".join(f"line {i} of the document\n".encode() for i in range(400))
OPTIONS = ["--seq-len", "48", "--embed-dim", "16", "--num-heads", "2", "--held-out-bytes", "96", "--save-every", "5"]
RUN = ["train", "--data", "text.txt", *OPTIONS, "--segment-lengths", "8", "48", "--dilation-rates", "1", "3"]
IN_USE = r"run is in use by process {} on host {} since 20\d\d-.*: let it end, or choose another --run-folder\. If"


def test_the_second_is_told_who_has_it(tmp_path):
    with own_folder(tmp_path / "run") as (folder, _):
        with (
            pytest.raises(ValueError, match=IN_USE.format(os.getpid(), socket.gethostname())),
            own_folder(tmp_path / "run"),
        ):
            pass
        assert folder == tmp_path / "run"
        (folder / "result").touch()
    assert [path.name for path in folder.iterdir()] == ["result"]
    with own_folder(folder):
        pass


def test_the_name_of_the_owner_is_on_the_disk_before_others_read_it(tmp_path, monkeypatch):
    """Ranks of other hosts compare it."""
    flushed, fsync = [], os.fsync

    def noted(descriptor):
        fsync(descriptor)
        flushed.append(os.fstat(descriptor).st_size)

    monkeypatch.setattr(os, "fsync", noted)
    with own_folder(tmp_path / "run") as (folder, _):
        assert flushed == [(folder / LOCK_FILE).stat().st_size]


def test_runs_that_start_in_the_same_second_have_folders_of_their_own(tmp_path):
    with own_folder(tmp_path / "runs" / "now", must_be_new=True) as (first, _):
        with own_folder(tmp_path / "runs" / "now", must_be_new=True) as (second, _):
            (second / "result").touch()
        assert (first.name, second.name) == ("now", "now-2")
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["now-2"]  # what stayed empty is gone


def test_nothing_is_left_of_a_run_that_left_nothing(tmp_path):
    with pytest.raises(KeyError), own_folder(tmp_path / "a" / "b" / "run"):
        raise KeyError
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("content", ["my notes", '{"made_by": "somebody else"}', "[" * 10**5])
def test_a_file_of_that_name_is_not_overwritten(content, tmp_path):
    (tmp_path / LOCK_FILE).write_text(content)
    with pytest.raises(ValueError, match="was not made by rda train, and nothing is written"), own_folder(tmp_path):
        pass
    assert (tmp_path / LOCK_FILE).read_text() == content


def test_what_cannot_be_a_folder(tmp_path):
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(OSError, match=r"(Not a directory|File exists)"), own_folder(path):
            pass


HOLDER = """
import subprocess
import sys
import time
from pathlib import Path
from ring_dilated_attention.training.ownership import own_folder
with own_folder(Path(sys.argv[1])) as (folder, lock):
    rank = subprocess.Popen(["cat"], stdin=sys.stdin, stdout=subprocess.DEVNULL, pass_fds=[lock])
    print("owned", flush=True)
    time.sleep(60)
"""


def test_a_killed_owner_is_none(tmp_path):
    """But a rank that it started, and that still writes, is."""
    read_end, write_end = os.pipe()
    command = [sys.executable, "-c", HOLDER, str(tmp_path / "run")]
    with open(write_end, "wb") as ends_the_rank:
        with open(read_end, "rb") as asked:
            process = subprocess.Popen(command, stdin=asked, stdout=subprocess.PIPE, text=True)
        assert process.stdout.readline() == "owned\n"
        process.kill()
        process.communicate()
        with pytest.raises(ValueError, match=IN_USE.format(process.pid, ".*")), own_folder(tmp_path / "run"):
            pass
        ends_the_rank.close()
        wait_until_unlocked(tmp_path / "run" / LOCK_FILE)
    with own_folder(tmp_path / "run"):
        pass


def wait_until_unlocked(path: Path) -> None:
    with path.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)


def test_a_lock_is_taken_once(tmp_path, monkeypatch):
    """Catches another kind of lock taken later: between the two there is none, and another run may come."""
    taken = []
    flock = fcntl.flock
    monkeypatch.setattr(fcntl, "flock", lambda *call: taken.append(call) or flock(*call))
    with own_folder(tmp_path / "run") as (_, lock):
        assert taken == [(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)]
    assert len(taken) == 1


def test_a_run_that_comes_second_leaves_the_lock_of_the_first(tmp_path, monkeypatch):
    """The second has made the file, and before it locks the file the first does."""
    flock, first = fcntl.flock, contextlib.ExitStack()

    def late(descriptor, kind):
        monkeypatch.setattr(fcntl, "flock", flock)
        first.enter_context(own_folder(tmp_path))
        return flock(descriptor, kind)

    monkeypatch.setattr(fcntl, "flock", late)
    with first:
        with pytest.raises(ValueError, match=IN_USE[3:].format(os.getpid(), ".*")), own_folder(tmp_path):
            pass
        assert (tmp_path / LOCK_FILE).exists()


def test_where_the_file_system_has_no_locks(tmp_path, monkeypatch):
    """The file is the lock. What a killed owner left is for the user to remove, and the message says so."""

    def flock(*_):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", flock)
    with own_folder(tmp_path / "run") as (folder, _):
        with pytest.raises(ValueError, match=IN_USE.format(os.getpid(), ".*")), own_folder(folder):
            pass
        left = (folder / LOCK_FILE).read_bytes()
        (folder / "result").touch()
    (folder / LOCK_FILE).write_bytes(left)
    with pytest.raises(ValueError, match=f"If it is dead already, remove {folder / LOCK_FILE}$"), own_folder(folder):
        pass


def listening(session_of: int) -> set[str]:
    """Addresses at which the children of a process listen, as Linux lists them."""
    inodes, found = set(), set()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = re.search(r"\nPPid:\s+(\d+)", (folder / "status").read_text())[1]
            if int(parent) == session_of:
                links = [os.readlink(link) for link in (folder / "fd").iterdir()]
                inodes |= {link[8:-1] for link in links if link.startswith("socket:[")}
        except OSError:
            continue
    for table in ("tcp", "tcp6"):
        for line in Path("/proc/net", table).read_text().splitlines()[1:]:
            _, local, _, state, *_, inode = line.split()[:10]
            if state == "0A" and inode in inodes:
                found.add(local.split(":")[0])
    return found


def test_two_ranks_are_alone_with_their_folder(tmp_path, monkeypatch, capsys):
    """Nobody beyond this machine can reach the ranks of a run, and nobody else has its folder."""
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_bytes(TEXT)
    arguments = [*RUN, "--run-folder", "run"]
    more = ["--ranks", "2", "--steps", "100000"]
    process = ForkedLauncher(["-m", "ring_dilated_attention", *arguments, *more], Path("said.txt"), {})
    try:
        deadline = time.monotonic() + 60
        while find_checkpoint(Path("run")) is None:
            assert time.monotonic() < deadline
            assert process.poll() is None
            time.sleep(0.05)
        addresses = listening(process.pid)
        assert addresses  # the ranks do listen, for each other
        assert addresses <= {"0100007F", "00000000000000000000000001000000"}
        for second in ([*arguments[:-1], "./run"], ["train", "--resume", "run"]):
            assert main(second) == 2
            error = capsys.readouterr().err
            assert "run holds a run already" in error or re.search(IN_USE.format(process.pid, ".*"), error)
    finally:
        os.kill(process.pid, signal.SIGTERM)
    process.end()
    assert process.poll() == 130
    assert json.loads(Path("run", RECORD_FILE).read_text())["status"] == "interrupted"
    assert not Path("run", LOCK_FILE).exists()
