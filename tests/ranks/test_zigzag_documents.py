"""sharding="zigzag_documents": each packed document is dealt as zigzag by itself."""

from functools import partial
from itertools import accumulate

import pytest
import torch
from definition import PATIENCE, check_step, whole
from distributed import run
from helpers import message_of

from ring_dilated_attention import (
    ContextParallel,
    DilatedCache,
    DilatedPattern,
    dilated_attention,
    simulate,
)

SHARDING = "zigzag_documents"
# with 8 ranks some own nothing
HOSTILE = [(1,), (2, 1, 1), (1, 13, 7, 2, 23), (5, 1, 31), (16, 17)]
PATTERNS = [
    DilatedPattern((6, 40), (1, 3), window=5, is_causal=True),
    DilatedPattern((40, 9), (1, 2), window=4),
]


def borders_of(lengths):
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)


def check_documents(parallel, lengths, pattern):
    borders = borders_of(lengths)
    cut = partial(parallel.shard, cu_seqlens=borders)
    check_step(parallel, whole(sum(lengths)), pattern, borders, cut)


@pytest.mark.parametrize("num_ranks", [1, 4, 8])
def test_simulated_ranks_compute_the_definition(num_ranks):
    parallel = simulate.all_ranks(num_ranks, sharding=SHARDING)
    for number, lengths in enumerate(HOSTILE):
        check_documents(parallel, lengths, PATTERNS[(number + num_ranks // 4) % 2])


def rank_computes(rank, world_size):
    """What else a context does: test_group_without_cpu.py."""
    parallel = ContextParallel(sharding=SHARDING, timeout=PATIENCE)
    for lengths in HOSTILE:
        borders, positions = borders_of(lengths), torch.cat([torch.arange(n) for n in lengths])
        own = parallel.shard(positions, 0, cu_seqlens=borders)
        assert torch.equal(parallel.positions(sum(lengths), borders), own)
        for pattern in PATTERNS:
            check_documents(parallel, lengths, pattern)
    check_refusals(rank, parallel)


def check_refusals(rank, parallel):
    borders, other, x = borders_of((10, 14)), borders_of((1, 23)), whole(24)[0]
    local = parallel.shard(x, cu_seqlens=borders)
    tokens, attend = {"tokens": torch.arange(24)}, partial(dilated_attention, local, local, local)
    needs, unlike = "needs cu_seqlens, the same on every rank", "disagree on cu_seqlens"
    lengths = "zigzag_documents shards of 24 positions over"
    for call, words in (
        (lambda: parallel.shard(x), needs),
        (lambda: parallel.shard(x, cu_seqlens=borders if rank else None), needs),
        (lambda: parallel.shard(x, cu_seqlens=borders if rank else other), unlike),
        (lambda: parallel.unshard(local), needs),
        (lambda: parallel.unshard(local, cu_seqlens=other), lengths),
        (lambda: parallel.shard_batch(tokens), needs),
        (lambda: parallel.shard_batch(tokens if rank else None, source=1), needs),
        (lambda: DilatedCache.gather(parallel, local, local, PATTERNS[0], 4), needs),
        (lambda: attend(PATTERNS[0], parallel=parallel), needs),
        (lambda: attend(PATTERNS[0], parallel=parallel, cu_seqlens=other), lengths),
    ):
        message = message_of(call)
        assert words in message, message


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_compute_the_definition_and_refuse_alike(world_size):
    run(world_size, rank_computes)


def test_a_call_reads_the_borders_from_their_device_once(monkeypatch):
    """On a GPU a read waits."""
    parallel, borders = ContextParallel(sharding=SHARDING), borders_of([3, 4])
    copies, read, cpu, tolist = [], [], torch.Tensor.cpu, torch.Tensor.tolist

    def copy(t):
        copies.append(cpu(t).clone())  # as it is where the tensor is on a GPU
        return copies[-1]

    def noted_tolist(t):
        read.append(t.data_ptr())
        return tolist(t)

    monkeypatch.setattr(torch.Tensor, "cpu", copy)
    monkeypatch.setattr(torch.Tensor, "tolist", noted_tolist)
    dilated_attention(*whole(7), PATTERNS[0], parallel=parallel, cu_seqlens=borders)
    assert len(copies) == 1
    assert borders.data_ptr() not in read
    assert copies[0].data_ptr() in read
