"""The pictures are made from the pattern and the plan, and show what these say."""

import pytest
from matplotlib.image import imread

from ring_dilated_attention.commands import figures
from ring_dilated_attention.commands.scaled import scaled_down
from ring_dilated_attention.pattern import DilatedPattern
from ring_dilated_attention.plan.planner import make_plan
from ring_dilated_attention.plan.sharding import make_shards
from ring_dilated_attention.reference import multiplicity


@pytest.mark.parametrize(
    "pattern",
    [
        DilatedPattern((8, 16, 32), (1, 2, 4), is_causal=True),
        DilatedPattern((5, 20), (3, 4), phase="blocked"),
        DilatedPattern((7, 24), (2, 3), heads="split"),
    ],
)
def test_cells_are_the_definition(pattern):
    expected = multiplicity(pattern, 29, 4)
    for head in range(4):
        cells = figures.branches_by_pair(pattern, 29, 4, head)
        assert [[len(branches) for branches in row] for row in cells] == expected[head].tolist()


def test_filled_rows_are_the_plan():
    """Rows that travel: head 0 of each rank's shard of 8 has phase 0 of rate 4."""
    plan = make_plan(DilatedPattern((4, 32), (1, 4)), make_shards("contiguous", (8,) * 4), 1, 4, 4)
    assert figures._packed_rows(plan, head=0) == {0, 4}
    assert figures._packed_rows(plan, head=3) == {3, 7}


def test_the_pictures_of_the_readme(tmp_path):
    paths = figures.draw_readme(tmp_path)
    assert [path.name for path in paths] == ["pattern.png", "ring.png"]
    for path in paths:
        image = imread(path)
        assert image.shape[1] > 1000
        assert image.std() > 0.1  # something is drawn


def test_a_picture_does_not_change_from_run_to_run(tmp_path):
    first, second = figures.draw_readme(tmp_path / "a"), figures.draw_readme(tmp_path / "b")
    for a, b in zip(first, second, strict=True):
        assert a.read_bytes() == b.read_bytes()


def test_long_sequences_are_scaled_down():
    pattern = DilatedPattern((2048, 65536), (1, 16), is_causal=True)
    small, n, divisor = scaled_down(pattern, 65536, 64)
    assert (small.segment_lengths, small.dilation_rates, n, divisor) == ((2, 64), (1, 16), 64, 1024)
    assert small.is_causal
    assert scaled_down(pattern, 65536, 65536)[0] == pattern


def test_a_segment_keeps_a_row_for_every_phase():
    assert scaled_down(DilatedPattern((64, 4096), (32, 64)), 4096, 64)[0].segment_lengths == (32, 64)


def test_one_rank_has_no_ring(tmp_path):
    def split(n):
        return make_shards("contiguous", (n,))

    paths = figures.draw(tmp_path, DilatedPattern((8,), (1,)), 8, 1, split)
    assert [path.name for path in paths] == ["pattern.png"]
