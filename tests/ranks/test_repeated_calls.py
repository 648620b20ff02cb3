"""Calls that repeat others: ranks that change their lengths, and another thread. (Ranks that disagree, or fail:
test_parallel.py.) Functions named `rank...` run on every rank."""

import time
import warnings
from datetime import timedelta
from functools import partial
from threading import Event, Thread

import pytest
from definition import DENSE, PATIENCE, check_step, whole
from distributed import run
from helpers import message_of

from ring_dilated_attention import ContextParallel, DilatedPattern, dilated_attention
from ring_dilated_attention.kernels import cpu
from ring_dilated_attention.ranks import processes

PATTERN = DilatedPattern((5, 16), (1, 3), is_causal=True)
LOCAL = DilatedPattern((8,), (1,))  # with shards of 8 rows nothing is sent


def rank_repeats(rank, world_size):
    """Lengths that stay, change on one rank, on all, and come again."""
    warnings.simplefilter("ignore")  # of cuts that are not near-equal
    cp = ContextParallel(timeout=PATIENCE)
    first, second = [6] * world_size, [6, 9, *[6] * (world_size - 2)]
    third = [7, 3, *[8] * (world_size - 2)]
    local, longer = [8] * world_size, [12, *[8] * (world_size - 1)]
    steps = [(PATTERN, x) for x in (first, first, second, second, third, first, third, third)]
    steps += [(LOCAL, x) for x in (local, local, longer, longer, local)]
    for pattern, lengths in steps:
        cut = partial(rows_of_rank, lengths, rank)
        check_step(cp, whole(sum(lengths)), pattern, cut=cut)


def rows_of_rank(lengths, rank, x):
    return x.split(lengths, dim=1)[rank]


@pytest.mark.parametrize("world_size", [2, 4])
def test_values_and_gradients_are_those_of_the_definition(world_size):
    """Catches the lengths of an earlier call, on a rank whose own did not change."""
    run(world_size, rank_repeats)


def rank_has_an_intruder(rank, world_size):
    """On rank 0 a second thread makes the call while the first one computes, and others need more of its rows."""
    cp = ContextParallel(timeout=timedelta(seconds=5), exchange="ring")
    own = whole(8)
    attend = partial(dilated_attention, *own, DENSE, parallel=cp)
    for _ in range(2):
        attend()
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
        errors.append(message_of(attend))

    thread = Thread(target=intrude)
    cpu.forward, processes.agree = slow_forward, noted_agree
    if rank == 0:
        thread.start()
    attend()
    if rank == 0:
        thread.join()
    else:  # the thread's call is one of rank 0
        errors.append(message_of(attend))
    assert "belongs to the thread of its first call" in errors[0]
    attend()


def test_a_call_of_another_thread_is_refused_while_the_owner_computes():
    run(3, rank_has_an_intruder)
