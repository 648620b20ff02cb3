"""Generation from a cache of constant size, against recomputation of the whole sequence for each token."""

from functools import partial
from unittest import mock

import torch
from helpers import message_of
from test_transformers_whole import phi
from tiny import make, tokens
from transformers import DynamicCache

from ring_dilated_attention.integrations.transformers import BoundedCache


@torch.no_grad()
def test_constant_memory():
    """The same bytes after 20 and after 220 positions, fewer than transformers' cache has; and begun anew, and each row
    twice."""
    model = make("llama")
    cache, whole = BoundedCache(model), DynamicCache(config=model.config)
    assert cache.num_bytes == 0
    sizes, ids, begin = [], tokens(2, 5), tokens(2, 5)
    for length in (20, 200):
        ids = model.generate(ids, past_key_values=cache, do_sample=False, max_new_tokens=length)
        sizes.append(cache.num_bytes)
    assert sizes[0] == sizes[1]
    cache.reset()
    for other in (whole, cache):
        options = {"past_key_values": other, "do_sample": False, "max_new_tokens": 220}
        assert torch.equal(model.generate(begin, **options), ids)
    held = sum(x.nbytes for layer in whole.layers for x in (layer.keys, layer.values))
    assert sizes[0] < held / 8
    for other in (whole, cache):
        other.batch_repeat_interleave(2)
    last = ids[:, -1:].repeat_interleave(2, 0)
    one, two = (model(last, past_key_values=other).logits for other in (whole, cache))
    torch.testing.assert_close(one, two)


@torch.no_grad()
def test_lookup():
    """A draft that is taken back needs keep."""
    model = make("llama")
    repeated = tokens(1, 5).repeat(1, 3)
    greedy = {"max_new_tokens": 20, "do_sample": False}
    lookup = partial(model.generate, repeated, prompt_lookup_num_tokens=4, **greedy)
    found = lookup(past_key_values=BoundedCache(model, keep=5))
    assert torch.equal(found, model.generate(repeated, **greedy))
    assert "keep" in message_of(lambda: lookup(past_key_values=BoundedCache(model)))


@torch.no_grad()
def test_bad_input():
    model, ids = make("llama"), tokens(2, 6)

    def generated(mask=None, max_len=None):
        cache, options = BoundedCache(model, max_len=max_len), {"max_new_tokens": 5}
        model.generate(ids, attention_mask=mask, past_key_values=cache, **options)

    cache = BoundedCache(model)
    model(ids, past_key_values=cache)
    two = torch.tensor([[0, 1, 2, 0, 1, 2]])
    one, borders, other = ids[:1], torch.tensor([0, 3, 6]), BoundedCache(model)
    for call, said in (
        (lambda: BoundedCache(make("llama", None)), "has no pattern"),
        (lambda: generated(torch.tensor([[1] * 6, [1] * 4 + [0] * 2])), "row 1 has holes"),
        (lambda: generated(max_len=8), "max_len=8"),
        (lambda: cache.crop(2), "pass minus the number"),
        # or documents would see each other
        (lambda: model(one, past_key_values=other, position_ids=two), "do not increase by 1 at p"),
        (lambda: model(one, past_key_values=other, cu_seq_lens_q=borders), "cached rows"),
    ):
        assert said in message_of(call)
    with torch.enable_grad():
        said = message_of(lambda: model(one, past_key_values=other))
        assert "has no gradient" in said
    # a model that changes keys afterwards
    changes = mock.patch.object(
        type(cache.layers[0]), "update", lambda self, k, v, *_, **__: (k, v)
    )
    with changes:
        said = message_of(lambda: model(ids[:, :1], past_key_values=cache))
        assert "works only if the model leaves its keys unchanged" in said


def test_a_model_that_replaces_its_cache():
    """Phi-3 drops any cache where longrope goes over to the long factors. Catches a cache of constant size that
    transformers replaces by its own, which grows."""
    said = message_of(lambda: BoundedCache(phi()))
    assert "beyond 12 positions (original_max" in said
    assert "the angles of Phi3ForCausalLM change" in said
    ids, asked = tokens(2, 5), {"max_new_tokens": 7, "min_new_tokens": 7, "do_sample": False}
    cache = BoundedCache(phi(), max_len=12)
    assert torch.equal(
        phi().generate(ids, past_key_values=cache, **asked),
        phi().generate(ids, use_cache=False, **asked),
    )
    assert cache.get_seq_length() == 11
