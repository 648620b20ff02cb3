"""`rda plan`: its numbers are the plan's, and it needs no torch."""

import json
import random
import re
import subprocess
import sys
from itertools import product

import pytest

from benchmarks.measure import flops_of
from ring_dilated_attention.commands import cli
from ring_dilated_attention.commands.plan import figures
from ring_dilated_attention.forecast import call_cost
from ring_dilated_attention.forecast.clock import Hardware, RankTime, model_step, time_text
from ring_dilated_attention.forecast.ledger import attention_memory
from ring_dilated_attention.kernels.traits import TRAITS
from ring_dilated_attention.pattern import DilatedPattern
from ring_dilated_attention.plan.job import Job
from ring_dilated_attention.plan.planner import make_plan
from ring_dilated_attention.plan.sharding import default_lengths, make_shards
from ring_dilated_attention.plan.sizes import Sizes

DENSE = ["--seq-len", "4096", "--segment-lengths", "4096", "--dilation-rates", "1", "--heads", "2"]


def words(text):
    """Without the ends of lines."""
    return " ".join(text.split())


def planned(capsys, *arguments):
    assert cli.main(["plan", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_rows_are_the_plan(capsys):
    found = planned(capsys, *DENSE, "--ranks", "4", "--head-dim", "32", "--dtype", "bfloat16", "--causal")
    shards = make_shards("contiguous", (1024,) * 4)
    for rank, row in enumerate(found["ranks"]):
        plan = make_plan(Job(DilatedPattern((4096,), (1,), is_causal=True), shards, 2, 2), rank)
        assert row["flops"] == sum(flops_of(plan, 1, 32))
        assert row["forward_sent_bytes"] == plan.bytes_sent(1, 32, 2)
        assert row["sent_bytes"] == plan.bytes_sent(1, 32, 2) + plan.bytes_sent(1, 32, 2, backward=True)
        assert row["peak_bytes"] == sum(item["num_bytes"] for item in row["peak_items"])
    assert found["balance"] < 0.6


UNITS = {"k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}


@pytest.mark.parametrize("seed", range(12))
def test_every_printed_figure_is_that_of_the_plans(seed, capsys):
    """The table and the sentences, of random jobs: catches a column of another figure, unit or rank. Of more than 16
    ranks those are shown that are first and last, or have the least or the most work, bytes sent or memory."""
    rng, exchange = random.Random(seed), ("ring", "all_gather", "all_to_all")[seed % 3]
    n, batch, head_dim = rng.randint(900, 9000) * rng.choice([1, 1, 1000]), rng.randint(1, 3), rng.choice([8, 24])
    ranks, kv_heads = (rng.choice([2, 4]), 4) if exchange == "all_to_all" else (rng.choice([3, 8, 19]), 2)
    w, r, sharding = rng.randint(n // 20, n), rng.randint(1, 9), rng.choice(["contiguous", "zigzag"])
    argv = f"plan --seq-len {n} --ranks {ranks} --segment-lengths {w} {n} --dilation-rates 1 {r} --heads 4 --causal"
    argv += f" --batch {batch} --head-dim {head_dim} --sharding {sharding} --exchange {exchange} --kv-heads {kv_heads}"
    assert cli.main([*argv.split(), *TIME]) == 0
    out = capsys.readouterr().out
    shards = make_shards(sharding, default_lengths(sharding, n, ranks))
    job = Job(DilatedPattern((w, n), (1, r), is_causal=True), shards, 4, kv_heads)
    sizes, plans = Sizes(batch, head_dim, 4), call_cost.all_plans(job, call_cost.Way(exchange))
    dealings = [x.dealing for x in plans if x.dealing is not None]
    step = model_step([x.plan for x in plans], sizes, Hardware(1e9, 1e8, 1e-4), dealings or None)
    work = [x.plan.pairs for x in plans]
    memory = [attention_memory(x.plan, sizes, TRAITS["cpu"], x.dealing) for x in plans]
    sent = [[x.bytes_sent(sizes, backward=stage) for stage in (False, True)] for x in plans]
    columns = work, list(map(sum, sent)), [held.forward_backward.num_bytes for held in memory]
    flop, moved, peak = (UNITS[re.search(unit, out)[1]] for unit in ("(.)FLOP", "sent, (.)B", "peak, (.)B"))
    shown, seen = [line.split() for line in out.splitlines()], []
    for rank, (x, held, time) in enumerate(zip(plans, memory, step.ranks, strict=True)):
        cells = [f"{rank}", f"{x.num_rows:,}", f"{14 * batch * head_dim * work[rank] / flop:,.1f}"]
        cells += [f"{work[rank] / sum(work):.1%}", f"{sent[rank][0] / moved:,.1f}", f"{sum(sent[rank]) / moved:,.1f}"]
        cells += [f"{x.num_bytes / peak:,.1f}" for x in held]
        seen += [rank] * ([*cells, f"{time.exposed_seconds / step.step_seconds:.1%}"] in shown)
    if ranks <= 16:
        assert seen == list(range(ranks))
    else:
        assert {0, ranks - 1} <= set(seen)
        assert f"({ranks} ranks; shown are the first, the last and the extremes)" in out
        assert all({min(column), max(column)} <= {column[rank] for rank in seen} for column in columns)
        assert sum(line[:1] == [f"{rank}"] for rank in range(ranks) for line in shown) == len(seen) <= 8
    assert f"balance: {sum(work) / ranks / max(work):.1%}" in out
    waits = max(rank.exposed_seconds for rank in step.ranks) / step.step_seconds
    assert f"efficiency {step.efficiency:.1%}; a rank waits at most {waits:.1%} of the step" in words(out)
    times = (time_text(x) for x in (step.step_seconds, step.forward_seconds, step.backward_seconds))
    assert "modelled step: {} (forward {}, backward {})".format(*times) in words(out)
    if (lost := 1 - step.efficiency / step.balance) > 0.21:
        assert f"bound by communication: a rank waits {min(lost, 0.99):.0%} of the step" in words(out)
    largest = max(memory, key=lambda x: x.forward_backward.num_bytes).forward_backward
    for item in largest.items:
        assert f"{item.num_bytes / 1e6:>12,.1f} MB  {item.name}\n" in out


def test_zigzag_balances(capsys):
    assert planned(capsys, *DENSE, "--ranks", "4", "--causal", "--sharding", "zigzag")["balance"] == 1


def test_the_table_has_a_line_per_rank(capsys):
    assert cli.main(["plan", *DENSE, "--ranks", "3"]) == 0
    out = capsys.readouterr().out
    assert "branch 0 (w=4096, r=1)" in out
    assert "balance: " in out
    assert [line.split()[0] for line in out.splitlines()[3:6]] == ["0", "1", "2"]


def test_many_ranks_are_shown_by_their_extremes(capsys):
    assert cli.main(["plan", *DENSE, "--ranks", "32", "--causal"]) == 0
    out = capsys.readouterr().out
    assert "(32 ranks; shown are" in out
    assert len(out.splitlines()) < 32


def test_pictures_are_made(tmp_path, capsys):
    assert cli.main(["plan", *DENSE, "--ranks", "2", "--picture", str(tmp_path / "new")]) == 0
    assert {path.name for path in (tmp_path / "new").iterdir()} == {"pattern.png", "ring.png"}


def test_a_picture_has_the_name_that_is_given(tmp_path, capsys):
    """Catches a folder that is called plan.png."""
    assert cli.main(["plan", *DENSE, "--ranks", "2", "--picture", str(tmp_path / "plan.png")]) == 0
    assert {path.name for path in tmp_path.iterdir() if path.is_file()} == {"plan.png", "plan-ring.png"}
    assert str(tmp_path / "plan-ring.png") in capsys.readouterr().err


@pytest.mark.parametrize("exchange", ["auto", "ring", "all_gather"])
def test_a_sketch_of_many_ranks_takes_no_plans(exchange, tmp_path, capsys, monkeypatch):
    """Catches hours of planning for what is counted."""
    monkeypatch.setattr(figures, "make_plan", None)
    monkeypatch.setattr(call_cost, "all_plans", None)
    drawn = []
    monkeypatch.setattr(figures, "draw_panel", lambda axes, panel, *others, **more: drawn.append(panel.notes[-1]))
    argv = ["plan", "--seq-len", "16Mi", "--ranks", "4Ki", "--segment-lengths", "2Ki", "64Ki", "16Mi"]
    argv += ["--dilation-rates", "1", "16", "512", "--exchange", exchange, "--picture", str(tmp_path)]
    assert cli.main(argv) == 0
    out, error = capsys.readouterr()
    assert "4,096 ranks, counted; memory and time are estimates" in out
    assert [path.name for path in tmp_path.iterdir()] == ["pattern.png"]
    assert drawn == ["stays at home", *(f"travels: up to {n} ranks share a segment" for n in ("16", "4,096"))]
    assert "no picture of the ring: " in error


@pytest.mark.parametrize(
    ("exchange", "said", "note", "why"),
    [
        ("all_to_all", "branch 0 (w=4096, r=1) is computed by heads", "computed by heads", "heads are dealt"),
        ("all_gather", "branch 0 (w=4096, r=1) travels", "travels: up to 2 ranks share a segment", "in one round"),
    ],
)
def test_no_ring_is_drawn_where_there_is_none(exchange, said, note, why, tmp_path, capsys, monkeypatch):
    """Picture and text are of one plan."""
    drawn = []
    monkeypatch.setattr(figures, "draw_panel", lambda axes, panel, *others, **more: drawn.append(panel.notes[-1]))
    argv = ["plan", *DENSE, "--ranks", "2", "--exchange", exchange, "--picture", str(tmp_path)]
    assert cli.main(argv) == 0
    out, error = capsys.readouterr()
    assert [path.name for path in tmp_path.iterdir()] == ["pattern.png"]
    assert said in out
    assert drawn == [note]
    assert "no picture of the ring: " in error
    assert why in error


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ranks", "0"], "--ranks must be at least 1, got 0"),
        (["--kv-heads", "3"], "2 query heads cannot share 3 key/value heads"),
        (["--dilation-rates", "1", "2"], "segment_lengths has 1 entries and dilation_rates has 2"),
        (["--sharding", "zigzag", "--align", "8"], "--align 8 is for contiguous shards"),
        (["--documents", "4000", "95"], "--documents add up to 4095, and --seq-len is 4096"),
        (["--documents", "4096", "0"], "--documents must be at least 1 each, got 0"),
        (["--ranks", "8192"], "--ranks 8,192 share the 4,096 positions of --seq-len, so that 4,096 of them would own"),
        (["--ranks", str(2**21)], "--ranks must be at most 1,048,576, got 2097152"),
        (["--seq-len", str(10**30)], "--seq-len must be at most 9,223,372,036,854,775,807 (64 bits), got 1000000"),
        (["--segment-lengths", str(2**63)], "--segment-lengths must be at most 9,223,372,036,854,775,807 (64 bits)"),
        (["--dilation-rates", str(2**63)], "--dilation-rates must be at most 9,223,372,036,854,775,807 (64 bits)"),
        (["--heads", str(10**7)], "--heads must be at most 65,536, got 10000000"),
        (["--batch", str(10**9)], "--batch must be at most 4,096, got 1000000000"),
        (["--batch", str(2**64)], "--batch must be at most"),
        (["--documents", "4096", "--picture", "x"], "--picture draws one document"),
        (["--documents", "4000", "96", "--batch", "2"], "so --batch must be 1, got 2. Leave out"),
        (["--picture", f"{__file__}/new"], "test_plan_command.py/new cannot be written: a file is in the way. Choose"),
        (["--flops", "1e9"], "missing --bandwidth: a time needs --flops and --bandwidth, or --hardware"),
        (["--latency", "1"], "missing --flops, --bandwidth: a time needs"),
        (["--flops", "0"], "--flops 0 must be from 1e+06 to 1e+18 FLOPs in a second; 500 TFLOP/s are 5e14"),
        (["--flops", "1e9", "--bandwidth", "nan"], "--bandwidth nan must be from 1000 to 1e+15 bytes in a second, one"),
        (["--flops", "1e9", "--latency", "-1"], "--latency -1 must be from 0 to 60 seconds; 5 µs are 5e-6"),
        (["--hardware", "h100-nvlink"], "has the rate of 16-bit types, and --dtype is float32. Choose --dtype"),
    ],
)
def test_bad_input_is_quoted(arguments, message, capsys):
    assert cli.main(["plan", *DENSE, *arguments]) == 2
    assert message in capsys.readouterr().err


def test_rates_that_no_list_holds(capsys):
    """Catches a list of 10^11 phases, and a byte for each of 10^11 positions."""
    numbers = ["--seq-len", str(10**11), "--segment-lengths", str(10**11), "--dilation-rates", "99999999977"]
    assert cli.main(["plan", *numbers]) == 0
    out = words(capsys.readouterr().out)
    assert "phases that no head reads: 12, 13, 14, 15, ... 99999999976 (99999999965 of them) " in out
    assert "100.0% of the first 12,582,912 (query, head) pairs are in no branch" in out


def test_it_does_not_import_torch():
    code = (
        "import sys; from ring_dilated_attention.commands.cli import main; "
        f"main(['plan', *{DENSE!r}]); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, capture_output=True).returncode == 0


def test_shardings_are_compared(capsys):
    """Zigzag for dense causal attention; contiguous where a long segment would make it uneven."""
    common = ["plan", "--seq-len", "4096", "--ranks", "4", "--dilation-rates", "1", "--causal", "--segment-lengths"]
    assert cli.main([*common, "4096"]) == 0
    assert "zigzag 100.0%" in words(capsys.readouterr().out)
    assert cli.main([*common, "2458"]) == 0
    assert words(capsys.readouterr().out).endswith("contiguous is the better one here")


def test_shardings_that_balance_alike_say_so(capsys):
    """Catches a winner where there is none. Whole documents per rank: contiguous shards send nothing."""
    common = ["plan", "--seq-len", "4096", "--ranks", "4", "--dilation-rates", "1", "--segment-lengths", "4096"]
    assert cli.main(common) == 0
    out = words(capsys.readouterr().out)
    assert out.index("contiguous 100.0%") < out.index("zigzag 100.0%")
    assert out.endswith(": equally balanced")
    assert cli.main([*common, "--causal", "--documents", *["1024"] * 4]) == 0
    assert words(capsys.readouterr().out).endswith(": equally balanced, and contiguous sends less")


def test_documents_reach_the_plan(capsys):
    """Catches borders that are lengths, or that only one of the plan and the comparison of shardings gets."""
    found = planned(capsys, *DENSE, "--ranks", "4", "--causal", "--documents", "3000", "1096")
    pattern, shards = DilatedPattern((4096,), (1,), is_causal=True), make_shards("contiguous", (1024,) * 4)
    for rank, row in enumerate(found["ranks"]):
        plan = make_plan(Job(pattern, shards, 2, 2, (0, 3000, 4096)), rank)
        assert row["flops"] == sum(flops_of(plan, 1, 64))
    assert found["shardings"][0]["balance"] == found["balance"]


@pytest.mark.parametrize("value", ["1e-320", "1e308", "inf", "nan", "0", "-1", "1e-30", "1e30", "1e6", "1e15", "60"])
@pytest.mark.parametrize("option", ["--flops", "--bandwidth", "--latency", "--tokens"])
def test_no_rate_makes_a_figure_that_is_no_number(option, value, capsys):
    """Catches rates at which seconds are inf, and a share of them nan, which JSON does not know."""
    time = {"--flops": "1e12", "--bandwidth": "1e9", "--latency": "1e-6"} | {option: value}
    argv = ["--seq-len", "64Ki", "--segment-lengths", "1Ki", "64Ki", "--dilation-rates", "1", "64", "--causal"]
    model = ["model", "--layers", "2", "--embed-dim", "64", "--heads", "4", "--vocab", "256"]
    jobs = [[*model, *argv, "--mesh", "2x2"]]
    if option != "--tokens":
        jobs += [[*argv, "--ranks", ranks] for ranks in ("1", "4", "1024")]
        jobs.append(["compare", *argv, "--ranks", "4"])
    for job in jobs:
        for form in ([], ["--json"]):
            code = cli.main(["plan", *job, *form, *(word for pair in time.items() for word in pair)])
            out, error = capsys.readouterr()
            assert re.search(r"\b(nan|inf|NaN|Infinity)\b", out) is None
            assert code == 0 or (code == 2 and f": {option} " in error and "must be from " in error)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--seconds", "1e308", "--hardware", "h100-nvlink"], "--seconds must be from 1e-09 to 1e+09, got 1e+308"),
        (["--seconds", "1e-320", "--hardware", "h100-nvlink"], "--seconds must be from 1e-09 to 1e+09, got"),
        (["--seconds", "1", "--hardware", "{file}"], "cannot be read: "),
    ],
)
def test_a_suggestion_has_no_infinite_budget(argv, message, tmp_path, capsys):
    """And a file with a number of thousands of digits is refused with its name."""
    (tmp_path / "x.toml").write_text(f"[hardware]\nflops_per_second = {'9' * 5000}\n")
    argv = [word.replace("{file}", str(tmp_path / "x.toml")) for word in argv]
    assert cli.main(["suggest", "--seq-len", "4Ki", "--heads", "4", "--json", *argv]) == 2
    assert message in capsys.readouterr().err


TIME = ("--flops", "1e9", "--bandwidth", "1e8", "--latency", "1e-4")


def test_the_time_is_the_models(capsys):
    """Catches a rate in the wrong place, and a sharding compared on other hardware."""
    found = planned(capsys, *DENSE, *TIME, "--ranks", "4", "--head-dim", "32", "--dtype", "bfloat16", "--causal")
    shards, pattern = make_shards("contiguous", (1024,) * 4), DilatedPattern((4096,), (1,), is_causal=True)
    step = model_step(
        [make_plan(Job(pattern, shards, 2, 2), k) for k in range(4)], Sizes(1, 32, 2), Hardware(1e9, 1e8, 1e-4)
    )
    assert found["model"]["step_seconds"] == step.step_seconds == found["shardings"][0]["step_seconds"]
    assert found["model"]["efficiency"] == step.efficiency
    assert [RankTime(**rank) for rank in found["model"]["ranks"]] == list(step.ranks)
    assert "model" not in planned(capsys, *DENSE, "--ranks", "2")


def test_the_time_decides_between_shardings(capsys):
    """Catches a verdict by balance: dense and not causal both balance, on a slow network zigzag waits longer: of its
    smaller tiles only the first hides the gradients that come along."""
    assert cli.main(["plan", *DENSE, "--ranks", "4", "--causal", *TIME]) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[2].endswith("of a step")
    assert all(line.endswith("%") for line in out.splitlines()[3:7])
    assert "modelled step: " in out
    assert words(out).endswith("zigzag is the better one here")
    assert cli.main(["plan", *DENSE, "--ranks", "4", *TIME]) == 0
    assert words(capsys.readouterr().out).endswith(": equally fast")
    assert cli.main(["plan", *DENSE, "--ranks", "4", "--flops", "1e12", "--bandwidth", "1e9"]) == 0
    assert words(capsys.readouterr().out).endswith("contiguous is the better one here")


def test_a_preset_is_replaced_by_what_is_given(capsys):
    common = (*DENSE, "--ranks", "2", "--dtype", "bfloat16", "--hardware")
    found = planned(capsys, *common, "h100-infiniband", "--latency", "1e-5")["model"]["hardware"]
    assert (found["flops_per_second"], found["bytes_per_second"], found["latency_seconds"]) == (400e12, 40e9, 1e-5)
    found = planned(capsys, *common, "h100-nvlink", "--flops", "5e14")["model"]["hardware"]
    assert (found["flops_per_second"], found["bytes_per_second"], found["latency_seconds"]) == (5e14, 360e9, 4e-6)


def test_the_kernel_decides_what_is_held(capsys):
    """Catches an option that is not passed on: only the CPU's kernel reads copies, of rows in 16 bits."""
    for kernel in ("cpu", "sdpa"):
        [row] = planned(capsys, *DENSE, "--dtype", "bfloat16", "--kernel", kernel)["ranks"]
        items = {item["name"] for item in row["peak_items"]}
        assert ("copied rows of one tile" in items) == (kernel == "cpu")


BRANCHES = ["--segment-lengths", "2048", "65536", "1048576", "--dilation-rates", "1", "16", "256"]


def test_the_first_example_of_the_help_keeps_its_promise(capsys):
    """Which branches stay and which travel; with shards of 131,072 positions only the longest one does."""
    assert cli.main(["plan", "--seq-len", "1048576", "--ranks", "8", *BRANCHES]) == 0
    out = capsys.readouterr().out
    assert "branch 0 (w=2048, r=1) stays at home\n" in out
    assert "branch 1 (w=65536, r=16) stays at home\n" in out
    # 8 ranks send 7 chunks each: 12 heads times 512 rows of K and of V, 64 numbers of 4 bytes.
    sent = 8 * 7 * 12 * 512 * 2 * 64 * 4
    travels = f"branch 2 (w=1048576, r=256) travels among up to 8 ranks, {sent / 1e6:.1f} MB of keys and values in a "
    assert f"{travels}forward, over all ranks" in words(out)


def drawn_branches(seed):
    """Segment lengths, dilation rates, and the options of a job."""
    rng, n = random.Random(seed), random.Random(seed).randrange(2000, 6000)
    lengths, rates = (list(map(str, rng.sample(range(1, most), 3))) for most in (n, 9))
    return lengths, rates, ["--seq-len", str(n), "--ranks", str(rng.randint(2, 9)), *rng.choice(([], ["--causal"]))]


LENGTHS, RATES, JOB = ["700", "5001", "900"], ["1", "7", "3"], ["--seq-len", "5001", "--ranks", "5"]


@pytest.mark.parametrize(
    ("lengths", "rates", "more"),
    [
        (LENGTHS, RATES, JOB),
        (LENGTHS, RATES, [*JOB, "--causal", "--sharding", "zigzag"]),
        (LENGTHS, RATES, [*JOB, "--split-heads"]),
        (LENGTHS, RATES, [*JOB, "--kv-heads", "2", "--documents", "3000", "2001"]),
        *map(drawn_branches, range(4)),
    ],
)
def test_what_branches_send_is_what_ranks_send(lengths, rates, more, capsys):
    """Catches a message that is counted for another branch's ring, or not at all."""
    common = ["--heads", "6", "--dtype", "bfloat16", *more]
    found = planned(capsys, "--segment-lengths", *lengths, "--dilation-rates", *rates, *common)
    assert sum(row["forward_sent_bytes"] for row in found["branches"]) == sum(
        row["forward_sent_bytes"] for row in found["ranks"]
    )
    for length, rate, row in zip(lengths, rates, found["branches"], strict=True):
        assert row["forward_sent_bytes"] > 0 or lengths is not LENGTHS
        if "--split-heads" not in more:
            alone = ["--segment-lengths", length, "--dilation-rates", rate]
            assert planned(capsys, *alone, *common)["branches"] == [row]


@pytest.mark.parametrize("rule", [{}, {"phase": "blocked"}, {"heads": "split"}])
@pytest.mark.parametrize("lengths", [(1,), (7,), (40,), (5, 64), None])
def test_queries_without_keys_are_counted(rule, lengths):
    """By the definition, position by position; 8 heads. Catches a pattern that repeats itself later than assumed."""
    for branches in (((8, 4),), ((10, 4),), ((3, 5),), ((6, 4), (40, 10)), ((50, 16), (9, 2)), ((20, 2), (8, 1))):
        pattern = DilatedPattern(*zip(*branches, strict=True), **rule)
        found, pairs = pattern.without_keys(8, lengths)
        assert pairs % 8 == 0
        expected = 0
        for length in lengths or (pairs // 8,):
            for t, head in product(range(length), range(8)):
                phases = [pattern.phase_of(i, head, 8) for i in range(len(branches))]
                expected += all(t % w % r != phase for (w, r), phase in zip(branches, phases, strict=True))
        assert found == expected


@pytest.mark.parametrize("seed", range(6))
def test_queries_without_keys_are_said_as_they_are(seed, capsys):
    """The printed share, in random jobs: by the definition, position by position."""
    rng = random.Random(seed)
    n, heads, rates = rng.randint(60, 300), rng.choice([1, 2, 4]), [rng.randint(2, 9), rng.randint(2, 9)]
    lengths = [rng.randint(rate, n) for rate in rates]
    argv = ["--seq-len", str(n), "--heads", str(heads), "--segment-lengths", *map(str, lengths)]
    assert cli.main(["plan", *argv, "--dilation-rates", *map(str, rates)]) == 0
    pattern = DilatedPattern(lengths, rates)
    phases = [[pattern.phase_of(i, head, heads) for i in range(2)] for head in range(heads)]
    kept = [[t % w % r for w, r in pattern.branches] for t in range(n)]
    without = sum(all(map(int.__ne__, a, b)) for a, b in product(phases, kept))
    share = f"{without / n / heads:.1%} of all (query, head) pairs are in no branch: no key, and out is 0"
    assert (share in words(capsys.readouterr().out)) == (without > 0)


def test_queries_without_keys_are_said(capsys):
    common = ["plan", "--seq-len", "4096", "--heads", "2", "--segment-lengths", "4096", "--dilation-rates"]
    assert cli.main([*common, "4"]) == 0
    assert "75.0% of all (query, head) pairs are in no branch: no key, and out is 0\n" in capsys.readouterr().out
    assert cli.main([*common, "1"]) == 0
    assert "in no branch" not in capsys.readouterr().out
    assert "; r > w: a segment has one row" in DilatedPattern((4,), (5,)).explain(1)
    assert "r > w" not in DilatedPattern((4,), (4,)).explain(1)


def as_if_many(capsys, monkeypatch, *arguments):
    """What is found of ranks as if they were many, and by the plans of all."""
    with monkeypatch.context() as many:
        many.setattr(call_cost, "MOST_PLANNED", 4)
        found = planned(capsys, *arguments)
    return found, planned(capsys, *arguments)


@pytest.mark.parametrize("sharding", ["contiguous", "zigzag"])
@pytest.mark.parametrize("exchange", ["ring", "all_gather", "all_to_all"])
def test_many_ranks_are_as_if_planned_one_by_one(sharding, exchange, capsys, monkeypatch):
    """By the command, of each exchange and sharding."""
    common = ["--seq-len", "2150", "--ranks", "12", "--heads", "12", "--head-dim", "8", "--causal", *TIME]
    common += ["--segment-lengths", "2150", "--dilation-rates", "4", "--exchange", exchange, "--sharding", sharding]
    found, every = as_if_many(capsys, monkeypatch, *common)
    assert found["flops"] == sum(row["flops"] for row in every["ranks"])
    assert found["largest_flops"] == max(row["flops"] for row in every["ranks"])
    assert found["largest_flops"] == every["ranks"][found["busiest_rank"]]["flops"]
    assert found["balance"] == every["balance"]
    assert found["branches"] == every["branches"]
    assert found["peak_bytes"] == pytest.approx(max(row["peak_bytes"] for row in every["ranks"]), rel=0.1)
    assert [row["balance"] for row in found["shardings"]] == [row["balance"] for row in every["shardings"]]
    assert (found["step_seconds"] is None) == (exchange != "ring")
    if exchange == "ring":
        assert found["step_seconds"] == pytest.approx(every["model"]["step_seconds"], rel=0.4)
    if exchange == "all_to_all":
        assert found["largest_received_bytes"] == max(row["sent_bytes"] for row in every["ranks"])


def test_documents_of_many_ranks_are_counted(capsys, monkeypatch):
    """Packed and uneven, which no closed form was for."""
    common = ["--seq-len", "2101", "--ranks", "13", "--heads", "4", "--kv-heads", "2", *TIME, "--exchange", "ring"]
    common += ["--segment-lengths", "64", "2101", "--dilation-rates", "1", "3", "--documents", "900", "1", "1200"]
    found, every = as_if_many(capsys, monkeypatch, *common)
    assert found["balance"] == every["balance"]
    assert found["branches"] == every["branches"]
    assert sum(row["forward_sent_bytes"] for row in found["branches"]) == sum(
        row["forward_sent_bytes"] for row in every["ranks"]
    )


def test_many_ranks_say_what_their_time_assumes(capsys):
    argv = ["plan", "--seq-len", "1Mi", "--ranks", "256", "--segment-lengths", "1Mi", "--dilation-rates", "16"]
    assert cli.main([*argv, "--flops", "5e12", "--bandwidth", "1e9"]) == 0
    out = capsys.readouterr().out
    assert "assumed of each rank: 5.00 TFLOP/s, 1.00 GB/s one way" in " ".join(out.split())
    assert "about " in out


def test_many_ranks_take_the_exchange_that_a_call_takes(capsys):
    """Small chunks all at once, whose time nobody knows; by the ring a step would take long."""
    common = ["--seq-len", "16Ki", "--ranks", "128", "--heads", "2", "--causal", "--head-dim", "32"]
    branches = ["--segment-lengths", "16Ki", "--dilation-rates", "128"]
    time = ["--flops", "1e12", "--bandwidth", "1e9", "--latency", "1e-3"]
    by_itself = planned(capsys, *common, *branches, *time)
    assert by_itself["exchange"]["exchange"] == "all_gather"
    assert by_itself["step_seconds"] is by_itself["advice"] is None
    ring = planned(capsys, *common, *branches, *time, "--exchange", "ring")
    assert ring["exchange"] == {"exchange": "ring", "reason": "asked for"}
    assert ring["step_seconds"] > 0.1


def test_aligned_shards_are_not_equal(capsys):
    """Ranks that own nothing, and shards of two lengths."""
    branches = ["--segment-lengths", "9600", "--dilation-rates", "16", "--heads", "2"]
    common = ["--seq-len", "9600", "--ranks", "100", "--align", "128", *branches]
    assert cli.main(["plan", *common]) == 2
    assert "--align 128 leaves 25 of 100 ranks without positions: choose fewer" in capsys.readouterr().err
    common[3:6] = ["60", "--align", "128"]
    common[5] = "64"
    assert {row["positions"] for row in planned(capsys, *common, "--ranks", "60")["ranks"]} == {128, 192}


@pytest.mark.parametrize("more", [["--alternatives"], ["--every-rank"], ["--layers", "2"], ["--memory", "1G"]])
def test_options_of_other_commands_are_unknown(more, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["plan", *DENSE, *more])
    assert ended.value.code == 2
    assert f"unrecognized arguments: {' '.join(more)}" in capsys.readouterr().err


def test_lines_fit_a_terminal(capsys):
    """Words and tables of few ranks and of many."""
    common = [*DENSE[:2], "--segment-lengths", "512", "4096", "--dilation-rates", "1", "8", "--hardware", "h100-nvlink"]
    large = ("--seq-len", "1Mi", "--heads", "16", "--head-dim", "128", "--segment-lengths", "128Ki", "1Mi")
    huge = (*large, "--seq-len", "4Gi", "--batch", "8", "--hardware", "h100")
    for more in (("--ranks", "4"), ("--ranks", "100"), (*large, "--ranks", "8"), (*huge, "--ranks", "8")):
        assert cli.main(["plan", *common, "--dtype", "bfloat16", "--causal", *more]) == 0
        out = capsys.readouterr().out
        assert all(len(line) <= 80 for line in out.splitlines()), [line for line in out.splitlines() if len(line) > 80]
