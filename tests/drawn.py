"""Patterns and sharded calls that hypothesis draws."""

from itertools import pairwise

from hypothesis import strategies as st

from ring_dilated_attention import DilatedPattern
from ring_dilated_attention.plan.sharded_call import ShardedCall
from ring_dilated_attention.plan.sharding import SHARDINGS, ShardSpec, make_shards


@st.composite
def patterns(draw, num_heads, *, longest, highest_rate=9, is_causal=None, windows=True):
    """Of up to three branches, and perhaps a window, for this number of heads; causal or not if that is not given."""
    heads = draw(st.sampled_from(["all", "all", "split"]))
    num_branches = draw(st.integers(1, min(3, num_heads) if heads == "split" else 3))
    window = None
    if windows and heads == "all":
        window = draw(st.none() | st.integers(1, longest))
    return DilatedPattern(
        draw(st.lists(st.integers(1, longest), min_size=num_branches, max_size=num_branches)),
        draw(st.lists(st.integers(1, highest_rate), min_size=num_branches, max_size=num_branches)),
        window=window,
        is_causal=draw(st.booleans()) if is_causal is None else is_causal,
        phase="modulo" if heads == "split" else draw(st.sampled_from(["modulo", "blocked"])),
        heads=heads,
    )


@st.composite
def cuts(draw, seq_len, documents):
    """Shards of one to six ranks: of any sharding, or contiguous and unequal, some empty, and slices of shards that
    ranks of a mesh hold."""
    num_ranks, inner = draw(st.integers(1, 6)), draw(st.sampled_from([1, 1, 1, 2]))
    kind = draw(st.sampled_from([*SHARDINGS, "uneven"]))
    if kind == "uneven":
        several = st.lists(st.integers(0, seq_len), min_size=num_ranks - 1, max_size=num_ranks - 1)
        borders = (0, *sorted(draw(several)), seq_len)
        return make_shards("contiguous", [b - a for a, b in pairwise(borders)])
    cut = ShardSpec(kind, num_ranks * inner, inner=inner)
    return cut.shards_of(cut.default_lengths(seq_len, documents), documents)


@st.composite
def sharded_calls(draw, *, longest=150):
    """Any call: segments and rates that divide nothing, packed documents, grouped queries, held heads, all rules."""
    seq_len, num_kv_heads, ratio = (draw(st.integers(1, most)) for most in (longest, 4, 3))
    num_heads = num_kv_heads * ratio
    longest_segment = draw(st.sampled_from([seq_len + 5, 2**62]))
    pattern = draw(patterns(num_heads, longest=longest_segment, highest_rate=24))
    borders = draw(st.none() | st.sets(st.integers(1, seq_len), max_size=6))
    documents = None if borders is None else tuple(sorted(borders | {0, seq_len}))
    first = draw(st.integers(0, num_kv_heads - 1))
    held = draw(st.sampled_from([None, range(first * ratio, num_heads)]))
    shards = draw(cuts(seq_len, documents or (0, seq_len)))
    return ShardedCall(pattern, shards, num_heads, num_kv_heads, documents, held)
