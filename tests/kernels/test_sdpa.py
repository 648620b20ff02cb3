"""The CUDA kernels' wrapping without a GPU: what is chosen and why, shapes on meta tensors, and numbers with stand-ins
for torch's CUDA ops. With a GPU: each op that it can run against the definition.

A stand-in keeps to the op's contract as the schemas, meta kernels and sources of torch 2.13 state it, and computes on
the CPU.
"""

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch.nn.attention import (
    SDPBackend,
    activate_flash_attention_impl,
    restore_flash_attention_impl,
    sdpa_kernel,
)
from torch.nn.functional import pad

from ring_dilated_attention import DilatedCache, DilatedPattern, dilated_attention, explain
from ring_dilated_attention.commands.errors import (
    QUANTITIES,
    Case,
    defined,
    make_inputs,
    relative,
    squares,
    tolerances,
)
from ring_dilated_attention.kernels import cpu, cuda_ops, sdpa
from ring_dilated_attention.kernels.contract import BackwardRows
from ring_dilated_attention.kernels.cuda_ops import TileFacts
from ring_dilated_attention.plan.exchange import plan_exchange
from ring_dilated_attention.plan.job import Job
from ring_dilated_attention.plan.program import make_program
from ring_dilated_attention.plan.sharding import make_shards
from ring_dilated_attention.plan.step import CallFacts, Compute

aten = torch.ops.aten
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SELECT = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}
# What each op can be asked to compute.
SERVED = [
    (name, dtype)
    for name, op in cuda_ops.OPS.items()
    for dtype in DTYPES
    if dtype in op.capabilities
]


def make(dtype, num_heads, num_kv_heads, num_rows, num_keys, head_dim, device="cpu"):
    """q, k, v as the plan's views: (B, heads, rows, D), rows far apart in memory."""
    torch.manual_seed(0)
    shapes = [(2, num_heads, num_rows, head_dim), *[(2, num_kv_heads, num_keys, head_dim)] * 2]
    return [
        torch.randn(b, m, h, d, device=device).to(dtype).transpose(1, 2) for b, h, m, d in shapes
    ]


@pytest.fixture
def gpu(monkeypatch):
    """As on an A100 with a recent cuDNN, whatever this machine is."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 92000)
    monkeypatch.setattr(torch.version, "hip", None)
    return monkeypatch


# What is chosen, and why not the others.


# A tile that every op takes.
TILE = TileFacts(
    torch.bfloat16,
    torch.device("cuda"),
    batch=2,
    num_heads=4,
    num_rows=64,
    num_keys=64,
    head_dim=64,
)


def chosen(**facts):
    return sdpa._choose(TILE._replace(**facts))


@pytest.mark.parametrize(
    ("capability", "dtype", "head_dim", "expected"),
    [
        ((6, 1), torch.float32, 64, "efficient"),  # Pascal
        ((6, 1), torch.float16, 64, "efficient"),
        ((7, 5), torch.float16, 257, "efficient"),
        ((8, 0), torch.float32, 64, "efficient"),
        ((8, 0), torch.float16, 64, "flash"),
        ((8, 0), torch.bfloat16, 256, "flash"),
        ((8, 0), torch.bfloat16, 257, "efficient"),
        ((8, 0), torch.bfloat16, 200, "flash"),
        ((8, 6), torch.bfloat16, 192, "flash"),
        ((8, 6), torch.bfloat16, 200, "efficient"),
        ((8, 9), torch.bfloat16, 224, "efficient"),
        ((12, 0), torch.bfloat16, 224, "efficient"),
        ((12, 0), torch.bfloat16, 225, "flash"),
        ((9, 0), torch.bfloat16, 224, "flash"),
        ((9, 0), torch.float32, 8, "efficient"),
        ((9, 0), torch.bfloat16, 128, "cudnn"),
        ((10, 0), torch.float16, 128, "cudnn"),
        ((10, 3), torch.float16, 64, "cudnn"),
        ((10, 0), torch.float16, 136, "flash"),
        ((12, 0), torch.float16, 128, "flash"),
    ],
)
def test_the_choice(gpu, capability, dtype, head_dim, expected):
    """Catches an op that the GPU, the dtype or the head dim does not allow, or a slower one than they do."""
    gpu.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert chosen(dtype=dtype, head_dim=head_dim) == expected


@pytest.mark.parametrize(
    ("facts", "version"),
    [
        ({"num_rows": 1}, 92000),
        ({"num_keys": 1}, 92000),
        # query heads of a token that share a key/value head
        ({"num_rows": 8, "num_keys": 2047}, 92000),
        ({}, 91500),
        ({}, None),
    ],
    ids=str,
)
def test_flash_is_second_where_cudnn_is_first(gpu, request, facts, version):
    """Catches cuDNN for a single row or key, in a version that goes out of bounds, or where torch must be
    deterministic."""
    gpu.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert chosen() == "cudnn"
    gpu.setattr(torch.backends.cudnn, "version", lambda: version)
    assert chosen(**facts) == "flash"
    gpu.setattr(torch.backends.cudnn, "version", lambda: 92000)
    request.addfinalizer(lambda: torch.use_deterministic_algorithms(False))
    torch.use_deterministic_algorithms(True)
    assert chosen() == "flash"


def test_the_choice_by_torchs_own_switches(gpu):
    """Catches switches that are not read: the standard context selects an op here as everywhere, and ends."""
    assert chosen() == "flash"
    for name, backend in SELECT.items():
        with sdpa_kernel(backend):
            assert chosen() == name
    with sdpa_kernel([SELECT["cudnn"], SELECT["efficient"]]):
        assert chosen() == "efficient"
    assert chosen() == "flash"
    gpu.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: False)
    assert chosen() == "efficient"
    gpu.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    for name, backend in SELECT.items():
        if name != "flash":
            with sdpa_kernel(backend):
                assert chosen() == name


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ({"batch": 65535, "head_dim": 32}, "flash"),
        ({"batch": 65536, "head_dim": 32}, "efficient"),
        # 2^31 elements, rows counted to 128s and head dims to 32s
        ({"batch": 1, "num_heads": 32, "num_rows": 2**19}, "flash"),
        ({"batch": 1, "num_heads": 32, "num_rows": 2**19 + 1}, "efficient"),
        ({"batch": 1, "num_heads": 32, "num_rows": 2**19, "head_dim": 136}, "efficient"),
    ],
    ids=str,
)
def test_the_choice_by_size(gpu, sizes, expected):
    """Catches a launch that CUDA's grid refuses, flash's backward where its 32-bit offsets overflow, and a forward that
    keeps to the limit of the backward."""
    assert chosen(**{"head_dim": 128, "is_backward": True, **sizes}) == expected
    forward = "flash" if sizes.get("batch") != 65536 else "efficient"
    assert chosen(**{"head_dim": 128, **sizes}) == forward


@pytest.mark.parametrize("has_dlse", [False, True])
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "num_rows", "batch"),
    [(16, 16, 1_050_624, 1), (16, 2, 1_050_624, 1), (16, 16, 2**20, 1), (16, 16, 2**19, 3)],
)
def test_no_call_of_a_backward_is_too_large(
    gpu, num_heads, num_kv_heads, num_rows, batch, has_dlse
):
    """Catches a long sequence that falls to a slower op, rows that are left out or come twice where a tile is cut, and
    a forward that is cut too."""
    pattern = DilatedPattern((2048, 4096, num_rows), (1, 2, 12))
    job = Job(pattern, make_shards("contiguous", (num_rows,)), num_heads, num_kv_heads)
    plan = plan_exchange("none", job, 0).plan
    most_rows = sdpa.TRAITS.most_rows(128, has_dlse)
    whole, cut = (
        [
            step
            for step in make_program(plan, stage, CallFacts(batch=batch, most_rows=most_rows))
            if isinstance(step, Compute)
        ]
        for stage in ("forward", "backward")
    )
    assert {step.tile.query for step in whole} == {tile.query for tile in plan.local}
    # 2^20 rows of 16 heads of 128 are just as many as may be, without the columns for lse
    assert (len(cut) == len(whole)) == (num_rows == 2**20 and not has_dlse)
    for step in cut:
        rows = step.tile.query
        entries = batch if step.entry is None else 1
        assert (
            chosen(
                batch=rows.segments * entries,
                num_heads=len(rows.heads),
                num_rows=rows.num_rows,
                head_dim=136 if has_dlse else 128,
                is_backward=True,
            )
            == "flash"
        )
    size = [sum(x.tile.pairs * (batch if x.entry is None else 1) for x in y) for y in (whole, cut)]
    assert size[0] == size[1]


def test_other_machines(gpu):
    """Catches cuDNN's op on AMD's GPUs, and flash in a build of torch without it."""
    gpu.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: False)
    assert "not part of this build" in cuda_ops.OPS["flash"].why_not(TILE)
    gpu.setattr(torch.version, "hip", "7.0")
    assert "ROCm" in cuda_ops.OPS["cudnn"].why_not(TILE)


def test_cudnn_is_refused_where_torch_must_be_deterministic(gpu, request):
    """Catches a flag of torch that is set and not honoured."""
    request.addfinalizer(lambda: torch.use_deterministic_algorithms(False))
    torch.use_deterministic_algorithms(True)
    assert "not deterministic" in cuda_ops.OPS["cudnn"].why_not(TILE)
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert cuda_ops.OPS["cudnn"].why_not(TILE) is None


@pytest.fixture
def registry(monkeypatch):
    """Torch's registry of flash implementations, in which both can be activated without being installed."""
    from torch.nn.attention import _registry

    for name in ("FA3", "FA4"):
        handle = SimpleNamespace(remove=lambda: None)
        monkeypatch.setitem(_registry._FLASH_ATTENTION_IMPLS, name, lambda handle=handle: handle)
    yield
    restore_flash_attention_impl(_raise_warn=False)


@pytest.mark.usefixtures("registry")
@pytest.mark.parametrize(
    ("implementation", "capability", "runs_on"),
    [
        ("FA3", (9, 0), None),
        ("FA3", (8, 0), "9.x"),
        ("FA3", (10, 0), "9.x"),
        ("FA4", (9, 0), None),
        ("FA4", (10, 3), None),
        ("FA4", (12, 0), "9.x and 10.x"),
    ],
)
def test_the_active_flash_implementation(gpu, implementation, capability, runs_on):
    """Catches FlashAttention 3 or 4 on a GPU where torch's binding raises, or a description that hides which it is."""
    gpu.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    query = torch.empty(2, 64, 4, 64, dtype=torch.bfloat16, device="meta")
    others = [SELECT["flash"], SELECT["efficient"]]
    with sdpa_kernel(others):
        assert runs(query) == "flash"
    first = runs(query)
    activate_flash_attention_impl(implementation)
    with sdpa_kernel(others):
        assert runs(query) == (f"flash, {implementation}" if runs_on is None else "efficient")
    if first == "cudnn":
        # as with torch's own attention, the implementation changes flash and not the order
        assert runs(query) == "cudnn"
    reason = sdpa.ops(query)[f"flash, {implementation}"]
    if runs_on is not None:
        assert f"is {implementation} now" in reason
        assert (
            f"runs on compute capability {runs_on}, got {capability[0]}.{capability[1]}" in reason
        )
    restore_flash_attention_impl()
    with sdpa_kernel(others):
        assert runs(query) == "flash"


def runs(query):
    """The op that would attend to the tensor."""
    return next(name for name, reason in sdpa.ops(query).items() if reason is None)


class OnCuda:
    """A meta tensor that says it is on a GPU: what `why_not` looks at."""

    def __init__(self, x: Tensor) -> None:
        self.x, self.device = x, torch.device("cuda", 0)

    def __getattr__(self, name):
        return getattr(self.x, name)


def test_the_backend_serves_what_any_op_serves(gpu):
    """Catches a backend that is refused although an op would do, or accepted although none will."""
    query = OnCuda(torch.empty(1, 64, 2, 300, dtype=torch.bfloat16, device="meta"))
    assert sdpa.why_not(query) is None
    assert sdpa.why_not(OnCuda(query.x.double())) == (
        "serves torch.float32, torch.bfloat16, torch.float16, got torch.float64"
    )
    with sdpa_kernel([SELECT["flash"], SELECT["cudnn"]]):
        reason = sdpa.why_not(query)
    assert reason.startswith("has no op for these tensors: ")
    for fragment in (
        "flash takes head dims up to 256, got 300",
        "efficient is switched off",
        "cudnn takes head dims",
    ):
        assert fragment in reason
    gpu.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert (
        "efficient serves torch.bfloat16 from compute capability 8.0 on, got 7.5"
        in sdpa.why_not(query)
    )


def test_whether_a_call_is_refused_does_not_depend_on_its_length(gpu):
    """Catches a rank that refuses by itself, because it owns one position (cuDNN takes two), and lets others wait."""
    with sdpa_kernel(SELECT["cudnn"]):
        for length in (0, 1, 2, 2**28):
            query = torch.empty(2, length, 4, 64, dtype=torch.float16, device="meta")
            assert sdpa.why_not(OnCuda(query)) is None
            assert (sdpa.ops(query)["cudnn"] is None) == (length != 1)


def test_nothing_is_asked_of_torchs_switches_while_tracing(gpu):
    """Catches a graph break: dynamo cannot trace the switches. The op asks them when it runs, and refuses then."""
    query = OnCuda(torch.empty(1, 64, 2, 64, dtype=torch.float16, device="meta"))
    with sdpa_kernel(SDPBackend.MATH):
        assert "switched off" in sdpa.why_not(query)
        gpu.setattr(torch.compiler, "is_compiling", lambda: True)
        assert sdpa.why_not(query) is None


# Shapes, by the meta kernels of the true ops.


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(("name", "dtype"), SERVED, ids=str)
@pytest.mark.parametrize("head_dim", [8, 24, 33, 96, 257])
@pytest.mark.parametrize(
    ("num_rows", "num_keys", "is_causal"), [(33, 33, True), (2, 63, False), (64, 7, False)]
)
def test_shapes_on_meta_tensors(name, dtype, head_dim, num_rows, num_keys, is_causal):
    """Catches arguments that the ops do not take, lse that keeps its padding, and gradients of the wrong shape."""
    if head_dim > cuda_ops.OPS[name].max_head_dim:
        with (
            sdpa_kernel(SELECT[name]),
            pytest.raises(ValueError, match=f"{name} takes head dims up to"),
        ):
            chosen(dtype=dtype, head_dim=head_dim)
        return
    q, k, v = make(dtype, 6, 2, num_rows, num_keys, head_dim, device="meta")
    with sdpa_kernel(SELECT[name]):
        out, lse = sdpa.forward(q, k, v, is_causal, 0.3)
        assert (out.shape, out.dtype) == (q.shape, dtype)
        assert (lse.shape, lse.dtype) == (q.shape[:3], torch.float32)
        for dlse in (None, torch.empty_like(lse)):
            grads = sdpa.backward(
                BackwardRows(torch.empty_like(out), dlse, q, k, v, out, lse), is_causal, 0.3
            )
            assert [(x.shape, x.dtype) for x in grads] == [(x.shape, dtype) for x in (q, k, v)]


# Numbers, by stand-ins that refuse what the ops refuse, or silently get wrong.


def check_inputs(*tensors: Tensor) -> None:
    """What all the ops ask of their inputs: whole numbers of 16 bytes, the last dimension dense, nothing empty."""
    assert len({x.dtype for x in tensors}) == 1
    assert len({x.shape[3] for x in tensors}) == 1
    for x in tensors:
        assert min(x.shape) > 0
        assert x.stride(3) == 1
        assert x.data_ptr() % 16 == 0
        assert all(size * x.element_size() % 16 == 0 for size in (*x.stride()[:3], x.shape[3]))


def compute(q, k, v, is_causal, scale):
    return aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, is_causal, scale=scale)


def differentiate(dout, q, k, v, out, lse, is_causal, scale):
    op = aten._scaled_dot_product_flash_attention_for_cpu_backward
    return op(dout, q, k, v, out, lse, 0.0, is_causal, scale=scale)


def flash(q, k, v, dropout, is_causal, *, scale):
    check_inputs(q, k, v)
    assert dropout == 0
    assert q.dtype != torch.float32
    assert q.shape[3] <= 256
    return *compute(q, k, v, is_causal, scale), *[None] * 7


def flash_backward(
    dout, q, k, v, out, lse, starts_q, starts_k, max_q, max_k, dropout, is_causal, *seeds, scale
):
    check_inputs(dout, q, k, v, out)
    assert dropout == 0
    assert starts_q is starts_k is None
    assert (max_q, max_k) == (q.shape[2], k.shape[2])
    assert (lse.shape, lse.dtype) == (q.shape[:3], torch.float32)
    assert lse.is_contiguous()
    assert len(seeds) == 2
    return differentiate(dout, q, k, v, out, lse, is_causal, scale)


def efficient(q, k, v, bias, compute_lse, dropout, is_causal, *, scale):
    check_inputs(q, k, v)
    assert q.shape[1] == k.shape[1] == v.shape[1]
    assert bias is None
    assert compute_lse
    assert dropout == 0
    out, lse = compute(q, k, v, is_causal, scale)
    return out, pad(lse, (0, -lse.shape[2] % 32), value=torch.nan), None, None


def efficient_backward(
    dout, q, k, v, bias, out, lse, seed, offset, dropout, mask, is_causal, *, scale
):
    check_inputs(dout, q, k, v, out)
    assert q.shape[1] == k.shape[1] == v.shape[1]
    assert lse.shape[2] % 32 == 0
    assert lse.is_contiguous()
    assert (lse[:, :, q.shape[2] :] == torch.inf).all()  # p = exp(s - lse) must be 0 there
    assert mask == [True, True, True, False]
    # kernel_backward.h: o_strideM() is head_dim_value * num_heads, and nothing compares it with the stride of out.
    assert out.transpose(1, 2).is_contiguous()
    return *differentiate(dout, q, k, v, out, lse[:, :, : q.shape[2]], is_causal, scale), None


def cudnn(q, k, v, bias, compute_lse, dropout, is_causal, *, scale):
    check_inputs(q, k, v)
    assert q.dtype != torch.float32
    assert q.shape[3] <= 128
    assert 1 not in (q.shape[2], k.shape[2])
    assert bias is None
    assert compute_lse
    assert dropout == 0
    out, lse = compute(q, k, v, is_causal, scale)
    return out, lse.unsqueeze(-1), *[None] * 7


def cudnn_backward(
    dout,
    q,
    k,
    v,
    out,
    lse,
    seed,
    offset,
    bias,
    starts_q,
    starts_k,
    max_q,
    max_k,
    dropout,
    is_causal,
    *,
    scale,
):
    check_inputs(dout, q, k, v, out)
    assert dout.squeeze().stride() == out.squeeze().stride()
    assert (lse.shape, lse.dtype) == ((*q.shape[:3], 1), torch.float32)
    assert lse.is_contiguous()  # cudnn-frontend#304: others are read wrongly before 9.26
    assert bias is starts_q is starts_k is None
    assert (max_q, max_k) == (q.shape[2], k.shape[2])
    assert seed.dtype == offset.dtype == torch.int64
    assert dropout == 0
    return differentiate(dout, q, k, v, out, lse.squeeze(-1), is_causal, scale)


@pytest.fixture
def stand_ins(gpu):
    ops = [flash, flash_backward, efficient, efficient_backward, cudnn, cudnn_backward]
    names = [op.__name__.replace("_backward", "") for op in ops]
    ends = ["_backward" if op.__name__.endswith("_backward") else "" for op in ops]
    called = []

    def recorded(op):
        return lambda *args, **kwargs: (called.append(op.__name__), op(*args, **kwargs))[1]

    fakes = {
        f"_scaled_dot_product_{n}_attention{e}": recorded(op)
        for n, e, op in zip(names, ends, ops, strict=True)
    }
    gpu.setattr(sdpa, "aten", SimpleNamespace(**fakes))
    gpu.setattr(sdpa, "why_not", lambda query: None)
    return called


@pytest.mark.parametrize(("name", "dtype"), SERVED, ids=str)
@pytest.mark.parametrize("head_dim", [8, 24, 33])
@pytest.mark.parametrize("num_kv_heads", [6, 2, 1])
@pytest.mark.parametrize("has_dlse", [False, True])
def test_numbers_with_stand_ins(stand_ins, name, dtype, head_dim, num_kv_heads, has_dlse):
    """Catches padding that changes the scores, key/value heads that go to the wrong query heads, gradients of shared
    heads that are not summed, and a column for dlse that is lost in the padding."""
    q, k, v = make(dtype, 6, num_kv_heads, 37, 37, head_dim)
    with sdpa_kernel(SELECT[name]):
        out, lse = sdpa.forward(q, k, v, True, 0.3)
        expected = cpu.forward(q, k, v, True, 0.3)
        torch.testing.assert_close((out, lse), expected)
        dout, dlse = torch.randn_like(out), torch.randn_like(lse) if has_dlse else None
        grads = sdpa.backward(BackwardRows(dout, dlse, q, k, v, out, lse), True, 0.3)
    assert stand_ins == [name, f"{name}_backward"]
    expected = cpu.backward(BackwardRows(dout, dlse, q, k, v, out, lse), True, 0.3)
    for x, y in zip(grads, expected, strict=True):
        assert x.shape == y.shape
        # A sum over shared heads in the input's dtype: a few roundings more than the CPU op's.
        assert (x.float() - y.float()).norm() <= 4 * torch.finfo(dtype).eps * y.float().norm()


@pytest.mark.parametrize("name", ["flash", "efficient"])
@pytest.mark.parametrize("size", [1, 9])
def test_a_cache_with_stand_ins(stand_ins, name, size):
    """Catches a token that an op refuses: one row, rows of a buffer that lie elsewhere, query heads as rows."""
    pattern = DilatedPattern((16, 36), (1, 3), is_causal=True)
    inputs = [torch.randn(2, 36, h, 24, dtype=torch.float16) for h in (4, 2, 2)]
    cache = DilatedCache(pattern, 2, 4, 2, 24, dtype=torch.float16, keep=2)
    slices = zip(*(x.split(size, dim=1) for x in inputs), strict=True)
    with sdpa_kernel(SELECT[name]):
        found = [dilated_attention(*rows, pattern, cache=cache, backend="sdpa") for rows in slices]
    assert set(stand_ins) == {name}
    expected = dilated_attention(*inputs, pattern, backend="cpu")
    torch.testing.assert_close(torch.cat(found, dim=1), expected, rtol=0, atol=2e-3)


UNALIGNED = {
    "pointer": lambda x: torch.cat([x.flatten()[:1], x.flatten()])[1:].view(x.shape),
    "row stride": lambda x: torch.cat([x, x[..., :1]], dim=3)[..., :-1],
}


@pytest.mark.parametrize("strides", UNALIGNED)
@pytest.mark.parametrize(("name", "dtype"), SERVED, ids=str)
def test_unaligned_inputs(stand_ins, name, dtype, strides):
    """Catches addresses that are no whole numbers of 16 bytes: on a GPU an error that ends the process."""
    aligned = make(dtype, 4, 4, 37, 37, 16)
    with sdpa_kernel(SELECT[name]):
        out, lse = sdpa.forward(*aligned, True, 0.3)
        rows = BackwardRows(torch.ones_like(out), None, *aligned, out, lse)
        expected = out, lse, *sdpa.backward(rows, True, 0.3)
        q, k, v, dout, also_out = (
            UNALIGNED[strides](x) for x in (*aligned, torch.ones_like(out), out)
        )
        with pytest.raises(AssertionError):
            check_inputs(q)
        rows = BackwardRows(dout, None, q, k, v, also_out, lse)
        found = *sdpa.forward(q, k, v, True, 0.3), *sdpa.backward(rows, True, 0.3)
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=0)


def test_aligned_inputs_stay_views():
    """Catches a copy of every tile: the plan's views of an ordinary tensor are aligned."""
    for x in make(torch.bfloat16, 4, 2, 37, 37, 16):
        assert sdpa._aligned(x) is x
        assert sdpa._aligned(x[:, 1::2, ::3]).data_ptr() == x[:, 1::2, ::3].data_ptr()


def results_of(inputs, pattern, **kwargs):
    out, lse = dilated_attention(*inputs, pattern, return_lse=True, **kwargs)
    return [out, lse, *torch.autograd.grad(out.float().sin().sum() + lse.sum(), inputs)]


@pytest.mark.parametrize(("name", "dtype"), SERVED, ids=str)
def test_whole_calls_with_stand_ins(stand_ins, name, dtype):
    """Catches views of the plan that the wrapping cannot take, branch by branch: out, dout and their strides too."""
    torch.manual_seed(0)
    inputs = [torch.randn(2, 42, h, 24).to(dtype).requires_grad_() for h in (4, 2, 2)]
    pattern = DilatedPattern((8, 42), (1, 2), is_causal=True)
    with sdpa_kernel(SELECT[name]):
        found = results_of(inputs, pattern, backend="sdpa")
    assert set(stand_ins) == {name, f"{name}_backward"}
    for x, y in zip(found, results_of(inputs, pattern, backend="cpu"), strict=True):
        assert (x.float() - y.float()).norm() <= 4 * torch.finfo(dtype).eps * y.float().norm()


def test_tiles_of_one_call_may_take_several_ops(stand_ins):
    """Catches a last segment of one row that is given to cuDNN; where nothing else may run, the error says so."""
    torch.manual_seed(0)
    inputs = [torch.randn(1, 41, 4, 24).half().requires_grad_() for _ in range(3)]
    pattern = DilatedPattern((8, 41), (1, 2), is_causal=True)
    with (
        sdpa_kernel(SELECT["cudnn"]),
        pytest.raises(ValueError, match=r"1 keys.* 24: flash is switched off.*Enable"),
    ):
        dilated_attention(*inputs, pattern, backend="sdpa")
    refuses = cuda_ops.OPS["efficient"]._replace(
        refuses=lambda tile: None if tile.num_keys == 1 else "is for this test only"
    )
    ops = {**cuda_ops.OPS, "efficient": refuses}
    with (
        pytest.MonkeyPatch.context() as patch,
        sdpa_kernel([SELECT["efficient"], SELECT["cudnn"]]),
    ):
        patch.setattr(sdpa, "OPS", ops)
        found = results_of(inputs, pattern, backend="sdpa")
    assert {"efficient", "cudnn", "efficient_backward", "cudnn_backward"} <= set(stand_ins)
    for x, y in zip(found, results_of(inputs, pattern, backend="cpu"), strict=True):
        assert (x.float() - y.float()).norm() <= 4 * torch.finfo(
            torch.float16
        ).eps * y.float().norm()


def test_backward_may_take_another_op(stand_ins):
    """Catches a backward that needs more of forward than out and lse: the switches change between the two."""
    torch.manual_seed(0)
    inputs = [torch.randn(1, 42, 4, 24).half().requires_grad_() for _ in range(3)]
    pattern = DilatedPattern((8, 42), (1, 2))
    with sdpa_kernel(SELECT["cudnn"]):
        out = dilated_attention(*inputs, pattern, backend="sdpa")
    with sdpa_kernel(SELECT["efficient"]):
        found = torch.autograd.grad(out.float().sin().sum(), inputs)
    assert set(stand_ins) == {"cudnn", "efficient_backward"}
    expected = torch.autograd.grad(dilated_attention(*inputs, pattern).float().sin().sum(), inputs)
    for x, y in zip(found, expected, strict=True):
        assert (x.float() - y.float()).norm() <= 4 * torch.finfo(
            torch.float16
        ).eps * y.float().norm()


def test_compiled_calls_choose_when_they_run(stand_ins):
    """Catches an op that is fixed while tracing: a graph outlives the context in which it was made."""
    inputs = [torch.randn(1, 42, 4, 24).half() for _ in range(3)]
    pattern = DilatedPattern((8, 42), (1, 2))
    compiled = torch.compile(
        lambda *tensors: dilated_attention(*tensors, pattern, backend="sdpa") * 2,
        fullgraph=True,
        backend="eager",
    )
    for name in SELECT:
        with sdpa_kernel(SELECT[name]):
            compiled(*inputs)
        assert set(stand_ins) == {name}
        stand_ins.clear()


@pytest.mark.usefixtures("stand_ins", "registry")
def test_explain(gpu):
    """Catches an explanation that does not name the op, or is silent about those that were passed by."""
    inputs = [torch.empty(1, 16, 2, 64, dtype=torch.bfloat16) for _ in range(3)]
    pattern = DilatedPattern((16,), (1,))
    explanation = explain(*inputs, pattern, backend="sdpa")
    assert explanation.kernel == "sdpa (flash)"
    assert explanation.reasons["sdpa"] == "chosen: asked for"
    assert explanation.reasons["sdpa flash"] == "chosen: the first that can serve these tensors"
    assert explanation.reasons["sdpa cudnn"] == "can serve these tensors, but another was chosen"
    assert explanation.reasons["cpu"] == "can serve these tensors, but another was chosen"
    assert "sdpa efficient: can serve" in str(explanation)
    with sdpa_kernel([SELECT["efficient"]]):
        explanation = explain(*inputs, pattern, backend="sdpa")
    assert explanation.kernel == "sdpa (efficient)"
    assert "switched off" in explanation.reasons["sdpa flash"]
    with (
        sdpa_kernel(SDPBackend.MATH),
        pytest.raises(
            ValueError, match="backend='sdpa' has no op for these tensors: flash is switched off"
        ),
    ):
        explain(*inputs, pattern, backend="sdpa")
    gpu.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    activate_flash_attention_impl("FA3")
    assert explain(*inputs, pattern, backend="sdpa").kernel == "sdpa (cudnn)"
    with sdpa_kernel(SELECT["flash"]):
        text = str(explain(*inputs, pattern, backend="sdpa"))
    assert text.startswith("kernel: sdpa (flash, FA3)\n")
    assert not any(
        name.startswith("sdpa ") for name in explain(*inputs, pattern, backend="cpu").reasons
    )


# The true ops.

CASES = (
    Case("dense, causal", DilatedPattern((160,), (1,), is_causal=True), 160, 2, 4, 4, 64),
    Case(
        "causal, grouped queries",
        DilatedPattern((32, 111), (1, 3), is_causal=True),
        111,
        2,
        6,
        2,
        24,
    ),
    Case("strided, not causal", DilatedPattern((48, 130), (2, 5)), 130, 2, 4, 1, 96),
    Case("head dim that is padded", DilatedPattern((30, 96), (1, 2)), 96, 1, 4, 2, 33),
)


@pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a CUDA device: the real ops run nowhere else"
)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("strides", ["contiguous", "slice of packed qkv", *UNALIGNED])
@pytest.mark.parametrize(("name", "dtype"), SERVED, ids=str)
# what drivers of a new machine warn of is not known beforehand
@pytest.mark.filterwarnings("default")
def test_the_ops_on_a_gpu(name, dtype, strides, case):
    """Catches what the stand-ins get wrong about the real ops: out, lse and every gradient, also of lse."""
    inputs, dout, dlse = make_inputs(case, dtype)
    with sdpa_kernel(SELECT[name]):
        if reason := sdpa.why_not(inputs[0].to("cuda", dtype)):
            pytest.skip(reason)
        leaves = [x.to("cuda", dtype) for x in inputs]
        if strides == "slice of packed qkv":
            leaves = [
                torch.cat([x + 1, x, x - 1], dim=2)[:, :, x.shape[2] : 2 * x.shape[2]]
                for x in leaves
            ]
        elif strides in UNALIGNED:
            leaves = [UNALIGNED[strides](x) for x in leaves]
        leaves = [x.detach().requires_grad_() for x in leaves]
        roots = dilated_attention(*leaves, case.pattern, backend="sdpa", return_lse=True)
        grads = torch.autograd.grad(roots, leaves, [dout.to(roots[0]), dlse.to(roots[1])])
    expected = defined(case, inputs, dout, dlse)
    allowed = tolerances(case, dtype, "cuda")
    for quantity, found in zip(QUANTITIES, (*roots, *grads), strict=True):
        error = relative(squares(found, expected[quantity]))
        assert error <= allowed[quantity], f"{quantity}: {error:.1e} > {allowed[quantity]:.1e}"
