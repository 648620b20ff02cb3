"""What is really sent and computed, counted on the way, against the plan: to the byte and to the pair."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from definition import check_step, whole
from distributed import run
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

from ring_dilated_attention import ContextParallel, DilatedPattern, dilated_attention
from ring_dilated_attention.kernels import cpu
from ring_dilated_attention.plan.exchange import plan_exchange
from ring_dilated_attention.plan.job import Job
from ring_dilated_attention.plan.step import Sizes
from ring_dilated_attention.ranks import link
from ring_dilated_attention.ranks.link import GroupLink
from ring_dilated_attention.run import executor

# pattern, query heads, key/value heads, dtype, cut
CASES = [
    (DilatedPattern((8, 32, 61), (1, 2, 4)), 4, 4, torch.float32, {}),
    (DilatedPattern((20, 61), (1, 3), is_causal=True), 8, 4, torch.bfloat16, {}),
    (DilatedPattern((61, 9), (1, 2), is_causal=True), 4, 4, torch.float64, {"sharding": "zigzag"}),
    (DilatedPattern((36,), (1,), is_causal=True), 8, 4, torch.float32, {"sharding": "zigzag"}),
    (DilatedPattern((8, 61), (1, 22), is_causal=True), 8, 8, torch.float32, {}),
    (
        DilatedPattern((9, 30), (2, 5), phase="blocked"),
        *(8, 4, torch.float16, {"lengths": (17, 0, 3, 41)}),
    ),
    (DilatedPattern((9, 30), (1, 2), heads="split"), 4, 4, torch.float32, {"align": 16}),
]
N, BATCH, HEAD_DIM = 61, 2, 8


class BytesSent(TorchDispatchMode):
    """Counts what this rank hands to torch.distributed for others, below everything that the library counts."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            name = func.name().split("::")[1].split(".")[0]
            if name == "send":
                self.total += sum(x.nbytes for x in args[0])
            elif name == "alltoall_base_":
                source, splits = args[1], args[4]
                assert splits[dist.get_rank()] == 0, "a rank sends to itself"
                self.total += source.nbytes
            else:
                assert name == "recv_", f"{name} sends something that is not counted"
        return func(*args, **(kwargs or {}))


class Counter:
    """Bytes of data messages, and (query, key) pairs of kernel calls, of one forward or backward."""

    def __init__(self) -> None:
        self.clear()
        forward, backward = cpu.forward, cpu.backward

        def counted_forward(q, k, v, is_causal, scale):
            self.count(q, k, is_causal)
            return forward(q, k, v, is_causal, scale)

        def counted_backward(rows, is_causal, scale):
            self.count(rows.query, rows.key, is_causal)
            return backward(rows, is_causal, scale)

        cpu.forward, cpu.backward = counted_forward, counted_backward
        executor.forward = self.with_bytes(executor.forward)
        executor.backward = self.with_bytes(executor.backward)

    def with_bytes(self, stage):
        def counted(*args, **kwargs):
            with BytesSent() as mode:
                result = stage(*args, **kwargs)
            self.sent += mode.total
            return result

        return counted

    def count(self, q, k, is_causal):
        rows, keys = q.shape[2], k.shape[2]
        assert not is_causal or rows == keys
        self.pairs += (
            q.shape[0] * q.shape[1] * (rows * (rows + 1) // 2 if is_causal else rows * keys)
        )

    def clear(self):
        self.sent, self.pairs = 0, 0


def rank_counts(rank, world_size, exchange):
    counter, found = Counter(), []
    group = None
    if exchange == "mesh":
        group = init_device_mesh("cpu", (world_size // 2, 2), mesh_dim_names=("outer", "inner"))
    for pattern, heads, kv_heads, dtype, cut in CASES:
        cp = ContextParallel(group, exchange="auto" if group else exchange, **cut)
        sizes = [(BATCH, N, h, HEAD_DIM) for h in (heads, kv_heads, kv_heads)]
        leaves = [cp.shard(torch.ones(size, dtype=dtype)).requires_grad_() for size in sizes]
        for has_dlse in (False, True):
            planned = plans_of(cp, exchange, pattern, heads, kv_heads, dtype.itemsize, has_dlse)
            counter.clear()
            results = dilated_attention(*leaves, pattern, parallel=cp, return_lse=has_dlse)
            found.append(((counter.sent, counter.pairs), planned[0]))
            counter.clear()
            loss = sum(x.sum() for x in results) if has_dlse else results.sum()
            loss.backward()
            found.append(((counter.sent, counter.pairs), planned[1]))
    return found


def plans_of(cp, exchange, pattern, heads, kv_heads, itemsize, has_dlse):
    """(bytes, pairs) of a forward and of a backward, as planned."""
    job = Job(pattern, cp.cut.shards_of(cp.cut.default_lengths(N)), heads, kv_heads)
    name = "ring" if exchange == "mesh" else exchange
    rank_plan = plan_exchange(name, job, cp.rank, inner=cp.cut.inner)
    sent = partial(rank_plan.bytes_sent, Sizes(BATCH, HEAD_DIM, itemsize), has_dlse=has_dlse)
    return [(sent(backward=x), BATCH * rank_plan.plan.pairs) for x in (False, True)]


@pytest.mark.parametrize("exchange", ["ring", "all_gather", "all_to_all", "mesh"])
def test_what_is_sent_and_computed_is_what_is_planned(exchange):
    """Catches a plan that promises less than happens, in bytes or in pairs, for every exchange, both ways."""
    ranks = run(4, rank_counts, exchange)
    for rank, found in enumerate(ranks):
        for counted, planned in found:
            assert counted == planned, (rank, found.index((counted, planned)))
    assert all(any(counted[0] for counted, _ in found) for found in ranks)


# 4 ranks of 15 positions: most phases have a row or none on a rank
SPARSE = DilatedPattern((60,), (16,))


def rank_joins(rank, world_size, largest):
    """How many messages were sent, by post and peer, if those of at most `largest` bytes are joined."""
    sent, post, batch_isend_irecv, moments = {}, GroupLink._post, dist.batch_isend_irecv, []

    def noted_post(link, messages, moment):
        moments.append(moment)
        return post(link, messages, moment)

    def counted_batch(ops):
        for op in ops:
            if op.op is dist.isend and "hop" in moments[-1]:
                posted = len(moments), op.peer
                sent[posted] = sent.get(posted, 0) + 1
        return batch_isend_irecv(ops)

    GroupLink._post, dist.batch_isend_irecv, link._SHORT_BYTES = noted_post, counted_batch, largest
    inputs = whole(60, heads=(16, 16, 16), batch=2, head_dim=4)
    check_step(ContextParallel(exchange="ring"), inputs, SPARSE)
    return sent


def test_short_messages_of_a_hop_travel_as_one():
    """Catches messages that are not joined, or joined by ranks in different ways."""
    for apart, joined in zip(run(4, rank_joins, -1), run(4, rank_joins, 2**16), strict=True):
        assert apart.keys() == joined.keys()
        assert max(apart.values()) > 1
        assert set(joined.values()) == {1}
