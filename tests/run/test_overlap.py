"""The local work hides the first chunks: in virtual time, on a slow link, so that no clock decides.

And the waits that a run records of itself are all of its waits.
"""

import time

import pytest
import torch
from distributed import run
from virtual_time import Late, TimedKernel

from benchmarks import overlap
from benchmarks.measure import Sizes
from ring_dilated_attention import ContextParallel
from ring_dilated_attention.kernels.contract import BackwardRows
from ring_dilated_attention.pattern import DilatedPattern
from ring_dilated_attention.plan.exchange import plan_exchange
from ring_dilated_attention.plan.job import Job
from ring_dilated_attention.plan.sharding import make_shards
from ring_dilated_attention.ranks.link import WaitTimes
from ring_dilated_attention.run import executor
from ring_dilated_attention.run.executor import Means

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


class LateLink(Late, SlowLink):
    pass


def exposed(stage, link_type, delay, exchange="ring"):
    clock = Clock()
    link = link_type(clock, delay)
    rank_plan = plan_exchange(exchange, Job(PATTERN, SHARDS, 2, 2), 0)
    assert rank_plan.plan.hops

    def take(q, k, is_causal, products):  # as long as there are (query, key) pairs
        clock.now += q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2]

    means, x = Means(TimedKernel(take), 1.0, link), torch.randn(1, 32, 2, 8)
    if stage == "forward":
        executor.forward(rank_plan, means, x, x, x)
    else:
        executor.backward(rank_plan, means, BackwardRows(x, None, x, x, x, x, torch.zeros(1, 32, 2)))
    return link.exposed, sum(tile.pairs for tile in rank_plan.plan.local)


@pytest.mark.parametrize("exchange", ["ring", "all_gather"])
@pytest.mark.parametrize("stage", ["forward", "backward"])
def test_local_work_hides_the_first_chunks(stage, exchange):
    """Catches an exchange that waits for its chunks before it computes with what it has."""
    _, local_work = exposed(stage, SlowLink, 0, exchange)
    waits, _ = exposed(stage, SlowLink, local_work, exchange)
    assert waits[0] == 0  # as slow as the local work is long: nothing of it is seen
    waits, _ = exposed(stage, SlowLink, local_work + 10, exchange)
    assert waits[0] == 10  # only what is longer


def test_the_test_sees_a_ring_without_overlap():
    _, local_work = exposed("forward", SlowLink, 0)
    waits, _ = exposed("forward", LateLink, local_work)
    assert waits[0] == local_work


LATE_SECONDS = 0.5


def rank_is_late_for_backward(rank, world_size, sizes, pattern):
    """Rank 1 spends its time between forward and backward."""
    attend = overlap.attend

    def attend_and_linger(*args):
        out = attend(*args)
        time.sleep(LATE_SECONDS if rank == 1 else 0)
        return out

    overlap.attend = attend_and_linger
    cp = ContextParallel(exchange="ring")
    return [overlap.take_step(sizes, pattern, cp) for _ in range(2)][1:]  # the first one connects


def test_a_rank_that_waits_is_not_computing():
    """Catches exposed time that leaves out a link, time that is counted twice or not at all, and a late rank that is
    taken for slow messages."""
    settings, pattern = overlap.Settings(Sizes(2048, 2, 32)), DilatedPattern((256, 2048), (1, 16))
    steps = run(2, rank_is_late_for_backward, settings.sizes, pattern)
    for plan in overlap.plans_of(settings, pattern, "contiguous"):
        found = overlap.summary(plan, steps)
        timings = {(timing["stage"], timing["part"]): timing for timing in found["parts"]}
        names = ("computing_seconds", "exposed_seconds", "chunks_in_flight_seconds", "gradients_in_flight_seconds")
        seconds = {
            name: {key: timing[name]["median"] for key, timing in timings.items() if name in timing} for name in names
        }
        total = sum(seconds["computing_seconds"].values()) + sum(seconds["exposed_seconds"].values())
        assert total == pytest.approx(found["step_seconds"]["median"])
        assert seconds["chunks_in_flight_seconds"]["backward", "hop 1"] > 0
        assert seconds["gradients_in_flight_seconds"]["backward", "hop 1"] > 0
        assert seconds["gradients_in_flight_seconds"]["forward", "hop 1"] == 0
        exposed = {part: seconds["exposed_seconds"]["backward", part] for part in ("a late rank", "handshake", "hop 1")}
        if plan.rank == 0:
            assert exposed["a late rank"] > 0.8 * LATE_SECONDS
            assert exposed["handshake"] + exposed["hop 1"] < 0.2 * LATE_SECONDS
            assert seconds["computing_seconds"]["forward", "hop 1"] < 0.5 * LATE_SECONDS
            assert found["exposed_share"]["median"] > 0.5
        else:
            assert exposed["a late rank"] < 0.2 * LATE_SECONDS


def test_a_wait_is_late_until_the_others_have_posted():
    """By hand: of a hop's wait from 2 to 5, the other rank posts at 4; of a handshake's, it had posted before."""
    hop, meeting = "backward, hop 1, gradients", "backward 3, handshake"
    own = overlap.Stage(0, 9, [WaitTimes(meeting, 0, 1, 0, 1), WaitTimes(hop, 2, 5, 2, 5)])
    other = overlap.Stage(0, 9, [WaitTimes(meeting, 0, 1, 1, 1), WaitTimes(hop, 4, 5, 5, 5)])
    assert overlap._late(0, [own, other]) == [0, 2]
    assert overlap._late(1, [own, other]) == [0, 0]
