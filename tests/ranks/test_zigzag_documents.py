"""sharding="zigzag_documents": each packed document is dealt as zigzag by itself."""

from functools import partial
from itertools import accumulate

import pytest
import torch
from definition import PATIENCE, check_step, whole
from distributed import run
from helpers import make_tokens, message_of

from ring_dilated_attention import (
    ContextParallel,
    DilatedCache,
    DilatedPattern,
    dilated_attention,
    simulate,
)
from ring_dilated_attention.models import LongNetConfig, LongNetLM
from ring_dilated_attention.reference import multiplicity

SHARDING = "zigzag_documents"
# with 8 ranks some own nothing
HOSTILE = [(1,), (2, 1, 1), (1, 13, 7, 2, 23), (5, 1, 31), (16, 17)]
PATTERNS = [
    DilatedPattern((6, 40), (1, 3), window=5, is_causal=True),
    DilatedPattern((40, 9), (1, 2), window=4),
]


def borders_of(lengths):
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)


@pytest.fixture(autouse=True)
def _one_thread():
    """The threads of kernels that compute so little mostly wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def check_documents(parallel, lengths, pattern):
    borders = borders_of(lengths)
    cut = partial(parallel.shard, cu_seqlens=borders)
    check_step(parallel, whole(sum(lengths)), pattern, borders, cut)


@pytest.mark.parametrize("num_ranks", range(1, 9))
def test_simulated_ranks_compute_the_definition(num_ranks):
    parallel = simulate.all_ranks(num_ranks, sharding=SHARDING)
    for number, lengths in enumerate(HOSTILE):
        check_documents(parallel, lengths, PATTERNS[(number + num_ranks) % 2])


def test_a_token_moves_the_queries_that_see_it():
    borders, (query, key, value) = borders_of((1, 13, 7)), whole(21)
    parallel = simulate.all_ranks(4, sharding=SHARDING)
    for pattern in PATTERNS:
        sees = multiplicity(pattern, 21, 4, borders.tolist()) > 0  # (H, query, key)
        attend = partial(dilated_attention, pattern=pattern, parallel=parallel, cu_seqlens=borders)
        before = attend(query, key, value)
        for token in range(21):
            changed = value.clone()
            changed[0, token] += 1
            moved = (attend(query, key, changed) != before)[0].any(-1)
            assert torch.equal(moved, sees[:, :, token].T)


def rank_computes(rank, world_size):
    parallel = ContextParallel(sharding=SHARDING, timeout=PATIENCE)
    for lengths in HOSTILE:
        borders = borders_of(lengths)
        for pattern in PATTERNS:
            check_documents(parallel, lengths, pattern)
        positions = torch.cat([torch.arange(n) for n in lengths])
        local = parallel.shard(positions, 0, cu_seqlens=borders)
        assert torch.equal(local, parallel.positions(sum(lengths), borders))
        assert torch.equal(parallel.unshard(local, 0, cu_seqlens=borders), positions)
        for source in (None, world_size - 1):
            batch = {"tokens": positions, "cu_seqlens": borders} if source in (None, rank) else None
            local = parallel.shard_batch(batch, source=source)
            assert torch.equal(local["tokens"], local["positions"])
    check_loss(parallel)
    check_refusals(rank, parallel)


def check_loss(parallel):
    """Catches a label taken from the wrong span, where a rank has more than two."""
    borders, tokens = borders_of((1, 13, 7, 2, 23)), make_tokens(11, 1, 46)
    config = LongNetConfig((6, 40), (1, 3), vocab_size=11, embed_dim=8, num_heads=2)
    losses, gradients = [], []
    for how in (None, parallel):
        torch.manual_seed(0)
        model = LongNetLM(config, parallel=how).double()
        loss = model.loss(tokens if how is None else how.shard(tokens, cu_seqlens=borders), borders)
        loss.backward()
        losses.append(loss.detach())
        gradients.append(torch.cat([x.grad.flatten() for x in model.parameters()]))
    torch.distributed.all_reduce(gradients[1])
    torch.testing.assert_close(losses[1], losses[0])
    mean = gradients[1] / parallel.world_size
    torch.testing.assert_close(mean, gradients[0], rtol=1e-9, atol=1e-12)


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
    parallel = ContextParallel(sharding=SHARDING)
    borders, copies, read = borders_of([3, 4]), [], []
    cpu, tolist = torch.Tensor.cpu, torch.Tensor.tolist

    def copy(t):
        copies.append(cpu(t).clone())  # as it is where the tensor is on a GPU
        return copies[-1]

    monkeypatch.setattr(torch.Tensor, "cpu", copy)
    monkeypatch.setattr(torch.Tensor, "tolist", lambda t: (read.append(t.data_ptr()), tolist(t))[1])
    dilated_attention(*whole(7), PATTERNS[0], parallel=parallel, cu_seqlens=borders)
    assert len(copies) == 1
    assert borders.data_ptr() not in read
    assert copies[0].data_ptr() in read
