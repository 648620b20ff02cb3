"""The local work hides the first chunks, and the waits that a run records of itself are all of its waits."""

import time

import pytest
import torch
from distributed import run

from ring_dilated_attention import ContextParallel, dilated_attention
from ring_dilated_attention.pattern import DilatedPattern
from ring_dilated_attention.plan.exchange import plan_exchange
from ring_dilated_attention.plan.job import Job
from ring_dilated_attention.plan.program import program_of
from ring_dilated_attention.plan.sharding import make_shards
from ring_dilated_attention.plan.step import CallFacts, Compute, Post, Wait
from ring_dilated_attention.ranks.processes import recorded_waits

PATTERN = DilatedPattern((8, 64), (1, 2))
SHARDS = make_shards("contiguous", (32, 32))


@pytest.mark.parametrize("exchange", ["ring", "all_gather"])
@pytest.mark.parametrize("stage", ["forward", "backward"])
def test_local_work_hides_the_first_chunks(stage, exchange):
    """Catches an exchange that waits for its chunks before it computes with what it has."""
    plan = plan_exchange(exchange, Job(PATTERN, SHARDS, 2, 2), 0).plan
    program = list(program_of(plan, stage, CallFacts()))
    kinds = [type(step) for step in program]
    between = program[kinds.index(Post) : kinds.index(Wait)]
    pairs = sum(step.tile.pairs for step in between if isinstance(step, Compute))
    assert pairs == sum(tile.pairs for tile in plan.local)


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
