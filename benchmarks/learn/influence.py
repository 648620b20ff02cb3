"""Influence equals reach: in random float64 models, the hidden states that a changed token moves are those that `reach`
names, and no other."""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from ring_dilated_attention.forecast.reach import every_query
from ring_dilated_attention.models.longnet import LongNetLM
from ring_dilated_attention.models.longnet_config import LongNetConfig
from ring_dilated_attention.pattern import DilatedPattern

from ..record import branches, markdown
from .kept import Row, Run

SUMMARY = "which hidden states a changed token moves, beside those that reach names"
VOCAB = 11


class EncoderConfig(LongNetConfig):
    """The same model over a pattern that is not causal."""

    @property
    def pattern(self) -> DilatedPattern:
        return DilatedPattern(self.segment_lengths, self.dilation_rates, phase=self.phase, heads=self.heads)


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


CASES = (
    Case((8, 96), (1, 4)),
    Case((8, 96), (1, 4), is_causal=False),
    Case((8, 96), (1, 8)),  # heads leave out half of the phases
    Case((8, 96), (1, 8), is_causal=False, phase="blocked"),
    Case((8, 16, 32, 64, 96), (1, 2, 4, 8, 16)),
    Case((8, 16, 32, 64, 96), (1, 2, 4, 8, 16), is_causal=False),
    Case((8, 16, 32, 64, 96), (1, 2, 4, 8, 16), phase="blocked", num_heads=6),
    Case((12, 96), (1, 3)),
    Case((24, 32), (1, 1)),
    Case((16, 96), (2, 5), is_causal=False),
    Case((16, 96), (2, 4), heads="split"),
    Case((8, 32, 96), (1, 4, 6), heads="split", is_causal=False),
    Case((16,), (1,)),
    Case((96,), (1,), num_layers=2),
    Case((96,), (1,), is_causal=False, num_layers=1),
    Case((8, 96), (1, 4), borders=(0, 25, 64)),
    Case((8, 16, 32, 64), (1, 2, 4, 8), borders=(0, 1, 28, 64), is_causal=False),
    Case((16, 48), (1, 3), borders=(0, 34, 64), phase="blocked"),
    Case((32, 96), (1, 4), num_layers=4, num_heads=2),
    Case((32, 96), (1, 16), num_layers=4, is_causal=False),
)
FULL, QUICK = CASES, (CASES[2]._replace(borders=(0, 24)), CASES[16]._replace(borders=(0, 1, 12, 24)))


def moved(model: LongNetLM, borders: Sequence[int], seed: int) -> Tensor:
    """(L, N, N) bool: whether the hidden state of query i after layer l has other bits if token j is another one.

    Each changed sequence is run in the same place of a batch as the sequence it is compared with, so that what does not
    depend on the token is computed by the same operations. Packed documents have no batch: one forward for each token.
    """
    generator, n = torch.Generator().manual_seed(seed), borders[-1]
    tokens = torch.randint(VOCAB, (n,), generator=generator)
    changed = tokens.repeat(n, 1)
    changed += torch.eye(n, dtype=torch.int64) * torch.randint(1, VOCAB, (n, 1), generator=generator)
    changed %= VOCAB
    packed = None if len(borders) == 2 else torch.tensor(borders, dtype=torch.int32)
    states: list[Tensor] = []
    hooks = [block.register_forward_hook(lambda _, __, out: states.append(out)) for block in model.blocks]

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


def named(pattern: DilatedPattern, borders: Sequence[int], num_heads: int, num_layers: int) -> Tensor:
    """(L, N, N) bool: whether query i has heard of position j after layer l, by `every_query` in each document."""
    n = borders[-1]
    found = torch.zeros(num_layers, n, n, dtype=torch.bool)
    for start, stop in pairwise(borders):
        layers = list(every_query(pattern, stop - start, num_heads))
        for layer in range(num_layers):
            for query, heard in enumerate(layers[min(layer, len(layers) - 1)]):
                row = [bool(heard >> key & 1) for key in range(stop - start)]
                found[layer, start + query, start:stop] = torch.tensor(row)
    return found


def model_of(case: Case, seed: int) -> LongNetLM:
    torch.manual_seed(seed)
    kind = LongNetConfig if case.is_causal else EncoderConfig
    sizes = {"num_layers": case.num_layers, "num_heads": case.num_heads, "embed_dim": 4 * case.num_heads}
    config = kind(case.lengths, case.rates, vocab_size=VOCAB, phase=case.phase, heads=case.heads, **sizes)
    return LongNetLM(config).double()


def compare(case: Case, seed: int = 0) -> Row:
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


def runs(cases: Sequence[Case]) -> list[Run]:
    found = []
    for case in cases:
        row = {"segment_lengths": case.lengths, "dilation_rates": case.rates, "is_causal": case.is_causal}
        name = f"{branches(row)} {case.phase} {case.heads}, {case.num_layers} layers, {case.borders}"
        found.append(Run(name, case._asdict(), lambda case=case: compare(case)))  # type: ignore[misc]
    return found


def table(rows: list[Row]) -> str:
    headers = (
        "pattern",
        "phases",
        "heads",
        "layers",
        "documents",
        "pairs",
        "reached",
        "moved, not named",
        "named, not moved",
    )
    lines = []
    for row in rows:
        case = Case(**row["settings"])
        pattern = {"segment_lengths": case.lengths, "dilation_rates": case.rates, "is_causal": case.is_causal}
        lines.append(
            (
                branches(pattern),
                case.phase if case.heads == "all" else "split",
                str(case.num_heads),
                str(case.num_layers),
                " + ".join(str(stop - start) for start, stop in pairwise(case.borders)),
                f"{row['pairs']:,}",
                f"{row['reached'] / row['pairs']:.1%}",
                str(row["moved_but_not_named"]),
                str(row["named_but_not_moved"]),
            )
        )
    pairs = sum(row["pairs"] for row in rows)
    wrong = sum(row["moved_but_not_named"] + row["named_but_not_moved"] for row in rows)
    said = (
        f"{len(rows)} random models in float64. A pair is a query's hidden state after a layer, and a token that is "
        f"changed. In {wrong:,} of {pairs:,} pairs what moves, to the bit, differs from what reach names."
    )
    return f"{said}\n\n{markdown(headers, lines)}"
