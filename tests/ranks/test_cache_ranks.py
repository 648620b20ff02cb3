"""A prefill over ranks, and decoding on one of them or on each: DilatedCache.gather."""

import time
from functools import partial
from unittest import mock

import pytest
import torch
from definition import PATIENCE, check_refused, whole
from distributed import run
from drawn import patterns
from helpers import message_of
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.measure import allocated
from ring_dilated_attention import (
    ContextParallel,
    DilatedCache,
    DilatedPattern,
    dilated_attention,
    simulate,
)
from ring_dilated_attention.plan.cache_plan import plan_cache
from ring_dilated_attention.plan.sharding import ShardSpec, make_shards
from ring_dilated_attention.ranks.link import ExchangeError
from ring_dilated_attention.reference import dilated_attention_reference
from ring_dilated_attention.run import append
from ring_dilated_attention.run import dilated_cache as cache

PATTERN = DilatedPattern((4, 9, 30), (1, 2, 4), window=7, is_causal=True)
SIZES = (2, 4, 2, 8)  # batch, heads, key/value heads, head dim


def sequence(seq_len):
    return whole(seq_len, heads=(4, 2, 2), batch=2)


def prefill_and_decode(rank, world_size, sharding, lengths, seq_len, keep, to, held):
    """Sharded prefill, hand-over, six tokens more on every rank that got a cache; both compared with the definition."""
    parallel = ContextParallel(sharding=sharding, lengths=lengths)
    inputs = sequence(seq_len + 6)
    exact, _ = dilated_attention_reference(*inputs, PATTERN)
    kv, heads = slice(held.start // 2, held.stop // 2), slice(held.start, held.stop)
    inputs = [x[:, :, s] for x, s in zip(inputs, (heads, kv, kv), strict=True)]
    exact, of = exact[:, :, heads], {"heads_held": held, "num_heads": SIZES[1]}

    def attend(start, stop, cache):
        rows = [x[:, start:stop] for x in inputs]
        found = dilated_attention(*rows, PATTERN, cache=cache, **of)
        torch.testing.assert_close(found, exact[:, start:stop], rtol=1e-11, atol=1e-11)

    query, key, value = (parallel.shard(x[:, :seq_len]) for x in inputs)
    out = dilated_attention(query, key, value, PATTERN, parallel=parallel, **of)
    torch.testing.assert_close(parallel.unshard(out), exact[:, :seq_len], rtol=1e-11, atol=1e-11)
    options = {"keep": keep, "heads_held": held}
    cache = DilatedCache.gather(parallel, key, value, PATTERN, SIZES[1], to=to, **options)
    assert (cache is None) == (to not in (None, rank))
    if cache is None:
        return
    alone = DilatedCache(PATTERN, *SIZES, dtype=torch.float64, **options)
    attend(0, seq_len, alone)
    ours, theirs = cache.state_dict(), alone.state_dict()
    assert torch.equal(ours["progress"], theirs["progress"])
    assert all(map(torch.equal, ours["rows"], theirs["rows"]))  # to the bit: rows are copied
    back = min(keep, 2)
    cache.crop(back)
    for t in range(seq_len - back, seq_len + 6):
        attend(t, t + 1, cache)


@pytest.mark.parametrize(
    ("world_size", "sharding", "lengths", "seq_len", "keep", "to", "held"),
    [
        (2, "contiguous", None, 53, 0, None, range(4)),
        (2, "zigzag", None, 61, 5, 1, range(2, 4)),
        (3, "contiguous", (1, 0, 49), 50, 3, 0, range(4)),
        (
            4,
            "zigzag",
            None,
            180,
            0,
            None,
            range(4),
        ),  # ends segments of all branches: nothing lives on
    ],
)
def test_ranks_hand_over(world_size, sharding, lengths, seq_len, keep, to, held):
    """Catches rows that are missing, or lie elsewhere than after a prefill on one device."""
    run(world_size, prefill_and_decode, sharding, lengths, seq_len, keep, to, held)


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_any_shards_hand_over(data):
    """The same without processes, for any pattern and any shards: what ranks pack is what a cache of all rows keeps."""
    pattern = data.draw(patterns(4, longest=20, highest_rate=20, is_causal=True))
    lengths = data.draw(st.lists(st.integers(0, 30), min_size=1, max_size=4).filter(any))
    sharding = data.draw(st.sampled_from(["contiguous", "zigzag"]))
    seq_len, keep = sum(lengths), data.draw(st.sampled_from([0, 3, 25]))
    if sharding == "zigzag":
        lengths = ShardSpec("zigzag", len(lengths)).default_lengths(seq_len)
    query, key, value = sequence(seq_len)
    expected, found = (
        DilatedCache(pattern, *SIZES, dtype=torch.float64, keep=keep) for _ in range(2)
    )
    dilated_attention(query, key, value, pattern, cache=expected)
    found.progress.copy_(expected.progress)
    for shard in make_shards(sharding, lengths):
        rows = [torch.cat([x[:, a:b] for a, b in shard] or [x[:, :0]], dim=1) for x in (key, value)]
        flat = append.packed(found.plan, shard, seq_len, *rows)
        assert len(flat) == append.packed_size(found.plan, shard, seq_len, key)
        append.unpack(found.plan, shard, seq_len, flat, found.memory)
    for x, y in zip(found.state_dict()["rows"], expected.state_dict()["rows"], strict=True):
        assert torch.equal(x, y)


def count_bytes(rank, world_size, seq_len):
    parallel = ContextParallel()
    _, key, value = (parallel.shard(x).float() for x in sequence(seq_len))
    gather = partial(DilatedCache.gather, parallel, key, value, PATTERN, SIZES[1], to=1)
    sent = allocated(gather).sent_bytes
    plan = plan_cache(PATTERN, *SIZES[1:3])
    own = plan.kept_of(parallel.ranks.shards(parallel.ranks.lengths_of(seq_len))[rank], seq_len)
    rows = sum(len(buffers.kv_heads) * len(numbers) for buffers, numbers, _ in own)
    assert sent == (rows * 2 * SIZES[0] * SIZES[3] * 4 if rank != 1 else 0)
    return rows


def test_only_rows_that_live_on_are_sent():
    """Catches a gather of everything: what a rank sends is its rows that are kept, and together they are all."""
    rows = run(2, count_bytes, 29)
    plan = plan_cache(PATTERN, *SIZES[1:3])
    assert sum(rows) == sum(
        len(buffers.kv_heads) * len(plan.kept(buffers, 29)) for buffers in plan.buffers
    )
    assert min(rows) > 0


def rank_errs(rank, world_size):
    parallel = ContextParallel(timeout=PATIENCE)
    _, key, value = (parallel.shard(x) for x in sequence(12))
    right = {"key": key, "value": value, "pattern": PATTERN, "num_heads": 4}

    def gather(changes):
        return DilatedCache.gather(parallel, **right | changes)

    # A gloo process that receives twice the bytes that it waits for is killed.
    alike = "must have the same shape"
    cases = [
        (gather, {}, changes, words)
        for changes, words in (
            ({"keep": -1}, "keep=-1 must be an integer"),
            ({"to": 2}, "to=2: the ranks are 0 to 1"),
            ({"to": "0"}, "to='0': the ranks are 0 to 1"),
            ({"value": value[:, 1:]}, alike),
            ({"value": value.float()}, alike),
            ({"pattern": None}, "pattern must be a DilatedPattern, got None"),
            ({"num_heads": 0}, "num_heads=0 must be"),
            ({"heads_held": range(0)}, "heads_held=range(0, 0) is not"),
            ({"key": None}, "has no attribute"),
        )
    ]
    check_refused(rank, world_size, cases)
    message = message_of(lambda: gather({"to": rank}))
    assert "ranks disagree on to: rank 0 has 0, rank 1 has 1" in message
    message = message_of(lambda: gather({"max_len": 11}))
    assert "max_len=11" in message
    assert "would be 12" in message
    assert gather({}).position.tolist() == [12, 12]  # the context is whole


def test_refusals_are_everybodys():
    """Catches a rank that waits for one that has refused."""
    run(2, rank_errs)


def fail_to_pack(rank, world_size):
    parallel = ContextParallel(timeout=PATIENCE)
    _, key, value = (parallel.shard(x) for x in sequence(29))
    gather = partial(DilatedCache.gather, parallel, key, value, PATTERN, 4)
    began = time.monotonic()
    if rank == 1:
        with mock.patch.object(cache, "packed", side_effect=MemoryError("no more")):
            message_of(gather, MemoryError)
    else:
        message_of(gather, ExchangeError)
    assert time.monotonic() - began < PATIENCE.total_seconds() / 2


def test_a_rank_that_fails_is_not_waited_for():
    """Catches a rank that runs out of memory between the handshake and its message."""
    run(2, fail_to_pack)


def test_one_device_and_simulated_ranks():
    """Catches a context without connections, which holds the whole sequence."""
    inputs = sequence(20)
    for parallel in (ContextParallel(), simulate.all_ranks(3)):
        cache = DilatedCache.gather(parallel, *inputs[1:], PATTERN, SIZES[1])
        alone = DilatedCache(PATTERN, *SIZES, dtype=torch.float64)
        dilated_attention(*inputs, PATTERN, cache=alone)
        assert all(map(torch.equal, cache.state_dict()["rows"], alone.state_dict()["rows"]))
