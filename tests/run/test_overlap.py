"""The local work hides the first chunks, and the waits that a run records of itself are all of its waits."""

import time
from unittest import mock

import distributed
import pytest
import torch
from distributed import run

from ring_dilated_attention import ContextParallel, dilated_attention
from ring_dilated_attention.pattern import DilatedPattern
from ring_dilated_attention.plan.exchange import plan_exchange
from ring_dilated_attention.plan.program import program_of
from ring_dilated_attention.plan.sharded_call import ShardedCall
from ring_dilated_attention.plan.sharding import make_shards
from ring_dilated_attention.plan.step import CallFacts, Compute, Post, Wait
from ring_dilated_attention.ranks.link import GroupLink
from ring_dilated_attention.ranks.processes import recorded_waits

PATTERN = DilatedPattern((8, 64), (1, 2))
SHARDS = make_shards("contiguous", (32, 32))


@pytest.mark.parametrize("exchange", ["ring", "all_gather"])
@pytest.mark.parametrize("stage", ["forward", "backward"])
def test_local_work_hides_the_first_chunks(stage, exchange):
    """Catches an exchange that waits for its chunks before it computes with what it has."""
    plan = plan_exchange(exchange, ShardedCall(PATTERN, SHARDS, 2, 2), 0).plan
    program = list(program_of(plan, stage, CallFacts()))
    kinds = [type(step) for step in program]
    between = program[kinds.index(Post) : kinds.index(Wait)]
    pairs = sum(step.tile.pairs for step in between if isinstance(step, Compute))
    assert pairs == sum(tile.pairs for tile in plan.local)


LATE_SECONDS = 0.5


def rank_is_late_for_backward(rank, world_size):
    """Rank 1 begins its backward so long after rank 0 waits in its own. What this rank waited."""
    cp = ContextParallel(exchange="ring")
    x = torch.ones(1, 64, 2, 8, requires_grad=True)
    out = dilated_attention(x, x, x, PATTERN, parallel=cp)
    if rank == 1:
        distributed.store.wait(["rank 0 waits"])
        time.sleep(LATE_SECONDS)
    wait_for = GroupLink.wait_for

    def noted(*args):
        distributed.store.set("rank 0 waits", "")
        wait_for(*args)

    with recorded_waits(cp.ranks) as waits, mock.patch.object(GroupLink, "wait_for", noted):
        out.sum().backward()
    return sum(wait.end - wait.start for wait in waits)


def test_a_rank_that_waits_records_it():
    """Catches waits that leave out a link, or end before the messages come. However slow the machine is, rank 0 waits
    for so long."""
    assert run(2, rank_is_late_for_backward)[0] >= LATE_SECONDS
