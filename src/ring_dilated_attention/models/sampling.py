"""Draws tokens from a language model by caches. Shape suffixes: B batch, N positions, E embedding, V vocabulary."""

import math
import reprlib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ..layers.checks import is_integral
from ..pattern import is_finite_number, is_integer
from ..plan.cache_plan import check_append
from ..run.dilated_cache import DilatedCache

if TYPE_CHECKING:
    from .longnet import LongNetLM

STOPPED = -1
PREFILL_SLICE = 4096


@dataclass(frozen=True)
class Sampling:
    """How a token is drawn from logits."""

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int | None = None
    stop: Collection[int] = ()

    def __post_init__(self) -> None:
        if not is_finite_number(self.temperature) or self.temperature < 0:
            raise ValueError(f"temperature={self.temperature!r} must be 0 (the likeliest token) or a positive number.")
        if self.top_k is not None and (not is_integer(self.top_k) or self.top_k < 1):
            raise ValueError(f"top_k={self.top_k!r} must be an integer of at least 1, or None for all tokens.")
        if self.top_p is not None and (not is_finite_number(self.top_p) or not 0 < self.top_p <= 1):
            raise ValueError(f"top_p={self.top_p!r} must be above 0 and at most 1, or None for all tokens.")
        if self.seed is not None and not (is_integer(self.seed) and -(2**63) <= self.seed < 2**63):
            raise ValueError(f"seed={self.seed!r} must be an integer of 64 bits, or None to draw anew each time.")
        is_single = getattr(self.stop, "ndim", 1) == 0  # a tensor or array of 0 dims is a Collection, too
        if is_single or not isinstance(self.stop, Collection) or not all(map(is_integer, self.stop)):
            raise ValueError(f"stop={self.stop!r} must be integers, the tokens that end a row, as (10,); () for none.")

    def generators(self, batch: int, device: torch.device) -> list[torch.Generator]:
        """One generator for each row, so that what a row draws does not depend on the others."""
        seed = int(torch.randint(2**62, ())) if self.seed is None else int(self.seed)
        return [torch.Generator(device).manual_seed(seed + b) for b in range(batch)]

    def draw(self, logits_BV: Tensor, generators: Sequence[torch.Generator]) -> Tensor:
        """(B,) int64. A ValueError for a row with nothing to draw from. Tokens with a logit of -inf are not drawn."""
        largest_B = logits_BV.amax(-1)  # NaN if any is
        if not largest_B.isfinite().all():
            row, largest = next((b, x) for b, x in enumerate(largest_B.tolist()) if not math.isfinite(x))
            raise ValueError(
                f"no token can be drawn for row {row}: the largest of its logits is {largest}. Look for NaN and inf in "
                "the parameters and caches; bfloat16 and float32 hold larger numbers than float16."
            )
        if self.temperature == 0:
            return logits_BV.argmax(-1)
        weights = self.weights(logits_BV)
        return torch.cat([torch.multinomial(row, 1, generator=g) for row, g in zip(weights, generators, strict=True)])

    def weights(self, logits_BV: Tensor) -> Tensor:
        """Probabilities (B, V) up to a factor; 0 for tokens that are not drawn."""
        falling, order = logits_BV.double().sort(dim=-1, descending=True, stable=True)
        falling = (falling - falling[:, :1]) / float(self.temperature)  # the largest is 0, so that none becomes inf
        if self.top_k is not None:
            falling[:, self.top_k :] = -torch.inf
        falling = falling.softmax(-1)
        if self.top_p is not None:
            before = falling.cumsum(-1) - falling  # the probability of all likelier tokens
            falling = falling.masked_fill(before >= float(self.top_p), 0)
        return torch.zeros_like(falling).scatter(-1, order, falling)


@torch.no_grad()
def generate(
    model: "LongNetLM",
    tokens: Tensor | Sequence[Sequence[int] | Tensor],
    max_new_tokens: int,
    sampling: Sampling,
    caches: Sequence[DilatedCache] | None,
) -> Iterator[Tensor]:
    """See `LongNetLM.generate`."""
    if not is_integer(max_new_tokens) or max_new_tokens < 0:
        raise ValueError(f"max_new_tokens={max_new_tokens!r} must be an integer of at least 0.")
    device, vocab_size = model.head.weight.device, model.head.weight.shape[0]
    for token in sampling.stop:
        if not 0 <= token < vocab_size:
            raise ValueError(f"stop has the token {token}, but the vocabulary goes from 0 to {vocab_size - 1}.")
    padded_BN, lengths = pad(tokens, vocab_size, device)
    if caches is None:
        caches = model.make_caches(len(lengths), max_len=max(lengths) + max_new_tokens)
    if not isinstance(caches, Sequence) or not all(isinstance(cache, DilatedCache) for cache in caches):
        raise ValueError(f"caches={reprlib.repr(caches)} must be those of make_caches, one for each layer.")
    for cache in caches:  # before any prompt is appended
        if cache.batch == len(lengths):  # the layer refuses another batch size
            check_append(cache.plan, cache.position.tolist(), lengths)
    hidden_BE = prefill(model, padded_BN, lengths, caches)
    generators = sampling.generators(len(lengths), device)
    stopped_B = torch.zeros(len(lengths), dtype=torch.bool, device=device)
    stop = torch.tensor([int(token) for token in sampling.stop], dtype=torch.int64, device=device)
    for i in range(max_new_tokens):
        logits_BV = model.head(hidden_BE).masked_fill(stopped_B[:, None], 0)  # any finite number would do
        drawn_B = sampling.draw(logits_BV, generators)
        yield drawn_B.masked_fill(stopped_B, STOPPED)
        counts_B = None
        if len(stop):
            stopped_B |= torch.isin(drawn_B, stop)
            if stopped_B.all():
                return
            counts_B = (~stopped_B).long()  # a row that has stopped appends nothing
        if i + 1 < max_new_tokens:
            hidden_BE = model.append(drawn_B[:, None], caches, counts_B)[:, 0]


def prefill(model: "LongNetLM", tokens_BN: Tensor, lengths: Sequence[int], caches: Sequence[DilatedCache]) -> Tensor:
    """Append prompts of these lengths, slice by slice. Returns the hidden state of each prompt's last token, (B, E)."""
    last: dict[int, Tensor] = {}
    for start in range(0, max(lengths), PREFILL_SLICE):
        slice_BN = tokens_BN[:, start : start + PREFILL_SLICE]
        counts = [min(max(length - start, 0), slice_BN.shape[1]) for length in lengths]
        alike = min(counts) == slice_BN.shape[1]
        hidden_BNE = model.append(slice_BN, caches, None if alike else torch.tensor(counts, device=slice_BN.device))
        for b, count in enumerate(counts):
            if count and start + count == lengths[b]:
                last[b] = hidden_BNE[b, count - 1]
    return torch.stack([last[b] for b in range(len(lengths))])


def pad(
    tokens: Tensor | Sequence[Sequence[int] | Tensor], vocab_size: int, device: torch.device
) -> tuple[Tensor, list[int]]:
    """Prompts, padded on the right to (B, N), and their lengths."""
    remedy = "Pass tokens (batch, N), or a list of prompts. A prompt of bytes is list(prompt)."
    try:
        prompts = [] if isinstance(tokens, (str, bytes)) else list(tokens)
    except TypeError:
        prompts = []
    if not prompts:
        raise ValueError(f"there is no prompt in tokens={reprlib.repr(tokens)}. {remedy}")
    rows = []
    for b, prompt in enumerate(prompts):
        try:
            row = torch.as_tensor(prompt, device=device)
        except (TypeError, ValueError, RuntimeError):
            row = torch.empty(0)
        if row.dim() != 1 or not len(row) or not is_integral(row):
            raise ValueError(f"prompt {b} is {reprlib.repr(prompt)}, and not one or more integers. {remedy}")
        low, high = row.long().aminmax()
        if low < 0 or high >= vocab_size:
            raise ValueError(f"prompt {b} has tokens from {low} to {high}, but vocab_size={vocab_size}.")
        rows.append(row.long())
    return pad_sequence(rows, batch_first=True), [len(row) for row in rows]
