"""Many ranks compute what one does: value and every gradient against the definition, on every rank."""

from functools import partial

import pytest
import torch
from definition import check_step, mesh_of, whole
from distributed import run

from ring_dilated_attention import ContextParallel, DilatedPattern, simulate
from ring_dilated_attention.ranks import processes

CAUSAL = {"is_causal": True}
SPLIT = {"heads": "split"}
ZIGZAG = {"sharding": "zigzag"}
UNEVEN = {1: (41,), 2: (0, 41), 3: (17, 0, 24), 4: (1, 2, 38, 0), 5: (9, 0, 31, 0, 1)}
THREE_BRANCHES = (41, 2, 4, 4, 24, (5, 13, 64), (1, 2, 7), {}, {})


def cases_for(world_size):
    """Positions, batch, heads, key/value heads, head dim; segment lengths, rates, rules; arguments of the context."""
    uneven = {"lengths": UNEVEN[world_size]}
    return [
        (37, 2, 2, 2, 8, (10**6,), (1,), CAUSAL, {}),
        (41, 1, 6, 2, 8, (8, 41), (1, 3), CAUSAL, uneven),
        (*THREE_BRANCHES[:-1], uneven),
        (40, 2, 6, 3, 8, (16, 32), (2, 4), {"phase": "blocked"}, {"align": 8}),
        (43, 1, 5, 5, 8, (11, 43), (3, 5), SPLIT | CAUSAL, {}),
        (47, 2, 4, 2, 8, (20, 47), (1, 2), CAUSAL, ZIGZAG),
        (3, 1, 8, 8, 4, (2, 3), (1, 8), {}, {}),  # from four ranks on, some own nothing
        (24, 2, 8, 8, 4, (5, 24), (1, 12), CAUSAL, ZIGZAG),
        (41, 2, 4, 2, 8, (41,), (3,), CAUSAL | {"window": 8}, uneven),
        (43, 1, 4, 4, 8, (43,), (2,), {"window": 30}, {}),
        (43, 1, 4, 4, 8, (20,), (1,), CAUSAL | {"window": 30}, ZIGZAG),
    ]


def check(cases, make, head_multiple=1):
    """A context serves all cases that want its like: to make one costs more than a step."""
    contexts = {}
    for n, batch, heads, kv_heads, head_dim, segment_lengths, rates, rules, context in cases:
        pattern = DilatedPattern(segment_lengths, rates, **rules)
        all_heads = [head_multiple * number for number in (heads, kv_heads, kv_heads)]
        borders = None
        if batch == 1 and n > 4:
            borders = torch.tensor([0, n // 3, n // 3 + 1, n], dtype=torch.int32)
        if str(context) not in contexts:
            contexts[str(context)] = make(**context)
        inputs = whole(n, all_heads, batch, head_dim)
        check_step(contexts[str(context)], inputs, pattern, borders)


def rank_equals_the_definition(rank, world_size):
    cases = cases_for(world_size)
    for exchange in ("ring", "all_gather"):
        check(cases, partial(ContextParallel, exchange=exchange))
    # heads are dealt to ranks: phases go by the global head, and uneven lengths find their place
    check(cases, partial(ContextParallel, exchange="all_to_all"), head_multiple=world_size)
    if world_size == 4:
        mesh = mesh_of(2, 2)
        for exchange in ("ring", "all_gather"):
            check(cases, partial(ContextParallel, mesh, exchange=exchange), head_multiple=2)


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_every_exchange_equals_the_definition(world_size):
    run(world_size, rank_equals_the_definition)


@pytest.mark.parametrize("simulated", [1, 2, 3, 5])
def test_simulated_ranks_equal_the_definition(simulated):
    check(cases_for(simulated), partial(simulate.all_ranks, simulated))


def rank_on_a_host(rank, world_size):
    processes.host_name = lambda: "bbaabb"[rank]  # not in the order of names
    mesh = mesh_of(3, 2)
    for group in (None, mesh):
        cp = ContextParallel(group)
        assert cp.ranks.all.members == [0, 1, 4, 5, 2, 3]
        assert cp.rank == [0, 1, 4, 5, 2, 3].index(rank)
        check([THREE_BRANCHES], partial(ContextParallel, group))
    assert cp.ranks.inner.members == [[0, 1], [2, 3], [4, 5]][rank // 2]
    assert cp.ranks.outer.members == [[0, 4, 2], [1, 5, 3]][rank % 2]


def test_ranks_of_one_host_stand_side_by_side():
    """Shards go by the order of ranks, and sends to the right rank. Of a mesh whole rows are ordered: the ring goes by
    host, and heads are dealt in the mesh's own rows."""
    run(6, rank_on_a_host)
