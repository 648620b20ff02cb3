"""The pictures are made from the pattern and the plan, and show what these say."""

import pytest
from matplotlib.image import imread
from readme_pictures import draw_readme

from benchmarks.scaled import scaled_down
from ring_dilated_attention.commands.plan import figures
from ring_dilated_attention.forecast.call_cost import Way, count
from ring_dilated_attention.pattern import DilatedPattern
from ring_dilated_attention.plan.job import Job
from ring_dilated_attention.plan.planner import make_plan
from ring_dilated_attention.plan.sharding import make_shards, split_lengths
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
    plan = make_plan(Job(DilatedPattern((4, 32), (1, 4)), make_shards("contiguous", (8,) * 4), 4, 4), 1)
    assert figures._packed_rows(plan, head=0) == {0, 4}
    assert figures._packed_rows(plan, head=3) == {3, 7}


@pytest.fixture(scope="module")
def drawn(tmp_path_factory):
    return draw_readme(tmp_path_factory.mktemp("drawn"))


def test_the_pictures_of_the_readme(drawn):
    assert [path.name for path in drawn] == ["pattern.png", "ring.png", "off_phase.png"]
    for path in drawn:
        image = imread(path)
        assert image.shape[1] > 1000
        assert image.std() > 0.1  # something is drawn


def test_a_picture_does_not_change_from_run_to_run(drawn, tmp_path):
    for a, b in zip(drawn, draw_readme(tmp_path), strict=True):
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
    figures.draw(tmp_path, Job(DilatedPattern((8,), (1,)), make_shards("contiguous", (8,)), 1, 1))
    assert [path.name for path in tmp_path.iterdir()] == ["pattern.png"]


@pytest.mark.parametrize(
    ("pattern", "seq_len", "num_ranks", "sharing"),
    [
        (DilatedPattern((2048, 65536, 2**20), (1, 16, 256)), 2**20, 8, (1, 1, 8)),  # the first example of rda plan
        (DilatedPattern((2048, 65536, 2**20), (1, 16, 256)), 2**20, 32, (1, 2, 32)),
        (DilatedPattern((110, 3000), (3, 1), is_causal=True), 10_000, 4, (2, 2)),
        # Long segments of which one rank holds all rows that any head reads: they straddle, and nothing travels.
        (DilatedPattern((2**17,), (2**17,)), 2**17, 8, (1,)),
    ],
)
def test_a_sketch_says_what_the_plans_do(pattern, seq_len, num_ranks, sharing):
    """Catches a picture whose small stand-in travels where the job stays at home, or the other way around."""
    shards = make_shards("contiguous", split_lengths(seq_len, num_ranks))
    plans = [make_plan(Job(pattern, shards, 12, 12), rank) for rank in range(num_ranks)]
    shares = count(Job(pattern, shards, 12, 12), Way()).branches
    assert tuple(share.num_sharing for share in shares) == sharing
    assert sum(share.sent for share in shares) == sum(plan.sent()[0] for plan in plans)
    for panel, share, (w, r) in zip(figures.panels(shards, shares), shares, pattern.branches, strict=True):
        assert panel.segments[0] == (0, w)
        assert all(start % w == 0 for start, _ in panel.segments)
        assert set(panel.borders) <= {span.stop for shard in shards for span in shard}
        assert panel.notes[0] == f"segments of {w:,}, rate {r:,}"
        assert panel.notes[1].endswith(f"{-(-w // r):,} of a segment")
        assert ("stays at home" in panel.notes) == (not share.sent)
        assert share.travels == any(f"up to {share.num_sharing:,} ranks" in note for note in panel.notes)
    inks = [panel.ink for panel in figures.panels(shards, shares)]
    assert all(
        (a > b) == (r < q)
        for a, r in zip(inks, pattern.dilation_rates, strict=True)
        for b, q in zip(inks, pattern.dilation_rates, strict=True)
        if r != q
    )


def test_the_ring_of_a_long_sequence_is_the_plans(tmp_path, monkeypatch):
    """Catches labels of a job other than the one that is planned."""
    labels = []
    monkeypatch.setattr(figures, "_label", lambda axes, y, text: labels.append(text))
    pattern = DilatedPattern((2048, 65536, 2**20), (1, 16, 256))
    figures.draw(tmp_path, Job(pattern, make_shards("contiguous", (2**17,) * 8), 12, 12))
    assert labels[:4] == [
        "1,048,576 positions",
        "segments of 2,048, rate 1: stay",
        "segments of 65,536, rate 16: stay",
        "segments of 1,048,576, rate 256: travel (8 ranks)",
    ]
    assert sum("hop 7" in label for label in labels) == 2


def test_a_picture_takes_a_name(tmp_path):
    """Catches a folder that is called plan.png, and a ring that replaces the pattern."""
    job = Job(DilatedPattern((8,), (1,)), make_shards("contiguous", (4, 4)), 1, 1)
    figures.draw(tmp_path / "new" / "plan.png", job)
    assert {path.name for path in (tmp_path / "new").iterdir()} == {"plan.png", "plan-ring.png"}
    (tmp_path / "folder.png").mkdir()
    figures.draw(tmp_path / "folder.png", job)
    assert {path.name for path in (tmp_path / "folder.png").iterdir()} == {"pattern.png", "ring.png"}
    with pytest.raises(ValueError, match=r"plan.pdf: pictures are PNG: name one NAME.png"):
        figures.check_picture(tmp_path / "plan.pdf")
