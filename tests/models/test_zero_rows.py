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
    taken = -(-w // branch.dilation_rate) * branch.dilation_rate
    for segment in range(-(-length // w)):
        for p in range(taken):
            row = segment * w + p
            yield row if p < w and row < length else None


def seen_by(branch, num_heads, length):
    """For each (place, head) that the branch covers: what stands at the places of its keys."""
    w = min(branch.segment_length, length)
    taken = -(-w // branch.dilation_rate) * branch.dilation_rate
    places = list(places_of(branch, length))
    phase = DilatedPattern(
        (branch.segment_length,), (branch.dilation_rate,), phase="blocked"
    ).phase_of
    for place in range(len(places)):
        for head in range(num_heads):
            s = phase(0, head, num_heads)
            if place % taken % branch.dilation_rate == s:
                start = place // taken * taken
                yield place, head, places[start + s : start + taken : branch.dilation_rate]


@settings(max_examples=150, deadline=None)
@given(BRANCHES, st.integers(1, 5), st.integers(1, 40))
def test_zero_keys_of_a_branch_that_is_not_misaligned(branch, num_heads, length):
    """Catches a miscounted zero key, and one that is seen outside of the last segment."""
    if is_misaligned(branch, length):
        return
    phase_of = DilatedPattern(
        (branch.segment_length,), (branch.dilation_rate,), phase="blocked"
    ).phase_of
    places = list(places_of(branch, length))
    for place, head, keys in seen_by(branch, num_heads, length):
        if places[place] is None:
            continue
        expected = 0
        if places[place] >= last_segment_start(branch, length):
            expected = num_zero_keys(branch, length, phase_of(0, head, num_heads))
        assert keys.count(None) == expected


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


def test_gigapath_is_misaligned_beyond_its_fourth_segment():
    branches = [
        Branch(w, r)
        for w, r in zip((1024, 5792, 32768, 185363, 1048576), (1, 2, 4, 8, 16), strict=True)
    ]
    assert [is_misaligned(branch, 185_364) for branch in branches] == [
        False,
        False,
        False,
        True,
        False,
    ]
    assert not any(is_misaligned(branch, 185_363) for branch in branches)
    assert [padded_position(branches[3], t) - t for t in (185_362, 185_363)] == [0, 5]
