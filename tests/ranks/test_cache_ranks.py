"""A prefill over ranks, and decoding on one of them or on each: DilatedCache.gather."""

import time
from unittest import mock

import pytest
import torch
from distributed import run
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


def whole(seq_len, dtype=torch.float64):
    """The same on every rank."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(SIZES[0], seq_len, h, SIZES[3]) for h in (SIZES[1], SIZES[2], SIZES[2])]
    return [torch.randn(shape, generator=generator, dtype=dtype) for shape in shapes]


def prefill_and_decode(rank, world_size, sharding, lengths, seq_len, keep, to, held=None):
    """Sharded prefill, hand-over, six tokens more on every rank that got a cache; both compared with the definition."""
    parallel = ContextParallel(sharding=sharding, lengths=lengths)
    inputs = whole(seq_len + 6)
    exact, _ = dilated_attention_reference(*inputs, PATTERN)
    of = {} if held is None else {"heads_held": held, "num_heads": SIZES[1]}
    if held is not None:
        kv = slice(held.start // 2, held.stop // 2)
        inputs = [
            x[:, :, s] for x, s in zip(inputs, (slice(held.start, held.stop), kv, kv), strict=True)
        ]
        exact = exact[:, :, held.start : held.stop]
    query, key, value = (parallel.shard(x[:, :seq_len]) for x in inputs)
    out = dilated_attention(query, key, value, PATTERN, parallel=parallel, **of)
    torch.testing.assert_close(parallel.unshard(out), exact[:, :seq_len], rtol=1e-11, atol=1e-11)
    cache = DilatedCache.gather(
        parallel, key, value, PATTERN, SIZES[1], to=to, keep=keep, heads_held=held
    )
    assert (cache is None) == (to not in (None, rank))
    if cache is None:
        return
    alone = DilatedCache(PATTERN, *SIZES, dtype=torch.float64, keep=keep, heads_held=held)
    dilated_attention(*(x[:, :seq_len] for x in inputs), PATTERN, cache=alone, **of)
    ours, theirs = cache.state_dict(), alone.state_dict()
    assert torch.equal(ours["progress"], theirs["progress"])
    assert all(map(torch.equal, ours["rows"], theirs["rows"]))  # to the bit: rows are copied
    back = min(keep, 2)
    cache.crop(back)
    for t in range(seq_len - back, seq_len + 6):
        out = dilated_attention(*(x[:, t : t + 1] for x in inputs), PATTERN, cache=cache, **of)
        torch.testing.assert_close(out, exact[:, t : t + 1], rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize(
    ("world_size", "sharding", "lengths", "seq_len", "keep", "to", "held"),
    [
        (2, "contiguous", None, 53, 0, None, None),
        (2, "zigzag", None, 61, 5, 1, range(2, 4)),
        (3, "contiguous", (1, 0, 49), 50, 3, 0, None),
        (4, "zigzag", None, 180, 0, None, None),  # ends segments of all branches: nothing lives on
    ],
)
def test_ranks_hand_over(world_size, sharding, lengths, seq_len, keep, to, held):
    """Catches rows that are missing, or lie elsewhere than after a prefill on one device."""
    run(world_size, prefill_and_decode, sharding, lengths, seq_len, keep, to, held)


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_any_shards_hand_over(data):
    """The same without processes, for any pattern and any shards: what ranks pack is what a cache of all rows keeps."""
    num_branches = data.draw(st.integers(1, 3))
    integers = st.lists(st.integers(1, 20), min_size=num_branches, max_size=num_branches)
    pattern = DilatedPattern(data.draw(integers), data.draw(integers), is_causal=True)
    lengths = data.draw(st.lists(st.integers(0, 30), min_size=1, max_size=4).filter(any))
    sharding = data.draw(st.sampled_from(["contiguous", "zigzag"]))
    seq_len, keep = sum(lengths), data.draw(st.sampled_from([0, 3, 25]))
    if sharding == "zigzag":
        lengths = ShardSpec("zigzag", len(lengths)).default_lengths(seq_len)
    _, key, value = whole(seq_len)
    expected = DilatedCache(pattern, 2, 4, 2, 8, dtype=torch.float64, keep=keep)
    dilated_attention(whole(seq_len)[0], key, value, pattern, cache=expected)
    found = DilatedCache(pattern, 2, 4, 2, 8, dtype=torch.float64, keep=keep)
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
    _, key, value = (parallel.shard(x) for x in whole(seq_len, torch.float32))
    sent = allocated(
        lambda: DilatedCache.gather(parallel, key, value, PATTERN, SIZES[1], to=1)
    ).sent_bytes
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


def disagree(rank, world_size):
    parallel = ContextParallel()
    _, key, value = (parallel.shard(x) for x in whole(12))
    with pytest.raises(ValueError, match=r"ranks disagree on to: rank 0 has 0, rank 1 has 1"):
        DilatedCache.gather(parallel, key, value, PATTERN, 4, to=rank)
    with pytest.raises(ValueError, match=r"keep=-1 must be an integer"):
        DilatedCache.gather(parallel, key, value, PATTERN, 4, keep=-rank)
    with pytest.raises(ValueError, match=r"to=2: the ranks are 0 to 1"):
        DilatedCache.gather(parallel, key, value, PATTERN, 4, to=2)
    with pytest.raises(ValueError, match=r"must both be"):
        DilatedCache.gather(parallel, key, value[:, 1:], PATTERN, 4)
    # A gloo process that receives twice the bytes that it waits for is killed.
    with pytest.raises(
        ValueError, match=r"must both be .*, alike: .*torch\.float64.* and .*torch\.float32"
    ):
        DilatedCache.gather(parallel, key, [value, value.float()][rank], PATTERN, 4)
    with pytest.raises(ValueError, match=r"pattern must be a DilatedPattern, got None"):
        DilatedCache.gather(parallel, key, value, [PATTERN, None][rank], 4)
    with pytest.raises(ValueError, match=r"num_heads=0 must be"):
        DilatedCache.gather(parallel, key, value, PATTERN, [4, 0][rank])
    with pytest.raises(ValueError, match=r"heads_held=range\(0, 0\) are not"):
        DilatedCache.gather(parallel, key, value, PATTERN, 4, heads_held=[None, range(0)][rank])
    with pytest.raises(ValueError, match=r"to='0': the ranks are 0 to 1"):
        DilatedCache.gather(parallel, key, value, PATTERN, 4, to=[0, "0"][rank])
    with pytest.raises(ValueError, match=r"has no attribute"):
        DilatedCache.gather(parallel, [key, None][rank], value, PATTERN, 4)
    with pytest.raises(ValueError, match=r"max_len=11.*would be 12"):
        DilatedCache.gather(parallel, key, value, PATTERN, 4, max_len=11)
    cache = DilatedCache.gather(parallel, key, value, PATTERN, 4)  # the context is whole
    assert cache.position.tolist() == [12, 12]


def test_refusals_are_everybodys():
    """Catches a rank that waits for one that has refused."""
    run(2, disagree)


def fail_to_pack(rank, world_size):
    parallel = ContextParallel()
    _, key, value = (parallel.shard(x) for x in whole(29))
    if rank == 1:
        with (
            mock.patch.object(cache, "packed", side_effect=MemoryError("no more")),
            pytest.raises(MemoryError),
        ):
            DilatedCache.gather(parallel, key, value, PATTERN, 4)
        return 0.0
    began = time.monotonic()
    with pytest.raises(ExchangeError):
        DilatedCache.gather(parallel, key, value, PATTERN, 4)
    return time.monotonic() - began


def test_a_rank_that_fails_is_not_waited_for():
    """Catches a rank that runs out of memory between the handshake and its message: the default timeout is ten
    minutes."""
    assert max(run(2, fail_to_pack)) < 20


def test_one_device_and_simulated_ranks():
    """Catches a context without connections, which holds the whole sequence."""
    inputs = whole(20)
    for parallel in (ContextParallel(), simulate.all_ranks(3)):
        cache = DilatedCache.gather(parallel, *inputs[1:], PATTERN, SIZES[1])
        alone = DilatedCache(PATTERN, *SIZES, dtype=torch.float64)
        dilated_attention(*inputs, PATTERN, cache=alone)
        assert all(map(torch.equal, cache.state_dict()["rows"], alone.state_dict()["rows"]))
