"""200 cases of every kind of `make fuzz` (fewer of some that start ranks), and proofs that cases notice what they are
there for."""

import json
from importlib import import_module

import pytest
import torch
from fuzz import KINDS, fuzz, lines_of
from fuzz_oracle import why_off
from helpers import ROOT

SEED = 20251122
FEWER = {
    "files": 100,
    "ranks": 100,
    "commands": 120,
    "caches": 100,
    "losses": 80,
    "borders": 80,
    "styles": 40,
    "advice": 80,
}
# Kinds that take ten seconds or more are shared out, so that no process has a whole one to itself at the end.
SHARES = {"commands": 2, "files": 2, "ranks": 2}


def ranges(kind):
    number, shares = FEWER.get(kind, 200), SHARES.get(kind, 1)
    return [range(number * i // shares, number * (i + 1) // shares) for i in range(shares)]


@pytest.mark.parametrize(
    ("kind", "numbers"),
    [(kind, numbers) for kind in KINDS for numbers in ranges(kind)],
    ids=lambda x: x if isinstance(x, str) else f"from {x.start}",
)
def test_nothing_is_found(kind, numbers):
    found = fuzz(kind, SEED, numbers)
    assert found.num_cases == len(numbers)
    assert found.failures == []
    assert len(found.outcomes) > 5  # cases of many sorts, and not 200 times the same refusal


@pytest.mark.parametrize(
    ("kind", "broken"),
    [
        ("commands", "other's files are overwritten"),
        ("commands", "the lock stays"),
        ("files", "no digests"),
        ("calls", "dlse goes through float16"),
        ("calls", "padding is attended"),
        ("simulated", "gradients do not come home"),
        ("ranks", "the mean of each shard"),
        ("borders", "borders are not compared"),
        ("caches", "compiled code forgets the scale"),
        ("torchscale", "misplaced rows stay"),
        ("autocast", "a cache has the parameters' type"),
        ("advice", "one layer less is followed"),
    ],
)
def test_a_broken_program_is_noticed(kind, broken):
    """Those that few cases notice; `make fuzz` has more, and takes longer."""
    assert fuzz(kind, SEED, range(400), broken=broken, most_failures=1).failures


@pytest.mark.parametrize(("rounding", "is_wrong"), [(1e-9, False), (0.25, True)])
def test_a_gradient_that_cancels_is_judged_by_its_terms(rounding, is_wrong):
    """Catches an error that is divided by a true gradient of nearly 0: processors round such sums differently."""
    value, size = torch.full((3,), 1e-30, dtype=torch.float64), torch.ones(3, dtype=torch.float64)
    found = torch.full((3,), rounding)
    complaint = why_off("dk", found, value, size, torch.float32, torch.bfloat16)
    assert (complaint is not None) == is_wrong


def test_a_case_can_be_made_again():
    first = fuzz("files", SEED, range(20, 25))
    again = fuzz("files", SEED, range(22, 25))
    assert again.outcomes <= first.outcomes
    assert sum(again.outcomes.values()) == 3


@pytest.mark.parametrize("kind", KINDS)
def test_the_program_can_be_broken(kind):
    """Catches a way of breaking it that ends in an error of its own, which would pass for noticed."""
    breakages = import_module(KINDS[kind]).BREAKAGES
    assert breakages
    for broken in breakages.values():
        with broken():
            pass


def test_the_page_says_what_was_run():
    """docs/reliability.md quotes the record, whose every case was clean."""
    record = json.loads((ROOT / "benchmarks/results/fuzz.json").read_text())
    page = (ROOT / "docs/reliability.md").read_text()
    assert "\n".join(lines_of(record)) in page
    num_cases = {
        kind: sum(row["cases"] for row in record["rows"] if row["kind"] == kind) for kind in KINDS
    }
    assert num_cases["calls"] >= 20_000
    assert num_cases["ranks"] >= 1000
    assert num_cases["commands"] + num_cases["files"] >= 2000
    assert not any(row["failures"] for row in record["rows"])
    proofs = [
        noticed for row in record["rows"] for noticed in row["broken_noticed_by_case"].values()
    ]
    assert proofs
    assert None not in proofs
