"""What all commands have in common: they do without the extra packages, and end well when nobody reads on."""

import subprocess
import sys

import pytest

from ring_dilated_attention.commands import cli, output

PLAN = ["plan", "--seq-len", "4096", "--ranks", "32", "--segment-lengths", "4096", "--dilation-rates", "1"]
EXTRA = ("tqdm", "numpy", "matplotlib", "safetensors")


@pytest.fixture
def without_extra(monkeypatch):
    for name in EXTRA:
        monkeypatch.setitem(sys.modules, name, None)


@pytest.mark.parametrize(
    "arguments",
    [
        PLAN,
        ["slice", "--plan"],
        ["slice", "--seq-len", "65536", "--ranks", "64", "--heads", "1", "--head-dim", "16"],
    ],
    ids=lambda arguments: " ".join(arguments[:2]),
)
def test_torch_is_enough(arguments, without_extra, capsys):
    """Catches a package that only draws progress and without which nothing runs."""
    assert cli.main(arguments) == 0
    assert capsys.readouterr().err == ""


def test_training_names_what_it_lacks(without_extra, capsys):
    """Catches a remedy that does not exist: the package is in no registry."""
    assert cli.main(["train"]) == 2
    remedy = "pip install -e '.[train]' in a clone of the repository"
    assert capsys.readouterr().err == f"rda train: needs matplotlib, numpy, safetensors, tqdm: {remedy}\n"
    assert cli.main([*PLAN, "--picture", "pictures"]) == 2
    assert capsys.readouterr().err == "--picture needs matplotlib: pip install matplotlib\n"


def test_a_bar_that_is_not_shown_can_be_used_like_one(capsys):
    for is_shown in (False, True):
        with output.progress_bar(2, "step", is_shown=is_shown) as bar:
            bar.set_postfix_str("first")
            bar.update()
        assert bool(capsys.readouterr().err) == is_shown


@pytest.mark.parametrize("more", [["--json"], []], ids=["much", "little"])
def test_nobody_reads_on(more):
    """As `rda ... | head -1`: no traceback, whether the pipe breaks while it is written to or at the end."""
    command = [sys.executable, "-m", "ring_dilated_attention.commands.cli", *PLAN, "--ranks", "8", *more]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process.stdout.close()
    error = process.stderr.read()
    process.stderr.close()
    assert process.wait(timeout=60) == 141
    assert error == ""
