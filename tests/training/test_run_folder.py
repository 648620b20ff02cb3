"""One run at a time has a folder, and the folder is free however that one ends."""

import errno
import fcntl
import time
import warnings

import pytest
from distributed import START

from ring_dilated_attention.training.run_folder import LOCK_FILE, own_folder

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


def test_what_cannot_be_a_folder(tmp_path):
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(OSError, match=r"(Not a directory|File exists)"), own_folder(path):
            pass


def hold(folder, tells):
    with own_folder(folder):
        tells.send("owned")
        time.sleep(60)


def test_a_killed_owner_is_none(tmp_path):
    hears, tells = START.Pipe(duplex=False)
    process = START.Process(target=hold, args=(tmp_path / "run", tells))
    process.start()
    assert hears.recv() == "owned"
    process.kill()
    process.join()
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
