"""Layers and the language model with caches: what is computed token by token is what one call computes."""

from fractions import Fraction

import numpy as np
import pytest
import test_model
import torch
from test_model import make_tokens
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

from ring_dilated_attention import (
    DilatedPattern,
    MultiheadDilatedAttention,
    simulate,
)
from ring_dilated_attention.models.sampling import STOPPED, Sampling

CAUSAL = DilatedPattern((8, 32), (1, 3), is_causal=True)
PREFILL_SLICE = "ring_dilated_attention.models.sampling.PREFILL_SLICE"
EXACT = {"rtol": 1e-11, "atol": 1e-11}


def make():
    model = test_model.make()
    nn.init.normal_(model.head.weight)  # else all tokens are about as likely
    return model


def joined(steps):
    return torch.stack(list(steps), dim=1)


def layer(dtype=torch.float64, **options):
    torch.manual_seed(0)
    return MultiheadDilatedAttention(24, 4, CAUSAL, dtype=dtype, **options)


def through_a_cache(module, x, cache, rows):
    """Appended in so many rows at a time."""
    outs = [module(y, y, y, cache=cache)[0] for y in x.split(rows, dim=1)]
    return torch.cat(outs, dim=1)


# The layer.


@pytest.mark.parametrize(
    "options",
    [
        {"rotary": True, "num_kv_heads": 2},
        {"rotary": 100.0, "bias": False, "sub_layernorm": True},
    ],
    ids=str,
)
def test_a_layer_goes_on_where_it_was(options):
    """Catches angles that start again at 0, and a projection that a cached call leaves out. The outputs of modules that
    hold some heads each add up to the layer's."""
    module = layer(**options)
    x = torch.randn(2, 50, 24, dtype=torch.float64)
    with torch.no_grad():
        expected = module(x, x, x)[0]
        cache = module.make_cache(2, max_len=50, keep=3)
        found = through_a_cache(module, x, cache, [1, 1, 20, 1, 27])
        torch.testing.assert_close(found, expected, **EXACT)
        if module.sub_layernorm is None:
            total = sum(
                through_a_cache(some, x, some.make_cache(2), [40] + [1] * 10)
                for some in (module.held(range(2)), module.held(range(2, 4)))
            )
            torch.testing.assert_close(total, expected, **EXACT)
        cache.reset()
        module(x[:, :9], x[:, :9], x[:, :9], cache=cache, lengths=torch.tensor([9, 4]))
        y = torch.stack([x[0, 9:12], x[1, 4:7]])
        out = module(y, y, y, cache=cache)[0]
    torch.testing.assert_close(out, torch.stack([expected[0, 9:12], expected[1, 4:7]]), **EXACT)


def test_angles_of_far_positions_are_exact():
    """Catches positions in float32: 2^24 + 1 is none of its numbers, and neighbours would get the same angle."""
    module, x, far = layer(torch.float32, rotary=True), torch.randn(1, 8, 24), 2**25
    with torch.no_grad():
        cache = module.make_cache(1)
        cache.progress.fill_(far)  # segments begin there, and what is before them is not seen
        found = through_a_cache(module, x, cache, 1)
        expected = module(x, x, x, positions=far + torch.arange(8))[0]
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_what_a_layer_refuses():
    module = layer(torch.float32, rotary=True)
    x, cache = torch.randn(1, 3, 24), module.make_cache(1)
    with pytest.raises(ValueError, match="has no gradient"):
        module(x, x, x, cache=cache)
    shared = layer(torch.float32, parallel=simulate.all_ranks(2))
    borders, hidden = torch.tensor([0, 3], dtype=torch.int32), torch.zeros(1, 3, dtype=torch.bool)
    for attend, options, message in (
        (module, {"positions": torch.arange(3)}, "positions and cache: rows are appended at cache"),
        (module, {"key_padding_mask": hidden}, "say with lengths"),
        (module, {"cu_seqlens": borders}, "cache and cu_seqlens"),
        (module, {"cache": None, "lengths": torch.tensor([3])}, "no cache was passed: pass cache"),
        (shared, {}, r"cache and parallel cannot go together.*DilatedCache\.gather"),
    ):
        with torch.no_grad(), pytest.raises(ValueError, match=message):
            attend(x, x, x, **{"cache": cache, **options})
    assert cache.position.tolist() == [0]


# The model.


def test_one_graph_for_all_tokens_of_a_model():
    """The logits of one call, appended to a cache by many. Catches a position that is read on the host, and becomes a
    constant of the graph."""
    model, tokens = make(), make_tokens(2, 46)
    counter = CompileCounterWithBackend("aot_eager")
    append = torch.compile(model.append, fullgraph=True, backend=counter)
    with torch.no_grad():
        expected = model(tokens)
        for _ in range(2):
            caches = model.make_caches(2)
            outs = [model.append(x, caches) for x in tokens[:, :40].split([30, 10], dim=1)]
            outs += [append(x, caches) for x in tokens[:, 40:].split(1, dim=1)]
            torch.testing.assert_close(model.head(torch.cat(outs, dim=1)), expected, **EXACT)
    assert counter.frame_count == 1


def test_generated_is_what_recomputing_gives(monkeypatch):
    """Prompts of different lengths in one batch, longer than a slice of the prefill; over borders of all segments."""
    monkeypatch.setattr(PREFILL_SLICE, 11)
    model, tokens = make(), make_tokens(3, 40)
    prompts = [tokens[0, :13], tokens[1, :40].tolist(), tokens[2, :1]]
    found = joined(model.generate(prompts, 30, temperature=0))
    assert found.shape == (3, 30)
    for prompt, row in zip(prompts, found, strict=True):
        logits = model(torch.cat([torch.as_tensor(prompt), row])[None])[0]
        assert torch.equal(logits[len(prompt) - 1 : -1].argmax(-1), row)
    assert len(set(found.flatten().tolist())) > 5  # it did not say one thing only
    assert torch.is_grad_enabled()


def test_a_row_draws_as_it_would_alone():
    """Catches draws that depend on who else is in the batch, and a seed that changes nothing."""
    model, tokens = make(), make_tokens(2, 20)
    prompts = [tokens[0, :7], tokens[1]]
    both = joined(model.generate(prompts, 8, seed=5))
    assert torch.equal(both, joined(model.generate(prompts, 8, seed=5)))
    for b in range(2):
        assert torch.equal(
            both[b : b + 1], joined(model.generate(prompts[b : b + 1], 8, seed=5 + b))
        )
    assert not torch.equal(both, joined(model.generate(prompts, 8, seed=6)))
    unseeded = [joined(model.generate(prompts, 8)) for _ in range(2)]
    assert not torch.equal(*unseeded)


def test_it_streams(monkeypatch):
    """Catches tokens that come when all are drawn: the first does not wait for the others."""
    model, calls = make(), []
    append = model.append
    monkeypatch.setattr(model, "append", lambda *x: (calls.append(x), append(*x))[1])
    steps = model.generate(make_tokens(1, 5), 10**9, seed=0)
    for number in (1, 2):
        next(steps)
        assert len(calls) == number
    steps.close()


@pytest.mark.parametrize("rows", [(0, 2), (0, 1, 2)])
def test_after_stop_caches_hold_what_was_shown(rows, monkeypatch):
    """A row ends with the token that stops it, and the iteration with the last row. Catches rows that have stopped and
    go on writing tokens into their caches that nobody was shown.

    A second turn of a chat is what a fresh model draws after the same tokens, row by row.
    """
    monkeypatch.setattr(PREFILL_SLICE, 4)
    model, tokens = make(), make_tokens(3, 40)
    prompts = [tokens[0, :13], tokens[1, :7], tokens[2, :10]]
    free = joined(model.generate(prompts, 20, seed=3))
    stop = {int(free[b, place]) for b, place in ((0, 11), (1, 9), (2, 2)) if b in rows}
    caches = model.make_caches(3, keep=2)
    found = joined(model.generate(prompts, 20, seed=3, stop=stop, caches=caches))
    shown = []
    for row in free:
        stops = [i for i, token in enumerate(row.tolist()) if token in stop]
        shown.append(row[: stops[0] + 1] if stops else row)
    lengths = [len(row) for row in shown]
    assert len(set(lengths)) > 1
    assert found.shape[1] == max(lengths)
    for b in range(3):
        assert torch.equal(found[b, : lengths[b]], shown[b])
        assert (found[b, lengths[b] :] == STOPPED).all()
    for cache in caches:
        held = [len(p) + length - 1 for p, length in zip(prompts, lengths, strict=True)]
        assert cache.position.tolist() == held
    added = [tokens[b, 30 : 31 + 3 * b] for b in range(3)]
    second = [torch.cat([row[-1:], more]) for row, more in zip(shown, added, strict=True)]
    answer = joined(model.generate(second, 12, temperature=0, caches=caches))
    for b in range(3):
        alone = torch.cat([prompts[b], shown[b], added[b]])
        assert torch.equal(answer[b : b + 1], joined(model.generate([alone], 12, temperature=0)))


def test_a_prompt_that_does_not_fit_is_in_no_cache(monkeypatch):
    """Catches slices of a prompt that stay in the caches when a later one is refused."""
    monkeypatch.setattr(PREFILL_SLICE, 4)
    model, tokens = make(), make_tokens(2, 10)
    caches = model.make_caches(2, max_len=9)
    for prompts, message in (
        (
            [tokens[0, :3], tokens[1]],
            "max_len=9 positions, and sequence 1 of the batch has 0: with 10 more",
        ),
        ([[1] * 9, [1] * 8 + [50]], "prompt 1 has tokens from 1 to 50, but vocab_size=50"),
    ):
        with pytest.raises(ValueError, match=message):
            next(model.generate(prompts, 1, caches=caches))
        assert caches[0].position.tolist() == caches[1].position.tolist() == [0, 0]


def test_logits_that_are_no_numbers():
    """Catches NaN that is taken for token 0, and a row that has stopped and stops the others."""
    bad, nan = torch.tensor([[0.0, 1.0], [0.0, float("nan")]]), float("nan")
    for temperature in (0, 1):
        sampling = Sampling(temperature, seed=0)
        for row in ([0.0, nan], [nan, nan], [-torch.inf, -torch.inf], [0.0, torch.inf]):
            bad[1] = torch.tensor(row)
            with pytest.raises(
                ValueError, match=r"for row 1: the largest of its logits is -?(nan|inf)"
            ):
                sampling.draw(bad, sampling.generators(2, torch.device("cpu")))
        masked = torch.tensor([[-torch.inf, 1.0]])
        assert sampling.draw(masked, sampling.generators(1, torch.device("cpu"))).tolist() == [1]
    model = make()
    free = joined(model.generate([[1], [2]], 4, temperature=0))
    stop = int(free[0, 0])
    assert stop not in {1, 2, *free[1].tolist()}
    with torch.no_grad():
        model.embedding.weight[stop] = nan  # what follows it is NaN, and row 0 does not ask for it
    found = joined(model.generate([[1], [2]], 4, temperature=0, stop=(stop,)))
    assert found.tolist() == [[stop, *[STOPPED] * 3], free[1].tolist()]
    steps = model.generate([[1], [2]], 4, temperature=0)
    next(steps)
    with pytest.raises(
        ValueError, match="no token can be drawn for row 0: the largest of its logits is nan"
    ):
        next(steps)


WEIGHTS = torch.tensor([[1 / 8, 1 / 2, 1 / 8, 1 / 4]])


def test_weights():
    for temperature, expected in (
        (1.0, WEIGHTS[0].tolist()),
        (0.5, [x / 22 for x in (1, 16, 1, 4)]),
        (1e-310, [0, 1, 0, 0]),  # logits over that are beyond float64
    ):
        [found] = Sampling(temperature=temperature).weights(WEIGHTS.log()).tolist()
        assert found == pytest.approx(expected)


def test_draws_follow_the_weights():
    """Catches a generator that is made anew at every token, and a temperature of 0 that draws."""
    sampling = Sampling(seed=0)
    generators = sampling.generators(1, torch.device("cpu"))
    drawn = torch.cat([sampling.draw(WEIGHTS.log(), generators) for _ in range(4000)])
    shares = torch.bincount(drawn, minlength=4)[None] / 4000
    torch.testing.assert_close(shares, WEIGHTS, rtol=0, atol=0.03)
    assert Sampling(temperature=0).draw(WEIGHTS, []).tolist() == [1]


@pytest.mark.parametrize(
    ("prompts", "number", "options", "message"),
    [
        ([[1]], -1, {}, "max_new_tokens=-1 must be an integer of at least 0"),
        ([], 1, {}, "there is no prompt"),
        (b"abc", 1, {}, "there is no prompt in tokens=b'abc'.*A prompt of bytes is list.prompt"),
        ([[1], []], 1, {}, r"prompt 1 is \[\], and not one or more integers"),
        (torch.zeros(3, dtype=torch.int64), 1, {}, r"is tensor\(0\).*Pass tokens \(batch, N\)"),
        ([[3, -1]], 1, {}, "prompt 0 has tokens from -1 to 3, but vocab_size=50"),
        ([[1]], 1, {"temperature": float("nan")}, "temperature=nan"),
        # numpy compares a float32 as float32, in which the largest float is inf
        ([[1]], 1, {"temperature": np.float32("inf")}, "must be 0"),
        ([[1]], 1, {"seed": 2**64}, "seed=18446744073709551616 must be an integer of 64 bits"),
        ([[1], [2]], 1, {"caches": 1}, "of a batch of 1, the inputs need one for"),
        ([[1]], 1, {"caches": 0}, "0 caches for 2 layers"),
        ([[1]], 1, {"stop": 0}, "stop=0 must be the tokens that end a row"),
        ([[1]], 1, {"stop": (3, 50)}, r"stop=\(3, 50\) must be .* integers from 0 to 49"),
    ],
)
def test_arguments_that_cannot_be(prompts, number, options, message):
    model = make()
    if "caches" in options:
        options = {"caches": model.make_caches(1) * options["caches"]}
    with pytest.raises(ValueError, match=message):
        next(model.generate(prompts, number, **options))


def test_nothing_is_drawn_of_nothing():
    """Catches a prompt that was given to caches, and is in none of them."""
    model = make()
    caches = model.make_caches(1)
    assert list(model.generate([[1, 2]], 0, caches=caches)) == []
    assert caches[1].position.tolist() == [2]
    assert list(model.generate([[1]], 0)) == []


def test_numbers_of_other_kinds():
    """Catches a Fraction and numpy's numbers in torch's words."""
    model = make()
    expected = joined(model.generate([[1, 2]], 5, temperature=0.5, seed=3))
    options = {"temperature": Fraction(1, 2), "seed": np.int64(3), "stop": (np.int64(49),)}
    assert torch.equal(joined(model.generate(np.array([[1, 2]]), 5, **options)), expected)
