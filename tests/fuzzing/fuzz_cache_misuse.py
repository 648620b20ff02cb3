"""Caches that cannot be, and what cannot be done with one: a ValueError each, after which a cache is as it was."""

import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from fuzz import Trial
from fuzz_calls import why_not_refused
from torch import Tensor

from ring_dilated_attention import (
    ContextParallel,
    DilatedCache,
    DilatedPattern,
    dilated_attention,
    simulate,
)


def why_changed(cache: DilatedCache, attempt: Callable[[], object]) -> str | None:
    """Why what cannot be was not refused as it should be, or None."""
    memory, progress = cache.memory.clone(), cache.progress.clone()
    complaint = why_not_refused(attempt)
    same = torch.equal(cache.memory.view(torch.uint8), memory.view(torch.uint8))
    if complaint is None and not (same and torch.equal(cache.progress, progress)):
        complaint = "it is refused, and the cache has changed"
    return complaint


PATTERN = DilatedPattern((4, 12), (1, 3), is_causal=True)


def made(
    pattern: Any = PATTERN, batch: Any = 2, num_heads: Any = 4, num_kv_heads: Any = 2, **more: Any
) -> DilatedCache:
    return DilatedCache(pattern, batch, num_heads, num_kv_heads, more.pop("head_dim", 8), **more)


def rows(
    num: int = 1, dtype: torch.dtype = torch.float32, batch: int = 2, heads: int = 4
) -> list[Tensor]:
    return [torch.zeros(batch, num, h, 8, dtype=dtype) for h in (heads, 2, 2)]


def appended(
    cache: DilatedCache, given: Sequence[Tensor], pattern: Any = PATTERN, **more: Any
) -> object:
    return dilated_attention(*given, pattern, cache=cache, **more)


MAKE: list[Callable[[], Any]] = [
    lambda: made(None),
    lambda: made(DilatedPattern((4,), (1,))),
    lambda: made(DilatedPattern((2**62,), (1,), is_causal=True)),
    lambda: made(batch=0),
    lambda: made(batch=True),
    lambda: made(batch=-1),
    lambda: made(batch="2"),
    lambda: made(batch=2.0),
    lambda: made(num_heads=3),
    lambda: made(num_heads=0),
    lambda: made(num_kv_heads=0),
    lambda: made(num_kv_heads=None),
    lambda: made(head_dim=0),
    lambda: made(head_dim=None),
    lambda: made(dtype=torch.int32),
    lambda: made(dtype="float32"),
    lambda: made(dtype=torch.float8_e4m3fn),
    lambda: made(max_len=0),
    lambda: made(max_len=1.5),
    lambda: made(max_len=True),
    lambda: made(keep=-1),
    lambda: made(keep=None),
    lambda: made(keep=1.0),
    lambda: made(batch=2**50),
    lambda: made(keep=2**62),
    lambda: made(heads_held=range(0)),
    lambda: made(heads_held=range(3)),
    lambda: made(heads_held=range(2, 9)),
    lambda: made(heads_held=[0, 1]),
    lambda: made(heads_held=range(0, 4, 2)),
    lambda: made(heads_held=range(-2, 0)),
    lambda: made(heads_held=2),
    lambda: made(heads_held=slice(0, 2)),
]
# With a cache of 2 sequences, of 7 positions each and at most 9.
MISUSE: list[Callable[[DilatedCache], Any]] = [
    lambda c: appended(c, rows(), DilatedPattern((4, 12), (1, 2), is_causal=True)),
    lambda c: appended(c, rows(), None),
    lambda c: appended(c, rows(dtype=torch.float64)),
    lambda c: appended(c, rows(dtype=torch.bfloat16)),
    lambda c: appended(c, rows(batch=1)),
    lambda c: appended(c, rows(heads=2)),
    lambda c: appended(c, [x[:, :, :2] for x in rows()]),
    lambda c: appended(c, [x[..., :4] for x in rows()]),
    lambda c: appended(c, rows(3)),
    lambda c: appended(c, [x.to("meta") for x in rows()]),
    lambda c: appended(c, rows(), cu_seqlens=torch.tensor([0, 1], dtype=torch.int32)),
    lambda c: appended(c, rows(), parallel=simulate.all_ranks(2)),
    lambda c: appended(c, rows(), heads_held=range(2), num_heads=4),
    lambda c: appended(c, rows(), num_heads=8, heads_held=range(4)),
    lambda c: appended(c, rows(), lengths=[1, 1]),
    lambda c: appended(c, rows(), lengths=torch.tensor([1])),
    lambda c: appended(c, rows(), lengths=torch.tensor([1.0, 1.0])),
    lambda c: appended(c, rows(), lengths=torch.tensor([True, False])),
    lambda c: appended(c, rows(), lengths=torch.tensor([1 + 0j, 1])),
    lambda c: appended(c, rows(), lengths=torch.tensor([1, 2])),
    lambda c: appended(c, rows(), lengths=torch.tensor([1, -1])),
    lambda c: appended(c, rows(), lengths=torch.tensor([2**62, 1])),
    lambda c: appended(c, rows(), scale=math.nan),
    lambda c: appended(c, rows(), backend="sdpa"),
    lambda c: appended(str(c), rows()),  # type: ignore[arg-type]
    lambda c: dilated_attention(*rows(), PATTERN, lengths=torch.tensor([1, 1])),
    lambda c: c.crop(8),
    lambda c: c.crop(-1),
    lambda c: c.crop(1.0),
    lambda c: c.crop([1, 2, 3]),
    lambda c: c.crop([]),
    lambda c: c.crop("1"),
    lambda c: c.crop(None),
    lambda c: c.crop(True),
    lambda c: c.crop(2**70),
    lambda c: c.crop(torch.tensor([math.nan, 1])),
    lambda c: c.fork([2]),
    lambda c: c.fork([-1]),
    lambda c: c.fork([]),
    lambda c: c.fork([0.0]),
    lambda c: c.fork(torch.tensor([True, False])),
    lambda c: c.fork(torch.tensor(1)),
    lambda c: c.fork(torch.tensor([[0, 1]])),
    lambda c: c.fork(1),
    lambda c: c.fork(None),
    lambda c: c.fork("01"),
    lambda c: c.reset([2]),
    lambda c: c.reset([0.5]),
    lambda c: c.reset(torch.tensor([True, True])),
    lambda c: c.reset(torch.tensor(0)),
    lambda c: c.reset(0),
    lambda c: c.load_state_dict({}),
    lambda c: c.load_state_dict(None),
    lambda c: c.load_state_dict([]),
    lambda c: c.load_state_dict({"cache": c._described()}),
    lambda c: c.load_state_dict({**c.state_dict(), "rows": []}),
    lambda c: c.load_state_dict({**c.state_dict(), "rows": c.state_dict()["rows"] * 2}),
    lambda c: c.load_state_dict(
        {**c.state_dict(), "rows": [x[:, 1:] for x in c.state_dict()["rows"]]}
    ),
    lambda c: c.load_state_dict(
        {**c.state_dict(), "rows": [x.double() for x in c.state_dict()["rows"]]}
    ),
    lambda c: c.load_state_dict({**c.state_dict(), "rows": None}),
    lambda c: c.load_state_dict({**c.state_dict(), "progress": torch.tensor([[-1, 7], [0, 0]])}),
    lambda c: c.load_state_dict({**c.state_dict(), "progress": torch.tensor([[7, 7], [9, 0]])}),
    lambda c: c.load_state_dict({**c.state_dict(), "progress": torch.tensor([[7], [0]])}),
    lambda c: c.load_state_dict({**c.state_dict(), "progress": torch.tensor([7, 7])}),
    lambda c: c.load_state_dict(
        {**c.state_dict(), "progress": torch.tensor([[7.0, 7.0], [0.0, 0.0]])}
    ),
    lambda c: c.load_state_dict({**c.state_dict(), "progress": [[7, 7], [0, 0]]}),
    lambda c: c.load_state_dict({**c.state_dict(), "keep": -1}),
    lambda c: c.load_state_dict({**c.state_dict(), "keep": None}),
    lambda c: c.load_state_dict(told(made(max_len=20), 10).state_dict()),
    lambda c: c.load_state_dict(told(made(PATTERN, num_kv_heads=4), 0).state_dict()),
    lambda c: c.load_state_dict(told(made(batch=3), 0).state_dict()),
    lambda c: DilatedCache.gather(ContextParallel(), *rows()[1:], PATTERN, 4, to=1),
    lambda c: DilatedCache.gather(ContextParallel(), *rows()[1:], PATTERN, 3),
    lambda c: DilatedCache.gather(ContextParallel(), *rows(5)[1:], PATTERN, 4, max_len=4),
    lambda c: DilatedCache.gather(ContextParallel(), rows()[1], rows()[0], PATTERN, 4),
    lambda c: DilatedCache.gather(ContextParallel(), rows()[1][0], rows()[1][0], PATTERN, 4),
    lambda c: DilatedCache.gather(ContextParallel(), None, None, PATTERN, 4),  # type: ignore[arg-type]
    lambda c: DilatedCache.gather(ContextParallel(), *rows()[1:], None, 4),  # type: ignore[arg-type]
    lambda c: DilatedCache.gather(ContextParallel(), *rows()[1:], PATTERN, None),  # type: ignore[arg-type]
]


def told(cache: DilatedCache, num_positions: int) -> DilatedCache:
    """A cache that has seen so many positions."""
    cache.memory.zero_()
    cache.progress[0] = num_positions
    return cache


def try_hostile(rng: random.Random, compiler: str | None) -> Trial:
    if rng.random() < 0.3:
        number = rng.randrange(len(MAKE))
        return Trial("refused: a cache", f"cache {number}", why_not_refused(MAKE[number]))
    number = rng.randrange(len(MISUSE))
    cache = told(made(max_len=9), 7)
    cache.progress[1] = 4
    return Trial(
        "refused: a use", f"use {number}", why_changed(cache, lambda: MISUSE[number](cache))
    )
