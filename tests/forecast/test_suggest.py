"""Suggestions keep the budget, and what is said of them is the definition's."""

import json
import random
from itertools import islice
from shlex import split

import pytest
from helpers import heard_of

from ring_dilated_attention.commands import cli
from ring_dilated_attention.forecast.call_cost import pairs
from ring_dilated_attention.forecast.reach import heard_by_layer, queries_to_follow, reach
from ring_dilated_attention.forecast.suggestions import suggestions
from ring_dilated_attention.pattern import DilatedPattern


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("share", [0.5, 0.05])
def test_the_budget_is_kept_and_used(is_causal, share):
    """Catches a first segment that could have been twice as long."""
    n, heads = 16384, 4
    most = share * pairs(DilatedPattern.dense(is_causal=is_causal), n, heads)
    found = suggestions(n, heads, most, is_causal=is_causal)
    assert len(found) >= 2
    for pattern, rule in found:
        assert pairs(pattern, n, heads) <= most
        first = pattern.segment_lengths[0]
        if "LongNet" in rule and 2 * first < n:
            ratio = int(rule.split()[-1])
            longer = DilatedPattern.longnet(
                n, first_length=2 * first, ratio=ratio, is_causal=is_causal
            )
            assert pairs(longer, n, heads) > most


def test_a_large_budget_is_dense_attention():
    [(pattern, _)] = suggestions(4096, 2, 1e12, is_causal=True)
    assert pattern == DilatedPattern((4096,), (1,), is_causal=True)


@pytest.mark.parametrize(
    "pattern",
    [
        DilatedPattern((8, 64), (1, 8), is_causal=True),
        DilatedPattern((8, 64), (1, 4)),
        DilatedPattern((4, 16, 128), (1, 2, 8), is_causal=True, phase="blocked"),
        DilatedPattern((4, 16, 130), (1, 2, 8), phase="blocked"),
        DilatedPattern((8, 64), (2, 8), is_causal=True, heads="split"),
        DilatedPattern((2, 4, 8, 16, 32, 128), (1, 2, 4, 8, 16, 32), is_causal=True),
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
    expected = list(islice(heard_of(pattern, n, heads), layers))
    counts = list(islice(heard_by_layer(pattern, n, heads, range(n)), layers))
    assert counts + [counts[-1]] * (layers - len(counts)) == expected


def test_what_is_no_power_of_two_is_refused():
    with pytest.raises(ValueError, match="lengths and rates must be powers of two, got w=6, r=1"):
        reach(DilatedPattern((6, 64), (1, 2)), 64, 2, 3)


@pytest.mark.parametrize("n", [300, 512])
@pytest.mark.parametrize("heads", [1, 8])
@pytest.mark.parametrize("is_causal", [False, True])
def test_the_queries_that_are_followed_have_the_worst_among_them(n, heads, is_causal):
    """After each layer."""
    dense = pairs(DilatedPattern.dense(is_causal=is_causal), n, heads)
    for speedup in (4, 20):
        for pattern, _ in suggestions(n, heads, dense / speedup, is_causal=is_causal):
            allowed = [query + 1 if is_causal else n for query in range(n)]
            layers = list(islice(heard_of(pattern, n, heads), 8))
            shares = [
                min(c / may for c, may in zip(counts, allowed, strict=True)) for counts in layers
            ]
            assert reach(pattern, n, heads, 8) == pytest.approx(shares)
            assert len(queries_to_follow(pattern, n, heads)) < n


def test_a_long_sequence_is_answered_at_once(capsys):
    """Catches sets with a bit for each position: this took minutes."""
    assert cli.main(split("suggest --seq-len 1G --heads 12 --speedup 50 --json")) == 0
    assert len(json.loads(capsys.readouterr().out)["suggestions"]) > 1


def test_more_layers_than_can_add_anything_take_no_longer():
    pattern = DilatedPattern((64, 1024), (1, 16))
    few, many = (reach(pattern, 2**14, 4, num_layers) for num_layers in (60, 10_000))
    assert many == (*few, *[few[-1]] * 9_940)


@pytest.mark.parametrize("seed", range(4))
def test_no_rate_above_the_heads_is_picked_while_a_candidate_within_them_fits(seed, capsys):
    """The study of what is learnt: positions that no head takes are recalled by chance (docs/learning.md)."""
    rng = random.Random(seed)
    heads, speedup = rng.choice([1, 2, 4, 16]), rng.choice([2, 6, 20])
    sizes = f"--seq-len {rng.choice([2048, 4096, 5000])} --heads {heads} --layers 2"
    argv = f"suggest {sizes} --speedup {speedup}".split()
    assert cli.main([*argv, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["suggestions"]
    are_within = [max(row["dilation_rates"]) <= heads for row in rows]
    assert [row["all_read"] for row in rows] == are_within == sorted(are_within, reverse=True)
    assert cli.main(argv) == 0
    first = capsys.readouterr().out.splitlines()[0]
    assert first.startswith("Take 1, ") == are_within[0]
    assert first.startswith("The budget forces a rate above the number of heads") == (
        not are_within[0]
    )


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--speedup", "0.5"], "--speedup must be at least 1"),
        (["--speedup", "1e9"], "every pattern that was tried needs more work"),
        (["--speedup", "2", "--layers", "1e15"], "--layers: must be at most 10,000"),
        (
            ["--speedup", "2", "--seq-len", "1e40"],
            "--seq-len: must be at most 17,592,186,044,416",
        ),
    ],
)
def test_bad_budgets_and_numbers_are_refused(more, message, capsys):
    assert cli.main(["suggest", "--seq-len", "4Ki", "--heads", "4", *more]) == 2
    assert message in capsys.readouterr().err
