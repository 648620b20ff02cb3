"""Draws tokens from a language model. The model keeps keys and values of earlier tokens in caches.

Shape suffixes: B batch, N positions, E embedding, V vocabulary, S tokens that end a row.
"""

import math
import reprlib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from ..attention.validate import is_integral
from ..pattern import is_finite_number, is_integer
from ..plan.cache_plan import check_append
from ..run.dilated_cache import DilatedCache
from .longnet_config import LongNetConfig

STOPPED = -1
PREFILL_SLICE = 4096


class LanguageModel(Protocol):
    """What `generate` reads of a `LongNetLM`."""

    config: LongNetConfig
    head: nn.Linear

    def make_caches(self, batch: int, *, max_len: int) -> list[DilatedCache]: ...
    def append(self, *arguments: Any) -> Tensor: ...


@dataclass(frozen=True)
class Sampling:
    """How a token is drawn from logits."""

    temperature: float = 1.0
    seed: int | None = None

    def __post_init__(self) -> None:
        if not is_finite_number(self.temperature) or self.temperature < 0:
            raise ValueError(
                f"temperature={self.temperature!r} must be 0 (the likeliest token) or a positive number."
            )
        if self.seed is not None and (
            not is_integer(self.seed) or not -(2**63) <= self.seed < 2**63
        ):
            raise ValueError(
                f"seed={self.seed!r} must be an integer of 64 bits, or None to draw anew each time."
            )

    def generators(self, batch: int, device: torch.device) -> list[torch.Generator]:
        """One generator for each row, so that the tokens drawn for a row do not depend on the other rows."""
        seed = int(torch.randint(2**62, ())) if self.seed is None else int(self.seed)
        return [torch.Generator(device).manual_seed(seed + b) for b in range(batch)]

    def draw(self, logits_BV: Tensor, generators: Sequence[torch.Generator]) -> Tensor:
        """Draw a token for each row, (B,) int64. Tokens with a logit of -inf are not drawn.

        Raises ValueError for a row in which no token can be drawn.
        """
        # Check only the largest logit of each row: `amax` is NaN if any logit of the row is NaN.
        for row, largest in enumerate(logits_BV.amax(-1).tolist()):
            if not math.isfinite(largest):
                raise ValueError(
                    f"no token can be drawn for row {row}: the largest of its logits is {largest}. Look for NaN and "
                    "inf in the parameters and caches; bfloat16 and float32 hold larger numbers than float16."
                )
        if self.temperature == 0:
            return logits_BV.argmax(-1)
        drawn = []
        for weights_V, generator in zip(self.weights(logits_BV), generators, strict=True):
            drawn.append(torch.multinomial(weights_V, 1, generator=generator))
        return torch.cat(drawn)

    def weights(self, logits_BV: Tensor) -> Tensor:
        """Probabilities (B, V), in float64."""
        wide_BV = logits_BV.double()
        # Subtract the largest logit, so that all logits are at most 0: otherwise a logit that is divided by a small
        # temperature could become inf.
        shifted_BV = wide_BV - wide_BV.amax(-1, keepdim=True)
        return (shifted_BV / float(self.temperature)).softmax(-1)


@torch.no_grad()
def generate(
    model: LanguageModel,
    tokens: Tensor | Sequence[Sequence[int] | Tensor],
    max_new_tokens: int,
    sampling: Sampling,
    stop: Collection[int],
    caches: Sequence[DilatedCache] | None,
) -> Iterator[Tensor]:
    """See `LongNetLM.generate`.

    All arguments are checked before any prompt is appended to the caches. Then each step makes logits from the hidden
    state of each row's last token, draws the row's next token, and appends this token to the caches.
    """
    if not is_integer(max_new_tokens) or max_new_tokens < 0:
        raise ValueError(f"max_new_tokens={max_new_tokens!r} must be an integer of at least 0.")
    device, vocab_size = model.head.weight.device, model.config.vocab_size
    if not isinstance(stop, Collection) or not all(
        is_integer(token) and 0 <= token < vocab_size for token in stop
    ):
        raise ValueError(
            f"stop={stop!r} must be the tokens that end a row, integers from 0 to {vocab_size - 1}; () for none."
        )
    prompts = prompts_of(tokens, vocab_size, device)
    lengths = [len(prompt) for prompt in prompts]
    batch = len(prompts)
    if caches is None:
        caches = model.make_caches(batch, max_len=max(lengths) + max_new_tokens)
    for cache in caches:  # check all caches before any prompt is appended
        if cache.batch == batch:  # `model.append` refuses caches of another batch size
            check_append(cache.plan, cache.position.tolist(), lengths)
    hidden_BE = prefill(model, pad_sequence(prompts, batch_first=True), lengths, caches)
    generators = sampling.generators(batch, device)
    has_stopped_B = torch.zeros(batch, dtype=torch.bool, device=device)
    stop_S = torch.tensor([int(token) for token in stop], dtype=torch.int64, device=device)
    for step in range(max_new_tokens):
        # Set the logits of rows that have stopped to 0, because these logits may be NaN, and `draw` refuses NaN.
        logits_BV = model.head(hidden_BE).masked_fill(has_stopped_B[:, None], 0)
        drawn_B = sampling.draw(logits_BV, generators)
        yield drawn_B.masked_fill(has_stopped_B, STOPPED)
        counts_B = None
        if len(stop_S):
            has_stopped_B |= torch.isin(drawn_B, stop_S)
            if has_stopped_B.all():
                return
            counts_B = (~has_stopped_B).long()  # a row that has stopped appends nothing
        if step + 1 < max_new_tokens:
            hidden_BE = model.append(drawn_B[:, None], caches, counts_B)[:, 0]


def prefill(
    model: LanguageModel, tokens_BN: Tensor, lengths: Sequence[int], caches: Sequence[DilatedCache]
) -> Tensor:
    """Append prompts to the caches, PREFILL_SLICE tokens at a time.

    lengths: the number of tokens of each prompt. The later tokens of the prompt's row in tokens_BN are padding.

    Returns the hidden state of each prompt's last token, (B, E).
    """
    last: dict[int, Tensor] = {}
    for start in range(0, max(lengths), PREFILL_SLICE):
        slice_BN = tokens_BN[:, start : start + PREFILL_SLICE]
        stop = start + slice_BN.shape[1]
        counts_B = None
        if min(lengths) < stop:  # true if some prompts end in this slice, or before it
            counts = [min(max(length, start), stop) - start for length in lengths]
            counts_B = torch.tensor(counts, device=tokens_BN.device)
        hidden_BNE = model.append(slice_BN, caches, counts_B)
        for b, length in enumerate(lengths):
            if start < length <= stop:
                last[b] = hidden_BNE[b, length - 1 - start]
    return torch.stack([last[b] for b in range(len(lengths))])


def prompts_of(
    tokens: Tensor | Sequence[Sequence[int] | Tensor], vocab_size: int, device: torch.device
) -> list[Tensor]:
    """The prompts as int64 tensors of one dim. Raises ValueError for an empty prompt, and for tokens out of range."""
    remedy = "Pass tokens (batch, N), or a list of prompts. A prompt of bytes is list(prompt)."
    if isinstance(tokens, (str, bytes)) or len(tokens) == 0:
        raise ValueError(f"there is no prompt in tokens={reprlib.repr(tokens)}. {remedy}")
    tensors = []
    for b, prompt in enumerate(tokens):
        tensor = torch.as_tensor(prompt, device=device)
        if tensor.dim() != 1 or not len(tensor) or not is_integral(tensor):
            raise ValueError(
                f"prompt {b} is {reprlib.repr(prompt)}, and not one or more integers. {remedy}"
            )
        tensor = tensor.long()
        low, high = tensor.aminmax()
        if low < 0 or high >= vocab_size:
            raise ValueError(
                f"prompt {b} has tokens from {low} to {high}, but vocab_size={vocab_size}."
            )
        tensors.append(tensor)
    return tensors
