"""Calls with a cache against the definition: whatever way a sequence is appended, its rows are those of one call.

All tests run with uninitialised memory filled with NaN.
"""

import random

import pytest
import torch
import torch.nn.functional as F
from fuzz_caches import try_sequence
from helpers import PLAIN, keys_seen, randn, relative_error
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._dynamo.testing import CompileCounterWithBackend
from torch._inductor import config as inductor_config

from benchmarks.measure import allocated
from ring_dilated_attention import DilatedCache, DilatedPattern, dilated_attention
from ring_dilated_attention.kernels import cpu
from ring_dilated_attention.ranks.call import Call
from ring_dilated_attention.reference import dilated_attention_reference, multiplicity

pytestmark = pytest.mark.usefixtures("nan_in_new_memory")
PATTERN = DilatedPattern((4, 12), (1, 3), is_causal=True)


def make(pattern, batch, num_heads, num_kv_heads, head_dim, dtype=torch.float64, **limits):
    return DilatedCache(pattern, batch, num_heads, num_kv_heads, head_dim, dtype=dtype, **limits)


def in_slices(inputs, pattern, cache, size):
    """out and lse of a whole sequence, from calls with so many positions each."""
    slices = zip(*(x.split(size, dim=1) for x in inputs), strict=True)
    found = [dilated_attention(*x, pattern, cache=cache, return_lse=True) for x in slices]
    return [torch.cat(x, dim=1) for x in zip(*found, strict=True)]


class Sequence:
    """Inputs of whole sequences, what the definition makes of them, and calls with parts of them."""

    def __init__(self, pattern=PATTERN, batch=1, seq_len=40, num_heads=2, head_dim=4):
        self.pattern, self.sizes = pattern, (batch, num_heads, num_heads, head_dim)
        self.inputs = [randn(batch, seq_len, num_heads, head_dim) for _ in range(3)]
        self.exact = dilated_attention_reference(*self.inputs, pattern)

    def cache(self, **limits):
        return make(self.pattern, *self.sizes, **limits)

    def append(self, cache, start, stop):
        """The call with rows start..stop-1, compared. A cache of a larger batch gets them for each entry."""
        batch = len(cache.position)
        rows = (x[:, start:stop].expand(batch, -1, -1, -1) for x in self.inputs)
        found = dilated_attention(*rows, self.pattern, cache=cache, return_lse=True)
        for x, y in zip(found, self.exact, strict=True):
            # float64 rounds at 2e-16; sums have below 1,000 terms
            torch.testing.assert_close(x, y[:, start:stop].expand_as(x), rtol=1e-11, atol=1e-11)


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**32))
def test_any_way_of_appending_equals_one_call(seed):
    """Catches what no chosen case thought of: any pattern, heads, scale; tokens, slices and ragged batches, positions
    taken back as far as the cache allows, and a cache that is saved, loaded into one of other limits, or forked."""
    with torch.no_grad():
        trial = try_sequence(random.Random(seed), None)
    assert trial.complaint is None, trial


def test_a_state_begins_a_batch():
    """Catches a state that holds more than is still seen, that shares memory with a cache which goes on, or that cannot
    begin a batch."""
    sequence = Sequence(seq_len=45)
    cache = sequence.cache(keep=2)
    sequence.append(cache, 0, 33)
    state = cache.state_dict()
    num_rows = sum(len(x.kv_heads) * len(cache.plan.kept(x, 33)) for x in cache.plan.buffers)
    assert state["rows"][0].shape == (2, num_rows, 4)
    sequence.append(cache, 33, 40)
    batch = make(PATTERN, 3, 2, 2, 4, max_len=100)
    for target in (batch, cache):
        target.load_state_dict(state)
        sequence.append(target, 33, 45)


@pytest.mark.parametrize(
    ("segment_lengths", "rates", "first", "second", "length", "longest"),
    [
        # buffers that only one of the two caches has: a sequence of one position has no row of phase 1
        ((4,), (2,), 1, None, 1, 2),
        ((4,), (2,), None, 1, 1, 1),
        ((4,), (2,), 1, 2, 1, 2),
        ((4,), (2,), 2, 1, 1, 1),
        # a key that two branches contain counts twice, and is held twice
        ((4, 4), (1, 1), None, 20, 7, 12),
    ],
)
def test_a_state_goes_into_a_cache_of_other_limits(
    segment_lengths, rates, first, second, length, longest
):
    sequence = Sequence(DilatedPattern(segment_lengths, rates, is_causal=True), seq_len=12)
    cache, other = sequence.cache(max_len=first), sequence.cache(max_len=second)
    sequence.append(cache, 0, length)
    other.load_state_dict(cache.state_dict())
    sequence.append(other, length, longest)


@pytest.mark.parametrize("size", [1, 5])
@pytest.mark.parametrize(
    ("pattern", "num_heads", "num_kv_heads"),
    [
        (PATTERN, 4, 2),
        (DilatedPattern((5, 17), (2, 4), is_causal=True, phase="blocked"), 3, 1),
        (DilatedPattern((3, 8, 19), (1, 2, 4), is_causal=True, heads="split"), 5, 5),
        (DilatedPattern.sliding(9, is_causal=True), 4, 2),
    ],
    ids=str,
)
def test_a_token_moves_exactly_what_it_should(pattern, num_heads, num_kv_heads, size):
    """Catches any key that is seen or missed wrongly, by another way than comparing numbers with the reference; and a
    bad row (NaN) that gets out of its segments, head or batch entry through the cache's memory."""
    num_positions, ratio = 23, num_heads // num_kv_heads
    batch = num_positions + 1  # in entry t the row at t is changed, and in the last one nothing
    seen = keys_seen(pattern, [0, num_positions], num_heads, is_causal=True)
    inputs = [randn(batch, num_positions, h, 4) for h in (num_heads, num_kv_heads, num_kv_heads)]

    def run(tensors):
        cache = make(pattern, batch, num_heads, num_kv_heads, 4)
        return in_slices(tensors, pattern, cache, size)[0]

    clean = run(inputs)
    for g in range(num_kv_heads):
        changed = inputs[2].clone()
        for t in range(num_positions):
            changed[t, t, g] += 1
        moved = (run([*inputs[:2], changed]) != clean).any(-1)
        for t in range(num_positions):
            expected = torch.tensor(
                [
                    [h // ratio == g and t in seen[h][i] for h in range(num_heads)]
                    for i in range(num_positions)
                ]
            )
            assert torch.equal(moved[t], expected)
        assert not moved[-1].any()
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
        assert torch.equal(out[1:], clean[1:])


def _same_slice_or_sees(seen, t, i, size, pattern, head, num_heads):
    """The kernel multiplies masked weights, which are 0, with values: within a slice with later ones of the segment,
    and with all that some query of the slice sees in its window."""
    if t in seen:
        return True
    if pattern.window is not None:
        return abs(i - t) < pattern.window + size
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
    inputs = [(torch.randn(2, 111, h, 48) * 2).to(dtype) for h in (6, 2, 2)]
    exact, exact_lse = dilated_attention_reference(*(x.double() for x in inputs), pattern)
    cache = make(pattern, 2, 6, 2, 48, dtype)
    out, lse = in_slices(inputs, pattern, cache, size)
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
    """Catches ranges that torch.compile cannot compare once it takes their ends for symbols: with a second part. Both
    parts together have the buffers of the layer."""
    compiled = torch.compile(dilated_attention, fullgraph=True, backend="eager")
    num_rows = 0
    try:
        for heads in (range(2), range(2, 4)):
            held = {"heads_held": heads, "num_heads": 4, "return_lse": True}
            cache, other = (make(PATTERN, 1, 4, 2, 4, heads_held=heads) for _ in range(2))
            num_rows += cache.num_rows
            for _ in range(9):
                rows = [randn(1, 1, h, 4) for h in (2, 1, 1)]
                found = compiled(*rows, PATTERN, cache=cache, **held)
                expected = dilated_attention(*rows, PATTERN, cache=other, **held)
                torch.testing.assert_close(found, expected, rtol=0, atol=0)
    finally:
        torch._dynamo.reset()
    assert num_rows == PATTERN.cache_rows(4, 2)


def test_one_number_of_any_stride():
    """Catches a stride of the last dim that `contiguous` leaves as it is, where a tensor holds one number."""
    row = torch.stack([randn(1, 1, 1, 1)] * 2, -1)[..., 0]
    assert row.stride(-1) == 2
    out = dilated_attention(row, row, row, PATTERN, cache=make(PATTERN, 1, 1, 1, 1))
    torch.testing.assert_close(out, row)


def test_heads_that_read_no_phase():
    """Catches a maximum over no buffers: segments of 2 have no phase 2, which is all that the last head reads."""
    pattern, heads = DilatedPattern((2,), (3,), is_causal=True), range(2, 3)
    cache, other = (make(pattern, 1, 3, 3, 4, heads_held=heads) for _ in range(2))
    for num_new in (1, 5):
        rows = [randn(1, num_new, 1, 4)] * 3
        out = dilated_attention(*rows, pattern, cache=cache, heads_held=heads, num_heads=3)
        assert not out.any()
    cache.crop(6)
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


@pytest.mark.parametrize(
    ("positions", "back", "num_new", "working"),
    [
        # over the border of a segment, what is written takes the place of what is seen
        ([18, 18, 18], [1, 0, 0], 14, 12),
        # at the border of both segments the buffer is full of what keep holds
        ([24, 24], [0, 1], 1, 0),
        ([24, 24], [0, 1], 1, 2),  # the first entry is through
    ],
)
def test_a_call_that_fails_loses_nothing(positions, back, num_new, working, monkeypatch):
    """Catches rows of some entries that are written while others can still fail, and a row that can be gone back to,
    and over which a token was written that came to nothing."""
    batch = len(positions)
    sequence = Sequence(batch=batch)
    cache = sequence.cache(keep=1)
    sequence.append(cache, 0, positions[0])
    cache.crop(back)
    works = iter([cpu.forward] * working)

    def fails(*args):
        if (forward := next(works, None)) is None:
            raise KeyboardInterrupt
        return forward(*args)

    rows = [x[:, :num_new] for x in sequence.inputs]
    memory, progress = cache.memory.clone(), cache.progress.clone()
    monkeypatch.setattr(cpu, "forward", fails)
    with pytest.raises(KeyboardInterrupt):
        dilated_attention(*rows, PATTERN, cache=cache)
    monkeypatch.undo()
    assert torch.equal(cache.memory.nan_to_num(7), memory.nan_to_num(7))
    assert torch.equal(cache.progress, progress)
    cache.crop([1 - number for number in back])
    assert cache.position.tolist() == [positions[0] - 1] * batch
    sequence.append(cache, positions[0] - 1, positions[0] + num_new)


def test_no_position():
    """Catches a kernel call without rows, which kills the process."""
    sequence = Sequence(batch=2)
    cache = sequence.cache()
    for start in (0, 9):
        sequence.append(cache, start, start)
        sequence.append(cache, start, start + 9)


def test_sizes_are_said():
    """Catches numbers that are not those of the memory."""
    cache = make(PATTERN, 3, 4, 2, 8, torch.bfloat16, keep=2)
    assert cache.memory.shape == (2, 3, cache.num_rows, 8)
    assert cache.num_bytes == cache.memory.nbytes + cache.progress.nbytes
    assert f"{cache.num_rows} rows, {cache.num_bytes:,} bytes" in repr(cache)
    assert DilatedCache(PATTERN, 1, 1, 1, 4).dtype == torch.get_default_dtype()
