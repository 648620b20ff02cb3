"""Patterns that hypothesis draws."""

from hypothesis import strategies as st

from ring_dilated_attention import DilatedPattern


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
