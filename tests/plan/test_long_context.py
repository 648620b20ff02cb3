"""The table of docs/long_context.md, counted anew."""

import pytest
from pages import text_of

from ring_dilated_attention import DilatedPattern
from ring_dilated_attention.plan.counts import Counter, count_ranks
from ring_dilated_attention.plan.job import Job
from ring_dilated_attention.plan.sharding import make_shards

RANKS = 8
# Full layers, layers with a window, the window, query heads, key/value heads and their width.
MODELS = {"Gemma 3 27B": (10, 52, 1024, 32, 16, 128), "gpt-oss 20B": (12, 12, 128, 64, 8, 64)}
BYTES = 2  # of a number in bfloat16


def most_received(pattern, num_positions, heads, kv_heads, width):
    shards = make_shards("zigzag", [num_positions // RANKS] * RANKS)
    counted = count_ranks(Counter(Job(pattern, shards, heads, kv_heads)))
    return max(counted.received) * width * BYTES


@pytest.mark.parametrize("num_positions", [2**17, 2**20])
@pytest.mark.parametrize("model", MODELS)
def test_bytes_of_the_page(model, num_positions):
    full, sliding, window, *heads = MODELS[model]
    dense = full * most_received(DilatedPattern.dense(is_causal=True), num_positions, *heads)
    windows = DilatedPattern.sliding(window, is_causal=True)
    sent_for_windows = sliding * most_received(windows, num_positions, *heads)
    _, kv_heads, width = heads
    of_others = num_positions - num_positions // RANKS
    gathered = (full + sliding) * 2 * of_others * kv_heads * width * BYTES
    figures = [f"{x / 1e9:.2f} GB" for x in (dense, dense + sent_for_windows, gathered)]
    figures.insert(1, f"{sent_for_windows / 1e6:.0f} MB")
    line = f"{num_positions:,} | " + " | ".join(figures)
    page = text_of("docs/long_context.md")
    of_model = page[page.index(f"| {model}") :]
    assert line in of_model
