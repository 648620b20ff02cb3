"""Layers and the language model with caches: what is computed token by token is what one call computes."""

from fractions import Fraction
from functools import partial

import helpers
import numpy as np
import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

from ring_dilated_attention import (
    DilatedPattern,
    MultiheadDilatedAttention,
    simulate,
)
from ring_dilated_attention.models import LongNetConfig, LongNetLM
from ring_dilated_attention.models.sampling import STOPPED, Sampling

CAUSAL = DilatedPattern((8, 32), (1, 3), is_causal=True)
CONFIG = LongNetConfig(
    (8, 32), (1, 3), vocab_size=50, num_layers=2, embed_dim=24, num_heads=4, num_kv_heads=2
)
make_tokens = partial(helpers.make_tokens, CONFIG.vocab_size)


def make(config=CONFIG, **options):
    torch.manual_seed(0)
    model = LongNetLM(config, **options).double()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(parameter, std=0.1)
    nn.init.normal_(model.head.weight)  # else all tokens are about as likely
    return model


def joined(steps):
    return torch.stack(list(steps), dim=1)


# The layer.


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"rotary": True, "sub_layernorm": True, "num_kv_heads": 2},
        {"rotary": 100.0, "bias": False},
    ],
    ids=str,
)
def test_a_layer_goes_on_where_it_was(options):
    """Catches angles that start again at 0, and a projection that a cached call leaves out."""
    torch.manual_seed(0)
    module = MultiheadDilatedAttention(24, 4, CAUSAL, dtype=torch.float64, **options)
    x = torch.randn(2, 50, 24, dtype=torch.float64)
    with torch.no_grad():
        expected = module(x, x, x)[0]
        cache = module.make_cache(2, max_len=50, keep=3)
        outs = [module(y, y, y, cache=cache)[0] for y in x.split([1, 1, 20, 1, 27], dim=1)]
        torch.testing.assert_close(torch.cat(outs, dim=1), expected, rtol=1e-11, atol=1e-11)
        cache.reset()
        module(x[:, :9], x[:, :9], x[:, :9], cache=cache, lengths=torch.tensor([9, 4]))
        y = torch.stack([x[0, 9:12], x[1, 4:7]])
        out = module(y, y, y, cache=cache)[0]
    torch.testing.assert_close(
        out, torch.stack([expected[0, 9:12], expected[1, 4:7]]), rtol=1e-11, atol=1e-11
    )


def test_heads_of_a_layer_on_several_ranks():
    """Catches a cache of a module that holds some heads: their outputs add up to the layer's, token by token too."""
    torch.manual_seed(0)
    module = MultiheadDilatedAttention(
        24, 4, CAUSAL, dtype=torch.float64, rotary=True, num_kv_heads=2
    )
    x = torch.randn(1, 40, 24, dtype=torch.float64)
    with torch.no_grad():
        expected, total = module(x, x, x)[0], 0
        for some in (module.held(range(2)), module.held(range(2, 4))):
            cache = some.make_cache(1)
            total = total + torch.cat(
                [some(y, y, y, cache=cache)[0] for y in x.split([30, *[1] * 10], dim=1)], dim=1
            )
    torch.testing.assert_close(total, expected, rtol=1e-11, atol=1e-11)


def test_angles_of_far_positions_are_exact():
    """Catches positions in float32: 2^24 + 1 is none of its numbers, and neighbours would get the same angle."""
    module = MultiheadDilatedAttention(
        8, 2, DilatedPattern((8,), (1,), is_causal=True), rotary=True
    )
    x, far = torch.randn(1, 8, 8), 2**24
    with torch.no_grad():
        cache = module.make_cache(1)
        cache.progress.fill_(far)  # a segment begins there, so that nothing before it is seen
        outs = [module(y, y, y, cache=cache)[0] for y in x.split(1, dim=1)]
        expected = module(x, x, x, positions=far + torch.arange(8))[0]
    torch.testing.assert_close(torch.cat(outs, dim=1), expected, rtol=1e-5, atol=1e-6)


def test_under_autocast():
    """Catches a cache of the parameters' type, which calls in autocast's refuse: a model could not write there."""
    torch.manual_seed(0)
    module, x = MultiheadDilatedAttention(24, 4, CAUSAL, rotary=True), torch.randn(1, 30, 24)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        cache, expected = module.make_cache(1), module(x, x, x)[0]
        outs = [module(y, y, y, cache=cache)[0] for y in x.split([20, *[1] * 10], dim=1)]
        assert len(list(make().float().generate([[1, 2]], 3))) == 3
    assert cache.dtype == torch.bfloat16
    # The rows of a cache are read in bfloat16, by a kernel that rounds weights to it. Other rows are read in float32.
    torch.testing.assert_close(torch.cat(outs, dim=1), expected, rtol=0.016, atol=0.005)
    assert module.make_cache(1).dtype == torch.float32


def test_what_a_layer_refuses():
    module = MultiheadDilatedAttention(24, 4, CAUSAL, rotary=True)
    x, cache = torch.randn(1, 3, 24), module.make_cache(1)
    with pytest.raises(ValueError, match="has no gradient"):
        module(x, x, x, cache=cache)
    with torch.no_grad():
        for options, message in (
            (
                {"cache": cache, "positions": torch.arange(3)},
                "positions and cache: rows are appended at cache.position",
            ),
            (
                {"cache": cache, "key_padding_mask": torch.zeros(1, 3, dtype=torch.bool)},
                "say with lengths",
            ),
            ({"lengths": torch.tensor([3])}, "there is none: pass cache"),
            (
                {"cache": cache, "cu_seqlens": torch.tensor([0, 3], dtype=torch.int32)},
                "cache and cu_seqlens",
            ),
        ):
            with pytest.raises(ValueError, match=message):
                module(x, x, x, **options)
        shared = MultiheadDilatedAttention(24, 4, CAUSAL, parallel=simulate.all_ranks(2))
        with pytest.raises(
            ValueError, match=r"cache and parallel cannot go together.*DilatedCache\.gather"
        ):
            shared(x, x, x, cache=cache)
    assert cache.position.tolist() == [0]


# The model.


def test_the_model_goes_on_where_it_was():
    model, tokens = make(), make_tokens(2, 70)
    expected = model(tokens).detach()
    caches = model.make_caches(2)
    with torch.no_grad():
        outs = [
            model.head(model.append(x, caches)) for x in tokens.split([30, 1, 1, 1, 20, 17], dim=1)
        ]
    torch.testing.assert_close(torch.cat(outs, dim=1), expected, rtol=1e-11, atol=1e-11)


def test_one_graph_for_all_tokens_of_a_model():
    """Catches a position that is read on the host, and becomes a constant of the graph."""
    model, tokens = make(), make_tokens(1, 30)
    counter = CompileCounterWithBackend("aot_eager")
    append = torch.compile(model.append, fullgraph=True, backend=counter)
    with torch.no_grad():
        expected = model(tokens)
        for _ in range(2):
            caches = model.make_caches(1)
            out = torch.cat([model.head(append(x, caches)) for x in tokens.split(1, dim=1)], dim=1)
            torch.testing.assert_close(out, expected, rtol=1e-11, atol=1e-11)
    assert counter.frame_count == 1


def test_generated_is_what_recomputing_gives(monkeypatch):
    """Prompts of different lengths in one batch, longer than a slice of the prefill; over borders of all segments."""
    monkeypatch.setattr("ring_dilated_attention.models.sampling.PREFILL_SLICE", 11)
    model, tokens = make(), make_tokens(3, 40)
    prompts = [tokens[0, :13], tokens[1, :40].tolist(), tokens[2, :1]]
    found = joined(model.generate(prompts, 30, temperature=0))
    assert found.shape == (3, 30)
    for prompt, row in zip(prompts, found, strict=True):
        sequence = torch.as_tensor(prompt)[None]
        for token in row:
            assert token == model(sequence)[0, -1].argmax()
            sequence = torch.cat([sequence, token.view(1, 1)], dim=1)
    assert len(set(found.flatten().tolist())) > 5  # it did not say one thing only
    assert torch.is_grad_enabled()


def test_a_row_draws_as_it_would_alone():
    """Catches draws that depend on who else is in the batch, and a seed that changes nothing."""
    model, tokens = make(), make_tokens(2, 20)
    prompts = [tokens[0, :7], tokens[1]]
    both = joined(model.generate(prompts, 25, seed=5))
    assert torch.equal(both, joined(model.generate(prompts, 25, seed=5)))
    for b in range(2):
        assert torch.equal(
            both[b : b + 1], joined(model.generate(prompts[b : b + 1], 25, seed=5 + b))
        )
    assert not torch.equal(both, joined(model.generate(prompts, 25, seed=6)))
    torch.manual_seed(0)
    unseeded = [joined(model.generate(prompts, 25)) for _ in range(2)]
    assert not torch.equal(*unseeded)


def test_it_streams():
    """Catches tokens that come when all are drawn: the first does not wait for the others."""
    model = make()
    calls = []
    append = model.append
    model.append = lambda *x: (calls.append(len(calls)), append(*x))[1]
    steps = model.generate(make_tokens(1, 5), 10**9, seed=0)
    next(steps)
    assert len(calls) == 1
    next(steps)
    assert len(calls) == 2
    steps.close()


def test_stop():
    """A row ends with the token that stops it, and the iteration with the last row."""
    model, tokens = make(), make_tokens(3, 10)
    free = joined(model.generate(tokens, 40, seed=3))
    stop = {int(free[0, 4]), int(free[1, 9]), int(free[2, 2])}
    found = joined(model.generate(tokens, 40, seed=3, stop=stop))
    ends = [next(i for i, token in enumerate(row.tolist()) if token in stop) for row in free]
    assert found.shape[1] == max(ends) + 1
    for b, end in enumerate(ends):
        assert torch.equal(found[b, : end + 1], free[b, : end + 1])
        assert (found[b, end + 1 :] == STOPPED).all()


def test_after_stop_caches_hold_what_was_shown(monkeypatch):
    """Catches rows that have stopped and go on writing tokens into their caches that nobody was shown.

    A second turn of a chat is what a fresh model draws after the same tokens, row by row.
    """
    monkeypatch.setattr("ring_dilated_attention.models.sampling.PREFILL_SLICE", 4)
    model, tokens = make(), make_tokens(3, 40)
    prompts = [tokens[0, :13], tokens[1, :7], tokens[2, :10]]
    free = joined(model.generate(prompts, 30, seed=3))
    stop = (int(free[0, 11]), int(free[2, 2]))
    caches = model.make_caches(3, keep=2)
    found = joined(model.generate(prompts, 20, seed=3, stop=stop, caches=caches))
    shown = [row[row != STOPPED] for row in found]
    assert len({len(row) for row in shown}) > 1
    for cache in caches:
        assert cache.position.tolist() == [
            len(p) + len(row) - 1 for p, row in zip(prompts, shown, strict=True)
        ]
    added = [tokens[b, 30 : 31 + 3 * b] for b in range(3)]
    second = [torch.cat([row[-1:], more]) for row, more in zip(shown, added, strict=True)]
    answer = joined(model.generate(second, 25, temperature=0, caches=caches))
    for b in range(3):
        alone = torch.cat([prompts[b], shown[b], added[b]])
        assert torch.equal(answer[b : b + 1], joined(model.generate([alone], 25, temperature=0)))


def test_a_prompt_that_does_not_fit_is_in_no_cache(monkeypatch):
    """Catches slices of a prompt that stay in the caches when a later one is refused."""
    monkeypatch.setattr("ring_dilated_attention.models.sampling.PREFILL_SLICE", 4)
    model, tokens = make(), make_tokens(2, 10)
    caches = model.make_caches(2, max_len=9)
    for prompts, message in (
        (
            [tokens[0, :3], tokens[1]],
            "max_len=9 positions, and row 1 of the batch has 0: with 10 more",
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


def test_caches_go_on():
    """A prefix that is computed once: what is drawn after it is what is drawn after all of it."""
    model, tokens = make(), make_tokens(1, 30)
    caches = model.make_caches(1)
    with torch.no_grad():
        model.append(tokens[:, :22], caches)
    states = [cache.state_dict() for cache in caches]
    several = model.make_caches(2, max_len=60)
    for cache, state in zip(several, states, strict=True):
        cache.load_state_dict(state)
    found = joined(model.generate([tokens[0, 22:], tokens[0, 22:25]], 20, seed=1, caches=several))
    expected = joined(model.generate([tokens[0], tokens[0, :25]], 20, seed=1))
    assert torch.equal(found, expected)
    # the last token that was drawn is in no cache yet
    assert several[0].position.tolist() == [49, 44]


def test_weights():
    """On probabilities 1/2, 1/4, 1/8, 1/8."""
    logits = torch.tensor([[1 / 8, 1 / 2, 1 / 8, 1 / 4]]).log()

    def weights(**options):
        return Sampling(**options).weights(logits).tolist()[0]

    assert weights() == pytest.approx([1 / 8, 1 / 2, 1 / 8, 1 / 4])
    assert weights(temperature=0.5) == pytest.approx([x / 22 for x in (1, 16, 1, 4)])
    assert weights(temperature=1e-310) == [0, 1, 0, 0]  # logits over that are beyond float64


def test_draws_follow_the_weights():
    """Catches a generator that is made anew at every token, and a temperature of 0 that draws."""
    logits = torch.tensor([[1 / 8, 1 / 2, 1 / 8, 1 / 4]]).log()
    sampling = Sampling(seed=0)
    generators = sampling.generators(1, torch.device("cpu"))
    counts = (
        torch.bincount(
            torch.cat([sampling.draw(logits, generators) for _ in range(4000)]), minlength=4
        )
        / 4000
    )
    torch.testing.assert_close(
        counts, torch.tensor([1 / 8, 1 / 2, 1 / 8, 1 / 4]), rtol=0, atol=0.03
    )
    assert Sampling(temperature=0).draw(logits, []).tolist() == [1]


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
    """Catches a Fraction and numpy's integers, which are numbers, in torch's words."""
    model = make()
    expected = joined(model.generate([[1, 2]], 5, temperature=0.5, seed=3))
    for temperature, prompts in ((Fraction(1, 2), np.array([[1, 2]])), (np.float32(0.5), [[1, 2]])):
        options = {"temperature": temperature, "seed": np.int64(3), "stop": (np.int64(49),)}
        assert torch.equal(joined(model.generate(prompts, 5, **options)), expected)
    # numpy compares a float32 as float32, in which the largest float is inf: it warned, and let inf pass.
    with pytest.raises(ValueError, match="must be 0"):
        model.generate([[1]], 1, temperature=np.float32("inf"))
