"""The plan, without tensors or processes: together, all ranks compute the dense pattern, each pair exactly once."""

from collections import Counter

import pytest
from drawn import sharded_calls
from hypothesis import given, settings
from simulation import Simulation, dense_triples

from ring_dilated_attention.pattern import DilatedPattern
from ring_dilated_attention.plan import counts
from ring_dilated_attention.plan.exchange import plan_exchange
from ring_dilated_attention.plan.planner import make_plan
from ring_dilated_attention.plan.sharded_call import ShardedCall
from ring_dilated_attention.plan.sharding import (
    WITHOUT_DOCUMENTS,
    ShardSpec,
    deal_documents,
    documents_of,
    make_shards,
    shard_length,
    split_lengths,
)
from ring_dilated_attention.plan.step import Sizes


def check_plan(pattern, shards, num_heads, num_kv_heads, borders, held=None):
    """held: the query heads that the ranks hold, if not all; plans count from the first of them."""
    simulation = Simulation(pattern, shards, num_heads, num_kv_heads, borders, held)
    dense = dense_triples(pattern, borders, num_heads)
    if held is not None:
        dense = Counter({(h - held.start, i, j): c for (h, i, j), c in dense.items() if h in held})
    assert simulation.computed == dense
    for rank, home in enumerate(simulation.home):
        expected = Counter({x: c for x, c in dense.items() if simulation.owner[x[2]] == rank})
        assert home == expected, f"gradients of rank {rank}'s keys"
    for rank, plan in enumerate(simulation.plans):
        check_packed(simulation, rank, plan.local)


def check_packed(simulation, rank, tiles):
    """Own keys that are read from the buffer of own chunks are the tile's."""
    buffer = simulation.packed(rank)
    for tile in tiles:
        if tile.packed is not None:
            assert (tile.packed.num_rows, len(tile.packed.heads)) == (
                tile.key.num_rows,
                len(tile.key.heads),
            )
            (view,) = simulation.view(rank, tile.key)
            for i, (head, positions) in zip(tile.packed.heads, view, strict=True):
                unit = tile.packed.offset + i * tile.packed.num_rows
                assert [buffer[unit + j] for j in range(len(positions))] == [
                    (head, x) for x in positions
                ]


@pytest.mark.parametrize("world_size", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("sharding", WITHOUT_DOCUMENTS)
@pytest.mark.parametrize("is_causal", [False, True])
def test_tiles_cover_the_pattern_once(world_size, sharding, is_causal):
    """Catches a pair computed twice or never, a chunk that stops too early, a gradient that does not come home."""
    for borders, w, r, kwargs in [
        ((0, 37), (5, 40), (1, 3), {}),
        ((0, 11, 12, 37, 48), (8, 16, 48), (1, 2, 4), {"phase": "blocked"}),
        ((0, 41), (7, 19), (2, 4), {"heads": "split"}),
        ((0, 5), (9, 2), (1, 8), {}),
        ((0, 15, 41), (30,), (3,), {"window": 6}),
        ((0, 29), (), (), {"window": 23}),
    ]:
        pattern = DilatedPattern(w, r, is_causal=is_causal, **kwargs)
        shards = make_shards(sharding, ShardSpec(sharding, world_size).default_lengths(borders[-1]))
        for num_kv_heads in (4, 2):
            check_plan(pattern, shards, 4, num_kv_heads, borders)


@pytest.mark.parametrize(
    ("sharding", "is_causal"), [("contiguous", False), ("contiguous", True), ("zigzag", True)]
)
def test_own_tiles_of_a_ring_read_the_packed_chunk(sharding, is_causal):
    """Catches keys that are read H * D apart although they lie side by side in the chunk, which is packed anyway."""
    pattern = DilatedPattern((16, 64), (1, 2), is_causal=is_causal)
    shards = make_shards(sharding, ShardSpec(sharding, 2).default_lengths(64))
    for rank in range(2):
        plan = make_plan(ShardedCall(pattern, shards, 8, 4), rank)
        at_home = [tile for tile in plan.local if tile.key.step == 1]
        straddling = [tile for tile in plan.local if tile.key.step == 2]
        assert straddling
        assert all(tile.packed is not None for tile in straddling)
        assert all(tile.packed is None for tile in at_home)


@settings(max_examples=150, deadline=None)
@given(sharded_calls(longest=40))
def test_any_pattern_any_lengths_any_documents(sharded_call):
    """The same for drawn patterns, head counts, shards (some empty, some of many short spans), packed documents, and
    heads that are dealt to ranks (an all-to-all): phases go by the global head."""
    heads = (sharded_call.num_heads, sharded_call.num_kv_heads)
    check_plan(
        sharded_call.pattern, sharded_call.shards, *heads, sharded_call.borders, sharded_call.held
    )


@pytest.mark.parametrize("p", [4, 8, 16])
def test_bytes_follow_the_formula_of_the_design(p):
    """(g - 1) * 2 * B * ceil((n/p)/r) * H * D * itemsize per straddling branch, non-causal and aligned: constant when n
    and p grow together (the reports' promise), and nothing of segments that lie in shards."""
    local, heads, sizes = 64, 4, Sizes(3, 8, 4)
    pattern = DilatedPattern((32, 128, 256), (1, 2, 4))
    sharded_call = ShardedCall(pattern, make_shards("contiguous", (local,) * p), heads, heads)
    expected = sum(
        (w // local - 1) * 2 * 3 * (local // r) * heads * 8 * 4 for w, r in [(128, 2), (256, 4)]
    )
    for rank in range(p):
        plan = plan_exchange("ring", sharded_call, rank)
        assert plan.bytes_sent(sizes) == expected
        assert plan.bytes_sent(sizes, backward=True) == 2 * expected


def causal_plans(sharding, n, p):
    shards = make_shards(sharding, ShardSpec(sharding, p).default_lengths(n))
    sharded_call = ShardedCall(DilatedPattern.dense(is_causal=True), shards, 1, 1)
    plans = [make_plan(sharded_call, rank) for rank in range(p)]
    assert sum(plan.pairs for plan in plans) == n * (n + 1) // 2
    return plans


def test_zigzag_sends_a_quarter_less_than_whole_shards_around():
    """The later pieces, half of each shard, are met by the ranks below alone: on the average by half of all."""
    n, p = 4096, 8
    plans = causal_plans("zigzag", n, p)
    whole = 2 * n * (p - 1)
    assert sum(plan.sent()[0] for plan in plans) == whole * 3 // 4
    assert max(plan.chunk_size for plan in plans) == 2 * n // p  # and no more is held
    for hops in zip(*(plan.hops for plan in plans), strict=True):
        # nobody waits for anybody's work
        assert len({sum(tile.pairs for tile in hop.tiles) for hop in hops}) == 1


@pytest.mark.parametrize("n", [4096, 4001])
@pytest.mark.parametrize("p", [2, 3, 8])
def test_zigzag_is_balanced_for_dense_causal_attention(n, p):
    """The largest share of the work over the mean: 1 when 2p divides n, at most 1.02 otherwise; contiguous nearly 2."""

    def imbalance(sharding):
        pairs = [plan.pairs for plan in causal_plans(sharding, n, p)]
        return max(pairs) * p / sum(pairs)

    assert imbalance("zigzag") == 1 if n % (2 * p) == 0 else imbalance("zigzag") <= 1.02
    assert imbalance("contiguous") > 2 - 1.1 / p


def test_a_batch_that_comes_again_is_not_planned_again():
    shards, borders = make_shards("contiguous", split_lengths(64, 4)), [0, 7, 29, 64]
    sharded_calls = [
        ShardedCall(
            DilatedPattern.dense(is_causal=True), shards, 4, 4, documents_of(tuple(borders), 64)
        )
        for _ in range(2)
    ]
    assert plan_exchange("ring", sharded_calls[0], 2) is plan_exchange("ring", sharded_calls[1], 2)


def test_chunks_of_one_layout_share_their_tiles():
    """The plan of thousands of ranks is made in a moment since a rank's tiles at its hops are the same objects."""
    sharded_call = ShardedCall(
        DilatedPattern((1024,), (1,), is_causal=True),
        make_shards("zigzag", split_lengths(1024, 64)),
        4,
        4,
    )
    plan = make_plan(sharded_call, 5)
    tiles = [tile for hop in plan.hops for tile in hop.tiles]
    assert len(tiles) == 126
    assert len({id(tile) for tile in tiles}) == 3


def test_documents_are_dealt_in_one_way_alone():
    cut = ShardSpec("zigzag_documents", 6, inner=2)
    message = "zigzag_documents shards of 60 positions over 6 ranks have lengths"
    with pytest.raises(ValueError, match=message):
        cut.shards_of((0, 20, 0, 20, 0, 20), (0, 1, 14, 21, 60))


def test_every_document_is_balanced():
    """Also short ones: the positions that are over fall to all ranks alike, not to the first ones."""
    pattern, documents = DilatedPattern.dense(is_causal=True), (0, 5000, 6024, 16_384)
    dealt = deal_documents(documents, 16_384, 8)
    whole = make_shards("zigzag", ShardSpec("zigzag", 8).default_lengths(16_384))

    def busiest(shards):
        pairs = counts.count_ranks(
            counts.Counter(ShardedCall(pattern, shards, 1, 1, documents))
        ).pairs
        return max(pairs) * 8 / sum(pairs)

    assert busiest(dealt) < 1.002
    assert busiest(whole) > 1.2
    short = deal_documents(tuple(range(0, 301, 3)), 300, 8)
    assert {shard_length(shard) for shard in short} <= {36, 37, 38, 39}
