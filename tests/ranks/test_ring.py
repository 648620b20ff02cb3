"""Many ranks compute what one does: value and every gradient against the definition, on every rank."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from definition import check_step, whole
from distributed import run
from torch.distributed.device_mesh import init_device_mesh

from ring_dilated_attention import ContextParallel, DilatedPattern, dilated_attention, simulate
from ring_dilated_attention.plan.sharding import order_by_host
from ring_dilated_attention.ranks import processes


def ranks_equal_definition(rank, world_size, cases, make=ContextParallel, **more):
    """more: arguments of the contexts, beside those of the cases."""
    for n, batch, heads, kv_heads, head_dim, segment_lengths, rates, rules, context in cases:
        pattern = DilatedPattern(segment_lengths, rates, **rules)
        inputs = whole(n, (heads, kv_heads, kv_heads), batch, head_dim)
        borders = None
        if batch == 1 and n > 4:
            borders = torch.tensor([0, n // 3, n // 3 + 1, n], dtype=torch.int32)
        check_step(make(**context, **more), inputs, pattern, borders)


CAUSAL = {"is_causal": True}
SPLIT = {"heads": "split"}
ZIGZAG = {"sharding": "zigzag"}
UNEVEN = {1: (41,), 2: (0, 41), 3: (17, 0, 24), 4: (1, 2, 38, 0), 5: (9, 0, 31, 0, 1)}
# positions, batch, heads, key/value heads, head dim; segment lengths, rates, rules; arguments of the context
DENSE = (37, 1, 4, 4, 8, (10**6,), (1,), CAUSAL, {})
THREE_BRANCHES = (41, 2, 4, 4, 24, (5, 13, 64), (1, 2, 7), {}, {})


def cases_for(world_size):
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


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_every_rank_equals_the_definition(world_size):
    run(world_size, ranks_equal_definition, cases_for(world_size))


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_all_gather_equals_the_definition(world_size):
    make = partial(ContextParallel, exchange="all_gather")
    run(world_size, ranks_equal_definition, cases_for(world_size), make)


@pytest.mark.parametrize("world_size", [2, 3])
def test_all_to_all_equals_the_definition(world_size):
    """Heads are dealt to ranks: phases must go by the global head, and uneven lengths must find their place."""
    cases = [
        (37, 1, 6, 6, 8, (10**6,), (1,), CAUSAL, {}),
        (41, 2, 6, 6, 8, (5, 13, 64), (1, 2, 7), {}, {"lengths": UNEVEN[world_size]}),
        (40, 1, 12, 6, 8, (16, 32), (2, 4), {"phase": "blocked"}, {}),
        (43, 1, 6, 6, 8, (11, 40), (1, 3), SPLIT, {}),
        (47, 2, 6, 6, 8, (20, 47), (1, 2), CAUSAL, ZIGZAG),
        (47, 1, 6, 6, 8, (20,), (2,), {"window": 11}, {}),
    ]
    make = partial(ContextParallel, exchange="all_to_all")
    run(world_size, ranks_equal_definition, cases, make)


@pytest.mark.parametrize("simulated", [1, 2, 3, 5])
def test_simulated_ranks_equal_the_definition(simulated):
    make = partial(simulate.all_ranks, simulated)
    ranks_equal_definition(0, 1, cases_for(simulated), make)


def mesh_equals_definition(rank, world_size, cases):
    mesh = init_device_mesh("cpu", (2, world_size // 2), mesh_dim_names=("ring", "heads"))
    ranks_equal_definition(rank, world_size, cases, group=mesh)


def test_a_mesh_of_two_axes_equals_the_definition():
    """All-to-all along the inner axis, ring along the outer."""
    cases = [
        DENSE,
        (41, 2, 4, 2, 8, (5, 13, 64), (1, 2, 7), {}, {"lengths": (17, 0, 4, 20)}),
        (47, 2, 4, 2, 8, (20, 47), (1, 2), CAUSAL, ZIGZAG | {"exchange": "all_gather"}),
    ]
    run(4, mesh_equals_definition, cases)


def hosts_out_of_order(rank, world_size):
    processes.host_name = lambda: "ab"[rank % 2]  # ranks 0 and 2 on one host, 1 and 3 on the other
    cp = ContextParallel()
    assert cp.ranks.all.members == [0, 2, 1, 3]
    assert cp.rank == [0, 2, 1, 3].index(rank)
    ranks_equal_definition(rank, world_size, [THREE_BRANCHES])


def test_ranks_of_one_host_stand_side_by_side():
    """Shards go by the order of ranks; sends go to the right rank."""
    run(4, hosts_out_of_order)


def mesh_rows_out_of_order(rank, world_size):
    processes.host_name = lambda: "aabbaa"[rank]
    mesh = init_device_mesh("cpu", (3, 2), mesh_dim_names=("ring", "heads"))
    cp = ContextParallel(mesh)
    assert cp.ranks.all.members == [0, 1, 4, 5, 2, 3]
    assert cp.ranks.inner.members == [[0, 1], [2, 3], [4, 5]][rank // 2]
    assert cp.ranks.outer.members == [[0, 4, 2], [1, 5, 3]][rank % 2]
    ranks_equal_definition(rank, world_size, [THREE_BRANCHES], group=mesh)


def test_mesh_rows_of_one_host_stand_side_by_side():
    """The ring along the first axis goes by host too; heads are dealt in the mesh's own rows."""
    run(6, mesh_rows_out_of_order)


def contexts_have_names(rank, world_size):
    contexts = [ContextParallel(), ContextParallel()]
    if rank == 0:
        # the others count one group less from here on
        group = dist.new_group([0], use_local_synchronization=True)
        assert ContextParallel(group).name == ""
    contexts.append(ContextParallel())
    names = [cp.name for cp in contexts]
    assert len(set(names)) == 3
    for cp in contexts:
        assert {link.name.split(" of ")[1] for link in cp.ranks.opened} == {cp.name}
    dist.barrier()  # a rank that leaves closes connections that another may still make
    return names


def test_errors_tell_contexts_apart():
    """Catches a name that all contexts have, and one that is another on each rank."""
    names, *others = run(2, contexts_have_names)
    assert others == [names]


def test_the_order_by_host_is_stable():
    assert order_by_host(["b", "a", "b", "c", "a"]) == (0, 2, 1, 4, 3)


def heads_must_divide(rank, world_size):
    cp = ContextParallel(exchange="all_to_all")
    q = torch.randn(1, 5, 3, 8)
    with pytest.raises(ValueError, match=r"3 mod 2 = 1.*exchange='ring' takes any"):
        dilated_attention(q, q, q, DilatedPattern((4,), (1,)), parallel=cp)


def test_all_to_all_refuses_heads_that_do_not_divide():
    run(2, heads_must_divide)
