"""The Triton kernels in Triton's interpreter, against the definition in float64: value, log-sum-exp, every gradient.

Run by `test_triton.py` in a process of its own, since triton reads TRITON_INTERPRET when it is imported; by hand:

    TRITON_INTERPRET=1 python -m pytest tests/triton_interpreted.py

Blocks are 16 x 16 here, so that short sequences have several. bfloat16 is not among the types: the interpreter's
products of it are wrong. All tests but one run with uninitialised memory filled with NaN.
"""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ring_dilated_attention import ContextParallel, DilatedPattern, dilated_attention, kernels
from ring_dilated_attention.kernels.triton import fused, partial
from ring_dilated_attention.kernels.triton.blocks import IS_INTERPRETED
from ring_dilated_attention.kernels.triton.config import PRECISIONS
from ring_dilated_attention.kernels.triton.launch import pack_of
from ring_dilated_attention.planner import make_plan
from ring_dilated_attention.reference import dilated_attention_reference, multiplicity
from ring_dilated_attention.sharding import make_shards
from ring_dilated_attention.tiles import rows_view

assert IS_INTERPRETED, "set TRITON_INTERPRET=1"

# As in test_attention.py: the exact result rounded once is off by eps / 4 in relative L2.
FLOORS = {dtype: torch.finfo(dtype).eps / 4 for dtype in (torch.float32, torch.float16)}
NAMES = ("out", "lse", "dq", "dk", "dv")


@pytest.fixture(autouse=True)
def _poisoned_memory():
    """torch.empty gives NaN: whatever is read before it is written shows."""
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True)
def _registered(monkeypatch):
    monkeypatch.setitem(kernels.BACKENDS, "triton", partial)


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

    def by_plan(self, **kwargs) -> list[Tensor]:
        """Through dilated_attention: views, partials, merges."""
        leaves = [x.clone().requires_grad_() for x in self.inputs]
        borders = None if self.documents is None else torch.tensor(self.documents, dtype=torch.int32)
        results = dilated_attention(
            *leaves, self.pattern, backend="triton", return_lse=True, cu_seqlens=borders, **kwargs
        )
        return [*(x.detach() for x in results), *torch.autograd.grad(results, leaves, [self.dout, self.dlse])]

    def fused(self, **kwargs) -> list[Tensor]:
        """All branches at once."""
        call = (self.pattern, tuple(self.documents or (0, self.inputs[0].shape[1])), self.scale)
        out, lse = fused.forward(*call, *self.inputs, **kwargs)
        return [out, lse, *fused.backward(*call, self.dout, self.dlse, *self.inputs, out, lse)]

    def in_place(self) -> list[Tensor]:
        """Tile by tile into accumulators in float32, without partials."""
        query, key, value = self.inputs
        num_heads, num_kv_heads = query.shape[2], key.shape[2]
        plan = make_plan(self.pattern, make_shards("contiguous", (query.shape[1],)), 0, num_heads, num_kv_heads)
        out, lse = torch.zeros(query.shape), torch.full(query.shape[:3], -torch.inf)
        dq, dk, dv = (torch.zeros(x.shape) for x in self.inputs)
        assert query.shape[0] == 1
        for tile in plan.local:
            q, o = rows_view(query, tile.query), rows_view(out, tile.query)
            k, v = rows_view(key, tile.key), rows_view(value, tile.key)
            rows = rows_view(lse.unsqueeze(-1), tile.query).squeeze(-1)
            partial.forward_into(q, k, v, o, rows, tile.is_causal, self.scale, first=tile.first_query)
        delta = partial.delta(
            self.dout.transpose(1, 2), self.dlse.transpose(1, 2), out.to(self.dtype).transpose(1, 2)
        ).transpose(1, 2)
        lse_BNH, delta_BNH = lse.contiguous(), delta.contiguous()
        for tile in plan.local:
            q, do, q_grad = (rows_view(x, tile.query) for x in (query, self.dout, dq))
            k, v, k_grad, v_grad = (rows_view(x, tile.key) for x in (key, value, dk, dv))
            d, rows = (rows_view(x.unsqueeze(-1), tile.query).squeeze(-1) for x in (delta_BNH, lse_BNH))
            partial.backward_into(
                *(do, d, q, k, v, rows, q_grad, k_grad, v_grad, tile.is_causal, self.scale),
                first_query=tile.first_query,
                first_key=tile.first_key,
            )
        return [out.to(self.dtype), lse, *(x.to(self.dtype) for x in (dq, dk, dv))]


def relative_error(x: Tensor, exact: Tensor) -> float:
    return ((x.double() - exact).norm() / exact.norm()).item()


def pattern_of(branches, **rules) -> DilatedPattern:
    return DilatedPattern(*zip(*branches, strict=True), **rules)


# batch, positions, query heads, key/value heads, head dim, branches, rules, borders of documents
CASES = [
    (2, 63, 2, 2, 24, [(16, 1), (50, 3)], {"is_causal": True}, None),
    (1, 47, 4, 2, 48, [(20, 2), (47, 3)], {"phase": "blocked"}, None),
    (1, 40, 6, 1, 96, [(40, 1), (9, 2)], {"is_causal": True}, None),  # six heads share keys; three of a phase
    (1, 35, 4, 2, 16, [(4, 1), (10, 2)], {"is_causal": True, "phase": "blocked"}, (0, 7, 8, 35)),
    (1, 31, 4, 1, 16, [(3, 1), (8, 2), (19, 2)], {"heads": "split"}, None),
    (1, 64, 2, 1, 64, [(32, 1), (64, 2)], {"is_causal": True}, None),  # no tile crosses a border
    (1, 17, 2, 2, 256, [(17, 1)], {"is_causal": True}, None),
]
HALF = [CASES[0], CASES[2], CASES[5]]


def call_of(case, dtype=torch.float32, **kwargs) -> Call:
    *shape, branches, rules, documents = case
    return Call(pattern_of(branches, **rules), *shape, dtype, documents, **kwargs)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_plan_with_these_kernels(case):
    """Catches any error of the kernels over strided views: ragged rows, odd head dims, shared keys, causality, dlse."""
    call = call_of(case)
    call.check(call.by_plan())


@pytest.mark.parametrize("case", CASES, ids=str)
def test_all_branches_at_once(case):
    """Catches an error of the fused kernels: phases, segments, documents and heads that a tile meets."""
    call = call_of(case)
    call.check(call.fused())


@pytest.mark.parametrize("way", ["by_plan", "fused", "in_place"])
@pytest.mark.parametrize("case", HALF, ids=str)
def test_float16(case, way):
    """Catches a sum or a weight kept in 16 bits."""
    call = call_of((1, *case[1:]), torch.float16)
    call.check(getattr(call, way)())


@pytest.mark.parametrize("case", [(1, *case[1:]) for case in CASES if case[-1] is None], ids=str)
def test_in_place(case):
    """Catches a state (max, sum, acc) = (lse, 1, out) that is not the partial it stands for, also an empty one."""
    call = call_of(case)
    call.check(call.in_place())


@pytest.mark.parametrize("way", ["by_plan", "fused", "in_place"])
def test_one_position(way):
    """Catches a tile of one row. dq and dk come from dlse alone, since dout (v - out) is 0, so errors are absolute."""
    call = call_of((1, 1, 3, 3, 16, [(1, 1), (5, 1)], {}, None))
    for name, x, y in zip(NAMES, getattr(call, way)(), call.exact, strict=True):
        torch.testing.assert_close(x.double(), y, rtol=1e-6, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("sharding", ["contiguous", "zigzag"])
def test_hops_of_the_ring(sharding):
    """Catches kernels that need as many keys as queries: a hop has its own number of keys, in a flat buffer."""
    call = call_of((1, 60, 4, 2, 16, [(8, 1), (60, 2)], {"is_causal": True}, None))
    parallel = ContextParallel(exchange="simulated", world_size=3, sharding=sharding)
    call.check(call.by_plan(parallel=parallel))


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")  # exp2 of scores that are then masked
def test_large_scores():
    """Catches exponentials without a maximum subtracted: scores reach 1e4."""
    for way in ("by_plan", "fused"):
        call = call_of((1, 40, 2, 2, 16, [(10, 1), (40, 2)], {}, None), gain=60.0)
        results = getattr(call, way)()
        assert all(x.isfinite().all() for x in results)
        torch.testing.assert_close(results[1].double(), call.exact[1], rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("block_m", [16, 32])
def test_both_sizes_of_the_fused_tile(block_m, monkeypatch):
    """Catches a number of rows that is a constant somewhere."""
    sizes = tuple(c._replace(block_m=m) for c in fused.blocks_for(torch.zeros(1, 1, 1, 16)) for m in (16, 32))
    monkeypatch.setattr(fused, "blocks_for", lambda query: sizes)
    call = call_of(CASES[0])
    call.check(call.fused(block_m=block_m))


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # numpy, of the NaN it is given
def test_nan_stays_in_its_segment():
    """Catches 0 * NaN in tiles that cross a border: a bad row of key, value, query or dout spoils its segment alone."""
    pattern = pattern_of([(8, 1)], is_causal=True)
    clean = Call(pattern, 1, 40, 2, 2, 16, torch.float32)
    expected = clean.fused()
    for which, bad in itertools.product(range(4), (torch.nan, torch.inf)):
        inputs, dout = [x.clone() for x in clean.inputs], clean.dout.clone()
        (*inputs, dout)[which][0, 12, 1, 3] = bad
        call = (pattern, (0, 40), clean.scale)
        out, lse = fused.forward(*call, *inputs)
        results = [out, lse, *fused.backward(*call, dout, clean.dlse, *inputs, out, lse)]
        inside = torch.zeros(1, 40, 2, dtype=torch.bool)
        inside[:, 8:16, 1] = True
        for x, y in zip(results, expected, strict=True):
            assert torch.equal(x[~inside], y[~inside])
        assert not all(torch.equal(x, y) for x, y in zip(results, expected, strict=True))


def test_bad_uncovered_rows_do_not_come_in():
    """Catches a row that no branch covers, yet whose content is used, or whose result is not (0, -inf) and 0."""
    call = Call(pattern_of([(5, 2), (12, 3)], is_causal=True), 1, 21, 2, 2, 16, torch.float32)
    assert not call.covered.all()
    expected = call.fused()
    call.check(expected)
    for x in (*call.inputs, call.dout, call.dlse):
        x[~call.covered] = torch.nan
    for x, y in zip(call.fused(), expected, strict=True):
        assert torch.equal(x, y)
    assert all((grad[~call.covered] == 0).all() for grad in expected[2:])


def test_offsets_beyond_32_bits():
    """Catches offsets in 32 bits: rows here lie 2**27 elements apart in 7 GB, of which only the rows are touched."""
    torch.use_deterministic_algorithms(False)  # NaN would fill all of it
    seq_len, step = 20, 2**27
    memory = [torch.empty(step * seq_len, dtype=torch.float16) for _ in range(2)]
    far = [x.as_strided((1, seq_len, 2, 16), (0, step, 16, 1)) for x in memory]
    near = [torch.randn(1, seq_len, 2, 16, dtype=torch.float16) for _ in far]
    for x, y in zip(far, near, strict=True):
        x.copy_(y)
    pattern, scale = pattern_of([(20, 1), (7, 2)], is_causal=True), 0.25

    def run(q, k):
        out, lse = fused.forward(pattern, (0, seq_len), scale, q, k, q)
        grads = fused.backward(pattern, (0, seq_len), scale, q, None, q, k, q, out, lse)
        views = [x.transpose(1, 2) for x in (q, k)]
        o, rows = partial.forward(*views, views[0], True, scale)
        return [out, lse, *grads, o, rows, *partial.backward(views[0], None, *views, views[0], o, rows, True, scale)]

    for x, y in zip(run(*far), run(*near), strict=True):
        assert torch.equal(x, y)


def test_precision_is_asked_for_by_name():
    """Catches an argument that is accepted and ignored (the interpreter computes tf32 in full)."""
    call = call_of(CASES[5])
    q, k, v = (x.transpose(1, 2) for x in call.inputs)
    for name in PRECISIONS:
        assert torch.equal(
            partial.forward(q, k, v, False, 1.0, input_precision=name)[0], partial.forward(q, k, v, False, 1.0)[0]
        )
    with pytest.raises(ValueError, match=r"input_precision='bf16x9' is unknown; choose one of \('ieee', 'tf32'\)"):
        partial.forward(q, k, v, False, 1.0, input_precision="bf16x9")


def test_the_interpreter_refuses_bfloat16():
    """Catches results of the interpreter's wrong products."""
    assert "torch.bfloat16" in partial.why_not(torch.zeros(1, 1, 1, 16, dtype=torch.bfloat16))
    assert partial.why_not(torch.zeros(1, 1, 1, 16)) is None
    assert "up to 256, got 257" in partial.why_not(torch.zeros(1, 1, 1, 257))


def test_packs_divide_the_heads():
    """Catches a pack with heads of another key/value head."""
    assert [pack_of(ratio, 16) for ratio in (1, 3, 6, 16, 64, 71)] == [1, 3, 6, 16, 16, 1]


def test_a_wrong_result_is_seen():
    """Proof that the comparisons above can fail: one result that is off by a hundred thousandth does not pass."""
    call = call_of(CASES[5])
    right = call.fused()
    call.check(right)
    for i, name in enumerate(NAMES):
        wrong = [x * (1 + 1e-5) if i == j else x for j, x in enumerate(right)]
        with pytest.raises(AssertionError, match="not close" if name == "lse" else name):
            call.check(wrong)
