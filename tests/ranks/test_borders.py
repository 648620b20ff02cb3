"""Borders of packed documents on ranks. `make fuzz`, kind `borders`, has random ones."""

import time
from datetime import timedelta

import torch
from distributed import run
from helpers import message_of

from ring_dilated_attention import ContextParallel, DilatedPattern, dilated_attention

PATIENCE = timedelta(seconds=20)


def test_a_batch_has_borders_of_its_sequence():
    """Catches borders that nobody looks at because positions are given, and TypeErrors of floating ones."""
    positions = torch.arange(9)
    for wrong in ([0, 8], [1, 9], [0, 9, 9], [0, 20, 9], [0]):
        borders = torch.tensor(wrong, dtype=torch.int32)
        for batch in ({"positions": positions}, {"tokens": positions[None]}):
            assert "cu_seqlens" in message_of(
                lambda b=batch, x=borders: ContextParallel().shard_batch(b | {"cu_seqlens": x})
            )
    for wrong in ([[0, 9]], [0.0, 9.0], [False, True]):
        batch = {"tokens": positions[None], "cu_seqlens": torch.tensor(wrong)}
        assert "cu_seqlens must be a 1-D int32 tensor" in message_of(
            lambda b=batch: ContextParallel().shard_batch(b)
        )


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
