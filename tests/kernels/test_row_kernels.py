"""The kernels in Triton that gather and lay out rows: calls in Triton's interpreter, and on a GPU if there is one,
against the same calls with their definitions in plain torch (`run/merge.py`); and compiled for GPUs that are not here.

Triton reads TRITON_INTERPRET when it is imported. So the tests of the interpreter run in a process of their own, which
`test_in_the_interpreter` starts where Triton is installed. By hand:

    TRITON_INTERPRET=1 python -m pytest tests/kernels/test_row_kernels.py
"""

import os
import re
import subprocess
import sys
from collections import Counter
from importlib.util import find_spec

import pytest
import torch
from helpers import ROOT, poisoned_memory

from ring_dilated_attention import DilatedPattern, dilated_attention, simulate
from ring_dilated_attention.kernels import cpu, rows_at_once, sdpa
from ring_dilated_attention.run import merge

HAS_TRITON = find_spec("triton") is not None
IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

HAS_GPU = torch.cuda.is_available()
DEVICE, KERNEL = ("cuda", sdpa) if HAS_GPU and not IS_INTERPRETED else ("cpu", cpu)
TRITON = merge.PLAIN._replace(
    merge=rows_at_once.merge_rows, add=rows_at_once.add_rows, lay_out=rows_at_once.lay_out_rows
)

run = pytest.mark.skipif(
    not (HAS_TRITON and (IS_INTERPRETED or HAS_GPU)),
    reason="needs Triton, and a GPU or TRITON_INTERPRET=1 before Triton is imported",
)
compiled = pytest.mark.skipif(
    not HAS_TRITON or IS_INTERPRETED, reason="needs Triton, and not its interpreter"
)
pytestmark = [
    pytest.mark.usefixtures("seeded"),
    # Ops that add in any order warn of it in the mode of these tests.
    pytest.mark.filterwarnings("ignore:.*deterministic"),
    # Triton 3.9 says which of its defaults will change
    pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION"),
]

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
# (pattern, positions, query heads, key/value heads, head dim, batch)
CASES = {
    "rates beyond two": (DilatedPattern((8, 16, 32), (1, 2, 5)), 35, 5, 5, 16, 1),
    "batch of ragged segments": (DilatedPattern((9, 20), (2, 3)), 23, 4, 2, 24, 2),
    "whole batch": (DilatedPattern((8, 16), (1, 2)), 32, 2, 2, 64, 2),
    "rows without a partial": (DilatedPattern((8, 19), (3, 5)), 21, 2, 2, 33, 1),
    "one head of keys": (DilatedPattern((9, 21), (1, 3)), 23, 3, 1, 128, 1),
    "several blocks of rows": (DilatedPattern((64, 150), (1, 3)), 150, 2, 2, 16, 1),
}  # fmt: skip
# With the ranks of a call: over ranks, results are added to what other hops left. The interpreter is slow, and for it
# one type of 16 bits is as good as the other.
TRIED = [(name, dtype, num_ranks) for name in CASES for dtype in DTYPES for num_ranks in (1, 2)]
if IS_INTERPRETED:
    TRIED = [(name, torch.bfloat16, 1) for name in CASES]
    TRIED += [(name, torch.float32, 2) for name in ("batch of ragged segments", "whole batch")]


@compiled
def test_in_the_interpreter():
    """Catches an error in the arithmetic of a kernel."""
    # Triton 3.6 does with arrays what NumPy 2 warns of.
    ignored = "ignore::DeprecationWarning:triton.runtime.interpreter"
    command = [sys.executable, "-m", "pytest", "-n", "0", "-W", ignored, "-vv", __file__]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"test_calls.* PASSED", done.stdout)


@pytest.fixture(autouse=True)
def on_the_device():
    """Memory that is not initialised is NaN. The mode that only warns leaves the choice of torch's op as it is by
    default: the strict one would drop cuDNN's."""
    with torch.device(DEVICE), poisoned_memory(warn_only=True):
        yield


@run
@pytest.mark.parametrize(("name", "dtype", "num_ranks"), TRIED)
def test_calls(name, dtype, num_ranks, monkeypatch):
    """Catches a row of another tile, head, segment or batch entry, a row without partials that is NaN, a block of heads
    that writes to others, gradients of keys that go to other heads, a factor of dq on dk, and sums in 16 bits."""
    pattern, num_rows, num_heads, num_kv_heads, head_dim, batch = CASES[name]
    leaves = [
        torch.randn(batch, num_rows, h, head_dim).to(dtype).requires_grad_()
        for h in (num_heads, num_kv_heads, num_kv_heads)
    ]
    # rows of dout lie further apart
    dout = torch.randn(batch, num_rows, 2 * num_heads, head_dim).to(dtype)[:, :, :num_heads]
    parallel = simulate.all_ranks(num_ranks) if num_ranks > 1 else None
    # so few bytes that heads are computed in blocks
    traits = KERNEL.TRAITS._replace(packing=None, kept_bytes=4096)
    monkeypatch.setattr(KERNEL, "TRAITS", traits)
    of_kernel = KERNEL.merging(leaves[0])
    multiple = 1 if of_kernel is None else of_kernel.lse_multiple
    results = []
    for merging in (TRITON, merge.PLAIN):
        functions = merging._replace(lse_multiple=multiple)
        monkeypatch.setattr(KERNEL, "merging", lambda query, functions=functions: functions)
        rules = {"scale": -0.3, "parallel": parallel, "return_lse": True}
        out, lse = dilated_attention(*leaves, pattern, **rules)
        grads = torch.autograd.grad([out, lse], leaves, [dout, torch.ones_like(lse)])
        results.append((out, lse, *grads))
    for found, expected in zip(*results, strict=True):
        # what float32 sums in another order may differ by, rounded to the dtype
        is_finite = expected.isfinite()
        assert found.isfinite().equal(is_finite)
        x, y = found[is_finite].double(), expected[is_finite].double()
        assert (x - y).norm() <= max(torch.finfo(found.dtype).eps, 4e-7) * y.norm()


@run
def test_a_number_of_every_kind_reaches_the_table():
    """Catches numbers that lose bits on their way, more than one launch writes, and a table that is not filled."""
    numbers = [0, 1, 2, 15, 16, 17, 2**31 - 1, 2**31, 2**47 + 5, 2**57 + 1] * 60
    odd_numbers = [2 * number + rows_at_once.ODD for number in numbers]
    table = rows_at_once._write(odd_numbers, torch.device(DEVICE))
    assert table[: len(numbers)].tolist() == numbers
    assert not table[len(numbers) :].any()


@compiled
@pytest.mark.parametrize(
    ("dtype", "head_dim", "capability"),
    [(torch.float32, 64, 80), (torch.float16, 128, 90), (torch.float16, 64, 100)],
)
def test_compiled_for_gpus(dtype, head_dim, capability):
    """Catches a kernel that does not compile for a GPU, or that reads rows number by number."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from ring_dilated_attention.kernels import row_kernels

    name = {torch.float32: "*fp32", torch.float16: "*fp16"}[dtype]
    width = 16 // dtype.itemsize
    sizes = {
        "D": head_dim, "BD": head_dim, "BN": rows_at_once._block_rows(head_dim),
        "DTYPE": row_kernels.DTYPES[dtype], "ALIGNED": width,
    }  # fmt: skip
    assert list(row_kernels.DTYPES) == DTYPES

    launches = [
        (row_kernels.write_kernel, {"table": "*i64", "numbers": ("i64",) * rows_at_once.NUMBERS},
         {"NUM": rows_at_once.NUMBERS, "OFFSET": rows_at_once.ODD >> 1}),
        (row_kernels.merge_kernel, {"out": name, "lse": "*fp32"}, {**sizes, "ADDS": False}),
        (row_kernels.merge_kernel, {"out": "*fp32", "lse": "*fp64"}, {**sizes, "ADDS": True}),
        (row_kernels.add_kernel, dict.fromkeys(("dq", "dk", "dv"), name), {**sizes, "ADDS": False}),
        (row_kernels.add_kernel, dict.fromkeys(("dq", "dk", "dv"), "*fp32"), {**sizes, "ADDS": True}),
        (row_kernels.lay_out_kernel, {"dout": name, "out": name, "lse": "*fp32"}, sizes),
    ]  # fmt: skip
    for kernel, pointers, constants in launches:
        names = kernel.arg_names
        signature = {"table": "*i64", "factor": "fp32"} | pointers
        signature = {x: "constexpr" if x in constants else signature.get(x, "i32") for x in names}
        # pointers, and the strides of rows
        is_aligned = [
            x for x in names if str(signature[x]).startswith("*") or x.startswith(("dout_", "out_"))
        ]
        source = ASTSource(
            fn=kernel,
            signature=signature,
            constexprs={(names.index(x),): value for x, value in constants.items()},
            attrs={(names.index(x),): [["tt.divisibility", 16]] for x in is_aligned},
        )
        made = triton.compile(source, target=GPUTarget("cuda", capability, 32))
        if kernel is not row_kernels.write_kernel:
            loads = Counter(re.findall(r"ld\.global[\w.:]*", made.asm["ptx"]))
            of_rows = [load for load in loads if ".v4.b32" in load]
            assert of_rows, (kernel, loads)
            # no 16-bit load is left, and 32-bit loads are those of lse
            assert not any(".b16" in load for load in loads), (kernel, loads)
