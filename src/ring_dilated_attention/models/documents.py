"""Where packed documents begin and end in a sequence, and which rows of the sequence each rank holds.

Once per forward the ranks agree on the documents and on the rows. All layers of the model then use the result.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..attention.validate import is_integral
from ..plan.sharding import Shard, Span, check_documents, first_rows
from ..ranks.call import validate_cu_seqlens
from ..ranks.context import ContextParallel
from ..ranks.ranks import ALONE


@dataclass(frozen=True)
class Documents:
    """Packed documents in a sequence that ranks share.

    borders: the documents' borders in the whole sequence. shards: the shards of all ranks. shard: this rank's shard.
    """

    borders: tuple[int, ...]
    shards: tuple[Shard, ...]
    shard: Shard

    @property
    def last_rows(self) -> list[int]:
        """For each document that ends in this rank's shard: the index of the document's last row in the shard."""
        rows = []
        for row, (start, stop) in zip(first_rows(self.shard), self.shard, strict=False):
            for end in self.borders:
                if start < end <= stop:
                    rows.append(row + end - 1 - start)
        return rows


def agree_on_documents(
    call: str,
    x: Any,
    *,
    parallel: ContextParallel | None = None,
    cu_seqlens: Tensor | None = None,
    fields: dict[str, object] | None = None,
    failure: str | None = None,
) -> Documents:
    """Agree with the other ranks on the documents of a sequence, and return the documents. All ranks must call this.

    Args:
        call: the name of the model or function that was called, for errors.
        x: this rank's rows, (batch, N, ...). Not read if `failure` is given.
        cu_seqlens: the borders of packed documents in the whole sequence, for a batch of 1.
        fields: other values that must be the same on all ranks, by name.
        failure: why this rank refuses the call, or None if the rank accepts the call.

    Raises:
        ValueError: on every rank, if one rank refuses the call, if the fields of two ranks differ, or if the borders do
            not fit the number of rows.
    """
    if not (parallel is None or isinstance(parallel, ContextParallel)):
        raise ValueError(f"parallel must be a ContextParallel or None, got {parallel!r}.")
    batch, num_rows = (0, 0) if failure else x.shape[:2]
    packed = None
    if cu_seqlens is not None and failure is None:
        try:
            validate_cu_seqlens(cu_seqlens, batch)
            packed = cu_seqlens.tolist()
        except ValueError as error:
            failure = str(error)
    agreed = {"call": call, "batch": batch, "cu_seqlens": packed, **(fields or {})}
    ranks = ALONE if parallel is None else parallel.ranks
    lengths = ranks.handshake(num_rows, agreed, failure)
    total = sum(lengths)
    if packed is not None:
        check_documents(packed, total)
        borders = tuple(packed)
    else:
        borders = (0, total) if total else (0,)
    if parallel is None:
        # Do not call `ranks.shards`, because torch.compile would warn that it uses an lru_cache.
        shards: tuple[Shard, ...] = ((Span(0, total),) if total else (),)
    else:
        shards = ranks.shards(lengths, None if packed is None else borders)
    return Documents(borders, shards, shards[ranks.rank])


def why_not_dense(**tensors: Any) -> str | None:
    """The reason why an argument is refused, with its name, or None if all arguments are dense tensors with data."""
    for name, x in tensors.items():
        if not isinstance(x, Tensor):
            return f"{name} must be a tensor, got {type(x).__name__}"
        if x.layout != torch.strided or x.is_meta:
            return f"{name} have {x.layout} on {x.device}: pass a dense tensor of numbers"
    return None


def why_no_tokens(tokens_BN: Any, vocab_size: int) -> str | None:
    """Why a model cannot take these tokens, or None if it can.

    Tokens must be integers from 0 to vocab_size - 1.
    """
    if not isinstance(tokens_BN, Tensor):
        return f"tokens must be a tensor of integers (batch, N), got {type(tokens_BN).__name__}"
    if tokens_BN.dim() != 2 or not is_integral(tokens_BN):
        return f"tokens have shape {tuple(tokens_BN.shape)} and dtype {tokens_BN.dtype}: pass integers (batch, N)"
    # Skip tokens on a GPU, because the CPU would have to wait for the GPU. torch's embedding kernel checks such tokens.
    if tokens_BN.device.type == "cpu" and tokens_BN.numel() and not torch.compiler.is_compiling():
        low, high = tokens_BN.long().aminmax()  # torch has no aminmax of uint16
        if low < 0 or high >= vocab_size:
            return f"tokens from {low} to {high}, but {vocab_size=}"
    return None
