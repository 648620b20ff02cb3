"""What `rda suggest` prints: the pick and its reason, code and a command that run, and a table that holds."""

import json
import random
import shlex
from argparse import ArgumentParser

import pytest

from ring_dilated_attention.commands import cli, suggest
from ring_dilated_attention.pattern import DilatedPattern


@pytest.mark.parametrize(
    ("more", "is_dense"),
    [
        ("--seq-len 4Ki --heads 4 --speedup 1", True),
        ("--seq-len 5001 --heads 4 --speedup 5", False),
    ],
)
def test_what_it_picks_runs_as_it_is_printed(more, is_dense, capsys):
    """The code is the pattern, and `rda plan` plans it. Catches a whole document in words that no command reads."""
    words = ["suggest", *more.split()]
    assert cli.main([*words, "--json"]) == 0
    first = json.loads(capsys.readouterr().out)["suggestions"][0]
    assert cli.main(words) == 0
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


@pytest.mark.parametrize("seed", range(3))
def test_the_pick_is_the_best(seed, capsys):
    """Of all, in random jobs; and the reason is what tells it from the second."""
    rng = random.Random(seed)
    sizes = f"--seq-len {rng.randint(600, 7000)} --heads {rng.choice([2, 4, 8])}"
    more = f"--speedup {rng.randint(3, 12)} --layers {rng.randint(1, 6)} --json"
    assert cli.main(f"suggest {sizes} {more}".split()) == 0
    found = json.loads(capsys.readouterr().out)
    best, *others = [suggest.costs(row) for row in found["suggestions"]]
    assert all(best <= other for other in others)
    if others:
        differs = [a != b for a, b in zip(best, others[0], strict=True)]
        why = f"{suggest.BETTER[differs.index(True)]} (against 2)" if any(differs) else "2 has"
        assert found["why"].startswith(why)
    else:
        assert found["why"] == "it is the only candidate"


def test_the_help_tells_how_many_layers_are_taken():
    parser = ArgumentParser()
    suggest.add_arguments(parser)
    num_layers = parser.get_default("layers")
    assert f"layers of the model (default {num_layers})" in " ".join(parser.format_help().split())
