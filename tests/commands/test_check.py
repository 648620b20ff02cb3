"""`rda check`: that it passes here, and that it can fail."""

import json
import math
import os

import pytest
import torch
from transcripts import PREPARED, play

from ring_dilated_attention import kernels
from ring_dilated_attention.commands import check, cli, errors
from ring_dilated_attention.commands.local_ranks import Launch, RankFailedError, run_ranks
from ring_dilated_attention.pattern import DilatedPattern

CASE = errors.Case("small", DilatedPattern((8, 19), (1, 3), is_causal=True), 19, 1, 3, 3, 8)


@pytest.mark.parametrize(
    ("direction", "number", "factor"),
    [
        ("forward", 0, 1.01),
        ("forward", 0, math.nan),
        ("forward", 0, math.inf),
        ("backward", 2, 1.01),
    ],
)
def test_a_wrong_result_fails(direction, number, factor, monkeypatch):
    """1 % is far above float32's tolerance; NaN and inf must not slip through a comparison."""
    right = getattr(kernels.cpu, direction)

    def wrong(*args):
        results = list(right(*args))
        results[number] = results[number] * factor
        return results

    monkeypatch.setattr(kernels.cpu, direction, wrong)
    measured = errors.measure(CASE, torch.float32, "auto", "cpu", None)
    result = errors.worst([CASE], torch.float32, [[measured]])
    assert not result.passed
    assert direction == "forward" or result.where.startswith("dv")


def test_a_query_without_keys_must_have_no_weight():
    """-inf is met exactly or the error is infinite."""
    expected = torch.tensor([0.0, -torch.inf], dtype=torch.float64)
    assert errors.relative(errors.squares(torch.tensor([0.0, -1e30]), expected)) == math.inf
    assert errors.relative(errors.squares(expected, expected)) == 0


def test_every_row_of_one_and_two_ranks_passes(tmp_path, monkeypatch, capsys):
    """The command as a user runs it; on this machine what needs a GPU says so."""
    monkeypatch.chdir(tmp_path)
    assert cli.main(["check", "--ranks", "1", "2", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    passed = [row for row in rows if row["verdict"] == "passed"]
    assert {row["dtype"] for row in passed} == {"float64", "float32", "bfloat16", "float16"}
    assert {row["num_ranks"] for row in passed} == {1, 2}
    assert all(row["error"] <= row["tolerance"] for row in passed)
    assert {row["exchange"] for row in passed} == {
        "none",
        check.CACHE,
        check.SIMULATED,
        *check.EXCHANGES,
    }
    if not torch.cuda.is_available():
        monkeypatch.setattr(check, "check", lambda *_: rows)
        play(PREPARED / "check.txt", capsys)


def crash_or_find_infinity(worker, trials, seconds):
    if trials[0].exchange != check.CACHE:
        os._exit(3)
    return [[{"out": (math.inf, 1.0)}] * len(trial.cases) for trial in trials]


def test_a_crash_and_infinity_are_failed_rows(tmp_path, monkeypatch, capsys):
    """Catches Infinity, which JSON does not have, and a table that fails over it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(check, "_measure_all", crash_or_find_infinity)
    play(PREPARED / "check_failed.txt", capsys)
    assert cli.main(["check", "--ranks", "1", "--json"]) == 1
    rows = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert [row.get("error") for row in rows[:8]] == [None] * 4 + ["inf"] * 4


def sleep(worker, seconds):
    import time

    time.sleep(seconds)


def test_a_hang_ends():
    with pytest.raises(RankFailedError, match="rank 0: no answer within 1 s\nrank 1: no answer"):
        run_ranks(Launch(2, seconds=1), sleep, 60)


def raise_it(worker):
    raise ValueError(f"no luck on rank {worker.rank}")


def test_a_failing_rank_is_quoted():
    with pytest.raises(RankFailedError, match="ValueError: no luck on rank 0"):
        run_ranks(Launch(1), raise_it)


def test_the_timeout_is_that_of_the_ranks(monkeypatch, capsys):
    def out_of_time(launch, *args, **options):
        raise RankFailedError(f"no answer within {launch.seconds} s")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(check, "run_ranks", out_of_time)
    play(PREPARED / "check_timeout.txt", capsys)
