"""A prefill over ranks, and decoding on one of them or on each: DilatedCache.gather."""

from functools import partial

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
from ring_dilated_attention.plan.sharding import (
    SHARDINGS,
    WITHOUT_DOCUMENTS,
    ShardSpec,
    make_shards,
)
from ring_dilated_attention.run import append

PATTERN = DilatedPattern((4, 9, 30), (1, 2, 4), window=7, is_causal=True)
SIZES = (2, 4, 2, 8)  # batch, heads, key/value heads, head dim


def sequence(seq_len):
    return whole(seq_len, heads=(4, 2, 2), batch=2)


def rank_hands_over(rank, world_size, sharding, lengths, seq_len, keep, to, held):
    """A cache has, to the bit, the rows that a prefill on one device leaves, and only these are sent. How many rows
    this rank sent, and how many there are."""
    parallel = ContextParallel(sharding=sharding, lengths=lengths)
    kv, heads = slice(held.start // 2, held.stop // 2), slice(held.start, held.stop)
    of_heads = [x[:, :, s] for x, s in zip(sequence(seq_len + 1), (heads, kv, kv), strict=True)]
    query, key, value = (x[:, :seq_len] for x in of_heads)
    options = {"keep": keep, "heads_held": held}
    alone = DilatedCache(PATTERN, *SIZES, dtype=torch.float64, **options)
    attend = partial(dilated_attention, heads_held=held, num_heads=SIZES[1], pattern=PATTERN)
    attend(query, key, value, cache=alone)
    caches, local = [], (parallel.shard(key), parallel.shard(value))

    def gather():
        cache = DilatedCache.gather(parallel, *local, PATTERN, SIZES[1], to=to, **options)
        caches.append(cache)

    sent = allocated(gather).sent_bytes
    plan = alone.plan
    shard = parallel.ranks.shards(parallel.ranks.lengths_of(seq_len))[rank]
    own = plan.kept_of(shard, seq_len)
    num_rows = sum(len(buffers.kv_heads) * len(numbers) for buffers, numbers, _ in own)
    if to is not None:
        bytes_of_a_row = 2 * SIZES[0] * SIZES[3] * 8
        assert sent == (num_rows * bytes_of_a_row if rank != to else 0)
    [cache] = caches
    assert (cache is None) == (to not in (None, rank))
    if cache is not None:
        ours, theirs = cache.state_dict(), alone.state_dict()
        assert torch.equal(ours["progress"], theirs["progress"])
        assert all(map(torch.equal, ours["rows"], theirs["rows"]))  # to the bit: rows are copied
        token = [x[:, seq_len:] for x in of_heads]
        assert torch.equal(attend(*token, cache=cache), attend(*token, cache=alone))
    num_all = sum(len(x.kv_heads) * len(plan.kept(x, seq_len)) for x in plan.buffers)
    return num_rows, num_all


@pytest.mark.parametrize(
    ("world_size", "sharding", "lengths", "seq_len", "keep", "to", "held"),
    [
        (2, "contiguous", None, 29, 0, 1, range(4)),
        (2, "zigzag", None, 61, 5, 1, range(2, 4)),
        (3, "contiguous", (1, 0, 49), 50, 3, 0, range(4)),
        # ends segments of all branches: nothing lives on but what the window sees
        (4, "zigzag", None, 180, 0, None, range(4)),
    ],
)
def test_ranks_hand_over(world_size, sharding, lengths, seq_len, keep, to, held):
    """Catches rows that are missing or lie elsewhere than after a prefill on one device, and a gather of everything."""
    found = run(world_size, rank_hands_over, sharding, lengths, seq_len, keep, to, held)
    num_rows, [num_all, *_] = zip(*found, strict=True)
    assert sum(num_rows) == num_all


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_any_shards_hand_over(data):
    """The same without processes, for any pattern and any shards: what ranks pack is what a cache of all rows keeps."""
    pattern = data.draw(patterns(4, longest=20, highest_rate=20, is_causal=True))
    lengths = data.draw(st.lists(st.integers(0, 30), min_size=1, max_size=4).filter(any))
    sharding = data.draw(st.sampled_from(WITHOUT_DOCUMENTS))
    seq_len, keep = sum(lengths), data.draw(st.sampled_from([0, 3, 25]))
    if not SHARDINGS[sharding].takes_lengths:
        lengths = ShardSpec(sharding, len(lengths)).default_lengths(seq_len)
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


def rank_errs(rank, world_size):
    parallel = ContextParallel(timeout=PATIENCE)
    _, key, value = (parallel.shard(x) for x in sequence(12))
    right = {"key": key, "value": value, "pattern": PATTERN, "num_heads": 4}

    def gather(changes):
        return DilatedCache.gather(parallel, **right | changes)

    # A gloo process that receives twice the bytes that it waits for is killed.
    mistakes = [
        ({"keep": -1}, "keep=-1 must be an integer"),
        ({"to": 2}, "to=2: the ranks are 0 to 1"),
        ({"value": value[:, 1:]}, "must have the same shape"),
        ({"value": value.float()}, "must have the same shape"),
        ({"key": None}, "has no attribute"),
    ]
    check_refused(rank, world_size, [(gather, {}, changes, said) for changes, said in mistakes])
    message = message_of(lambda: gather({"to": rank}))
    assert "ranks disagree on to: rank 0 has 0, rank 1 has 1" in message
    assert "max_len=11" in message_of(lambda: gather({"max_len": 11}))
    assert gather({}).position.tolist() == [12, 12]  # the context is whole


def test_refusals_are_everybodys():
    """Catches a rank that waits for one that has refused."""
    run(2, rank_errs)


def test_simulated_ranks_hand_over():
    """Catches a context without connections, which holds the whole sequence."""
    inputs, alone = sequence(20), DilatedCache(PATTERN, *SIZES, dtype=torch.float64)
    dilated_attention(*inputs, PATTERN, cache=alone)
    cache = DilatedCache.gather(simulate.all_ranks(3), *inputs[1:], PATTERN, SIZES[1])
    assert all(map(torch.equal, cache.state_dict()["rows"], alone.state_dict()["rows"]))
