"""Many ranks compute what one does: value and every gradient against the definition, on every rank."""

import pytest
import torch
from distributed import RankFailedError, run

from ring_dilated_attention import ContextParallel, DilatedPattern, dilated_attention
from ring_dilated_attention.reference import dilated_attention_reference


def shards_equal_reference(rank, world_size, cases):
    for n, batch, heads, kv_heads, dim, branches, kwargs, context in cases:
        torch.manual_seed(1)
        pattern = DilatedPattern(*zip(*branches, strict=True), **kwargs)
        cp = ContextParallel(**context)
        documents = [0, n // 3, n // 3 + 1, n] if batch == 1 and n > 4 else None
        cu_seqlens = torch.tensor(documents, dtype=torch.int32) if documents else None
        full = [torch.randn(batch, n, h, dim, dtype=torch.float64) for h in (heads, kv_heads, kv_heads)]
        dout, dlse = torch.randn(batch, n, heads, dim, dtype=torch.float64), torch.randn(batch, n, heads).double()

        leaves = [x.clone().requires_grad_() for x in full]
        out, lse = dilated_attention_reference(*leaves, pattern, cu_seqlens=documents)
        covered = torch.isfinite(lse)
        expected = torch.autograd.grad((out * dout).sum() + (lse.masked_fill(~covered, 0) * dlse).sum(), leaves)

        local = [cp.shard(x).requires_grad_() for x in full]
        out_k, lse_k = dilated_attention(*local, pattern, parallel=cp, cu_seqlens=cu_seqlens, return_lse=True)
        torch.testing.assert_close(out_k, cp.shard(out), rtol=0, atol=1e-12)
        torch.testing.assert_close(lse_k, cp.shard(lse), rtol=0, atol=1e-12)
        loss = (out_k * cp.shard(dout)).sum() + (lse_k.masked_fill(lse_k == -torch.inf, 0) * cp.shard(dlse)).sum()
        for grad, x in zip(torch.autograd.grad(loss, local), expected, strict=True):
            torch.testing.assert_close(grad, cp.shard(x), rtol=0, atol=1e-12)


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
        (3, 1, 8, 8, 4, [(2, 1), (3, 8)], {}, {}),
    ]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_every_rank_equals_the_definition(world_size):
    run(world_size, shards_equal_reference, cases_for(world_size))
