"""sharding="zigzag_documents": each packed document is dealt as zigzag by itself."""

from itertools import accumulate

import pytest
import torch
from distributed import run
from helpers import make_tokens, message_of, randn

from ring_dilated_attention import (
    ContextParallel,
    DilatedCache,
    DilatedPattern,
    dilated_attention,
    simulate,
)
from ring_dilated_attention.models import LongNetConfig, LongNetLM
from ring_dilated_attention.reference import dilated_attention_reference, multiplicity

SHARDING = "zigzag_documents"
# with 8 ranks some own nothing
HOSTILE = [(1,), (2, 1, 1), (1, 13, 7, 2, 23), (5, 1, 31), (16, 17)]
PATTERNS = [
    DilatedPattern((6, 40), (1, 3), window=5, is_causal=True),
    DilatedPattern((40, 9), (1, 2), window=4),
]


def borders_of(lengths):
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)


def results(pattern, x, borders, parallel=None):
    """out, lse, and the gradients of query, key and value, whole."""
    whole = [t.clone().requires_grad_() for t in x]
    cut = whole if parallel is None else [parallel.shard(t, cu_seqlens=borders) for t in whole]
    out, lse = dilated_attention(
        *cut, pattern, parallel=parallel, cu_seqlens=borders, return_lse=True
    )
    if parallel is not None:
        out, lse = (parallel.unshard(t, cu_seqlens=borders) for t in (out, lse))
    return [out, lse, *torch.autograd.grad(score(out, lse), whole)]


def score(out, lse):
    weight = torch.arange(out.numel(), dtype=out.dtype).view(out.shape).sin()
    return (out * weight).sum() + lse.masked_fill(lse == -torch.inf, 0).cos().sum()


def expected(pattern, x, borders):
    whole = [t.clone().requires_grad_() for t in x]
    out, lse = dilated_attention_reference(*whole, pattern, cu_seqlens=borders.tolist())
    return [out, lse, *torch.autograd.grad(score(out, lse), whole)]


def inputs(seq_len):
    torch.manual_seed(seq_len)
    return [torch.randn(1, seq_len, num_heads, 4, dtype=torch.float64) for num_heads in (4, 2, 2)]


def check(found, exact):
    for x, y in zip(found, exact, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-11, atol=1e-11)


@pytest.fixture(autouse=True)
def _one_thread():
    """The threads of kernels that compute so little mostly wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("num_ranks", range(1, 9))
def test_simulated_ranks_compute_the_definition(num_ranks):
    for number, lengths in enumerate(HOSTILE):
        borders, x, pattern = (
            borders_of(lengths),
            inputs(sum(lengths)),
            PATTERNS[(number + num_ranks) % 2],
        )
        parallel = simulate.all_ranks(num_ranks, sharding=SHARDING)
        check(results(pattern, x, borders, parallel), expected(pattern, x, borders))


def test_a_token_moves_the_queries_that_see_it():
    borders, x, parallel = (
        borders_of((1, 13, 7)),
        inputs(21),
        simulate.all_ranks(4, sharding=SHARDING),
    )
    for pattern in PATTERNS:
        sees = multiplicity(pattern, 21, 4, borders.tolist()) > 0  # (H, query, key)
        before = dilated_attention(*x, pattern, parallel=parallel, cu_seqlens=borders)
        for token in range(21):
            value = x[2].clone()
            value[0, token] += 1
            after = dilated_attention(*x[:2], value, pattern, parallel=parallel, cu_seqlens=borders)
            assert torch.equal((after != before)[0].any(-1), sees[:, :, token].T)


def rank_computes(rank, world_size):
    parallel = ContextParallel(sharding=SHARDING)
    for lengths in HOSTILE:
        borders, x = borders_of(lengths), inputs(sum(lengths))
        for pattern in PATTERNS:
            check(results(pattern, x, borders, parallel), expected(pattern, x, borders))
        positions = torch.cat([torch.arange(n) for n in lengths])
        assert torch.equal(
            parallel.shard(positions, 0, cu_seqlens=borders),
            parallel.positions(sum(lengths), borders),
        )
        for source in (None, world_size - 1):
            batch = {"tokens": positions, "cu_seqlens": borders} if source in (None, rank) else None
            local = parallel.shard_batch(batch, source=source)
            assert torch.equal(local["tokens"], local["positions"])
    check_loss(parallel)
    said = refusals(rank, parallel)
    parallel.close()
    return said


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
    gathered = [torch.empty_like(gradients[1]) for _ in range(parallel.world_size)]
    torch.distributed.all_gather(gathered, gradients[1])
    torch.testing.assert_close(losses[1], losses[0])
    torch.testing.assert_close(torch.stack(gathered).mean(0), gradients[0], rtol=1e-9, atol=1e-12)


def refusals(rank, parallel):
    borders, other, x = borders_of((10, 14)), borders_of((1, 23)), randn(1, 24, 2, 4)
    local = parallel.shard(x, cu_seqlens=borders)
    pattern = PATTERNS[0]
    return [
        message_of(lambda: parallel.shard(x)),
        message_of(lambda: parallel.shard(x, cu_seqlens=borders if rank else None)),
        message_of(lambda: parallel.shard(x, cu_seqlens=borders if rank else other)),
        message_of(lambda: parallel.unshard(local)),
        message_of(lambda: parallel.unshard(local, cu_seqlens=other)),
        message_of(lambda: parallel.shard_batch({"tokens": torch.arange(24)})),
        message_of(
            lambda: parallel.shard_batch({"tokens": torch.arange(24)} if rank else None, source=1)
        ),
        message_of(lambda: DilatedCache.gather(parallel, local, local, pattern, 2)),
        message_of(lambda: dilated_attention(local, local, local, pattern, parallel=parallel)),
        message_of(
            lambda: dilated_attention(
                local, local, local, pattern, parallel=parallel, cu_seqlens=other
            )
        ),
    ]


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_compute_the_definition_and_refuse_alike(world_size):
    said = run(world_size, rank_computes)
    needs, unlike = "needs cu_seqlens, the same on every rank", "disagree on cu_seqlens"
    other_lengths = "zigzag_documents shards of 24 positions over"
    for messages in said:
        expected_parts = [
            needs,
            needs,
            unlike,
            needs,
            other_lengths,
            needs,
            needs,
            needs,
            needs,
            other_lengths,
        ]
        for message, part in zip(messages, expected_parts, strict=True):
            assert part in message


def test_a_call_reads_the_borders_from_their_device_once(monkeypatch):
    """On a GPU a read waits."""
    parallel = ContextParallel(sharding=SHARDING)
    borders, x = borders_of([3, 4]), [randn(1, 7, 2, 4) for _ in range(3)]
    copies, read, (cpu, tolist) = [], [], (torch.Tensor.cpu, torch.Tensor.tolist)

    def copy(t):
        copies.append(cpu(t).clone())  # as it is where the tensor is on a GPU
        return copies[-1]

    monkeypatch.setattr(torch.Tensor, "cpu", copy)
    monkeypatch.setattr(torch.Tensor, "tolist", lambda t: (read.append(t.data_ptr()), tolist(t))[1])
    dilated_attention(*x, PATTERNS[0], parallel=parallel, cu_seqlens=borders)
    assert len(copies) == 1
    assert borders.data_ptr() not in read
    assert copies[0].data_ptr() in read
