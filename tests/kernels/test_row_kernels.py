"""The kernels in Triton that gather and lay out rows: in Triton's interpreter, and on a GPU if there is one, against
their definitions in plain torch (`run/merge.py`); and compiled for GPUs that are not here.

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
from helpers import ROOT

from ring_dilated_attention import DilatedPattern, dilated_attention
from ring_dilated_attention.kernels import cpu, rows_at_once
from ring_dilated_attention.kernels.contract import GradientSum, Merging, TileRows
from ring_dilated_attention.plan.exchange import plan_exchange
from ring_dilated_attention.plan.job import Job
from ring_dilated_attention.plan.sharding import make_shards
from ring_dilated_attention.run import merge

HAS_TRITON = find_spec("triton") is not None
IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

needs_triton = pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed")
HAS_GPU = torch.cuda.is_available()
DEVICE = "cuda" if HAS_GPU and not IS_INTERPRETED else "cpu"

run = pytest.mark.skipif(
    not (HAS_TRITON and (IS_INTERPRETED or HAS_GPU)),
    reason="needs Triton, and a GPU or TRITON_INTERPRET=1 before Triton is imported",
)
interpreted = pytest.mark.skipif(
    not (HAS_TRITON and IS_INTERPRETED),
    reason="needs Triton, and TRITON_INTERPRET=1 before it is imported",
)
compiled = pytest.mark.skipif(
    not HAS_TRITON or IS_INTERPRETED, reason="needs Triton, and not its interpreter"
)
pytestmark = pytest.mark.usefixtures("nan_in_new_memory", "seeded")

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
# the interpreter is slow, and for it one type of 16 bits is as good as the other; sums are in float32 anyway
TRIED_DTYPES = [torch.bfloat16] if IS_INTERPRETED else DTYPES
# (pattern, positions, query heads, key/value heads, head dim, batch)
CASES = {
    "rates beyond two": (DilatedPattern((8, 16, 32, 64), (1, 2, 4, 6)), 67, 6, 6, 16, 1),
    "batch of ragged segments": (DilatedPattern((9, 37), (2, 3)), 41, 4, 2, 24, 2),
    "whole batch": (DilatedPattern((8, 16), (1, 2)), 32, 2, 2, 64, 2),
    "rows without a partial": (DilatedPattern((8, 37), (3, 5)), 41, 2, 2, 33, 1),
    "one head of keys": (DilatedPattern((9, 37), (1, 4)), 41, 6, 1, 128, 1),
    "several blocks of rows": (DilatedPattern((64, 300), (1, 3)), 300, 2, 2, 16, 1),
}  # fmt: skip
all_cases = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


@needs_triton
@pytest.mark.skipif(IS_INTERPRETED, reason="this is the interpreter's process")
def test_in_the_interpreter():
    """Catches an error in the arithmetic of a kernel."""
    command = [sys.executable, "-m", "pytest", "-n", "0", "-vv", __file__]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"test_merging.* PASSED", done.stdout)


@pytest.fixture(autouse=True)
def on_the_device():
    with torch.device(DEVICE):
        yield


def tiles_of(case, dtype, side="query", lse=False):
    """Random results of each tile of a call, as the ops return them: the heads of a row side by side."""
    pattern, num_rows, num_heads, num_kv_heads, head_dim, batch = case
    job = Job(pattern, make_shards("contiguous", (num_rows,)), num_heads, num_kv_heads)
    tiles = []
    for tile in plan_exchange("none", job, 0).plan.local:
        rows = getattr(tile, side)
        folds = batch == 1 or num_rows == rows.segments * rows.segment_step or rows.segments == 1
        for entry in [None] if folds else range(batch):
            size = rows.segments * (batch if entry is None else 1)
            shape = (size, rows.num_rows, len(rows.heads), head_dim)
            result = torch.randn(shape).to(dtype).transpose(1, 2)
            its_lse = torch.randn(shape[:3]).transpose(1, 2) * 4
            tiles.append(TileRows(rows, entry, (result, its_lse) if lse else (result,)))
    return tiles


def assert_close(found, expected, dtype):
    """What float32 sums in another order may differ by, rounded to the dtype."""
    assert found.isfinite().equal(expected.isfinite())
    is_finite = expected.isfinite()
    x, y = found[is_finite].double(), expected[is_finite].double()
    assert (x - y).norm() <= 4 * max(torch.finfo(dtype).eps / 4, 1e-7) * y.norm()


@run
@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize("dtype", TRIED_DTYPES)
@all_cases
def test_merging(case, dtype, adds):
    """Catches a row of another tile, head, segment or batch entry, a row without partials that is NaN, a block of heads
    that writes to others, and sums in 16 bits."""
    _, num_rows, num_heads, num_kv_heads, head_dim, batch = case
    partials = tiles_of(case, dtype, lse=True)
    sum_dtype, lse_dtype = (torch.float32, torch.float64) if adds else (dtype, torch.float32)
    before = torch.randn(batch, num_rows, num_heads, head_dim).to(sum_dtype)
    lse_before = torch.randn(batch, num_rows, num_heads).to(lse_dtype)
    before[:, ::3], lse_before[:, ::3] = 0, -torch.inf  # what a sum without partials holds
    half = num_heads // num_kv_heads * (num_kv_heads // 2)
    results = []
    for function in (rows_at_once.merge_rows, merge.merge_rows):
        out, lse = before.clone(), lse_before.clone()
        for heads in filter(None, (range(half, num_heads), range(half))):
            function(out, lse, within(partials, heads), heads, adds=adds)
        results.append((out, lse))
    (out, lse), (expected_out, expected_lse) = results
    assert_close(out, expected_out, sum_dtype)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-6, atol=1e-9 if adds else 1e-6)


def within(tiles, heads):
    """The parts of tiles that have these heads."""
    parts = []
    for rows, entry, tensors in tiles:
        lo, hi = (sum(head < end for head in rows.heads) for end in (heads.start, heads.stop))
        if lo < hi:
            parts.append(
                TileRows(rows.of_heads(lo, hi), entry, tuple(x[:, lo:hi] for x in tensors))
            )
    return parts


@run
@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize("dtype", TRIED_DTYPES)
@all_cases
def test_adding(case, dtype, adds):
    """Catches gradients of keys that go to other heads, a factor of dq on dk, and a sum that is not added to."""
    _, num_rows, num_heads, num_kv_heads, head_dim, batch = case
    ratio, half = num_heads // num_kv_heads, num_kv_heads // 2
    gradients = [tiles_of(case, dtype, side) for side in ("query", "key", "key")]
    sum_dtype = torch.float32 if adds else dtype
    before = [
        torch.randn(batch, num_rows, h, head_dim).to(sum_dtype)
        for h in (num_heads, num_kv_heads, num_kv_heads)
    ]
    for names in (3, 1):
        results = []
        for function in (rows_at_once.add_rows, merge.add_rows):
            totals = [x.clone() for x in before[:names]]
            for kv in filter(None, (range(half, num_kv_heads), range(half))):
                groups = [range(kv.start * ratio, kv.stop * ratio), kv, kv]
                sums = [
                    GradientSum(total, within(tiles, heads), heads)
                    for total, tiles, heads in zip(totals, gradients, groups, strict=False)
                ]
                function(sums, 1.0 if adds else 0.3, adds=adds)
            results.append(totals)
        for found, expected in zip(*results, strict=True):
            assert_close(found, expected, sum_dtype)


@run
@pytest.mark.parametrize("dtype", TRIED_DTYPES)
@all_cases
def test_laying_out(case, dtype):
    """Catches a row that goes to another place, and one that is left out: to the bit, NaN in new memory."""
    _, num_rows, num_heads, _, head_dim, batch = case
    # rows of dout lie further apart
    given = [torch.randn(batch, num_rows, 2 * num_heads, head_dim).to(dtype)[:, :, :num_heads]]
    given += [torch.randn(batch, num_rows, num_heads, head_dim).to(dtype)]
    given += [torch.randn(batch, num_rows, num_heads)]
    results = []
    for function in (rows_at_once.lay_out_rows, merge.lay_out_rows):
        tiles = [
            tile._replace(
                tensors=tuple(torch.empty_like(x) for x in [tile.tensors[0], *tile.tensors])
            )
            for tile in tiles_of(case, dtype, lse=True)
        ]
        function(*given, tiles, range(num_heads))
        results.append([x for tile in tiles for x in tile.tensors])
    assert all(torch.equal(x, y) for x, y in zip(*results, strict=True))


@interpreted
@pytest.mark.parametrize("dtype", DTYPES)
def test_whole_calls(dtype, monkeypatch):
    """Catches results of ops that the kernels cannot read where they lie."""
    pattern = DilatedPattern((8, 41), (1, 3), is_causal=True)

    def results(dtype):
        generator = torch.Generator().manual_seed(1)
        leaves = [
            torch.randn(2, 41, h, 16, generator=generator).to(MAIN).to(dtype).requires_grad_()
            for h in (4, 2, 2)
        ]
        out, lse = dilated_attention(*leaves, pattern, return_lse=True)
        return out, lse, *torch.autograd.grad(out.double().sin().sum() + lse.sum(), leaves)

    MAIN = dtype
    exact = results(torch.float64)
    functions = (rows_at_once.merge_rows, rows_at_once.add_rows, rows_at_once.lay_out_rows)
    monkeypatch.setattr(cpu, "merging", lambda query: Merging(*functions))
    monkeypatch.setattr(cpu, "TRAITS", cpu.TRAITS._replace(packing=None))
    for x, y in zip(results(dtype), exact, strict=True):
        assert (x.double() - y).norm() <= 4 * torch.finfo(dtype).eps * y.norm()


@run
def test_a_number_of_every_kind_reaches_the_table():
    """Catches numbers that lose bits on their way, more than one launch writes, and a table that is not filled."""
    numbers = [0, 1, 2, 15, 16, 17, 2**31 - 1, 2**31, 2**47 + 5, 2**57 + 1] * 60
    table = rows_at_once._table([numbers[:7], numbers[7:]], torch.device(DEVICE))
    assert table[: len(numbers)].tolist() == numbers
    assert not table[len(numbers) :].any()


@compiled
@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("head_dim", [64, 128])
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
