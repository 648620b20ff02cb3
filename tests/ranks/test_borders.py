"""Borders of packed documents on ranks: what differs between them, or cannot be."""

import time
from datetime import timedelta

import torch
from distributed import run
from helpers import message_of

from ring_dilated_attention import ContextParallel, DilatedPattern, dilated_attention
from ring_dilated_attention.layers import MultiheadDilatedAttention
from ring_dilated_attention.models import LongNetConfig, LongNetLM

PATIENCE = timedelta(seconds=20)


def borders_that_cannot_be(n):
    """Of a sequence of n positions."""
    lists = [(0, n + 1), (0, n - 1), (1, n), (-1, n), (0, n, n), (0, 0, n), (n, 0), (0, n + 3, n)]
    lists += [(0,), (n,), (), (0, -n)]
    whole = torch.tensor([0, n])
    others = [whole.to(dtype) for dtype in (torch.int64, torch.float32, torch.bool, torch.int16)]
    others += [torch.tensor(n), whole.int()[None], whole.int().to("meta"), whole.int().to_sparse()]
    return [torch.tensor(x, dtype=torch.int32) for x in lists] + [*others, [0, n], n, "x"]


def rank_has_wrong_borders(rank, world_size):
    parallel, n = ContextParallel(timeout=PATIENCE), 9
    pattern = DilatedPattern((4, 8), (1, 2), is_causal=True)
    config = LongNetConfig((4, 8), (1, 2), vocab_size=7, num_layers=1, embed_dim=8, num_heads=2)
    layer = MultiheadDilatedAttention(8, 2, pattern, parallel=parallel)
    model = LongNetLM(config, parallel=parallel)
    x = parallel.shard(torch.randn(1, n, 8))
    qkv = x.unflatten(2, (2, 4))
    tokens = parallel.shard(torch.zeros(1, n, dtype=torch.int64))

    def attend(borders):
        return dilated_attention(qkv, qkv, qkv, pattern, parallel=parallel, cu_seqlens=borders)

    def shard_batch(borders, **options):
        for batch in ({"positions": torch.arange(n)}, {"tokens": torch.zeros(1, n)}):
            parallel.shard_batch(batch | {"cu_seqlens": borders}, **options)

    right = torch.tensor([0, 4, n], dtype=torch.int32)
    others = [torch.tensor([0, 3, n], dtype=torch.int32), right[::2], None]
    calls = [attend, lambda y: layer(x, x, x, cu_seqlens=y), lambda y: model(tokens, y)]
    calls += [lambda y: model.loss(tokens, y), shard_batch]
    for number, call in enumerate(calls):
        for i, wrong in enumerate(borders_that_cannot_be(n) + others):
            odd = (i + number) % world_size
            message = message_of(lambda c=call, w=wrong, o=odd: c(w if rank == o else right))
            assert "cu_seqlens" in message, (number, i, message)
            assert rank == odd or "rank" in message, (number, i, message)
        call(right)  # the context serves on
    for i, wrong in enumerate(borders_that_cannot_be(n)):
        for call in (*calls, lambda y, i=i: shard_batch(y, source=i % world_size)):
            assert "cu_seqlens" in message_of(lambda c=call, w=wrong: c(w)), i
    assert attend(right).isfinite().all()


def test_borders_that_differ_or_cannot_be():
    """Catches documents that ranks cut in different places, borders that nobody looks at because positions are given,
    and an error on one rank alone."""
    run(2, rank_has_wrong_borders)


def rank_writes_into_what_a_backward_needs(rank, world_size):
    parallel = ContextParallel(timeout=PATIENCE)
    pattern = DilatedPattern((8,), (1,))
    for what in ("borders", "query"):
        borders = torch.tensor([0, 3, 8], dtype=torch.int32)
        x = torch.randn(1, 4, 2, 4, requires_grad=True)
        query = x * 1
        out = dilated_attention(query, x, x, pattern, parallel=parallel, cu_seqlens=borders)
        if rank == 1:
            with torch.no_grad():
                (borders if what == "borders" else query).add_(1)
        if what == "borders":  # the backward has what its forward read
            out.sum().backward()
            continue
        start = time.monotonic()
        message = message_of(lambda y=out: y.sum().backward())
        assert "has been modified by an inplace operation" in message
        assert rank == 1 or "rank 1 refused the call" in message
        assert time.monotonic() - start < PATIENCE.total_seconds() / 2
    x = torch.randn(1, 4, 2, 4, requires_grad=True)
    dilated_attention(x, x, x, pattern, parallel=parallel).sum().backward()  # the context serves on


def test_what_one_rank_alone_gets_wrong_before_a_backward_reaches_the_others():
    """Catches rows in a buffer that is filled anew on one rank: the others would wait for the timeout."""
    run(2, rank_writes_into_what_a_backward_needs)
