"""The time model: small cases by hand, and the executor of all ranks in the same virtual time."""

from concurrent.futures import ThreadPoolExecutor
from threading import Condition
from types import SimpleNamespace

import pytest
import torch
from drawn import patterns
from hypothesis import given, settings
from hypothesis import strategies as st
from virtual_time import TimedKernel

from ring_dilated_attention.forecast import clock
from ring_dilated_attention.forecast.clock import Hardware, Network, RankTime, Side
from ring_dilated_attention.kernels.contract import BackwardRows
from ring_dilated_attention.pattern import DilatedPattern
from ring_dilated_attention.plan.exchange import RankPlan
from ring_dilated_attention.plan.plan import gathered
from ring_dilated_attention.plan.planner import make_plan
from ring_dilated_attention.plan.sharded_call import ShardedCall
from ring_dilated_attention.plan.sharding import WITHOUT_DOCUMENTS, ShardSpec, make_shards
from ring_dilated_attention.plan.step import Sizes
from ring_dilated_attention.run import executor
from ring_dilated_attention.run.executor import ExecutorOptions

DENSE = DilatedPattern((8,), (1,))


def model_step(plans, sizes, hardware):
    """Of ranks that deal no heads."""
    return clock.model_step([RankPlan(plan, None) for plan in plans], sizes, hardware)


def plans_of(pattern, seq_len, num_ranks, sharding="contiguous", heads=(1, 1), documents=None):
    shards = make_shards(sharding, ShardSpec(sharding, num_ranks).default_lengths(seq_len))
    return [
        make_plan(ShardedCall(pattern, shards, *heads, documents), rank)
        for rank in range(num_ranks)
    ]


@pytest.mark.parametrize(
    ("hardware", "expected"),
    [
        # 16 pairs take 1 s forward and 2.5 s backward, 32 bytes 1 s: only the last gradient is seen, since nothing is
        # left to compute. Catches a model in which messages wait for the work before them.
        (Hardware(64, 32), RankTime(2, 6, 7, 1)),
        # 32 bytes take 2 s: 1 s longer than the local work forward, shorter than it backward.
        (Hardware(64, 16), RankTime(3, 7, 7, 3)),
        # A quarter of a second more for each handshake, for the forward's chunk (which takes as long as the local
        # work), and for the gradient. The backward's local work hides its chunk.
        (Hardware(64, 32, 0.25), RankTime(2.5, 6.5, 7, 2)),
    ],
)
def test_two_ranks(hardware, expected):
    """8 positions, 4 a rank, one head of one number: 16 pairs at home and 16 at the only hop, 32 bytes each way."""
    step = model_step(plans_of(DENSE, 8, 2), Sizes(1, 1, 4), hardware)
    assert step.ranks == (expected, expected)
    assert step.step_seconds == expected.forward_seconds + expected.backward_seconds


def test_a_ring_over_hosts_waits_for_the_network_between_them():
    """4 ranks of 2 positions: 3 hops of 16 bytes, 1 s inside a host and 16 s between. By hand: rank 1 may send at 0, 16
    and 32 s what goes to the other host, so the forward takes 48 s, or 3 s in one host. Catches a mean of the two.

    Handshakes too: with latencies of 1 and 0.25 s a stage has two rounds of a handshake, and three hops."""
    plans, sizes = plans_of(DENSE, 8, 4), Sizes(1, 1, 4)
    slow = Hardware(1e18, 1, 0, host_bytes_per_second=16)
    late = Hardware(1e18, 1e18, 1, host_bytes_per_second=1e18, host_latency_seconds=0.25)
    for gpus_per_host, seconds, of_latency in ((1, 48, 5), (3, 48, 5), (4, 3, 1.25), (8, 3, 1.25)):
        for hardware, expected in ((slow, seconds), (late, of_latency)):
            step = model_step(plans, sizes, hardware._replace(gpus_per_host=gpus_per_host))
            assert step.forward_seconds == pytest.approx(expected, abs=1e-9)


def test_ways_are_shared_and_messages_wait_for_both_sides():
    """Catches messages that share a way and pass at once, a latency that keeps it busy, and a send into nowhere."""
    network = Network(3, Hardware(1, 10, 5))
    first, second = Side(1, 20, 0.0), Side(2, 30, 0.0)
    network.post(0, [first, second], [])
    network.post(2, [], [Side(0, 30, 1.0)])
    # one after the other, and the first has no receiver yet
    assert (first.done, second.done) == (None, None)
    network.post(1, [], [Side(0, 20, 4.0)])
    assert (first.done, second.done) == (4 + 2 + 5, 4 + 2 + 3 + 5)


rates = st.sampled_from([1.0, 3.0, 50.0, 1e3, 1e6])


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_nothing_faster_is_slower(data):
    """Catches an order of messages that depends on who is fast, as in queues that take what comes first."""
    num_ranks, length = data.draw(st.integers(1, 6)), data.draw(st.sampled_from([2, 4, 7]))
    seq_len = num_ranks * length
    pattern = data.draw(patterns(2, longest=seq_len, highest_rate=5))
    plans = plans_of(
        pattern, seq_len, num_ranks, data.draw(st.sampled_from(WITHOUT_DOCUMENTS)), (2, 1)
    )
    slow = Hardware(data.draw(rates), data.draw(rates), data.draw(st.sampled_from([0.0, 0.1, 7.0])))
    fast = Hardware(
        *(rate * data.draw(st.sampled_from([1, 1.5, 100])) for rate in slow[:2]),
        slow.latency_seconds / 2,
    )
    before, after = (model_step(plans, Sizes(1, 4, 2), hardware) for hardware in (slow, fast))
    assert after.step_seconds <= before.step_seconds


def test_plans_of_different_jobs_are_noticed():
    """Catches a model that never ends, or ends without having received."""
    plans = [plans_of(DENSE, 8, 2)[0], plans_of(DilatedPattern((4,), (1,)), 8, 2)[1]]
    with pytest.raises(AssertionError, match="not the plans of one call"):
        model_step(plans, Sizes(1, 1, 4), Hardware(1, 1))


class VirtualRank:
    """A rank's virtual time, and what of it was computing and waiting. It takes the executor's real tensors to the
    model's network. What they hold is not looked at."""

    now = computing = exposed = 0.0

    def __init__(self, number, network, turn, flops_per_second):
        self.number, self.network, self.turn = number, network, turn
        self.flops_per_second = flops_per_second

    def wait_until(self, moment):
        self.exposed += max(0, moment - self.now)
        self.now = max(self.now, moment)

    def take(self, q, k, is_causal, products):
        """For TimedKernel: a call takes its FLOPs, counted from the tensors."""
        batch, num_heads, rows, head_dim = q.shape
        pairs = rows * (rows + 1) // 2 if is_causal else rows * k.shape[2]
        seconds = products * 2 * head_dim * batch * num_heads * pairs / self.flops_per_second
        self.now += seconds
        self.computing += seconds

    def post(self, sends, receives):
        for x, _ in receives:
            x.zero_()
        sides = [[Side(m.peer, x.nbytes, self.now) for x, m in some] for some in (sends, receives)]
        with self.turn:
            self.network.post(self.number, *sides)
            self.turn.notify_all()
        return sides

    def pending(self, sides):
        def wait():
            for side in sides:
                with self.turn:
                    assert self.turn.wait_for(lambda side=side: side.done is not None, timeout=30)
                self.wait_until(side.done)

        return SimpleNamespace(wait=wait)

    def carry_apart(self, sends, receives, moment):
        return [self.pending(sides) for sides in self.post(sends, receives)]

    def carry(self, sends, receives, moment):
        sent, received = self.post(sends, receives)
        return self.pending([*sent, *received])


def carry_out(rank, plan, stage):
    """The executor. Two batch entries, and 16-bit keys whose gradients travel in 32."""
    query, key = (
        torch.zeros(2, plan.num_rows, num_heads, 4, dtype=torch.bfloat16)
        for num_heads in (plan.num_heads, plan.num_kv_heads)
    )
    means = ExecutorOptions(TimedKernel(rank.take), 1.0, rank)
    if stage == "forward":
        executor.forward(RankPlan(plan, None), means, query, key, key)
    else:
        rows = BackwardRows(query, None, query, key, key, query, torch.zeros(query.shape[:3]))
        executor.backward(RankPlan(plan, None), means, rows)


def run_programs(plans, hardware):
    """The executor of every rank, each in a thread: seconds of each stage, computing and exposed."""
    network, turn = Network(len(plans), hardware), Condition()
    ranks = [VirtualRank(i, network, turn, hardware.flops_per_second) for i in range(len(plans))]
    start, seconds = 0.0, []
    with ThreadPoolExecutor(len(plans)) as pool:
        for stage in ("forward", "backward"):
            for rank in ranks:
                rank.now = start
                rank.wait_until(start + hardware.handshake(len(plans)))
            list(pool.map(carry_out, ranks, plans, [stage] * len(plans)))
            seconds.append([rank.now - start for rank in ranks])
            start = max(rank.now for rank in ranks)
    return [
        RankTime(*spent, rank.computing, rank.exposed)
        for *spent, rank in zip(*seconds, ranks, strict=True)
    ]


JOBS = [
    (DilatedPattern((64,), (1,)), "contiguous", 61, 3, (2, 1), None),
    (DilatedPattern((64,), (1,), is_causal=True), "zigzag", 64, 4, (2, 2), None),
    (DilatedPattern((8, 20, 48), (1, 2, 3), is_causal=True), "zigzag", 61, 3, (4, 2), None),
    (DilatedPattern((20, 60), (1, 4), is_causal=True), "contiguous", 60, 5, (4, 2), None),
    (DilatedPattern((40, 60), (3, 7), heads="split"), "contiguous", 60, 4, (4, 4), None),
    (DilatedPattern((8, 64), (1, 12), is_causal=True), "zigzag", 64, 4, (8, 8), None),
    (DilatedPattern((64,), (2,), is_causal=True), "zigzag", 64, 4, (2, 2), (0, 19, 49, 64)),
]
# FLOPs per second, bytes per second, latency. Powers of two keep virtual time exact, so that waits can be equal.
MACHINES = [Hardware(64, 2.0**10, 1), Hardware(64, 2.0**6, 16), Hardware(64, 2.0**20, 0)]


@pytest.mark.parametrize("hardware", MACHINES, ids=["even", "slow network", "fast network"])
@pytest.mark.parametrize("exchange", ["ring", "all_gather"])
@pytest.mark.parametrize("job", JOBS)
def test_the_clock_is_the_executor(job, exchange, hardware):
    """The proof that the clock reads a program as the executor does: every rank computes and waits as long, exactly."""
    pattern, sharding, seq_len, num_ranks, heads, documents = job
    plans = plans_of(pattern, seq_len, num_ranks, sharding, heads, documents)
    plans = [gathered(plan) for plan in plans] if exchange == "all_gather" else plans
    assert any(plan.hops for plan in plans)
    assert run_programs(plans, hardware) == list(model_step(plans, Sizes(2, 4, 2), hardware).ranks)
