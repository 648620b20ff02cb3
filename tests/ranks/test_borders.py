"""Borders of packed documents on ranks: what differs between them, or cannot be."""

import time
from functools import partial

import torch
from definition import DENSE, PATIENCE
from distributed import run
from helpers import message_of

from ring_dilated_attention import ContextParallel, DilatedPattern, dilated_attention
from ring_dilated_attention.layers import MultiheadDilatedAttention
from ring_dilated_attention.models import LongNetConfig, LongNetLM


def borders_that_cannot_be(n):
    """Of a sequence of n positions. (More of them on one device: test_messages.py, and on ranks: `make fuzz`.)"""
    lists = [(0, n + 1), (1, n), (0, n, n), (0, n + 3, n), ()]
    right = torch.tensor([0, n], dtype=torch.int32)
    others = [right.long(), right[None], right.to("meta"), right.to_sparse(), [0, n]]
    return [torch.tensor(x, dtype=torch.int32) for x in lists] + others


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
    wrong = borders_that_cannot_be(n)
    others = [torch.tensor([0, 3, n], dtype=torch.int32), right[::2], None]
    calls = [attend, lambda y: layer(x, x, x, cu_seqlens=y), lambda y: model(tokens, y)]
    calls += [lambda y: model.loss(tokens, y), shard_batch]
    for number, call in enumerate(calls):
        for i, borders in enumerate(wrong + others):
            odd = (i + number) % world_size
            message = message_of(partial(call, borders if rank == odd else right))
            assert "cu_seqlens" in message, (number, i, message)
            assert rank == odd or "rank" in message, (number, i, message)
        call(right)  # the context serves on
    for call in (*calls, partial(shard_batch, source=1)):
        for i, borders in enumerate(wrong):
            assert "cu_seqlens" in message_of(partial(call, borders)), i
    assert attend(right).isfinite().all()


def test_borders_that_differ_or_cannot_be():
    """Catches documents that ranks cut in different places, borders that nobody looks at because positions are given,
    and an error on one rank alone."""
    run(2, rank_has_wrong_borders)


def rank_writes_into_what_a_backward_needs(rank, world_size):
    parallel = ContextParallel(timeout=PATIENCE)

    def step(borders, change):
        x = torch.randn(1, 4, 2, 4, requires_grad=True)
        query = x * 1
        out = dilated_attention(query, x, x, DENSE, parallel=parallel, cu_seqlens=borders)
        with torch.no_grad():
            change(query)
        out.sum().backward()

    right = torch.tensor([0, 3, 8], dtype=torch.int32)
    borders = right.clone()
    step(borders, lambda query: borders.add_(rank))  # the backward has what its forward read
    start = time.monotonic()
    message = message_of(lambda: step(right, lambda query: query.add_(1) if rank else None))
    assert "has been modified by an inplace operation" in message
    assert rank == 1 or "rank 1 refused the call" in message
    assert time.monotonic() - start < PATIENCE.total_seconds() / 2
    step(right, lambda query: None)  # the context serves on


def test_what_one_rank_alone_gets_wrong_before_a_backward_reaches_the_others():
    """Catches rows in a buffer that is filled anew on one rank: the others would wait for the timeout."""
    run(2, rank_writes_into_what_a_backward_needs)
