"""The GPU cases of the benchmarks at tiny sizes, with a CPU in the GPU's place (or on the GPU, where there is one)."""

import json
import os
import sys
import time
from types import ModuleType

import pytest
import torch

from benchmarks import command, device, gpu, gpu_memory, gpu_small, shares, side_by_side
from benchmarks.apart import Budget, measure_apart
from benchmarks.candidates import OWN, Candidate, attention
from benchmarks.measure import Sizes, Times, call_json, flops_of
from ring_dilated_attention import DilatedPattern, kernels
from ring_dilated_attention.plan.job import Job
from ring_dilated_attention.plan.planner import make_plan
from ring_dilated_attention.plan.sharding import make_shards

NAMES = [name for name, case in command.CASES.items() if command.needs_gpu(case)]
SIZES = Sizes(512, 2, 16)
PATTERN = DilatedPattern((128, 512), (1, 2))
DENSE, TORCH, COMPOSED = (
    Candidate(OWN),
    Candidate("torch", "flash"),
    Candidate(OWN, "flash", PATTERN),
)


def ignore(_) -> None:
    pass


def measure(*candidates, sizes=SIZES, repeats=1):
    group = side_by_side.Group(sizes, False, candidates, repeats, "cpu")
    found = side_by_side.measure_here(group, (), ignore)
    return group, [found[i] for i in range(len(candidates))]


@pytest.mark.parametrize("name", NAMES)
def test_every_case_leaves_a_record(name, tmp_path, capsys):
    """Catches whatever a case does wrong on any device: groups, processes, rows, tables."""
    folder = tmp_path / "results"
    assert command.main([name, "--quick", "--results", str(folder)]) == 0
    found = json.loads((folder / f"{name}.json").read_text())
    assert found["command"] == f"python -m benchmarks {name} --quick"
    assert ("gpu" in found["hardware"]) == torch.cuda.is_available()
    measured = [row for row in found["rows"] if "reason" not in row]
    ours = [row for row in measured if row["candidate"].startswith(OWN)]
    assert ours
    for row in ours:
        assert row["gate"]["passed"]
        assert row["gate"]["error"] <= row["gate"]["tolerance"]
        assert row["device"] == device.resolve(None)
    for row in found["rows"]:
        assert call_json(SIZES, PATTERN).keys() <= row.keys()
    assert f"## {name}" in (tmp_path / "README.md").read_text()
    assert f"{name}: " in capsys.readouterr().out


def test_without_a_gpu(monkeypatch, tmp_path, capsys):
    """Catches a case that fails where it could say why it cannot run, or that takes the others with it."""
    monkeypatch.setattr(device, "why_not", lambda: "needs a CUDA GPU, and torch sees none")
    assert command.main(["gpu", "--results", str(tmp_path)]) == 2
    assert capsys.readouterr().err == "gpu needs a CUDA GPU, and torch sees none\n"
    monkeypatch.setattr(command, "CASES", {name: command.CASES[name] for name in NAMES})
    assert command.main(["--all", "--results", str(tmp_path / "results")]) == 0
    said = capsys.readouterr().out
    assert all(
        f"{name}: skipped, it needs a CUDA GPU, and torch sees none" in said for name in NAMES
    )


# Shares.


def test_shares_of_known_times():
    """A quarter of the pairs in half of the time keeps half of the speed-up, and dense time goes by pairs elsewhere."""
    dense = shares.DenseTime(512, 1000, {"forward": [4.0, 8.0, 6.0], "forward + backward": [20.0]})
    found = shares.share([3.0], 250, "x", dense, "forward")
    assert found["share"]["median"] == pytest.approx(0.5)
    assert (found["candidate"], found["measured_at"], found["seconds_there"]["median"]) == (
        "x",
        512,
        6.0,
    )
    assert shares.share([3.0], 4 * 250, "x", dense, "forward")["share"]["median"] == pytest.approx(
        2.0
    )
    assert shares.share([5.0], 250, "x", dense, "forward + backward")["share"][
        "median"
    ] == pytest.approx(1.0)


def test_shares_are_against_the_same_kernel_and_the_fastest():
    """Catches a share against the wrong dense attention."""
    candidates = (Candidate("torch", "flash"), Candidate("torch", "cuDNN"), DENSE, COMPOSED)
    group = side_by_side.Group(SIZES, False, candidates, 1, "cpu")
    profile = device.Profile((), ())
    found = [
        side_by_side.Found({}, 0, profile, [Times(forward, backward)], [0.0])
        for forward, backward in ((2, 4), (1, 9), (8, 8), (1, 2))
    ]
    dense = shares.dense_times(group, [*found[:2], "broken", found[3]])
    assert list(dense) == ["torch, flash, dense", "torch, cuDNN, dense"]
    row = shares.row_of(group, COMPOSED, found[3], dense, device.Ceilings(1e12, 1e9))
    one, both = row["stages"].values()
    assert (one["own_dense"]["candidate"], one["fastest_dense"]["candidate"]) == tuple(dense)
    assert (
        both["own_dense"]["candidate"]
        == both["fastest_dense"]["candidate"]
        == "torch, flash, dense"
    )
    ratio = (128 + 512 / 2**2) / 512  # of rate 2, every other query sees every other key
    assert one["own_dense"]["share"]["median"] == pytest.approx(2 * ratio)
    assert both["own_dense"]["share"]["median"] == pytest.approx(6 / 3 * ratio)
    peer = shares.row_of(
        group, Candidate("torchscale", "", PATTERN), found[3], dense, device.Ceilings(1e12, 1e9)
    )
    assert "own_dense" not in peer["stages"]["forward"]  # it was not measured
    assert "fastest_dense" in peer["stages"]["forward"]


def test_flops_are_the_plans():
    """Catches a convention for FLOPs that differs from the plan's."""
    for pattern in (PATTERN, DilatedPattern((100, 512), (3, 4), is_causal=True)):
        plan = make_plan(
            Job(
                pattern,
                make_shards("contiguous", (SIZES.seq_len,)),
                SIZES.num_heads,
                SIZES.num_heads,
            ),
            0,
        )
        group = side_by_side.Group(SIZES, pattern.is_causal, (), 1, "cpu")
        found = side_by_side.Found({}, 0, device.Profile((), ()), [Times(1, 1)], [0.0])
        row = shares.row_of(group, Candidate("sdpa", "", pattern), found, {}, device.Ceilings(1, 1))
        counted = flops_of(plan, 1, SIZES.head_dim)
        assert [stage["flops"] for stage in row["stages"].values()] == [counted[0], sum(counted)]


def test_dense_at_another_length_is_said():
    """Catches a scaled time that looks like a measured one."""
    settings = gpu.QUICK._replace(device="cpu", budget=1e9)
    assert [(g.sizes.seq_len, g.compares) for g in gpu.groups(settings)] == [
        (n, n == 512) for n in (512, 512, 1024, 1024)
    ]
    rows = gpu.run(settings, ignore)
    for row in rows:
        if "reason" not in row and not row["is_dense"]:
            assert row["stages"]["forward"]["fastest_dense"]["measured_at"] == 512
    lines = [line for line in gpu.table(rows).splitlines() if " 1,024 |" in line]
    assert lines
    assert all("%*" in line for line in lines)


def test_what_does_not_fit_the_budget_is_said():
    """Catches a run that is ended from outside, with nothing kept, because it takes too long."""
    for case in (gpu, gpu_small, gpu_memory):
        settings = case.QUICK._replace(device="cpu", budget=0)
        with pytest.raises(
            AssertionError,
            match=r"nothing could be measured, first because: .*the budget was spent",
        ):
            case.run(settings, ignore)
        assert case.FULL.budget + case.FULL.seconds <= 560  # a command may have 10 minutes


def sleeps(worker, settings, left_out):
    worker.report(min({0, 1, 2} - set(left_out)))
    time.sleep(60)


def test_the_budget_ends_a_process():
    """Catches a group that takes its seconds anew for each process that is lost, or one that nothing ends."""
    begun = time.monotonic()
    found, lost = measure_apart(sleeps, None, 3, ignore, 6, Budget(12))
    assert time.monotonic() - begun < 17
    assert not found
    assert [lost[i].startswith("its process was lost") for i in range(3)] == [True, True, False]
    assert lost[2] == "not measured: the budget was spent"
    assert measure_apart(sleeps, None, 2, ignore, 60, Budget(0)) == (
        {},
        dict.fromkeys((0, 1), lost[2]),
    )


def test_a_budget_bounds_what_begins():
    """Catches seconds that are counted from the beginning of a group, not of its case."""
    budget = Budget(100)
    assert 0 < budget.of(10) == 10
    budget.start -= 95
    assert 0 < budget.of(10) <= 5
    budget.start -= 10
    assert budget.of(10) < 0


# Candidates that fail.


def test_one_that_fails_leaves_its_reason():
    """Catches an error that stops the others. An op that cannot run on this device fails for each candidate alike."""
    missing = Candidate("torch", "flash 3")
    group, found = measure(TORCH, missing, Candidate("sdpa", "cuDNN", PATTERN), COMPOSED, repeats=3)
    assert found[1].startswith("ModuleNotFoundError") or found[1].startswith("RuntimeError")
    assert "asked for cuDNN, and aten::_scaled_dot_product_flash_attention_for_cpu" in found[2]
    assert [len(found[i].times) for i in (0, 3)] == [3, 3]
    assert all(t.forward > 0 and t.backward > 0 for t in found[3].times)
    assert shares.row_of(group, missing, found[1], {}, device.Ceilings(1, 1))["reason"] == found[1]


def test_one_that_fails_later_leaves_its_reason(monkeypatch):
    """Catches a failure under the clock that stops the others, or leaves times of its first repeats."""
    right, calls = kernels.cpu.backward, []

    def fails_at_the_end(*args):
        calls.append(1)
        if len(calls) > 4:
            raise torch.OutOfMemoryError("out of memory\nand a long tail")
        return right(*args)

    monkeypatch.setattr(kernels.cpu, "backward", fails_at_the_end)
    _, found = measure(TORCH, DENSE, repeats=3)
    assert found[1] == "OutOfMemoryError: out of memory"
    assert len(found[0].times) == 3


@pytest.mark.parametrize(
    ("smallest", "message"), [(0, "relative L2 error"), (300, "out at 512 positions differs by")]
)
def test_no_speed_without_a_right_result(smallest, message, monkeypatch):
    """Catches a kernel that is 5 % off, at any size, or only at that which is timed."""
    right = kernels.cpu.forward

    def wrong(q, *rest):
        out, lse = right(q, *rest)
        return out * (1.05 if q.shape[2] > smallest else 1), lse

    monkeypatch.setattr(kernels.cpu, "forward", wrong)
    _, found = measure(TORCH, DENSE)
    assert isinstance(found[0], side_by_side.Found)
    assert message in found[1]
    assert found[1].startswith("GateError")


def some_die(worker, dying, left_out):
    found = {}
    for i in range(4):
        if i not in left_out:
            worker.report(i)
            if i in dying:
                os._exit(1)
            found[i] = f"result {i}"
    return found


def none_begins(worker, settings, left_out):
    raise RuntimeError("no context")


def test_one_that_takes_its_process_with_it():
    """Catches a lost process that is blamed on another candidate, or ends the case."""
    started = []
    found, lost = measure_apart(some_die, (1, 2), 4, started.append, 60, Budget(60))
    assert found == {0: "result 0", 3: "result 3"}
    assert lost == dict.fromkeys((1, 2), "its process was lost: died without a word")
    assert started == [0, 1, 0, 2, 0, 3]
    found, lost = measure_apart(some_die, (0, 1, 2, 3), 4, ignore, 60, Budget(60))
    assert not found
    assert lost[3] == "not measured: 3 processes were lost before it"
    found, lost = measure_apart(none_begins, None, 2, ignore, 60, Budget(60))
    assert lost == dict.fromkeys((0, 1), "its process was lost: RuntimeError: no context")


# The device, the memory case, the peer.


def test_the_cpu_answers_what_a_gpu_is_asked():
    """Catches an answer of another unit or kind than the GPU's."""
    x = torch.randn(2, 3, 64, 16, requires_grad=True)

    def call():
        out = torch.nn.functional.scaled_dot_product_attention(x, x, x)
        return torch.autograd.grad(out.sum(), x)

    found = device.profiled("cpu", call)
    assert found.launches == 0
    assert "aten::_scaled_dot_product_flash_attention_for_cpu" in found.attention_ops
    assert device.peak_bytes("cpu", lambda: torch.empty(1000)) == 4000
    start = device.Mark("cpu")
    assert 0 <= device.Mark("cpu").since(start) < 1
    most = device.ceilings("cpu", torch.float32, rows=64, repeats=2)
    assert 0 < most.flops_per_second < 1e15
    assert 0 < most.bytes_per_second < 1e13


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


@pytest.mark.parametrize("limit", [1, 5, 63, 64, 100, 127, 128, 1000, 4096])
def test_the_longest_that_fits(limit):
    """Catches a search that stops early, or returns what was never seen to fit."""
    seen = {}

    def fits(n):
        seen[n] = n <= limit
        return seen[n]

    power, most = gpu_memory.longest(fits, 64)
    assert seen[power]
    assert seen[most]
    assert power <= most <= limit
    # the next step does not fit
    assert min(power * k // 16 for k in range(16, 33) if power * k // 16 > most) > limit
    with pytest.raises(ValueError, match="not even one position fits"):
        gpu_memory.longest(lambda n: False, 64)


def test_the_tail_of_a_long_call_is_checked(monkeypatch):
    """Proof that a wrong offset far into a sequence is seen, which only long sequences have."""
    trial = gpu_memory._Trial(gpu_memory.QUICK._replace(device="cpu"))
    assert max(trial.tail_errors(2048).values()) < 1e-3
    right = kernels.cpu.forward

    def wrong(q, *rest):
        out, lse = right(q, *rest)
        return (out.flip(0) if q.shape[0] > 2 else out), lse

    monkeypatch.setattr(kernels.cpu, "forward", wrong)
    with pytest.raises(AssertionError, match="out at the end of 2,048 positions is off"):
        trial.tail_errors(2048)


def test_small_calls_are_compared_with_dense():
    """Catches rows without what they are compared with."""
    rows = gpu_small.run(gpu_small.QUICK._replace(device="cpu", lengths=(256,)), ignore)
    for row in rows:
        assert row["speed_up"] == pytest.approx(
            row["dense_seconds"]["median"] / row["seconds"]["median"]
        )
        assert row["faster_from"] in (None, 256)
        assert row["host_seconds"]["median"] > 0


def test_the_peer_is_called_as_it_wants(monkeypatch):
    """Catches a layout or a missing argument, with a module that stands in for torchscale's: one dense branch."""
    dilated, multihead = (
        ModuleType("torchscale.component.dilated_attention"),
        ModuleType("multihead_attention"),
    )
    multihead.flash_attn_func = None

    class DilatedAttention(torch.nn.Module):
        def __init__(self, args, embed_dim, num_heads, *, self_attention):
            super().__init__()
            self.q_proj = self.k_proj = self.v_proj = self.out_proj = torch.nn.Linear(
                embed_dim, embed_dim
            )
            self.num_heads = num_heads
            assert (args.segment_length, args.dilated_ratio, args.flash_attention) == (
                [64],
                [1],
                True,
            )

        def forward(self, query, key, value, *, is_causal):
            heads = (
                proj(x).unflatten(2, (self.num_heads, -1))
                for proj, x in zip(
                    (self.q_proj, self.k_proj, self.v_proj), (query, key, value), strict=True
                )
            )
            out, lse = multihead.flash_attn_func(*heads, 0.0, None, None, is_causal)
            assert lse.shape == (1, self.num_heads, 64)
            return self.out_proj(out.flatten(2)), None

    dilated.DilatedAttention = DilatedAttention
    for name in ("torchscale", "torchscale.component"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "torchscale.component.dilated_attention", dilated)
    monkeypatch.setitem(sys.modules, "torchscale.component.multihead_attention", multihead)
    for is_causal in (False, True):
        pattern = DilatedPattern((64,), (1,), is_causal=is_causal)
        _, (found, peer) = measure(
            Candidate("sdpa", "flash", pattern),
            Candidate("torchscale", "", pattern),
            sizes=Sizes(64, 2, 16),
        )
        assert max(peer.gate["errors"].values()) < 1e-6
        assert len(peer.times) == len(found.times) == 1
    x = torch.randn(1, 64, 2, 16)
    assert (
        attention(Candidate("torchscale", "", pattern), x, is_causal=True)(x, x, x).shape == x.shape
    )
