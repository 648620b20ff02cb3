"""Suggestions keep the budget, and what is said of them is the definition's."""

import json
import random
from argparse import Namespace
from itertools import islice
from pathlib import Path

import pytest
import torch
from helpers import heard_of, words

from benchmarks.measure import flops_of
from ring_dilated_attention.commands import cli, suggest
from ring_dilated_attention.forecast.call_cost import pairs
from ring_dilated_attention.forecast.reach import MOST_FOLLOWED, every_query, queries_to_follow, reach, some_queries
from ring_dilated_attention.forecast.suggestions import ALL_READ, suggestions, unread_positions
from ring_dilated_attention.pattern import DilatedPattern
from ring_dilated_attention.plan.cache_plan import plan_cache
from ring_dilated_attention.plan.job import Job
from ring_dilated_attention.plan.planner import make_plan
from ring_dilated_attention.plan.sharding import default_lengths, make_shards
from ring_dilated_attention.reference import multiplicity


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
            longer = DilatedPattern.longnet(n, first_length=2 * first, ratio=ratio, is_causal=is_causal)
            assert pairs(longer, n, heads) > most


def test_a_large_budget_is_dense_attention():
    [(pattern, _)] = suggestions(4096, 2, 1e12, is_causal=True)
    assert pattern == DilatedPattern.dense(is_causal=True)


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
    ],
)
@pytest.mark.parametrize("n", [1, 2, 67, 128])
def test_reach_is_powers_of_the_definition(pattern, n):
    """Position by position, over all heads: what a query sees, then what those see. Both ways of following agree."""
    heads, layers = 3, 4
    expected = list(islice(heard_of(pattern, n, heads), layers))
    for found in (counts_of_every(pattern, n, heads), some_queries(pattern, n, heads, range(n))):
        counts = list(islice(found, layers))
        assert counts + [counts[-1]] * (layers - len(counts)) == expected
    allowed = [q + 1 if pattern.is_causal else n for q in range(n)]
    shares = [min(c / may for c, may in zip(counts, allowed, strict=True)) for counts in expected]
    assert reach(pattern, n, heads, layers).shares == pytest.approx(shares)


def counts_of_every(pattern, n, heads):
    return ([positions.bit_count() for positions in sets] for sets in every_query(pattern, n, heads))


@pytest.mark.parametrize(
    ("n", "heads", "speedup", "more"),
    [
        (512, 8, "4", []),
        (512, 1, "4", ["--not-causal"]),
        (1000, 3, "8", []),
        (1000, 2, "4", ["--not-causal"]),
        (1024, 4, "8", []),
        (1024, 8, "8", ["--not-causal"]),
    ],
)
def test_what_is_said_holds_for_all_queries(n, heads, speedup, more, capsys):
    """Catches queries late in the sequence that speak for all: those at early starts of segments hear less."""
    argv = ["suggest", "--seq-len", str(n), "--heads", str(heads), "--speedup", speedup, "--json", *more]
    assert cli.main(argv) == 0
    for row in json.loads(capsys.readouterr().out)["suggestions"]:
        pattern = DilatedPattern(row["segment_lengths"], row["dilation_rates"], is_causal=not more)
        allowed = torch.arange(1, n + 1) if pattern.is_causal else torch.full((n,), n)
        counts = list(islice(heard_of(pattern, n, heads), 12))
        shares = [torch.tensor(count) / allowed for count in counts]
        assert row["queries_followed"] == n
        assert row["reach_by_layer"] == pytest.approx([share.min().item() for share in shares])
        assert shares[-1][row["worst_query"]] == shares[-1].min()


@pytest.mark.parametrize("n", [512, 1000, 1024, 5000])
@pytest.mark.parametrize("heads", [1, 3, 8])
@pytest.mark.parametrize("is_causal", [False, True])
def test_the_queries_that_are_followed_have_the_worst_among_them(n, heads, is_causal):
    """What is out of reach for ever, of a long sequence, is out of reach of those at the starts of segments."""
    dense = pairs(DilatedPattern.dense(is_causal=is_causal), n, heads)
    for speedup in (4, 20):
        for pattern, _ in suggestions(n, heads, dense / speedup, is_causal=is_causal):
            *_, counts = counts_of_every(pattern, n, heads)
            shares = [count / (q + 1 if is_causal else n) for q, count in enumerate(counts)]
            assert min(shares[q] for q in queries_to_follow(pattern, n, heads)) == min(shares)


def test_a_sample_of_queries_is_called_one(capsys):
    argv = ["suggest", "--seq-len", "64Ki", "--heads", "64", "--speedup", "24", "--layers", "12"]
    assert cli.main([*argv, "--json"]) == 0
    number = json.loads(capsys.readouterr().out)["suggestions"][0]["queries_followed"]
    assert number < 100
    out = words(capsys, *argv)
    assert f"This was computed for {number} queries at starts of segments, where least is heard." in out
    assert "After 12 layers it can have heard of all but " in out
    assert "queries followed" not in words(capsys, *argv[:2], "4Ki", *argv[3:])


def followed(pattern, n, heads, layers, query):
    """What a query has heard of by layer, of a causal pattern: a byte for each position, row by row of every phase."""
    heard, shares = bytearray(n), []
    heard[query] = 1
    for _ in range(layers):
        before = bytes(heard)
        for w, r in pattern.branches:
            for start in range(0, n, w):
                for phase in range(min(heads, r)):
                    rows = slice(start + phase, min(start + w, n), r)
                    seen = before[rows].rfind(1) + 1
                    heard[rows] = b"\1" * seen + heard[rows][seen:]
        shares.append(heard.count(1) / (query + 1))
    return shares


def test_seconds_are_those_of_both_stages(tmp_path, monkeypatch, capsys):
    """Catches a backward at the forward's rate, and a rate of other types."""
    monkeypatch.chdir(tmp_path)
    rates = "flops_per_second = 1e12\nbackward_flops_per_second = 2.5e11\nbytes_per_second = 1e9\n"
    Path("here.toml").write_text(f'[hardware]\n{rates}latency_seconds = 0\ndtype = "float32"\n')
    argv = ["suggest", "--seq-len", "64Ki", "--heads", "8", "--seconds", "0.2", "--hardware", "here.toml", "--json"]
    assert cli.main([*argv, "--dtype", "float32"]) == 0
    for found in json.loads(capsys.readouterr().out)["suggestions"]:
        assert found["flops"] * (2 / 7 / 1e12 + 5 / 7 / 2.5e11) <= 0.2
    assert cli.main(argv) == 2
    assert "has the rate of 32-bit types, and --dtype is bfloat16" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("lengths", "rates", "n"),
    [
        ((2**10, 2**13, 2**16), (1, 8, 64), 2**16),
        ((2**14, 2**17, 2**20), (1, 8, 64), 2**20),
        ((64, 256, 1024, 4096, 100_003), (1, 4, 16, 64, 256), 100_003),
    ],
)
def test_reach_of_longer_sequences(lengths, rates, n):
    pattern, layers = DilatedPattern(lengths, rates, is_causal=True), 6
    assert n > MOST_FOLLOWED
    queries = [n - 1 - i * n // 8 - 3 * i for i in range(4)]
    each = [followed(pattern, n, 4, layers, query) for query in queries]
    counts = list(islice(some_queries(pattern, n, 4, queries), layers))
    counts += [counts[-1]] * (layers - len(counts))
    shares = [[count / (q + 1) for q, count in zip(queries, layer, strict=True)] for layer in counts]
    assert shares == [list(layer) for layer in zip(*each, strict=True)]


def test_reach_grows_with_the_job():
    """Lengths 2^20 times longer: the shares are those of the shorter one but for ends of segments, which are shorter.
    Catches a long sequence of which a part is followed."""
    short, long = (
        reach(DilatedPattern([k * w for w in (2**16, 2**19, 2**22)], (1, 8, 64), is_causal=True), k * 2**22, 4, 4)
        for k in (1, 2**20)
    )
    assert short.shares == pytest.approx((0.0, 0.0625, 0.9995, 0.9998), abs=1e-4)
    assert long.shares == pytest.approx(short.shares, abs=1e-3)


def test_a_billion_positions_need_more_than_one_layer(capsys):
    """All patterns are dense at first, over more positions than can be followed one by one."""
    argv = ["suggest", "--seq-len", "1000000007", "--heads", "4", "--speedup", "100", "--layers", "4", "--json"]
    assert cli.main(argv) == 0
    found = json.loads(capsys.readouterr().out)["suggestions"]
    assert len(found) == 4
    for row in found:
        assert row["reach_by_layer"][0] < 0.01  # a layer's keys are a hundredth of all
        assert row["layers_for_most"] == 3
        assert row["layers_for_all"] is None


def test_a_little_is_not_rounded_away(capsys):
    """Catches 100 % where it is not all, and 1e+02 %; and an advice to add layers where they add nothing."""
    argv = ["--seq-len", "1Ti", "--heads", "4", "--layers", "8"]
    out = words(capsys, "suggest", *argv, "--speedup", "1e6")
    assert "over 99 %" in out
    assert "100 %" not in out
    assert "100.0%" not in out
    assert "e+0" not in out
    row = {"layers_for_most": None, "reach_by_layer": (1e-6, 1e-6), "worst_query": 7, "queries_followed": 9}
    row |= {"segment_lengths": (64,), "dilation_rates": (8,), "unread_positions": (32,)}
    for shares, remedy in (
        ((1e-6, 1e-6), "more layers add nothing: add heads, or lower rates"),
        ((0.1, 0.3), "add lay"),
    ):
        said = suggest.words(Namespace(layers=2, seq_len=64, is_causal=True), row | {"reach_by_layer": shares})
        assert said[1].startswith("After 2 layers query 7 has not heard of ")
        assert said[1].partition("; ")[2].startswith(remedy)
        assert said[0] == (
            "In each segment of 64 positions a head takes one in 8: a query there sees every key there up to itself, "
            "other queries see none; 50 % of the positions are taken by no head."
        )


@pytest.mark.parametrize(("n", "heads"), [(2048, 4), (700, 3), (4096, 8), (2048, 1)])
def test_one_pattern_has_no_more_phases_than_heads(n, heads, capsys):
    """A position that no head takes is recalled by chance (docs/learning.md): where the budget allows a pattern that
    takes all, it is suggested, and before those that leave most out."""
    found = suggestions(n, heads, pairs(DilatedPattern.dense(), n, heads) / 2, is_causal=False)
    taken = [pattern for pattern, rule in found if rule == ALL_READ or not any(unread_positions(pattern, n, heads))]
    assert taken or heads == 1
    assert not any(sum(unread_positions(pattern, n, heads)) for pattern in taken)
    assert cli.main(["suggest", "--seq-len", "2Ki", "--heads", "4", "--speedup", "6", "--layers", "2", "--json"]) == 0
    first = json.loads(capsys.readouterr().out)["suggestions"][0]
    assert (first["rule"], first["dilation_rates"], sum(first["unread_positions"])) == (ALL_READ, [1, 4], 0)


def test_what_cannot_be_followed_is_said():
    with pytest.raises(ValueError, match="only powers of two can be followed, got w=64, r=3"):
        reach(DilatedPattern((64,), (3,)), 64, 4, 2)


@pytest.mark.parametrize("seed", range(8))
def test_what_is_said_of_a_branch_is_the_definitions(seed):
    """Random branches, pair by pair: in each segment a head takes one position in r, a query there sees every key there
    up to itself, and a query elsewhere none. And the share of positions that no head takes."""
    rng = random.Random(seed)
    n, w, r, heads = rng.randint(1, 90), rng.randint(1, 60), rng.choice([1, 2, 4, 8]), rng.randint(1, 6)
    pattern = DilatedPattern((w,), (r,), is_causal=rng.random() < 0.5)
    sees = multiplicity(pattern, n, heads) > 0
    taken = torch.zeros(n, dtype=torch.bool)
    for head in range(heads):
        for start in range(0, n, w):
            there = list(range(start, min(start + w, n)))[head % r :: r]
            taken[there] = True
            for query in range(start, min(start + w, n)):
                keys = [key for key in there if key <= query or not pattern.is_causal] if query in there else []
                assert sees[head, query].nonzero().flatten().tolist() == keys
    assert unread_positions(pattern, n, heads) == [n - int(taken.sum())]
    row = {"segment_lengths": (w,), "dilation_rates": (r,), "unread_positions": [n - int(taken.sum())]}
    row |= {"layers_for_most": None, "reach_by_layer": (0.5,), "worst_query": 0, "queries_followed": n}
    said = suggest.words(Namespace(layers=1, seq_len=n, is_causal=pattern.is_causal), row)[0]
    assert ("a query sees every key" in said) == (r == 1)
    assert (f"a head takes one in {r}: a query there sees every key there" in said) == (r > 1)
    assert ("up to itself" in said) == pattern.is_causal
    untaken = f"; {suggest.percent(1 - taken.double().mean().item())} of the positions are taken by no head."
    assert said.endswith(untaken) if not taken.all() else "no head" not in said


def test_untaken_positions_by_hand():
    """Query 1,028 of the second pattern: five keys in every head."""
    assert unread_positions(DilatedPattern((8, 64), (1, 16), is_causal=True), 128, 4) == [0, 96]
    pattern = DilatedPattern((256, 512, 1024, 2048), (1, 2, 4, 8), is_causal=True)
    assert unread_positions(pattern, 1029, 4) == [0, 0, 0, 513]
    assert (multiplicity(pattern, 1029, 4)[:, 1028] > 0).sum(1).tolist() == [5, 5, 5, 5]


def test_patterns_that_are_not_causal_have_no_decoding_cache(capsys):
    argv = ["suggest", "--seq-len", "64Ki", "--heads", "4", "--speedup", "20", "--not-causal"]
    out = words(capsys, *argv)
    assert "decoding" not in out
    assert "rda train cannot: it takes only causal patterns" in out
    assert cli.main([*argv, "--json"]) == 0
    assert all(row["cache_bytes"] is None for row in json.loads(capsys.readouterr().out)["suggestions"])


def drawn(seed):
    """Positions and ranks."""
    rng = random.Random(seed)
    return rng.randrange(500, 5000), rng.randint(2, 24)


@pytest.mark.parametrize("more", [[], ["--not-causal"]])
@pytest.mark.parametrize(
    ("n", "num_ranks"), [(4096, 1), (4096, 8), (1024, 32), (4095, 9), (1000, 20), (3001, 8), *map(drawn, range(3))]
)
def test_what_is_received_is_that_of_the_plans(n, num_ranks, more, capsys):
    """By the rank that receives most: chunks in a forward and again in a backward, and the gradients that it sends for
    them; also of rates that no shard has all phases of, and of segments and shards that divide nothing."""
    argv = ["suggest", "--seq-len", str(n), "--heads", "4", "--kv-heads", "2", "--head-dim", "8", "--speedup", "8"]
    assert cli.main([*argv, "--ranks", str(num_ranks), "--json", *more]) == 0
    shards = make_shards("contiguous", default_lengths("contiguous", n, num_ranks))
    for found in json.loads(capsys.readouterr().out)["suggestions"]:
        pattern = DilatedPattern(found["segment_lengths"], found["dilation_rates"], is_causal=not more)
        plans = [make_plan(Job(pattern, shards, 4, 2), rank) for rank in range(num_ranks)]
        rows = [sum(m.size for hop in plan.hops for m in hop.receives) for plan in plans]
        assert found["largest_received_bytes"] == max(rows) * 8 * (2 * 2 + 4)


@pytest.mark.parametrize("seed", range(4))
def test_the_work_of_a_suggestion_is_that_of_the_plans(seed, capsys):
    """Pairs, FLOPs, the share of dense attention's work and the cache, of random jobs."""
    rng = random.Random(seed)
    n, head_dim, num_kv_heads = rng.randint(500, 5000), rng.choice([8, 24]), rng.choice([1, 2, 4])
    argv = ["suggest", "--seq-len", str(n), "--heads", "4", "--head-dim", str(head_dim), "--speedup", "6", "--json"]
    assert cli.main([*argv, "--kv-heads", str(num_kv_heads)]) == 0
    for found in json.loads(capsys.readouterr().out)["suggestions"]:
        pattern = DilatedPattern(found["segment_lengths"], found["dilation_rates"], is_causal=True)
        plan, dense = (
            make_plan(Job(x, make_shards("contiguous", (n,)), 4, num_kv_heads), 0)
            for x in (pattern, DilatedPattern.dense(is_causal=True))
        )
        assert found["pairs"] == plan.pairs
        assert found["flops"] == sum(flops_of(plan, 1, head_dim))
        assert found["of_dense"] == plan.pairs / dense.pairs <= 1 / 6
        cache = plan_cache(pattern, 4, num_kv_heads, n)
        assert found["cache_bytes"] == cache.num_rows * 2 * head_dim * 2
        assert found["dense_cache_bytes"] == n * num_kv_heads * 2 * head_dim * 2


def test_more_layers_than_can_add_anything_take_no_longer():
    """Each would be followed: over 64Ki positions for minutes."""
    pattern = DilatedPattern((64, 1024), (1, 16))
    few, many = (reach(pattern, 2**16, 4, num_layers).shares for num_layers in (60, 10_000))
    assert many == (*few, *[few[-1]] * 9_940)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--speedup", "0.5"], "--speedup must be at least 1"),
        (["--speedup", "1e9"], "none of the patterns tried has as few as"),
        (["--seconds", "1"], "--seconds needs --hardware"),
        (["--speedup", "2", "--hardware", "a100-nvlink"], "--hardware a100-nvlink is for --seconds"),
        (["--speedup", "2", "--kv-heads", "3"], "cannot share 3 key/value heads"),
        (["--speedup", "2", "--ranks", "8Ki"], "4,096 of them would own none"),
        (["--speedup", "2", "--ranks", "1M"], "--ranks must be at most 65,536"),
        (["--speedup", "2", "--layers", "1e15"], "--layers must be at most 10,000"),
        (["--speedup", "2", "--head-dim", "1e40"], "--head-dim must be at most 9,223,372,036,854,775,807"),
    ],
)
def test_bad_budgets_and_numbers_are_refused(more, message, capsys):
    assert cli.main(["suggest", "--seq-len", "4Ki", "--heads", "4", *more]) == 2
    assert message in capsys.readouterr().err
