"""Benchmarks at tiny sizes: that every case runs, passes its gate first, and leaves a record that makes a page."""

import json
import math
import shutil
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from helpers import ROOT

from benchmarks import command, flops, gate, measure, record
from benchmarks.command import CASES
from ring_dilated_attention import kernels
from ring_dilated_attention.pattern import DilatedPattern
from ring_dilated_attention.plan.planner import make_plan
from ring_dilated_attention.plan.sharded_call import ShardedCall
from ring_dilated_attention.plan.sharding import make_shards

SIZES = measure.Sizes(512, 2, 16)
PATTERN = DilatedPattern((128, 512), (1, 4))


# the commands of the main job have tests of their own, and take half a minute
@pytest.mark.parametrize("name", sorted(CASES.keys() - {"main_job"}))
def test_every_case_leaves_a_record(name, tmp_path, capsys):
    folder = tmp_path / "results"
    assert command.main([name, "--quick", "--results", str(folder)]) == 0
    found = json.loads((folder / f"{name}.json").read_text())
    assert found["command"] == f"python -m benchmarks {name} --quick"
    assert found["hardware"]["threads_of_this_process"] == torch.get_num_threads()
    # a build for CUDA adds "+cu130" to its own
    assert found["versions"]["torch"] == version("torch")
    assert found["rows"]
    for row in found["rows"]:
        assert row["gate"]["passed"]
        assert row["gate"]["error"] <= row["gate"]["tolerance"]
        assert measure.call_json(SIZES, PATTERN).keys() <= row.keys()
        if name in ("peers", "ranks", "scaling"):
            assert row["threads_per_rank"] == 1
    assert f"## {name}" in (tmp_path / "README.md").read_text()
    assert f"{name}: " in capsys.readouterr().out


def test_no_speed_without_a_green_gate(monkeypatch, tmp_path, capsys):
    """A kernel that is 1 % off is not timed, and nothing is written."""
    right = kernels.cpu.forward

    def wrong(*args):
        out, lse = right(*args)
        return out * 1.01, lse

    monkeypatch.setattr(kernels.cpu, "forward", wrong)
    assert command.main(["linear", "--quick", "--results", str(tmp_path)]) == 1
    assert "exceeds" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_the_gate_keeps_branches_and_dtype():
    case = gate.small_case(
        measure.Sizes(32_768, 4, 64), DilatedPattern((2048, 32_768), (1, 16), is_causal=True)
    )
    assert case.seq_len == 256
    assert case.pattern == DilatedPattern((16, 256), (1, 16), is_causal=True)


# Files that are there before, and that nothing may touch.
THEIRS = {
    "project/README.md": "# My project\n",
    "theirs/results/linear.json": "[]",
    "theirs/results/multi_gpu.json": "somebody's",
    "page": 'It quotes <meta name="generator" content="python -m benchmarks --html">',
}
RESULTS = ROOT / "benchmarks" / "results"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            "linear --quick --results project/results",
            "project/README.md, which python -m benchmark",
        ),
        ("linear --quick --results project/README.md/results", "be written: a file is in the way"),
        ("--page --results project/results", "project/README.md, which python -m benchmarks"),
        ("--page --results none/results", "there are no records in none/results. Name the folder"),
        ("linear --page", "leave out --page"),
        ("--all --page", "leave out --page"),
        ("linear --quick --results theirs/results", "linear.json was not made by python -m bench"),
        (
            "--page --results theirs/results",
            "linear.json is no record of python -m benchmarks: run",
        ),
        ("--html page", "was not made by python -m benchmarks --html, and nothing is written over"),
        ("--html project/README.md", "was not made by python -m benchmarks --html"),
        ("--reports page", "was not made by python -m benchmarks --reports, and nothing is writt"),
        ("--reports new --results linear/results", "--reports: there is no record of reports in "),
        ("gpu", "needs a CUDA GPU, and torch sees none"),
        ("gpu speed --quick", "unknown part 'speed'; choose from card, right"),
        ("multi_gpu", "multi_gpu needs two CUDA GPUs or more, and torch sees 1."),
        ("multi_gpu --quick --results theirs/results", "multi_gpu.json was not made by"),
    ],
)
def test_what_is_refused(line, message, tmp_path, monkeypatch, capsys):
    """Before it is measured. Catches a user's own README that is overwritten, and a page of nothing."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("benchmarks.command.run_case", None)
    monkeypatch.setattr("benchmarks.multi_gpu.settings.Settings.run_ranks", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    given = THEIRS | {"linear/results/linear.json": (RESULTS / "linear.json").read_text()}
    for name, text in given.items():
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(text)
    assert command.main(line.split()) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    found = {str(path): path.read_text() for path in Path().rglob("*") if path.is_file()}
    assert found == given


def test_what_is_not_run_any_more_keeps_its_table(tmp_path):
    """As text, beside the last commit that holds the code; and its rows."""
    (tmp_path / "results").mkdir()
    for name in ("linear", "sent"):
        shutil.copy(RESULTS / f"{name}.json", tmp_path / "results")
    assert command.main(["--page", "--results", str(tmp_path / "results")]) == 0
    page = (tmp_path / "README.md").read_text()
    living, retired = page.split("## Not run any more")
    assert "## linear" in living
    assert "### sent" in retired
    assert record.read_record(tmp_path / "results" / "sent.json")["table"] in retired
    assert "Commit 98e6b230 is the last one with its code." in retired
    assert "98e6b230" not in living


@pytest.mark.parametrize("num_rows", [1, 31, 64, 200, 512, 700, 1024, 2048, 2500])
def test_rounded_causal_pairs(num_rows):
    """Query by query: the keys up to the end of its block of queries, rounded up to blocks of 512."""
    block = 32
    if num_rows >= 192:
        block = 256 if num_rows >= 768 else 64
    expected = 0
    for query in range(num_rows):
        end = min((query // block + 1) * block, num_rows)
        expected += min(math.ceil(end / 512) * 512, num_rows)
    assert flops.causal_pairs(num_rows) == expected
    assert flops.causal_pairs(num_rows) >= num_rows * (num_rows + 1) // 2


def test_rounding_is_of_causal_tiles_only():
    for is_causal in (False, True):
        pattern = DilatedPattern((2048,), (1,), is_causal=is_causal)
        plan = make_plan(ShardedCall(pattern, make_shards("contiguous", (4096,)), 3, 3), 0)
        assert (flops.computed_pairs(plan) > plan.pairs) == is_causal


def test_allocator_events_are_exact():
    """The profiler's own interface is private: this pins what is read from it."""

    def function():
        x = torch.empty(1000, dtype=torch.float32)
        y = torch.empty(1500, dtype=torch.float32)
        del x
        return y, torch.empty(10, dtype=torch.float32)

    assert measure.allocated(function) == measure.Allocated(10_000, 0)
