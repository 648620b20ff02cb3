"""What all commands have in common: they do without the extra packages, and end well whatever their streams do."""

import importlib
import os
import random
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from shlex import split

import pytest
from full_disk import on_a_full_disk

import ring_dilated_attention
from ring_dilated_attention.commands import cli, terminal
from ring_dilated_attention.training.files import check_mine

PLAN = split("plan --seq-len 4096 --ranks 3 --segment-lengths 4096 --dilation-rates 1")
PICTURES = [*PLAN, *split("--seq-len 64 --ranks 2 --picture")]
RDA = [sys.executable, "-m", "ring_dilated_attention"]
EXTRA = ("filelock", "numpy", "matplotlib", "safetensors", "tqdm")


@pytest.fixture
def without_extra(monkeypatch):
    importlib.import_module("torch")  # which looks for numpy itself, once
    for name in EXTRA:
        monkeypatch.setitem(sys.modules, name, None)


def test_the_version(capsys):
    """As a module too; and without torch, which takes seconds."""
    with pytest.raises(SystemExit, match="0"):
        cli.main(["--version"])
    assert capsys.readouterr().out == f"rda {ring_dilated_attention.__version__}\n"
    words = [RDA[0], "-X", "importtime", *RDA[1:], "--version"]
    process = subprocess.run(words, capture_output=True, text=True, timeout=60, check=True)
    assert process.stdout == f"rda {ring_dilated_attention.__version__}\n"
    assert not re.search(r"\| +torch$", process.stderr, flags=re.MULTILINE)


def test_torch_is_enough(without_extra, capsys):
    """Catches a package that only draws progress and without which nothing runs."""
    assert cli.main(PLAN) == 0
    assert capsys.readouterr().err == ""


def test_training_names_what_it_lacks(without_extra, capsys):
    """Catches a remedy that does not name the extra. (pip takes the installed package, which is in no registry.)"""
    assert cli.main(["train"]) == 2
    remedy = "pip install 'ring-dilated-attention[train]'"
    assert capsys.readouterr().err == f"rda train: needs filelock, numpy, safetensors: {remedy}\n"
    assert cli.main([*PICTURES, "pattern.png"]) == 2
    assert capsys.readouterr().err == f"rda plan: --picture needs matplotlib: {remedy}\n"


NEEDS_RICH = {
    "train": ([], "train"), "embed": (["slides", "--weights", "w", "--out", "o"], "slides"),
    "generate": (["run", "--prompt", "a"], "train"), "evaluate": (["run", "text"], "train"),
    "plan": (["--seq-len", "8"], "commands"), "plan model": (["--seq-len", "8"], "commands"),
    "suggest": (["--seq-len", "8", "--heads", "4", "--speedup", "2"], "commands"),
}  # fmt: skip


@pytest.mark.parametrize("name", cli.SUBCOMMANDS)
def test_every_command_names_the_extra_that_brings_rich(name, capsys, monkeypatch):
    """Catches an import that fails after minutes of work. Help needs torch alone."""
    monkeypatch.setitem(sys.modules, "rich", None)
    arguments, extra = NEEDS_RICH.get(name, ([], "commands"))
    assert cli.main([*name.split(), *arguments]) == 2
    out, error = capsys.readouterr()
    assert (out, error) == (
        "",
        f"rda {name}: needs rich: pip install 'ring-dilated-attention[{extra}]'\n",
    )
    with pytest.raises(SystemExit, match="0"):
        cli.main([*name.split(), "--help"])


@pytest.mark.parametrize(
    ("line", "code", "said"),
    [
        ("rda PLAN >/dev/full", 2, "rda plan: No space left on device\n"),
        ("rda PLAN <&- 2>&-", 0, ""),
        # catches 120, Python's code for what is left in a stream's buffer
        ("env -u PYTHONUNBUFFERED rda suggest --seq-len x 2>/dev/full", 2, ""),
        # catches letters in what is printed; those of a user's path are shown by number
        (
            "PYTHONIOENCODING=ascii rda PLAN --seq-len 64 --picture B\u00fccher.png",
            0,
            "B\\xfccher.png",
        ),
        ("rda PLAN | sleep 0", 141, ""),
    ],
)
def test_streams_of_a_shell(line, code, said, tmp_path):
    """Catches a traceback of a stream that is full, closed or not read, and a result that another stream spoils."""
    line = line.replace("rda", shlex.join(RDA)).replace("PLAN", shlex.join(PLAN))
    words = ["bash", "-o", "pipefail", "-c", line]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert ended.returncode == code
    assert said in ended.stderr  # on a slow machine beside progress
    assert "Traceback" not in ended.stderr
    assert ended.stdout.startswith("branch 0 (w=4096, r=1)") == (code == 0)
    assert "\\" not in ended.stdout


def test_a_sentence_for_a_full_stderr_does_not_hide_an_unread_stdout(monkeypatch):
    """Catches an exit code of 0 for output that nobody read: the sentence came after it, and both were dropped."""
    read, write = os.pipe()
    os.close(read)
    with open(write, "w") as unread, open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", unread)
        monkeypatch.setattr(sys, "stderr", full)
        code = terminal.guarded(
            "rda", lambda: print("found") or terminal.say("a sentence") or 0, is_process=False
        )
    assert code == terminal.UNREAD_EXIT_CODE


def test_interrupted_at_any_time():
    """Ctrl-C while torch is imported, here or in the process that ranks are forked from, or later. One line, and nobody
    is left: whoever is would keep the pipe open."""
    seconds = random.Random(0)
    processes = []
    for _ in range(2):
        streams = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
        words = [*RDA, *split("check --ranks 1 2")]
        process = subprocess.Popen(words, start_new_session=True, **streams)
        wait_for(lambda pid=process.pid: "torch" in Path(f"/proc/{pid}/maps").read_text())
        time.sleep(seconds.uniform(0, 1.5))
        os.killpg(process.pid, signal.SIGINT)
        processes.append(process)
    for process in processes:
        error = process.communicate(timeout=60)[1]
        assert process.returncode == 130
        assert error.endswith("\nrda check: interrupted\n")
        assert "Traceback" not in error


def wait_for(condition, seconds=60):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_what_is_held_back_comes_at_the_end():
    """Catches an interrupt that is lost, and one that comes while processes are started."""
    reached = []

    def start_something():
        with terminal.held_back():
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.01)
            reached.append(True)

    with pytest.raises(KeyboardInterrupt):
        start_something()
    assert reached == [True]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


def test_nothing_of_somebody_else_is_overwritten(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    theirs = "from ring_dilated_attention import DilatedPattern\n"
    Path("out.png").write_text(theirs)
    capsys.readouterr()
    assert cli.main([*PICTURES, "out.png"]) == 2
    out, error = capsys.readouterr()
    assert re.fullmatch(
        r"rda plan: out.png was not made by this run of [\w. -]+ --\w+, and nothing is written over it\..*\n",
        error,
    )
    assert out == ""
    assert Path("out.png").read_text() == theirs


def test_refused_commands_make_no_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.main([*PICTURES, "a/b/out.png", "--kv-heads", "5"]) == 2
    assert list(tmp_path.iterdir()) == []
    assert cli.main([*PICTURES, "a/b/out.png"]) == 0
    assert Path("a/b/out.png").exists()


@pytest.mark.parametrize("path", ["/dev/full", "/dev/null"])
def test_what_has_no_end_is_not_read_to_see_whose_it_is(path, monkeypatch):
    """Catches a device that is read until memory is full."""
    monkeypatch.setattr(Path, "open", lambda self, *_: pytest.fail(f"{self} is read"))
    with pytest.raises(ValueError, match=f"{path} is in the way: it is no regular file"):
        check_mine(Path(path), lambda file: True, "a test")


def test_a_full_disk_is_a_sentence(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, error = on_a_full_disk(100, cli.main, [*PICTURES, "out.png"])
    assert code == 2
    assert re.search(r"rda plan: \S+: File too large\n$", error)
    assert "Traceback" not in error
    assert list(Path().iterdir()) == []


def test_a_disk_that_is_full_after_the_first_step_leaves_nothing(tmp_path, monkeypatch):
    """Catches metrics that stay, since closing their file fails as writing to it did."""
    monkeypatch.chdir(tmp_path)
    Path("text").write_bytes(b"some text. " * 100)
    sizes = "--seq-len 16 --steps 3 --num-layers 1 --embed-dim 8 --num-heads 2 --held-out-bytes 16"
    words = split(f"train --data text {sizes} --segment-lengths 16 --dilation-rates 1")
    code, error = on_a_full_disk(500, cli.main, words)
    assert code == 2
    assert error.rstrip().endswith("File too large")
    assert "Traceback" not in error
    assert list(Path().iterdir()) == [Path("text")]


def test_memory_that_is_not_there_is_a_sentence(monkeypatch, capsys):
    def greedy(*_):
        raise MemoryError

    monkeypatch.setattr("ring_dilated_attention.forecast.call_cost.picked_ranks", greedy)
    assert cli.main(PLAN) == 2
    assert capsys.readouterr().err == "rda plan: there is not enough memory\n"


@pytest.mark.parametrize("command", ["", *cli.SUBCOMMANDS])
def test_help_is_ascii_and_its_examples_fit_80_columns(command, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as caught:
        cli.main([*command.split(), "--help"])
    assert caught.value.code == 0
    out = capsys.readouterr().out
    assert out.isascii()
    epilog = out.rpartition("\nexamples:")[2]
    assert [line for line in epilog.splitlines() if len(line) > 80] == []
