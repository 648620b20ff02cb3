"""What no cache takes, beside the messages of test_cache.py: a ValueError each, after which the cache is as it was."""

import math

import pytest
import torch

from ring_dilated_attention import (
    ContextParallel,
    DilatedCache,
    DilatedPattern,
    dilated_attention,
    simulate,
)

PATTERN = DilatedPattern((4, 12), (1, 3), is_causal=True)
SIZES = {"pattern": PATTERN, "batch": 2, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8}


def rows(num=1, heads=(4, 2, 2)):
    return [torch.zeros(2, num, h, 8) for h in heads]


@pytest.mark.parametrize(
    "options",
    [
        {"pattern": "dense"},
        {"batch": True},
        {"batch": 0},
        {"batch": -1},
        {"batch": "2"},
        {"batch": 2**50},
        {"num_heads": 0},
        {"num_kv_heads": 0},
        {"head_dim": None},
        {"head_dim": 4.5},
        {"dtype": "float32"},
        {"dtype": torch.int8},
        {"dtype": torch.float8_e4m3fn},
        {"max_len": True},
        {"max_len": 0},
        {"max_len": 9.0},
        {"keep": -1},
        {"keep": 0.0},
        {"keep": False},
        {"keep": None},
        {"keep": 2**62},
        {"heads_held": range(0)},
        {"heads_held": range(2, 9)},
        {"heads_held": range(-2, 0)},
        {"heads_held": range(0, 4, 2)},
        {"heads_held": [0, 1]},
        {"heads_held": 4},
        {"heads_held": slice(0, 2)},
    ],
    ids=str,
)
def test_a_cache_that_cannot_be(options):
    with pytest.raises(ValueError, match=r"\w+ \w+ .*\w+"):
        DilatedCache(**{**SIZES, **options})


def appended(cache, given=None, **options):
    return dilated_attention(*(given or rows()), PATTERN, cache=cache, **options)


def loaded(cache, **changes):
    cache.load_state_dict(cache.state_dict() | changes)


def gathered(*given, num_heads=4, **options):
    return DilatedCache.gather(ContextParallel(), *given, num_heads, **options)


KEY, VALUE = rows()[1:]


@pytest.mark.parametrize(
    "call",
    [
        lambda c: appended(c, [x.to("meta") for x in rows()]),
        lambda c: appended(c, parallel=simulate.all_ranks(2)),
        lambda c: appended(c, heads_held=range(2), num_heads=4),
        lambda c: appended(c, num_heads=8, heads_held=range(4)),
        lambda c: appended(c, lengths=torch.tensor([2**62, 1])),
        lambda c: appended(c, lengths=torch.tensor([True, True])),
        lambda c: appended(c, lengths=torch.tensor([1j, 1])),
        lambda c: appended(c, scale=math.nan),
        lambda c: appended(c, backend="sdpa"),
        lambda c: c.crop([]),
        lambda c: c.crop(True),
        lambda c: c.crop("1"),
        lambda c: c.crop(None),
        lambda c: c.crop(2**70),
        lambda c: c.reset(0),
        lambda c: c.crop(torch.tensor([math.nan, 1])),
        lambda c: c.fork([]),
        lambda c: c.fork(torch.tensor([True, False])),
        lambda c: c.fork(torch.tensor([[0, 1]])),
        lambda c: c.fork("01"),
        lambda c: c.fork(None),
        lambda c: c.fork(torch.tensor(1)),
        lambda c: c.load_state_dict(None),
        lambda c: c.load_state_dict({}),
        lambda c: c.load_state_dict({"cache": c.state_dict()["cache"]}),
        lambda c: loaded(c, rows=None),
        lambda c: loaded(c, rows=[[1.0]]),
        lambda c: loaded(c, progress=[[5], [0]]),
        lambda c: loaded(c, progress=torch.tensor([[5.0, 5.0], [0.0, 0.0]])),
        lambda c: loaded(c, progress=torch.tensor([[5, 5], [6, 6]])),
        lambda c: loaded(c, rows=[]),
        lambda c: loaded(c, rows=[x.double() for x in c.state_dict()["rows"]]),
        lambda c: loaded(c, progress=torch.tensor([[-1, 7], [0, 0]])),
        lambda c: loaded(c, progress=torch.tensor([7, 7])),
        lambda c: loaded(c, keep=-1),
        lambda c: loaded(c, keep=None),
        lambda c: gathered(KEY, VALUE, PATTERN, to=1),
        lambda c: gathered(KEY, VALUE, PATTERN, num_heads=3),
        lambda c: gathered(*rows(5)[1:], PATTERN, max_len=4),
        lambda c: gathered(KEY, rows()[0], PATTERN),
        lambda c: gathered(KEY[0], VALUE[0], PATTERN),
        lambda c: gathered(None, None, PATTERN),
        lambda c: gathered(KEY, VALUE, None),
        lambda c: gathered(KEY, VALUE, PATTERN, num_heads=None),
    ],
)
def test_what_cannot_be_done_with_a_cache(call):
    """Catches torch's and Python's own errors, masks and complex numbers that pass for lengths, and a cache that is
    changed before the call is refused."""
    cache = DilatedCache(**SIZES, max_len=9)
    appended(cache, rows(7))
    memory, progress = cache.memory.clone(), cache.progress.clone()
    with pytest.raises(ValueError, match=r"\w+ \w+ .*\w+"):
        call(cache)
    assert torch.equal(cache.memory.nan_to_num(7), memory.nan_to_num(7))
    assert torch.equal(cache.progress, progress)
