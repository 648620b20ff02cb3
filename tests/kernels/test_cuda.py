"""Both GPU backends on a real GPU against the definition in float64, and what only a GPU can show.

    python -m pytest tests/kernels/test_cuda.py -rs    on a machine with one; -rs says why something was skipped
    TRITON_INTERPRET=1 python -m pytest tests/kernels/test_cuda.py    a rehearsal: Triton's interpreter, no bfloat16

Without a GPU only the rehearsal runs, in `test_triton.py`'s process for it. Uninitialised memory is filled with NaN
throughout.
"""

import importlib.util
import os
from itertools import product

import pytest
import torch
from helpers import hurry_the_interpreter, relative_error
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from ring_dilated_attention import (
    ContextParallel,
    DilatedCache,
    DilatedPattern,
    attention,
    dilated_attention,
    explain,
    simulate,
)
from ring_dilated_attention.commands import check
from ring_dilated_attention.commands.errors import Case, measure, tolerances, worst
from ring_dilated_attention.kernels import choose
from ring_dilated_attention.ranks.call import Call

HAS_GPU = torch.cuda.is_available()
IS_REHEARSAL = not HAS_GPU and os.environ.get("TRITON_INTERPRET") == "1"
if IS_REHEARSAL and importlib.util.find_spec("triton") is not None:
    hurry_the_interpreter()
DEVICE = "cuda" if HAS_GPU else "cpu"
REASON = "needs a CUDA GPU, and torch sees none"

on_device = pytest.mark.skipif(not (HAS_GPU or IS_REHEARSAL), reason=REASON)
needs_gpu = pytest.mark.skipif(not HAS_GPU, reason=REASON)
# What compilers and drivers of a new machine warn of is not known beforehand.
pytestmark = [pytest.mark.filterwarnings("default"), pytest.mark.usefixtures("nan_in_new_memory", "seeded")]

BACKENDS = ("triton", "triton-fused", "sdpa")
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
HEAD_DIMS = (16, 24, 48, 64, 96, 128, 256)
MAIN = torch.bfloat16 if HAS_GPU else torch.float32
# Positions, and those of a short segment: several tiles of 128 rows that lie three positions apart; 16 in a rehearsal.
N, SHORT, LONG = (419, 64, 3001) if HAS_GPU else (37, 8, 61)


def require(backend: str, dtype: torch.dtype = MAIN) -> None:
    reason = choose.reasons(torch.empty(1, 1, 1, 16, device=DEVICE, dtype=dtype))[backend]
    if reason is not None:
        pytest.skip(f"{backend} {reason}")


def assert_right(case: Case, dtype: torch.dtype, backend: str, parallel: ContextParallel | None = None) -> None:
    """out, lse and all gradients, also through lse, within the tolerances of `rda check`."""
    require(backend, dtype)
    found = worst([case], dtype, [[measure(case, dtype, backend, DEVICE, parallel)]], DEVICE)
    assert found.passed, found


def make(*shape: int, dtype: torch.dtype = MAIN) -> Tensor:
    return torch.randn(*shape, device=DEVICE).to(dtype)


def make_inputs(seq_len: int = N, heads=(4, 2, 2), head_dim: int = 64, batch: int = 1, dtype: torch.dtype = MAIN):
    """query, key, value, and the gradient of out."""
    tensors = [make(batch, seq_len, h, head_dim, dtype=dtype) for h in (*heads, heads[0])]
    return tensors[:3], tensors[3]


def both_ways(inputs, dout, pattern, backend, **options) -> list[Tensor]:
    """out, dq, dk, dv."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    out = dilated_attention(*leaves, pattern, backend=backend, **options)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


PATTERN = DilatedPattern((SHORT, N), (1, 3), is_causal=True)

# Triton compiles for each combination, so there every other one: each type and head dim both causal and not.
COMBINATIONS = [
    (backend, dtype, head_dim, is_causal)
    for (i, dtype), (j, head_dim), is_causal, backend in product(
        enumerate(DTYPES), enumerate(HEAD_DIMS), (False, True), BACKENDS
    )
    if (backend == "sdpa" or (i + j) % 2 == is_causal) and (HAS_GPU or head_dim < 48)
]


@on_device
@pytest.mark.parametrize(("backend", "dtype", "head_dim", "is_causal"), COMBINATIONS, ids=str)
def test_every_type_and_head_dim(backend, dtype, head_dim, is_causal):
    """Catches an error of arithmetic, of a mask, or of columns beyond the head dim."""
    pattern = DilatedPattern((SHORT, N), (1, 3), is_causal=is_causal)
    assert_right(Case("type and head dim", pattern, N, 1, 4, 4, head_dim), dtype, backend)


FEATURES = [
    *(check.CASES if HAS_GPU else ()),
    Case(
        "the paper's rates",
        DilatedPattern((32, 64, 128, 256, 2 * N), (1, 2, 4, 6, 12), is_causal=True),
        N, 1, 12, 12, 64,
    ),
    Case("batch of ragged segments", DilatedPattern((50, 33), (3, 2)), N, 3, 4, 4, 64),
    Case("one head of keys", DilatedPattern((SHORT, N), (1, 2), is_causal=True), N, 1, 8, 1, 64),
    Case("blocked, ragged heads", DilatedPattern((SHORT, N), (1, 4), phase="blocked", is_causal=True), N, 1, 6, 6, 64),
    Case("split, shared keys", DilatedPattern((16, 50, N), (1, 2, 3), heads="split"), N, 1, 7, 1, 64),
    Case(
        "short documents",
        DilatedPattern((24, 100), (1, 3), is_causal=True),
        N, 1, 4, 2, 64, documents=(0, 1, 2, 33, 34, N),
    ),
    Case("dense", DilatedPattern((N,), (1,)), N, 2, 4, 4, 64),
    Case("segments longer than all", DilatedPattern((10**6, 2 * 10**6), (1, 5), is_causal=True), N, 1, 4, 4, 64),
    Case("two positions", DilatedPattern((2, 7), (1, 2)), 2, 1, 2, 2, 64),
]  # fmt: skip


@on_device
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", FEATURES, ids=lambda case: case.name)
def test_every_feature(case, backend):
    """Catches a feature of the definition that a kernel has wrong."""
    assert_right(case, MAIN, backend)


@on_device
@pytest.mark.parametrize("op", ["FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_each_of_torchs_ops(op, head_dim):
    """Catches an op that is called by the contract of another. Without a gradient of lse, whose column one refuses."""
    torch.use_deterministic_algorithms(True, warn_only=True)  # else cuDNN's refuses
    with sdpa_kernel(getattr(SDPBackend, op)):
        require("sdpa")
        for pattern in (PATTERN, DilatedPattern((50, 33), (3, 2))):
            case = Case("op", pattern, N, 2, 4, 2, head_dim)
            found = worst([case], MAIN, [[measure(case, MAIN, "sdpa", DEVICE, None, through_lse=False)]], DEVICE)
            assert found.passed, found


@on_device
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("sharding", ["contiguous", "zigzag"])
def test_hops_of_the_ring(sharding, backend):
    """Catches kernels that need as many keys as queries: a hop has its own number, in a flat buffer."""
    parallel = simulate.all_ranks(3, sharding=sharding)
    assert_right(Case("hops", PATTERN, N, 1, 4, 2, 64, sharding=sharding), MAIN, backend, parallel)


@on_device
@pytest.mark.parametrize("backend", BACKENDS)
def test_without_a_gradient_of_lse(backend):
    """Catches a gradient that differs where lse was never asked for."""
    require(backend)
    inputs, dout = make_inputs()
    plain = both_ways(inputs, dout, PATTERN, backend)
    leaves = [x.requires_grad_() for x in inputs]
    out, lse = dilated_attention(*leaves, PATTERN, backend=backend, return_lse=True)
    assert torch.equal(out, plain[0])
    grads = torch.autograd.grad([out, lse], leaves, [dout, torch.zeros_like(lse)])
    for x, y in zip(grads, plain[1:], strict=True):
        assert relative_error(x, y) <= torch.finfo(MAIN).eps


@on_device
@pytest.mark.parametrize("backend", BACKENDS)
def test_strides_make_no_difference(backend):
    """Catches strides that are taken from another tensor: heads first, and query, key and value in one tensor."""
    require(backend)
    both = make(2, N, 3, 4, 64)
    dout = make(2, 4, N, 64).transpose(1, 2)
    strided = [both[:, :, 0], both[:, :, 1].transpose(1, 2).contiguous().transpose(1, 2), both[:, :, 2]]
    expected = both_ways([x.contiguous() for x in strided], dout.contiguous(), PATTERN, backend)
    for x, y in zip(both_ways(strided, dout, PATTERN, backend), expected, strict=True):
        assert torch.equal(x, y)


@on_device
@pytest.mark.parametrize("is_deterministic", [True, False])
@pytest.mark.parametrize("backend", BACKENDS)
def test_run_to_run(backend, is_deterministic):
    """Catches a race, and sums in an order that changes. Torch's own ops promise an order only under its flag."""
    require(backend)
    if backend == "sdpa" and not is_deterministic:
        pytest.skip("torch's backward adds in any order unless deterministic algorithms are asked for")
    torch.use_deterministic_algorithms(is_deterministic)
    inputs, dout = make_inputs(LONG, batch=2)
    pattern = DilatedPattern((SHORT, LONG), (1, 3), is_causal=True)
    expected = both_ways(inputs, dout, pattern, backend)
    for _ in range(3 if HAS_GPU else 1):
        for x, y in zip(both_ways(inputs, dout, pattern, backend), expected, strict=True):
            assert torch.equal(x, y)


@on_device
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf], ids=str)
def test_nan_stays_in_its_segment(bad, backend):
    """Catches 0 * NaN where a tile crosses a border: one bad row, of whichever tensor, spoils its segment alone."""
    require(backend)
    inputs, dout = make_inputs(40, (2, 2, 2), 16)
    pattern = DilatedPattern((8,), (1,), is_causal=True)
    expected = both_ways(inputs, dout, pattern, backend)
    inside = torch.zeros(1, 40, 2, dtype=torch.bool, device=DEVICE)
    inside[:, 8:16, 1] = True
    for which in range(4):
        *spoilt, grad = [x.clone() for x in (*inputs, dout)]
        (*spoilt, grad)[which][0, 12, 1, 3] = bad
        for x, y in zip(both_ways(spoilt, grad, pattern, backend), expected, strict=True):
            assert torch.equal(x[~inside], y[~inside])


@on_device
@pytest.mark.parametrize("backend", BACKENDS)
def test_no_positions(backend):
    """Catches a launch of no blocks, which CUDA refuses."""
    require(backend)
    inputs, dout = make_inputs(0)
    assert [x.shape[1] for x in both_ways(inputs, dout, PATTERN, backend)] == [0] * 4


@on_device
@pytest.mark.parametrize("backend", BACKENDS)
def test_more_segments_than_a_grid_has_blocks(backend):
    """Catches segments on an axis of the grid that ends at 65,535."""
    require(backend)
    seq_len = 2 * 65_537 + 1 if HAS_GPU else 2 * 37 + 1
    inputs, dout = make_inputs(seq_len, (1, 1, 1), 16)
    pattern = DilatedPattern((2,), (1,))
    expected = both_ways([x.cpu() for x in inputs], dout.cpu(), pattern, "cpu")
    allowed = tolerances(Case("pairs", pattern, 64, 1, 1, 1, 16), MAIN, DEVICE)
    for name, x, y in zip(("out", "dq", "dk", "dv"), both_ways(inputs, dout, pattern, backend), expected, strict=True):
        assert relative_error(x.cpu(), y) <= 2 * allowed[name], name  # each may be off by its tolerance


@needs_gpu
@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_far_apart(backend):
    """Catches offsets in 32 bits: rows lie 2**27 elements apart, the last ones beyond 2**31, in 5 GB."""
    require(backend, torch.float16)
    torch.use_deterministic_algorithms(False)  # NaN need not fill all of it
    seq_len, step = 20, 2**27
    memory = torch.empty(step * seq_len, dtype=torch.float16, device=DEVICE)
    near, near_dout = make_inputs(seq_len, (2, 2, 2), 16, dtype=torch.float16)
    far = [memory.as_strided(x.shape, (step * seq_len, step, 16, 1), 64 * i) for i, x in enumerate([*near, near_dout])]
    for x, y in zip(far, [*near, near_dout], strict=True):
        x.copy_(y)
    pattern = DilatedPattern((20, 7), (1, 2), is_causal=True)
    expected = both_ways(near, near_dout, pattern, backend)
    for x, y in zip(both_ways(far[:3], far[3], pattern, backend), expected, strict=True):
        assert torch.equal(x, y)


@needs_gpu
@pytest.mark.parametrize("backend", ["triton", "triton-fused"])
def test_tensors_of_more_than_2_31_elements(backend):
    """Catches results that are written at offsets in 32 bits: the last segment against a call of it alone."""
    require(backend)
    torch.use_deterministic_algorithms(False)  # NaN need not fill all of it
    length, seq_len, head_dim = 4096, 2**23 + 4096, 256
    needed = 16 * seq_len * head_dim * MAIN.itemsize
    free = torch.cuda.mem_get_info()[0]
    if free < needed:
        pytest.skip(f"needs {needed / 1e9:.0f} GB, {free / 1e9:.0f} are free")
    tensors = [torch.randn(1, seq_len, 1, head_dim, device=DEVICE, dtype=MAIN) for _ in range(4)]
    pattern = DilatedPattern((length,), (1,), is_causal=True)
    whole = [x[:, -length:].clone() for x in both_ways(tensors[:3], tensors[3], pattern, backend)]
    tail = [x[:, -length:].clone() for x in tensors]
    allowed = tolerances(Case("tail", DilatedPattern((64,), (1,), is_causal=True), 64, 1, 1, 1, head_dim), MAIN, DEVICE)
    for name, x, y in zip(
        ("out", "dq", "dk", "dv"), whole, both_ways(tail[:3], tail[3], pattern, backend), strict=True
    ):
        assert relative_error(x, y) <= 2 * allowed[name], name


# Streams, graphs, compilation.


@needs_gpu
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_current_stream(backend):
    """Catches a launch on another stream, which would read the inputs before they are there."""
    require(backend)
    inputs, dout = make_inputs()
    expected = both_ways(inputs, dout, PATTERN, backend)
    late = [torch.full_like(x, torch.nan) for x in (*inputs, dout)]
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)  # tens of milliseconds
        for x, y in zip(late, (*inputs, dout), strict=True):
            x.copy_(y)
        found = both_ways(late[:3], late[3], PATTERN, backend)
    stream.synchronize()
    assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason=f"needs two GPUs, there are {torch.cuda.device_count()}")
@pytest.mark.parametrize("backend", BACKENDS)
def test_another_device_than_the_current(backend):
    """Catches a launch, or a table, on the current device in place of the tensors'."""
    require(backend)
    inputs, dout = make_inputs()
    expected = both_ways(inputs, dout, PATTERN, backend)
    with torch.cuda.device(0):
        found = both_ways([x.to("cuda:1") for x in inputs], dout.to("cuda:1"), PATTERN, backend)
    assert all(torch.equal(x.to(DEVICE), y) for x, y in zip(found, expected, strict=True))


@needs_gpu
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_graph_replays_both_ways(backend):
    """Catches a wait, a copy from the host or a number read from the device, which no capture allows, and memory that
    does not belong to the graph."""
    require(backend)
    inputs, dout = make_inputs(batch=2)
    leaves = [x.clone().requires_grad_() for x in inputs]

    def call() -> list[Tensor]:
        out, lse = dilated_attention(*leaves, PATTERN, backend=backend, return_lse=True)
        return [out.detach(), lse.detach(), *torch.autograd.grad([out, lse], leaves, [dout, torch.ones_like(lse)])]

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):  # what is compiled or made once
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call()
    for _ in range(2):
        with torch.no_grad():
            for x in leaves:
                x.copy_(torch.randn_like(x))
        dout.copy_(torch.randn_like(dout))
        graph.replay()
        replayed = [x.clone() for x in captured]
        for x, y in zip(replayed, call(), strict=True):
            assert torch.equal(x, y)


@on_device
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
def test_compiled_whole(compiler, backend):
    """Catches a graph break, and a fake that lies about shapes, strides or dtypes."""
    require(backend)
    if not HAS_GPU and compiler == "inductor":
        pytest.skip("inductor compiles for the device")
    torch._dynamo.reset()
    inputs, dout = make_inputs(batch=2)

    def function(query, key, value):
        out, lse = dilated_attention(query * 2, key, value, PATTERN, backend=backend, return_lse=True)
        return (out * dout).sum() + lse.square().sum()

    results = []
    for run in (function, torch.compile(function, fullgraph=True, backend=compiler)):
        leaves = [x.clone().requires_grad_() for x in inputs]
        results.append(torch.autograd.grad(run(*leaves), leaves))
    for x, y in zip(*results, strict=True):
        assert torch.equal(x, y) if compiler == "aot_eager" else relative_error(x, y) <= torch.finfo(MAIN).eps


@on_device
@pytest.mark.parametrize("backend", BACKENDS)
def test_operators_pass_the_checks_of_torch(backend):
    """Catches wrong fakes (strides too), aliased outputs and inputs that are changed."""
    require(backend)
    inputs, dout = make_inputs(24, head_dim=16)
    tensors = [x.requires_grad_() for x in inputs]
    pattern, num_heads = DilatedPattern((8, 24), (1, 2), is_causal=True), inputs[0].shape[2]
    call = Call(pattern, 0.25, backend, "qkv", True, range(num_heads), num_heads).text
    torch.library.opcheck(attention._forward, (*tensors, None, call))
    out, lse, begun = attention._forward(*tensors, None, call)
    for dlse in (None, torch.ones_like(lse)):
        arguments = (dout, dlse, *tensors, out, lse, begun, call)
        arguments = [x.detach() if isinstance(x, Tensor) else x for x in arguments]
        tests = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")  # it refuses derivatives
        torch.library.opcheck(attention._backward, tuple(arguments), test_utils=tests)


# One token with a cache.


def append_all(inputs, backend, *, steps) -> tuple[list[Tensor], DilatedCache]:
    """out and lse of rows that are appended in these steps, and the cache."""
    batch, _, num_heads, head_dim = inputs[0].shape
    cache = DilatedCache(
        PATTERN, batch, num_heads, inputs[1].shape[2], head_dim, dtype=inputs[0].dtype, device=DEVICE, keep=3
    )
    slices = zip(*(x.split(steps, dim=1) for x in inputs), strict=True)
    results = [dilated_attention(*rows, PATTERN, cache=cache, backend=backend, return_lse=True) for rows in slices]
    return [torch.cat(x, dim=1) for x in zip(*results, strict=True)], cache


@on_device
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_sequence_token_by_token(backend):
    """Catches a token that misses a row, or sees one of another segment: as one call, within its precision."""
    require(backend)
    inputs, _ = make_inputs(N, head_dim=16, batch=2)
    steps = [N - 12, *[1] * 12]
    found, _ = append_all(inputs, backend, steps=steps)
    expected = dilated_attention(*inputs, PATTERN, backend=backend, return_lse=True)
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=4 * torch.finfo(x.dtype).eps ** 0.75, atol=4 * torch.finfo(MAIN).eps)


@needs_gpu
def test_a_graph_of_a_token():
    """Catches a number that is read on the host, or a position that is captured: one graph serves all tokens."""
    require("triton")
    inputs, _ = make_inputs(N, head_dim=64)
    start = N - 8
    expected, _ = append_all(inputs, "triton", steps=[start, *[1] * 8])
    _, cache = append_all([x[:, :start] for x in inputs], "triton", steps=[start])
    rows = [x[:, start : start + 1].clone() for x in inputs]

    def token() -> Tensor:
        out = dilated_attention(*rows, PATTERN, cache=cache, backend="triton")
        assert isinstance(out, Tensor)
        return out

    spare = cache.fork([0])
    dilated_attention(*rows, PATTERN, cache=spare, backend="triton")  # what is compiled or made once
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = token()
    for t in range(start, N):
        for row, x in zip(rows, inputs, strict=True):
            row.copy_(x[:, t : t + 1])
        graph.replay()
        assert torch.equal(out, expected[0][:, t : t + 1])
    assert cache.position.tolist() == [N]


# Choice of the backend.


@needs_gpu
def test_this_card_is_served():
    """Catches tests that pass because they were skipped: from compute capability 8.0 on, both backends must serve."""
    if torch.version.hip or torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("an older card, or AMD's: the sdpa backend, or triton by its table of block sizes")
    for dtype in DTYPES:
        found = choose.reasons(torch.empty(1, 1, 1, 64, device=DEVICE, dtype=dtype))
        assert found["triton"] is None
        assert found["sdpa"] is None


@needs_gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_auto_takes_what_it_explains(dtype):
    """Catches an explanation of another choice, and a backend without a reason."""
    inputs, dout = make_inputs(dtype=dtype)
    found = explain(*inputs, PATTERN)
    backend = found.kernel.partition(" ")[0]  # of "sdpa (flash)", say
    assert backend in BACKENDS
    assert set(choose.BACKENDS) <= found.reasons.keys()
    expected = both_ways(inputs, dout, PATTERN, backend)
    for x, y in zip(both_ways(inputs, dout, PATTERN, "auto"), expected, strict=True):
        assert torch.equal(x, y)


@needs_gpu
@pytest.mark.parametrize("backend", BACKENDS)
def test_autocast(backend):
    """Catches float32 inputs that autocast leaves alone, or gradients in its type."""
    require(backend)
    inputs, dout = make_inputs(dtype=torch.float32)
    leaves = [x.requires_grad_() for x in inputs]
    with torch.autocast("cuda", torch.bfloat16):
        out = dilated_attention(*leaves, PATTERN, backend=backend)
    assert out.dtype == torch.bfloat16
    grads = torch.autograd.grad(out, leaves, dout.bfloat16())
    assert all(x.dtype == torch.float32 for x in grads)
    expected = both_ways([x.bfloat16() for x in inputs], dout.bfloat16(), PATTERN, backend)
    assert all(torch.equal(x, y.to(x.dtype)) for x, y in zip((out.detach(), *grads), expected, strict=True))
