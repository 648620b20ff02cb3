"""Many ranks compute what one does: value and every gradient against the definition, on every rank."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from distributed import run
from helpers import rows_of
from torch.distributed.device_mesh import init_device_mesh

from ring_dilated_attention import ContextParallel, DilatedPattern, dilated_attention, simulate
from ring_dilated_attention.plan.sharding import order_by_host
from ring_dilated_attention.ranks import processes
from ring_dilated_attention.reference import dilated_attention_reference


def shards_equal_reference(rank, world_size, cases, make=ContextParallel):
    for n, batch, heads, kv_heads, dim, branches, kwargs, context in cases:
        torch.manual_seed(1)
        pattern = DilatedPattern(*zip(*branches, strict=True), **kwargs)
        cp = make(**context)
        documents = [0, n // 3, n // 3 + 1, n] if batch == 1 and n > 4 else None
        cu_seqlens = torch.tensor(documents, dtype=torch.int32) if documents else None
        full = [
            torch.randn(batch, n, h, dim, dtype=torch.float64) for h in (heads, kv_heads, kv_heads)
        ]
        dout, dlse = (
            torch.randn(batch, n, heads, dim, dtype=torch.float64),
            torch.randn(batch, n, heads).double(),
        )

        leaves = [x.clone().requires_grad_() for x in full]
        out, lse = dilated_attention_reference(*leaves, pattern, cu_seqlens=documents)
        covered = torch.isfinite(lse)
        expected = torch.autograd.grad(
            (out * dout).sum() + (lse.masked_fill(~covered, 0) * dlse).sum(), leaves
        )

        local = [cp.shard(x).requires_grad_() for x in full]
        out_k, lse_k = dilated_attention(
            *local, pattern, parallel=cp, cu_seqlens=cu_seqlens, return_lse=True
        )
        torch.testing.assert_close(out_k, rows_of(cp, out), rtol=0, atol=1e-12)
        torch.testing.assert_close(lse_k, rows_of(cp, lse), rtol=0, atol=1e-12)
        dout_k, dlse_k = rows_of(cp, dout), rows_of(cp, dlse)
        loss = (out_k * dout_k).sum() + (lse_k.masked_fill(lse_k == -torch.inf, 0) * dlse_k).sum()
        for grad, x in zip(torch.autograd.grad(loss, local), expected, strict=True):
            torch.testing.assert_close(grad, rows_of(cp, x), rtol=0, atol=1e-12)


def cases_for(world_size):
    dense = [(10**6, 1)]
    uneven = {1: (41,), 2: (0, 41), 3: (17, 0, 24), 4: (1, 2, 38, 0)}[world_size]
    return [
        (37, 1, 4, 4, 8, dense, {}, {}),
        (37, 2, 2, 2, 8, dense, {"is_causal": True}, {}),
        (41, 1, 6, 2, 8, [(8, 1), (41, 3)], {"is_causal": True}, {"lengths": uneven}),
        (41, 2, 4, 4, 24, [(5, 1), (13, 2), (64, 7)], {}, {"lengths": uneven}),
        (40, 2, 6, 3, 8, [(16, 2), (32, 4)], {"phase": "blocked"}, {"align": 8}),
        (43, 1, 5, 5, 8, [(11, 3), (43, 5)], {"heads": "split", "is_causal": True}, {}),
        (43, 1, 4, 1, 8, [(11, 1), (40, 3)], {"heads": "split"}, {}),
        (47, 2, 4, 2, 8, [(20, 1), (47, 2)], {"is_causal": True}, {"sharding": "zigzag"}),
        (47, 1, 4, 2, 8, [(9, 1), (30, 2)], {"is_causal": True}, {"sharding": "zigzag"}),
        (3, 1, 8, 8, 4, [(2, 1), (3, 8)], {}, {}),
        (45, 1, 6, 2, 4, [(4, 1), (45, 16)], {}, {}),
        (24, 2, 8, 8, 4, [(5, 1), (24, 12)], {"is_causal": True}, {"sharding": "zigzag"}),
        (41, 2, 4, 2, 8, [(41, 3)], {"is_causal": True, "window": 8}, {"lengths": uneven}),
        (43, 1, 4, 4, 8, [(43, 2)], {"window": 30}, {}),
        (43, 1, 4, 4, 8, [(20, 1)], {"is_causal": True, "window": 30}, {"sharding": "zigzag"}),
    ]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_every_rank_equals_the_definition(world_size):
    run(world_size, shards_equal_reference, cases_for(world_size))


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_all_gather_equals_the_definition(world_size):
    cases = [
        (*case, {**context, "exchange": "all_gather"}) for *case, context in cases_for(world_size)
    ]
    run(world_size, shards_equal_reference, cases)


@pytest.mark.parametrize("world_size", [2, 3])
def test_all_to_all_equals_the_definition(world_size):
    """Heads are dealt to ranks: phases must go by the global head, and uneven lengths must find their place."""
    cases = [
        (37, 1, 6, 6, 8, [(10**6, 1)], {"is_causal": True}, {}),
        (
            41,
            2,
            6,
            6,
            8,
            [(5, 1), (13, 2), (64, 7)],
            {},
            {"lengths": {2: (0, 41), 3: (17, 0, 24)}[world_size]},
        ),
        (40, 1, 12, 6, 8, [(16, 2), (32, 4)], {"phase": "blocked"}, {}),
        (43, 1, 6, 6, 8, [(11, 1), (40, 3)], {"heads": "split"}, {}),
        (47, 2, 6, 6, 8, [(20, 1), (47, 2)], {"is_causal": True}, {"sharding": "zigzag"}),
        (47, 1, 6, 6, 8, [(20, 2)], {"window": 11}, {}),
    ]
    cases = [(*case, {**context, "exchange": "all_to_all"}) for *case, context in cases]
    run(world_size, shards_equal_reference, cases)


@pytest.mark.parametrize("simulated", [1, 2, 3, 5, 8])
def test_simulated_ranks_equal_the_definition(simulated):
    cases = [
        (37, 1, 4, 4, 8, [(10**6, 1)], {"is_causal": True}, {}),
        (41, 2, 4, 2, 24, [(5, 1), (13, 2), (64, 7)], {}, {}),
        (47, 2, 4, 2, 8, [(20, 1), (47, 2)], {"is_causal": True}, {"sharding": "zigzag"}),
        (3, 1, 8, 8, 4, [(2, 1), (3, 8)], {}, {}),  # five ranks and more: some own nothing
    ]
    shards_equal_reference(0, 1, cases, partial(simulate.all_ranks, simulated))


def mesh_equals_reference(rank, world_size, cases):
    mesh = init_device_mesh("cpu", (2, world_size // 2), mesh_dim_names=("ring", "heads"))
    shards_equal_reference(
        rank, world_size, [(*case, {"group": mesh, **context}) for *case, context in cases]
    )


def test_a_mesh_of_two_axes_equals_the_definition():
    """All-to-all along the inner axis, ring along the outer."""
    cases = [
        (37, 1, 4, 4, 8, [(10**6, 1)], {"is_causal": True}, {}),
        (41, 2, 4, 2, 8, [(5, 1), (13, 2), (64, 7)], {}, {"lengths": (17, 0, 4, 20)}),
        (
            47,
            2,
            4,
            2,
            8,
            [(20, 1), (47, 2)],
            {"is_causal": True},
            {"sharding": "zigzag", "exchange": "all_gather"},
        ),
    ]
    run(4, mesh_equals_reference, cases)


def hosts_out_of_order(rank, world_size, case):
    processes.host_name = lambda: "ab"[rank % 2]  # ranks 0 and 2 on one host, 1 and 3 on the other
    cp = ContextParallel()
    assert cp.ranks.all.members == [0, 2, 1, 3]
    assert cp.rank == [0, 2, 1, 3].index(rank)
    shards_equal_reference(rank, world_size, [case])


def test_ranks_of_one_host_stand_side_by_side():
    """Shards go by the order of ranks; sends go to the right rank."""
    run(
        4,
        hosts_out_of_order,
        (41, 2, 4, 4, 24, [(5, 1), (13, 2), (64, 7)], {"is_causal": True}, {}),
    )


def mesh_rows_out_of_order(rank, world_size, case):
    processes.host_name = lambda: "aabbaa"[rank]
    mesh = init_device_mesh("cpu", (3, 2), mesh_dim_names=("ring", "heads"))
    cp = ContextParallel(mesh)
    assert cp.ranks.all.members == [0, 1, 4, 5, 2, 3]
    assert cp.ranks.inner.members == [[0, 1], [2, 3], [4, 5]][rank // 2]
    assert cp.ranks.outer.members == [[0, 4, 2], [1, 5, 3]][rank % 2]
    shards_equal_reference(rank, world_size, [(*case, {"group": mesh})])


def test_mesh_rows_of_one_host_stand_side_by_side():
    """The ring along the first axis goes by host too; heads are dealt in the mesh's own rows."""
    run(
        6, mesh_rows_out_of_order, (41, 1, 4, 2, 8, [(5, 1), (13, 2), (64, 7)], {"is_causal": True})
    )


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
