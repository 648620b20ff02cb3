"""The CUDA kernels' wrapping without a GPU: what is chosen and why, shapes on meta tensors, and numbers with stand-ins
for torch's CUDA ops. (On a GPU, `test_cuda.py` compares each op with the definition.)

A stand-in keeps to the op's contract as the schemas, meta kernels and sources of torch 2.13 state it, and computes on
the CPU.
"""

import math
from types import SimpleNamespace

import pytest
import torch
from helpers import poisoned_memory
from torch.nn.attention import (
    SDPBackend,
    activate_flash_attention_impl,
    restore_flash_attention_impl,
    sdpa_kernel,
)
from torch.nn.functional import pad

from ring_dilated_attention import DilatedCache, DilatedPattern, dilated_attention, explain
from ring_dilated_attention.kernels import cuda_ops, sdpa
from ring_dilated_attention.kernels.contract import BackwardRows
from ring_dilated_attention.kernels.cuda_ops import TileFacts
from ring_dilated_attention.plan.exchange import plan_exchange
from ring_dilated_attention.plan.program import make_program
from ring_dilated_attention.plan.sharded_call import ShardedCall
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


# What is chosen, and why not the others.


# A tile that every op takes.
TILE = TileFacts(
    torch.bfloat16,
    (9, 0),
    batch=2,
    num_heads=4,
    num_rows=64,
    num_keys=64,
    head_dim=64,
)


def chosen(**facts):
    capability = torch.cuda.get_device_capability(torch.device("cuda"))
    return sdpa._choose(TILE._replace(capability=capability, **facts))


# 2^31 elements, rows counted to 128s and head dims to 32s
LONG = {"batch": 1, "num_heads": 32, "num_rows": 2**19, "head_dim": 128}


A100, H100 = (8, 0), (9, 0)


@pytest.mark.parametrize(
    ("capability", "facts", "expected"),
    [
        # by compute capability, dtype and head dim
        ((6, 1), {"dtype": torch.float32}, "efficient"),  # Pascal
        (A100, {"dtype": torch.float32}, "efficient"),
        (A100, {"head_dim": 256}, "flash"),
        (A100, {"head_dim": 257}, "efficient"),
        ((8, 6), {"head_dim": 192}, "flash"),
        ((8, 6), {"head_dim": 200}, "efficient"),
        ((8, 9), {"head_dim": 224}, "efficient"),
        (H100, {"head_dim": 224}, "flash"),
        ((12, 0), {"head_dim": 224}, "efficient"),
        ((12, 0), {"head_dim": 225}, "flash"),
        (H100, {"dtype": torch.float32}, "efficient"),
        (H100, {"head_dim": 128}, "cudnn"),
        ((10, 3), {"dtype": torch.float16}, "cudnn"),
        ((10, 0), {"head_dim": 136}, "flash"),
        # cuDNN does not take one row or key, and is slow for a token's query heads that share a key/value head
        (H100, {"num_rows": 1}, "flash"),
        (H100, {"num_keys": 1}, "flash"),
        (H100, {"num_rows": 8, "num_keys": 2047}, "flash"),
        # CUDA's grid, and the 32-bit offsets of flash's backward, which its forward does not have
        (A100, {"batch": 65535}, "flash"),
        (A100, {"batch": 65536}, "efficient"),
        (A100, {**LONG, "is_backward": True}, "flash"),
        (A100, {**LONG, "is_backward": True, "num_rows": 2**19 + 1}, "efficient"),
        (A100, {**LONG, "is_backward": True, "head_dim": 136}, "efficient"),
        (A100, {**LONG, "num_rows": 2**19 + 1}, "flash"),
        (A100, {**LONG, "head_dim": 136}, "flash"),
    ],
    ids=str,
)
def test_the_choice(gpu, capability, facts, expected):
    """Catches an op that machine or tile does not allow, or a slower one than they do."""
    gpu(capability)
    assert chosen(**facts) == expected


@pytest.mark.parametrize(
    ("capability", "lack", "expected"),
    [
        # versions that go out of bounds, none, and builds without an op
        (H100, {"cudnn": 91500}, "flash"),
        (H100, {"cudnn": None}, "flash"),
        (H100, {"hip": "7.0"}, "flash"),
        (A100, {"has_flash": False}, "efficient"),
    ],
    ids=str,
)
def test_the_choice_without_an_op(gpu, capability, lack, expected):
    gpu(capability, **lack)
    assert chosen() == expected


def test_the_choice_by_torchs_own_switches(gpu):
    """Catches switches that are not read: the standard context selects an op here as everywhere, and ends."""
    for name, backend in SELECT.items():
        with sdpa_kernel(backend):
            assert chosen() == name
    with sdpa_kernel([SELECT["cudnn"], SELECT["efficient"]]):
        assert chosen() == "efficient"
    assert chosen() == "flash"
    gpu((9, 0))
    with poisoned_memory():  # which asks torch to be deterministic: cuDNN's op is not
        assert chosen() == "flash"
        torch.use_deterministic_algorithms(True, warn_only=True)
        assert chosen() == "cudnn"


@pytest.mark.parametrize("has_dlse", [False, True])
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "num_rows", "batch"),
    [
        (16, 16, 1_050_624, 1),
        (16, 2, 1_050_624, 1),
        # query heads that share a key, and a batch, that are too large together
        (16, 1, 1_050_624, 1),
        (1, 1, 2**19, 64),
        (16, 16, 2**20, 1),
        (16, 16, 2**19, 3),
    ],
)
def test_no_call_of_a_backward_is_too_large(
    gpu, num_heads, num_kv_heads, num_rows, batch, has_dlse
):
    """Catches a long sequence that falls to a slower op, rows that are left out or come twice where a tile is cut, and
    a forward that is cut too."""
    pattern = DilatedPattern((2048, 4096, num_rows), (1, 2, 12))
    sharded_call = ShardedCall(
        pattern, make_shards("contiguous", (num_rows,)), num_heads, num_kv_heads
    )
    plan = plan_exchange("none", sharded_call, 0).plan
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


@pytest.fixture
def registry(monkeypatch):
    """Torch's registry of flash implementations, in which both can be activated without being installed."""
    from torch.nn.attention import _registry

    for name in ("FA3", "FA4"):
        handle = SimpleNamespace(remove=lambda: None)
        monkeypatch.setitem(_registry._FLASH_ATTENTION_IMPLS, name, lambda handle=handle: handle)
    yield
    restore_flash_attention_impl(_raise_warn=False)


def runs(query):
    """The op that would attend to the tensor."""
    return next(name for name, reason in sdpa.ops(query).items() if reason is None)


@pytest.mark.usefixtures("registry")
@pytest.mark.parametrize(
    ("implementation", "capability", "without_cudnn", "expected"),
    [
        ("FA3", (9, 0), "flash, FA3", "cudnn"),
        ("FA3", (8, 0), "efficient", "efficient"),
        ("FA3", (10, 0), "efficient", "cudnn"),
        ("FA4", (10, 3), "flash, FA4", "cudnn"),
        ("FA4", (12, 0), "efficient", "efficient"),
    ],
)
def test_the_active_flash_implementation(gpu, implementation, capability, without_cudnn, expected):
    """Catches FlashAttention 3 or 4 on a GPU where torch's binding raises, or another order of ops than torch's."""
    gpu(capability)
    query = torch.empty(2, 64, 4, 64, dtype=torch.bfloat16, device="meta")
    others = [SELECT["flash"], SELECT["efficient"]]
    activate_flash_attention_impl(implementation)
    with sdpa_kernel(others):
        assert runs(query) == without_cudnn
    assert runs(query) == expected
    restore_flash_attention_impl()
    with sdpa_kernel(others):
        assert runs(query) == "flash"


class OnCuda:
    """A meta tensor that says it is on a GPU: what `why_not` looks at."""

    def __init__(self, x):
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
    gpu((7, 5))
    assert (
        "efficient serves torch.bfloat16 from compute capability 8.0 on, got 7.5"
        in sdpa.why_not(query)
    )


@pytest.mark.usefixtures("gpu")
def test_whether_a_call_is_refused_does_not_depend_on_its_length():
    """Catches a rank that refuses by itself, because it owns one position (cuDNN takes two), and lets others wait."""
    with sdpa_kernel(SELECT["cudnn"]):
        for length in (0, 1, 2, 2**28):
            query = torch.empty(2, length, 4, 64, dtype=torch.float16, device="meta")
            assert sdpa.why_not(OnCuda(query)) is None
            assert (sdpa.ops(query)["cudnn"] is None) == (length != 1)


@pytest.mark.usefixtures("gpu")
def test_nothing_is_asked_of_torchs_switches_while_tracing(monkeypatch):
    """Catches a graph break: dynamo cannot trace the switches. The op asks them when it runs, and refuses then."""
    query = OnCuda(torch.empty(1, 64, 2, 64, dtype=torch.float16, device="meta"))
    with sdpa_kernel(SDPBackend.MATH):
        assert "switched off" in sdpa.why_not(query)
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
        assert sdpa.why_not(query) is None


# Shapes, by the meta kernels of the true ops.


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(("name", "dtype"), SERVED, ids=str)
@pytest.mark.parametrize("head_dim", [8, 33, 257])
@pytest.mark.parametrize(
    ("num_rows", "num_keys", "is_causal"), [(33, 33, True), (2, 63, False), (64, 7, False)]
)
def test_shapes_on_meta_tensors(name, dtype, head_dim, num_rows, num_keys, is_causal):
    """Catches arguments that the ops do not take, lse that keeps its padding, and gradients of the wrong shape."""
    if head_dim > cuda_ops.OPS[name].max_head_dim:
        pytest.skip("the op does not take it")
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


def check_inputs(*tensors):
    """What all the ops ask of their inputs: whole numbers of 16 bytes, the last dimension dense, nothing empty."""
    assert len({(x.dtype, x.shape[3]) for x in tensors}) == 1
    for x in tensors:
        assert min(x.shape) > 0
        assert x.stride(3) == 1
        assert x.data_ptr() % 16 == 0
        assert all(size * x.element_size() % 16 == 0 for size in (*x.stride()[:3], x.shape[3]))


def compute(name, given):
    """out and lse of an op, from its arguments by the names of its schema."""
    q, k, v = given["query"], given["key"], given["value"]
    check_inputs(q, k, v)
    assert given["dropout_p"] == 0
    assert name == "efficient" or q.dtype != torch.float32
    assert q.shape[3] <= {"flash": 256, "efficient": math.inf, "cudnn": 128}[name]
    if name == "efficient":
        assert q.shape[1] == k.shape[1] == v.shape[1]
    if name == "cudnn":
        assert 1 not in (q.shape[2], k.shape[2])
    if name != "flash":
        assert (given["attn_bias"], given["compute_log_sumexp"]) == (None, True)
    op = aten._scaled_dot_product_flash_attention_for_cpu
    out, lse = op(q, k, v, 0.0, given["is_causal"], scale=given["scale"])
    if name == "efficient":
        lse = pad(lse, (0, -lse.shape[2] % 32), value=torch.nan)
    return out, lse.unsqueeze(-1) if name == "cudnn" else lse, *[None] * 7


def differentiate(name, dout, given):
    """dq, dk and dv of an op, from its arguments by the names of its schema, all but the first."""
    q, k, v, out, lse = [given[x] for x in ("query", "key", "value", "out", "logsumexp")]
    num_rows = q.shape[2]
    check_inputs(dout, q, k, v, out)
    assert given["dropout_p"] == 0
    assert lse.dtype == torch.float32
    assert lse.is_contiguous()  # cudnn-frontend#304: others are read wrongly before 9.26
    if name == "efficient":
        assert q.shape[1] == k.shape[1] == v.shape[1]
        assert lse.shape[2] % 32 == 0
        assert (lse[:, :, num_rows:] == torch.inf).all()  # p = exp(s - lse) must be 0 there
        lse = lse[:, :, :num_rows]
        assert given["grad_input_mask"] == [True, True, True, False]
        # kernel_backward.h: o_strideM() is head_dim_value * num_heads, and nothing compares it with the stride of out.
        assert out.transpose(1, 2).is_contiguous()
    else:
        assert given["cum_seq_q"] is given["cum_seq_k"] is None
        assert (given["max_q"], given["max_k"]) == (num_rows, k.shape[2])
    if name == "cudnn":
        assert dout.squeeze().stride() == out.squeeze().stride()
        assert given["philox_seed"].dtype == given["philox_offset"].dtype == torch.int64
        assert given["attn_bias"] is None
        lse = lse.squeeze(3)
    assert lse.shape == q.shape[:3]
    op = aten._scaled_dot_product_flash_attention_for_cpu_backward
    return op(dout, q, k, v, out, lse, 0.0, given["is_causal"], scale=given["scale"])


@pytest.fixture
def stand_ins(gpu, monkeypatch):
    """The names of the ops that were called, in this order."""
    called, fakes = [], SimpleNamespace()

    def stand_in(name, end):
        op_name = f"_scaled_dot_product_{name}_attention{end}"
        names = [x.name for x in getattr(aten, op_name).default._schema.arguments]

        def op(*args, **kwargs):
            called.append(name + end)
            given = dict(zip(names, args, strict=False)) | kwargs
            return differentiate(name, args[0], given) if end else compute(name, given)

        setattr(fakes, op_name, op)

    for name in SELECT:
        stand_in(name, "")
        stand_in(name, "_backward")
    monkeypatch.setattr(sdpa, "aten", fakes)
    monkeypatch.setattr(sdpa, "why_not", lambda query: None)
    return called


def assert_near(found, expected, dtype):
    """A sum over shared heads in the input's dtype: a few roundings more than the CPU op's."""
    for x, y in zip(found, expected, strict=True):
        assert x.shape == y.shape
        assert (x.float() - y.float()).norm() <= 4 * torch.finfo(dtype).eps * y.float().norm()


def leaves_of(num_positions, num_kv_heads, dtype, head_dim=24):
    torch.manual_seed(0)
    heads = (4, num_kv_heads, num_kv_heads)
    return [torch.randn(2, num_positions, h, head_dim).to(dtype).requires_grad_() for h in heads]


def results_of(inputs, pattern, dout=None, *, through_lse=True, **kwargs):
    out, lse = dilated_attention(*inputs, pattern, return_lse=True, **kwargs)
    roots, douts = [out], [torch.ones_like(out) if dout is None else dout]
    if through_lse:
        roots, douts = [out, lse], [*douts, torch.ones_like(lse)]
    return [out, lse, *torch.autograd.grad(roots, inputs, douts)]


STRIDES = {
    "aligned": lambda x: x,
    # addresses that are no whole numbers of 16 bytes: on a GPU an error that ends the process
    "pointer": lambda x: torch.cat([x.flatten()[:1], x.flatten()])[1:].view(x.shape),
    "row stride": lambda x: torch.cat([x, x[..., :1]], dim=3)[..., :-1],
}


@pytest.mark.parametrize(("name", "dtype"), SERVED, ids=str)
@pytest.mark.parametrize(
    ("head_dim", "num_kv_heads", "through_lse", "strides"),
    [
        (8, 4, False, "aligned"),
        (24, 2, True, "aligned"),
        (33, 1, False, "aligned"),
        (33, 1, True, "aligned"),
        (16, 4, False, "pointer"),
        (16, 4, True, "row stride"),
    ],
)
def test_calls_with_stand_ins(stand_ins, name, dtype, head_dim, num_kv_heads, through_lse, strides):
    """Catches padding that changes the scores, key/value heads that go to the wrong query heads, gradients of shared
    heads that are not summed, a column for dlse that is lost in the padding, unaligned rows, and views of the plan that
    the wrapping cannot take: out, dout and their strides too."""
    pattern, arrange = DilatedPattern((8, 42), (1, 2), is_causal=True), STRIDES[strides]
    leaves = leaves_of(42, num_kv_heads, dtype, head_dim)
    inputs = [arrange(x).detach().requires_grad_() for x in leaves]
    dout = arrange(torch.randn_like(leaves[0]))
    with sdpa_kernel(SELECT[name]):
        found = results_of(inputs, pattern, dout, through_lse=through_lse, backend="sdpa")
    assert set(stand_ins) == {name, f"{name}_backward"}
    expected = results_of(leaves, pattern, dout, through_lse=through_lse, backend="cpu")
    assert_near(found, expected, dtype)


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


def test_aligned_inputs_stay_views():
    """Catches a copy of every tile: the plan's views of an ordinary tensor are aligned."""
    for x in make(torch.bfloat16, 4, 2, 37, 37, 16):
        assert sdpa._aligned([x])[0] is x
        assert sdpa._aligned([x[:, 1::2, ::3]])[0].data_ptr() == x[:, 1::2, ::3].data_ptr()


def test_tiles_of_one_call_may_take_several_ops(stand_ins, monkeypatch):
    """Catches a last segment of one row that is given to cuDNN; where nothing else may run, the error says so."""
    inputs = leaves_of(41, 4, torch.float16)
    pattern = DilatedPattern((8, 41), (1, 2), is_causal=True)
    with (
        sdpa_kernel(SELECT["cudnn"]),
        pytest.raises(ValueError, match=r"1 keys.* 24: flash is switched off.*Enable"),
    ):
        dilated_attention(*inputs, pattern, backend="sdpa")
    of_one_key = cuda_ops.OPS["efficient"]._replace(
        refuses=lambda tile: None if tile.num_keys == 1 else "is for this test only"
    )
    monkeypatch.setattr(sdpa, "OPS", cuda_ops.OPS | {"efficient": of_one_key})
    with sdpa_kernel([SELECT["efficient"], SELECT["cudnn"]]):
        found = results_of(inputs, pattern, backend="sdpa")
    assert {"efficient", "cudnn", "efficient_backward", "cudnn_backward"} <= set(stand_ins)
    assert_near(found, results_of(inputs, pattern, backend="cpu"), torch.float16)


def test_backward_may_take_another_op(stand_ins):
    """Catches a backward that needs more of forward than out and lse: the switches change between the two."""
    inputs, pattern = leaves_of(42, 4, torch.float16), DilatedPattern((8, 42), (1, 2))
    with sdpa_kernel(SELECT["cudnn"]):
        out = dilated_attention(*inputs, pattern, backend="sdpa")
    with sdpa_kernel(SELECT["efficient"]):
        found = torch.autograd.grad(out.float().sin().sum(), inputs)
    assert set(stand_ins) == {"cudnn", "efficient_backward"}
    expected = torch.autograd.grad(dilated_attention(*inputs, pattern).float().sin().sum(), inputs)
    assert_near(found, expected, torch.float16)


def test_compiled_calls_choose_when_they_run(stand_ins):
    """Catches an op that is fixed while tracing: a graph outlives the context in which it was made."""
    inputs, pattern = leaves_of(42, 4, torch.float16), DilatedPattern((8, 42), (1, 2))
    compiled = torch.compile(
        lambda *tensors: dilated_attention(*tensors, pattern, backend="sdpa") * 2,
        fullgraph=True,
        backend="eager",
    )
    for name in SELECT:
        with sdpa_kernel(SELECT[name]), torch.no_grad():
            compiled(*inputs)
        assert set(stand_ins) == {name}
        stand_ins.clear()


@pytest.mark.usefixtures("stand_ins", "registry")
def test_explain(gpu):
    """Catches an explanation that does not name the op, or is silent about those that were passed by."""
    inputs = [torch.empty(1, 16, 2, 64, dtype=torch.bfloat16) for _ in range(3)]

    def explained():
        return explain(*inputs, DilatedPattern((16,), (1,)), backend="sdpa")

    assert explained().kernel == "sdpa (flash)"
    reasons = explained().reasons
    assert reasons["sdpa flash"] == "chosen: the first that can serve these tensors"
    assert reasons["sdpa cudnn"] == "can serve these tensors, but another was chosen"
    gpu((9, 0))
    activate_flash_attention_impl("FA3")
    with sdpa_kernel(SELECT["flash"]):
        assert str(explained()).startswith("kernel: sdpa (flash, FA3)\n")
        assert "switched off" in explained().reasons["sdpa efficient"]
