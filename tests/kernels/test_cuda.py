"""Torch's ops on a real GPU against the definition in float64, and what only a GPU can show.

    python -m pytest tests/kernels/test_cuda.py -rs    on a machine with one; -rs says why something was skipped

Without a GPU the CPU's kernel stands in: a rehearsal, which finds the mistakes of this file itself. Uninitialised
memory is filled with NaN throughout, in the mode of torch that only warns of ops that are not deterministic: the strict
mode drops cuDNN's op, which is the default for 16 bits on some GPUs.
"""

import pytest
import torch
from fuzz_oracle import STRIDES
from helpers import compare, poisoned_memory, relative_error
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel

from ring_dilated_attention import (
    DilatedCache,
    DilatedPattern,
    dilated_attention,
    explain,
    simulate,
)
from ring_dilated_attention.attention import attention
from ring_dilated_attention.commands import check, errors
from ring_dilated_attention.commands.errors import Case, measure, measure_cached, worst
from ring_dilated_attention.kernels import choose
from ring_dilated_attention.ranks.call import Call
from ring_dilated_attention.run import dilated_cache

HAS_GPU = torch.cuda.is_available()
DEVICE, BACKEND = ("cuda", "sdpa") if HAS_GPU else ("cpu", "cpu")

needs_gpu = pytest.mark.skipif(not HAS_GPU, reason="needs a CUDA GPU, and torch sees none")
# What compilers and drivers of a new machine warn of is not known beforehand.
pytestmark = [pytest.mark.filterwarnings("default"), pytest.mark.usefixtures("seeded")]

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
HEAD_DIMS = (16, 24, 48, 64, 96, 128, 256) if HAS_GPU else (16, 24)
MAIN = torch.bfloat16 if HAS_GPU else torch.float32
# Positions, and those of a short segment: several tiles of 128 rows that lie three positions apart; 16 in a rehearsal.
N, SHORT, LONG = (419, 64, 3001) if HAS_GPU else (37, 8, 61)


@pytest.fixture(autouse=True)
def served():
    """From compute capability 8.0 on, "sdpa" must serve: else tests would pass because they were skipped. A test that
    changes torch's mode does so for itself alone."""
    if HAS_GPU and not torch.version.hip and torch.cuda.get_device_capability() >= (8, 0):
        assert choose.reasons(make(1, 1, 1, 16))["sdpa"] is None
    require(MAIN)
    with poisoned_memory(warn_only=True):
        yield


def require(dtype):
    reason = choose.reasons(torch.empty(1, 1, 1, 16, device=DEVICE, dtype=dtype))[BACKEND]
    if reason is not None:
        pytest.skip(f"{BACKEND} {reason}")


def assert_right(case, dtype, parallel=None, *, through_lse=True):
    """out, lse and all gradients, also through lse, within the tolerances of `rda check`."""
    require(dtype)
    measured = measure(case, dtype, BACKEND, DEVICE, parallel, through_lse=through_lse)
    found = worst([case], dtype, [[measured]], DEVICE)
    assert found.passed, found


def assert_same(found, expected):
    """Equal but for rounding: unless torch's mode is strict, its ops add the terms of a gradient in any order."""
    for x, y in zip(found, expected, strict=True):
        assert relative_error(x, y) <= errors.FLOOR_ON_GPU[x.dtype]


def make(*shape, dtype=MAIN):
    return torch.randn(*shape, device=DEVICE).to(dtype)


def make_inputs(seq_len=N, heads=(4, 2, 2), head_dim=64, batch=1, dtype=MAIN):
    """query, key, value, and the gradient of out."""
    tensors = [make(batch, seq_len, h, head_dim, dtype=dtype) for h in (*heads, heads[0])]
    return tensors[:3], tensors[3]


def both_ways(inputs, dout, pattern, backend=BACKEND):
    """out, dq, dk, dv."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    out = dilated_attention(*leaves, pattern, backend=backend)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


PATTERN = DilatedPattern((SHORT, N), (1, 3), is_causal=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("is_causal", [False, True])
def test_every_type_and_head_dim(dtype, head_dim, is_causal):
    """Catches an error of arithmetic, of a mask, or of columns beyond the head dim."""
    pattern = DilatedPattern((SHORT, N), (1, 3), is_causal=is_causal)
    assert_right(Case("type and head dim", pattern, N, 1, 4, 4, head_dim), dtype)


FEATURES = [
    *(check.CASES if HAS_GPU else ()),
    Case(
        "the paper's rates",
        DilatedPattern((32, 64, 128, 256, 2 * N), (1, 2, 4, 6, 12), is_causal=True),
        N, 1, 12, 12, 64,
    ),
    Case("split, shared keys", DilatedPattern((16, 50, N), (1, 2, 3), heads="split"), N, 1, 7, 1, 64),
    Case(
        "short documents",
        DilatedPattern((24, 100), (1, 3), is_causal=True),
        N, 1, 4, 2, 64, documents=(0, 1, 2, 33, 34, N),
    ),
    Case("segments longer than all", DilatedPattern((10**6, 2 * 10**6), (1, 5), is_causal=True), N, 1, 4, 4, 64),
    Case("two positions", DilatedPattern((2, 7), (1, 2)), 2, 1, 2, 2, 64),
    *(
        Case("window", DilatedPattern.sliding(SHORT, is_causal=is_causal), N, 1, 4, 2, 64)
        for is_causal in (False, True)  # Without causality a window is centred.
    )
]  # fmt: skip
# Torch has other ops for 16 bits than for 32.
both_widths = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


@both_widths
@pytest.mark.parametrize("case", FEATURES, ids=lambda case: case.name)
def test_every_feature(case, dtype):
    """Catches a feature of the definition that a kernel has wrong."""
    assert_right(case, dtype)


@both_widths
def test_sinks(dtype):
    """Catches sinks that get no gradient, or that of another head, and an lse whose gradient gets lost on its way."""
    inputs = make_inputs(dtype=dtype)[0]
    # This is 7e-5 in 32 bits and 0.05 in bfloat16. It holds for each number, so it is wider than for a norm.
    compare(inputs, PATTERN, sinks=make(4, dtype=dtype), tolerance=torch.finfo(dtype).eps ** 0.6)


@pytest.mark.parametrize("op", ["FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
# of head dim 128, the column of a gradient of lse is refused by one
@pytest.mark.parametrize(("head_dim", "through_lse"), [(33, True), (64, True), (128, False)])
def test_each_of_torchs_ops(op, dtype, head_dim, through_lse):
    """Catches an op that is called by the contract of another, and what stand-ins get wrong about it (test_sdpa.py)."""
    with sdpa_kernel(getattr(SDPBackend, op)):
        for pattern in (PATTERN, DilatedPattern((50, 33), (3, 2))):
            assert_right(Case("op", pattern, N, 2, 4, 2, head_dim), dtype, through_lse=through_lse)


@pytest.mark.parametrize("sharding", ["contiguous", "zigzag"])
def test_hops_of_the_ring(sharding):
    """Catches kernels that need as many keys as queries: a hop has its own number, in a flat buffer."""
    parallel = simulate.all_ranks(3, sharding=sharding)
    assert_right(Case("hops", PATTERN, N, 1, 4, 2, 64, sharding=sharding), MAIN, parallel)


UNALIGNED = [
    lambda x: torch.cat([x.flatten()[:1], x.flatten()])[1:].view(x.shape),
    lambda x: torch.cat([x, x[..., :1]], dim=3)[..., :-1],
]


@pytest.mark.parametrize("arrange", [*STRIDES, *UNALIGNED])
def test_strides_make_no_difference(arrange):
    """Catches strides that are taken from another tensor, and addresses that are no whole numbers of 16 bytes."""
    inputs, dout = make_inputs(batch=2)
    found = both_ways([arrange(inputs[0]), *inputs[1:]], dout, PATTERN)
    found += both_ways(list(map(arrange, inputs)), arrange(dout), PATTERN)
    # the CPU's kernel adds in another order where rows are not aligned
    assert_same(found, 2 * both_ways(inputs, dout, PATTERN))


def test_run_to_run():
    """Catches a race, and sums in an order that changes. Torch's own ops promise an order only under its flag."""
    inputs, dout = make_inputs(LONG, batch=2)
    pattern = DilatedPattern((SHORT, LONG), (1, 3), is_causal=True)
    with poisoned_memory():
        expected = both_ways(inputs, dout, pattern)
        for _ in range(3):
            assert all(map(torch.equal, both_ways(inputs, dout, pattern), expected))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf], ids=str)
def test_nan_stays_in_its_segment(bad):
    """Catches 0 * NaN where a tile crosses a border: one bad row, of whichever tensor, spoils its segment alone."""
    inputs, dout = make_inputs(40, (2, 2, 2), 16)
    pattern = DilatedPattern((8,), (1,), is_causal=True)
    expected = both_ways(inputs, dout, pattern)
    inside = torch.zeros(1, 40, 2, dtype=torch.bool, device=DEVICE)
    inside[:, 8:16, 1] = True
    for which in range(4):
        *spoilt, grad = [x.clone() for x in (*inputs, dout)]
        (*spoilt, grad)[which][0, 12, 1, 3] = bad
        for x, y in zip(both_ways(spoilt, grad, pattern), expected, strict=True):
            assert torch.equal(x[~inside], y[~inside])


def test_no_positions():
    """Catches a launch of no blocks, which CUDA refuses."""
    inputs, dout = make_inputs(0)
    assert [x.shape[1] for x in both_ways(inputs, dout, PATTERN)] == [0] * 4


def test_more_segments_than_a_grid_has_blocks():
    """Catches segments on an axis of the grid that ends at 65,535."""
    seq_len = 2 * (65_537 if HAS_GPU else 37) + 1
    inputs, dout = make_inputs(seq_len, (1, 1, 1), 16)
    pattern = DilatedPattern((2,), (1,))
    on_cpu = both_ways([x.cpu() for x in inputs], dout.cpu(), pattern, "cpu")
    for x, y in zip(both_ways(inputs, dout, pattern), on_cpu, strict=True):
        # Both sides round the weights and the result.
        assert relative_error(x.cpu(), y) <= 2 * torch.finfo(MAIN).eps


@needs_gpu
def test_rows_far_apart():
    """Catches offsets in 32 bits: rows lie 2**27 elements apart, the last ones beyond 2**31, in 5 GB."""
    require(torch.float16)
    torch.use_deterministic_algorithms(False)  # NaN need not fill all of it
    seq_len, step = 20, 2**27
    memory = torch.empty(step * seq_len, dtype=torch.float16, device=DEVICE)
    near, near_dout = make_inputs(seq_len, (2, 2, 2), 16, dtype=torch.float16)
    far = [
        memory.as_strided(x.shape, (step * seq_len, step, 16, 1), 64 * i)
        for i, x in enumerate([*near, near_dout])
    ]
    for x, y in zip(far, [*near, near_dout], strict=True):
        x.copy_(y)
    pattern = DilatedPattern((20, 7), (1, 2), is_causal=True)
    assert_same(both_ways(far[:3], far[3], pattern), both_ways(near, near_dout, pattern))


# Streams, graphs, compilation.


@needs_gpu
def test_the_current_stream():
    """Catches a launch on another stream, which would read the inputs before they are there."""
    inputs, dout = make_inputs()
    expected = both_ways(inputs, dout, PATTERN)
    late = [torch.full_like(x, torch.nan) for x in (*inputs, dout)]
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)  # tens of milliseconds
        for x, y in zip(late, (*inputs, dout), strict=True):
            x.copy_(y)
        found = both_ways(late[:3], late[3], PATTERN)
    stream.synchronize()
    assert_same(found, expected)


@pytest.mark.skipif(
    torch.cuda.device_count() < 2, reason=f"needs two GPUs, there are {torch.cuda.device_count()}"
)
def test_another_device_than_the_current():
    """Catches a launch, or a table, on the current device in place of the tensors'."""
    inputs, dout = make_inputs()
    expected = both_ways(inputs, dout, PATTERN)
    with torch.cuda.device(0):
        found = both_ways([x.to("cuda:1") for x in inputs], dout.to("cuda:1"), PATTERN)
    assert_same([x.to(DEVICE) for x in found], expected)


@needs_gpu
def test_a_graph_replays_both_ways():
    """Catches a wait, a copy from the host or a number read from the device, which no capture allows, and memory that
    does not belong to the graph."""
    inputs, dout = make_inputs(batch=2)
    leaves = [x.clone().requires_grad_() for x in inputs]

    def call():
        out, lse = dilated_attention(*leaves, PATTERN, backend=BACKEND, return_lse=True)
        grads = torch.autograd.grad([out, lse], leaves, [dout, torch.ones_like(lse)])
        return [out.detach(), lse.detach(), *grads]

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
            for x in (*leaves, dout):
                x.copy_(torch.randn_like(x))
        graph.replay()
        assert_same(captured, call())


@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
def test_compiled_whole(compiler):
    """Catches a graph break, and a fake that lies about shapes, strides or dtypes."""
    if not HAS_GPU and compiler == "inductor":
        pytest.skip("inductor compiles for the device")
    torch._dynamo.reset()
    inputs, dout = make_inputs(batch=2)

    def function(query, key, value):
        out, lse = dilated_attention(
            query * 2, key, value, PATTERN, backend=BACKEND, return_lse=True
        )
        return (out * dout).sum() + lse.square().sum()

    results = []
    for run in (function, torch.compile(function, fullgraph=True, backend=compiler)):
        leaves = [x.clone().requires_grad_() for x in inputs]
        results.append(torch.autograd.grad(run(*leaves), leaves))
    assert_same(*results)


def test_operators_pass_the_checks_of_torch():
    """Catches wrong fakes (strides too), aliased outputs and inputs that are changed."""
    pattern = DilatedPattern((8, 24), (1, 2), is_causal=True)
    call = Call(pattern, 0.25, BACKEND, "qkv", True, range(4), 4).text
    for arrange in (lambda x: x, lambda x: x.transpose(1, 2).contiguous().transpose(1, 2)):
        inputs, dout = make_inputs(24, head_dim=16)
        tensors = [arrange(x).requires_grad_() for x in inputs]
        torch.library.opcheck(attention._forward, (*tensors, None, call))
        out, lse, begun = attention._forward(*tensors, None, call)
        for dlse in (None, torch.ones_like(lse)):
            arguments = (arrange(dout), dlse, *tensors, out, lse, begun, call)
            arguments = [x.detach() if isinstance(x, Tensor) else x for x in arguments]
            # it refuses derivatives
            tests = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
            torch.library.opcheck(attention._backward, tuple(arguments), test_utils=tests)


@pytest.mark.parametrize("backend", ["sdpa", "auto"])
@pytest.mark.parametrize("has_cache", [False, True])
def test_a_call_on_cuda_tensors_compiles_whole(has_cache, backend, monkeypatch):
    """Catches a graph break in the choice of a backend, which asks torch's switches and the device.

    The tensors are fake, so that no device is needed: what is traced is all that there is before the op.
    """
    monkeypatch.setattr(torch.cuda, "_lazy_init", lambda: None)
    monkeypatch.setattr(dilated_cache, "free_bytes", lambda device: None)
    torch._dynamo.reset()
    pattern = DilatedPattern((8, 16), (1, 2), is_causal=True)

    def call(query, key, value, cache):
        return dilated_attention(query, key, value, pattern, cache=cache, backend=backend)

    with FakeTensorMode(allow_non_fake_inputs=True):
        shape = (1, 1 if has_cache else 32, 2, 16)
        tensors = [torch.empty(shape, device="cuda:0", dtype=torch.bfloat16) for _ in range(3)]
        cache = (
            DilatedCache(pattern, 1, 2, 2, 16, device="cuda:0", dtype=torch.bfloat16)
            if has_cache
            else None
        )
        out = torch.compile(call, fullgraph=True, backend="eager")(*tensors, cache)
    assert (out.shape, out.device.type) == (shape, "cuda")


def test_a_sequence_token_by_token():
    """Catches a token that misses a row, or sees one of another segment."""
    case = Case("appended", PATTERN, N, 2, 4, 2, 16)
    found = worst([case], MAIN, [[measure_cached(case, MAIN, BACKEND, DEVICE)]], DEVICE)
    assert found.passed, found


# Choice of the backend.


@needs_gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_auto_takes_what_it_explains(dtype):
    """Catches an explanation of another choice, a backend without a reason, and tests of this file that run other ops
    than calls do by default."""
    inputs, dout = make_inputs(dtype=dtype)
    found = explain(*inputs, PATTERN)
    assert found.kernel.partition(" ")[0] == BACKEND  # of "sdpa (flash)", say
    assert set(choose.BACKENDS) <= found.reasons.keys()
    assert_same(both_ways(inputs, dout, PATTERN, "auto"), both_ways(inputs, dout, PATTERN))
    torch.use_deterministic_algorithms(False)
    assert explain(*inputs, PATTERN).kernel == found.kernel


@needs_gpu
def test_autocast():
    """Catches float32 inputs that autocast leaves alone, or gradients in its type."""
    inputs, dout = make_inputs(dtype=torch.float32)
    leaves = [x.requires_grad_() for x in inputs]
    with torch.autocast("cuda", torch.bfloat16):
        out = dilated_attention(*leaves, PATTERN, backend=BACKEND)
    assert out.dtype == torch.bfloat16
    grads = torch.autograd.grad(out, leaves, dout.bfloat16())
    assert all(x.dtype == torch.float32 for x in grads)
    expected = both_ways([x.bfloat16() for x in inputs], dout.bfloat16(), PATTERN)
    # The gradients were computed in 16 bits, and are compared with what that precision allows.
    assert_same([x.bfloat16() for x in (out, *grads)], expected)
