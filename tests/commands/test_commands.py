"""What all commands have in common: they do without the extra packages, and end well whatever their streams do."""

import importlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from shlex import split

import pytest
from full_disk import on_a_full_disk
from transcripts import SESSIONS, made_up, play

import ring_dilated_attention
from ring_dilated_attention.commands import cli, local_ranks, terminal
from ring_dilated_attention.training.files import check_mine

PLAN = split("plan --seq-len 4096 --ranks 3 --segment-lengths 4096 --dilation-rates 1")
PICTURES = [*PLAN, *split("--seq-len 64 --ranks 2 --picture")]
SUGGEST = split("suggest --seq-len 4Ki --heads 4 --speedup")
RDA = [sys.executable, "-m", "ring_dilated_attention"]
EXTRA = ("filelock", "numpy", "matplotlib", "safetensors", "tqdm")


@pytest.fixture
def without_extra(monkeypatch):
    importlib.import_module("torch")  # which looks for numpy itself, once
    for name in EXTRA:
        monkeypatch.setitem(sys.modules, name, None)


def test_help_and_version_need_no_torch():
    """Which takes seconds."""
    code = """
import sys
from ring_dilated_attention.commands.cli import main
sys.modules["torch"] = None
for line in ("--version", "--help", "train --help"):
    try:
        main(line.split())
    except SystemExit as error:
        assert error.code == 0
"""
    process = subprocess.run([RDA[0], "-c", code], capture_output=True, text=True, check=True)
    assert process.stdout.startswith(f"rda {ring_dilated_attention.__version__}\nusage: rda ")
    assert "usage: rda train " in process.stdout


def test_what_is_lacking_is_named(without_extra, capsys):
    """Catches a package that only draws progress and without which nothing runs, and a remedy that does not name the
    extra. (pip takes the installed package, which is in no registry.)"""
    remedy = "pip install 'ring-dilated-attention[train]'\n"
    for words, code, said in (
        (PLAN, 0, ""),
        (["train"], 2, f"rda train: needs filelock, numpy, safetensors: {remedy}"),
        ([*PICTURES, "pattern.png"], 2, f"rda plan: --picture needs matplotlib: {remedy}"),
    ):
        assert cli.main(words) == code
        assert capsys.readouterr().err == said


NEEDS_RICH = {
    "train": ("", "train"),
    "embed": ("slides --weights w --out o", "slides"),
    "generate": ("run --prompt a", "train"),
    "evaluate": ("run text", "train"),
    "plan": ("--seq-len 8", "commands"),
    "plan model": ("--seq-len 8", "commands"),
    "suggest": ("--seq-len 8 --heads 4 --speedup 2", "commands"),
}


@pytest.mark.parametrize("name", cli.SUBCOMMANDS)
def test_every_command_names_the_extra_that_brings_rich(name, capsys, monkeypatch):
    """Catches an import that fails after minutes of work."""
    monkeypatch.setitem(sys.modules, "rich", None)
    words, extra = NEEDS_RICH.get(name, ("", "commands"))
    assert cli.main(f"{name} {words}".split()) == 2
    said = f"rda {name}: needs rich: pip install 'ring-dilated-attention[{extra}]'\n"
    assert capsys.readouterr() == ("", said)


@pytest.mark.parametrize(
    ("line", "code", "said"),
    [
        # suggest: the fastest of the commands that show progress
        ("rda SUGGEST 2 >/dev/full", 2, "rda suggest: No space left on device\n"),
        ("rda SUGGEST 2 <&- 2>&-", 0, ""),
        # catches 120, Python's code for what is left in a stream's buffer
        ("rda nothing 2>/dev/full", 2, ""),
        ("(sleep 1; rda --help) | true", 141, ""),
    ],
)
def test_streams_of_a_shell(line, code, said):
    """Catches a traceback of a stream that is full, closed or not read, and a result that another stream spoils."""
    line = line.replace("rda", shlex.join(RDA)).replace("SUGGEST", shlex.join(SUGGEST))
    words = ["bash", "-o", "pipefail", "-c", line]
    buffered = os.environ | {"PYTHONUNBUFFERED": ""}
    ended = subprocess.run(words, env=buffered, capture_output=True, text=True, timeout=120)
    assert ended.returncode == code
    assert ended.stderr.endswith(said)
    assert "Traceback" not in ended.stderr
    suggested = (
        (SESSIONS / "suggest.txt").read_text().partition("--speedup 2\n")[2].partition("$ ")[0]
    )
    assert ended.stdout == ("" if code else suggested)


def test_a_sentence_for_a_full_stderr_does_not_hide_an_unread_stdout(monkeypatch):
    """Catches an exit code of 0 for output that nobody read: the sentence came after it, and both were dropped."""
    read, write = os.pipe()
    os.close(read)

    def command():
        print("found")
        terminal.say("a sentence")
        return 0

    with open(write, "w") as unread, open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", unread)
        monkeypatch.setattr(sys, "stderr", full)
        code = terminal.guarded("rda", command, is_process=False)
    assert code == terminal.UNREAD_EXIT_CODE


def imports_torch(pid):
    return "libtorch" in Path(f"/proc/{pid}/maps").read_text()


def is_child_importing_torch(pid):
    return any(map(imports_torch, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))


@pytest.mark.parametrize("moment", [imports_torch, is_child_importing_torch])
def test_interrupted_at_any_time(moment):
    """Ctrl-C while torch is imported, here or in the process that ranks are forked from. One line, and nobody is left:
    whoever is would keep the pipe open."""
    words = [*RDA, *split("check --ranks 1 2")]
    streams = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(words, start_new_session=True, **streams)
    deadline = time.monotonic() + 60
    while not moment(process.pid):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGINT)
    error = process.communicate(timeout=60)[1]
    assert process.returncode == 130
    assert error.endswith("\nrda check: interrupted\n")
    assert "Traceback" not in error


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


@pytest.mark.parametrize("session", sorted(SESSIONS.glob("*.txt")), ids=lambda path: path.stem)
def test_transcripts(session, tmp_path, monkeypatch, capsys):
    """In a folder with `files`. (Sessions in `prepared` are those of tests that prepare more.) Catches a command that
    measures something first.

    What a model holds is made up: other tests run one to weigh it, and that takes a second."""
    monkeypatch.setattr(local_ranks, "run_ranks", None)
    monkeypatch.setattr("ring_dilated_attention.forecast.meshes.weigh_activations", made_up)
    monkeypatch.chdir(shutil.copytree(SESSIONS / "files", tmp_path / "here"))
    play(session, capsys)


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


def test_memory_that_is_not_there_is_a_sentence(monkeypatch, capsys):
    def greedy(*_):
        raise MemoryError

    monkeypatch.setattr("ring_dilated_attention.forecast.call_cost.picked_ranks", greedy)
    assert cli.main(PLAN) == 2
    assert capsys.readouterr().err == "rda plan: there is not enough memory\n"


@pytest.mark.parametrize("command", ["", *cli.SUBCOMMANDS])
def test_help_is_ascii_and_its_examples_fit_80_columns(command, capsys, monkeypatch):
    """And needs torch alone."""
    monkeypatch.setitem(sys.modules, "rich", None)
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit, match="0"):
        cli.main([*command.split(), "--help"])
    out = capsys.readouterr().out
    assert out.isascii()
    epilog = out.rpartition("\nexamples:")[2]
    assert [line for line in epilog.splitlines() if len(line) > 80] == []
