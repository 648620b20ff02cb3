"""The Triton kernels in Triton's interpreter, against the definition in float64: value, log-sum-exp, every gradient.

Run by `test_triton.py` in a process of its own, since triton reads TRITON_INTERPRET when it is imported; by hand:

    TRITON_INTERPRET=1 python -m pytest tests/kernels/triton_interpreted.py

Blocks are 16 x 16 here, so that short sequences have several. bfloat16 is not among the types: the interpreter
multiplies it wrongly. All tests but one run with uninitialised memory filled with NaN.
"""

import gc
import itertools
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from helpers import hurry_the_interpreter, relative_error
from torch import Tensor

from benchmarks.measure import allocated
from ring_dilated_attention import DilatedCache, DilatedPattern, dilated_attention, explain, simulate
from ring_dilated_attention.forecast.ledger import attention_memory
from ring_dilated_attention.kernels.traits import TRAITS
from ring_dilated_attention.kernels.triton import all_at_once, fused, in_place, launch, token
from ring_dilated_attention.kernels.triton.blocks import IS_INTERPRETED
from ring_dilated_attention.kernels.triton.strips import bundle_size
from ring_dilated_attention.models import torchscale_attention
from ring_dilated_attention.plan.job import Job
from ring_dilated_attention.plan.planner import make_plan
from ring_dilated_attention.plan.sharding import make_shards
from ring_dilated_attention.plan.sizes import Sizes
from ring_dilated_attention.ranks.call import Call as RankCall
from ring_dilated_attention.reference import dilated_attention_reference, multiplicity

assert IS_INTERPRETED, "set TRITON_INTERPRET=1"
hurry_the_interpreter()

pytestmark = pytest.mark.usefixtures("nan_in_new_memory", "seeded")

# As in test_attention.py: the exact result rounded once is off by eps / 4 in relative L2.
FLOORS = {dtype: torch.finfo(dtype).eps / 4 for dtype in (torch.float32, torch.float16)}
NAMES = ("out", "lse", "dq", "dk", "dv")


class Call:
    """Inputs, what the definition makes of them in float64, and the error that torch's own attention has."""

    def __init__(self, pattern, batch, seq_len, num_heads, num_kv_heads, head_dim, dtype, documents=None, *, gain=1.0):
        self.pattern, self.documents, self.dtype = pattern, documents, dtype
        self.inputs = [
            (torch.randn(batch, seq_len, h, head_dim) * gain).to(dtype) for h in (num_heads, num_kv_heads, num_kv_heads)
        ]
        self.scale = head_dim**-0.5
        count = multiplicity(pattern, seq_len, num_heads, documents)
        self.covered = (count.sum(-1) > 0).T.expand(batch, -1, -1)
        self.dout = torch.randn(batch, seq_len, num_heads, head_dim).to(dtype)
        self.dlse = torch.randn(batch, seq_len, num_heads)
        doubles = [x.double().requires_grad_() for x in self.inputs]
        out, lse = dilated_attention_reference(*doubles, pattern, cu_seqlens=documents)
        grads = torch.autograd.grad([out, lse], doubles, [self.dout.double(), self.dlse.double()])
        self.exact = [out.detach(), lse.detach(), *grads]
        bias = count.double().log().float().masked_fill((count.sum(-1, keepdim=True) == 0), 0)
        self.torchs = self._torchs(bias.expand(batch, -1, -1, -1), num_heads != num_kv_heads)

    def _torchs(self, bias: Tensor, is_grouped: bool) -> list[float]:
        """Relative errors of SDPA under the same mask; lse and the gradient through it are left out."""
        leaves = [x.clone().requires_grad_() for x in self.inputs]
        out = F.scaled_dot_product_attention(
            *(x.transpose(1, 2) for x in leaves), attn_mask=bias.to(self.dtype), enable_gqa=is_grouped
        ).transpose(1, 2)
        out = out * self.covered.unsqueeze(-1)
        doubles = [x.double().requires_grad_() for x in self.inputs]
        exact, _ = dilated_attention_reference(*doubles, self.pattern, cu_seqlens=self.documents)
        grads = torch.autograd.grad(out, leaves, self.dout)
        exact_grads = torch.autograd.grad(exact, doubles, self.dout.double())
        pairs = zip((out, *grads), (exact, *exact_grads), strict=True)
        return [relative_error(x, y) for x, y in pairs]

    def check(self, results) -> None:
        """At most twice torch's error and a floor. Its lse has no gradient, so gradients have a second term here, and
        a floor for it: three roundings to the type, and two of float32 in lse, whose error is the relative one of p."""
        assert (results[0][~self.covered] == 0).all()
        assert torch.equal(results[1] == -torch.inf, ~self.covered)
        assert results[0].dtype == self.dtype
        assert results[1].dtype == torch.float32
        lse, exact_lse = results[1][self.covered], self.exact[1][self.covered]
        # lse is kept in base 2 on the way: one more rounding each way, so four roundings and a log of float32
        torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-6, atol=1e-6)
        others = [(n, x, y) for n, x, y in zip(NAMES, results, self.exact, strict=True) if n != "lse"]
        for (name, x, y), torchs in zip(others, self.torchs, strict=True):
            floor = FLOORS[self.dtype]
            if name != "out":
                floor = 3 * floor + 2 * torch.finfo(torch.float32).eps
            error, allowed = relative_error(x, y), 2 * torchs + floor
            assert error <= allowed, f"{name}: {error:.2e} against {allowed:.2e}"

    def run(self, backend: str, **kwargs) -> list[Tensor]:
        """Through dilated_attention: out, lse, dq, dk, dv."""
        leaves = [x.clone().requires_grad_() for x in self.inputs]
        borders = None if self.documents is None else torch.tensor(self.documents, dtype=torch.int32)
        results = dilated_attention(
            *leaves, self.pattern, backend=backend, return_lse=True, cu_seqlens=borders, **kwargs
        )
        return [*(x.detach() for x in results), *torch.autograd.grad(results, leaves, [self.dout, self.dlse])]


def pattern_of(branches, **rules) -> DilatedPattern:
    return DilatedPattern(*zip(*branches, strict=True), **rules)


# batch, positions, query heads, key/value heads, head dim, branches, rules, borders of documents
CASES = [
    (2, 63, 2, 2, 24, [(16, 1), (50, 3)], {"is_causal": True}, None),
    (1, 47, 4, 2, 48, [(20, 2), (47, 3)], {"phase": "blocked"}, None),
    (1, 40, 6, 1, 96, [(40, 1), (9, 2)], {"is_causal": True}, None),  # six heads share keys; three of a phase
    (1, 35, 4, 2, 16, [(4, 1), (10, 2)], {"is_causal": True, "phase": "blocked"}, (0, 7, 8, 35)),
    (1, 31, 4, 1, 16, [(3, 1), (8, 2), (19, 2)], {"heads": "split"}, None),
    (1, 64, 2, 1, 64, [(32, 1), (64, 2)], {"is_causal": True}, None),  # no strip crosses a border
    (1, 17, 2, 2, 256, [(17, 1)], {"is_causal": True}, None),
]
HALF = [CASES[0], CASES[2], CASES[5]]
BACKENDS = ["triton", "triton-fused"]


def call_of(case, dtype=torch.float32, **kwargs) -> Call:
    *shape, branches, rules, documents = case
    return Call(pattern_of(branches, **rules), *shape, dtype, documents, **kwargs)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_against_the_definition(case, backend):
    """Catches any error of the kernels: ragged rows, odd head dims, shared keys, causality, documents, dlse; in place
    also a state (max, sum, acc) that is not the partial it stands for, or that of an empty one."""
    call = call_of(case)
    call.check(call.run(backend))


def test_all_branches_at_once_by_name():
    """Catches a backend for the least memory that runs tiles after all, or fails where nothing can be fused."""
    pattern = pattern_of([(2, 2), (16, 3), (32, 5)], is_causal=True)
    call = Call(pattern, 1, 32, 2, 2, 16, torch.float32)
    with mock.patch.object(all_at_once, "forward_into", side_effect=AssertionError):
        call.check(call.run("triton-fused"))
    strips_too_wide = Call(pattern_of([(6, 4), (8, 5)], is_causal=True), 1, 24, 2, 2, 16, torch.float32)
    strips_too_wide.check(strips_too_wide.run("triton-fused"))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", HALF, ids=str)
def test_float16(case, backend):
    """Catches a sum or a weight kept in 16 bits."""
    call = call_of((1, *case[1:]), torch.float16)
    call.check(call.run(backend))


def test_the_name_decides(monkeypatch):
    """Catches kernels of the other backend, in forward or in backward."""
    launched = []
    for module, name in (
        (fused.FusedPass, "forward"),
        (fused.FusedPass, "backward"),
        (in_place, "forward_into"),
        (in_place, "key_gradient_into"),
    ):
        original = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *a, f=original, n=name, **k: (launched.append(n), f(*a, **k))[1])
    for backend, expected in (
        ("triton", {"forward_into", "key_gradient_into"}),
        ("triton-fused", {"forward", "backward"}),
    ):
        launched.clear()
        leaves = [torch.randn(1, 40, 2, 16, requires_grad=True) for _ in range(3)]
        dilated_attention(*leaves, pattern_of([(8, 1), (40, 2)]), backend=backend).sum().backward()
        assert set(launched) == expected


@pytest.mark.parametrize("backend", BACKENDS)
def test_compiled_whole(backend):
    """Catches a graph break, and fakes that say something else than what these kernels return."""
    call = call_of((1, 20, 2, 1, 16, [(8, 1), (20, 2)], {"is_causal": True}, None))
    inputs = [x.requires_grad_() for x in call.inputs]

    def run(function):
        results = function(*inputs, call.pattern, backend=backend, return_lse=True)
        return [*results, *torch.autograd.grad(results, inputs, [call.dout, call.dlse])]

    compiled = torch.compile(dilated_attention, fullgraph=True, backend="aot_eager")
    for x, y in zip(run(compiled), run(dilated_attention), strict=True):
        assert torch.equal(x, y)
    text = RankCall(call.pattern, 0.3, backend, "qkv", True, range(2), 2).text
    torch.library.opcheck(torch.ops.ring_dilated_attention.forward.default, (*inputs, None, text))


@pytest.mark.parametrize("branches", [[(8, 1), (16, 2)], [(8, 2), (13, 4)]], ids=["aligned", "misaligned"])
def test_torchscales_attention(branches):
    """Catches a backend that is not handed on, or whose log-sum-exp or its gradient does not serve the gate."""
    pattern = pattern_of(branches, phase="blocked")
    inputs, dout = [torch.randn(1, 29, 4, 16) for _ in range(3)], torch.randn(1, 29, 4, 16)

    def run(backend):
        leaves = [x.clone().requires_grad_() for x in inputs]
        out = torchscale_attention(*leaves, pattern, backend=backend)
        return [out, *torch.autograd.grad(out, leaves, dout)]

    with mock.patch.object(launch, "config_for", side_effect=launch.config_for) as launched:
        results = run("triton")
        assert {"forward", "key_gradient"} <= {call.args[0] for call in launched.mock_calls}
    for x, y in zip(results, run("cpu"), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5)


def test_explain_says_the_rule():
    """Catches a choice that nobody can look up."""
    tensors = [torch.randn(1, 64, 2, 16) for _ in range(3)]
    said = {
        "triton": 'branch by branch; backend="triton-fused"',
        "triton-fused": "all branches at once, with rows 2 apart",
    }
    for backend, rule in said.items():
        reasons = explain(*tensors, pattern_of([(32, 1), (64, 2)], is_causal=True), backend=backend).reasons
        assert reasons[backend] == "chosen: asked for"
        assert reasons["branches"].startswith(rule)


@pytest.fixture
def garbage_stays():
    """The interpreter leaves cycles that hold tensors: none may be freed while a later call is measured."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize(
    ("backend", "dtype"),
    [("triton-fused", torch.float16), ("triton-fused", torch.float32), ("triton", torch.float32)],
    ids=str,
)
def test_memory_is_what_is_planned(backend, dtype, garbage_stays):
    """Catches a copy, a partial or an accumulator that nobody planned: the allocator's peak is the estimate."""
    torch.use_deterministic_algorithms(False)
    case = (1, 64, 2, 1, 64, [(32, 1), (64, 4)], {"is_causal": True}, None)
    call = call_of(case, dtype)
    inputs = [x.requires_grad_() for x in call.inputs]
    plan = make_plan(Job(call.pattern, make_shards("contiguous", (64,)), 2, 1), 0)
    planned = attention_memory(plan, Sizes(1, 64, dtype.itemsize), TRAITS[backend])

    def forward():
        return dilated_attention(*inputs, call.pattern, backend=backend)

    def both():
        out = forward()
        torch.autograd.grad(out, inputs, torch.ones_like(out))

    both()  # what only the first call makes is not the call's
    given = sum(x.nbytes for x in inputs)
    assert given + allocated(forward).peak_bytes == pytest.approx(planned.forward.num_bytes, rel=0.02)
    assert given + allocated(both).peak_bytes == pytest.approx(planned.forward_backward.num_bytes, rel=0.02)


def test_many_merges_round_nothing_away():
    """Catches a log-sum-exp that loses a float32's half unit at each of many merges: the error would grow with them."""
    keys = 512
    q, k, v = (torch.randn(1, n, 1, 16).transpose(1, 2) for n in (4, keys, keys))
    out, lse = torch.zeros(1, 1, 4, 16), torch.full((1, 1, 4), -torch.inf, dtype=torch.float64)
    # One column adds 20 to every score: a large log-sum-exp has a coarse float32.
    q = torch.cat([q[..., :-1], torch.full_like(q[..., :1], 8)], -1)
    k = torch.cat([k[..., :-1], torch.full_like(k[..., :1], 10)], -1)
    scores = (q.double() @ k.double().mT) * 0.25
    for i in range(0, keys, 2):
        in_place.forward_into(q, k[:, :, i : i + 2], v[:, :, i : i + 2], out, lse, False, 0.25, first=i == 0)
    exact = scores.logsumexp(-1)
    assert exact.min() > 20
    torch.testing.assert_close(lse, exact, rtol=0, atol=3e-6)
    torch.testing.assert_close(out.double(), scores.softmax(-1) @ v.double(), rtol=0, atol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_position(backend):
    """Catches a strip of one row. dq and dk come from dlse alone, since dout (v - out) is 0, so errors are absolute."""
    call = call_of((1, 1, 3, 3, 16, [(1, 1), (5, 1)], {}, None))
    for name, x, y in zip(NAMES, call.run(backend), call.exact, strict=True):
        torch.testing.assert_close(x.double(), y, rtol=1e-6, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize(("sharding", "backend"), [("contiguous", "triton"), ("zigzag", "triton-fused")])
def test_hops_of_the_ring(sharding, backend):
    """Catches kernels that need as many keys as queries: a hop has its own number of keys, in a flat buffer."""
    call = call_of((1, 54, 4, 2, 16, [(8, 1), (54, 2)], {"is_causal": True}, None))
    parallel = simulate.all_ranks(3, sharding=sharding)
    call.check(call.run(backend, parallel=parallel))


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")  # exp2 of scores that are then masked
def test_large_scores():
    """Catches exponentials without a maximum subtracted: scores reach 1e4."""
    for backend in BACKENDS:
        call = call_of((1, 40, 2, 2, 16, [(10, 1), (40, 2)], {}, None), gain=60.0)
        results = call.run(backend)
        assert all(x.isfinite().all() for x in results)
        torch.testing.assert_close(results[1].double(), call.exact[1], rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("block_m", [16, 32])
def test_both_sizes_of_the_fused_strip(block_m, monkeypatch):
    """Catches a number of rows that is a constant somewhere."""
    config_for = launch.config_for
    monkeypatch.setattr(launch, "config_for", lambda name, x: config_for(name, x)._replace(block_m=block_m))
    call = call_of(CASES[0])
    out, lse = fused.FusedPass(call.pattern, (0, 63)).forward(call.scale, *call.inputs)
    for i, x in enumerate((out, lse)):
        torch.testing.assert_close(x.double(), call.exact[i], rtol=1e-5, atol=1e-5)


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # numpy, of the NaN it is given
@pytest.mark.parametrize("backend", BACKENDS)
def test_nan_stays_in_its_segment(backend):
    """Catches 0 * NaN in strips that cross a border: a bad row of key, value, query or dout spoils its own."""
    call = Call(pattern_of([(8, 1)], is_causal=True), 1, 24, 2, 2, 16, torch.float32)
    expected = call.run(backend)
    clean = [*call.inputs, call.dout]
    for which, bad in itertools.product(range(4), (torch.nan, torch.inf)):
        *call.inputs, call.dout = (x.clone() for x in clean)
        (*call.inputs, call.dout)[which][0, 12, 1, 3] = bad
        results = call.run(backend)
        inside = torch.zeros(1, 24, 2, dtype=torch.bool)
        inside[:, 8:16, 1] = True
        for x, y in zip(results, expected, strict=True):
            assert torch.equal(x[~inside], y[~inside])
        assert not all(torch.equal(x, y) for x, y in zip(results, expected, strict=True))


@pytest.mark.parametrize("backend", BACKENDS)
def test_bad_uncovered_rows_do_not_come_in(backend):
    """Catches a row that no branch covers, yet whose content is used, or whose result is not (0, -inf) and 0."""
    call = Call(pattern_of([(5, 2), (12, 3)], is_causal=True), 1, 21, 2, 2, 16, torch.float32)
    assert not call.covered.all()
    expected = call.run(backend)
    call.check(expected)
    for x in (*call.inputs, call.dout, call.dlse):
        x[~call.covered] = torch.nan
    for x, y in zip(call.run(backend), expected, strict=True):
        assert torch.equal(x, y)
    assert all((grad[~call.covered] == 0).all() for grad in expected[2:])


@pytest.mark.parametrize("backend", BACKENDS)
def test_offsets_beyond_32_bits(backend):
    """Catches offsets in 32 bits: rows here lie 2**27 elements apart in 7 GB, of which only the rows are touched."""
    torch.use_deterministic_algorithms(False)  # NaN would fill all of it
    seq_len, step = 20, 2**27
    memory = [torch.empty(step * seq_len, dtype=torch.float16) for _ in range(2)]
    far = [x.as_strided((1, seq_len, 2, 16), (0, step, 16, 1)) for x in memory]
    near = [torch.randn(1, seq_len, 2, 16, dtype=torch.float16) for _ in far]
    for x, y in zip(far, near, strict=True):
        x.copy_(y)
    pattern = pattern_of([(20, 1), (7, 2)], is_causal=True)

    def run(q, k):
        leaves = [x.detach().requires_grad_() for x in (q, k, q)]
        out = dilated_attention(*leaves, pattern, backend=backend)
        return [out, *torch.autograd.grad(out, leaves, q)]

    for x, y in zip(run(*far), run(*near), strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_segment_length_beyond_32_bits(backend):
    """Catches a segment length that is kept in 32 bits, or multiplied there: it means the whole of each document."""
    branches = [(8, 1), (2**31, 2), (2**40, 3)]
    call = Call(pattern_of(branches, is_causal=True), 1, 30, 2, 2, 16, torch.float32, (0, 9, 30))
    call.check(call.run(backend))


def test_precision_is_that_of_torchs_products():
    """Catches TF32 that nobody asked for, and a switch of torch's that is not read (all ways to set it are)."""
    assert launch.precision() == "ieee"
    try:
        torch.set_float32_matmul_precision("high")
        assert launch.precision() == "tf32"
        call = call_of(CASES[5])
        call.check(call.run("triton-fused"))  # the interpreter computes it in full
    finally:
        torch.set_float32_matmul_precision("highest")
    assert launch.precision() == "ieee"


def test_the_interpreter_refuses_bfloat16():
    """Catches results of the interpreter's wrong products."""
    assert "torch.bfloat16" in in_place.why_not(torch.zeros(1, 1, 1, 16, dtype=torch.bfloat16))
    assert in_place.why_not(torch.zeros(1, 1, 1, 16)) is None
    assert "up to 256, got 257" in in_place.why_not(torch.zeros(1, 1, 1, 257))


def test_bundles_divide_the_heads():
    """Catches a bundle with heads of another key/value head."""
    assert [bundle_size(ratio, 16) for ratio in (1, 3, 6, 16, 64, 71)] == [1, 3, 6, 16, 16, 1]


def test_a_wrong_result_is_seen():
    """Proof that the comparisons above can fail: one result that is off by a hundred thousandth does not pass."""
    call = call_of(CASES[5])
    right = call.run("triton-fused")
    call.check(right)
    for i, name in enumerate(NAMES):
        wrong = [x * (1 + 1e-5) if i == j else x for j, x in enumerate(right)]
        with pytest.raises(AssertionError, match="not close" if name == "lse" else name):
            call.check(wrong)


# One token with a cache.

# batch, query heads, key/value heads, head dim, branches, rules, limits of the cache
TOKENS = [
    (2, 2, 2, 24, [(40, 1), (64, 3)], {}, {}),
    (1, 6, 1, 16, [(37, 2), (9, 2)], {"phase": "blocked"}, {"keep": 5}),  # rows go around the end of a buffer
    (1, 4, 2, 48, [(30, 1), (64, 2)], {"heads": "split"}, {"max_len": 70}),
    (1, 2, 1, 256, [(40, 1)], {}, {}),
    (1, 4, 4, 16, [(20, 1), (64, 3)], {}, {"heads_held": range(1, 3)}),  # phases 1 and 2 of the wide branch
]


class Tokens:
    """A sequence that is appended to two caches: by Triton's kernels, and by the CPU's."""

    def __init__(self, case, dtype=torch.float32, seq_len=70):
        batch, num_heads, num_kv_heads, head_dim, branches, rules, limits = case
        self.pattern = pattern_of(branches, is_causal=True, **rules)
        self.inputs = [
            torch.randn(batch, seq_len, h, head_dim).to(dtype) for h in (num_heads, num_kv_heads, num_kv_heads)
        ]
        sizes = (batch, num_heads, num_kv_heads, head_dim)
        self.caches = [DilatedCache(self.pattern, *sizes, dtype=dtype, **limits) for _ in range(2)]
        self.exact = dilated_attention_reference(*(x.double() for x in self.inputs), self.pattern)
        self.of, held = {}, limits.get("heads_held")
        if held is not None:
            self.of = {"heads_held": held, "num_heads": num_heads}
            self.inputs, self.exact = (
                [x[:, :, held.start : held.stop] for x in xs] for xs in (self.inputs, self.exact)
            )

    def append(self, start, stop, lengths=None):
        rows = [x[:, start:stop] for x in self.inputs]
        results = [
            dilated_attention(
                *rows, self.pattern, cache=cache, backend=backend, return_lse=True, lengths=lengths, **self.of
            )
            for cache, backend in zip(self.caches, ("triton", "cpu"), strict=True)
        ]
        ours, cpus = self.caches
        assert torch.equal(ours.progress, cpus.progress)
        return results


@pytest.mark.parametrize(
    ("case", "dtype"), [*((case, torch.float32) for case in TOKENS), (TOKENS[1], torch.float16)], ids=str
)
def test_tokens(case, dtype):
    """Catches a row that is missed, read twice, read of another segment, or written elsewhere; a split without rows."""
    tokens = Tokens(case, dtype)
    tolerance = 1e-5 if dtype == torch.float32 else 4e-3
    for start, stop in ((0, 1), (1, 2), (2, 31), (31, 62), (62, 63), (63, 64), (64, 65)):
        (out, lse), _ = tokens.append(start, stop)
        exact_out, exact_lse = (x[:, start:stop] for x in tokens.exact)
        torch.testing.assert_close(out.double(), exact_out, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-5, atol=1e-5 if dtype == torch.float32 else 4e-3)
    ours, cpus = (cache.state_dict()["rows"] for cache in tokens.caches)
    assert all(map(torch.equal, ours, cpus))


def test_more_heads_share_keys_than_a_tile_has_rows(monkeypatch):
    """Catches heads that are left out, and a row that is written by none of a buffer's tiles."""
    monkeypatch.setattr(token, "MOST_HEADS", 4)
    test_tokens((1, 6, 1, 16, [(13, 1), (50, 3)], {}, {}), torch.float32)


def test_tokens_of_some_rows():
    """Catches a row of the batch that is moved on although it appends nothing."""
    tokens = Tokens(TOKENS[0])
    tokens.append(0, 40, torch.tensor([40, 33]))
    for lengths in ([0, 1], [1, 1], [0, 0], [1, 0]):
        (out, lse), (cpu_out, cpu_lse) = tokens.append(40, 41, torch.tensor(lengths))
        torch.testing.assert_close(out, cpu_out)
        torch.testing.assert_close(lse, cpu_lse)
        assert (out[torch.tensor(lengths) == 0] == 0).all()


def test_nobody_waits_for_the_device(monkeypatch):
    """Catches a position that is read on the host: it would wait for the GPU at every token. And a sequence that is
    longer than the cache was made for, which is therefore not refused but marked."""
    tokens = Tokens(TOKENS[2])
    tokens.append(0, 68)
    cache = tokens.caches[0]

    def append(t, num_new=1):
        rows = [x[:, t : t + num_new] for x in tokens.inputs]
        return dilated_attention(*rows, tokens.pattern, cache=cache, backend="triton")

    def refuse(*_):
        raise AssertionError("a number was read on the host")

    for name in ("tolist", "item", "__int__", "__bool__", "__index__"):
        monkeypatch.setattr(torch.Tensor, name, refuse)
    with pytest.raises(AssertionError, match="read on the host"):
        append(68, num_new=2)
    results = [append(68), append(69)]
    memory, progress = cache.memory.clone(), cache.progress.clone()
    results.append(append(69))
    monkeypatch.undo()
    assert [bool(x.isfinite().all()) for x in results] == [True, True, False]
    assert results[2].isnan().all()
    assert torch.equal(cache.memory.nan_to_num(7), memory.nan_to_num(7))  # nor does it lose anything
    assert torch.equal(cache.progress, progress)
