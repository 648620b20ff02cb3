"""Cuts one sample of a data loader into shards. Every rank has the sample, or one rank sends the others their rows."""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..pattern import is_integer
from ..plan.sharding import Borders, Shard, documents_of, shard_length
from .call import borders_of
from .ranks import Ranks
from .reshard import own_rows

BORDERS, POSITIONS = "cu_seqlens", "positions"
Batch = Mapping[str, Tensor]
Layouts = dict[str, tuple[list[int], str]]  # the shape and the dtype of each tensor of a batch


def shard_batch(ranks: Ranks, batch: Batch | None, source: int | None) -> dict[str, Tensor]:
    """This rank's rows of a batch. `ContextParallel.shard_batch` describes it."""
    ranks.check_all_here("shard_batch")
    with ranks.refusing():
        _check_batch(batch, ranks, source)
        tensors = batch or {}
        documents = borders_of(tensors.get(BORDERS))
        layouts: Layouts = {name: (list(x.shape), str(x.dtype)) for name, x in tensors.items()}
        fingerprints: dict[str, int] = {}
        if source is None:
            fingerprints = {name: fingerprint(x) for name, x in tensors.items()}
    if source is None:
        _compare_samples(ranks, layouts, fingerprints)
    else:
        layouts, documents = _send_layouts(ranks, layouts, documents, source)

    # Take the number of positions from the first tensor that is not "cu_seqlens": all such tensors have the same
    # number.
    shape = next(shape for name, (shape, _) in layouts.items() if name != BORDERS)
    lengths = ranks.lengths_of(shape[_position_dim(shape)], documents)
    shards = ranks.note_cut(lengths, documents)
    local: dict[str, Tensor] = {}
    for name, (shape, dtype) in layouts.items():
        if source is None:
            local[name] = _rows(name, tensors[name], shards[ranks.rank])
        else:
            whole = tensors[name] if ranks.rank == source else None
            local[name] = _send_rows(ranks, name, whole, shape, dtype, shards, source)
    if POSITIONS not in local:
        local[POSITIONS] = ranks.positions(lengths, documents)
    return local


def _compare_samples(ranks: Ranks, layouts: Layouts, fingerprints: dict[str, int]) -> None:
    """Raise ValueError on every rank unless all ranks passed the same sample."""
    fields: dict[str, object] = {
        "call": "shard_batch",
        "shapes of the batch": layouts,
        "samples": fingerprints,
    }
    try:
        ranks.agree(0, fields)
    except ValueError as error:
        if "ranks disagree on samples" not in str(error):
            raise
        raise ValueError(
            f"{error} The numbers are hashes: ranks that share a sequence were given different samples. Give all of "
            "them the same sample (a DistributedSampler with num_replicas and rank of the data-parallel axis, or "
            "shuffle=False and one seed; under transformers' Trainer, SameSample). Or let one rank send the others "
            "their rows: shard_batch(batch, source=0)."
        ) from error


def fingerprint(x: Tensor) -> int:
    """A 64-bit hash of a tensor's bytes. Different bytes hardly ever have the same hash."""
    raw = x.detach().contiguous().flatten().view(torch.uint8)
    words = torch.nn.functional.pad(raw, (0, -raw.numel() % 8)).view(torch.int64)
    # `place` has a different number for each 64-bit word: (index of the word + 1) times an odd factor, modulo 2^64.
    place = torch.arange(1, words.numel() + 1, device=x.device) * -7046029254386353131
    mixed = (words ^ (words >> 31)) * -4417276706812531889 + place
    return int(((mixed ^ (mixed >> 29)) * (place | 1)).sum())


def _check_batch(batch: Any, ranks: Ranks, source: int | None) -> None:
    """Raise ValueError for a batch that cannot be cut."""
    if source is not None and (not is_integer(source) or source not in range(ranks.world_size)):
        raise ValueError(
            f"source must be a rank from 0 to {ranks.world_size - 1} or None, got {source!r}."
        )
    if batch is None and source in (None, ranks.rank):
        raise ValueError("shard_batch needs a batch, got None.")
    if batch is None:
        return
    if not isinstance(batch, Mapping):
        raise ValueError(f"a batch must be a dict of tensors, got {type(batch).__name__}.")
    if not batch:
        raise ValueError(
            f"a batch must be a dict of tensors, got {type(batch).__name__} without entries."
        )
    lengths = {}
    for name, x in batch.items():
        if not isinstance(name, str):
            raise ValueError(f"the names of a batch must be strings, got {name!r}.")
        if not isinstance(x, Tensor) or not x.dim():
            got = f"one of shape {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
            raise ValueError(
                f"batch[{name!r}] must be a tensor (N,) or (B, N, ...), got {got}. Leave out what is not per position."
            )
        if x.layout != torch.strided or x.is_meta:
            raise ValueError(
                f"batch[{name!r}] must be a dense tensor with memory, got {x.layout} on {x.device}."
            )
        if name != BORDERS:
            lengths[name] = x.shape[_position_dim(x.shape)]
    if not lengths:
        raise ValueError(
            "the tensors of a batch must have the same number of positions, but none of them has positions."
        )
    if len(set(lengths.values())) != 1:
        listed = ", ".join(f"{name} has {length}" for name, length in lengths.items())
        raise ValueError(
            f"the tensors of a batch must have the same number of positions, but {listed}. What is not per position, "
            "such as a label of each recording, needs no cutting: leave it out, and use it on every rank as it is."
        )
    seq_len = max(lengths.values())
    documents = documents_of(borders_of(batch.get(BORDERS)), seq_len)
    ranks.lengths_of(seq_len, documents)  # raises ValueError if the sequence cannot be cut


def _position_dim(shape: Sequence[int]) -> int:
    return min(1, len(shape) - 1)


def _rows(name: str, x: Tensor, shard: Shard) -> Tensor:
    return x if name == BORDERS else own_rows(x, shard, _position_dim(x.shape))


def _send_layouts(
    ranks: Ranks, layouts: Layouts, documents: Borders, source: int
) -> tuple[Layouts, Borders]:
    """Send every rank the source's layouts (shape and dtype of each tensor) and its borders of documents. Returns
    layouts and borders."""
    text = b""
    if ranks.rank == source:
        text = json.dumps([layouts, documents]).encode()
    sizes = ranks.agree(len(text), {"call": "shard_batch", "source": source})
    with ranks.all_or_none():
        texts = ranks.gather(torch.tensor(list(text), dtype=torch.uint8), sizes, 0, "shard_batch")
    layouts, borders = json.loads(bytes(texts[source].tolist()).decode())
    return layouts, borders and tuple(borders)


def _send_rows(
    ranks: Ranks,
    name: str,
    whole: Tensor | None,
    shape: Sequence[int],
    dtype: str,
    shards: Sequence[Shard],
    source: int,
) -> Tensor:
    """This rank's rows of one tensor of the batch. The source rank has the tensor, and sends each rank only its rows.

    whole: the whole tensor on the source, None on other ranks. shape, dtype: the shape and dtype of the whole tensor.
    """
    like = torch.empty(0, dtype=getattr(torch, dtype.removeprefix("torch.")))
    local_shape = list(shape)
    if name != BORDERS:
        local_shape[_position_dim(shape)] = shard_length(shards[ranks.rank])
    sizes = [0] * ranks.world_size
    sizes[source] = math.prod(local_shape)
    rows_by_rank = [like] * ranks.world_size
    with ranks.all_or_none():
        if whole is not None:
            rows_by_rank = [_rows(name, whole, shard).flatten().cpu() for shard in shards]
        return ranks.scatter(rows_by_rank, sizes, like, "shard_batch")[source].view(local_shape)
