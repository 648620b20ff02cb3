"""Ways to compute the same, side by side, and what is said where communication binds."""

import json
import re
from dataclasses import replace

import pytest

from ring_dilated_attention.commands import cli, plan, plan_large
from ring_dilated_attention.kernels.traits import TRAITS
from ring_dilated_attention.pattern import DilatedPattern
from ring_dilated_attention.forecast import model as planned
from ring_dilated_attention.plan.alternatives import (
    Alternative,
    EqualJob,
    advice_on,
    alternatives,
    is_planned,
    recommended,
)
from ring_dilated_attention.forecast.clock import Bounds, Hardware
from ring_dilated_attention.plan.sizes import Sizes
from ring_dilated_attention.forecast.model import Mesh, ModelJob, Shape
from ring_dilated_attention.plan.totals import branch_pairs, pairs

CALL = ["plan", "--seq-len", "4Ki", "--segment-lengths", "256", "--dilation-rates", "1"]
MODEL = ["plan", "--layers", "2", "--embed-dim", "64", "--heads", "4", "--segment-lengths", "256", "4Ki"]
MODEL += ["--seq-len", "4Ki", "--dilation-rates", "1", "4", "--causal", "--flops", "1T"]


def test_alternatives_are_ordered_by_their_figures():
    job = EqualJob(DilatedPattern((512, 8192), (1, 4), is_causal=True), 8192, 4, 4, 4, Sizes(1, 16, 2))
    slow = Hardware(1e12, 1e8, 1e-5)
    found = alternatives(job, slow, TRAITS["cpu"])
    assert len(found) == 2 * 7
    best, reason = recommended(found, None)
    assert best is not None
    assert best.function == "dilated"
    assert best.step_seconds.is_exact
    assert best.step_seconds.most <= 1.02 * min(x.step_seconds.most for x in found if x.function == "dilated")
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


def test_advice_counts_the_pairs_of_the_branch():
    """Catches the work of all heads for a branch that has a few of them."""
    pattern = DilatedPattern((512, 8192), (1, 4), is_causal=True, heads="split")
    job, slow = EqualJob(pattern, 8192, 4, 4, 4, Sizes(1, 16, 2)), Hardware(1e12, 1e8, 1e-5)
    parts = [branch_pairs(pattern, i, 8192, 4) for i in range(2)]
    assert sum(parts) == pairs(pattern, 8192, 4)
    ring = next(x for x in alternatives(job, slow, TRAITS["cpu"]) if x.exchange == "ring")
    assert f"for {parts[1] / sum(parts):.0%} of the pairs" in str(advice_on(job, ring, slow))


def test_a_branch_that_can_be_no_sparser_gets_other_advice():
    pattern = DilatedPattern((512, 8192), (1, 4096), is_causal=True)
    job, slow = EqualJob(pattern, 8192, 4, 4, 4, Sizes(1, 16, 2)), Hardware(1e12, 1e4, 1e-5)
    ring = next(x for x in alternatives(job, slow, TRAITS["cpu"]) if x.exchange == "ring")
    assert str(advice_on(job, ring, slow)).endswith(
        "fewer ranks, or a link that is faster or has less latency, would help"
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
    out = capsys.readouterr().out
    assert "e+0" not in out
    [said] = [line for line in out.splitlines() if line.startswith("bound by communication")]
    assert said.endswith(
        "a higher rate would gain less than 5%; fewer ranks, or a link that is faster or has less latency, would help"
    )
    assert cli.main([*argv, "1M"]) == 0
    [said] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("bound by communication")]
    assert re.search(r"at rate 64 instead of 16 a step would take [\d.,]+ min instead of [\d.,]+ min", said)


def test_the_reason_counts_other_ways():
    ways = [Alternative("dilated", "ring", "zigzag", 1, sent_bytes=i, step_seconds=Bounds(1, 1)) for i in range(3)]
    assert recommended(ways[:1], None)[1] == "the fastest"
    assert recommended(ways[:2], None)[1] == "as fast as another way, and of the two it sends and holds least"
    assert recommended(ways, None)[1] == "as fast as 2 other ways, and of these it sends and holds least"


def test_dealing_heads_is_said_to_be_bound_too():
    job = EqualJob(DilatedPattern((512, 8192), (1, 4), is_causal=True), 8192, 4, 4, 4, Sizes(1, 16, 2))
    slow = Hardware(1e12, 1e8, 1e-5)
    [dealt, *_] = [x for x in alternatives(job, slow, TRAITS["cpu"]) if x.exchange == "all_to_all"]
    assert "bound by communication" in str(advice_on(job, dealt, slow))
    assert "rates would not" in str(advice_on(job, dealt, slow))


def test_one_plan_says_that_it_is_bound(capsys):
    argv = [*CALL[:3], "--segment-lengths", "4Ki", "--dilation-rates", "4", "--ranks", "2", "--flops", "1T"]
    assert cli.main([*argv, "--bandwidth", "1M"]) == 0
    assert "bound by communication: a rank waits" in capsys.readouterr().out
    assert cli.main([*argv, "--bandwidth", "1P"]) == 0
    assert "bound by communication" not in capsys.readouterr().out
    assert cli.main([*argv, "--bandwidth", "1M", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["advice"].startswith("bound by communication")
    for more in (["--documents", "3Ki", "1Ki"], ["--align", "8"]):
        assert cli.main([*argv, "--bandwidth", "1M", *more]) == 0
        assert "at rate 16 instead of 4 a step would take" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("seq_len", "said"),
    [
        ("1Mi", "bound by communication: a rank waits at least {} at rate 256 instead of 64 a step would take {}"),
        ("1000001", "bound by communication: a rank waits at least {}(one rank){}it would send 25% of that"),
    ],
)
def test_many_ranks_are_said_to_be_bound(seq_len, said, capsys, monkeypatch):
    """By closed forms, and by ranks that were sampled."""
    for module in (plan, plan_large):
        monkeypatch.setattr(module, "MOST_SECONDS", 0.01)
    argv = ["plan", "--seq-len", seq_len, "--ranks", "256", "--segment-lengths", "1Ki", "1Mi"]
    argv += ["--dilation-rates", "1", "64", "--causal", "--flops", "1e15"]
    assert cli.main([*argv, "--bandwidth", "1G"]) == 0
    out = capsys.readouterr().out
    assert re.search(".*".join(re.escape(part) for part in said.split("{}")), out), out
    assert cli.main([*argv, "--bandwidth", "1P"]) == 0
    assert "bound by communication" not in capsys.readouterr().out


def test_a_long_comparison_says_so_before(capsys, monkeypatch):
    argv = [*CALL, "--alternatives", "--flops", "1T", "--bandwidth", "1G", "--ranks", "2"]
    assert cli.main(argv) == 0
    assert capsys.readouterr().err == ""
    monkeypatch.setattr("ring_dilated_attention.commands.plan_alternatives.PLANS_A_RANK", 1e9)
    assert cli.main(argv) == 0
    assert capsys.readouterr().err.startswith("comparing all ways of 2 ranks takes about ")


def test_the_command_compares(capsys):
    argv = ["plan", "--seq-len", "4Ki", "--segment-lengths", "4Ki", "--dilation-rates", "1", "--heads", "2"]
    argv += ["--alternatives", "--flops", "1T", "--bandwidth", "1G"]
    assert cli.main([*argv, "--ranks", "3"]) == 0
    out = capsys.readouterr().out
    assert "left out: dilated all-to-all" in out
    assert "recommended: " in out
    assert cli.main([*argv[:-4], "--ranks", "3"]) == 2
    assert "give --hardware" in capsys.readouterr().err
    assert cli.main([*argv, "--ranks", "128"]) == 0
    out, err = capsys.readouterr()
    assert not err
    assert re.search(r"dilated +ring +contiguous +[\d.]+ .s", out)
    assert cli.main([*argv, "--ranks", "128", "--every-rank"]) == 2
    assert "--every-rank plans all ranks of every way, at most 64" in capsys.readouterr().err


def test_what_has_no_closed_form_is_planned_or_sampled(capsys):
    """By plans where ranks are few, else at least what two of them take, which recommends nothing."""
    argv = ["plan", "--segment-lengths", "1Ki", "--dilation-rates", "1", "--heads", "2", "--head-dim", "8"]
    argv += ["--alternatives", "--flops", "1T", "--bandwidth", "1G", "--json"]
    assert cli.main([*argv, "--seq-len", "4097", "--ranks", "3"]) == 0
    few = json.loads(capsys.readouterr().out)
    assert few["recommended"]["step_seconds"]["least"] == few["recommended"]["step_seconds"]["most"]
    assert cli.main([*argv, "--seq-len", "4097", "--ranks", "66"]) == 0
    many = json.loads(capsys.readouterr().out)
    assert many["recommended"] is many["advice"] is None
    assert all(row["step_seconds"]["most"] is None for row in many["alternatives"] if not row["why_not"])
    assert "sampled" in many["reason"]


def test_what_may_be_faster_is_named():
    """Of bounds nobody knows which is the fastest, and of ways that were left out even less."""
    ring = Alternative("dilated", "ring", "contiguous", 1, 1.0, 100, 100, Bounds(2, 3), found_by="forms")
    zigzag = ring._replace(sharding="zigzag", step_seconds=Bounds(1, 4))
    slower = ring._replace(exchange="all_gather", step_seconds=Bounds(3, 5))
    best, reason = recommended([ring, zigzag, slower], None)
    assert best is ring
    assert reason == "at most 3 s; by the most that each may take the fastest; ring zigzag may be faster"
    left_out = zigzag._replace(why_not="zigzag has no closed form: ...")
    assert recommended([ring, left_out], None)[1].endswith("the fastest (of the ways compared)")
    assert recommended([ring._replace(why_not="?")], None) == (None, "none: no way could be planned")
    sample = ring._replace(peak_bytes=13_000_000, found_by="samples")
    assert recommended([sample], 10**6) == (None, "none fits: the least, ring contiguous, holds at least 13.0 MB")


def test_of_split_heads_the_memory_is_that_of_all_places():
    """Catches 71 MB where the place that runs the longest branch holds 88."""
    pattern = DilatedPattern((64, 1024, 4096), (1, 3, 1), is_causal=True, heads="split")
    job = EqualJob(pattern, 4096, 32, 32, 4, Sizes(1, 16, 4))
    hardware = Hardware(1e12, 1e10)
    every = alternatives(job, hardware, TRAITS["cpu"], every_rank=True)
    for x, y in zip(alternatives(job, hardware, TRAITS["cpu"]), every, strict=True):
        if x.inner > 1:
            assert x.found_by == "forms"
            assert x.peak_bytes == pytest.approx(y.peak_bytes, rel=0.05)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("rate", [4, 12])
def test_closed_forms_bound_the_plans_of_all_ways(is_causal, rate):
    job = EqualJob(DilatedPattern((64, 256, 1536), (1, rate, 8), is_causal=is_causal), 1536, 12, 4, 4, Sizes(1, 16, 2))
    hardware = Hardware(1e10, 1e8, 1e-5)
    assert not is_planned(job)
    every = alternatives(job, hardware, TRAITS["cpu"], every_rank=True)
    for x, y in zip(alternatives(job, hardware, TRAITS["cpu"]), every, strict=True):
        assert x[:4] == y[:4]
        if x.why_not:
            assert y.why_not or x.sharding == "zigzag"
            continue
        assert (x.balance, x.sent_bytes) == (pytest.approx(y.balance), y.sent_bytes)
        assert x.peak_bytes == pytest.approx(y.peak_bytes, rel=0.05)
        assert x.step_seconds.least * (1 - 1e-9) <= y.step_seconds.least <= x.step_seconds.most * (1 + 1e-9)


@pytest.mark.parametrize("more", [["--mesh", "1x4"], ["--mesh", "1x64"]])
def test_a_model_says_that_its_attention_is_bound(more, capsys):
    """By plans and by closed forms; the remedy is timed."""
    assert cli.main([*MODEL, *more, "--bandwidth", "1M"]) == 0
    said = capsys.readouterr().out
    assert re.search(
        "attention of one layer: bound by communication: a rank waits .* of the step. Branch 1 sends", said
    )
    assert "at rate 16 instead of 4 a step would take" in said
    assert cli.main([*MODEL, *more, "--bandwidth", "1P"]) == 0
    assert "bound by communication" not in capsys.readouterr().out


def test_a_model_whose_attention_sends_nothing_waits_in_handshakes(capsys):
    argv = [*MODEL, "--segment-lengths", "64", "--dilation-rates", "1", "--mesh", "1x4", "--bandwidth", "1P"]
    assert cli.main([*argv, "--latency", "1"]) == 0
    assert "attention of one layer: bound by communication: a rank waits 99% of the step, in handshakes alone" in (
        capsys.readouterr().out
    )


def test_a_model_says_that_its_gradients_bind(capsys):
    assert cli.main([*MODEL, "--mesh", "4x1", "--bandwidth", "1M"]) == 0
    said = capsys.readouterr().out
    assert "bound by communication: the sum of gradients takes 99% of a step; more sequences in a step" in said
    assert "attention of one layer" not in said
    # Nobody knows what share of a step they are where attention takes at least so long.
    assert cli.main([*MODEL, "--mesh", "1x64", "--seq-len", "4097", "--bandwidth", "1M"]) == 0
    assert "bound by communication" not in capsys.readouterr().out


def test_what_a_model_waits_is_what_its_attention_waits(monkeypatch):
    """Closed forms and plans of the same ranks agree; of a time that is not known nothing is said."""
    pattern, hardware = DilatedPattern((512, 32 * 512), (1, 8)), Hardware(1e12, 1e8, 1e-5)
    job = ModelJob(Shape(1, 64, 256, 256, 4, 4), pattern, 32 * 512, 1, Mesh(1, 32))
    by_plans = planned.attention_waiting(job, hardware)
    planned.attention_seconds.cache_clear()
    monkeypatch.setattr(planned, "MOST_PLANNED", 8)
    closed = planned.attention_waiting(job, hardware)
    assert closed.exposed == pytest.approx(by_plans.exposed)
    assert closed.seconds == pytest.approx(by_plans.seconds)
    assert closed.sent_bytes == by_plans.sent_bytes
    assert planned.attention_waiting(replace(job, seq_len=32 * 512 + 1), hardware) is None
    assert planned.attention_waiting(replace(job, mesh=Mesh(4, 1)), hardware) is None


def test_a_time_without_an_upper_bound_is_null_in_json(capsys):
    """Infinity is no JSON."""
    argv = [*MODEL, "--mesh", "1x64", "--seq-len", "4097", "--bandwidth", "1G", "--tokens", "1e9"]
    assert cli.main([*argv, "--json"]) == 0

    def refuse(word):
        raise AssertionError(word)

    found = json.loads(capsys.readouterr().out, parse_constant=refuse)["memory"]["kept"]
    assert found["step"]["seconds"][0] > 0
    assert found["step"]["seconds"][1] is found["training_seconds"][1] is None
    assert cli.main(argv) == 0
    assert re.search("in all +at least", capsys.readouterr().out)


def test_the_reason_says_only_what_is_so():
    """What sends least need not hold least."""
    ring = Alternative("dilated", "ring", "zigzag", 1, 1.0, 200, 100, Bounds(1, 1))
    gathered = Alternative("dilated", "all_gather", "zigzag", 1, 1.0, 100, 200, Bounds(1, 1))
    assert recommended([ring, gathered], None) == (gathered, "as fast as another way, and of the two it sends least")
