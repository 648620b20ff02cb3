"""What the cases of generation share: the gate of calls with a cache, where tokens stand, caches at any position."""

import math
import random
import statistics
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ring_dilated_attention.attention import dilated_attention
from ring_dilated_attention.commands.errors import measure_cached, worst
from ring_dilated_attention.pattern import DilatedPattern
from ring_dilated_attention.plan.cache_plan import Buffers, CachePlan
from ring_dilated_attention.run.dilated_cache import DilatedCache

from .gate import GateError, small_case
from .measure import Sizes

PAPER = DilatedPattern((2048, 4096, 8192, 16_384, 32_768), (1, 2, 4, 6, 12), is_causal=True)
WIDE = DilatedPattern((2048, 32_768, 524_288), (1, 16, 256), is_causal=True)


def cached_gate(sizes: Sizes, pattern: DilatedPattern, num_kv_heads: int | None = None) -> dict[str, Any]:
    """What goes into a row: the same branches, heads and dtype at a small size, appended in chunks and token by token.

    Raises:
        GateError: if the tolerance is exceeded.
    """
    case = small_case(sizes, pattern)
    case = case._replace(num_kv_heads=case.num_heads if num_kv_heads is None else num_kv_heads)
    found = worst([case], sizes.dtype, [[measure_cached(case, sizes.dtype, "auto", "cpu")]])
    if not found.passed:
        raise GateError(
            f"{pattern} at {case.seq_len} positions with a cache: relative L2 error {found.error:.2e} of {found.where} "
            f"exceeds {found.tolerance:.2e}. Nothing was timed; `rda check` says more."
        )
    return {
        "passed": True,
        "ranks": 1,
        "seq_len": case.seq_len,
        "segment_lengths": case.pattern.segment_lengths,
        "error": found.error,
        "tolerance": found.tolerance,
    }


def make_cache(
    pattern: DilatedPattern, sizes: Sizes, num_kv_heads: int | None = None, max_len: int | None = None
) -> DilatedCache:
    num_kv_heads = sizes.num_heads if num_kv_heads is None else num_kv_heads
    shape = (sizes.batch, sizes.num_heads, num_kv_heads, sizes.head_dim)
    return DilatedCache(pattern, *shape, dtype=sizes.dtype, max_len=max_len)


def filled(cache: DilatedCache) -> DilatedCache:
    """The cache with rows of no sequence: it can be put at any position, however far, without a prefill."""
    cache.memory.normal_()
    return cache


def token_call(cache: DilatedCache, seed: int = 0) -> Callable[[int], Tensor]:
    """A call that appends one token at a position."""
    generator, plan = torch.Generator().manual_seed(seed), cache.plan
    heads = (plan.num_heads, plan.num_kv_heads, plan.num_kv_heads)
    shapes = [(cache.batch, 1, h, cache.head_dim) for h in heads]
    query, key, value = (torch.randn(shape, generator=generator).to(cache.dtype) for shape in shapes)

    def call(position: int) -> Tensor:
        cache.progress[0].fill_(position)
        out = dilated_attention(query, key, value, cache.pattern, cache=cache)
        assert isinstance(out, Tensor)
        return out

    return call


def rows_read(plan: CachePlan, position: int) -> int:
    """Rows of keys that the token at a position reads of one sequence, its own included."""
    return sum(len(buffers.kv_heads) * (len(buffers.seen(position)) + 1) for _, buffers in plan.of_position(position))


def live(buffers: Buffers, position: int) -> range:
    """The numbers of the rows that the query at `position - 1`, or a later query, sees.

    If the segment of `position - 1` has no row of the phase from there on, its earlier rows are kept but not live.
    """
    stop = buffers.before(position)
    number = buffers.before(max(0, position - 1))  # of the last query's row, or of the next row
    return range(number - number % buffers.rows_per_segment, stop)


def live_rows(plan: CachePlan, position: int) -> int:
    """Rows in all buffers that the last query before a position, or one from there on, sees: at most num_rows."""
    return sum(len(buffers.kv_heads) * len(live(buffers, position)) for buffers in plan.buffers)


def distinct_rows(plan: CachePlan, position: int) -> int:
    """The number of live rows, where a row that several branches hold counts once."""
    rows = ((x.kv_heads, x.position_of(number)) for x in plan.buffers for number in live(x, position))
    return len({(head, at) for heads, at in rows for head in heads})


def bytes_read(cache: DilatedCache, position: int) -> int:
    return 2 * cache.batch * rows_read(cache.plan, position) * cache.head_dim * cache.dtype.itemsize


def period_of(pattern: DilatedPattern, seq_len: int) -> int:
    """After how many positions the work of a token repeats itself, of the segments that are no longer than that."""
    return math.lcm(*(w for w in pattern.segment_lengths if w <= seq_len))


def stratified(period: int, num_strata: int) -> list[int]:
    """A residue of each of equal parts of a period, at the same random places every time."""
    draw = random.Random(0)
    borders = [period * i // num_strata for i in range(num_strata + 1)]
    return [draw.randrange(a, b) for a, b in pairwise(borders) if a < b]


def worst_residue(plan: CachePlan, period: int) -> int:
    """Where a token reads most: near the end of all segments, at a position that has a phase of every branch."""
    near = range(max(0, period - 4 * max(plan.pattern.dilation_rates)), period)
    return max(near, key=lambda residue: rows_read(plan, residue))


def exponent(seconds_at: Sequence[dict[int, float]]) -> tuple[float, float]:
    """Slope of log time over log length, the mean over samples (length -> seconds), and half its 95 % interval."""
    slopes = [
        statistics.linear_regression([math.log(n) for n in at], [math.log(t) for t in at.values()]).slope
        for at in seconds_at
    ]
    spread = statistics.stdev(slopes) / math.sqrt(len(slopes)) if len(slopes) > 1 else math.inf
    return statistics.mean(slopes), 1.96 * spread
