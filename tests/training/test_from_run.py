"""A run that begins with the parameters of another."""

import json
import shlex
from pathlib import Path

import pytest
from helpers import TEXT, TINY
from safetensors.torch import load_file

from ring_dilated_attention.commands.cli import main
from ring_dilated_attention.models.saved_run import find_checkpoint
from ring_dilated_attention.training.data import Document

TENSOR_FILE = "shard-00001-model-00001-of-00001.safetensors"
FIRST = [
    *TINY.split(),
    *["--data", "text.txt", "--steps", "3", "--phases", "16:2:2", "--run-folder", "first"],
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        Path("text.txt").write_bytes(TEXT)
        assert main(["train", *FIRST]) == 0
    return folder


@pytest.fixture(autouse=True)
def in_folder(folder, monkeypatch):
    monkeypatch.chdir(folder)


def record_of(name):
    return json.loads(Path(name, "record.json").read_text())


def test_a_run_begins_where_another_ended(capsys, monkeypatch):
    """With another pattern, length and number of steps, and with windows that the other did not read. Catches
    parameters that are not those of the other run, and an origin that the second resumption forgets."""
    drawn, windows = [], Document.train_windows
    monkeypatch.setattr(
        Document,
        "train_windows",
        lambda self, *drawn_by: drawn.append(drawn_by) or windows(self, *drawn_by),
    )
    other = [
        "--segment-lengths",
        "16",
        "32",
        "--seq-len",
        "32",
        "--steps",
        "2",
        "--save-every",
        "1",
    ]
    assert main(["train", "--from", "first", *other, "--run-folder", "second"]) == 0
    assert drawn == [(0, 5, 32, 1), (0, 6, 32, 1)]
    first, second = record_of("first"), record_of("second")
    assert second["from"] == [
        {"folder": str(Path("first").resolve()), "run": first["run"], "step": 5}
    ]
    assert (second["hyperparameters"]["embed_dim"], second["hyperparameters"]["phases"]) == (16, [])
    assert second["bits_per_byte"][0] < 0.99 * first["bits_per_byte"][0]
    assert main(["train", "--from", "second", "--steps", "1", "--run-folder", "third"]) == 0
    assert drawn[-1][1] == 7
    assert main(["train", "--resume", "third"]) == 0
    assert [origin["run"] for origin in record_of("third")["from"]] == [second["run"], first["run"]]


def test_nothing_is_learnt_without_a_rate(capsys):
    """The parameters are those of the other run, all of them."""
    still = [
        "--learning-rate",
        "1e-30",
        "--muon-learning-rate",
        "1e-30",
        "--weight-decay",
        "0",
        "--steps",
        "1",
    ]
    assert main(["train", "--from", "first", *still, "--run-folder", "still"]) == 0
    before, after = (
        load_file(find_checkpoint(Path(name)) / TENSOR_FILE) for name in ("first", "still")
    )
    parameters = [name for name in before if "/" not in name]
    assert parameters
    assert all((before[name] == after[name]).all() for name in parameters)


def test_the_end_of_a_run_says_how_to_go_on(capsys):
    assert main(["train", "--resume", "first"]) == 0
    [line] = [
        line
        for line in capsys.readouterr().out.splitlines()
        if line.startswith("more steps: rda train ")
    ]
    assert main([*shlex.split(line)[3:], "--run-folder", "onward"]) == 0
    # of 48 bytes, for 2 x 16 twice and 48 three times
    assert record_of("onward")["steps_done"] == 5
    written = sorted(
        path.name for path in Path("onward").iterdir() if not path.name.startswith("checkpoint-")
    )
    assert written == ["README.txt", "loss.png", "metrics.jsonl", "record.json", "sample.txt"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--from", "first", "--embed-dim", "32"],
            "the parameters of --from have other shapes, but --embed-dim 32 was 16. Leave",
        ),
        (
            ["--from", "first", "--held-out-bytes", "97"],
            "trained on all but the last 96 bytes of this document",
        ),
        (
            ["--data", "-"],
            "--data - is stdin, and a resumed run reads its data again: save it in a file first",
        ),
        (
            ["--from", "nothing"],
            "--from nothing: there is no checkpoint in this folder; pass the folder of a run",
        ),
        (
            ["--resume", "first", "--from", "first"],
            "--resume goes on with the run in its own folder: leave --from out",
        ),
        (["--from", "first", "--run-folder", "first"], "--run-folder first holds a run already"),
    ],
)
def test_what_cannot_be_is_refused(words, message, capsys):
    assert main(["train", *words]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("name", ["README.txt", "sample.txt"])
def test_files_of_somebody_else_stay(name, capsys):
    folder = Path(f"with-{name}")
    folder.mkdir()
    (folder / name).write_text("mine")
    assert main(["train", "--from", "first", "--run-folder", str(folder)]) == 2
    assert (
        f"holds a {name}, which a run would make: choose another folder" in capsys.readouterr().err
    )
    assert (folder / name).read_text() == "mine"
