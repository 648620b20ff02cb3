"""Influence equals reach: in random float64 models, the hidden states that a changed token moves are those that `reach`
names, and no other."""

from collections.abc import Sequence
from itertools import islice, pairwise
from typing import NamedTuple

import torch
from drawn import patterns
from helpers import heard_after
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ring_dilated_attention.models.longnet import LongNetLM
from ring_dilated_attention.models.longnet_config import LongNetConfig
from ring_dilated_attention.pattern import DilatedPattern

VOCAB = 11
N, HEADS = 16, 3


class EncoderConfig(LongNetConfig):
    """The same model over a pattern that is not causal."""

    @property
    def pattern(self) -> DilatedPattern:
        return DilatedPattern(
            self.segment_lengths, self.dilation_rates, phase=self.phase, heads=self.heads
        )


class Case(NamedTuple):
    """A random model: its branches, whether it is causal, and the borders of its documents."""

    lengths: tuple[int, ...]
    rates: tuple[int, ...]
    borders: tuple[int, ...] = (0, 96)
    is_causal: bool = True
    phase: str = "modulo"
    heads: str = "all"
    num_layers: int = 3
    num_heads: int = 4


def moved(model: LongNetLM, borders: Sequence[int], seed: int) -> Tensor:
    """(L, N, N) bool: whether the hidden state of query i after layer l has other bits if token j is another one.

    Each changed sequence is run in the same place of a batch as the sequence it is compared with, so that what does not
    depend on the token is computed by the same operations. Packed documents have no batch: one forward for each token.
    """
    generator, n = torch.Generator().manual_seed(seed), borders[-1]
    tokens = torch.randint(VOCAB, (n,), generator=generator)
    changed = tokens.repeat(n, 1)
    changed += torch.eye(n, dtype=torch.int64) * torch.randint(
        1, VOCAB, (n, 1), generator=generator
    )
    changed %= VOCAB
    packed = None if len(borders) == 2 else torch.tensor(borders, dtype=torch.int32)
    states: list[Tensor] = []
    hooks = [
        block.register_forward_hook(lambda _, __, out: states.append(out)) for block in model.blocks
    ]

    def hidden(tokens_BN: Tensor) -> Tensor:
        states.clear()
        model(tokens_BN, packed)
        return torch.stack(states)

    with torch.no_grad():
        if packed is None:
            differs = hidden(tokens.repeat(n, 1)) != hidden(changed)
        else:
            before = hidden(tokens[None])
            differs = torch.cat([hidden(row[None]) != before for row in changed], 1)
    for hook in hooks:
        hook.remove()
    return differs.any(-1).transpose(1, 2)


def named(
    pattern: DilatedPattern, borders: Sequence[int], num_heads: int, num_layers: int
) -> Tensor:
    """(L, N, N) bool: whether query i has heard of position j after layer l, in each document. `reach` counts these
    positions (test_suggest.py)."""
    n = borders[-1]
    found = torch.zeros(num_layers, n, n, dtype=torch.bool)
    for start, stop in pairwise(borders):
        layers = islice(heard_after(pattern, stop - start, num_heads), num_layers)
        for layer, heard in enumerate(layers):
            found[layer, start:stop, start:stop] = heard
    return found


def model_of(case: Case, seed: int) -> LongNetLM:
    torch.manual_seed(seed)
    kind = LongNetConfig if case.is_causal else EncoderConfig
    sizes = {
        "num_layers": case.num_layers,
        "num_heads": case.num_heads,
        "embed_dim": 4 * case.num_heads,
    }
    config = kind(
        case.lengths, case.rates, vocab_size=VOCAB, phase=case.phase, heads=case.heads, **sizes
    )
    return LongNetLM(config).double()


def compare(case: Case, seed: int = 0) -> dict[str, int]:
    """How many of a model's (layer, query, token) triples differ between what moves and what reach names."""
    model = model_of(case, seed)
    moves = moved(model, case.borders, seed)
    reached = named(model.config.pattern, case.borders, case.num_heads, case.num_layers)
    return {
        "pairs": moves.numel(),
        "reached": int(reached.sum()),
        "moved_but_not_named": int((moves & ~reached).sum()),
        "named_but_not_moved": int((reached & ~moves).sum()),
    }


@given(patterns(HEADS, longest=N, windows=False), st.integers(1, 3), st.integers(0, N - 1))
@settings(max_examples=10, deadline=None)
def test_a_changed_token_moves_what_reach_names(pattern, layers, border):
    """Every hidden state of a float64 model, to the bit, and no other; also in packed documents."""
    rules = {"is_causal": pattern.is_causal, "phase": pattern.phase, "heads": pattern.heads}
    borders = (0, border, N) if border % 5 == 1 else (0, N)
    sizes = {"num_layers": layers, "num_heads": HEADS}
    found = compare(
        Case(pattern.segment_lengths, pattern.dilation_rates, borders, **rules, **sizes)
    )
    assert (found["moved_but_not_named"], found["named_but_not_moved"]) == (0, 0)
    assert found["pairs"] == layers * N**2


def test_another_reach_is_noticed():
    """Proof that the comparison sees a wrong name, and a state that does not move."""
    case = Case((4, N), (1, 4), (0, N), num_layers=2)
    model = model_of(case, 0)
    moves = moved(model, case.borders, 0)
    for lengths, rates in (((4, N), (1, 5)), ((5, N), (1, 4)), ((4,), (1,))):
        other = model_of(case._replace(lengths=lengths, rates=rates), 0).config.pattern
        assert not torch.equal(moves, named(other, case.borders, case.num_heads, case.num_layers))
