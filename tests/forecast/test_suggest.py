"""`rda suggest`: each suggestion keeps the budget, its numbers are the definition's, and what is printed runs."""

import json
import random
import shlex
from itertools import islice

import pytest
from helpers import heard_after

from ring_dilated_attention.commands import cli, suggest
from ring_dilated_attention.forecast.reach import heard_by_layer, reach
from ring_dilated_attention.pattern import DilatedPattern
from ring_dilated_attention.reference import multiplicity


def suggested(capsys, words):
    assert cli.main(["suggest", *words.split(), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def heard_of(pattern, n, heads, num_layers):
    """By the definition: how many positions each query has heard of after each layer."""
    return [heard.sum(1).tolist() for heard in islice(heard_after(pattern, n, heads), num_layers)]


@pytest.mark.parametrize("seed", range(15))
def test_what_is_said_of_suggestions_is_the_definitions(seed, capsys):
    """In random jobs. Catches a first segment that could have been twice as long, a worst query that is not followed,
    and a pick, or a reason, that its numbers do not give."""
    rng = random.Random(seed)
    n, heads, layers = rng.randint(130, 512), rng.randint(1, 9), rng.randint(1, 5)
    is_causal, speedup = seed % 4 > 0, rng.uniform(1, 3.5)
    words = f"--seq-len {n} --heads {heads} --layers {layers} --speedup {speedup}"
    words += "" if is_causal else " --not-causal"
    words += " --window" if seed % 3 == 0 else ""
    found = suggested(capsys, words)
    dense = heads * (n * (n + 1) // 2 if is_causal else n**2)
    allowed = [i + 1 if is_causal else n for i in range(n)]
    for row in found["suggestions"]:
        pattern = DilatedPattern(
            row["segment_lengths"], row["dilation_rates"], window=row["window"], is_causal=is_causal
        )
        pairs = int(multiplicity(pattern, n, heads).sum())
        shares = [
            min(count / most for count, most in zip(counts, allowed, strict=True))
            for counts in heard_of(pattern, n, heads, layers)
        ]
        first = next((i + 1 for i, share in enumerate(shares) if share >= 0.99), None)
        assert pairs <= dense / speedup * (1 + 1e-9)
        assert (row["pairs"], row["of_dense"]) == (pairs, pairs / dense)
        assert (row["reach_by_layer"], row["layers_for_most"]) == (shares, first)
        assert row["all_read"] == (max(pattern.dilation_rates) <= heads)
        longer = 2 * pattern.segment_lengths[0]
        if "LongNet" in row["rule"] and pattern.window is None and longer < n:
            rules = {"first_length": longer, "ratio": int(row["rule"].split()[-1])}
            larger = DilatedPattern.longnet(n, **rules, is_causal=is_causal)
            assert int(multiplicity(larger, n, heads).sum()) > dense / speedup
    best, *others = [suggest.costs(row) for row in found["suggestions"]]
    assert all(best <= other for other in others)
    reasons = zip(suggest.BETTER, best, others[0] if others else best, strict=True)
    why = [f"{reason} (against 2)" for reason, cost, other in reasons if cost != other]
    why.append("2 has equal figures" if others else "it is the only candidate")
    assert found["why"] == why[0]


@pytest.mark.parametrize(
    ("more", "is_dense"),
    [
        ("--seq-len 4Ki --heads 4 --speedup 1", True),
        ("--seq-len 5001 --heads 4 --speedup 5", False),
        ("--seq-len 4Ki --heads 1 --speedup 6", False),
    ],
)
def test_what_it_picks_runs_as_it_is_printed(more, is_dense, capsys):
    """The code is the pattern, and `rda plan` plans it. Catches a whole document in words that no command reads."""
    rows = suggested(capsys, more)["suggestions"]
    are_read = [row["all_read"] for row in rows]
    assert are_read == sorted(are_read, reverse=True)
    first = rows[0]
    assert len(first["reach_by_layer"]) == 12
    assert cli.main(["suggest", *more.split()]) == 0
    out = capsys.readouterr().out
    code = out[out.index("\nDilatedPattern") + 1 :]
    pattern = eval(code[: code.index(")\n") + 1], {"DilatedPattern": DilatedPattern})
    assert pattern == DilatedPattern(
        first["segment_lengths"], first["dilation_rates"], is_causal=True
    )
    assert (pattern.dilation_rates == (1,)) == is_dense
    command, options = out[out.index("\nrda plan") :].split(", with\n1. ")
    options = options.split("\n2. ")[0]
    assert cli.main([*shlex.split(command)[1:], *shlex.split(options), "--json"]) == 0
    flops = json.loads(capsys.readouterr().out)["flops"]
    assert flops == first["pairs"] * 14 * 64


@pytest.mark.parametrize(
    "pattern",
    [
        DilatedPattern((4, 16, 128), (1, 2, 8), is_causal=True, phase="blocked"),
        DilatedPattern((4, 16, 130), (1, 2, 8), phase="blocked"),
        DilatedPattern((8, 64), (2, 8), is_causal=True, heads="split"),
        DilatedPattern((8, 64, 4), (1, 64, 16)),
        DilatedPattern.dense(),
        DilatedPattern.sliding(16, is_causal=True),
        DilatedPattern.sliding(4),
        DilatedPattern((64, 256), (4, 16), window=256, is_causal=True),
        DilatedPattern((128,), (8,), window=32),
    ],
)
@pytest.mark.parametrize("n", [1, 2, 67, 128])
def test_reach_is_powers_of_the_definition(pattern, n):
    """Position by position, over all heads: what a query sees, then what those see."""
    heads, layers = 3, 4
    counts = list(islice(heard_by_layer(pattern, n, heads, range(n)), layers))
    counts += [counts[-1]] * (layers - len(counts))
    assert counts == heard_of(pattern, n, heads, layers)


def test_what_is_no_power_of_two_is_refused():
    with pytest.raises(ValueError, match="lengths and rates must be powers of two, got w=6, r=1"):
        reach(DilatedPattern((6, 64), (1, 2)), 64, 2, 3)


def test_a_long_sequence_is_answered_at_once(capsys):
    """Catches sets with a bit for each position: this took minutes."""
    found = suggested(capsys, "--seq-len 1G --heads 12 --speedup 50")
    assert len(found["suggestions"]) > 1


def test_more_layers_than_can_add_anything_take_no_longer():
    pattern = DilatedPattern((64, 1024), (1, 16))
    few, many = (reach(pattern, 2**14, 4, num_layers) for num_layers in (60, 10_000))
    assert many == (*few, *[few[-1]] * 9_940)
