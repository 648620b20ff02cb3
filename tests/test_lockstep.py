"""Jobs of many ranks without their plans: held against the plans and the clock where both can be had."""

import time

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from ring_dilated_attention.kernels.traits import TRAITS
from ring_dilated_attention.pattern import DilatedPattern
from ring_dilated_attention.plan.advice import exposed_of
from ring_dilated_attention.plan.clock import Hardware, model_step
from ring_dilated_attention.plan.exchange import choose_exchange
from ring_dilated_attention.plan.lockstep import Lockstep, why_not, zigzag_balance
from ring_dilated_attention.plan.memory import Sizes, attention_memory
from ring_dilated_attention.plan.planner import make_plan
from ring_dilated_attention.plan.sharding import default_lengths, make_shards
from ring_dilated_attention.plan.sharing import branch_shares


@st.composite
def jobs(draw):
    num_ranks, length = draw(st.sampled_from([1, 2, 3, 4, 6, 8])), 16
    seq_len = num_ranks * length
    lengths = [4, 16, 32, 48, 64, seq_len, 2**62]
    num = draw(st.integers(1, 3))
    pattern = DilatedPattern(
        draw(st.lists(st.sampled_from(lengths), min_size=num, max_size=num)),
        draw(st.lists(st.sampled_from([1, 2, 4, 8, 16]), min_size=num, max_size=num)),
        is_causal=draw(st.booleans()),
        **draw(st.sampled_from([{}, {"phase": "blocked"}, {"heads": "split"}])),
    )
    return pattern, seq_len, num_ranks, draw(st.sampled_from([(4, 4), (4, 2), (6, 1)]))


HARDWARE = st.builds(
    Hardware,
    st.sampled_from([1e6, 1e8, 1e10]),
    st.sampled_from([1e5, 1e7, 1e9]),
    st.sampled_from([0.0, 1e-5, 1e-3]),
    st.sampled_from([None, 1e7]),
    st.sampled_from([0.0, 1e-4]),
    st.sampled_from([None, 1e-2]),
)


@settings(max_examples=150, deadline=None)
@given(jobs(), HARDWARE, st.sampled_from([2, 4]))
def test_lockstep_is_the_plans_and_the_clock(job, hardware, itemsize):
    """Catches a rank that was forgotten among those that may be busiest, and a bound that does not hold."""
    pattern, seq_len, num_ranks, heads = job
    assume(why_not(pattern, seq_len, num_ranks, "contiguous", None) is None)
    sizes = Sizes(1, 8, itemsize)
    shards = make_shards("contiguous", (seq_len // num_ranks,) * num_ranks)
    plans = [make_plan(pattern, shards, rank, *heads) for rank in range(num_ranks)]
    found = Lockstep(pattern, seq_len, num_ranks, *heads, sizes)
    assert found.pairs_of_ranks == [plan.pairs for plan in plans]
    assert list(zip(*found.sent_of_ranks, strict=True)) == [plan.sent(backward=True) for plan in plans]
    assert found.num_hops == max(len(plan.hops) for plan in plans)
    choice = choose_exchange(pattern, shards, *heads, None, sizes, traffic=found.traffic())
    assert choice == choose_exchange(pattern, shards, *heads, None, sizes)
    peaks = [attention_memory(plan, sizes, TRAITS["cpu"]).forward_backward.num_bytes for plan in plans]
    assert found.memory(TRAITS["cpu"]).forward_backward.num_bytes == max(peaks)
    step = model_step(plans, sizes, hardware).step_seconds
    bounds = found.step_seconds(hardware)
    assert bounds.least <= step * (1 + 1e-9)
    assert step <= bounds.most * (1 + 1e-9)
    if not pattern.is_causal:
        assert bounds.is_exact
    shares = branch_shares(pattern, shards, plans, *heads)
    assert found.sent_of_branches() == [share.sent * sizes.unit * itemsize for share in shares]
    assert found.exposed(hardware, bounds) <= exposed_of(model_step(plans, sizes, hardware)) + 1e-9


@settings(max_examples=60, deadline=None)
@given(jobs())
def test_zigzag_is_the_plans(job):
    pattern, seq_len, num_ranks, heads = job
    shards = make_shards("zigzag", default_lengths("zigzag", seq_len, num_ranks))
    work = [make_plan(pattern, shards, rank, *heads).pairs for rank in range(num_ranks)]
    expected = sum(work) / (num_ranks * max(work)) if max(work) else 1.0
    assert zigzag_balance(pattern, seq_len, num_ranks, heads[0]) == expected


@pytest.mark.parametrize("lengths", [(16, 64, 160), (32, 48), (80, 112, 48)])
def test_the_busiest_of_many_ranks(lengths):
    """Also where segments of two branches end together on a rank in the middle alone."""
    pattern = DilatedPattern(lengths, (1, 2, 16)[: len(lengths)], is_causal=True)
    found = Lockstep(pattern, 300 * 16, 300, 4, 4, Sizes(1, 8, 4))
    shards = make_shards("contiguous", (16,) * 300)
    plans = [make_plan(pattern, shards, rank, 4, 4) for rank in range(300)]
    assert found.pairs_of_ranks == [plan.pairs for plan in plans]
    assert found.busiest == max(range(300), key=lambda rank: plans[rank].pairs)
    assert found.largest_sent()[0] == max(plan.sent()[0] for plan in plans) * 8 * 4
    assert sum(found.pairs_of_ranks) == found.total_pairs


@pytest.mark.parametrize("is_causal", [False, True])
def test_many_ranks_take_a_moment(is_causal):
    n, start = 2**30, time.process_time()
    found = Lockstep(
        DilatedPattern((2048, 2**20, n), (1, 256, 2**14), is_causal=is_causal), n, 65_536, 32, 8, Sizes(1, 128, 2)
    )
    bounds = found.step_seconds(Hardware(5e14, 5e10, 1e-5))
    assert 0 < bounds.least <= bounds.most
    assert 0 < found.balance <= 1
    assert 0.9 < zigzag_balance(found.pattern, n, 65_536, 32) <= 1
    assert time.process_time() - start < 3  # a core that nobody shares takes less than one


def test_the_reason_is_given():
    pattern = DilatedPattern((2048, 6000), (1, 3))
    assert why_not(pattern, 10, 3, "contiguous", None) == "10 positions do not divide among 3 ranks"
    assert why_not(pattern, 8192, 4, "zigzag", None) == "shards are zigzag"
    assert "segments of 6,000 neither divide" in why_not(pattern, 8192, 4, "contiguous", None)
    assert "rate 3 does not divide 2,048" in why_not(DilatedPattern((4096,), (3,)), 8192, 4, "contiguous", None)
    assert "documents" in why_not(DilatedPattern((4096,), (1,)), 8192, 4, "contiguous", (0, 1, 8192))
