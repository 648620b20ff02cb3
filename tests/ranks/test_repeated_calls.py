"""Calls that repeat others: ranks that change their lengths, disagree or fail. Functions named `rank...` run on every
rank."""

import time
import warnings
from datetime import timedelta
from threading import Event, Thread

import pytest
import torch
from distributed import run

from ring_dilated_attention import ContextParallel, DilatedPattern, dilated_attention, simulate
from ring_dilated_attention.kernels import cpu
from ring_dilated_attention.ranks import processes
from ring_dilated_attention.ranks.link import ExchangeError, GroupLink
from ring_dilated_attention.reference import dilated_attention_reference

PATTERN = DilatedPattern((5, 16), (1, 3), is_causal=True)
LOCAL = DilatedPattern((8,), (1,))  # with shards of 8 rows nothing is sent
TIMEOUT = timedelta(seconds=20)


def whole(seq_len):
    torch.manual_seed(seq_len)
    return [torch.randn(1, seq_len, heads, 4, dtype=torch.float64) for heads in (4, 2, 2)]


def parts(lengths, rank):
    """Query, key and value of a sequence, and this rank's rows of them."""
    x = whole(sum(lengths))
    return x, [t.split(lengths, dim=1)[rank].requires_grad_() for t in x]


def check_step(cp, lengths, pattern):
    """A forward and a backward against the definition."""
    x, own = parts(lengths, cp.rank)
    x = [t.clone().requires_grad_() for t in x]
    exact = dilated_attention_reference(*x, pattern)[0]
    out = dilated_attention(*own, pattern, parallel=cp)
    gradients = zip(
        torch.autograd.grad(out.sin().sum(), own),
        torch.autograd.grad(exact.sin().sum(), x),
        strict=True,
    )
    for found, expected in [(out, exact), *gradients]:
        torch.testing.assert_close(
            found, expected.split(lengths, dim=1)[cp.rank], rtol=1e-11, atol=1e-11
        )


def rank_repeats(rank, world_size):
    """Lengths that stay, change on one rank, on all, and come again."""
    warnings.simplefilter("ignore")  # of cuts that are not near-equal
    cp = ContextParallel(timeout=TIMEOUT)
    first, second = [6] * world_size, [6, 9, *[6] * (world_size - 2)]
    third = [7, 3, *[8] * (world_size - 2)]
    for lengths in (first, first, second, second, third, first, third, third):
        check_step(cp, lengths, PATTERN)
    local = [8] * world_size
    for lengths in (local, local, [12, *local[1:]], [12, *local[1:]], local):
        check_step(cp, lengths, LOCAL)


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_values_and_gradients_are_those_of_the_definition(world_size):
    """Catches the lengths of an earlier call, on a rank whose own did not change."""
    run(world_size, rank_repeats)


def rank_disagrees(rank, world_size):
    """A call that repeats another but for the pattern, a refusal, and the call again."""
    cp = ContextParallel(timeout=TIMEOUT)
    _, own = parts([8] * world_size, rank)
    for _ in range(2):
        expected = dilated_attention(*own, PATTERN, parallel=cp)
    sent, post = [], GroupLink._post

    def noting_post(link, messages, moment):
        sent.extend([moment] if "handshake" not in moment else [])
        return post(link, messages, moment)

    GroupLink._post = noting_post
    other = DilatedPattern((5, 16), (1, 2), is_causal=True)
    with pytest.raises(ValueError, match=r"^ranks disagree on pattern: rank 0 has "):
        dilated_attention(*own, other if rank == 1 else PATTERN, parallel=cp)
    with pytest.raises(
        ValueError,
        match="scale must be a finite number" if rank == 1 else "^rank 1 refused the call: s",
    ):
        dilated_attention(*own, PATTERN, parallel=cp, scale="x" if rank == 1 else None)
    assert sent == []
    assert torch.equal(dilated_attention(*own, PATTERN, parallel=cp), expected)
    assert cp.ranks.calls == 3
    with torch.inference_mode():
        for _ in range(2):
            assert torch.equal(dilated_attention(*own, PATTERN, parallel=cp), expected)


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_that_disagree_send_nothing_and_go_on(world_size):
    run(world_size, rank_disagrees)


def rank_runs_out_of_memory(rank, world_size):
    """Rank 0 fails when it computes with its own rows, before it can pass on what it receives."""
    cp = ContextParallel(timeout=TIMEOUT, exchange="ring")
    _, own = parts([8] * world_size, rank)
    dilated_attention(*own, PATTERN, parallel=cp)

    def fail(*args):
        raise MemoryError("no room")

    if rank == 0:
        cpu.forward = fail
    # The ranks beside rank 0 wait for it or send to it, and others hear of it from those.
    gone = r"^forward, hop \d, .*(waiting for|sending to) rank \d .*: that rank died, or gave up after an error"
    with pytest.raises(
        MemoryError if rank == 0 else ExchangeError, match="no room" if rank == 0 else gone
    ):
        dilated_attention(*own, DilatedPattern.dense(), parallel=cp)
    first_reason = r"^this group has failed before \((MemoryError: no room|forward, hop )"
    with pytest.raises(ExchangeError, match=first_reason):
        cp.shard(torch.ones(1, 8))


@pytest.mark.parametrize("world_size", [3, 4])
def test_an_error_after_the_handshake_reaches_all_ranks(world_size):
    run(world_size, rank_runs_out_of_memory)


def rank_has_an_intruder(rank, world_size):
    """On rank 0 a second thread makes the call while the first one computes, and others need more of its rows."""
    cp = ContextParallel(timeout=timedelta(seconds=5), exchange="ring")
    _, own = parts([8] * world_size, rank)
    for _ in range(2):
        dilated_attention(*own, DilatedPattern.dense(), parallel=cp)
    began, errors, computed, agree = Event(), [], cpu.forward, processes.agree

    def slow_forward(*args):
        time.sleep(0.1)
        return computed(*args)

    # had the first thread's handshake not begun, the other's refusal could overtake it
    def noted_agree(*args):
        began.set()
        return agree(*args)

    def intrude():
        began.wait()
        with pytest.raises(
            ValueError, match="which belongs to the thread of its first call"
        ) as error:
            dilated_attention(*own, DilatedPattern.dense(), parallel=cp)
        errors.append(error)

    thread = Thread(target=intrude)
    cpu.forward, processes.agree = slow_forward, noted_agree
    if rank == 0:
        thread.start()
    dilated_attention(*own, DilatedPattern.dense(), parallel=cp)
    if rank == 0:
        thread.join()
        assert len(errors) == 1
    else:  # the thread's call is one of rank 0
        with pytest.raises(ValueError, match="belongs to the thread of its first call"):
            dilated_attention(*own, DilatedPattern.dense(), parallel=cp)
    dilated_attention(*own, DilatedPattern.dense(), parallel=cp)


def test_a_call_of_another_thread_is_refused_while_the_owner_computes():
    run(3, rank_has_an_intruder)


class Nothing(simulate.OtherRanks):
    def keys_and_values(self, positions, heads):
        zeros = torch.zeros(1, *positions.shape, 4)
        return zeros, zeros


def test_one_simulated_rank_repeats_a_call():
    """It has a link, and nobody to meet."""
    alone, x = simulate.one_rank(1, 4, Nothing()), torch.randn(1, 8, 4, 4, requires_grad=True)
    first, second = (
        dilated_attention(x, x, x, DilatedPattern((32,), (1,)), parallel=alone) for _ in range(2)
    )
    assert torch.equal(first, second)
