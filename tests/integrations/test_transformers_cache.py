"""Generation from a cache of constant size, against recomputation of the whole sequence for each token."""

import pytest
import torch
from test_transformers import GREEDY, recomputed
from test_transformers_whole import phi
from tiny import PATTERN, make, tokens
from transformers import DynamicCache

from ring_dilated_attention.integrations.transformers import BoundedCache
from ring_dilated_attention.integrations.transformers.cache import MARK


def prompts(kind):
    ids, mask = tokens(3, 7), torch.ones(3, 7, dtype=torch.int64)
    if kind == "unequal":
        mask[0, :6], mask[1, :2] = 0, 0
    return ids, mask


@torch.no_grad()
@pytest.mark.parametrize("window", [1, 5, 12])
def test_greedy_with_a_window(window):
    """A pattern with a sliding window, from transformers' own cache and from a bounded one."""
    model = make("llama", {**PATTERN, "window": window})
    ids, mask = prompts("unequal")
    sequences, logits = recomputed(model, ids, mask, 14)
    for cache in (DynamicCache(config=model.config), BoundedCache(model)):
        out = model.generate(ids, attention_mask=mask, past_key_values=cache, **GREEDY)
        assert torch.equal(out.sequences[:, 7:], sequences)
        found = torch.stack(out.logits, dim=1)
        torch.testing.assert_close(found, logits.float(), rtol=1e-6, atol=1e-6)


@torch.no_grad()
def test_constant_memory():
    """The same bytes after 20 and after 220 positions, fewer than transformers' cache has; and begun anew."""
    model = make("llama")
    cache, whole = BoundedCache(model), DynamicCache(config=model.config)
    assert cache.num_bytes == 0
    sizes, ids = [], tokens(2, 5)
    for length in (20, 200):
        ids = model.generate(ids, past_key_values=cache, do_sample=False, max_new_tokens=length)
        sizes.append(cache.num_bytes)
    assert sizes[0] == sizes[1]
    expected = model.generate(
        tokens(2, 5), past_key_values=whole, do_sample=False, max_new_tokens=220
    )
    assert torch.equal(ids, expected)
    held = sum(x.nbytes for layer in whole.layers for x in (layer.keys, layer.values))
    assert sizes[0] < held / 8
    cache.reset()
    assert torch.equal(
        model.generate(tokens(2, 5), past_key_values=cache, do_sample=False, max_new_tokens=220),
        ids,
    )


@torch.no_grad()
def test_lookup():
    """A draft that is taken back needs keep."""
    model = make("llama")
    repeated = tokens(1, 5).repeat(1, 3)
    lookup = {"max_new_tokens": 20, "do_sample": False, "prompt_lookup_num_tokens": 4}
    expected = model.generate(repeated, max_new_tokens=20, do_sample=False)
    assert torch.equal(
        model.generate(repeated, past_key_values=BoundedCache(model, keep=5), **lookup), expected
    )
    with pytest.raises(ValueError, match="keep"):
        model.generate(repeated, past_key_values=BoundedCache(model), **lookup)


@torch.no_grad()
def test_bad_input():
    model, ids = make("llama"), tokens(2, 6)
    with pytest.raises(ValueError, match="has no pattern"):
        BoundedCache(make("llama", None))
    mask = torch.tensor([[1] * 6, [1, 1, 1, 1, 0, 0]])
    with pytest.raises(ValueError, match="row 1 has holes"):
        model.generate(
            ids, attention_mask=mask, max_new_tokens=3, past_key_values=BoundedCache(model)
        )
    with pytest.raises(ValueError, match="max_len=8"):
        model.generate(ids, max_new_tokens=5, past_key_values=BoundedCache(model, max_len=8))
    cache = BoundedCache(model)
    model(ids, past_key_values=cache)
    with pytest.raises(ValueError, match="pass minus the number"):
        cache.crop(2)
    layer = type(cache.layers[0])
    update = layer.update
    # a model that changes keys afterwards
    layer.update = lambda self, key, value, *more, **named: (key, value)
    try:
        with pytest.raises(ValueError, match="changes the keys that it has returned"):
            model(ids[:, :1], past_key_values=cache)
    finally:
        layer.update = update
    assert not hasattr(ids, MARK)
    two = {
        "position_ids": torch.tensor([[0, 1, 2, 0, 1, 2]]),
        "cu_seq_lens_q": torch.tensor([0, 3, 6]),
    }
    for name, said in (
        ("position_ids", "do not increase by 1 at position 3"),
        ("cu_seq_lens_q", "rows of a cache"),
    ):
        with pytest.raises(ValueError, match=said):  # or documents would see each other
            model(ids[:1], past_key_values=BoundedCache(model), **{name: two[name]})
    assert PATTERN["segment_lengths"] == [4, 9]


def test_training_with_a_cache_is_refused():
    """It has no gradient."""
    model = make("llama")
    with pytest.raises(ValueError, match="has no gradient"):
        model(tokens(1, 6), past_key_values=BoundedCache(model))


def test_a_model_that_replaces_its_cache():
    """Phi-3 drops any cache where longrope goes over to the long factors. Catches a cache of constant size that
    transformers replaces by its own, which grows."""
    with pytest.raises(
        ValueError,
        match=r"beyond 12 positions \(original_max.* the angles of Phi3ForCausalLM change",
    ):
        BoundedCache(phi())
    ids, asked = tokens(2, 5), {"max_new_tokens": 7, "min_new_tokens": 7, "do_sample": False}
    cache = BoundedCache(phi(), max_len=12)
    assert torch.equal(
        phi().generate(ids, past_key_values=cache, **asked),
        phi().generate(ids, use_cache=False, **asked),
    )
    assert cache.get_seq_length() == 11
