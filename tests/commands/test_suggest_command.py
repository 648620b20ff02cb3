"""What `rda suggest` prints: the pick and its reason, code and commands that run, and words that hold."""

import json
import random
import shlex
from itertools import islice
from pathlib import Path

import pytest
import torch
from helpers import heard_of, words

from ring_dilated_attention.commands import cli, suggest
from ring_dilated_attention.commands import train as train_command
from ring_dilated_attention.commands.hardware import PRESETS, as_toml
from ring_dilated_attention.commands.numbers import count, size_text
from ring_dilated_attention.pattern import DilatedPattern


def pick_of(out):
    """The code of the pattern, and the two commands, as a user would paste them."""
    _, code, _, plan, train, _ = out.split("\n\n")
    return code.strip(), [shlex.split(command.replace("\\\n", "")) for command in (plan, train)]


@pytest.mark.parametrize(
    ("more", "is_dense"),
    [
        (["--seq-len", "4Ki", "--heads", "4", "--speedup", "1"], True),
        (["--seq-len", "5001", "--heads", "4", "--kv-heads", "2", "--speedup", "5", "--ranks", "3"], False),
        (["--seq-len", "64Ki", "--heads", "8", "--seconds", "0.001", "--hardware", "{file}"], False),
        (["--seq-len", "1Mi", "--heads", "4", "--speedup", "200", "--layers", "2"], False),
    ],
)
def test_what_it_picks_runs_as_it_is_printed(more, is_dense, tmp_path, capsys, monkeypatch):
    """The code is the pattern, `rda plan` plans it, `rda train` starts with it. Catches a whole document in words that
    no command reads, a line that is cut at a hyphen, and a file's name with a space."""
    (tmp_path / "my own.toml").write_text(as_toml(PRESETS["h100"], []))
    argv = ["suggest", *(word.replace("{file}", str(tmp_path / "my own.toml")) for word in more)]
    assert cli.main([*argv, "--json"]) == 0
    first = json.loads(capsys.readouterr().out)["suggestions"][0]
    assert cli.main(argv) == 0
    code, (plan, train) = pick_of(capsys.readouterr().out)
    pattern = eval(code, {"DilatedPattern": DilatedPattern})
    assert pattern == DilatedPattern(first["segment_lengths"], first["dilation_rates"], is_causal=True)
    assert (pattern == DilatedPattern.dense(is_causal=True)) == is_dense
    assert plan[:2] == ["rda", "plan"]
    assert cli.main([*plan[1:], "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)
    assert planned.get("flops", sum(row["flops"] for row in planned.get("ranks", ()))) == first["flops"]
    assert ("model" in planned) == ("--hardware" in argv)
    begun = []
    monkeypatch.setattr(train_command, "launch_ranks", lambda arguments, run, lock: begun.append(run) or 0)
    monkeypatch.setattr(train_command, "train_alone", lambda arguments, run: begun.append(run) or 0)
    (tmp_path / "text").write_bytes(bytes(range(256)) * 4096 * (8 if "1Mi" in argv else 1))
    monkeypatch.chdir(tmp_path)
    assert train[:2] == ["rda", "train"]
    assert cli.main([*train[1:], "--data", "text"]) == 0
    [run] = begun
    config = run.hyperparameters.model_config()
    lengths = [min(w, first_of(argv)) for w in first["segment_lengths"]]
    assert (list(config.segment_lengths), list(config.dilation_rates)) == (lengths, first["dilation_rates"])
    assert (config.num_heads, config.embed_dim) == (int(argv[4]), 64 * int(argv[4]))


def first_of(argv):
    return count(argv[argv.index("--seq-len") + 1])


def test_it_trains_what_it_picks(tmp_path, capsys, monkeypatch):
    """To the end of a step."""
    argv = ["suggest", "--seq-len", "256", "--heads", "2", "--head-dim", "8", "--layers", "1", "--speedup", "2"]
    assert cli.main(argv) == 0
    _, (_, train) = pick_of(capsys.readouterr().out)
    monkeypatch.chdir(tmp_path)
    Path("text").write_bytes(bytes(range(256)) * 12)
    more = ["--data", "text", "--held-out-bytes", "256", "--steps", "1", "--run-folder", "run", "--json"]
    assert cli.main([*train[1:], *more]) == 0
    assert json.loads(capsys.readouterr().out)["hyperparameters"]["seq_len"] == 256


@pytest.mark.parametrize("seed", range(3))
def test_the_pick_is_the_best(seed, capsys):
    """By a comparison of each pair, in random jobs; and the reason is what tells it from the second."""
    rng = random.Random(seed)
    argv = ["suggest", "--seq-len", str(rng.randint(600, 7000)), "--heads", str(rng.choice([2, 4, 8])), "--speedup"]
    argv += [str(rng.randint(3, 12)), "--layers", str(rng.randint(1, 6)), "--ranks", str(rng.choice([1, 3]))]
    assert cli.main([*argv, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    rows = found["suggestions"]
    figures = [
        (
            row["layers_for_most"] or 10**9,
            0 if row["layers_for_most"] else 1 - row["reach_by_layer"][-1],
            -row["segment_lengths"][0],
            1 - row["reach_by_layer"][-1],
            row["largest_received_bytes"],
            -row["pairs"],
        )
        for row in rows
    ]
    for row in figures[1:]:
        differing = [a - b for a, b in zip(figures[0], row, strict=True) if a != b]
        assert not differing or differing[0] < 0
    for i, row in enumerate(figures[1:]):
        told = next(k for k, (a, b) in enumerate(zip(figures[0], row, strict=True)) if a != b)
        [said] = [clause for clause in found["why"].split(", ") if str(i + 2) in clause.split(" than ")[1]]
        assert f"it {suggest.BETTER[told]} than " in said


@pytest.mark.parametrize("more", [[], ["--not-causal"], ["--layers", "1"], ["--ranks", "8"]])
@pytest.mark.parametrize("n", ["4Ki", "70001", "16Mi"])
def test_a_suggestion_is_read_without_a_page(n, more, capsys):
    """80 columns, no sentence twice, no word that a page explains; and what is reached is not learnt."""
    assert cli.main(["suggest", "--seq-len", n, "--heads", "4", "--speedup", "30", *more]) == 0
    out = capsys.readouterr().out
    assert all(len(line) <= 80 for line in out.splitlines())
    said = " ".join(out.split("\n\n")[2].split())
    sentences = said.split(". ")
    assert len(sentences) == len(set(sentences)) > 3
    assert "phase" not in said
    assert "What is within reach is not yet learnt: train the candidates on your data" in said
    assert ("can have heard of" in said) != ("has not heard of" in said)


@pytest.mark.parametrize("seed", range(4))
def test_what_is_said_of_reach_is_the_definitions(seed, capsys):
    """Random jobs: every share, number of layers and share of keys that is printed, position by position."""
    rng = random.Random(seed)
    n, heads, layers = rng.randint(130, 400), rng.choice([1, 2, 3, 4]), rng.randint(1, 4)
    argv = ["suggest", "--seq-len", str(n), "--heads", str(heads), "--layers", str(layers), "--head-dim", "8"]
    argv += ["--speedup", str(rng.uniform(1.2, 2)), *rng.choice([[], ["--not-causal"]])]
    argv += ["--ranks", str(rng.choice([1, 3]))]
    assert cli.main([*argv, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["suggestions"]
    out = words(capsys, *argv)
    for i, row in enumerate(rows):
        pattern = DilatedPattern(row["segment_lengths"], row["dilation_rates"], is_causal="--not-causal" not in argv)
        may = torch.arange(1, n + 1) if pattern.is_causal else torch.full((n,), n)
        shares = [(torch.tensor(c).double() / may).min().item() for c in islice(heard_of(pattern, n, heads), layers)]
        assert row["reach_by_layer"] == pytest.approx(shares)
        most = next((k + 1 for k, share in enumerate(shares) if share >= 0.99), None)
        left = suggest.percent(1 - shares[-1])
        sizes = ["largest_received_bytes"] * (argv[-1] == "3") + ["cache_bytes"] * pattern.is_causal
        cells = " ".join([left, *(size_text(row[name]) for name in sizes)])
        assert f" {i + 1}. {row['rule']} 1/{1 / row['of_dense']:,.1f} {most or f'over {layers}'} {cells} " in out
        seen = [
            sum(any(pattern.phase_of(b, h, heads) == t % w % r for h in range(heads)) for t in range(n))
            for b, (w, r) in enumerate(pattern.branches)
        ]
        assert row["unread_positions"] == [n - taken for taken in seen]
        if i == 0:
            for (w, r), taken in zip(pattern.branches, seen, strict=True):
                one = "a query sees every key" if r == 1 else f"a head takes one in {r:,}: a query there sees every key"
                assert f"In each segment of {min(w, n):,} positions {one}" in out
                note = f"{suggest.percent(1 - taken / n)} of the positions are taken by no head"
                assert note in out or taken == n
            share = "all" if most and shares[most - 1] == 1 else "99 %"
            before = "what came before" if pattern.is_causal else "the sequence"
            said = (
                f"After {most} layer{'s' * (most != 1)} a query can have heard of {share} of {before}." if most else ""
            )
            assert said in out
            assert ("it can have heard of all but" in out) == (most is not None and shares[-1] < 1)
            assert (f"query {row['worst_query']:,} has not heard of {left} of {before}" in out) == (most is None)
