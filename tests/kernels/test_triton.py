"""The Triton kernels without a GPU: in Triton's interpreter, and compiled ahead of time.

The interpreter runs in a process of its own: triton reads TRITON_INTERPRET when it is imported, and what is imported
interpreted cannot be compiled.
"""

import importlib.metadata
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers import ROOT
from torch._subclasses.fake_tensor import FakeTensorMode

from ring_dilated_attention import DilatedCache, DilatedPattern, dilated_attention
from ring_dilated_attention.kernels.triton import in_place
from ring_dilated_attention.kernels.triton.block_sizes import KERNELS, architecture, config, has_config, padded
from ring_dilated_attention.plan.sharding import Cut
from ring_dilated_attention.ranks.call import Call
from ring_dilated_attention.ranks.ranks import Ranks
from ring_dilated_attention.run import dilated_cache as cache_module

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed (pip install triton==3.7.1)"
)
RESOURCES = ROOT / "benchmarks" / "resources.json"
TARGETS = ("cuda:80", "cuda:90", "cuda:100", "hip:gfx942")


@needs_triton
def test_in_the_interpreter():
    """Catches an error in the arithmetic of any kernel; see `triton_interpreted.py` for each. Without a GPU also the
    rehearsal of `test_cuda.py`: a mistake of that file itself, which no one would see until there is a GPU. What takes
    longest there is left out; `triton_interpreted.py` has its like. Both in one process, which imports for seconds."""
    files = ["triton_interpreted.py"] if torch.cuda.is_available() else ["triton_interpreted.py", "test_cuda.py"]
    longest = ("run_to_run", "operators_pass", "compiled_whole", "strides", "paper", "fused", "zigzag", "inf", "ragged")
    selected = " and ".join(f"not {name}" for name in longest)
    paths = [str(Path(__file__).with_name(file)) for file in files]
    command = ["pytest", "-n", "0", "-vv", "-k", f"triton_interpreted or ({selected})", *paths]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-m", *command], env=environment, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    for file in files:
        assert re.search(rf"{file}::.* PASSED", done.stdout)
    assert not re.search(r"triton_interpreted\S* SKIPPED", done.stdout)


@needs_triton
@pytest.mark.parametrize("target", TARGETS)
def test_registers_and_spills(target, capsys):
    """Catches a kernel that no longer compiles for a target, or that takes more than the committed table says. The same
    compiler makes the same of the same files: then one kernel shows that it is there."""
    from benchmarks.resources import fingerprint, main

    table = json.loads(RESOURCES.read_text())
    recorded, installed = table["triton"], importlib.metadata.version("triton")
    if installed != recorded:
        pytest.skip(f"the table is of triton {recorded}, and counts differ by version; installed is {installed}")
    if target.startswith("cuda") and not _cuobjdump().exists():
        pytest.skip(f"{_cuobjdump()} is missing, which names the registers")
    some = ["--kernel", "delta"] if table["compiled"] == fingerprint() else []
    status, printed = main(["--target", target, "--head-dim", "128", *some]), capsys.readouterr().out
    assert status == 0, printed
    assert "nothing differs from the table" in printed


def _cuobjdump() -> Path:
    spec = importlib.util.find_spec("triton")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


@needs_triton
def test_words_compile_nothing_and_code_does(monkeypatch, tmp_path):
    """Catches a fingerprint that a docstring changes, so that all kernels are compiled anew, or that code does not."""
    from benchmarks import resources

    file, found = tmp_path / "kernel.py", []
    monkeypatch.setattr(resources, "COMPILED", [file])
    code = '"""{}"""\n\ndef kernel(x):\n    """{},\n    and more."""\n    return x + {}\n'
    for words in (("A", "B", 1), ("Other", "words", 1), ("A", "B", 2)):
        file.write_text(code.format(*words))
        found.append(resources.fingerprint())
    assert found[0] == found[1] != found[2]


@needs_triton
def test_the_gate_can_fail():
    """Proof that the comparison of resources sees a difference, a kernel that is not listed, and too much memory."""
    from benchmarks.resources import Resources, complaints

    used = {"hip:gfx942, delta, 64": Resources(40, 0, 70_000)}
    found = [*complaints(used, {}), *complaints(used, {"hip:gfx942, delta, 64": [39, 0, 70_000]})]
    assert [text.partition(": ")[2].split()[0] for text in found] == [
        "70000",
        "not",
        "70000",
        "Resources(registers=40,",
    ]


def test_the_table_holds_every_kernel_and_target():
    """Catches a kernel that the gate does not compile, and a table in which one spills a lot."""
    table = json.loads(RESOURCES.read_text())["resources"]
    cases = {name.partition(", ")[2] for name in table}
    assert {f"{target}, {case}" for target in TARGETS for case in cases} == set(table)
    assert len(cases) == 2 * 12
    assert max(spilled for _, spilled, _ in table.values()) <= 64


@pytest.mark.parametrize("arch", [*TARGETS, "cuda:86", "cuda:89", "cuda:120"])
def test_every_configuration_is_there(arch):
    """Catches a head dim or type without block sizes, which would fail at the first call."""
    assert has_config(arch)
    for head_dim in (16, 24, 48, 64, 96, 128, 160, 256):
        for itemsize in (2, 4):
            whole, half, *_ = (config(kernel, head_dim, itemsize, arch) for kernel in KERNELS)
            assert whole.block_m == 2 * half.block_m
            assert all(x >= 16 and x & (x - 1) == 0 for x in (*whole[:2], *half[:2]))
    assert [padded(d) for d in (1, 16, 24, 48, 96, 128, 129)] == [16, 16, 32, 64, 128, 128, 256]
    assert not has_config("cuda:75")


def test_why_not():
    """Catches a backend that claims tensors that it cannot serve, or does not say what it can."""
    reason = in_place.why_not(torch.zeros(1, 1, 1, 16))
    assert reason is not None
    if importlib.util.find_spec("triton") is None:
        assert "not installed; pip install 'ring-dilated-attention[triton]'" in reason
    else:
        assert "serves CUDA tensors (others only in Triton's interpreter, TRITON_INTERPRET=1), got cpu" in reason


def like(capability: tuple[int, int]) -> SimpleNamespace:
    """What torch says of a device."""
    return SimpleNamespace(major=capability[0], minor=capability[1], gcnArchName="")


@needs_triton
@pytest.mark.parametrize("backend", ["triton", "triton-fused", "sdpa", "auto"])
def test_a_call_on_cuda_tensors_compiles_whole(backend, monkeypatch):
    """Catches a graph break in the choice of a backend, which reads a file and asks torch's switches and the device.

    The tensors are fake, so that no device is needed: what is traced is all that there is before the op.
    """
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device=None: like((9, 0)))
    monkeypatch.setattr(torch.cuda, "_lazy_init", lambda: None)
    torch._dynamo.reset()
    pattern = DilatedPattern((8, 16), (1, 2), is_causal=True)

    def call(*tensors):
        return dilated_attention(*tensors, pattern, backend=backend)

    with FakeTensorMode(allow_non_fake_inputs=True):
        tensors = [torch.empty(1, 32, 2, 16, device="cuda:0", dtype=torch.bfloat16) for _ in range(3)]
        out = torch.compile(call, fullgraph=True, backend="eager")(*tensors)
    assert (out.shape, out.device.type) == ((1, 32, 2, 16), "cuda")


@needs_triton
@pytest.mark.parametrize("backend", ["triton", "sdpa", "auto"])
def test_a_token_on_cuda_tensors_compiles_whole(backend, monkeypatch):
    """The same with a cache."""
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device=None: like((9, 0)))
    monkeypatch.setattr(torch.cuda, "_lazy_init", lambda: None)
    monkeypatch.setattr(cache_module, "free_bytes", lambda device: None)
    torch._dynamo.reset()
    pattern = DilatedPattern((8, 16), (1, 2), is_causal=True)

    def call(query, key, value, cache):
        return dilated_attention(query, key, value, pattern, cache=cache, backend=backend)

    with FakeTensorMode(allow_non_fake_inputs=True):
        tensors = [torch.empty(1, 1, 2, 16, device="cuda:0", dtype=torch.bfloat16) for _ in range(3)]
        cache = DilatedCache(pattern, 1, 2, 2, 16, device="cuda:0", dtype=torch.bfloat16)
        out = torch.compile(call, fullgraph=True, backend="eager")(*tensors, cache)
    assert (out.shape, out.device.type) == ((1, 1, 2, 16), "cuda")


@needs_triton
def test_the_op_asks_again(monkeypatch):
    """Catches a device without block sizes that compiled code takes: while it is traced, nobody asks."""
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device=None: like((7, 5)))
    monkeypatch.setattr(torch.cuda, "_lazy_init", lambda: None)
    architecture.cache_clear()
    with FakeTensorMode():
        query = torch.empty(1, 32, 2, 16, device="cuda:0", dtype=torch.float16)
        reason = "has no block sizes for cuda:75 in configs.json"
        assert in_place.why_not(query) == reason
        call = Call(DilatedPattern((8,), (1,)), 0.25, "triton", "", False, range(2), 2)
        with pytest.raises(ValueError, match=reason):
            Ranks(Cut("contiguous", 1)).forward(call, query, query, query, None)
    architecture.cache_clear()


@needs_triton
def test_sizes_do_not_compile_a_kernel_anew():
    """Catches a size whose value is compiled in: documents of random lengths would compile for many steps."""
    from benchmarks.resources import CASES

    for case in CASES:
        parameters = case.kernel.params
        sizes = {x.name for x in parameters if x.annotation_type == "i32"}
        assert {x.name for x in parameters if x.do_not_specialize} == sizes
        assert len(sizes) >= 2


@pytest.fixture
def tune(monkeypatch):
    """The tuner on a machine without a GPU: nothing is launched."""
    import triton

    from benchmarks import tune

    monkeypatch.setattr(tune, "timed", lambda *arguments: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(triton.testing, "do_bench", lambda call, return_mode: 1.0)
    return tune


@needs_triton
def test_the_tuner_finds_half_of_any_forward(tune):
    """Catches a number of rows of "forward" whose half is no candidate; and blocks of 16, which float32 may need."""
    for dtype in tune.DTYPES.values():
        for rows in {x.block_m for x in tune.candidates("forward", dtype)}:
            assert tune.best("forward_half", 64, dtype, 8192, rows // 2).block_m == rows // 2
        blocks = {x[:2] for x in tune.candidates("key_gradient", dtype)}
        assert ((16, 16) in blocks) == (dtype == torch.float32)


@needs_triton
def test_the_tuner_passes_by_what_does_not_run(tune, monkeypatch, capsys):
    """Catches a candidate that ends the tuning; and a device on which nothing runs any more, taken for one of these."""
    import triton

    errors = [
        triton.runtime.errors.OutOfResources(300_000, 232_448, "shared memory"),
        triton.runtime.errors.PTXASError("internal error"),
        RuntimeError("PassManager::run failed"),
    ]

    def fails(call, return_mode):
        if errors:
            raise errors.pop()
        return 1.0

    monkeypatch.setattr(triton.testing, "do_bench", fails)
    chosen = tune.best("forward", 64, torch.bfloat16, 8192, None)
    assert chosen == list(tune.candidates("forward", torch.bfloat16))[3]
    said = capsys.readouterr().err
    assert all(name in said for name in ("OutOfResources", "PTXASError", "PassManager::run failed"))

    def always_fails(call, return_mode):
        raise RuntimeError("no")

    monkeypatch.setattr(triton.testing, "do_bench", always_fails)
    with pytest.raises(RuntimeError, match="no candidate for forward with 32 rows ran"):
        tune.best("forward", 64, torch.bfloat16, 8192, 32)

    def is_lost():
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "synchronize", is_lost)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        tune.best("forward", 64, torch.bfloat16, 8192, None)
