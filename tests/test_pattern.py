"""Patterns that are made by a rule: dense attention of any length, and LongNet's geometric sequences."""

import copy
import io
import json
import pickle
from dataclasses import asdict, fields, replace

import pytest
import torch
import torch.nn.functional as F
from helpers import message_of

from benchmarks.scaled import scaled_down
from ring_dilated_attention import DilatedCache, DilatedPattern, dilated_attention
from ring_dilated_attention.attention import validate
from ring_dilated_attention.forecast.call_cost import pairs
from ring_dilated_attention.layers import MultiheadDilatedAttention
from ring_dilated_attention.models import LongNetConfig
from ring_dilated_attention.pattern import WHOLE_DOCUMENT
from ring_dilated_attention.ranks.call import Call
from ring_dilated_attention.reference import multiplicity

LONGEST = 2**62


def test_a_compiled_graph_takes_a_dense_segment_of_any_length():
    """Catches a length that is overflowed or cut short. (The fuzzers draw segments of whole documents.)"""
    pattern = DilatedPattern.dense()
    compiled = torch.compile(
        lambda x: dilated_attention(x, x, x, pattern),
        fullgraph=True,
        backend="aot_eager",
        dynamic=True,
    )
    for n in (17, 23):
        x = torch.randn(1, n, 2, 8)
        out = F.scaled_dot_product_attention(*[x.transpose(1, 2)] * 3).transpose(1, 2)
        torch.testing.assert_close(compiled(x), out)


def test_many_documents_without_keys():
    """More of them, and longer periods, than one could go through."""
    n = 2**17
    lengths = range(n - 2000, n + 2000)
    # a second period has keys of few heads
    with_keys = sum(64 + min(64, max(0, length - n)) for length in lengths)
    found = DilatedPattern((n,), (n,)).without_keys(64, lengths)
    assert found == (64 * sum(lengths) - with_keys, 64 * sum(lengths))


@pytest.mark.parametrize("is_causal", [False, True])
def test_a_dense_pattern_by_its_numbers(is_causal):
    """What plans, explains and scales it takes no length for an ordinary one."""
    pattern = DilatedPattern.dense(is_causal=is_causal)
    assert torch.equal(
        multiplicity(pattern, 50, 3),
        multiplicity(DilatedPattern((50,), (1,), is_causal=is_causal), 50, 3),
    )
    assert pairs(pattern, 50, 3) == 3 * (50 * 51 // 2 if is_causal else 50 * 50)
    assert pattern.without_keys(3, [50]) == (0, 150)
    assert pattern.without_keys(3)[0] == 0
    assert scaled_down(pattern, 10**6, 100) == (pattern, 100)
    assert hash(pattern) == hash(DilatedPattern.dense(is_causal=is_causal))


def test_a_dense_pattern_in_words():
    """Catches 4611686018427387904 in a message."""
    split, dense = DilatedPattern((8,), (3,), heads="split"), DilatedPattern.dense()
    for pattern, words in (
        (DilatedPattern.dense(is_causal=True), "DilatedPattern.dense(is_causal=True)"),
        (
            split,
            "DilatedPattern(segment_lengths=(8,), dilation_rates=(3,), is_causal=False, phase='modulo', heads='split')",
        ),
    ):
        assert repr(pattern) == words
        assert eval(words) == pattern
    expected = "branch 0 (w=whole document, r=1): all 4 heads read phases 0; every phase is read"
    assert dense.explain(4) == expected
    mixed = DilatedPattern((8, WHOLE_DOCUMENT), (1, 3))
    assert "branch 1 (w=whole document, r=3)" in mixed.explain(4)
    as_long = DilatedPattern((8, 50), (1, 3))
    assert torch.equal(multiplicity(mixed, 50, 3), multiplicity(as_long, 50, 3))


@pytest.mark.parametrize(
    ("arguments", "lengths", "rates"),
    [
        ({"max_len": 32768}, (2048, 4096, 8192, 16384, 32768), (1, 2, 4, 8, 16)),
        ({"max_len": 32769}, (2048, 4096, 8192, 16384, 32768, 32769), (1, 2, 4, 8, 16, 32)),
        ({"max_len": 10_000}, (2048, 4096, 8192, 10_000), (1, 2, 4, 8)),
        ({"max_len": 2048}, (2048,), (1,)),
        ({"max_len": 1000}, (1000,), (1,)),
        (
            {"max_len": torch.tensor(81), "first_length": 3, "ratio": 3},
            (3, 9, 27, 81),
            (1, 3, 9, 27),
        ),
    ],
)
def test_longnet_is_geometric_up_to_its_length(arguments, lengths, rates):
    pattern = DilatedPattern.longnet(**arguments)
    assert (pattern.segment_lengths, pattern.dilation_rates) == (lengths, rates)
    assert all(type(number) is int for number in pattern.segment_lengths + pattern.dilation_rates)


def test_longnet_takes_the_rules_of_a_pattern():
    for rules in ({"is_causal": True, "phase": "blocked"}, {"heads": "split"}):
        pattern = DilatedPattern.longnet(64, first_length=32, **rules)
        assert pattern == DilatedPattern((32, 64), (1, 2), **rules)
    assert DilatedPattern.longnet(LONGEST).segment_lengths[-1] == WHOLE_DOCUMENT


TOO_LONG = "must be at most 2**62 = 4611686018427387904, got {}: no sequence is that long."


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: DilatedPattern.longnet(0), "max_len must be an integer of at least 1, got 0."),
        (
            lambda: DilatedPattern.longnet(64, first_length=-1),
            "first_length must be an integer of at least 1, got -1.",
        ),
        (
            lambda: DilatedPattern.longnet(64, ratio=1),
            "ratio must be an integer of at least 2, got 1.",
        ),
        (
            lambda: DilatedPattern((LONGEST + 1,), (1,)),
            f"segment_lengths {TOO_LONG.format(LONGEST + 1)}",
        ),
        (lambda: DilatedPattern((8,), (2**64,)), f"dilation_rates {TOO_LONG.format(2**64)}"),
    ],
)
def test_refusals(make, message):
    assert message_of(make) == message


# A value of each field that is not its default. Whoever adds a field adds one here, and then sees who drops it.
OTHER_VALUES = {
    "segment_lengths": (8, 32),
    "dilation_rates": (1, 4),
    "window": 5,
    "is_causal": True,
    "phase": "blocked",
    "heads": "split",
}
CARRIERS = {
    "text": lambda pattern: DilatedPattern.from_text(pattern.text),
    "fields": lambda pattern: DilatedPattern(**json.loads(json.dumps(pattern.as_dict()))),
    "repr": lambda pattern: eval(repr(pattern)),
    "pickle": lambda pattern: pickle.loads(pickle.dumps(pattern)),
    "copy": copy.deepcopy,
    "torch's file": lambda pattern: loaded_by_torch(pattern),
    "layer": lambda pattern: copy.deepcopy(MultiheadDilatedAttention(8, 4, pattern)).pattern,
    "call": lambda pattern: Call.from_text(call_of(pattern).text).pattern,
    "LongNetConfig": lambda pattern: config_of(pattern).pattern,
    "LongNetConfig as JSON": lambda pattern: (
        LongNetConfig(**json.loads(json.dumps(asdict(config_of(pattern))))).pattern
    ),
    "state of a cache": lambda pattern: loaded(pattern).pattern,
}


def call_of(pattern):
    query, key, value = (torch.randn(1, 8, 4, 2) for _ in range(3))
    return validate.call_of(
        (query, key, value), pattern, None, None, None, "auto", False, None, None
    )


def loaded_by_torch(pattern):
    file = io.BytesIO()
    torch.save({"pattern": pattern}, file)
    file.seek(0)
    return torch.load(file, weights_only=True)["pattern"]


def config_of(pattern):
    rules = {name: value for name, value in pattern.as_dict().items() if name != "is_causal"}
    return LongNetConfig(**rules)


def loaded(pattern):
    """A cache that takes the state of another. It refuses the states of other patterns."""
    first, second = (DilatedCache(pattern, 1, 4, 4, 2) for _ in range(2))
    state = first.state_dict()
    second.load_state_dict(state)
    defaults = {item.name: item.default for item in fields(DilatedPattern)}
    defaults |= {"segment_lengths": (16, 64), "dilation_rates": (1, 2)}
    for name, default in defaults.items():
        if name != "is_causal" and getattr(pattern, name) != default:
            other = DilatedCache(replace(pattern, **{name: default}), 1, 4, 4, 2)
            assert "the state was saved from a cache of" in message_of(
                lambda o=other: o.load_state_dict(state)
            )
    return second


@pytest.mark.parametrize("carrier", CARRIERS)
@pytest.mark.parametrize("left_out", ["heads", "window", "phase"])
def test_a_pattern_travels_with_all_its_fields(carrier, left_out):
    """Catches a field that somebody forgets to carry: another function would be computed without a word."""
    assert set(OTHER_VALUES) == {item.name for item in fields(DilatedPattern)}
    values = {name: value for name, value in OTHER_VALUES.items() if name != left_out}
    if "heads" in values:  # "split" goes with neither
        values.pop("window", None)
        values.pop("phase", None)
    pattern = DilatedPattern(**values)
    assert CARRIERS[carrier](pattern) == pattern
