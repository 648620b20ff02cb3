"""One run at a time has a folder, and the folder is free however that one ends."""

import errno
import fcntl
import json
import os
import re
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest
from forked import ForkedLauncher
from helpers import TEXT, TINY

from ring_dilated_attention.commands.cli import main
from ring_dilated_attention.models.saved_run import find_checkpoint
from ring_dilated_attention.training.run import RECORD_FILE
from ring_dilated_attention.training.run_folder import LOCK_FILE, own_folder

RUN = ["train", "--data", "text.txt", "--save-every", "5", *TINY.split()]
IN_USE = r"run is in use by another run: let it end, or choose another --run-folder \(fuser "


def test_the_second_is_refused(tmp_path):
    with own_folder(tmp_path / "run") as folder:
        with pytest.raises(ValueError, match=IN_USE), own_folder(tmp_path / "run"):
            pass
        assert folder == tmp_path / "run"
        assert (folder / LOCK_FILE).exists()
        (folder / "result").touch()
    assert [path.name for path in folder.iterdir()] == ["result"]
    with own_folder(folder):
        pass


def test_nothing_is_left_of_a_run_that_left_nothing(tmp_path):
    with pytest.raises(KeyError), own_folder(tmp_path / "a" / "b" / "run"):
        raise KeyError
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("content", ["my notes", '{"made_by": "somebody else"}', "[" * 10**5])
def test_a_file_of_that_name_is_not_overwritten(content, tmp_path):
    (tmp_path / LOCK_FILE).write_text(content)
    with (
        pytest.raises(ValueError, match="was not made by rda train, and nothing is written"),
        own_folder(tmp_path),
    ):
        pass
    assert (tmp_path / LOCK_FILE).read_text() == content


def test_what_cannot_be_a_folder(tmp_path):
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(OSError, match=r"(Not a directory|File exists)"), own_folder(path):
            pass


HOLDER = """
import sys
import time
import warnings
from pathlib import Path
from ring_dilated_attention.training.run_folder import own_folder
with own_folder(Path(sys.argv[1])):
    print("owned", flush=True)
    time.sleep(60)
"""


def test_a_killed_owner_is_none(tmp_path):
    command = [sys.executable, "-c", HOLDER, str(tmp_path / "run")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "owned\n"
    with pytest.raises(ValueError, match=IN_USE), own_folder(tmp_path / "run"):
        pass
    process.kill()
    process.communicate()
    assert (tmp_path / "run" / LOCK_FILE).exists()
    with own_folder(tmp_path / "run"):
        pass


def test_a_file_system_without_locks(tmp_path, monkeypatch):
    """Catches a second run that is told to move the lock of the first away. filelock takes that of a killed process."""

    def refuse(*_):
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with warnings.catch_warnings(action="ignore"), own_folder(tmp_path / "run") as folder:
        content = (folder / LOCK_FILE).read_bytes()
        with pytest.raises(ValueError, match=IN_USE), own_folder(tmp_path / "run"):
            pass
        assert content == (folder / LOCK_FILE).read_bytes() != b""
    assert not folder.exists()


def listening(launcher: int) -> set[str]:
    """Addresses at which a process and its children listen, as Linux lists them."""
    inodes, found = set(), set()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = re.search(r"\nPPid:\s+(\d+)", (folder / "status").read_text())[1]
            if launcher in (int(parent), int(folder.name)):
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
    process = ForkedLauncher(
        ["-m", "ring_dilated_attention", *arguments, *more], Path("said.txt"), {}
    )
    try:
        deadline = time.monotonic() + 60
        while find_checkpoint(Path("run")) is None:
            assert time.monotonic() < deadline
            assert process.poll() is None
            time.sleep(0.05)
        addresses = listening(process.pid)
        assert addresses  # the ranks do listen, for each other
        assert addresses <= {"0100007F", "00000000000000000000000001000000"}
        for second in ([*arguments[:-1], "./run", *more[2:]], ["train", "--run-folder", "run"]):
            assert main(second) == 2
            assert re.search(IN_USE, capsys.readouterr().err)
    finally:
        os.kill(process.pid, signal.SIGTERM)
    process.end()
    assert process.poll() == 130
    assert json.loads(Path("run", RECORD_FILE).read_text())["status"] == "interrupted"
    assert not Path("run", LOCK_FILE).exists()
