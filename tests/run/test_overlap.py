"""The local work hides the first chunks: in virtual time, on a slow link, so that no clock decides.

And the waits that a run records of itself are all of its waits.
"""

import time

import pytest
import torch
from distributed import run
from virtual_time import TimedKernel

from ring_dilated_attention import ContextParallel, dilated_attention
from ring_dilated_attention.kernels.contract import BackwardRows
from ring_dilated_attention.pattern import DilatedPattern
from ring_dilated_attention.plan.exchange import plan_exchange
from ring_dilated_attention.plan.job import Job
from ring_dilated_attention.plan.sharding import make_shards
from ring_dilated_attention.ranks.processes import recorded_waits
from ring_dilated_attention.run import executor
from ring_dilated_attention.run.executor import ExecutorOptions

PATTERN = DilatedPattern((8, 64), (1, 2))
SHARDS = make_shards("contiguous", (32, 32))


class Clock:
    """Virtual time."""

    now = 0


class SlowPending:
    def __init__(self, link, arrival):
        self.link, self.arrival = link, arrival

    def wait(self):
        if self.arrival is not None:
            self.link.exposed.append(max(0, self.arrival - self.link.clock.now))
            self.link.clock.now = max(self.link.clock.now, self.arrival)
            self.arrival = None


class SlowLink:
    """A link on which every message takes `delay`. What it brings is not looked at here."""

    def __init__(self, clock, delay):
        self.clock, self.delay, self.exposed = clock, delay, []

    def carry(self, sends, receives, moment):
        for x, _ in receives:
            x.zero_()
        return SlowPending(self, self.clock.now + self.delay)

    def carry_apart(self, sends, receives, moment):
        return self.carry(sends, (), moment), self.carry((), receives, moment)


def exposed(stage, delay, exchange):
    clock = Clock()
    link = SlowLink(clock, delay)
    rank_plan = plan_exchange(exchange, Job(PATTERN, SHARDS, 2, 2), 0)
    assert rank_plan.plan.hops

    def take(q, k, is_causal, products):  # as long as there are (query, key) pairs
        clock.now += q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2]

    means, x = ExecutorOptions(TimedKernel(take), 1.0, link), torch.randn(1, 32, 2, 8)
    if stage == "forward":
        executor.forward(rank_plan, means, x, x, x)
    else:
        executor.backward(
            rank_plan, means, BackwardRows(x, None, x, x, x, x, torch.zeros(1, 32, 2))
        )
    return link.exposed, sum(tile.pairs for tile in rank_plan.plan.local)


@pytest.mark.parametrize("exchange", ["ring", "all_gather"])
@pytest.mark.parametrize("stage", ["forward", "backward"])
def test_local_work_hides_the_first_chunks(stage, exchange):
    """Catches an exchange that waits for its chunks before it computes with what it has."""
    _, local_work = exposed(stage, 0, exchange)
    waits, _ = exposed(stage, local_work, exchange)
    assert waits[0] == 0  # as slow as the local work is long: nothing of it is seen
    waits, _ = exposed(stage, local_work + 10, exchange)
    assert waits[0] == 10  # only what is longer


LATE_SECONDS = 0.5


def rank_is_late_for_backward(rank, world_size):
    """Rank 1 spends its time between forward and backward. What this rank waited in each, and how long they took."""
    cp = ContextParallel(exchange="ring")
    query, key, value = (torch.randn(1, 1024, 2, 32, requires_grad=True) for _ in range(3))
    pattern = DilatedPattern((256, 2048), (1, 16))
    for _ in range(2):  # the first one connects
        found = []
        with recorded_waits(cp.ranks) as waits:
            out = dilated_attention(query, key, value, pattern, parallel=cp)
        found.append(sum(wait.end - wait.start for wait in waits))
        time.sleep(LATE_SECONDS if rank == 1 else 0)
        with recorded_waits(cp.ranks) as waits:
            out.sum().backward()
        found.append(sum(wait.end - wait.start for wait in waits))
    return found


def test_a_rank_that_waits_records_it():
    """Catches waits that leave out a link, or that count computation."""
    early, late = run(2, rank_is_late_for_backward)
    assert early[1] > 0.8 * LATE_SECONDS
    assert late[1] < early[1]
