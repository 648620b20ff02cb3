"""Jobs of many ranks without their plans: held against the plans and the clock where both can be had."""

import time

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from ring_dilated_attention.kernels.traits import TRAITS
from ring_dilated_attention.pattern import DilatedPattern
from ring_dilated_attention.forecast.advice import exposed_of
from ring_dilated_attention.plan.alternatives import alternatives
from ring_dilated_attention.forecast.clock import Hardware, model_step
from ring_dilated_attention.plan.exchange import RankPlan, choose_exchange, plan_exchange
from ring_dilated_attention.plan.forms import Dealt, closed_form, why_not_by
from ring_dilated_attention.plan.job import Job
from ring_dilated_attention.plan.lockstep import EqualJob, Lockstep, why_not
from ring_dilated_attention.plan.memory import Sizes, attention_memory
from ring_dilated_attention.plan.planner import make_plan
from ring_dilated_attention.plan.sharding import Cut, make_shards
from ring_dilated_attention.plan.sharing import branch_shares

HEADS = [(4, 4), (4, 2), (6, 1), (8, 8), (12, 6)]
WAYS = [("ring", 1), ("all_gather", 1), ("all_to_all", 1), ("ring", 2), ("ring", 3)]


@st.composite
def jobs(draw, ways=WAYS):
    """Any rates, segments that are cut off at the end, and both shardings."""
    exchange, inner = draw(st.sampled_from(ways))
    num_ranks, length = draw(st.sampled_from([1, 2, 3, 4, 6, 8, 10, 12])), draw(st.sampled_from([8, 12, 16]))
    sharding = draw(st.sampled_from(["contiguous", "zigzag"]))
    seq_len = num_ranks * length
    heads, num = draw(st.sampled_from(HEADS)), draw(st.integers(1, 3))
    lengths = [2, 4, length // 2, length, 2 * length, 3 * length, 4 * length, seq_len, 2**62]
    pattern = DilatedPattern(
        draw(st.lists(st.sampled_from(lengths), min_size=num, max_size=num)),
        draw(st.lists(st.sampled_from([1, 2, 3, 4, 5, 6, 8, 12, 16, 20, 33]), min_size=num, max_size=num)),
        is_causal=draw(st.booleans()),
        **draw(st.sampled_from([{}, {"phase": "blocked"}, {"heads": "split"}])),
    )
    dealing = num_ranks if exchange == "all_to_all" else inner
    assume(num_ranks % inner == 0 and heads[1] % dealing == 0)
    job = EqualJob(
        pattern, seq_len, num_ranks, *heads, Sizes(draw(st.sampled_from([1, 2])), 8, draw(st.sampled_from([2, 4])))
    )
    assume(why_not_by(exchange, job, sharding, inner) is None)
    return exchange, job, sharding, inner


def plans_of(exchange, job, sharding, inner) -> list[RankPlan]:
    cut = Cut(sharding, job.num_ranks, inner=inner)
    shards = cut.shards_of(cut.default_lengths(job.seq_len))
    heads = job.num_heads, job.num_kv_heads
    return [
        plan_exchange(exchange, Job(job.pattern, shards, *heads), rank, inner=inner) for rank in range(job.num_ranks)
    ]


def part_length(exchange, job, sharding, inner) -> int:
    num_ranks = 1 if exchange == "all_to_all" else job.num_ranks // inner
    return job.seq_len // num_ranks // (2 if sharding == "zigzag" and num_ranks > 1 else 1)


HARDWARE = st.builds(
    Hardware,
    st.sampled_from([1e6, 1e8, 1e10]),
    st.sampled_from([1e5, 1e7, 1e9]),
    st.sampled_from([0.0, 1e-5, 1e-3]),
    st.sampled_from([None, 1e7]),
    st.sampled_from([0.0, 1e-4]),
    st.sampled_from([None, 1e-2]),
)


@settings(max_examples=250, deadline=None)
@given(jobs())
def test_work_bytes_and_memory_are_the_plans(case):
    """Catches a rank that was forgotten among those that may be busiest, and a rate that leaves it a row more."""
    plans, sizes = plans_of(*case), case[1].sizes
    found = closed_form(*case)
    assert found.pairs_of_ranks == [x.plan.pairs for x in plans]
    sent = [(x.bytes_sent(sizes), sum(x.bytes_sent(sizes, backward=b) for b in (False, True))) for x in plans]
    assert found.largest_sent == tuple(map(max, zip(*sent, strict=True)))
    assert found.num_hops == max(len(x.plan.hops) for x in plans)
    if not isinstance(found, Dealt):
        assert list(zip(*found.sent_of_ranks, strict=True)) == [x.plan.sent(backward=True) for x in plans]
        unit = sizes.unit * sizes.itemsize
        assert sum(found.sent_of_branches()) == unit * sum(x.plan.sent()[0] for x in plans)
    peaks = [attention_memory(x.plan, sizes, TRAITS["cpu"], x.dealing).forward_backward.num_bytes for x in plans]
    if found.is_memory_exact:
        assert found.memory(TRAITS["cpu"]).forward_backward.num_bytes == max(peaks)
    else:
        assert found.memory(TRAITS["cpu"]).forward_backward.num_bytes == pytest.approx(max(peaks), rel=0.35)


@settings(max_examples=250, deadline=None)
@given(jobs(), HARDWARE)
def test_the_time_is_between_its_bounds(case, hardware):
    exchange, job, sharding, inner = case
    length = part_length(*case)
    plans = plans_of(*case)
    step = model_step([x.plan for x in plans], job.sizes, hardware, [x.dealing for x in plans if x.dealing] or None)
    found = closed_form(*case)
    bounds = found.step_seconds(hardware)
    assert bounds.least <= step.step_seconds * (1 + 1e-9)
    assert step.step_seconds <= bounds.most * (1 + 1e-9)
    assert found.exposed(hardware, bounds) <= exposed_of(step) + 1e-9
    is_even = all(
        length % r == 0 and (job.seq_len % w == 0 or w > job.seq_len) for w, r in job.pattern.branches if w > length
    )
    if exchange == "ring" and inner == 1 and sharding == "contiguous" and is_even and not job.pattern.is_causal:
        assert bounds.is_exact


@settings(max_examples=100, deadline=None)
@given(jobs([("ring", 1)]))
def test_the_choice_and_what_branches_send_are_the_plans(case):
    _, job, sharding, _ = case
    pattern, seq_len, num_ranks, *heads, sizes = job
    plans = [x.plan for x in plans_of(*case)]
    shards = Cut(sharding, num_ranks).shards_of(Cut(sharding, num_ranks).default_lengths(seq_len))
    found = Lockstep(job, sharding)
    shares = branch_shares(Job(pattern, shards, *heads), plans)
    assert found.sent_of_branches() == [share.sent * sizes.unit * sizes.itemsize for share in shares]
    assert found.sharing == [share.num_sharing for share in shares]
    if sharding == "contiguous" and found.is_memory_exact:
        choice = choose_exchange(Job(pattern, shards, *heads), sizes, traffic=found.traffic())
        assert choice == choose_exchange(Job(pattern, shards, *heads), sizes)


@pytest.mark.parametrize("lengths", [(16, 64, 160), (32, 48), (80, 112, 48)])
@pytest.mark.parametrize("rates", [(1, 2, 16), (3, 7, 20)])
@pytest.mark.parametrize("is_causal", [False, True])
def test_the_busiest_of_many_ranks(lengths, rates, is_causal):
    """Also where segments of two branches end together on a rank in the middle alone, and after many periods."""
    pattern = DilatedPattern(lengths, rates[: len(lengths)], is_causal=is_causal)
    found = Lockstep(EqualJob(pattern, 300 * 16, 300, 4, 4, Sizes(1, 8, 4)))
    shards = make_shards("contiguous", (16,) * 300)
    plans = [make_plan(Job(pattern, shards, 4, 4), rank) for rank in range(300)]
    assert found.pairs_of_ranks == [plan.pairs for plan in plans]
    assert found.busiest == max(range(300), key=lambda rank: plans[rank].pairs)
    assert list(zip(*found.sent_of_ranks, strict=True)) == [plan.sent(backward=True) for plan in plans]


@pytest.mark.parametrize(
    ("rates", "is_causal"), [((1, 256, 2**13), False), ((1, 256, 2**13), True), ((6, 12, 640), True)]
)
def test_many_ranks_take_a_moment(rates, is_causal):
    """All ways of 65,536 of them, but an all-to-all, for which heads are too few."""
    n, start = 2**30, time.process_time()
    pattern = DilatedPattern((2048, 2**20, n), rates, is_causal=is_causal)
    job = EqualJob(pattern, n, 65_536, 32, 8, Sizes(1, 128, 2))
    found = alternatives(job, Hardware(5e14, 5e10, 1e-5), TRAITS["cpu"])
    ways = [x for x in found if not x.why_not]
    assert len(ways) == 2 * 6
    assert all(0 < x.step_seconds.least <= x.step_seconds.most for x in ways)
    assert all(0 < x.balance <= 1 for x in ways)
    assert time.process_time() - start < 6  # a core that nobody shares takes less than one


def test_the_reason_is_given():
    def reason(lengths, rates, seq_len, num_ranks, sharding="contiguous"):
        return why_not(EqualJob(DilatedPattern(lengths, rates), seq_len, num_ranks, 1, 1, Sizes(1, 8, 4)), sharding)

    both = (2048, 6000), (1, 3)
    assert reason(*both, 10, 3) == "10 positions do not divide among 3 ranks"
    assert "in two parts each" in str(reason(*both, 6, 6, "zigzag"))
    assert "segments of 6,000 neither divide" in str(reason(*both, 8192, 4))
    assert "reaches over the middle" in str(reason((6144,), (1,), 8192, 4, "zigzag"))
    assert reason((4096,), (3,), 8192, 4) is None
    assert reason((6144,), (1,), 8192, 4) is None
