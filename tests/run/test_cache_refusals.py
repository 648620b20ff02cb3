"""What no cache takes: a ValueError each, after which the cache is as it was."""

import math

import pytest
import torch
from helpers import message_of

from ring_dilated_attention import (
    ContextParallel,
    DilatedCache,
    DilatedPattern,
    dilated_attention,
    simulate,
)
from ring_dilated_attention.run import dilated_cache

PATTERN = DilatedPattern((4, 12), (1, 3), is_causal=True)
OTHER = DilatedPattern((4, 12), (1, 2), is_causal=True)
DENSE = DilatedPattern.dense(is_causal=True)
VAST = DilatedPattern((2**40,), (1,), is_causal=True)
SIZES = {"pattern": PATTERN, "batch": 2, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8}


def make(**options):
    return DilatedCache(**{**SIZES, **options})


def check_message(message, fragments):
    """It has every fragment ("one ... another"), and is a sentence of some words."""
    assert [x for x in fragments.split(" ... ") if x not in message] == [], message
    assert len(message.split()) > 3
    assert message.endswith(".")


# What is refused in whatever words.
NO_CACHES = [
    {"pattern": "dense"},
    {"batch": 0},
    {"batch": 2**50},
    {"head_dim": None},
    {"dtype": torch.float8_e4m3fn},
    {"keep": 2**62},
    {"heads_held": range(0)},
    {"heads_held": range(2, 9)},
    {"heads_held": range(0, 4, 2)},
    {"heads_held": [0, 1]},
]


@pytest.mark.parametrize(
    ("options", "fragments"),
    [
        *[(options, "") for options in NO_CACHES],
        ({"pattern": DilatedPattern((8,), (1,))}, "needs a causal pattern"),
        ({"pattern": DENSE}, "bytes ... Give max_len, which no buffer"),
        ({"pattern": VAST}, "2 * 2 * 2,199,023,255,552 * 8 * 4 = 281,474,976,710,656 bytes"),
        ({"num_heads": 3}, "3 query heads ... 2 key/value heads"),
        ({"max_len": 0}, "max_len=0 ... an integer of at least 1 ... None"),
        ({"keep": -1}, "keep=-1 ... an integer of at least 0"),
        ({"heads_held": range(1, 3)}, "heads_held=range(1, 3) ... share a key/value head"),
    ],
    ids=str,
)
def test_a_cache_that_cannot_be(options, fragments):
    check_message(message_of(lambda: make(**options)), fragments)


def test_memory_that_is_not_there(monkeypatch):
    assert make(pattern=VAST, max_len=10).num_rows == 20
    monkeypatch.setattr(dilated_cache, "free_bytes", lambda device: 1000)
    message = message_of(lambda: make(pattern=VAST, max_len=100))
    check_message(message, "and 1,000 are free on cpu. Give a smaller max_len")


def rows(num=1, heads=(4, 2, 2), batch=2, **options):
    return [torch.zeros(batch, num, h, 8, **options) for h in heads]


def appended(cache, given=None, pattern=PATTERN, **options):
    return dilated_attention(*(given or rows(2)), pattern, cache=cache, **options)


def after(num, **options):
    """A cache that has so many positions."""
    cache = make(**options)
    appended(cache, rows(num))
    return cache


def loaded(cache, **changes):
    cache.load_state_dict(cache.state_dict() | changes)


BORDERS = torch.tensor([0, 2], dtype=torch.int32)
LENGTHS = "lengths must be an integer tensor (2,)"


NO_CALLS = [
    lambda c: appended(c, heads_held=range(2), num_heads=4),
    lambda c: appended(c, num_heads=8, heads_held=range(4)),
    lambda c: appended(c, parallel=simulate.all_ranks(2)),
    lambda c: appended(c, scale=math.nan),
    lambda c: appended(c, backend="sdpa"),
    lambda c: c.crop([]),
    lambda c: c.crop(2**70),
    lambda c: c.crop(torch.tensor([math.nan, 1])),
    lambda c: c.fork([]),
    lambda c: c.fork(torch.tensor([[0, 1]])),
    lambda c: c.fork(None),
    lambda c: c.load_state_dict(None),
    lambda c: c.load_state_dict({"cache": c.state_dict()["cache"]}),
    lambda c: loaded(c, rows=None),
    lambda c: loaded(c, rows=[x.double() for x in c.state_dict()["rows"]]),
    lambda c: loaded(c, progress=[[5], [0]]),
    lambda c: loaded(c, progress=torch.tensor([[5.0, 5.0], [0.0, 0.0]])),
    lambda c: loaded(c, progress=torch.tensor([[5, 5], [6, 6]])),
    lambda c: loaded(c, progress=torch.tensor([[-1, 7], [0, 0]])),
    lambda c: loaded(c, keep=-1),
]


@pytest.mark.parametrize(
    ("call", "fragments"),
    [
        *[(call, "") for call in NO_CALLS],
        # the call is not of this cache
        (lambda c: appended(c, pattern=OTHER), "(1, 3) ... (1, 2) ... Make a cache for each"),
        (lambda c: appended(c, rows(batch=1)), "made for batch 2 ... has 1"),
        (
            lambda c: appended(
                make(heads_held=range(2)), rows(1, (2, 1, 1)), heads_held=range(2, 4), num_heads=4
            ),
            "made for first head held 0, and the call has 2",
        ),
        (lambda c: appended(c, rows(heads=(2, 2, 2))), "made for heads 4 ... has 2"),
        (lambda c: appended(c, rows(heads=(4, 1, 1))), "made for key/value heads 2 ... has 1"),
        (lambda c: appended(c, [x[..., :4] for x in rows()]), "made for head dim 8 ... has 4"),
        (lambda c: appended(c, rows(dtype=torch.float64)), "dtype torch.float32 ... float64"),
        (lambda c: appended(c, rows(device="meta")), "made for device cpu, and the call has meta"),
        (
            lambda c: appended(c, rows(3)),
            "max_len=9 ... has 7 ... 3 more there would be 10 ... max_len=10",
        ),
        # options that no cache goes with
        (lambda c: appended(c, cu_seqlens=BORDERS), "cu_seqlens packs"),
        (
            lambda c: appended(make(batch=1), rows(2, batch=1), cu_seqlens=BORDERS),
            "cache and cu_seqlens ... Leave out cu_seqlens",
        ),
        (lambda c: appended(c, parallel=ContextParallel()), "cache and parallel ... .gather"),
        (lambda c: appended(c, [rows(requires_grad=True)[0], *rows()[1:]]), "has no gradient"),
        (lambda c: appended(c, [*rows()[:2], rows(requires_grad=True)[2]]), "torch.no_grad()"),
        (lambda c: appended("cache"), "cache must be a DilatedCache or None ... 'cache'"),
        # lengths
        (lambda c: appended(None, lengths=torch.tensor([1, 1])), "no cache was passed: pass cache"),
        (lambda c: appended(c, lengths=[1, 1]), f"{LENGTHS} ... [1, 1]"),
        (lambda c: appended(c, lengths=torch.tensor([1])), f"{LENGTHS} ... torch.int64 (1,)"),
        (lambda c: appended(c, lengths=torch.tensor([1.0, 1])), f"{LENGTHS} ... float32"),
        (lambda c: appended(c, lengths=torch.tensor([True, True])), LENGTHS),
        (
            lambda c: appended(c, lengths=torch.tensor([1, 3])),
            "between 0 and the 2 rows ... [1, 3]",
        ),
        (lambda c: appended(c, lengths=torch.tensor([1, -1])), "between 0 and ... [1, -1]"),
        (lambda c: appended(c, lengths=torch.tensor([2**62, 1])), "between 0 and"),
        # positions and entries
        (lambda c: c.crop(8), "crop(8) ... has 7 positions ... Crop 0 to 7"),
        (
            lambda c: c.crop([3, 4]),
            "crop(4) ... sequence 1 ... to 3 positions ... Crop at most 3 ... keep=4 (it has keep=0)",
        ),
        (lambda c: after(12).crop(1), "crop(1)"),  # 12 ends a segment of each branch
        (lambda c: c.crop([1, 1, 1]), "3 numbers ... 2 entries"),
        (lambda c: c.crop([1.0, 0.0]), "crop([1.0, 0.0]) ... whole numbers"),
        (lambda c: c.reset([2]), "reset([2]) ... 0 to 1"),
        (lambda c: c.reset([0.5]), "reset([0.5]) ... numbers of batch entries"),
        (lambda c: c.reset(torch.tensor([False, True])), "[False, True] ... nonzero().flatten()"),
        (lambda c: c.fork([0, -1]), "fork([0, -1]) ... 0 to 1"),
        # states
        (
            lambda c: c.load_state_dict(after(10).state_dict()),
            "has 10 ... max_len=9 ... max_len=10",
        ),
        (
            lambda c: c.load_state_dict(make(head_dim=4).state_dict()),
            "'head_dim': 4 ... 'head_dim': 8",
        ),
        (lambda c: loaded(c, rows=c.state_dict()["rows"] * 2), "4 sequences ... needs 1 or 2"),
        (lambda c: loaded(c, rows=[x[:, 1:] for x in c.state_dict()["rows"]]), "damaged ... 7"),
    ],
)
def test_what_cannot_be_done_with_a_cache(call, fragments):
    """Catches a call that is accepted and computes something else, torch's and Python's own errors, masks that pass for
    lengths, and a cache that is changed before the call is refused."""
    cache = after(7, max_len=9)
    memory, progress = cache.memory.clone(), cache.progress.clone()
    check_message(message_of(lambda: call(cache)), fragments)
    assert torch.equal(cache.memory.nan_to_num(7), memory.nan_to_num(7))
    assert torch.equal(cache.progress, progress)


def test_without_a_recorded_gradient_any_row_is_taken():
    cache = make()
    with torch.no_grad():
        appended(cache, rows(2, requires_grad=True))
    assert cache.position.tolist() == [2, 2]
