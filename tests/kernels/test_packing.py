"""Rows that a tile reads are copied side by side where the kernel's rule says so: small tiles, results and memory."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ring_dilated_attention import DilatedCache, DilatedPattern, dilated_attention
from ring_dilated_attention.kernels import cpu
from ring_dilated_attention.plan.exchange import plan_exchange
from ring_dilated_attention.plan.program import make_program
from ring_dilated_attention.plan.sharded_call import ShardedCall
from ring_dilated_attention.plan.sharding import make_shards
from ring_dilated_attention.plan.step import CallFacts, Compute, Packing

ALWAYS = Packing(distance=1, num_bytes=1, max_rows=2**16)


def computed(pattern, seq_len, num_heads, stage="forward", **facts):
    """The steps of one rank that compute something."""
    sharded_call = ShardedCall(pattern, make_shards("contiguous", (seq_len,)), num_heads, num_heads)
    program = make_program(plan_exchange("none", sharded_call, 0).plan, stage, CallFacts(**facts))
    return [step for step in program if isinstance(step, Compute)]


def test_rows_are_copied_where_it_pays():
    """Catches copies of rows that lie close together, of short segments, and of more than a small tile."""
    pattern, packing = DilatedPattern((1024, 4096), (1, 4)), cpu.TRAITS.packing
    assert packing == Packing(distance=4096, num_bytes=4096, max_rows=2**16)
    far, near = (2048, 2048), (512, 512)
    made = computed(pattern, 8192, 8, packing=packing, distances=far, itemsize=4)
    copied = {step.tile.query.step: step.copied for step in made}
    assert copied == {1: (), 4: ("query", "key", "value")}  # 2,048 bytes from row to row, and 8,192
    for rule, distances in (
        (None, far),
        (packing, near),
        (packing._replace(num_bytes=8192), far),  # 1,024 rows are few then
        (packing._replace(max_rows=1023), far),
    ):
        made = computed(pattern, 8192, 8, packing=rule, distances=distances)
        assert not any(step.copied for step in made)


@pytest.mark.parametrize(
    ("stage", "names", "heads"),
    [
        ("forward", ("query", "key", "value"), 1),
        ("backward", ("dout", "query", "key", "value", "out"), 4),
    ],
)
def test_rows_of_16_bits_are_always_copied(stage, names, heads):
    """Catches a tile whose results would be rounded, one that is copied at once however large it is, and a backward
    whose calls have less than a head for each of four threads."""
    pattern, packing = DilatedPattern((64, 512), (1, 1)), ALWAYS._replace(distance=99, max_rows=512)
    calls = computed(pattern, 512, 8, stage, packing=packing, itemsize=2)
    assert {step.copied for step in calls} == {names}
    found = [(len(step.tile.query.heads), step.tile.query.segments) for step in calls]
    assert found == [(8, 1)] * 8 + [(heads, 1)] * (8 // heads)


@pytest.mark.parametrize("short_rows_fail", [False, True])
def test_rows_of_a_cache_are_copied_only_where_torch_cannot_take_them(short_rows_fail, monkeypatch):
    """They are many, and few rows read them. Catches a copy of a cache at every append, and a cache that fails on a CPU
    with a matrix unit if ATEN_CPU_CAPABILITY is below AVX512."""
    monkeypatch.setattr(cpu, "takes_short_rows", lambda dtype: False)
    monkeypatch.setattr(cpu, "short_rows_fail", lambda: short_rows_fail)
    rows = [torch.randn(1, 12, 2, 8, dtype=torch.bfloat16) for _ in range(3)]
    pattern, op, dtypes = DilatedPattern((64,), (1,), is_causal=True), cpu._forward, []
    cache = DilatedCache(pattern, 1, 2, 2, 8, dtype=torch.bfloat16)
    dilated_attention(*(x[:, :8] for x in rows), pattern, cache=cache)

    def noted(*args, **options):
        dtypes.append({x.dtype for x in args[:3]})
        return op(*args, **options)

    monkeypatch.setattr(cpu, "_forward", noted)
    out = dilated_attention(*(x[:, 8:] for x in rows), pattern, cache=cache)
    # the new rows among themselves, and the cached rows
    assert dtypes == [{torch.float32}, {torch.float32 if short_rows_fail else torch.bfloat16}]
    assert out.dtype == torch.bfloat16
    whole = dilated_attention(*rows, pattern)
    torch.testing.assert_close(out, whole[:, 8:], rtol=0.02, atol=0.02)


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from([(1, 40, 4), (2, 40, 4), (2, 37, 6)]),
    st.sampled_from([1, 2]),
    st.sampled_from([((8,), (1,)), ((8, 40), (1, 4)), ((10, 20, 64), (2, 1, 5))]),
    st.booleans(),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.integers(16, 200),
)
def test_small_tiles_change_nothing(sizes, ratio, branches, is_causal, dtype, max_rows):
    """Catches small tiles that miss rows, or read or write others', both ways, with a batch whose segments are one
    stride and without."""
    batch, seq_len, num_heads = sizes
    pattern = DilatedPattern(*branches, is_causal=is_causal)
    leaves = [
        torch.randn(batch, seq_len, h, 8).to(dtype).requires_grad_()
        for h in (num_heads, num_heads // ratio, num_heads // ratio)
    ]
    dout, results = torch.randn(batch, seq_len, num_heads, 8).to(dtype), []
    for packing in (cpu.TRAITS.packing, ALWAYS._replace(max_rows=max_rows)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(cpu, "takes_short_rows", lambda dtype: False)
            patch.setattr(cpu, "TRAITS", cpu.TRAITS._replace(packing=packing))
            out = dilated_attention(*leaves, pattern)
            results.append((out, *torch.autograd.grad(out, leaves, dout)))
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-5)
