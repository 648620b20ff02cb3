"""What an attention call refuses before ranks talk to each other."""

import math
import numbers
import warnings
from typing import Any

import torch
from torch import Tensor

from ..kernels.choose import check_backend, choose
from ..pattern import DilatedPattern
from ..plan.job import held_heads
from .borders import validate_cu_seqlens
from .context import ContextParallel
from .origin import origin_of, why_foreign


def check_cuts(parallel: ContextParallel | None, **tensors: object) -> None:
    """Raise ValueError for a shard that was cut otherwise than `parallel` cuts; warn of one without ranks."""
    for name, x in tensors.items():
        if isinstance(parallel, ContextParallel):
            if failure := why_foreign(name, x, parallel.ranks):
                raise ValueError(f"{failure}.")
        elif parallel is None and (origin := origin_of(x)) is not None:
            text = f"{name} is {origin}, and without parallel= it is taken for a whole sequence."
            warnings.warn(text, stacklevel=4)
            return


def check_objects(pattern: Any, parallel: Any, backend: Any) -> None:
    if not isinstance(pattern, DilatedPattern):
        raise ValueError(f"pattern must be a DilatedPattern, got {pattern!r}.")
    if parallel is not None and not isinstance(parallel, ContextParallel):
        raise ValueError(f"parallel must be a ContextParallel or None, got {parallel!r}.")
    check_backend(backend)


def validate(
    query: Any,
    key: Any,
    value: Any,
    pattern: Any,
    parallel: Any,
    cu_seqlens: Any,
    scale: Any,
    backend: Any,
    heads_held: Any,
    num_heads: Any,
) -> range:
    """Everything that can be said before ranks talk to each other. Returns the query heads that the tensors hold."""
    tensors = {"query": query, "key": key, "value": value}
    for name, x in tensors.items():
        if not isinstance(x, Tensor):
            raise ValueError(f"{name} must be a tensor (batch, seq, heads, head_dim), got {type(x).__name__}.")
        if x.layout != torch.strided:
            raise ValueError(f"{name} must be a dense tensor, got layout {x.layout}. Convert it with .to_dense().")
        if x.dim() != 4:
            raise ValueError(
                f"{name} must be (batch, seq, heads, head_dim), got {x.dim()} dimensions: {tuple(x.shape)}."
            )
    check_objects(pattern, parallel, backend)
    for name in ("dtype", "device"):
        values = {n: getattr(x, name) for n, x in tensors.items()}
        if len(set(values.values())) > 1:
            listed = ", ".join(f"{n} has {v}" for n, v in values.items())
            raise ValueError(f"query, key and value must share one {name}: {listed}. Convert them with .to().")
    batch, seq_len, num_held, head_dim = query.shape
    if key.shape != value.shape:
        raise ValueError(f"key {tuple(key.shape)} and value {tuple(value.shape)} must have the same shape.")
    if key.shape[:2] != query.shape[:2] or key.shape[3] != head_dim:
        raise ValueError(
            f"query {tuple(query.shape)} and key {tuple(key.shape)} must agree in batch, seq and head_dim; only the "
            "number of heads may differ (this is self-attention)."
        )
    if not (batch and num_held and head_dim):
        raise ValueError(f"query {tuple(query.shape)} has an empty batch, heads or head_dim.")
    heads = held_heads(num_held, max(num_held // max(key.shape[2], 1), 1), heads_held, num_heads)
    pattern.check_heads(num_heads or num_held, key.shape[2] * (num_heads or num_held) // num_held)
    _validate_scale(scale, torch.float64 if query.dtype == torch.float64 else torch.float32)
    if cu_seqlens is not None:
        validate_cu_seqlens(cu_seqlens, batch)
    if query.device.type == "meta":  # such tensors would never reach the choice of a kernel: torch answers by itself
        choose(backend, query)
    if parallel is None and num_held > seq_len and num_held > 256:  # a shard may well be that short
        warnings.warn(
            f"query has {num_held} heads and {seq_len} positions: (batch, heads, seq, head_dim) was probably meant. "
            "The layout is (batch, seq, heads, head_dim).",
            stacklevel=3,
        )
    return heads


def _validate_scale(scale: Any, dtype: torch.dtype) -> None:
    is_number = isinstance(scale, numbers.Real) and not isinstance(scale, bool)
    try:
        is_finite = is_number and abs(float(scale)) < math.inf
    except OverflowError:
        is_finite = False
    if scale is not None and not is_finite:
        raise ValueError(f"scale must be a finite number or None, got {scale!r}.")
    if scale is not None and abs(float(scale)) > torch.finfo(dtype).max:
        raise ValueError(
            f"scale={float(scale):g} is beyond {torch.finfo(dtype).max:.1e}, the largest {dtype} number, in which "
            "scores are made. Pass float64 tensors, or a smaller scale."
        )
