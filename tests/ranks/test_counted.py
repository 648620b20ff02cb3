"""What is really sent and computed, counted on the way, against the plan: to the byte and to the pair."""

from collections import Counter
from functools import partial

import pytest
import torch
import torch.distributed as dist
from definition import check_step, mesh_of, whole
from distributed import run
from torch.utils._python_dispatch import TorchDispatchMode

from ring_dilated_attention import ContextParallel, DilatedPattern, dilated_attention
from ring_dilated_attention.kernels import cpu
from ring_dilated_attention.plan.exchange import plan_exchange
from ring_dilated_attention.plan.sharded_call import ShardedCall
from ring_dilated_attention.plan.step import Sizes
from ring_dilated_attention.ranks import link
from ring_dilated_attention.ranks.link import GroupLink
from ring_dilated_attention.run import executor

# pattern, query heads, key/value heads, dtype, cut
CASES = [
    (DilatedPattern((8, 32, 61), (1, 2, 4)), 4, 4, torch.float32, {}),
    (DilatedPattern((8, 61), (1, 22), is_causal=True), 8, 4, torch.bfloat16, {}),
    (DilatedPattern((36, 9), (1, 2), is_causal=True), 8, 4, torch.float64, {"sharding": "zigzag"}),
    (
        DilatedPattern((9, 30), (2, 5), phase="blocked"),
        *(8, 4, torch.float16, {"lengths": (17, 0, 3, 41)}),
    ),
    (DilatedPattern((9, 30), (1, 2), heads="split"), 4, 4, torch.float32, {"align": 16}),
]
N, BATCH, HEAD_DIM = 61, 2, 8


class BytesSent(TorchDispatchMode):
    """Counts what this rank hands to torch.distributed for others, below everything that the library counts."""

    def __init__(self, count):
        super().__init__()
        self.count = count

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            name = func.name().split("::")[1].split(".")[0]
            if name == "send":
                self.count["bytes"] += sum(x.nbytes for x in args[0])
            elif name == "alltoall_base_":
                source, splits = args[1], args[4]
                assert splits[dist.get_rank()] == 0, "a rank sends to itself"
                self.count["bytes"] += source.nbytes
            else:
                assert name == "recv_", f"{name} sends something that is not counted"
        return func(*args, **(kwargs or {}))


def counter():
    """Counts the bytes of data messages, and the (query, key) pairs of kernel calls, from now on."""
    count, forward, backward = Counter(), cpu.forward, cpu.backward

    def add_pairs(q, k, is_causal):
        rows, keys = q.shape[2], k.shape[2]
        assert not is_causal or rows == keys
        of_a_head = rows * (rows + 1) // 2 if is_causal else rows * keys
        count["pairs"] += q.shape[0] * q.shape[1] * of_a_head

    def counted_forward(q, k, v, is_causal, scale):
        add_pairs(q, k, is_causal)
        return forward(q, k, v, is_causal, scale)

    def counted_backward(rows, is_causal, scale):
        add_pairs(rows.query, rows.key, is_causal)
        return backward(rows, is_causal, scale)

    def with_bytes(stage, *args, **kwargs):
        with BytesSent(count):
            return stage(*args, **kwargs)

    cpu.forward, cpu.backward = counted_forward, counted_backward
    executor.forward = partial(with_bytes, executor.forward)
    executor.backward = partial(with_bytes, executor.backward)
    return count


def rank_counts(rank, world_size, exchange):
    """(bytes, pairs) of each forward and backward, as counted, and as planned."""
    count, found = counter(), []
    group = mesh_of(world_size // 2, 2) if exchange == "mesh" else None
    for pattern, heads, kv_heads, dtype, cut in CASES:
        cp = ContextParallel(group, exchange="auto" if group else exchange, **cut)
        sizes = [(BATCH, N, h, HEAD_DIM) for h in (heads, kv_heads, kv_heads)]
        leaves = [cp.shard(torch.ones(size, dtype=dtype)).requires_grad_() for size in sizes]
        for has_dlse in (False, True):
            planned = plans_of(cp, exchange, pattern, heads, kv_heads, dtype.itemsize, has_dlse)
            count.clear()
            results = dilated_attention(*leaves, pattern, parallel=cp, return_lse=has_dlse)
            found.append(((count["bytes"], count["pairs"]), planned[0]))
            count.clear()
            loss = sum(x.sum() for x in results) if has_dlse else results.sum()
            loss.backward()
            found.append(((count["bytes"], count["pairs"]), planned[1]))
    return found


def plans_of(cp, exchange, pattern, heads, kv_heads, itemsize, has_dlse):
    """(bytes, pairs) of a forward and of a backward, as planned."""
    sharded_call = ShardedCall(
        pattern, cp.cut.shards_of(cp.cut.default_lengths(N)), heads, kv_heads
    )
    name = "ring" if exchange == "mesh" else exchange
    rank_plan = plan_exchange(name, sharded_call, cp.rank, inner=cp.cut.inner)
    sent = partial(rank_plan.bytes_sent, Sizes(BATCH, HEAD_DIM, itemsize), has_dlse=has_dlse)
    return [(sent(backward=x), BATCH * rank_plan.plan.pairs) for x in (False, True)]


@pytest.mark.parametrize("exchange", ["ring", "all_gather", "all_to_all", "mesh"])
def test_what_is_sent_and_computed_is_what_is_planned(exchange):
    """Catches a plan that promises less than happens, in bytes or in pairs, for every exchange, both ways."""
    for found in run(4, rank_counts, exchange):
        counted, planned = zip(*found, strict=True)
        assert counted == planned
        assert any(num_bytes for num_bytes, _ in counted)


# 4 ranks of 15 positions: most phases have a row or none on a rank
SPARSE = DilatedPattern((60,), (16,))


def rank_joins(rank, world_size):
    """How many messages were sent, by post and peer: if none are joined, and if short ones are."""
    post, batch_isend_irecv, moments, sent = GroupLink._post, dist.batch_isend_irecv, [], Counter()

    def noted_post(link, messages, moment):
        moments.append(moment)
        return post(link, messages, moment)

    def counted_batch(ops):
        sent.update(
            (len(moments), op.peer) for op in ops if op.op is dist.isend and "hop" in moments[-1]
        )
        return batch_isend_irecv(ops)

    GroupLink._post, dist.batch_isend_irecv = noted_post, counted_batch
    inputs = whole(60, heads=(16, 16, 16), batch=2, head_dim=4)
    found = []
    for largest in (-1, 2**16):
        link._SHORT_BYTES = largest
        moments.clear()
        sent.clear()
        check_step(ContextParallel(exchange="ring"), inputs, SPARSE)
        found.append(dict(sent))
    return found


def test_short_messages_of_a_hop_travel_as_one():
    """Catches messages that are not joined, or joined by ranks in different ways."""
    for apart, joined in run(4, rank_joins):
        assert apart.keys() == joined.keys()
        assert max(apart.values()) > 1
        assert set(joined.values()) == {1}
