"""Calls with a cache against the definition: whatever way a sequence is appended, its rows are those of one call.

All tests run with uninitialised memory filled with NaN.
"""

import io
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from drawn import patterns
from helpers import PLAIN, keys_seen, randn, relative_error
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._dynamo.testing import CompileCounterWithBackend
from torch._inductor import config as inductor_config

from benchmarks.measure import allocated
from ring_dilated_attention import ContextParallel, DilatedCache, DilatedPattern, dilated_attention
from ring_dilated_attention.kernels import cpu
from ring_dilated_attention.ranks.call import Call
from ring_dilated_attention.reference import dilated_attention_reference, multiplicity
from ring_dilated_attention.run import dilated_cache as cache_module

pytestmark = pytest.mark.usefixtures("nan_in_new_memory")
PATTERN = DilatedPattern((4, 12), (1, 3), is_causal=True)


def make(pattern, batch, num_heads, num_kv_heads, head_dim, dtype=torch.float64, **limits):
    return DilatedCache(pattern, batch, num_heads, num_kv_heads, head_dim, dtype=dtype, **limits)


class Sequence:
    """Inputs of whole sequences, what the definition makes of them, and calls with parts of them."""

    def __init__(
        self,
        pattern=PATTERN,
        batch=1,
        seq_len=40,
        num_heads=2,
        num_kv_heads=2,
        head_dim=4,
        scale=None,
    ):
        self.pattern, self.scale, self.sizes = (
            pattern,
            scale,
            (batch, num_heads, num_kv_heads, head_dim),
        )
        self.inputs = [
            randn(batch, seq_len, h, head_dim) for h in (num_heads, num_kv_heads, num_kv_heads)
        ]
        self.exact = dilated_attention_reference(*self.inputs, pattern, scale=scale)

    def cache(self, **limits):
        return make(self.pattern, *self.sizes, **limits)

    def append(self, cache, start, stop):
        """The call with rows start..stop-1, compared."""
        rows = (x[:, start:stop] for x in self.inputs)
        found = dilated_attention(
            *rows, self.pattern, cache=cache, scale=self.scale, return_lse=True
        )
        self.check(found, slice(None), start, stop)

    def check(self, found, entries, start, stop):
        for x, y in zip(found, self.exact, strict=True):
            # float64 rounds at 2e-16; sums have below 1,000 terms
            torch.testing.assert_close(x, y[entries, start:stop], rtol=1e-11, atol=1e-11)


@st.composite
def sequences(draw):
    num_kv_heads = draw(st.integers(1, 3))
    num_heads = num_kv_heads * draw(st.integers(1, 3))
    pattern = draw(patterns(num_heads, longest=30, is_causal=True))
    torch.manual_seed(draw(st.integers(0, 2**16)))
    sizes = (
        draw(st.integers(1, 2)),
        draw(st.integers(1, 60)),
        num_heads,
        num_kv_heads,
        draw(st.sampled_from([1, 3, 8])),
    )
    return Sequence(pattern, *sizes, scale=draw(st.sampled_from([None, None, 0.3, 0.0, -0.7])))


@settings(max_examples=150, deadline=None)
@given(sequences(), st.data())
def test_any_way_of_appending_equals_one_call(sequence, data):
    """Catches what no chosen case thought of: any pattern, heads, scale; tokens and slices of any length, positions
    taken back as far as the cache allows, and a cache that is saved, loaded into one of other limits, or forked."""
    seq_len, batch = sequence.inputs[0].shape[1], sequence.sizes[0]
    limits = {"max_len": data.draw(st.sampled_from([None, seq_len, seq_len + 5]))}
    cache = sequence.cache(**limits, keep=data.draw(st.sampled_from([0, 0, 1, 3, 20])))
    position = 0
    while position < seq_len:
        stop = min(seq_len, position + data.draw(st.sampled_from([1, 1, 1, 2, 5, 17, 40])))
        sequence.append(cache, position, stop)
        position = stop
        assert cache.position.tolist() == [position] * batch
        then = data.draw(st.sampled_from(["go on"] * 6 + ["crop", "crop", "load", "fork"]))
        if then == "crop":
            furthest = position - int(cache.progress[1].max())
            assert furthest >= min(position, cache.plan.keep) or cache.progress[
                1
            ].max() > cache.plan.floor(position)
            back = data.draw(st.integers(0, furthest))
            cache.crop(back)
            position -= back
        elif then == "load":
            state = cache.state_dict()
            cache = sequence.cache(
                **limits, keep=data.draw(st.sampled_from([0, cache.plan.keep, 30]))
            )
            cache.load_state_dict(state)
        elif then == "fork":
            cache = cache.fork(range(batch))


def test_within_open_segments_everything_can_be_taken_back():
    """Catches a refusal where no row was dropped, and none where one was: w = 12 is open from 48 on, w = 4 from 56."""
    sequence = Sequence(seq_len=60)
    cache = sequence.cache()
    sequence.append(cache, 0, 59)
    with pytest.raises(
        ValueError, match=r"crop\(4\).* back to 55,.*take back 3 or fewer.*keep=4 \(it has keep=0\)"
    ):
        cache.crop(4)
    assert cache.position.tolist() == [59]
    cache.crop(3)
    sequence.append(cache, 56, 60)
    with pytest.raises(ValueError, match=r"crop\(1\)"):  # 60 ends a segment of each branch
        cache.crop(1)


def test_rows_of_different_progress():
    """Catches a batch entry that is written or read at another's position, and padding that is read: it is NaN."""
    sequence = Sequence(batch=4, seq_len=50, num_heads=4, head_dim=8)
    cache, positions = sequence.cache(keep=3), [0] * 4
    for counts in (
        [7, 0, 30, 7],
        [1, 1, 1, 1],
        [0, 20, 1, 5],
        [1, 0, 1, 1],
        [12, 13, 2, 0],
        [0, 0, 0, 0],
        [0, 0, 1, 0],
        [1, 1, 1, 1],
    ):
        longest = max(counts, default=0) or 2
        rows = [
            torch.full((4, longest, *x.shape[2:]), torch.nan, dtype=torch.float64)
            for x in sequence.inputs
        ]
        for b, (position, count) in enumerate(zip(positions, counts, strict=True)):
            for x, whole in zip(rows, sequence.inputs, strict=True):
                x[b, :count] = whole[b, position : position + count]
        lengths = torch.tensor(counts)
        out, lse = dilated_attention(*rows, PATTERN, cache=cache, lengths=lengths, return_lse=True)
        for b, (position, count) in enumerate(zip(positions, counts, strict=True)):
            sequence.check((out[b, :count], lse[b, :count]), b, position, position + count)
            assert (out[b, count:] == 0).all()
            assert (lse[b, count:] == -torch.inf).all()
        positions = [position + count for position, count in zip(positions, counts, strict=True)]
        assert cache.position.tolist() == positions
    cache.crop([3, 0, 1, 2])
    assert cache.position.tolist() == [
        positions[0] - 3,
        positions[1],
        positions[2] - 1,
        positions[3] - 2,
    ]


def test_reset_and_fork():
    """Catches rows of an earlier sequence that a new one sees, and beams that write into each other's memory."""
    sequence = Sequence(batch=3, seq_len=40)
    cache = sequence.cache()
    sequence.append(cache, 0, 25)
    cache.reset([1])
    assert cache.position.tolist() == [25, 0, 25]
    rows = [torch.cat([x[:1, 25:26], x[1:2, :1], x[2:, 25:26]]) for x in sequence.inputs]
    out = dilated_attention(*rows, PATTERN, cache=cache)
    for b, position in enumerate((25, 0, 25)):
        torch.testing.assert_close(out[b, 0], sequence.exact[0][b, position])
    beams = cache.fork([2, 2, 0, 1])
    assert beams.position.tolist() == [26, 26, 26, 1]
    noise = [randn(4, 3, *x.shape[2:]) for x in sequence.inputs]
    first = dilated_attention(*noise, PATTERN, cache=beams)
    apart = torch.cat(
        [
            dilated_attention(*(x[b : b + 1] for x in noise), PATTERN, cache=cache.fork([e]))
            for b, e in enumerate([2, 2, 0, 1])
        ]
    )
    torch.testing.assert_close(first, apart, rtol=1e-12, atol=1e-12)
    rows = [torch.cat([x[:1, 26:27], x[1:2, 1:2], x[2:, 26:27]]) for x in sequence.inputs]
    out = dilated_attention(*rows, PATTERN, cache=cache)  # as if no beam had written
    for b, position in enumerate((26, 1, 26)):
        torch.testing.assert_close(out[b, 0], sequence.exact[0][b, position])
    cache.reset()
    sequence.append(cache, 0, 40)


def test_a_prefix_is_saved_and_loaded():
    """Catches a state that torch.load refuses, that holds more than is still seen, or that cannot begin a batch."""
    sequence = Sequence(seq_len=45)
    cache = sequence.cache(keep=2)
    sequence.append(cache, 0, 33)
    file = io.BytesIO()
    torch.save(cache.state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    plan = cache.plan
    assert state["rows"][0].shape == (
        2,
        sum(len(r.kv_heads) * len(plan.kept(r, 33)) for r in plan.buffers),
        4,
    )
    batch = make(PATTERN, 3, 2, 2, 4, max_len=100)
    batch.load_state_dict(state)
    rows = (x[:, 33:45].expand(3, -1, -1, -1) for x in sequence.inputs)
    out = dilated_attention(*rows, PATTERN, cache=batch)
    torch.testing.assert_close(
        out, sequence.exact[0][:, 33:].expand(3, -1, -1, -1), rtol=1e-11, atol=1e-11
    )


def test_a_short_prefix_goes_into_a_short_cache():
    """Catches buffers that only one of the two caches has: a sequence of one position has no row of phase 1."""
    pattern = DilatedPattern((4,), (2,), is_causal=True)
    sequence = Sequence(pattern, seq_len=2)
    for first, second in ((1, None), (None, 1), (1, 2), (2, 1)):
        cache = sequence.cache(max_len=first)
        sequence.append(cache, 0, 1)
        other = sequence.cache(max_len=second)
        other.load_state_dict(cache.state_dict())
        if second != 1:
            sequence.append(other, 1, 2)


def test_branches_that_are_alike_are_saved_apart():
    """Catches buffers that are mixed up: a key that two branches contain counts twice, and is held twice."""
    sequence = Sequence(DilatedPattern((4, 4), (1, 1), is_causal=True), seq_len=12)
    cache = sequence.cache()
    sequence.append(cache, 0, 7)
    other = sequence.cache(max_len=20)
    other.load_state_dict(cache.state_dict())
    sequence.append(other, 7, 12)


@pytest.mark.parametrize(
    ("pattern", "num_heads", "num_kv_heads", "shares"),
    [
        (PATTERN, 4, 4, (range(1), range(1, 4))),
        (
            DilatedPattern((5, 17), (2, 4), is_causal=True, phase="blocked"),
            6,
            3,
            (range(4), range(4, 6)),
        ),
        (
            DilatedPattern((3, 8), (1, 3), is_causal=True, heads="split"),
            4,
            2,
            (range(2), range(2, 4)),
        ),
    ],
    ids=str,
)
def test_heads_of_a_layer_on_several_ranks(pattern, num_heads, num_kv_heads, shares):
    """Catches phases that go by the head of the tensor and not of the layer, or buffers for heads of others."""
    sequence, ratio, num_rows = (
        Sequence(pattern, 2, 30, num_heads, num_kv_heads),
        num_heads // num_kv_heads,
        0,
    )
    for heads in shares:
        kv = slice(heads.start // ratio, heads.stop // ratio)
        slices = [
            x[:, :, s]
            for x, s in zip(sequence.inputs, (slice(heads.start, heads.stop), kv, kv), strict=True)
        ]
        of = {"heads_held": heads, "num_heads": num_heads}
        cache = make(pattern, 2, num_heads, num_kv_heads, 4, heads_held=heads)
        num_rows += cache.num_rows
        for start, stop in ((0, 7), (7, 8), (8, 9), (9, 23), (23, 24)):
            rows = [x[:, start:stop] for x in slices]
            found = dilated_attention(*rows, pattern, cache=cache, return_lse=True, **of)
            for x, y in zip(found, sequence.exact, strict=True):
                y = y[:, start:stop, heads.start : heads.stop]
                torch.testing.assert_close(x, y, rtol=1e-11, atol=1e-11)
            other = make(pattern, 2, num_heads, num_kv_heads, 4, heads_held=heads, keep=2)
            other.load_state_dict(cache.state_dict())
            cache = other.fork([0, 1])
        rows = [x[:, 24:25] for x in slices]
        unchanged(
            cache, partial(dilated_attention, *rows, pattern, cache=cache), f"heads {num_heads}"
        )
        others = next(share for share in shares if share != heads)
        if len(others) == len(heads):
            of["heads_held"] = others
            unchanged(
                cache, partial(dilated_attention, *rows, pattern, cache=cache, **of), "head held"
            )
    assert num_rows == pattern.cache_rows(num_heads, num_kv_heads)  # together those of the layer


@pytest.mark.parametrize("size", [1, 5])
@pytest.mark.parametrize(
    ("pattern", "num_heads", "num_kv_heads"),
    [
        (PATTERN, 4, 2),
        (DilatedPattern((5, 17), (2, 4), is_causal=True, phase="blocked"), 3, 1),
        (DilatedPattern((3, 8, 19), (1, 2, 4), is_causal=True, heads="split"), 5, 5),
        (DilatedPattern.sliding(23, is_causal=True), 4, 2),
    ],
    ids=str,
)
def test_a_token_moves_exactly_what_it_should(pattern, num_heads, num_kv_heads, size):
    """Catches any key that is seen or missed wrongly, by another way than comparing numbers with the reference; and a
    bad row (NaN) that gets out of its segments, head or batch entry through the cache's memory."""
    num_positions, ratio = 23, num_heads // num_kv_heads
    seen = keys_seen(pattern, [0, num_positions], num_heads, is_causal=True)
    inputs = [randn(2, num_positions, h, 4) for h in (num_heads, num_kv_heads, num_kv_heads)]

    def run(tensors):
        cache = make(pattern, 2, num_heads, num_kv_heads, 4)
        slices = [x.split(size, dim=1) for x in tensors]
        return torch.cat(
            [dilated_attention(*rows, pattern, cache=cache) for rows in zip(*slices, strict=True)],
            dim=1,
        )

    clean = run(inputs)
    for g in range(num_kv_heads):
        for t in range(num_positions):
            changed = inputs[2].clone()
            changed[0, t, g] = changed[0, t, g] + 1
            moved = (run([*inputs[:2], changed]) != clean).any(-1)
            expected = torch.tensor(
                [
                    [h // ratio == g and t in seen[h][i] for h in range(num_heads)]
                    for i in range(num_positions)
                ]
            )
            assert torch.equal(moved[0], expected)
            assert not moved[1].any()
    t, g = num_positions // 2, num_kv_heads - 1
    for which in (1, 2):
        spoilt = [x.clone() for x in inputs]
        spoilt[which][0, t, g] = torch.nan
        out = run(spoilt)
        alike = torch.tensor(
            [
                [
                    h // ratio != g
                    or not _same_slice_or_sees(seen[h][i], t, i, size, pattern, h, num_heads)
                    for h in range(num_heads)
                ]
                for i in range(num_positions)
            ]
        )
        assert torch.equal(out[0][alike], clean[0][alike])
        assert torch.equal(out[1], clean[1])


def _same_slice_or_sees(seen, t, i, size, pattern, head, num_heads):
    """Within a slice the kernel multiplies masked weights, which are 0, with later values of the segment."""
    if t in seen:
        return True
    together = any(
        i // w == t // w and i % w % r == t % w % r == pattern.phase_of(b, head, num_heads)
        for b, (w, r, _) in enumerate(pattern.branches)
    )
    return together and i // size == t // size


# The exact result rounded once to the dtype is off by eps / 4 in relative L2: see test_attention.py.
FLOORS = {
    dtype: torch.finfo(dtype).eps / 4 for dtype in (torch.float32, torch.bfloat16, torch.float16)
}


@pytest.mark.parametrize("size", [1, 40])
@pytest.mark.parametrize("dtype", FLOORS, ids=str)
def test_precision(dtype, size):
    """Catches a sum or a weight kept in 16 bits. At most twice the error of torch's own attention in the same dtype
    under the same mask, plus the floor."""
    pattern, sizes = DilatedPattern((32, 64, 111), (1, 2, 3), is_causal=True), (2, 111, 6, 48)
    torch.manual_seed(0)
    inputs = [(torch.randn(2, 111, h, 48) * 2).to(dtype) for h in (6, 2, 2)]
    exact, exact_lse = dilated_attention_reference(*(x.double() for x in inputs), pattern)
    cache = make(pattern, 2, 6, 2, 48, dtype)
    slices = [x.split(size, dim=1) for x in inputs]
    results = [
        dilated_attention(*rows, pattern, cache=cache, return_lse=True)
        for rows in zip(*slices, strict=True)
    ]
    out, lse = (torch.cat(x, dim=1) for x in zip(*results, strict=True))
    assert (out.shape, out.dtype, lse.dtype) == (sizes, dtype, torch.float32)
    bias = multiplicity(pattern, 111, 6).double().log().float().expand(2, -1, -1, -1)
    heads_first = [x.transpose(1, 2) for x in inputs]
    torchs = F.scaled_dot_product_attention(
        *heads_first, attn_mask=bias, enable_gqa=True
    ).transpose(1, 2)
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    torchs_lse = flash(*heads_first, attn_mask=bias)[1].transpose(1, 2)
    for ours, theirs, y, floor in (
        (out, torchs, exact, FLOORS[dtype]),
        (lse, torchs_lse, exact_lse, FLOORS[torch.float32]),
    ):
        assert relative_error(ours, y) <= 2 * relative_error(theirs, y) + floor


def test_short_rows_are_copied_where_torch_cannot_take_them(monkeypatch):
    """Catches a cache that fails on a CPU with a matrix unit if ATEN_CPU_CAPABILITY is below AVX512."""

    def only_wide(query, *more, **options):
        assert query.dtype == torch.float32
        return flash(query, *more, **options)

    flash = cpu._forward
    monkeypatch.setattr(cpu, "short_rows_fail", lambda: True)
    monkeypatch.setattr(cpu, "_forward", only_wide)
    pattern = DilatedPattern((8, 16), (1, 2), is_causal=True)
    rows = [torch.randn(1, 20, 2, 8, dtype=torch.bfloat16) for _ in range(3)]
    exact = dilated_attention_reference(*(x.double() for x in rows), pattern)[0]
    cache = make(pattern, 1, 2, 2, 8, torch.bfloat16)
    out = torch.cat(
        [
            dilated_attention(*x, pattern, cache=cache)
            for x in zip(*(y.split(5, 1) for y in rows), strict=True)
        ],
        1,
    )
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.double(), exact, atol=0.05, rtol=0)


def test_run_to_run_equal_to_the_bit():
    """Catches results that depend on what was in the memory before."""
    sequence, runs = Sequence(batch=2), []
    cache = sequence.cache()
    for _ in range(2):
        cache.reset()
        rows = zip(*(x.split(7, dim=1) for x in sequence.inputs), strict=True)
        runs.append(torch.cat([dilated_attention(*x, PATTERN, cache=cache) for x in rows], dim=1))
    assert torch.equal(*runs)


def test_segments_longer_than_a_block_of_the_kernel():
    """Catches errors that only show when the kernel works in several blocks of keys (512 on CPU)."""
    sequence = Sequence(
        DilatedPattern((1400, 1201), (1, 2), is_causal=True), seq_len=1300, head_dim=8
    )
    cache = sequence.cache(max_len=1300, keep=1250)
    for start, stop in ((0, 600), (600, 1199), (1199, 1200), (1200, 1201), (1201, 1300)):
        sequence.append(cache, start, stop)
    cache.crop(1250)
    sequence.append(cache, 50, 1300)


# Compiled code.


# inductor's imports
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
def test_one_graph_for_all_tokens_and_nothing_of_a_buffers_size():
    """Catches a position that becomes a constant of the graph, a second graph for another token or another cache, and
    a compiler that copies the memory: of what a call allocates, nothing is as large as the smallest buffer."""
    pattern = DilatedPattern((512, 2048), (1, 2), is_causal=True)
    inputs = [torch.randn(1, 40, 2, 16) for _ in range(3)]
    expected = dilated_attention(*inputs, pattern)

    def token(query, key, value, cache):
        return dilated_attention(query + 0, key, value, pattern, cache=cache)

    def graphs_and_bytes(backend):
        counter = CompileCounterWithBackend(backend)
        compiled = torch.compile(token, fullgraph=True, backend=counter)
        with torch.no_grad():
            for _ in range(2):
                cache = make(pattern, 1, 2, 2, 16, torch.float32)
                memory = cache.memory.data_ptr()
                for t in range(20):
                    out = compiled(*(x[:, t : t + 1] for x in inputs), cache)
                    torch.testing.assert_close(out, expected[:, t : t + 1])
                assert cache.position.tolist() == [20]
                assert cache.memory.data_ptr() == memory
            peak = allocated(lambda: compiled(*(x[:, 20:21] for x in inputs), cache)).peak_bytes
        return counter.frame_count, peak, min(2 * x.capacity * 16 * 4 for x in cache.plan.buffers)

    with inductor_config.patch(PLAIN):
        num_graphs, peak, smallest = graphs_and_bytes("inductor")
    assert num_graphs == 1
    assert 0 < peak < smallest / 4


def test_graphs_for_heads_that_two_ranks_hold():
    """Catches ranges that torch.compile cannot compare once it takes their ends for symbols: with a second part."""

    def token(query, key, value, cache, heads):
        return dilated_attention(
            query, key, value, PATTERN, cache=cache, heads_held=heads, num_heads=4
        )

    compiled = torch.compile(token, fullgraph=True, backend="eager")
    sequence = Sequence(num_heads=4)
    try:
        with torch.no_grad():
            for start in (0, 2):
                heads = range(start, start + 2)
                cache = make(PATTERN, 1, 4, 2, 4, heads_held=heads)
                query, key, value = (
                    sequence.inputs[0],
                    *(x[:, :, start // 2 : start // 2 + 1] for x in sequence.inputs[1:]),
                )
                for t in range(9):
                    out = compiled(
                        *(
                            x[:, t : t + 1]
                            for x in (query[:, :, heads.start : heads.stop], key, value)
                        ),
                        cache,
                        heads,
                    )
                    expected = sequence.exact[0][:, t : t + 1, heads.start : heads.stop]
                    torch.testing.assert_close(out, expected, rtol=1e-11, atol=1e-11)
    finally:
        torch._dynamo.reset()


def test_one_number_of_any_stride():
    """Catches a stride of the last dim that `contiguous` leaves as it is, where a tensor holds one number."""
    row = torch.stack([randn(1, 1, 1, 1)] * 2, -1)[..., 0]
    assert row.stride(-1) == 2
    out = dilated_attention(row, row, row, PATTERN, cache=make(PATTERN, 1, 1, 1, 1))
    torch.testing.assert_close(out, row)


def test_heads_that_read_no_phase():
    """Catches a maximum over no buffers: segments of 2 have no phase 2, which is all that the last head reads."""
    pattern = DilatedPattern((2,), (3,), is_causal=True)
    cache = make(pattern, 1, 3, 3, 4, heads_held=range(2, 3))
    for num in (1, 5):
        rows = [randn(1, num, 1, 4) for _ in range(3)]
        out, lse = dilated_attention(
            *rows, pattern, cache=cache, heads_held=range(2, 3), num_heads=3, return_lse=True
        )
        assert not out.any()
        assert (lse == -torch.inf).all()
    cache.crop(6)
    other = make(pattern, 1, 3, 3, 4, heads_held=range(2, 3))
    other.load_state_dict(cache.state_dict())
    assert other.position.tolist() == [0]


def test_the_op_keeps_its_promises():
    """Catches a fake that says something else than the op returns, and a write that it does not announce."""
    sequence = Sequence(num_heads=4)
    cache = sequence.cache()
    rows = [x[:, :7] for x in sequence.inputs]
    limits = (Call(PATTERN, 0.5, "auto", "", True, range(4), 4).text, None, 0)
    op = torch.ops.ring_dilated_attention.append.default
    with torch.no_grad():
        torch.library.opcheck(op, (*rows, cache.memory.zero_(), cache.progress, None, *limits))


# Bad input.


def unchanged(cache, call, *fragments, error=ValueError):
    """The call is refused with these words, and the cache is as it was."""
    memory, progress = cache.memory.clone(), cache.progress.clone()
    with pytest.raises(error) as caught:
        call()
    message = str(caught.value)
    assert all(fragment in message for fragment in fragments), (
        f"{message!r} lacks one of {fragments}"
    )
    assert message.endswith(".")
    assert torch.equal(cache.memory.nan_to_num(7), memory.nan_to_num(7))
    assert torch.equal(cache.progress, progress)


def test_bad_input():
    """Catches a call that is accepted and computes something else, or that loses what was cached."""
    sequence = Sequence(batch=2, num_heads=4)
    cache = sequence.cache(max_len=30)
    sequence.append(cache, 0, 26)

    def call(x=None, pattern=PATTERN, **options):
        rows = x or [y[:, 26:28] for y in sequence.inputs]
        return lambda: dilated_attention(*rows, pattern, **{"cache": cache, **options})

    other = DilatedPattern((4, 12), (1, 2), is_causal=True)
    unchanged(
        cache,
        call(pattern=other),
        "dilation_rates=(1, 3)",
        "dilation_rates=(1, 2)",
        "Make a cache for each",
    )
    unchanged(cache, call([x[:1] for x in sequence.inputs]), "made for batch 2", "has 1")
    unchanged(cache, call([randn(2, 1, h, 4) for h in (2, 2, 2)]), "made for heads 4", "has 2")
    unchanged(
        cache, call([randn(2, 1, h, 4) for h in (4, 1, 1)]), "made for key/value heads 2", "has 1"
    )
    unchanged(cache, call([randn(2, 1, h, 8) for h in (4, 2, 2)]), "made for head dim 4", "has 8")
    unchanged(
        cache,
        call([x[:, 26:28].float() for x in sequence.inputs]),
        "made for dtype torch.float64",
        "float32",
    )
    elsewhere = make(PATTERN, 2, 4, 2, 4, device="meta")
    with pytest.raises(ValueError, match=r"made for device meta, and the call has cpu"):
        call(cache=elsewhere)()
    unchanged(
        cache,
        call([x[:, 26:31] for x in sequence.inputs]),
        "max_len=30",
        "has 26",
        "5 more there would be 31",
    )
    unchanged(cache, call(cu_seqlens=torch.tensor([0, 2], dtype=torch.int32)), "cu_seqlens packs")
    one = make(PATTERN, 1, 4, 2, 4)
    unchanged(
        one,
        call(
            [x[:1] for x in sequence.inputs],
            cache=one,
            cu_seqlens=torch.tensor([0, 40], dtype=torch.int32),
        ),
        "cache and cu_seqlens",
        "Leave out cu_seqlens",
    )
    unchanged(cache, call(parallel=ContextParallel()), "cache and parallel", "DilatedCache.gather")
    for i in range(3):
        rows = [x[:, 26:28].clone().requires_grad_(i == j) for j, x in enumerate(sequence.inputs)]
        unchanged(cache, call(rows), "has no gradient", "torch.no_grad()")
    unchanged(cache, call(lengths=[1, 1]), "lengths must be an integer tensor (2,)", "[1, 1]")
    unchanged(
        cache,
        call(lengths=torch.tensor([1])),
        "lengths must be an integer tensor (2,)",
        "torch.int64 (1,)",
    )
    unchanged(
        cache,
        call(lengths=torch.tensor([1.0, 1])),
        "lengths must be an integer tensor (2,)",
        "float32",
    )
    unchanged(cache, call(lengths=torch.tensor([1, 3])), "between 0 and the 2 rows", "[1, 3]")
    unchanged(cache, call(lengths=torch.tensor([1, -1])), "between 0 and the 2 rows", "[1, -1]")
    unchanged(cache, call(cache=None, lengths=torch.tensor([1, 1])), "there is none", "pass cache")
    unchanged(cache, call(cache="cache"), "cache must be a DilatedCache or None", "'cache'")
    unchanged(cache, lambda: cache.crop(27), "crop(27)", "has 26 positions")
    unchanged(cache, lambda: cache.crop([2, 3]), "crop(3)", "row 1", "keep=3")
    unchanged(cache, lambda: cache.crop([1, 1, 1]), "3 numbers", "2 entries")
    unchanged(cache, lambda: cache.reset([2]), "reset([2])", "0 to 1")
    unchanged(cache, lambda: cache.fork([0, -1]), "fork([0, -1])", "0 to 1")
    unchanged(
        cache,
        lambda: cache.reset(torch.tensor([False, True])),
        "reset([False, True])",
        "nonzero().flatten()",
    )
    unchanged(cache, lambda: cache.reset([0.5]), "reset([0.5])", "numbers of batch entries")
    unchanged(cache, lambda: cache.crop([1.0, 0.0]), "crop([1.0, 0.0])", "whole numbers")
    with torch.no_grad():
        # nothing is recorded: fine
        call([x[:, 26:28].clone().requires_grad_() for x in sequence.inputs])()
    assert cache.position.tolist() == [28, 28]


def test_a_call_that_fails_loses_nothing(monkeypatch):
    """Catches rows of some batch entries that are written while others can still fail; over the border of a segment,
    what is written takes the place of what is seen."""
    sequence = Sequence(batch=3)
    cache = sequence.cache()
    sequence.append(cache, 0, 18)
    cache.crop([1, 0, 0])
    rows = [torch.cat([x[:1, 17:31], x[1:, 18:32]]) for x in sequence.inputs]
    progress, forward, calls = cache.progress.clone(), cpu.forward, []

    def fails(*args):
        calls.append(len(calls))
        if len(calls) > 12:
            raise MemoryError("no more")
        return forward(*args)

    monkeypatch.setattr(cpu, "forward", fails)
    with pytest.raises(MemoryError, match="no more"):
        dilated_attention(*rows, PATTERN, cache=cache)
    monkeypatch.setattr(cpu, "forward", forward)
    assert torch.equal(cache.progress, progress)
    out = dilated_attention(*rows, PATTERN, cache=cache)
    torch.testing.assert_close(out[:1], sequence.exact[0][:1, 17:31], rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(out[1:], sequence.exact[0][1:, 18:32], rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("failing", [1, 3])
def test_a_token_that_fails_loses_nothing_that_is_kept(failing, monkeypatch):
    """Catches a row that can be gone back to, and over which a token was written that came to nothing: at the border
    of both segments the buffer is full of what keep holds. At the third call the first entry is through."""
    sequence = Sequence(batch=2)
    cache = sequence.cache(keep=1)
    sequence.append(cache, 0, 24)
    cache.crop([0, 1])
    rows = [torch.cat([x[:1, 24:25], x[1:, 23:24]]) for x in sequence.inputs]
    memory, forward, calls = cache.memory.clone(), cpu.forward, []

    def fails(*args):
        calls.append(len(calls))
        if len(calls) == failing:
            raise KeyboardInterrupt
        return forward(*args)

    monkeypatch.setattr(cpu, "forward", fails)
    with pytest.raises(KeyboardInterrupt):
        dilated_attention(*rows, PATTERN, cache=cache)
    monkeypatch.setattr(cpu, "forward", forward)
    assert cache.position.tolist() == [24, 23]
    assert torch.equal(cache.memory.nan_to_num(7), memory.nan_to_num(7))
    cache.crop([1, 0])
    sequence.append(cache, 23, 24)


def test_no_position():
    """Catches a kernel call without rows, which kills the process."""
    sequence = Sequence(batch=2)
    cache = sequence.cache()
    for start in (0, 9):
        rows = [x[:, start:start] for x in sequence.inputs]
        out, lse = dilated_attention(*rows, PATTERN, cache=cache, return_lse=True)
        assert (out.shape, lse.shape) == ((2, 0, 2, 4), (2, 0, 2))
        sequence.append(cache, start, start + 9)


def test_a_state_stays_as_it_was_taken():
    """Catches a state that shares memory with its cache: an answer could not be taken back to its prompt."""
    sequence = Sequence(batch=2)
    cache = sequence.cache()
    sequence.append(cache, 0, 5)
    state = cache.state_dict()
    sequence.append(cache, 5, 19)
    cache.load_state_dict(state)
    assert cache.position.tolist() == [5, 5]
    sequence.append(cache, 5, 19)


def test_a_state_of_something_else_is_refused():
    sequence = Sequence(batch=2)
    cache = sequence.cache(max_len=30)
    sequence.append(cache, 0, 10)
    long = sequence.cache()
    sequence.append(long, 0, 31)
    unchanged(
        cache,
        lambda: cache.load_state_dict(long.state_dict()),
        "has 31 positions",
        "max_len=30",
        "max_len=31",
    )
    other = make(PATTERN, 2, 2, 2, 8).state_dict()
    unchanged(cache, lambda: cache.load_state_dict(other), "'head_dim': 8", "'head_dim': 4")
    state = cache.state_dict()
    unchanged(
        cache,
        lambda: cache.load_state_dict(state | {"rows": state["rows"] * 2}),
        "4 sequences",
        "needs 1 or 2",
    )
    short = state | {"rows": [state["rows"][0], state["rows"][1][:, 1:]]}
    unchanged(cache, lambda: cache.load_state_dict(short), "damaged", "10 positions", "sequence 1")


def test_caches_that_cannot_be(monkeypatch):
    """Catches a refusal without its arithmetic, and memory that is asked for and not there."""
    dense = DilatedPattern((2**40,), (1,), is_causal=True)
    for make_it, fragments in (
        (lambda: make(DilatedPattern((8,), (1,)), 1, 1, 1, 4), ("needs a causal pattern",)),
        (lambda: make(PATTERN, 1, 3, 2, 4), ("3 query heads",)),
        (
            lambda: make(PATTERN, 1, 4, 2, 4, heads_held=range(1, 3)),
            ("heads_held=range(1, 3)", "share a key/value head"),
        ),
        (
            lambda: make(DilatedPattern.dense(is_causal=True), 1, 1, 1, 4),
            ("bytes", "Give max_len, which no buffer"),
        ),
        (
            lambda: make(dense, 2, 1, 1, 4),
            ("2 * 2 * 1,099,511,627,776 * 4 * 8 = 140,737,488,355,328 bytes", "max_len"),
        ),
    ):
        with pytest.raises(ValueError) as caught:
            make_it()
        assert all(fragment in str(caught.value) for fragment in fragments), str(caught.value)
    assert make(dense, 2, 1, 1, 4, max_len=10).num_rows == 10
    monkeypatch.setattr(cache_module, "free_bytes", lambda device: 1000)
    with pytest.raises(ValueError, match=r"and 1,000 are free on cpu\. Give a smaller max_len"):
        make(dense, 1, 1, 1, 4, max_len=100)


def test_sizes_are_said():
    """Catches numbers that are not those of the memory."""
    cache = make(PATTERN, 3, 4, 2, 8, torch.bfloat16, keep=2)
    assert cache.memory.shape == (2, 3, cache.num_rows, 8)
    assert cache.num_bytes == cache.memory.nbytes + cache.progress.nbytes
    assert make(PATTERN, 3, 4, 2, 8).num_rows == PATTERN.cache_rows(4, 2) < cache.num_rows
    assert f"{cache.num_rows} rows, {cache.num_bytes:,} bytes" in repr(cache)
    assert DilatedCache(PATTERN, 1, 1, 1, 4).dtype == torch.get_default_dtype()
