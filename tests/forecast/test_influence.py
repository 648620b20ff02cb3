"""Influence equals reach: in random float64 models, the hidden states that a changed token moves are those that `reach`
names, and no other."""

from itertools import islice, pairwise
from unittest import mock

import torch
from drawn import patterns
from helpers import heard_after
from hypothesis import given, settings
from hypothesis import strategies as st

from ring_dilated_attention.models.longnet import LongNetLM
from ring_dilated_attention.models.longnet_config import LongNetConfig

VOCAB = 11
N, HEADS = 16, 3


def moved(model, borders):
    """(L, N, N) bool: whether the hidden state of query i after layer l has other bits if token j is another one."""
    n = borders[-1]
    tokens = torch.randint(VOCAB, (n,))
    changed = (tokens + torch.eye(n, dtype=torch.int64)) % VOCAB
    packed = None if len(borders) == 2 else torch.tensor(borders, dtype=torch.int32)
    states = []
    for block in model.blocks:
        block.register_forward_hook(lambda _, __, out: states.append(out))

    def hidden(tokens_N):
        states.clear()
        model(tokens_N[None], packed)
        return torch.cat(states)

    with torch.no_grad():
        before = hidden(tokens)
        differs = [(hidden(row) != before).any(-1) for row in changed]
    return torch.stack(differs, 2)


def model_over(pattern, num_layers):
    """A model over any pattern: a config makes causal ones."""
    torch.manual_seed(0)
    sizes = {"num_layers": num_layers, "num_heads": HEADS, "embed_dim": 4 * HEADS}
    with mock.patch.object(LongNetConfig, "pattern", pattern):
        return LongNetLM(LongNetConfig((N,), (1,), vocab_size=VOCAB, **sizes)).double()


@given(patterns(HEADS, longest=N, windows=False), st.integers(1, 3), st.integers(0, N - 1))
@settings(max_examples=10, deadline=None)
def test_a_changed_token_moves_what_reach_names(pattern, num_layers, border):
    """Every hidden state of a float64 model, to the bit, and no other; also in packed documents. `reach` counts these
    positions (test_suggest.py)."""
    borders = (0, border, N) if border % 5 == 1 else (0, N)
    named = torch.zeros(num_layers, N, N, dtype=torch.bool)
    for start, stop in pairwise(borders):
        layers = islice(heard_after(pattern, stop - start, HEADS), num_layers)
        for layer, heard in enumerate(layers):
            named[layer, start:stop, start:stop] = heard
    assert torch.equal(moved(model_over(pattern, num_layers), borders), named)
