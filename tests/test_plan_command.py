"""`rda plan`: its numbers are the plan's, and it needs no torch."""

import json
import subprocess
import sys

import pytest

from ring_dilated_attention import cli
from ring_dilated_attention.pattern import DilatedPattern
from ring_dilated_attention.planner import make_plan
from ring_dilated_attention.sharding import make_shards

DENSE = ["--seq-len", "4096", "--segment-lengths", "4096", "--dilation-rates", "1", "--heads", "2"]


def planned(capsys, *arguments):
    assert cli.main(["plan", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_rows_are_the_plan(capsys):
    found = planned(capsys, *DENSE, "--ranks", "4", "--head-dim", "32", "--dtype", "bfloat16", "--causal")
    shards = make_shards("contiguous", (1024,) * 4)
    for rank, row in enumerate(found["ranks"]):
        plan = make_plan(DilatedPattern((4096,), (1,), is_causal=True), shards, rank, 2, 2)
        assert row["flops"] == plan.flops(1, 32) + plan.flops(1, 32, backward=True)
        assert row["forward_sent_bytes"] == plan.bytes_sent(1, 32, 2)
        assert row["sent_bytes"] == plan.bytes_sent(1, 32, 2) + plan.bytes_sent(1, 32, 2, backward=True)
        assert row["peak_bytes"] == sum(item["num_bytes"] for item in row["peak_items"])
    assert found["balance"] < 0.6


def test_zigzag_balances(capsys):
    assert planned(capsys, *DENSE, "--ranks", "4", "--causal", "--sharding", "zigzag")["balance"] == 1


def test_the_table_has_a_line_per_rank(capsys):
    assert cli.main(["plan", *DENSE, "--ranks", "3"]) == 0
    out = capsys.readouterr().out
    assert "branch 0 (w=4096, r=1)" in out
    assert "balance: " in out
    assert [line.split()[0] for line in out.splitlines()[2:5]] == ["0", "1", "2"]


def test_many_ranks_are_shown_by_their_extremes(capsys):
    assert cli.main(["plan", *DENSE, "--ranks", "32", "--causal"]) == 0
    out = capsys.readouterr().out
    assert "(32 ranks; shown are" in out
    assert len(out.splitlines()) < 32


def test_pictures_are_made(tmp_path, capsys):
    assert cli.main(["plan", *DENSE, "--ranks", "2", "--picture", str(tmp_path / "new")]) == 0
    assert {path.name for path in (tmp_path / "new").iterdir()} == {"pattern.png", "ring.png"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ranks", "0"], "--ranks must be at least 1, got 0"),
        (["--kv-heads", "3"], "2 query heads cannot share 3 key/value heads"),
        (["--dilation-rates", "1", "2"], "segment_lengths has 1 entries and dilation_rates has 2"),
        (["--sharding", "zigzag", "--align", "8"], "--align 8 is for contiguous shards"),
    ],
)
def test_bad_input_is_quoted(arguments, message, capsys):
    assert cli.main(["plan", *DENSE, *arguments]) == 2
    assert message in capsys.readouterr().err


def test_it_does_not_import_torch():
    code = (
        "import sys; from ring_dilated_attention.cli import main; "
        f"main(['plan', *{DENSE!r}]); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, capture_output=True).returncode == 0


def test_shardings_are_compared(capsys):
    """Zigzag for dense causal attention; contiguous where a long segment would make it uneven."""
    common = ["plan", "--seq-len", "4096", "--ranks", "4", "--dilation-rates", "1", "--causal", "--segment-lengths"]
    assert cli.main([*common, "4096"]) == 0
    assert "zigzag 100.0%" in capsys.readouterr().out
    assert cli.main([*common, "2458"]) == 0
    assert capsys.readouterr().out.strip().endswith("contiguous is the better one here")


def test_the_kernel_decides_what_is_held(capsys):
    """Catches an option that is not passed on: in place there are no partials, fused no float32 accumulators."""
    common = (*DENSE, "--dtype", "bfloat16", "--kernel")
    peaks = [planned(capsys, *common, kernel)["ranks"][0] for kernel in ("composed", "in-place", "fused")]
    composed, in_place, fused = (row["peak_bytes"] for row in peaks)
    assert composed > in_place > fused
    assert not any("one tile" in item["name"] for item in peaks[1]["peak_items"])
    assert cli.main(["plan", *common, "fused", "--ranks", "2"]) == 2
    assert "the fused kernel serves one device, and this plan has 1 hops. Use 'in-place'." in capsys.readouterr().err
