"""`rda suggest` against counting by hand: each suggestion keeps the budget, and its numbers are the definition's."""

import json
import random

import pytest
from helpers import heard_of

from ring_dilated_attention.commands import cli
from ring_dilated_attention.pattern import DilatedPattern
from ring_dilated_attention.reference import multiplicity


@pytest.mark.parametrize("seed", range(8))
def test_what_is_said_of_suggestions_is_the_definitions(seed, capsys):
    rng = random.Random(seed)
    n, heads, layers = rng.randint(130, 400), rng.randint(1, 9), rng.randint(1, 5)
    is_causal, speedup = seed % 4 > 0, rng.uniform(1, 2.5)
    words = ["--seq-len", str(n), "--heads", str(heads), "--layers", str(layers)]
    words += ["--speedup", str(speedup), "--json"]
    words += [] if is_causal else ["--not-causal"]
    words += ["--window"] if seed % 3 == 0 else []
    assert cli.main(["suggest", *words]) == 0
    dense = heads * (n * (n + 1) // 2 if is_causal else n**2)
    allowed = [i + 1 if is_causal else n for i in range(n)]
    for row in json.loads(capsys.readouterr().out)["suggestions"]:
        pattern = DilatedPattern(
            row["segment_lengths"], row["dilation_rates"], window=row["window"], is_causal=is_causal
        )
        pairs = int(multiplicity(pattern, n, heads).sum())
        shares = [
            min(count / most for count, most in zip(counts, allowed, strict=True))
            for counts, _ in zip(heard_of(pattern, n, heads), range(layers), strict=False)
        ]
        first = next((i + 1 for i, share in enumerate(shares) if share >= 0.99), None)
        assert pairs <= dense / speedup * (1 + 1e-9)
        assert (row["pairs"], row["of_dense"]) == (pairs, pairs / dense)
        assert (row["reach_by_layer"], row["layers_for_most"]) == (shares, first)
        assert row["all_read"] == (max(pattern.dilation_rates) <= heads)
