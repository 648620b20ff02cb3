"""Checkpoints: whole or absent, verified before they are used; and nothing goes that a run did not make."""

import json
import random
import re
import resource
import shutil
import signal
import warnings
from collections import Counter, OrderedDict
from pathlib import Path
from unittest import mock

import pytest
import torch
from distributed import START
from forked import main_with_forked_ranks
from full_disk import on_a_full_disk
from helpers import TEXT, TINY, sign
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint import HuggingFaceStorageWriter, save
from transcripts import PREPARED, play

from ring_dilated_attention.commands.cli import main
from ring_dilated_attention.models.saved_run import (
    STATE_FILE,
    check_whole,
    read_state,
)
from ring_dilated_attention.training import checkpoint as checkpoints
from ring_dilated_attention.training.checkpoint import (
    MARK_FILE,
    load_checkpoint,
    save_checkpoint,
    tensors_of,
)
from ring_dilated_attention.training.files import flush
from ring_dilated_attention.training.loop import make_optimizers
from ring_dilated_attention.training.metrics import METRICS_FILE
from ring_dilated_attention.training.options import Hyperparameters

TENSOR_FILE = "shard-00001-model-00001-of-00001.safetensors"
SIZES = f"{TINY} --steps 6 --warmup-steps 2 --save-every 2"
ARGUMENTS = ["train", *SIZES.split(), "--data", "text.txt", "--run-folder"]


def make_model():
    """With a block, whose matrix is Muon's."""
    return nn.Sequential(
        OrderedDict(
            blocks=nn.Sequential(nn.Linear(3, 4)), norm=nn.LayerNorm(4), head=nn.Linear(4, 2)
        )
    )


@pytest.fixture
def trained():
    model = make_model()
    optimizers = make_optimizers(model, Hyperparameters())
    for _ in range(3):
        model(torch.randn(5, 3)).square().sum().backward()
        for optimizer in optimizers:
            optimizer.step()
    return model, optimizers


def state_at(step, run="one run"):
    return {"run": run, "step": step, "bits_per_byte": [8.1, 1 / 3]}


def listing(folder):
    return {
        path.relative_to(folder).as_posix(): path.is_file() and path.read_bytes()
        for path in folder.rglob("*")
    }


def test_restores_every_tensor(trained, tmp_path):
    checkpoint = save_checkpoint(tmp_path, state_at(3), *trained)
    assert read_state(checkpoint) == check_whole(checkpoint) == state_at(3)
    model = make_model()
    optimizers = make_optimizers(model, Hyperparameters())
    load_checkpoint(checkpoint, model, optimizers)
    saved, loaded = tensors_of(*trained), tensors_of(model, optimizers)
    # parameters, the momentum of the matrix that is Muon's, and what AdamW has of each other
    fields = Counter(name.rpartition("/")[0] for name in saved)
    assert fields == {"": 6, "momentum_buffer": 1, "step": 5, "exp_avg": 5, "exp_avg_sq": 5}
    assert loaded.keys() == saved.keys()
    assert all(torch.equal(loaded[name], saved[name]) for name in saved)


def test_a_run_removes_only_what_it_made(trained, tmp_path):
    """Folders and files with the names of ours: a user's, another run's, and ours with something else in it. The newest
    two of ours stay, and hold no pickle."""
    save_checkpoint(tmp_path, state_at(1), *trained)
    save_checkpoint(tmp_path / "other", state_at(2, "another run"), *trained)
    shutil.move(tmp_path / "other" / "checkpoint-000002", tmp_path / "checkpoint-000002")
    for name in (
        "checkpoint-000001/notes.txt",
        f"checkpoint-000003/{STATE_FILE}",
        "checkpoint-000004",
        f"unfinished-checkpoint-000009/{TENSOR_FILE}",
        "unfinished-checkpoint-000010",
        "unfinished-letter",
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("mine")
    theirs = listing(tmp_path)
    for step in (6, 7, 8):
        save_checkpoint(tmp_path, state_at(step), *trained)
    found = listing(tmp_path)
    for name in (TENSOR_FILE, STATE_FILE):
        del theirs[f"checkpoint-000001/{name}"]  # ours, and superfluous
        del found[f"checkpoint-000007/{name}"], found[f"checkpoint-000008/{name}"]
    assert found == {**theirs, "checkpoint-000007": False, "checkpoint-000008": False}


def test_metrics_are_on_the_disk_before_a_checkpoint_is(trained, tmp_path, monkeypatch):
    """Catches an empty file beside a good checkpoint after a host's crash: the run would not go on."""
    flushed = []

    def noted(path):
        flush(path)
        flushed.append(path.name)

    monkeypatch.setattr(checkpoints, "flush", noted)
    (tmp_path / METRICS_FILE).write_text("a line\n")
    save_checkpoint(tmp_path, state_at(4), *trained)
    assert flushed.index(METRICS_FILE) < flushed.index("checkpoint-000004")


def die_writing(folder):
    """Write a checkpoint, and be killed when a file grows beyond a hundred bytes."""
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
    model = make_model()
    save_checkpoint(folder, state_at(2), model, make_optimizers(model, Hyperparameters()))


def test_what_was_being_written_when_a_run_was_killed_goes(trained, tmp_path):
    """Also of another run, which never came to a checkpoint. Files of others stay."""
    process = START.Process(target=die_writing, args=(tmp_path,))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGXFSZ
    [left] = tmp_path.iterdir()
    assert {path.name for path in left.iterdir()} == {MARK_FILE, TENSOR_FILE}
    another = shutil.copytree(left, left.with_name(f"{left.name}-of-another-run"))
    (another / MARK_FILE).write_text("another run")
    theirs = tmp_path / "unfinished-checkpoint-000002" / "letter"
    theirs.parent.mkdir()
    theirs.write_text("mine")
    checkpoint = save_checkpoint(tmp_path, state_at(4), *trained)
    assert sorted(tmp_path.iterdir()) == [checkpoint, theirs.parent]
    assert theirs.read_text() == "mine"


def test_a_folder_of_somebody_else_is_in_the_way(trained, tmp_path):
    (tmp_path / "checkpoint-000006").mkdir()
    with pytest.raises(ValueError, match=r"checkpoint-000006 is in the way: move it away"):
        save_checkpoint(tmp_path, state_at(6), *trained)


@pytest.mark.parametrize("failing", ["save", "flush", "rename"])
def test_failure_while_writing_leaves_what_was_there(trained, tmp_path, monkeypatch, failing):
    before = save_checkpoint(tmp_path, state_at(3), *trained)
    with monkeypatch.context() as patch:
        full = mock.Mock(side_effect=OSError(28, "No space left on device"))
        patch.setattr(Path if failing == "rename" else checkpoints, failing, full)
        said = r"checkpoint-000006 cannot be written: No space left on device"
        with pytest.raises(ValueError, match=said):
            save_checkpoint(tmp_path, state_at(6), *trained)
    assert list(tmp_path.iterdir()) == [before]
    load_checkpoint(before, *trained)
    after = save_checkpoint(tmp_path, state_at(6), *trained)
    assert set(tmp_path.iterdir()) == {before, after}


def change(path, value=None):
    """Another value of a field, or none, rightly signed."""

    def changed(checkpoint):
        state = json.loads((checkpoint / STATE_FILE).read_text())["state"]
        *folders, name = path.split("/")
        place = state[folders[0]] if folders else state
        place[name] = value
        if value is None:
            del place[name]
        sign(checkpoint, state)

    return changed


def lose_a_moment(checkpoint):
    """Rightly signed. torch.distributed.checkpoint describes the tensors in the file's head."""
    path = checkpoint / TENSOR_FILE
    tensors = load_file(path)
    del tensors[next(name for name in tensors if name.startswith("exp_avg/"))]
    path.unlink()
    with warnings.catch_warnings(action="ignore"):  # that no other process takes part
        writer = HuggingFaceStorageWriter(str(checkpoint), save_distributed=True)
        save(tensors, storage_writer=writer, no_dist=True)
    sign(checkpoint)


def text(content):
    return lambda checkpoint: (checkpoint / STATE_FILE).write_text(content)


def test_any_damage_is_noticed(trained, tmp_path):
    """A flipped bit anywhere, an end that is cut off, and something behind it."""
    checkpoint = save_checkpoint(tmp_path, state_at(3), *trained)
    rng = random.Random(0)
    for name in (TENSOR_FILE, STATE_FILE):
        content = (checkpoint / name).read_bytes()
        damaged = [content[:length] for length in (0, 1, 7, 8, 9, len(content) - 1)]
        damaged += [content[1:], content + b"\0", b"[" * 10**5, b"1" * 5000, b"{}"]
        for _ in range(100):
            flipped = bytearray(content)
            flipped[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
            damaged.append(bytes(flipped))
        for other in damaged:
            (checkpoint / name).write_bytes(other)
            with pytest.raises(ValueError, match=re.escape(name)):
                check_whole(checkpoint)
        (checkpoint / name).write_bytes(content)
    assert check_whole(checkpoint) == state_at(3)


# Of a copy of the run's folder, by its name.
DAMAGES = {
    "state_is_missing": lambda c: (c / STATE_FILE).unlink(),
    "state_is_a_deep_list": text("[" * 10**5),
    "state_is_another_JSON": text("[1]"),
    "state_is_a_folder": lambda c: [(c / STATE_FILE).unlink(), (c / STATE_FILE).mkdir()],
    "tensors_are_missing": lambda c: (c / TENSOR_FILE).unlink(),
    "tensors_of_somebody_else": lambda c: shutil.copy(c / TENSOR_FILE, c / "mine.safetensors"),
    "a_field_is_missing": change("bits_per_byte"),
    "another_step": change("step", 5),
    "no_seed": change("hyperparameters/seed"),
    "a_bad_phase": change("hyperparameters/phases", ["8:2"]),
    # Digests are right from here on: only the model can tell.
    "a_moment_is_missing": lose_a_moment,
    "no_safetensors": lambda c: [(c / TENSOR_FILE).write_bytes(b"\0" * 20), sign(c)],
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A finished run of six steps, with checkpoints at four and six."""
    folder = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        Path("text.txt").write_bytes(TEXT)
        assert main([*ARGUMENTS, "run"]) == 0
    return folder


class TestCommand:
    @pytest.fixture(autouse=True)
    def in_a_copy(self, whole, tmp_path, monkeypatch):
        shutil.copytree(whole, tmp_path / "copy")
        monkeypatch.chdir(tmp_path / "copy")
        # The document's path is part of the run.
        monkeypatch.setattr(Path, "resolve", lambda path: whole / path.name)

    def test_damage_is_named_and_the_one_before_is_offered(self, capsys, caplog):
        """And a file of somebody else is not overwritten. What torch logs would be a traceback on stderr."""
        for name, damaged in DAMAGES.items():
            damaged(shutil.copytree("run", Path(name)) / "checkpoint-000006")
        play(PREPARED / "damages.txt", capsys)
        assert [x.name for x in caplog.records if "NullHandler" not in x.name] == []

    @pytest.mark.parametrize(
        ("num_bytes", "ranks", "said"),
        [
            (0, "", "new/metrics.jsonl: File too large\n"),
            # after the first step: catches metrics that stay, since closing their file fails as writing did
            (300, "", "new/metrics.jsonl: File too large\n"),
            (20_000, "", "rda train: new/checkpoint-000002 cannot be written: .*File too large"),
            # a launcher's ranks, whose first alone writes
            (
                20_000,
                "--ranks 2",
                "rank 0 .*: new/checkpoint-000002 cannot be written: .*too large",
            ),
            # catches ranks that wait for ever in torch's store
            (200, "--ranks 2", "/rda-train-.*: File too large\n"),
        ],
    )
    def test_a_full_disk_is_a_sentence(self, num_bytes, ranks, said):
        words = [*ARGUMENTS, "new", "--num-layers", "1", *ranks.split()]
        code, error = on_a_full_disk(num_bytes, main_with_forked_ranks, words)
        assert code == 2
        assert re.search(said, error), error
        assert "Traceback" not in error
        assert not Path("new").exists()
