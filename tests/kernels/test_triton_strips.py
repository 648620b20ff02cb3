"""Which pairs the fused kernels meet, by enumeration: the functions that the kernels compile, run as Python.

The reference is the definition (`reference.multiplicity`): every (query, key) pair exactly M times.
"""

import random
from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import pytest
import torch
from drawn import patterns
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ring_dilated_attention import DilatedPattern
from ring_dilated_attention.kernels.triton import strips
from ring_dilated_attention.kernels.triton.fused import FusedPass, choose_pass
from ring_dilated_attention.kernels.triton.strips import (
    Bundles,
    Strip,
    bundles_of,
    crosses,
    fused_strips,
    heads_of_bundle,
    phases_of_heads,
    step_of,
)
from ring_dilated_attention.reference import multiplicity


class Visit(NamedTuple):
    """A strip meets a segment of a branch: (full, end) as keys_seen, or (begin, end) as queries_seeing says."""

    branch: int
    start: int
    phase: int
    begin_or_full: int
    end: int


def visits(
    pattern: DilatedPattern,
    strip: Strip,
    phases: tuple[int, ...],
    block: int,
    *,
    of_keys: bool = False,
    heads: int = 1,
) -> Iterator[Visit]:
    """What the fused kernels do for a strip and a bundle: their loops, in their order, without visits of nothing."""
    step = step_of(pattern)
    for branch, ((width, rate), phase) in enumerate(zip(pattern.branches, phases, strict=True)):
        for i in range(strip.first // width, (strip.first + (strip.num_rows - 1) * step) // width + 1):
            start, stop = i * width, min((i + 1) * width, strip.length)
            place = (strip, step, start, stop, phase, rate, pattern.is_causal)
            met = strips.queries_seeing(*place, heads, block) if of_keys else strips.keys_seen(*place, block)
            if met[1]:
                yield Visit(branch, start, phase, *met)


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
    pattern = data.draw(patterns(num_heads, longest=40, highest_rate=5))
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


def test_a_strip_wider_than_every_segment_is_not_considered():
    """Catches a strip of rows that are all in different segments: its work is nearly all masked."""
    found, reason = choose_pass(DilatedPattern((64, 128), (63, 64)), (0, 512))
    assert found is None
    assert reason == "branch by branch: in one pass rows lie 4032 positions apart, and the longest segment has 128"
    _, reason = choose_pass(DilatedPattern((2**31,), (300,)), (0, 200, 300))  # documents end segments
    assert reason.endswith("lie 300 positions apart, and the longest segment has 200")
    pattern, borders = DilatedPattern((2**31,), (199,)), (0, 200, 300)
    assert choose_pass(pattern, borders) == (FusedPass(pattern, borders), "all branches at once, with rows 199 apart")
