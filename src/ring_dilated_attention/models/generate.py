"""Drawing tokens from a language model, one after the other, with a cache of bounded size.

B batch, N positions, E embedding, V vocabulary.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, Protocol

import torch
from torch import Tensor

from ..pattern import is_integer
from ..run.cache import DilatedCache

STOPPED = -1
PREFILL_CHUNK = 4096


def is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


class LanguageModel(Protocol):
    """What is asked of a model."""

    head: Any

    def make_caches(self, batch: int, *, max_len: int | None = None, keep: int = 0) -> list[DilatedCache]: ...

    def append(self, tokens_BN: Tensor, caches: Sequence[DilatedCache], lengths: Tensor | None = None) -> Tensor: ...


@dataclass(frozen=True)
class Sampling:
    """How a token is drawn from logits."""

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int | None = None
    stop: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        if not is_number(self.temperature) or not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature={self.temperature!r} must be 0 (the likeliest token) or a positive number.")
        if self.top_k is not None and (not is_integer(self.top_k) or self.top_k < 1):
            raise ValueError(f"top_k={self.top_k!r} must be an integer of at least 1, or None for all tokens.")
        if self.top_p is not None and (not is_number(self.top_p) or not 0 < self.top_p <= 1):
            raise ValueError(f"top_p={self.top_p!r} must be above 0 and at most 1, or None for all tokens.")
        if self.seed is not None and not is_integer(self.seed):
            raise ValueError(f"seed={self.seed!r} must be an integer, or None to draw anew each time.")

    def generators(self, batch: int, device: torch.device) -> list[torch.Generator]:
        """One for each row, so that what a row draws does not depend on the others."""
        seed = int(torch.randint(2**62, ())) if self.seed is None else self.seed
        return [torch.Generator(device).manual_seed(seed + b) for b in range(batch)]

    def draw(self, logits_BV: Tensor, generators: Sequence[torch.Generator]) -> Tensor:
        """(B,) int64."""
        if self.temperature == 0:
            return logits_BV.argmax(-1)
        weights = self.weights(logits_BV)
        return torch.cat([torch.multinomial(row, 1, generator=g) for row, g in zip(weights, generators, strict=True)])

    def weights(self, logits_BV: Tensor) -> Tensor:
        """Probabilities (B, V) up to a factor; 0 for tokens that are not drawn."""
        falling, order = logits_BV.double().sort(dim=-1, descending=True, stable=True)
        falling = (falling - falling[:, :1]) / self.temperature  # the largest is 0: however cold, none is inf
        if self.top_k is not None:
            falling[:, self.top_k :] = -torch.inf
        falling = falling.softmax(-1)
        if self.top_p is not None:
            before = falling.cumsum(-1) - falling  # those that are likelier: are they enough without this one?
            falling = falling.masked_fill(before >= self.top_p, 0)
        return torch.zeros_like(falling).scatter(-1, order, falling)


@torch.no_grad()
def generate(
    model: LanguageModel,
    tokens: Tensor | Sequence[Sequence[int] | Tensor],
    max_new_tokens: int,
    sampling: Sampling,
    caches: Sequence[DilatedCache] | None,
) -> Iterator[Tensor]:
    """See `LongNetLM.generate`."""
    if not is_integer(max_new_tokens) or max_new_tokens < 0:
        raise ValueError(f"max_new_tokens={max_new_tokens!r} must be an integer of at least 0.")
    device = model.head.weight.device
    padded_BN, lengths = pad(tokens, device)
    if caches is None:
        caches = model.make_caches(len(lengths), max_len=max(lengths) + max_new_tokens)
    if max_new_tokens == 0:
        return
    hidden_BE = prefill(model, padded_BN, lengths, caches)
    generators = sampling.generators(len(lengths), device)
    stopped_B = torch.zeros(len(lengths), dtype=torch.bool, device=device)
    stop = torch.tensor(sorted(sampling.stop), dtype=torch.int64, device=device)
    for i in range(max_new_tokens):
        drawn_B = sampling.draw(model.head(hidden_BE), generators)
        yield drawn_B.masked_fill(stopped_B, STOPPED)
        if sampling.stop:
            stopped_B |= torch.isin(drawn_B, stop)
            if stopped_B.all():
                return
        if i + 1 < max_new_tokens:
            hidden_BE = model.append(drawn_B[:, None], caches)[:, 0]


def prefill(model: LanguageModel, tokens_BN: Tensor, lengths: Sequence[int], caches: Sequence[DilatedCache]) -> Tensor:
    """Append prompts of these lengths, chunk by chunk. The hidden state of each one's last token, (B, E)."""
    last: dict[int, Tensor] = {}
    for start in range(0, max(lengths), PREFILL_CHUNK):
        chunk_BN = tokens_BN[:, start : start + PREFILL_CHUNK]
        counts = [min(max(length - start, 0), chunk_BN.shape[1]) for length in lengths]
        alike = min(counts) == chunk_BN.shape[1]
        hidden_BNE = model.append(chunk_BN, caches, None if alike else torch.tensor(counts, device=chunk_BN.device))
        for b, count in enumerate(counts):
            if count and start + count == lengths[b]:
                last[b] = hidden_BNE[b, count - 1]
    return torch.stack([last[b] for b in range(len(lengths))])


def pad(tokens: Tensor | Sequence[Sequence[int] | Tensor], device: torch.device) -> tuple[Tensor, list[int]]:
    """Prompts, padded on the right to (B, N), and their lengths."""
    rows = [torch.as_tensor(row, device=device) for row in tokens]
    if not rows:
        raise ValueError("there is no prompt: pass tokens (batch, N), or a list of prompts.")
    for b, row in enumerate(rows):
        if row.dim() != 1 or not len(row) or row.is_floating_point():
            raise ValueError(
                f"prompt {b} has shape {tuple(row.shape)} and dtype {row.dtype}: a prompt is one or more integers. "
                "Pass tokens (batch, N), or a list of prompts."
            )
    lengths = [len(row) for row in rows]
    padded_BN = torch.zeros(len(rows), max(lengths), dtype=torch.int64, device=device)
    for b, row in enumerate(rows):
        padded_BN[b, : lengths[b]] = row
    return padded_BN, lengths
