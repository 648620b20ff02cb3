"""Counts the bytes that one rank holds in an attention call, without computing it.

The rank's programs (the steps of its forward and backward) are carried out on tensors of the device "meta", which have
sizes but no data. The result is the peak of the bytes that are alive.

A tile is some query rows and the key rows that they attend to. B batch (in a tile, each segment counts as a batch
entry), N positions, H query heads, G key/value heads, M query rows, L key rows, D head dim.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice, takewhile
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..kernels.contract import BackwardRows, Kernel, Merging
from ..kernels.lse_gradient import dlse_columns
from ..kernels.traits import TRAITS
from ..plan.collection import without_collection
from ..plan.exchange import RankPlan
from ..plan.plan import Hop, Plan, Tile
from ..plan.program import make_program
from ..plan.rows import Rows
from ..plan.step import (
    Add,
    CallFacts,
    Compute,
    Free,
    Merge,
    Pack,
    Post,
    Sizes,
    Step,
    Take,
    Unpack,
    Wait,
    Zero,
)
from ..run import executor
from ..run.executor import ExecutorOptions
from ..run.views import accumulator_dtype
from .measuring import Held

# `_with_few_hops` shortens plans that have more than MOST_HOPS hops (exchanges with neighbours in a ring).
MOST_HOPS = 64
DTYPES = {2: torch.bfloat16, 4: torch.float32, 8: torch.float64}  # by the bytes per element


class AttentionWeight(NamedTuple):
    """Bytes that one rank holds in a call.

    forward, backward: the peak of the bytes that the rank holds in the forward, and in the backward.
    given_forward: the bytes of query, key and value.
    given_backward: the bytes of query, key, value, out, lse and out's gradient.
    """

    forward: int
    backward: int
    given_forward: int
    given_backward: int

    @property
    def peak(self) -> int:
        return max(self.forward, self.backward)


class MetaKernel:
    """Stands in for a kernel. It makes results of the shapes, dtypes and strides that `kernels/contract.py` states, and
    allocates the kernel's scratch, but computes nothing."""

    ops: Callable[[Tensor], dict[str, str | None]] | None = None

    def __init__(self, name: str, num_threads: int) -> None:
        self.NAME = name
        self.TRAITS = TRAITS[name]
        self.num_threads = num_threads

    def why_not(self, query: Tensor) -> str | None:
        return None

    def takes_short_rows(self, dtype: torch.dtype) -> bool:
        """False for "cpu", so that 16-bit rows are copied to float32, as on a CPU without a matrix unit. Otherwise the
        counted bytes would depend on the machine that counts."""
        return self.NAME != "cpu"

    def merging(self, query: Tensor) -> Merging | None:
        """For "sdpa", functions without effect, because the Triton kernels of "sdpa" allocate no memory. For "cpu",
        None."""
        if self.NAME != "sdpa":
            return None
        return Merging(_nothing, _nothing, _nothing, dlse_columns)

    def forward(
        self, q_BHMD: Tensor, k_BGLD: Tensor, v_BGLD: Tensor, is_causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        lse_BHM = q_BHMD.new_empty(q_BHMD.shape[:3], dtype=accumulator_dtype(q_BHMD.dtype))
        out_BHMD = _empty_like(q_BHMD)
        self._take_scratch(q_BHMD, k_BGLD, dout_BHMD=None)
        return out_BHMD, lse_BHM

    def backward(
        self, rows: BackwardRows, is_causal: bool, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        gradients = _empty_like(rows.query), _empty_like(rows.key), _empty_like(rows.value)
        self._take_scratch(rows.query, rows.key, rows.dout)
        return gradients

    def _take_scratch(self, q_BHMD: Tensor, k_BGLD: Tensor, dout_BHMD: Tensor | None) -> None:
        """Allocate the kernel's scratch and free it immediately. The results exist already, so the peak contains both
        results and scratch."""
        num_bytes = self.TRAITS.scratch(q_BHMD, k_BGLD, dout_BHMD, self.num_threads)
        q_BHMD.new_empty(num_bytes, dtype=torch.uint8)


def _nothing(*args: Any, **kwargs: Any) -> None:
    """Stands in for the functions that merge, add or copy rows. The tensors have no data, so there is nothing to do."""


def _empty_like(x_BHMD: Tensor) -> Tensor:
    """An empty tensor of this shape. The heads of a row lie side by side in memory, as in the results of kernels."""
    batch, num_heads, num_rows, head_dim = x_BHMD.shape
    return x_BHMD.new_empty(batch, num_rows, num_heads, head_dim).transpose(1, 2)


class MetaDealer:
    """Stands in for the connection to the ranks that exchange heads for positions (plan/dealing.py). It returns empty
    tensors of the sizes that a real exchange would return."""

    def all_to_all_single(
        self, tensors: Any, sizes: Any, like: Tensor, moment: str
    ) -> list[Tensor]:
        return list(like.new_empty(sum(sizes)).split(list(sizes)))


@without_collection()
def weigh_attention(rank_plan: RankPlan, sizes: Sizes, kernel: str) -> AttentionWeight:
    """The bytes that one call holds on the plan's rank. kernel: the kernel's name."""
    plan, dealing = rank_plan
    num_dealers = 1 if dealing is None else dealing.size
    dtype = DTYPES[sizes.itemsize]

    def rows(num_heads: int) -> Tensor:
        shape = sizes.batch, rank_plan.num_rows, num_heads * num_dealers, sizes.head_dim
        return torch.empty(shape, dtype=dtype, device="meta")

    query = rows(plan.num_heads)
    key = rows(plan.num_kv_heads)
    value = rows(plan.num_kv_heads)
    meta_kernel: Kernel = MetaKernel(kernel, sizes.num_threads)
    executor_options = ExecutorOptions(meta_kernel, 1.0, dealer=MetaDealer(), program=brief_program)
    rank_plan = rank_plan._replace(plan=_with_few_hops(plan))
    with Held([query, key, value]) as forward:
        out, lse = executor.forward(rank_plan, executor_options, query, key, value)
    dout = rows(plan.num_heads)
    given = BackwardRows(dout, None, query, key, value, out, lse)
    with Held(given) as backward:
        executor.backward(rank_plan, executor_options, given)
    bytes_forward = sum(x.nbytes for x in (query, key, value))
    bytes_backward = bytes_forward + sum(x.nbytes for x in (dout, out, lse))
    return AttentionWeight(forward.peak_bytes, backward.peak_bytes, bytes_forward, bytes_backward)


def brief_program(plan: Plan, stage: str, facts: CallFacts) -> Iterator[Step]:
    """A shorter program of the stage ("forward" or "backward") with the same peak of memory.

    A kernel call stays in the program if its results are kept until a `Gather` step. Of the other calls, only two of
    each kind stay. Two calls are enough for the peak: the second runs while the results of the first are alive. Two
    calls are of the same kind if their sizes, strides and uses of the results are equal, and if the buffers alive
    during the calls have the same total size. Steps that neither allocate nor free memory are left out.
    """
    program = make_program(plan, stage, facts)
    buffers: dict[str, int] = {}
    num_calls = Counter[tuple]()
    is_kept = True
    for number, step in enumerate(program):
        match step:
            case Pack(name, size) | Take(name, size):
                buffers[name] = size
            case Free(names):
                for name in names:
                    buffers.pop(name, None)
            case Compute(tile, entry, _, keys, copied):
                uses = takewhile(
                    lambda later: not isinstance(later, Compute),
                    islice(program, number + 1, number + 9),
                )
                hows = tuple(later.how for later in uses if isinstance(later, Merge | Add))
                kind = (*_kind(tile), entry is None, keys, copied, hows, sum(buffers.values()))
                num_calls[kind] += 1
                is_kept = num_calls[kind] <= 2 or "keep" in hows
        if isinstance(step, Post | Wait | Zero | Unpack):
            continue
        if is_kept or not isinstance(step, Compute | Merge | Add):
            yield step


def _kind(tile: Tile) -> tuple[object, ...]:
    """A value by which tiles are grouped. Tiles that differ only in where their rows lie have equal values."""
    query = tile.query._replace(first=0, heads=range(len(tile.query.heads)))
    if isinstance(tile.key, Rows):
        return query, tile.key._replace(first=0, heads=range(len(tile.key.heads)))
    return query, len(tile.key.heads), tile.key.num_rows


def _with_few_hops(plan: Plan) -> Plan:
    """The plan itself, or, if it has more than MOST_HOPS hops, a plan with only two hops of each kind and the last hop.

    Two hops are of the same kind if their tiles are of the same kinds (`_kind`), and if this rank sends its own keys
    and values in messages of the same sizes.
    """
    if len(plan.hops) <= MOST_HOPS:
        return plan
    num_hops = Counter[tuple]()
    kept: list[Hop] = []
    for hop in plan.hops:
        own_chunks = tuple(message.size for message in hop.sends if message.owner == plan.rank)
        kind = (tuple(map(_kind, hop.tiles)), own_chunks)
        num_hops[kind] += 1
        if num_hops[kind] <= 2 or hop is plan.hops[-1]:
            kept.append(hop)
    return replace(plan, hops=tuple(kept))
