"""dilated_attention on one device against the definition: value, log-sum-exp, every gradient, and what may not leak.

All tests run with uninitialised memory filled with NaN.
"""

import inspect
import random
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from fuzz_calls import try_call
from fuzz_oracle import STRIDES
from helpers import compare, keys_seen, randn, relative_error
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint

from ring_dilated_attention import (
    DilatedPattern,
    dilated_attention,
    save_attention,
    simulate,
)
from ring_dilated_attention.commands import errors
from ring_dilated_attention.commands.check import CASES
from ring_dilated_attention.commands.errors import Case
from ring_dilated_attention.ranks.call import Call
from ring_dilated_attention.reference import dilated_attention_reference, multiplicity
from ring_dilated_attention.run.merge import merge_

pytestmark = pytest.mark.usefixtures("nan_in_new_memory")


def test_the_poison_works():
    """Proof that the fixture does something: without it, most of these tests would not see uninitialised memory."""
    assert torch.empty(1000).isnan().all()
    assert torch.empty(7, dtype=torch.bfloat16).isnan().all()


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2**32))
def test_any_call_equals_the_definition(seed):
    """Catches what no chosen case thought of: any pattern, length, heads, strides, scale, documents, use of results."""
    trial = try_call(random.Random(seed))
    assert trial.complaint is None, trial


AWKWARD = DilatedPattern((16, 50, 128), (1, 3, 5), is_causal=True)
CAUSAL = DilatedPattern((8, 21), (1, 2), is_causal=True)


@pytest.mark.parametrize(
    ("sizes", "pattern", "scale"),
    [
        # odd lengths, and head dims that are no powers of two
        ((2, 1, 4, 4, 1), AWKWARD, None),
        ((2, 127, 4, 4, 96), AWKWARD, None),
        # several of the kernel's blocks of keys, which are 512 on a CPU
        ((1, 1201, 2, 2, 8), DilatedPattern((600, 1201), (1, 2)), None),
        ((1, 1201, 2, 2, 8), DilatedPattern((600, 1201), (1, 2), is_causal=True), None),
        # a first partial that is adopted with strides whose later views are copies: additions would get lost
        ((3, 24, 4, 4, 8), DilatedPattern((24, 4), (1, 2)), None),
        ((3, 24, 4, 2, 8), DilatedPattern((24, 4, 2), (1, 1, 1), is_causal=True), None),
        ((3, 24, 4, 1, 8), DilatedPattern((24, 4), (1, 2)), None),
        # a mask must not be multiplied by the scale: -inf times 0 is NaN, and times a negative number +inf
        ((2, 21, 2, 2, 8), CAUSAL, -1.5),
        ((2, 21, 2, 2, 8), CAUSAL, 0),
    ],
    ids=str,
)
def test_chosen_calls(sizes, pattern, scale):
    """Catches what random calls seldom have."""
    batch, seq_len, num_heads, num_kv_heads, head_dim = sizes
    heads = (num_heads, num_kv_heads, num_kv_heads)
    compare([randn(batch, seq_len, h, head_dim) for h in heads], pattern, scale=scale)


MORE_STRIDES = [
    lambda x: x.transpose(2, 3).contiguous().transpose(2, 3),
    # strides of 0: in the batch, over heads, over positions, and the gradient of a sum
    lambda x: x[:1].expand_as(x),
    lambda x: x[:, :, :1].expand_as(x),
    lambda x: x[:, :1].expand_as(x),
    lambda x: x[:1, :1, :1, :1].expand_as(x),
]


@pytest.mark.parametrize("arrange", [*STRIDES, *MORE_STRIDES])
@pytest.mark.parametrize("seq_len", [40, 41])
def test_strides(arrange, seq_len):
    """Catches views that are wrong where strides are not those of a contiguous tensor; 41 is no number of segments."""
    *inputs, dout = (arrange(randn(2, seq_len, 4, 8)) for _ in range(4))
    compare(inputs, DilatedPattern((8, 20), (1, 2), is_causal=True), dout=dout)


@pytest.mark.parametrize("heads", ["all", "split"])
def test_uncovered_rows(heads):
    """Catches NaN, and 0 taken for -inf, where no branch covers a query. What comes in there must not get out."""
    pattern = DilatedPattern((9, 20), (3, 4), is_causal=True, heads=heads)
    covered = (multiplicity(pattern, 29, 2).sum(-1) > 0).T.expand(2, 29, 2)
    assert not covered.all()
    *inputs, dout = (randn(2, 29, 2, 8) for _ in range(4))
    dlse = randn(2, 29, 2)
    out, lse, *grads = clean = compare(inputs, pattern, dout=dout, dlse=dlse)
    assert torch.equal(lse == -torch.inf, ~covered)
    assert all((x[~covered] == 0).all() for x in (out, *grads))
    for x in (*inputs, dout, dlse):
        x[~covered] = torch.nan
    leaves = [x.requires_grad_() for x in inputs]
    results = dilated_attention(*leaves, pattern, return_lse=True)
    found = (*results, *torch.autograd.grad(results, leaves, [dout, dlse]))
    assert all(map(torch.equal, found, clean))


def test_large_scores():
    """Catches exponentials without a maximum subtracted, in the kernel or in the merge: scores reach 1e5."""
    inputs = [randn(1, 40, 2, 8) * gain for gain in (300, 300, 1)]
    pattern = DilatedPattern((10, 40), (1, 2))
    out, lse = dilated_attention(*inputs, pattern, return_lse=True)
    assert lse.abs().max() > 1e4
    expected = dilated_attention_reference(*inputs, pattern)
    torch.testing.assert_close((out, lse), expected, rtol=1e-9, atol=1e-9)
    for x in dilated_attention(*(x.float() for x in inputs), pattern, return_lse=True):
        assert x.isfinite().all()


# Learned sinks: one more key of each head, with a score of its own and the value 0.


SINK_PATTERNS = [
    DilatedPattern((8, 31), (1, 2), is_causal=True),
    # queries off the phases see the sink alone
    DilatedPattern((8,), (3,)),
    DilatedPattern((8, 31), (2, 3), heads="split"),
    DilatedPattern.sliding(5, is_causal=True),
]


@pytest.mark.parametrize("pattern", SINK_PATTERNS, ids=str)
def test_sinks(pattern):
    """Those of the definition, also for the sinks; and where a sink is -inf there is none."""
    sinks = torch.tensor([0.3, -torch.inf, 4.0, -20.0], dtype=torch.float64)
    compare([randn(2, 31, h, 8) for h in (4, 2, 2)], pattern, sinks=sinks)


def test_a_sink_that_outweighs_all_keys():
    """Catches an overflow: the sink alone remains, and out is 0."""
    rows, sinks = [torch.randn(2, 31, 2, 8) for _ in range(3)], torch.full((2,), 1e4)
    out, lse = dilated_attention(*rows, SINK_PATTERNS[0], sinks=sinks, return_lse=True)
    assert not out.any()
    assert (lse == 1e4).all()


def test_the_gradient_of_a_sink_of_hardly_any_weight():
    """Catches 1 - weight, of which rounding leaves nothing."""
    rows = [torch.randn(2, 31, 2, 8) for _ in range(3)]
    sinks = torch.full((2,), -18.0).requires_grad_()
    out = dilated_attention(*rows, SINK_PATTERNS[0], sinks=sinks)
    exact, _ = dilated_attention_reference(
        *(x.double() for x in rows), SINK_PATTERNS[0], sinks_H=sinks.double()
    )
    found, expected = (torch.autograd.grad(x.sum(), sinks)[0] for x in (out, exact))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=0)


# Precision below float64.

SHORT_DTYPES = [torch.float32, torch.bfloat16, torch.float16]
PRECISION_CASES = [
    *CASES,
    Case("long rows", DilatedPattern((64, 128, 257), (1, 2, 4), is_causal=True), 257, 1, 4, 4, 96),
    Case("single keys", DilatedPattern((1, 1, 31), (1, 1, 1)), 31, 3, 2, 2, 8),
]


@pytest.mark.parametrize("case", PRECISION_CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("gain", [1, 4])
@pytest.mark.parametrize("dtype", SHORT_DTYPES, ids=str)
def test_precision(dtype, gain, case, monkeypatch):
    """Catches a sum or a weight kept in 16 bits. Against float64 on the rounded inputs, at most twice the error of
    torch's own attention in the same dtype under the same mask, plus the floor: that of an exact result which is
    rounded once. Scores have a standard deviation of gain ** 2. lse is float32, and held to the floor of that."""

    def with_gain(*arguments):
        inputs, dout, dlse = make_inputs(*arguments)
        return [x * gain for x in inputs], dout, dlse

    make_inputs = errors.make_inputs
    monkeypatch.setattr(errors, "make_inputs", with_gain)
    allowed = errors.tolerances.__wrapped__(case, dtype)
    allowed["lse"] += errors.FLOOR[torch.float32] - errors.FLOOR[dtype]
    found = errors.measure(case, dtype, "cpu", "cpu", None, through_lse=False)
    for name, sums in found.items():
        assert errors.relative(sums) <= allowed[name], name


@pytest.mark.parametrize("dtype", SHORT_DTYPES, ids=str)
def test_precision_of_the_gradient_through_lse(dtype):
    """Catches an lse gradient that is lost in rounding. torch has none to compare with; dq of lse is an attention over
    the keys, so that attention with value = key gives the error that the dtype allows."""
    query, key = (torch.randn(2, 111, 4, 48).to(dtype) for _ in range(2))
    pattern = DilatedPattern((32, 111), (1, 2))
    leaf = query.double().requires_grad_()
    _, lse = dilated_attention_reference(leaf, key.double(), key.double(), pattern)
    (exact,) = torch.autograd.grad(lse.sum(), leaf)
    leaf = query.clone().requires_grad_()
    _, lse = dilated_attention(leaf, key, key, pattern, return_lse=True)
    (ours,) = torch.autograd.grad(lse.sum(), leaf)
    bias = multiplicity(pattern, 111, 4).double().log().float()
    weights_times_key = F.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (query, key, key)), attn_mask=bias
    )
    torchs = weights_times_key.transpose(1, 2) * 48**-0.5
    assert relative_error(ours, exact) <= 2 * relative_error(torchs, exact) + errors.FLOOR[dtype]


# What may influence what, from the definition alone.


INFLUENCE_CASES = [
    (23, [0, 23], 4, 4, DilatedPattern((4, 12), (1, 3))),
    (23, [0, 23], 4, 2, DilatedPattern((5, 23), (2, 3), is_causal=True)),
    (24, [0, 7, 8, 24], 6, 2, DilatedPattern((4, 10), (1, 4), is_causal=True, phase="blocked")),
    (19, [0, 19], 5, 1, DilatedPattern((3, 8, 19), (1, 2, 4), heads="split")),
]
WINDOW_CASES = [
    (23, [0, 23], 2, 2, DilatedPattern.sliding(5, is_causal=True)),
    (24, [0, 7, 8, 24], 4, 2, DilatedPattern.sliding(6)),
    (23, [0, 23], 4, 2, DilatedPattern((4, 12), (1, 3), window=7, is_causal=True)),
    (23, [0, 23], 3, 3, DilatedPattern((10,), (2,), window=3)),
    (31, [0, 31], 6, 3, DilatedPattern((8, 16, 31), (1, 2, 5), window=9, is_causal=True)),
]


@pytest.mark.parametrize("case", [*INFLUENCE_CASES, *WINDOW_CASES], ids=str)
def test_a_token_moves_exactly_what_it_should(case):
    """Catches any key that is seen or missed wrongly, by another way than comparing numbers with the reference: every
    key/value row of every head is changed alone, and the outputs that move are those that the definition names."""
    seq_len, borders, num_heads, num_kv_heads, pattern = case
    ratio = num_heads // num_kv_heads
    seen = keys_seen(pattern, borders, num_heads, pattern.is_causal)
    cu_seqlens = torch.tensor(borders, dtype=torch.int32) if len(borders) > 2 else None
    inputs = [randn(1, seq_len, h, 8) for h in (num_heads, num_kv_heads, num_kv_heads)]

    def call(inputs):
        return dilated_attention(*inputs, pattern, cu_seqlens=cu_seqlens, return_lse=True)

    out, lse = call(inputs)
    for g in range(num_kv_heads):
        for t in range(seq_len):
            changed = [x.clone() for x in inputs]
            for x, head in zip(changed, (g * ratio, g, g), strict=True):
                x[0, t, head] += 1
            expected = torch.zeros(seq_len, num_heads, dtype=torch.bool)
            for h in range(g * ratio, (g + 1) * ratio):
                expected[:, h] = torch.tensor([t in keys for keys in seen[h]])
            by_value, _ = call([*inputs[:2], changed[2]])
            assert torch.equal((by_value != out)[0].any(-1), expected)
            _, by_key = call([inputs[0], changed[1], inputs[2]])
            assert torch.equal((by_key != lse)[0], expected)
            _, by_query = call([changed[0], *inputs[1:]])
            moved = [[t, g * ratio]] if seen[g * ratio][t] else []
            assert (by_query != lse)[0].nonzero().tolist() == moved


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("which", [0, 1, 2])
@pytest.mark.parametrize("case", [*INFLUENCE_CASES, *WINDOW_CASES], ids=str)
def test_nan_and_inf_stay_in_their_segments(case, which, bad):
    """Catches 0 * NaN: one bad row of query, key or value may spoil the segments that read it, in its batch entry and
    the query heads that share it, and nothing else, to the bit; the same for gradients. (Within a segment also earlier
    rows: the kernel multiplies masked weights, which are 0, with the values.)"""
    seq_len, borders, num_heads, num_kv_heads, pattern = case
    batch = 1 if len(borders) > 2 else 2
    ratio = num_heads // num_kv_heads
    cu_seqlens = torch.tensor(borders, dtype=torch.int32) if len(borders) > 2 else None
    inputs = [randn(batch, seq_len, h, 8) for h in (num_heads, num_kv_heads, num_kv_heads)]
    dout, dlse = randn(batch, seq_len, num_heads, 8), randn(batch, seq_len, num_heads)
    head = inputs[which].shape[2] - 1
    shared = range(head * ratio, (head + 1) * ratio) if which else [head]
    not_causal = replace(pattern, is_causal=False)
    if pattern.window is not None:  # also the blocks beside its own, which are at most w long
        not_causal = replace(not_causal, window=4 * pattern.window)
    together = multiplicity(not_causal, seq_len, num_heads, borders) > 0
    t = next(t for t in range(seq_len // 2, seq_len) if together[shared[0], t, t])

    spoilt_rows = torch.zeros(batch, seq_len, num_heads, dtype=torch.bool)
    spoilt_keys = torch.zeros(batch, seq_len, num_kv_heads, dtype=torch.bool)
    for h in shared:
        rows = together[h, :, t]
        spoilt_rows[0, :, h] = rows
        spoilt_keys[0, :, h // ratio] |= together[h, rows].any(0)
    assert not spoilt_rows.all()

    def run(tensors):
        leaves = [x.clone().requires_grad_() for x in tensors]
        results = dilated_attention(*leaves, pattern, cu_seqlens=cu_seqlens, return_lse=True)
        return [*results, *torch.autograd.grad(results, leaves, [dout, dlse])]

    clean = run(inputs)
    inputs[which][0, t, head, 3] = bad
    spoilt = run(inputs)
    for x, y, where in zip(spoilt, clean, (*[spoilt_rows] * 3, *[spoilt_keys] * 2), strict=True):
        assert torch.equal(x[~where], y[~where])
    # There was something to stop. (Not always NaN: torch's kernel makes 0 of a row of few NaN scores.)
    assert not torch.equal(spoilt[0][0, t, shared[0]], clean[0][0, t, shared[0]])


# Autograd, autocast, repeatability.


@pytest.mark.parametrize("outputs", [[0], [1], [0, 1]])
def test_a_second_derivative_is_refused(outputs):
    """Catches a silent zero (or a crash in another library) where somebody differentiates twice."""
    inputs = [randn(1, 6, 2, 4).requires_grad_() for _ in range(3)]
    results = dilated_attention(*inputs, DilatedPattern((3,), (1,)), return_lse=True)
    loss = sum(results[i].square().sum() for i in outputs)
    (grad,) = torch.autograd.grad(loss, inputs[0], create_graph=True)
    with pytest.raises(NotImplementedError, match=r"no second derivative.*without create_graph"):
        torch.autograd.grad(grad.square().sum(), inputs[1])


def test_run_to_run_equal_to_the_bit(request):
    """Catches results that depend on the order in which threads finish, or on their number."""
    before = torch.get_num_threads()
    request.addfinalizer(lambda: torch.set_num_threads(before))
    pattern = DilatedPattern((50, 211), (1, 2), is_causal=True)
    inputs = [torch.randn(2, 211, 6, 24, requires_grad=True) for _ in range(3)]
    runs = []
    for num_threads in (1, 2, 2):
        torch.set_num_threads(num_threads)
        results = dilated_attention(*inputs, pattern, return_lse=True)
        runs.append([*results, *torch.autograd.grad([x.sin().sum() for x in results], inputs)])
    for other in runs[1:]:
        assert all(map(torch.equal, runs[0], other))


def test_without_gradients():
    """Catches a graph that is kept, or a different result, under no_grad and inference_mode."""
    pattern = DilatedPattern((3, 8), (1, 2))
    inputs = [randn(2, 8, 2, 4).requires_grad_() for _ in range(3)]
    expected = dilated_attention(*inputs, pattern)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            out = dilated_attention(*inputs, pattern)
        assert not out.requires_grad
        assert torch.equal(out, expected)


def test_attention_that_is_kept_on_the_host():
    """Catches advice on `save_on_cpu` (docs/fairscale.md) at which torch warns, or which changes gradients."""
    more = {}
    if "respect_saved_tensors_hooks" in inspect.signature(checkpoint).parameters:
        more["respect_saved_tensors_hooks"] = True  # of torch 2.14 and newer
    x = torch.randn(1, 20, 2, 8, requires_grad=True)

    def block(x):
        return dilated_attention(x.sin(), x, x, DilatedPattern((4, 20), (1, 2))).square()

    with torch.autograd.graph.save_on_cpu():
        out = checkpoint(block, x, use_reentrant=False, context_fn=save_attention, **more)
    found, expected = (torch.autograd.grad(y.sum(), x)[0] for y in (out, block(x)))
    assert torch.equal(found, expected)


def test_the_compiler_does_not_look_into_an_op():
    """Catches dynamo following the op's own Python, where it gave up the frame that calls it. It would warn of what it
    finds there, and a warning is an error here."""
    text = Call(DilatedPattern((4,), (1,)), 0.3, "auto", "", False, range(2), 2).text

    def call(x):
        try:
            torch._dynamo.graph_break()
            return torch.ops.ring_dilated_attention.forward(x, x, x, None, text)[0]
        finally:
            pass

    x = randn(1, 8, 2, 4)
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(call, backend="eager")(x), call(x), rtol=0, atol=0)


# merge.py: (out, lse) is a commutative monoid.


def merged(*partials):
    """The merge of partials from left to right. Merging is in place, so that the first is copied."""
    out, lse = (x.clone() for x in partials[0])
    for partial in partials[1:]:
        merge_(out, lse, *partial)
    return out, lse


IDENTITY = (
    torch.zeros(2, 5, 3, dtype=torch.float64),
    torch.full((2, 5), -torch.inf, dtype=torch.float64),
)


@st.composite
def partials(draw):
    """Some rows are empty: (0, -inf)."""
    torch.manual_seed(draw(st.integers(0, 2**16)))
    lse = randn(2, 5) * draw(st.sampled_from([1, 30, 1000]))
    empty = torch.rand(2, 5) < draw(st.sampled_from([0, 0.5, 1]))
    return randn(2, 5, 3).masked_fill(empty.unsqueeze(-1), 0), lse.masked_fill(empty, -torch.inf)


@settings(max_examples=100, deadline=None)
@given(partials(), partials(), partials())
def test_merge_is_a_commutative_monoid(a, b, c):
    """Catches NaN from (-inf) - (-inf), a bias towards one side, and overflow where the lse are far apart."""

    def assert_equal(x, y):
        assert not x[0].isnan().any()
        assert not x[1].isnan().any()
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)

    assert_equal(merged(a, b), merged(b, a))
    assert_equal(merged(merged(a, b), c), merged(a, merged(b, c)))
    for x in (a, b, c):
        for y in (merged(IDENTITY, x), merged(x, IDENTITY)):
            assert torch.equal(y[0], x[0])
            assert torch.equal(y[1], x[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_an_empty_partial_changes_nothing(dtype):
    """Catches NaN from (-inf) - (-inf) where neither has keys, and out that a partial without weight moves."""
    out, lse = torch.randn(4, 3), torch.tensor([-torch.inf, 0.0, 500.0, -500.0])
    out[0] = 0
    before = out.clone(), lse.clone()
    merge_(out, lse, torch.ones(4, 3, dtype=dtype), torch.full((4,), -torch.inf))
    assert torch.equal(out, before[0])
    assert torch.equal(lse, before[1])


@pytest.mark.parametrize("scale", [1e-46, -1e-46, 1e-39, 2.0**-126, 0.0])
def test_scales_that_float32_takes_for_nothing(scale):
    """Catches 0 times -inf at masked scores: NaN in every causal call."""
    inputs = [torch.randn(1, 8, 2, 8) for _ in range(3)]
    compare(inputs, DilatedPattern((8,), (1,), is_causal=True), scale=scale, tolerance=1e-6)


@pytest.mark.parametrize("world_size", [None, 2])
def test_a_tiny_scale_of_float16(world_size):
    """Catches a gradient of the queries that is rounded before it is multiplied by the scale: infinite, or NaN."""
    parallel = simulate.all_ranks(world_size) if world_size else None
    leaves = [torch.randn(1, 12, 2, 8).half().requires_grad_() for _ in range(3)]
    _, lse = dilated_attention(
        *leaves, DilatedPattern((12,), (1,)), scale=1e-40, return_lse=True, parallel=parallel
    )
    dq, _, _ = torch.autograd.grad(lse, leaves, torch.full_like(lse, 1e6), materialize_grads=True)
    assert torch.equal(dq, torch.zeros_like(dq))  # at most 1e6 * 1e-40
