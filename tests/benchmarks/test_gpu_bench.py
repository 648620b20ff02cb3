"""`make gpu` at tiny sizes, with a CPU in the card's place, and proofs that what goes wrong on a card is noticed."""

import json

import pytest
import torch

from benchmarks import device
from benchmarks.device import Ceilings
from benchmarks.gpu import command as gpu
from benchmarks.gpu import right, speed
from benchmarks.gpu.settings import PAPER, QUICK, Settings
from benchmarks.measure import Sizes, Times, make_tensors
from benchmarks.parts import table
from ring_dilated_attention import DilatedPattern, kernels
from ring_dilated_attention.commands.local_ranks import Worker
from ring_dilated_attention.models import LongNetLM
from ring_dilated_attention.plan.exchange import plan_exchange
from ring_dilated_attention.plan.sharded_call import ShardedCall
from ring_dilated_attention.plan.sharding import make_shards


def rows_of(function):
    """What a part reports, in this process."""
    rows = []
    function(Worker(0, 1, rows.append), QUICK)
    return rows


def test_every_part_leaves_its_rows(tmp_path, capsys, monkeypatch):
    """Catches whatever a part does wrong on any device. Of its tests it takes a few, since others run them all."""
    few = ("tests/kernels/test_sdpa.py::test_the_choice",)
    monkeypatch.setattr(gpu, "QUICK", QUICK._replace(tests=few))
    parts = [part.name for part in gpu.PARTS]
    assert gpu.main(["--quick", "--results", str(tmp_path)]) == 0
    record = json.loads((tmp_path / "gpu.json").read_text())
    assert record["command"] == "python -m benchmarks gpu --quick"
    assert list(dict.fromkeys(row["part"] for row in record["rows"])) == parts
    said = capsys.readouterr().out
    for row in record["rows"]:
        assert row["passed"] in (None, True)
        assert row["found"] in said
        assert row["what"] in table(record["rows"])
    assert f"Triton {right.triton_version()}" in record["rows"][0]["found"]
    assert Ceilings(**record["rows"][0]["ceilings"]).flops_per_second > 0


def test_it_ends_within_nine_minutes():
    seconds = {part.name: part.seconds for part in gpu.PARTS}
    assert sum(seconds.values()) <= 540
    first = list(seconds)[: list(seconds).index("share") + 1]
    assert first == ["card", "right", "ops", "beyond", "share"]
    assert sum(seconds[name] for name in first) <= 300


@pytest.mark.parametrize("seq_len", [32_768, 2**20])
def test_ops_are_timed_at_tiles_of_the_papers_calls(seq_len):
    """Catches speeds of shapes that no call has."""
    sharded_call = ShardedCall(
        DilatedPattern(*PAPER), make_shards("contiguous", (seq_len,)), 12, 12
    )
    rows = [tile.query for tile in plan_exchange("none", sharded_call, 0).plan.local]
    of_calls = {(x.num_rows, x.step, x.shift) for x in rows}
    for tile in Settings().tiles:
        assert (tile.rows, tile.rate, int(tile.rate > 1)) in of_calls
    [_, strided, _] = Settings().tiles
    [query, *_], dout = speed.tile_tensors(QUICK, strided._replace(segments=2, rows=5, rate=4))
    segment, head_dim = 5 * 4 * QUICK.num_heads * 64, 64
    assert query.stride() == (segment, 4 * QUICK.num_heads * 64, head_dim + QUICK.num_heads * 64, 1)
    assert query.shape == dout.shape
    assert dout.is_contiguous()


def test_tests_that_fail_or_take_too_long(tmp_path):
    (tmp_path / "test_it.py").write_text("def test_a(): assert 0\n")
    right_one, wrong = "tests/kernels/test_cuda.py::test_no_positions", str(tmp_path / "test_it.py")
    [passed] = right.run_tests(QUICK, 600, [right_one])
    assert passed["passed"], passed
    [ended] = right.run_tests(QUICK, 0.01, [wrong])
    assert ended["passed"] is False
    assert "ended after 0 s" in ended["found"]
    *_, failed = right.run_tests(QUICK, 600, [wrong])
    assert failed["passed"] is False


def test_a_share_of_known_times(monkeypatch):
    """Half of the time of dense attention at a sixteenth of the pairs keeps an eighth of the speed-up."""
    times = speed.Timed([Times(2.0, 3.0)], [0.0])
    monkeypatch.setattr(speed, "timed", lambda *arguments: times)
    sizes, pattern = Sizes(256, 2, 16), DilatedPattern((16,), (1,))
    inputs, dout = make_tensors(sizes)
    fastest = {"forward": ("flash", 4.0), "both": ("cuDNN", 10.0)}
    # dense attention at half of the length has a quarter of the pairs
    for dense_len, share in ((256, 2 / 16), (128, 4 * 2 / 16)):
        row = speed.share_row(QUICK, sizes, pattern, inputs, dout, 1, (dense_len, fastest))
        assert [*row["shares"].values()] == pytest.approx([share, share])
        assert "against cuDNN" in row["found"]
    assert Settings().dense_at_most in [length for length, _ in Settings().lengths]


def test_a_loss_that_is_not_finite(monkeypatch):
    """Proof that a model which trains on nothing is noticed."""

    def loss(net, tokens):
        return sum(x.sum() for x in net.parameters()) * torch.nan

    monkeypatch.setattr(LongNetLM, "loss", loss)
    [row] = rows_of(speed.model)
    assert row["passed"] is False


def test_the_tail_of_a_long_call_is_checked(monkeypatch):
    """Proof that a wrong offset far into a sequence is seen, which only long sequences have."""
    forward = kernels.cpu.forward

    def wrong(q, *rest):
        out, lse = forward(q, *rest)
        return (out.flip(0) if q.shape[0] > 2 else out), lse

    assert all(row["passed"] for row in rows_of(right.beyond))
    monkeypatch.setattr(kernels.cpu, "forward", wrong)
    assert not all(row["passed"] for row in rows_of(right.beyond))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU, and torch sees none")
# what profilers of a new machine warn of is not known beforehand
@pytest.mark.filterwarnings("default")
def test_a_gpu_answers():
    """Catches a question that torch, its profiler or nvidia-smi answers otherwise than was read."""
    x = torch.randn(2**20, device="cuda")
    found = device.profiled("cuda", lambda: x.mul(2).add(1))
    assert found.launches == 2
    assert all(kernel.seconds > 0 for kernel in found.kernels)
    assert device.peak_bytes("cuda", lambda: torch.empty(2**20, device="cuda")) == 4 * 2**20
    start = device.Mark("cuda")
    torch.cuda._sleep(10_000_000)
    end = device.Mark("cuda")
    device.synchronize("cuda")
    assert 1e-3 < end.since(start) < 1
    most = device.ceilings("cuda", torch.bfloat16, rows=4096)
    assert most.flops_per_second > 1e12
    assert most.bytes_per_second > 1e10
    assert {"name", "capability", "cuda", "driver_version"} <= device.describe().keys()
