"""Calls that repeat others compute while their handshake goes on. Functions named `rank...` run on every rank."""

import gc
import time
import warnings
from datetime import timedelta
from threading import Event, Thread, current_thread, main_thread
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from distributed import run

from ring_dilated_attention import ContextParallel, DilatedPattern, dilated_attention, simulate
from ring_dilated_attention.kernels import cpu
from ring_dilated_attention.plan.exchange import RankPlan
from ring_dilated_attention.ranks import processes
from ring_dilated_attention.ranks.link import ExchangeError, GroupLink, WaitTimes
from ring_dilated_attention.ranks.presumed import KnownCall, LengthsChanged, Presumed
from ring_dilated_attention.ranks.processes import Processes
from ring_dilated_attention.ranks.watching import Worker
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
    gradients = zip(torch.autograd.grad(out.sin().sum(), own), torch.autograd.grad(exact.sin().sum(), x), strict=True)
    for found, expected in [(out, exact), *gradients]:
        torch.testing.assert_close(found, expected.split(lengths, dim=1)[cp.rank], rtol=1e-11, atol=1e-11)


def rank_repeats(rank, world_size):
    """Lengths that stay, change on one rank, on all, and come again."""
    warnings.simplefilter("ignore")  # of cuts that are not near-equal
    cp = ContextParallel(timeout=TIMEOUT)
    first, second = [6] * world_size, [6, 9, *[6] * (world_size - 2)]
    third = [7, 3, *[8] * (world_size - 2)]
    changed = []
    init = LengthsChanged.__init__
    LengthsChanged.__init__ = lambda self: changed.append(1) or init(self)
    for lengths in (first, first, second, second, third, first, third, third):
        check_step(cp, lengths, PATTERN)
    local = [8] * world_size
    for lengths in (local, local, [12, *local[1:]], [12, *local[1:]], local):
        check_step(cp, lengths, LOCAL)
    return len(changed)


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_values_and_gradients_are_those_of_the_definition(world_size):
    """Catches old lengths, and rows that are sent twice or never. A rank that repeats its call plans it anew if another
    rank has another number of rows; a rank that has one itself presumes nothing."""
    changed = run(world_size, rank_repeats)
    assert changed[0] > 0


def rank_is_late(rank, world_size):
    """What happens on rank 0, in order, while rank 1 comes to the handshake late."""
    cp = ContextParallel(timeout=TIMEOUT, exchange="ring")
    _, own = parts([8] * world_size, rank)
    events, computed, post, agree = [], cpu.forward, GroupLink._post, Processes._agree

    def noting_forward(*args):
        events.append("computes")
        return computed(*args)

    def noting_post(link, messages, moment):
        events.extend(["sends"] if moment.endswith("keys and values") else [])
        return post(link, messages, moment)

    def noting_agree(*args):
        time.sleep(0.3 * (rank == 1))
        found = agree(*args)
        events.append("agreed")
        return found

    cpu.forward, GroupLink._post, Processes._agree = noting_forward, noting_post, noting_agree
    for _ in range(2):
        events.append("a call")
        dilated_attention(*own, PATTERN, parallel=cp)
    return events


def test_own_rows_are_computed_before_the_handshake_is_through_and_nothing_is_sent():
    """In the second call; the first one knows no lengths."""
    events = run(2, rank_is_late)[0]
    first, second = " ".join(events).split("a call ")[1:]
    assert first.startswith("agreed sends computes")
    assert second.startswith("computes")
    assert second.index("computes") < second.index("agreed") < second.index("sends")


def rank_disagrees(rank, world_size):
    """A known call with another pattern, a refusal, and the call again."""
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
        ValueError, match="scale must be a finite number" if rank == 1 else "^rank 1 refused the call: s"
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


def rank_fails_meanwhile(rank, world_size):
    """Rank 0 runs out of memory while the handshake goes on, for which rank 1 is late."""
    cp = ContextParallel(timeout=TIMEOUT)
    _, own = parts([8] * world_size, rank)
    dilated_attention(*own, PATTERN, parallel=cp)
    agree = Processes._agree

    def late_agree(*args):
        time.sleep(0.3 * (rank == 1))
        return agree(*args)

    def fail(*args):
        raise MemoryError("no room")

    Processes._agree = late_agree
    if rank == 0:
        cpu.forward = fail
    with pytest.raises(MemoryError if rank == 0 else ExchangeError, match="no room"):
        dilated_attention(*own, PATTERN, parallel=cp)
    with pytest.raises(ExchangeError, match=r"^this group has failed before \(.*no room"):  # the first reason stays
        cp.shard(torch.ones(1, 8))


@pytest.mark.parametrize("world_size", [2, 3])
def test_an_error_while_the_handshake_goes_on_reaches_all_ranks(world_size):
    run(world_size, rank_fails_meanwhile)


def test_a_thread_that_waits_does_not_count_as_the_call_that_waits():
    """Of the thread's wait, what lies before the call's own is hidden."""
    before = WaitTimes("a hop", 0, 0, 1, 2)
    control = SimpleNamespace(waits=[before])

    def agree():
        start = time.perf_counter()
        control.waits.append(WaitTimes("forward 2, handshake", start, start, start, start))
        return (4, 4)

    known = KnownCall((4, 4), None, RankPlan(None, None), None)
    presumed = Presumed(known, SimpleNamespace(worker=Worker()), control, agree)
    presumed.found.result()
    presumed.confirm()
    assert control.waits[0] == before
    assert control.waits[1].start == control.waits[1].end > control.waits[1].posted


def rank_sends_first_at_hop_2(rank, world_size):
    """A job in which ranks have nothing at hop 1: gradients leave apart before their first keys and values are awaited.
    The thread is slow to post."""
    warnings.simplefilter("ignore")
    cp = ContextParallel(timeout=TIMEOUT, exchange="ring", sharding="zigzag")
    pattern = DilatedPattern((10_000,), (7,), is_causal=True)
    torch.manual_seed(0)
    x = [torch.randn(1, 18, heads, 4, dtype=torch.float64).requires_grad_() for heads in (4, 1, 1)]
    exact = dilated_attention(*x, pattern)
    expected = [cp.shard(t) for t in torch.autograd.grad(exact.sin().sum(), x)]
    own, carry = [cp.shard(t).detach().requires_grad_() for t in x], GroupLink.carry

    def slow_carry(*args):
        time.sleep(0.05 * (current_thread() is not main_thread()))
        return carry(*args)

    GroupLink.carry = slow_carry
    for _ in range(3):
        out = dilated_attention(*own, pattern, parallel=cp)
        for found, exact in zip(torch.autograd.grad(out.sin().sum(), own), expected, strict=True):
            torch.testing.assert_close(found, exact, rtol=1e-11, atol=1e-11)


def test_what_the_thread_posts_comes_first():
    """Catches gradients that overtake keys and values on their way to one peer, and are taken for them."""
    run(4, rank_sends_first_at_hop_2)


def rank_has_an_intruder(rank, world_size):
    """On rank 0 a second thread makes a known call while the first one computes, and others need more of its rows."""
    cp = ContextParallel(timeout=timedelta(seconds=5), exchange="ring")
    _, own = parts([8] * world_size, rank)
    for _ in range(2):
        dilated_attention(*own, DilatedPattern.dense(), parallel=cp)
    began, errors, computed, agree = Event(), [], cpu.forward, processes.agree

    def slow_forward(*args):
        time.sleep(0.1)
        return computed(*args)

    def noted_agree(*args):  # had the first thread's handshake not begun, the other's refusal could overtake it
        began.set()
        return agree(*args)

    def intrude():
        began.wait()
        with pytest.raises(ValueError, match="which belongs to the thread of its first call") as error:
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


def test_a_known_call_of_another_thread_is_refused():
    """Catches a refusal that waits in the same thread as the messages of the call that goes on."""
    run(3, rank_has_an_intruder)


def rank_has_no_thread(rank, world_size):
    cp = ContextParallel(timeout=TIMEOUT)
    _, own = parts([8] * world_size, rank)
    dilated_attention(*own, PATTERN, parallel=cp)
    if rank == 0:
        Processes.presume = mock.Mock(side_effect=RuntimeError("can't start new thread"))
    with pytest.raises(RuntimeError if rank == 0 else ExchangeError, match="can't start new thread"):
        dilated_attention(*own, PATTERN, parallel=cp)
    cp.close()
    assert not cp.ranks.known  # a thread of a closed link would end with a traceback


def test_a_rank_without_a_thread_is_not_waited_for():
    run(2, rank_has_no_thread)


def rank_cuts_other_documents(rank, world_size):
    """A known call, but for documents that are not those of the last batch; and one whose warning is due only now."""
    cp = ContextParallel(timeout=TIMEOUT, sharding="zigzag_documents")
    _, own = parts([8] * world_size, rank)
    first, second = (torch.tensor(borders, dtype=torch.int32) for borders in ([0, 16], [0, 8, 16]))
    for _ in range(2):
        dilated_attention(*own, PATTERN, parallel=cp, cu_seqlens=first)
    cp.shard(torch.ones(1, 16), cu_seqlens=second)
    backend = "cpu" if rank == 1 else "auto"  # unknown to one rank, which none may wait for
    with pytest.raises(ValueError, match="is of no sequence that this context has cut lately"):
        dilated_attention(*own, PATTERN, parallel=cp, cu_seqlens=first, backend=backend)
    cp = ContextParallel(timeout=TIMEOUT)
    cp.shard(torch.ones(1, 16))
    for _ in range(2):
        dilated_attention(*own, PATTERN, parallel=cp)
    cp.shard(torch.ones(1, 8))
    with pytest.warns(UserWarning, match="every rank has 8 positions, as many as the sequence that was cut last"):
        dilated_attention(*own, PATTERN, parallel=cp)


def test_a_known_call_is_checked_as_a_new_one():
    run(2, rank_cuts_other_documents)


def rank_drops_messages(rank, world_size):
    """Bytes of tensors that are alive after each change of the other rank's length. No cycle may hold messages."""
    warnings.simplefilter("ignore")
    cp, agree = ContextParallel(timeout=TIMEOUT, exchange="ring"), Processes._agree

    def late_agree(*args):
        time.sleep(0.05 * (rank == 1))
        return agree(*args)

    def step(length):
        x = torch.ones(1, length, 2, 64)
        dilated_attention(x, x, x, DilatedPattern.dense(), parallel=cp)

    Processes._agree, alive = late_agree, []
    for _ in range(2):
        step(64)
    gc.collect()
    gc.disable()
    for i in range(4):
        step(64 if rank == 0 else 65 + i)
        alive.append(sum(x.untyped_storage().nbytes() for x in gc.get_objects() if isinstance(x, torch.Tensor)))
    assert alive[-1] <= alive[0]


def test_messages_that_are_never_sent_are_freed():
    run(2, rank_drops_messages)


class Nothing(simulate.OtherRanks):
    def keys_and_values(self, positions, heads):
        zeros = torch.zeros(1, *positions.shape, 4)
        return zeros, zeros


def test_one_simulated_rank_repeats_a_call():
    """It has a link, and nobody to meet."""
    alone, x = simulate.one_rank(1, 4, Nothing()), torch.randn(1, 8, 4, 4, requires_grad=True)
    first, second = (dilated_attention(x, x, x, DilatedPattern((32,), (1,)), parallel=alone) for _ in range(2))
    assert torch.equal(first, second)
