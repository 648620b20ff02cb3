"""Which pairs the fused kernels meet, by enumeration: the functions that the kernels compile, run as Python.

The reference is the definition (`reference.multiplicity`): every (query, key) pair exactly M times.
"""

import random
from itertools import pairwise, product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ring_dilated_attention import DilatedPattern
from ring_dilated_attention.kernels.triton import shapes, strips
from ring_dilated_attention.kernels.triton.shapes import (
    Cost,
    branches_work,
    choose_shape,
    costs_of,
    documents_that_stand_for_all,
    fused_work,
)
from ring_dilated_attention.kernels.triton.strips import (
    Bundles,
    bundles_of,
    crosses,
    fused_strips,
    heads_of_bundle,
    phases_of_heads,
    step_of,
    visits,
)
from ring_dilated_attention.plan.job import Job
from ring_dilated_attention.plan.planner import make_plan
from ring_dilated_attention.plan.sharding import make_shards
from ring_dilated_attention.reference import multiplicity


def met_by_query_strips(pattern, borders, num_heads, num_kv_heads, block_m, block_n) -> Tensor:
    """(H, N, N): how often the forward kernel computes each pair, masks applied as it applies them."""
    count = torch.zeros(num_heads, borders[-1], borders[-1], dtype=torch.int64)
    bundles, phases, step = bundles_of(pattern, num_heads, num_kv_heads, block_m), *_shared(pattern, num_heads)
    positions = block_m // bundles.size
    selects = crosses(pattern, borders, positions)
    for strip in fused_strips(borders, step, positions):
        assert 0 < strip.num_rows <= positions
        for i in range(num_heads // bundles.size):
            heads = heads_of_bundle(bundles, num_heads, num_kv_heads, i)
            for visit in visits(pattern, strip, phases[heads.start], block_n):
                width, rate = pattern.branches[visit.branch]
                stop = min(visit.start + width, strip.length)
                assert visit.begin_or_full % block_n == 0
                keys = range(visit.start + visit.phase, stop, rate)
                for row in range(strip.num_rows):
                    t = strip.first + row * step
                    last = (t - visit.start - visit.phase) // rate if pattern.is_causal else visit.end - 1
                    if selects and not visit.start <= t < stop:
                        last = -1
                    seen = [j for j in range(visit.end) if j < visit.begin_or_full or j <= last]
                    for h in heads:
                        for j in seen:
                            count[h, strip.document + t, strip.document + keys[j]] += 1
    return count


def met_by_key_strips(pattern, borders, num_heads, num_kv_heads, block_m, block_n) -> Tensor:
    """(H, N, N): how often the kernel of dk and dv computes each pair."""
    count = torch.zeros(num_heads, borders[-1], borders[-1], dtype=torch.int64)
    bundles, phases, step = bundles_of(pattern, num_heads, num_kv_heads, block_m), *_shared(pattern, num_heads)
    selects = crosses(pattern, borders, block_n)
    for strip in fused_strips(borders, step, block_n):
        for i in range(num_heads // bundles.size):
            heads = heads_of_bundle(bundles, num_heads, num_kv_heads, i)
            for visit in visits(pattern, strip, phases[heads.start], block_m, of_keys=True, heads=bundles.size):
                width, rate = pattern.branches[visit.branch]
                stop = min(visit.start + width, strip.length)
                assert visit.begin_or_full % block_m == 0
                for row in range(strip.num_rows):
                    t = strip.first + row * step
                    first = (t - visit.start - visit.phase) // rate if pattern.is_causal else 0
                    if selects and not visit.start <= t < stop:
                        first = visit.end
                    for query in range(visit.begin_or_full, visit.end):
                        position, j = divmod(query, bundles.size)
                        if position >= first:
                            seen_by = visit.start + visit.phase + position * rate
                            assert seen_by < stop
                            count[heads[j], strip.document + seen_by, strip.document + t] += 1
    return count


def _shared(pattern, num_heads):
    return phases_of_heads(pattern, num_heads), step_of(pattern)


CASES = [
    ((64,), 2, 2, DilatedPattern((16, 64), (1, 2), is_causal=True)),  # no strip crosses a border
    ((63,), 4, 4, DilatedPattern((16, 50), (1, 3), is_causal=True)),
    ((47,), 6, 2, DilatedPattern((20, 47), (2, 3), phase="blocked")),
    ((7, 8, 40), 6, 2, DilatedPattern((4, 10), (1, 4), is_causal=True, phase="blocked")),
    ((41,), 5, 1, DilatedPattern((3, 8, 19), (1, 2, 4), heads="split")),
    ((24,), 8, 2, DilatedPattern((8, 24), (1, 2), is_causal=True)),  # heads 0, 2 and 1, 3 of four fill a strip together
    ((30,), 4, 1, DilatedPattern((9, 30), (1, 1), is_causal=True)),  # all heads do
    ((31,), 2, 2, DilatedPattern((31,), (40,))),  # a rate above the length: most phases are empty
    ((1, 2, 5), 3, 3, DilatedPattern((1, 2), (1, 5), is_causal=True)),
]


@pytest.mark.parametrize("blocks", [(4, 4), (16, 8)], ids=str)
@pytest.mark.parametrize("met", [met_by_query_strips, met_by_key_strips])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_pair_is_met_as_often_as_the_definition_says(case, met, blocks):
    """Catches a strip that misses or repeats a pair at a border of a segment, a document, a block or a phase."""
    ends, num_heads, num_kv_heads, pattern = case
    borders = (0, *ends)
    count = met(pattern, borders, num_heads, num_kv_heads, *blocks)
    assert torch.equal(count, multiplicity(pattern, borders[-1], num_heads, borders))


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_pattern_is_met_as_often_as_the_definition_says(data):
    """Catches what no chosen case thought of."""
    num_kv_heads = data.draw(st.integers(1, 2))
    num_heads = num_kv_heads * data.draw(st.integers(1, 4))
    heads = data.draw(st.sampled_from(["all", "all", "split"]))
    num_branches = data.draw(st.integers(1, min(3, num_heads) if heads == "split" else 3))
    lengths = data.draw(st.lists(st.integers(1, 40), min_size=num_branches, max_size=num_branches))
    rates = data.draw(st.lists(st.integers(1, 5), min_size=num_branches, max_size=num_branches))
    phase = "modulo" if heads == "split" else data.draw(st.sampled_from(["modulo", "blocked"]))
    pattern = DilatedPattern(lengths, rates, is_causal=data.draw(st.booleans()), phase=phase, heads=heads)
    ends = data.draw(st.sets(st.integers(1, 32), min_size=1, max_size=3))
    borders = (0, *sorted(ends))
    blocks = data.draw(st.sampled_from([(1, 1), (4, 2), (8, 4), (16, 16)]))
    expected = multiplicity(pattern, borders[-1], num_heads, borders)
    for met in (met_by_query_strips, met_by_key_strips):
        assert torch.equal(met(pattern, borders, num_heads, num_kv_heads, *blocks), expected)


@pytest.mark.parametrize(
    ("met", "change"),
    [
        (met_by_query_strips, (1, 0)),  # a block without a mask that needs one
        (met_by_query_strips, (0, -1)),
        (met_by_key_strips, (1, 0)),
        (met_by_key_strips, (0, 1)),
        (met_by_key_strips, (0, -1)),
    ],
)
def test_a_wrong_visit_is_seen(met, change, monkeypatch):
    """Proof that the enumeration can fail: a block begun too late, one key or query too many or too few."""
    for name in ("keys_seen", "queries_seeing"):
        right = getattr(strips, name)

        def wrong(*place, right=right):
            begin_or_full, end = right(*place)
            return (begin_or_full + change[0] * place[-1], end + change[1]) if end else (0, 0)

        monkeypatch.setattr(strips, name, wrong)
    pattern = DilatedPattern((16, 50), (1, 3), is_causal=True)
    try:
        count = met(pattern, (0, 63), 2, 2, 4, 4)
    except (AssertionError, IndexError):  # a row outside the segment
        return
    assert not torch.equal(count, multiplicity(pattern, 63, 2))


@pytest.mark.parametrize("positions", [1, 4, 16, 64])
@pytest.mark.parametrize("step", [1, 3, 8, 40])
@pytest.mark.parametrize("ends", [(1,), (63,), (7, 8, 40)], ids=str)
def test_every_position_is_in_one_strip(ends, step, positions):
    """Catches a row that is written twice, or never (uninitialised memory would remain)."""
    borders = (0, *ends)
    rows = []
    for strip in fused_strips(borders, step, positions):
        assert (strip.document, strip.document + strip.length) in list(pairwise(borders))
        assert strip.first + (strip.num_rows - 1) * step < strip.length
        rows += [strip.document + strip.first + i * step for i in range(strip.num_rows)]
    assert sorted(rows) == list(range(borders[-1]))


def test_bundles_hold_heads_of_equal_phases_that_share_keys():
    """Catches a strip whose heads read different phases, and a head in two bundles or in none."""
    random.seed(0)
    for _ in range(200):
        num_kv_heads = random.randint(1, 4)
        num_heads = num_kv_heads * random.randint(1, 12)
        heads = random.choice(["all", "split"])
        branches = random.randint(1, min(3, num_heads))
        phase = "modulo" if heads == "split" else random.choice(["modulo", "blocked"])
        rates = [random.randint(1, 6) for _ in range(branches)]
        pattern = DilatedPattern([16] * branches, rates, phase=phase, heads=heads)
        bundles = bundles_of(pattern, num_heads, num_kv_heads, 8)
        phases, found = phases_of_heads(pattern, num_heads), []
        for i in range(num_heads // bundles.size):
            bundle = heads_of_bundle(bundles, num_heads, num_kv_heads, i)
            assert len({phases[h] for h in bundle}) == 1
            assert len({h * num_kv_heads // num_heads for h in bundle}) == 1
            found += bundle
        assert sorted(found) == list(range(num_heads))
    assert bundles_of(DilatedPattern((16, 16), (1, 2)), 8, 2, 64) == Bundles(2, 1, 2)
    assert bundles_of(DilatedPattern((16, 16), (1, 2), phase="blocked"), 8, 2, 64) == Bundles(4, 4, 1)
    assert bundles_of(DilatedPattern((16,), (1,)), 64, 1, 16) == Bundles(16, 16, 1)


FORWARD = (costs_of(((128, 64),)), costs_of(((64, 64),)))
BACKWARD = (costs_of(((128, 64), (64, 64))),)


@pytest.mark.parametrize(
    ("lengths", "rates", "num_heads", "kind", "share"),
    [
        ((2048, 4096), (1, 2), 8, "fused", 0.95),
        ((2048, 4096, 8192, 16384), (1, 2, 4, 8), 8, "fused", 0.85),
        ((2048, 4096, 8192, 16384, 32768), (1, 2, 4, 6, 12), 12, "branches", 0.97),
    ],
)
def test_the_choice_by_counted_work(lengths, rates, num_heads, kind, share):
    """Catches a count that is off: these shares were found by hand for causal patterns and strips of 64 rows."""
    choice = choose_shape(DilatedPattern(lengths, rates, is_causal=True), (0, 65536), num_heads, num_heads, 64, FORWARD)
    assert choice.kind == kind
    assert choice.share == pytest.approx(share, rel=0.03)  # the count of 65,536 positions is an estimate
    assert choice.reason.count("useful") == 4  # all candidates are listed


def test_a_strip_wider_than_every_segment_is_not_considered():
    """Catches a strip of rows that are all in different segments: its work is nearly all masked."""
    for candidates, prefers_fused in product((FORWARD, BACKWARD), (False, True)):
        call = (DilatedPattern((64, 128), (63, 64)), (0, 512), 4, 4, 64, candidates)
        choice = choose_shape(*call, prefers_fused=prefers_fused)
        assert choice.kind == "branches"
        assert "R = 4032 is no less than the longest segment, 128" in choice.reason
        call = (DilatedPattern((2**31,), (300,)), (0, 200, 300), 4, 4, 64, candidates)
        assert "R = 300 is no less than the longest segment, 200" in choose_shape(*call).reason


def test_the_shape_that_is_preferred():
    """Catches a preference for fused strips that does not take the cheapest of them, or that is not heeded."""
    pattern = DilatedPattern(*PATTERNS[2], is_causal=True)
    for candidates in (FORWARD, BACKWARD):
        call = (pattern, (0, 524_288), 12, 12, 64, candidates)
        assert choose_shape(*call).kind == "branches"
        choice = choose_shape(*call, prefers_fused=True)
        assert (choice.kind, choice.block) == ("fused", candidates[-1][0].block_m)


def test_the_choice_for_the_backward():
    """Catches a backward that is chosen by the forward's work: its strips are others, and more of it is merged."""
    pattern = DilatedPattern((2048, 4096), (1, 2), is_causal=True)
    choice = choose_shape(pattern, (0, 65536), 8, 8, 64, BACKWARD)
    query, keys = BACKWARD[0]
    pairs = branches_work(pattern, (0, 65536), 8, 8, query).pairs
    computed = 3 * fused_work(pattern, (0, 65536), 8, 8, query) + 4 * fused_work(pattern, (0, 65536), 8, 8, keys)
    assert choice == choice._replace(kind="fused", block=128, share=7 * pairs / computed)


@pytest.mark.parametrize("of_keys", [False, True])
def test_the_count_is_that_of_the_enumeration(of_keys):
    """Catches a shortcut of the count (heads by phase, sampled strips) that changes its result."""
    for ends, num_heads, num_kv_heads, pattern in CASES:
        borders, kernel = (0, *ends), Cost(16, 8, 4, 2, of_keys)
        bundles = bundles_of(pattern, num_heads, num_kv_heads, kernel.block_m)
        phases, step = _shared(pattern, num_heads)
        computed = 0
        for strip in fused_strips(borders, step, kernel.block_n if of_keys else kernel.block_m // bundles.size):
            for i in range(num_heads // bundles.size):
                head = heads_of_bundle(bundles, num_heads, num_kv_heads, i).start
                block = kernel.block_m if of_keys else kernel.block_n
                for visit in visits(pattern, strip, phases[head], block, of_keys=of_keys, heads=bundles.size):
                    first = visit.begin_or_full if of_keys else 0
                    computed += len(range(first, visit.end, block)) * kernel.block_m * kernel.block_n
        assert fused_work(pattern, borders, num_heads, num_kv_heads, kernel) == computed
        useful = multiplicity(pattern, borders[-1], num_heads, borders).sum()
        work = branches_work(pattern, borders, num_heads, num_kv_heads, kernel)
        assert work.pairs == useful <= work.computed


@pytest.mark.parametrize("of_keys", [False, True])
def test_the_rows_that_branches_merge(of_keys):
    """Catches rows of a first branch counted as merged, and rows of a later one that are not."""
    kernel = Cost(16, 16, 2, 1, of_keys)
    work = branches_work(DilatedPattern((16, 64), (1, 2)), (0, 64), 4, 2, kernel)
    rows_of_the_second_branch = 64 // 2 * 4  # of each query head; a key/value head is read in both phases
    assert work.merged == rows_of_the_second_branch
    assert branches_work(DilatedPattern((16,), (1,)), (0, 64), 4, 2, kernel).merged == 0


# The patterns of the GPU benchmark, and the block sizes of an H100 in bfloat16.
PATTERNS = [
    ((2048, 4096), (1, 2)),
    ((2048, 4096, 8192, 16384), (1, 2, 4, 8)),
    ((2048, 4096, 8192, 16384, 32768), (1, 2, 4, 6, 12)),
]
KERNELS = [kernels[0] for kernels in FORWARD] + list(BACKWARD[0])


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("branches", PATTERNS, ids=str)
def test_a_sampled_count_is_near_the_exact_one(branches, is_causal, monkeypatch):
    """Catches samples that fall at the same places of every segment: counts of half or double of what is computed."""
    pattern = DilatedPattern(*branches, is_causal=is_causal)
    call = (pattern, (0, 65536), 4, 4)
    sampled = [fused_work(*call, kernel) for kernel in KERNELS]
    shapes.fused_document.cache_clear()
    monkeypatch.setattr(shapes, "_MOST_VISITORS", 10**9)
    exact = [fused_work(*call, kernel) for kernel in KERNELS]
    shapes.fused_document.cache_clear()
    assert sampled == pytest.approx(exact, rel=0.03)
    monkeypatch.undo()
    longer = [fused_work(pattern, (0, 32 * 32768), 4, 4, kernel) / 16 for kernel in KERNELS]  # whole segments: as many
    assert longer == pytest.approx(exact, rel=0.03)


@pytest.mark.parametrize("candidates", [FORWARD, BACKWARD], ids=["forward", "backward"])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("branches", PATTERNS, ids=str)
def test_the_choice_does_not_depend_on_the_length(branches, is_causal, candidates):
    """Catches a choice by an error of the count: whole segments cost the same wherever they lie."""
    pattern = DilatedPattern(*branches, is_causal=is_causal)
    first, *others = (choose_shape(pattern, (0, 32768 * k), 12, 12, 64, candidates) for k in (1, 8, 32))
    assert first.share <= 1
    for choice in others:
        assert choice[:2] == first[:2]
        assert choice.share == pytest.approx(first.share, rel=0.03)


def random_borders(seed, number, seq_len):
    return (0, *sorted(random.Random(seed).sample(range(1, seq_len), number - 1)), seq_len)


@pytest.mark.parametrize("branches", PATTERNS, ids=str)
def test_few_documents_stand_for_many(branches):
    """Catches documents that stand for others than those of their length: one long one among many short ones too."""
    pattern = DilatedPattern(*branches, is_causal=True)
    long_one = (0, *range(100, 2000, 100), 34000)
    for borders in (random_borders(0, 200, 131072), random_borders(1, 20, 32768), long_one):
        assert len(documents_that_stand_for_all(borders)) <= 8
        for kernel in KERNELS:
            lengths = [stop - start for start, stop in pairwise(borders)]
            each = [shapes.fused_document(pattern, n, 2, 2, kernel) for n in lengths]
            assert fused_work(pattern, borders, 2, 2, kernel) == pytest.approx(sum(each), rel=0.12)
            plan = make_plan(Job(pattern, make_shards("contiguous", borders[-1:]), 2, 2, borders), 0)
            assert branches_work(pattern, borders, 2, 2, kernel).pairs == pytest.approx(plan.pairs, rel=0.12)


def test_documents_of_few_lengths_stand_for_themselves():
    """Catches a short document that is not counted as it is, and weights that do not add up to all positions."""
    assert documents_that_stand_for_all((0, 100_003)) == {100_003: 1}
    assert documents_that_stand_for_all((0, 7, 9, 16, 32)) == {2: 1, 7: 2, 16: 1}
    for seed in range(20):
        documents = documents_that_stand_for_all(random_borders(seed, 100, 65536))
        assert sum(length * number for length, number in documents.items()) == pytest.approx(65536)


@pytest.mark.parametrize("branches", PATTERNS, ids=str)
def test_a_new_batch_of_documents_is_not_counted_anew(branches, monkeypatch):
    """Catches a count at every step of a training with packed documents: tenths of a second on the host."""
    pattern = DilatedPattern(*branches, is_causal=True)
    for seed in range(50):
        choose_shape(pattern, random_borders(seed, 200, 131072), 4, 4, 64, FORWARD)
    counts = (shapes.fused_document, shapes.branches_document)
    known = sum(count.cache_info().misses for count in counts)
    for seed in range(50, 60):
        choose_shape(pattern, random_borders(seed, 200, 131072), 4, 4, 64, FORWARD)
    asked = 10 * 8 * len(FORWARD) * len(counts)
    assert sum(count.cache_info().misses for count in counts) - known < asked / 10
