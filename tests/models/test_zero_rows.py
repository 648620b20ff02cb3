"""torchscale's padding in integers, place by place against what its code does: pad, cut, fill up, dilate, crop."""

from hypothesis import given, settings
from hypothesis import strategies as st

from ring_dilated_attention.models.torchscale.zero_rows import (
    is_misaligned,
    last_segment_start,
    num_zero_keys,
    padded_position,
    padded_segment,
)
from ring_dilated_attention.pattern import Branch, DilatedPattern

BRANCHES = st.builds(Branch, st.integers(1, 12), st.integers(1, 8))


def places_of(branch, length):
    """The row at each place of torchscale's padded tensor, None for a row of zeros."""
    w = min(branch.segment_length, length)
    for start in range(0, length, w):
        rows = [row if row < length else None for row in range(start, start + w)]
        yield from rows + [None] * (-w % branch.dilation_rate)


def phase_of(branch, head, num_heads):
    return DilatedPattern(*([x] for x in branch[:2]), phase="blocked").phase_of(0, head, num_heads)


@settings(max_examples=150, deadline=None)
@given(BRANCHES, st.integers(1, 5), st.integers(1, 40))
def test_zero_keys_of_a_branch_that_is_not_misaligned(branch, num_heads, length):
    """Catches a miscounted zero key, and one that is seen outside of the last segment."""
    if is_misaligned(branch, length):
        return
    places, rate = list(places_of(branch, length)), branch.dilation_rate
    w = min(branch.segment_length, length)
    taken = w + -w % rate  # places of a segment
    for place, row in enumerate(places):
        for head in range(num_heads):
            phase, start = phase_of(branch, head, num_heads), place // taken * taken
            if row is None or place % taken % rate != phase:
                continue
            expected = 0
            if row >= last_segment_start(branch, length):
                expected = num_zero_keys(branch, length, phase)
            assert places[start + phase : start + taken : rate].count(None) == expected


@settings(max_examples=150, deadline=None)
@given(BRANCHES, st.integers(1, 40))
def test_padded_rows_of_a_misaligned_branch(branch, length):
    """Rows and zero rows lie where torchscale's padding puts them, and the padded branch has its segments."""
    if not is_misaligned(branch, length):
        return
    places = list(places_of(branch, length))
    for row in range(length):
        assert places[padded_position(branch, row)] == row
    num_places = padded_position(branch, length)
    assert num_places >= length
    assert places[:num_places].count(None) == num_places - length
    assert set(places[num_places:]) <= {None}  # only the last segment is filled up further
    padded = Branch(padded_segment(branch), branch.dilation_rate)
    assert not is_misaligned(padded, num_places)
    if num_places < len(places):
        assert last_segment_start(padded, num_places) + padded.segment_length == len(places)
