"""Alternatives side by side, what is recommended, and what is said where communication binds."""

import json
import random
import re
from dataclasses import replace

import pytest
from helpers import said_of

from ring_dilated_attention.commands import cli
from ring_dilated_attention.commands.plan import compare as command
from ring_dilated_attention.commands.plan.model import advice_on as advice_on_model
from ring_dilated_attention.forecast import call_cost, exchanges
from ring_dilated_attention.forecast.call_cost import Figures, Time, Way, branch_pairs, forecast, pairs
from ring_dilated_attention.forecast.clock import Hardware, time_text
from ring_dilated_attention.forecast.exchanges import Alternative, UncutJob, advice, alternatives, recommended
from ring_dilated_attention.forecast.ledger import Item, Peak
from ring_dilated_attention.forecast.training_cost import Mesh, ModelJob, Shape
from ring_dilated_attention.kernels.traits import TRAITS
from ring_dilated_attention.pattern import DilatedPattern
from ring_dilated_attention.plan.sizes import Sizes

CALL = ["plan", "--seq-len", "4Ki", "--segment-lengths", "256", "--dilation-rates", "1"]
MODEL = ["plan", "model", "--layers", "2", "--embed-dim", "64", "--heads", "4", "--segment-lengths", "256", "4Ki"]
MODEL += ["--seq-len", "4Ki", "--dilation-rates", "1", "4", "--causal", "--flops", "1T"]


def seconds_of(one):
    return one.figures.time.seconds


def advice_on(call, one, hardware):
    return advice(call.job(one.sharding, one.way.inner), one.way, call.sizes, one.known, hardware)


def test_alternatives_are_ordered_by_their_figures():
    job = UncutJob(DilatedPattern((512, 8192), (1, 4), is_causal=True), 8192, 4, 4, 4, Sizes(1, 16, 2))
    slow = Hardware(1e12, 1e8, 1e-5)
    found = alternatives(job, slow, TRAITS["cpu"])
    assert len(found) == 2 * 7
    best, reason = recommended(found, None)
    assert best is not None
    assert best.function == "dilated"
    assert seconds_of(best) <= 1.02 * min(seconds_of(x) for x in found if x.function == "dilated")
    assert reason
    said = advice_on(job, best, slow)
    assert said is not None
    assert said.startswith("bound by communication")
    assert "at rate 16 instead of 4" in said
    fast = Hardware(1e9, 1e12)
    best, _ = recommended(alternatives(job, fast, TRAITS["cpu"]), None)
    assert best is not None
    assert advice_on(job, best, fast) is None
    none, why = recommended(found, 1000)
    assert none is None
    assert re.fullmatch(r"none fits: the least, .*, holds [\d.,]+ MB", why)


@pytest.mark.parametrize("is_causal", [False, True])
def test_alternatives_are_the_forecasts_of_each_way(is_causal):
    """Catches figures of another sharding or of the pattern for dense attention."""
    pattern = DilatedPattern((64, 256, 1536), (1, 12, 8), is_causal=is_causal)
    job, hardware = UncutJob(pattern, 1536, 12, 4, 4, Sizes(1, 16, 2)), Hardware(1e10, 1e8, 1e-5)
    for one in alternatives(job, hardware, TRAITS["cpu"]):
        if one.figures is None:
            assert one.why_not == "all_to_all deals heads to ranks, and 4 key/value heads do not divide among 12 ranks"
            continue
        shown = job if one.function == "dilated" else job._replace(pattern=DilatedPattern.dense(is_causal=is_causal))
        same = shown.job(one.sharding, one.way.inner)
        assert one.figures == forecast(same, one.way, job.sizes, traits=TRAITS["cpu"], hardware=hardware)
        assert one.figures.is_planned


def test_many_ranks_are_compared_by_what_was_held_against_the_clock(monkeypatch):
    """Of others the work and the memory stand there, and no time; and only rings are recommended."""
    job = UncutJob(DilatedPattern((64, 1536), (1, 8), is_causal=True), 1536, 12, 4, 4, Sizes(1, 16, 2))
    hardware = Hardware(1e10, 1e8, 1e-5)
    every = alternatives(job, hardware, TRAITS["cpu"])
    monkeypatch.setattr(call_cost, "MOST_PLANNED", 4)
    found = alternatives(job, hardware, TRAITS["cpu"])
    for x, y in zip(found, every, strict=True):
        assert x[:3] == y[:3]
        if x.figures is None:
            continue
        assert (x.figures.balance, x.figures.branches) == (y.figures.balance, y.figures.branches)
        assert x.figures.peak.num_bytes == pytest.approx(y.figures.peak.num_bytes, rel=0.15)
        assert (x.figures.time is None) == (x.way != Way())
        assert command._as_json(x)["exposed"] is None
    best, reason = recommended(found, None)
    assert best is not None
    assert best.way == Way()
    assert reason.endswith("(of the ways that were timed)")
    ways = [one for one in found if one.way != Way() and one.function == "dilated"]
    assert recommended(ways, None) == (None, "none: no way that fits was timed")


def test_of_split_heads_the_memory_is_that_of_all_places(monkeypatch):
    """Catches 71 MB where the place that runs the longest branch holds 88."""
    pattern = DilatedPattern((64, 1024, 4096), (1, 3, 1), is_causal=True, heads="split")
    job, way = UncutJob(pattern, 4096, 32, 32, 4, Sizes(1, 16, 4)).job("contiguous", 4), Way("ring", 4)
    every = forecast(job, way, Sizes(1, 16, 4), traits=TRAITS["cpu"])
    monkeypatch.setattr(call_cost, "MOST_PLANNED", 4)
    found = forecast(job, way, Sizes(1, 16, 4), traits=TRAITS["cpu"])
    assert found.peak.num_bytes == pytest.approx(every.peak.num_bytes, rel=0.05)


def test_advice_counts_the_pairs_of_the_branch():
    """Catches the work of all heads for a branch that has a few of them."""
    pattern = DilatedPattern((512, 8192), (1, 4), is_causal=True, heads="split")
    job, slow = UncutJob(pattern, 8192, 4, 4, 4, Sizes(1, 16, 2)), Hardware(1e12, 1e8, 1e-5)
    counts = [branch_pairs(pattern, i, [8192], 4) for i in range(2)]
    assert sum(counts) == pairs(pattern, 8192, 4)
    ring = next(x for x in alternatives(job, slow, TRAITS["cpu"]) if x.way.exchange == "ring")
    assert f"for {counts[1] / sum(counts):.0%} of the pairs" in str(advice_on(job, ring, slow))


def test_a_branch_that_can_be_no_sparser_gets_other_advice():
    pattern = DilatedPattern((512, 8192), (1, 4096), is_causal=True)
    job, slow = UncutJob(pattern, 8192, 4, 4, 4, Sizes(1, 16, 2)), Hardware(1e12, 1e4, 1e-5)
    ring = next(x for x in alternatives(job, slow, TRAITS["cpu"]) if x.way.exchange == "ring")
    assert str(advice_on(job, ring, slow)).endswith(
        "fewer ranks, or a network that is faster or has less latency, would help"
    )


def test_no_rate_helps_where_latency_binds(capsys):
    """Catches "2.5e+03 ms instead of 2.51e+03 ms" as advice."""
    argv = [
        "plan",
        "--seq-len",
        "1Mi",
        "--ranks",
        "4",
        "--segment-lengths",
        "2Ki",
        "1Mi",
        "--dilation-rates",
        "1",
        "16",
    ]
    argv += ["--exchange", "ring", "--flops", "1T", "--bandwidth"]
    assert cli.main([*argv, "1G", "--latency", "20"]) == 0
    out = said_of(capsys)
    assert "e+0" not in out
    assert "a higher rate would gain less than 5%; fewer ranks, or a network that is faster or" in out
    assert cli.main([*argv, "1M"]) == 0
    assert re.search(r"at rate 64 instead of 16 a step would take [\d.,]+ min instead of [\d.,]+ min", said_of(capsys))


def way(i=0, seconds=1.0, peak=100, exchange="ring", sharding="zigzag"):
    """Figures of which only what a recommendation reads is given."""
    figures = Figures(1, 1, 0, 1.0, 1, [], i, i, Peak((Item("x", peak),)), Time(seconds))
    return Alternative("dilated", Way(exchange), sharding, figures)


def test_the_reason_counts_other_ways():
    ways = [way(i) for i in range(3)]
    assert recommended(ways[:1], None)[1] == "the fastest"
    assert recommended(ways[:2], None)[1] == "as fast as another way, and of the two it sends and holds least"
    assert recommended(ways, None)[1] == "as fast as 2 other ways, and of these it sends and holds least"


def test_the_reason_says_only_what_is_so():
    """What sends least need not hold least."""
    ring, gathered = way(200, peak=100), way(100, peak=200, exchange="all_gather")
    assert recommended([ring, gathered], None) == (gathered, "as fast as another way, and of the two it sends least")
    slower = way(100, seconds=1.5, sharding="contiguous")
    assert recommended([ring, slower], None)[1] == "the fastest; ring contiguous would take 50% longer"
    assert recommended([way(peak=13_000_000)], 10**6) == (None, "none fits: the least, ring zigzag, holds 13.0 MB")


def test_dealing_heads_is_said_to_be_bound_too():
    job = UncutJob(DilatedPattern((512, 8192), (1, 4), is_causal=True), 8192, 4, 4, 4, Sizes(1, 16, 2))
    slow = Hardware(1e12, 1e8, 1e-5)
    [dealt, *_] = [x for x in alternatives(job, slow, TRAITS["cpu"]) if x.way.exchange == "all_to_all"]
    assert "bound by communication" in str(advice_on(job, dealt, slow))
    assert "rates would not" in str(advice_on(job, dealt, slow))


def test_a_rate_is_not_tried_where_counting_takes_long(monkeypatch):
    """Catches a second count of 65,536 ranks, or one that no progress bar sees."""
    call, slow = UncutJob(DilatedPattern((2048, 8192), (1, 4)), 8192, 4, 4, 4, Sizes(1, 16, 2)), Hardware(1e12, 1e8)
    job, steps = call.job(), []
    found = forecast(job, Way(), call.sizes, hardware=slow)
    said = advice(job, Way(), call.sizes, found, slow, lambda: steps.append(1))
    assert "at rate 16 instead of 4" in str(said)
    assert len(steps) == 4
    monkeypatch.setattr(exchanges, "MOST_COMPARED", 3)
    said = advice(job, Way(), call.sizes, found, slow, lambda: steps.append(1))
    assert str(said).endswith(f"of the pairs: {exchanges.OTHERWISE}")
    assert len(steps) == 4


def test_one_plan_says_that_it_is_bound(capsys):
    argv = [*CALL[:3], "--segment-lengths", "4Ki", "--dilation-rates", "4", "--ranks", "2", "--flops", "1T"]
    assert cli.main([*argv, "--bandwidth", "1M"]) == 0
    assert "bound by communication: a rank waits" in said_of(capsys)
    assert cli.main([*argv, "--bandwidth", "1P"]) == 0
    assert "bound by communication" not in said_of(capsys)
    assert cli.main([*argv, "--bandwidth", "1M", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["advice"].startswith("bound by communication")
    for more in (["--documents", "3Ki", "1Ki"], ["--align", "8"]):
        assert cli.main([*argv, "--bandwidth", "1M", *more]) == 0
        assert "at rate 16 instead of 4 a step would take" in said_of(capsys)


@pytest.mark.parametrize("seq_len", ["1Mi", "1000001"])
def test_many_ranks_are_said_to_be_bound(seq_len, capsys):
    """By an estimate, and whatever the length. The estimate is too rough to say how long a rank waits."""
    argv = ["plan", "--seq-len", seq_len, "--ranks", "256", "--segment-lengths", "1Ki", "1Mi"]
    argv += ["--dilation-rates", "1", "64", "--causal", "--flops", "1e15"]
    assert cli.main([*argv, "--bandwidth", "1G"]) == 0
    out = said_of(capsys)
    assert re.search(
        r"may be bound by communication\. Branch 1 .* at rate 256 instead of 64 a step would take about", out
    )
    assert "waits" not in out
    assert cli.main([*argv, "--bandwidth", "1P"]) == 0
    assert "bound by communication" not in said_of(capsys)


def test_the_command_compares(capsys):
    argv = ["plan", "compare", "--seq-len", "4Ki", "--segment-lengths", "4Ki", "--dilation-rates", "1", "--heads", "2"]
    argv += ["--flops", "1T", "--bandwidth", "1G"]
    assert cli.main([*argv, "--ranks", "3"]) == 0
    out = said_of(capsys)
    assert "left out: all-to-all: " in out
    assert "recommended: " in out
    assert cli.main([*argv[:-4], "--ranks", "3"]) == 2
    assert "missing --hardware: times need --hardware, or --flops and --bandwidth" in capsys.readouterr().err
    assert cli.main([*argv, "--ranks", "128"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"dilated +ring +contiguous +[\d.]+ .s", out)
    assert re.search(r"dilated +all-gather +contiguous +no time", out)
    assert "waits" not in out.partition("recommended: ")[0]
    assert all(len(line) <= 80 for line in out.splitlines())


@pytest.mark.parametrize("are_many", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_the_table_of_a_comparison_is_that_of_the_forecasts(seed, are_many, capsys, monkeypatch):
    """In random calls. The forecasts are compared with plans, ledger and clock in test_forecast.py."""
    if are_many:
        monkeypatch.setattr(call_cost, "MOST_PLANNED", 1)
        monkeypatch.setattr(command, "MOST_PLANNED", 1)
    rng = random.Random(seed)
    n, num_ranks, heads, rate = rng.randint(500, 5000), rng.randint(2, 6), rng.choice([2, 4]), rng.choice([1, 3, 8])
    w = rng.randint(n // 8, n)
    argv = ["plan", "compare", "--seq-len", f"{n}", "--segment-lengths", f"{w}", "--dilation-rates", f"{rate}"]
    argv += ["--heads", f"{heads}", "--head-dim", "8", "--flops", "1T", "--bandwidth", "1G", "--ranks", f"{num_ranks}"]
    argv += ["--json"]
    assert cli.main(argv) == 0
    found = json.loads(capsys.readouterr().out)
    job = UncutJob(DilatedPattern((w,), (rate,)), n, num_ranks, heads, heads, Sizes(1, 8, 4))
    hardware, traits = Hardware(1e12, 1e9), TRAITS["cpu"]
    rows = alternatives(job, hardware, traits)
    assert found["alternatives"] == [command._as_json(row) for row in rows]
    for row in (row for row in rows if row.figures is not None):
        one = job if row.function == "dilated" else job._replace(pattern=DilatedPattern.dense())
        own = one.job(row.sharding, row.way.inner)
        assert row.figures == forecast(own, row.way, job.sizes, traits=traits, hardware=hardware)
    timed = [row["step_seconds"] for row in found["alternatives"] if not row["why_not"] and row["step_seconds"]]
    assert found["recommended"]["step_seconds"] in timed
    assert cli.main(argv[:-1]) == 0
    printed = [line.split() for line in capsys.readouterr().out.splitlines()]
    for row in (row for row in rows if row.figures is not None):
        known, time = row.figures, "no time" if row.figures.time is None else time_text(row.figures.seconds)
        assert (time == "no time") == (are_many and row.way != Way())
        cells = [row.function, *row.name.split(), row.sharding, *time.split()]
        cells += [f"{known.exposed:.0%}"] * (not are_many)
        figures = f"{known.balance:.1%}", f"{known.sent_bytes / 1e6:,.1f}", f"{known.peak_bytes / 1e6:,.1f}"
        assert [*cells, *figures] in printed


@pytest.mark.parametrize(
    ("more", "bound"),
    [
        (["--mesh", "1x4"], "bound by communication: a rank waits .* of the step"),
        (["--mesh", "1x66", "--seq-len", "4097"], "may be bound by communication"),
    ],
)
def test_a_model_says_that_its_attention_is_bound(more, bound, capsys):
    """By plans and by an estimate; the remedy is timed."""
    assert cli.main([*MODEL, *more, "--bandwidth", "1M"]) == 0
    said = said_of(capsys)
    assert re.search(f"attention of one layer: {bound}. Branch 1 sends", said)
    assert "at rate 16 instead of 4 a step would take" in said
    assert cli.main([*MODEL, *more, "--bandwidth", "1P"]) == 0
    assert "bound by communication" not in said_of(capsys)


def test_a_model_whose_attention_sends_nothing_waits_in_handshakes(capsys):
    argv = [*MODEL, "--segment-lengths", "64", "--dilation-rates", "1", "--mesh", "1x4", "--bandwidth", "1P"]
    assert cli.main([*argv, "--latency", "1"]) == 0
    assert (
        "attention of one layer: bound by communication: a rank waits 99% of the step, in handshakes alone"
        in said_of(capsys)
    )


def test_a_model_says_that_its_gradients_bind(capsys):
    assert cli.main([*MODEL, "--mesh", "4x1", "--bandwidth", "1M"]) == 0
    said = said_of(capsys)
    assert "bound by communication: the sum of gradients takes 99% of a step; more sequences in a step" in said
    assert "attention of one layer" not in said


def test_a_model_of_one_rank_a_sequence_waits_for_nobody():
    pattern, hardware = DilatedPattern((512, 32 * 512), (1, 8)), Hardware(1e12, 1e8, 1e-5)
    job = ModelJob(Shape(1, 64, 256, 256, 4, 4), pattern, 32 * 512, 1, Mesh(1, 32))
    assert any("attention of one layer" in line for line in advice_on_model(job, hardware))
    assert not any(
        "attention of one layer" in line for line in advice_on_model(replace(job, mesh=Mesh(4, 1)), hardware)
    )


def test_a_time_that_is_estimated_is_marked(capsys):
    argv = [*MODEL, "--mesh", "1x66", "--seq-len", "4097", "--bandwidth", "1G", "--tokens", "1e9"]
    assert cli.main([*argv, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["memory"]["kept"]
    assert found["step"]["is_about"] is True
    assert found["training_seconds"] == pytest.approx(1e9 / 4097 * found["step"]["seconds"])
    assert cli.main(argv) == 0
    assert re.search("in all +about", capsys.readouterr().out)
