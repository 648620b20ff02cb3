"""Cuts one sample of a data loader into shards. Every rank has the sample, or one rank sends the others their rows."""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..pattern import is_integer
from ..plan.sharding import Shard, check_documents, shard_length
from .call import borders_of
from .origin import remember
from .ranks import Ranks
from .reshard import own_rows

BORDERS, POSITIONS = "cu_seqlens", "positions"
Batch = Mapping[str, Tensor]


def shard_batch(ranks: Ranks, batch: Batch | None, source: int | None) -> dict[str, Tensor]:
    """As `ContextParallel.shard_batch`."""
    ranks.check_all_here("shard_batch")
    with ranks.refusing():
        _check(batch, ranks, source)
        given = batch or {}
        described: dict[str, Any] = {name: [list(x.shape), str(x.dtype)] for name, x in given.items()}
        if source is not None and BORDERS in given:
            described[BORDERS].append(given[BORDERS].tolist())
        samples = {name: fingerprint(x) for name, x in given.items()} if source is None else {}
    if source is None:
        _agree_on(ranks, described, samples)
    else:
        described = _told(ranks, described, source)
    told = described.get(BORDERS)
    documents = borders_of(given.get(BORDERS)) if source is None else told and tuple(told[2])
    length = next(shape[dim] for name, (shape, *_) in described.items() if (dim := _dim(name, shape)) is not None)
    lengths = ranks.lengths_of(length, documents)
    shards = ranks.note_cut(lengths, documents)
    local: dict[str, Tensor] = {}
    for name, (shape, dtype, *_) in described.items():
        if source is None:
            local[name] = _rows(given[name], shards[ranks.rank], _dim(name, shape))
        else:
            whole = given[name] if ranks.rank == source else None
            local[name] = _dealt(ranks, whole, name, shape, dtype, shards, source)
    if POSITIONS not in local:
        local[POSITIONS] = ranks.positions(lengths, documents)
    if len(shards) > 1:
        for name in local.keys() - {BORDERS}:
            remember(local[name], ranks, shards)
    return local


def _agree_on(ranks: Ranks, described: dict[str, Any], samples: dict[str, int]) -> None:
    """Raise ValueError on every rank unless all were given the same sample."""
    try:
        ranks.agree(0, {"call": "shard_batch", "shapes of the batch": described, "samples": samples}, None)
    except ValueError as error:
        if "ranks disagree on samples" not in str(error):
            raise
        raise ValueError(
            f"{error} The numbers are fingerprints: ranks that share a sequence were given different samples. Give "
            "all of them the same one (a DistributedSampler with num_replicas and rank of the data-parallel axis, "
            "or shuffle=False and one seed; under transformers' Trainer, SameSample), or let one rank deal it out: "
            "shard_batch(batch, source=0)."
        ) from error


def fingerprint(x: Tensor) -> int:
    """A 64-bit hash of a tensor's bytes. Different bytes hardly ever have the same hash."""
    raw = x.detach().contiguous().flatten().view(torch.uint8)
    words = torch.nn.functional.pad(raw, (0, -raw.numel() % 8)).view(torch.int64)
    place = torch.arange(1, words.numel() + 1, device=x.device) * -7046029254386353131  # odd factor: no two are equal
    mixed = (words ^ (words >> 31)) * -4417276706812531889 + place
    return int(((mixed ^ (mixed >> 29)) * (place | 1)).sum())


def _check(batch: Any, ranks: Ranks, source: int | None) -> None:
    """Raise ValueError for a batch that cannot be cut."""
    if source is not None and (not is_integer(source) or source not in range(ranks.world_size)):
        raise ValueError(f"source must be a rank from 0 to {ranks.world_size - 1} or None, got {source!r}.")
    if batch is None and source in (None, ranks.rank):
        raise ValueError("shard_batch needs a batch, got None.")
    if batch is None:
        return
    if not isinstance(batch, Mapping) or not batch:
        empty = "" if batch else " without entries"
        raise ValueError(f"a batch must be a dict of tensors, got {type(batch).__name__}{empty}.")
    lengths = {}
    for name, x in batch.items():
        if not isinstance(name, str):
            raise ValueError(f"the names of a batch must be strings, got {name!r}.")
        if not isinstance(x, Tensor) or not x.dim():
            raise ValueError(f"batch[{name!r}] must be a tensor (N,) or (B, N, ...), got {type(x).__name__}.")
        if x.layout != torch.strided or x.is_meta:
            raise ValueError(f"batch[{name!r}] must be a dense tensor with memory, got {x.layout} on {x.device}.")
        dim = _dim(name, list(x.shape))
        if dim is not None:
            lengths[name] = x.shape[dim]
    if len(set(lengths.values())) != 1:
        listed = ", ".join(f"{name} has {length}" for name, length in lengths.items()) or "none of them has positions"
        raise ValueError(f"the tensors of a batch must share one number of positions, but {listed}.")
    if BORDERS in batch:
        check_documents(borders_of(batch[BORDERS]) or (), *set(lengths.values()))
    ranks.lengths_of(max(lengths.values()), borders_of(batch.get(BORDERS)))  # refuses what it cannot cut


def _dim(name: str, shape: list[int]) -> int | None:
    """The dim of the positions, or None for borders of documents, which stay whole."""
    return None if name == BORDERS else min(1, len(shape) - 1)


def _rows(x: Tensor, shard: Shard, dim: int | None) -> Tensor:
    return x if dim is None else own_rows(x, shard, dim)


def _told(ranks: Ranks, described: dict[str, Any], source: int) -> dict[str, Any]:
    """The names, shapes and dtypes of the source's batch."""
    text = torch.tensor(list(json.dumps(described).encode()), dtype=torch.uint8)
    own = text if ranks.rank == source else text[:0]
    lengths = ranks.agree(own.numel(), {"call": "shard_batch", "source": source}, None)
    lengths = lengths if len(lengths) == ranks.world_size else (own.numel(),)
    with ranks.all_or_none():
        told = ranks.gather(own, lengths, 0, "shard_batch")[source if ranks.world_size > 1 else 0]
    return json.loads(bytes(told.tolist()).decode())


def _dealt(
    ranks: Ranks, whole: Tensor | None, name: str, shape: list[int], dtype: str, shards: Sequence[Shard], source: int
) -> Tensor:
    """This rank's rows of a tensor that the source holds. No rank gets more than its own rows."""
    like = torch.empty(0, dtype=getattr(torch, dtype.removeprefix("torch.")))
    dim, own = _dim(name, shape), list(shape)
    if dim is not None:
        own[dim] = shard_length(shards[ranks.rank])
    sizes = [math.prod(own) if peer == source else 0 for peer in range(ranks.world_size)]
    with ranks.all_or_none():
        rows = [like] * ranks.world_size if whole is None else [_rows(whole, s, dim).flatten().cpu() for s in shards]
        return ranks.scatter(rows, sizes, like, "shard_batch")[source].view(own)
