"""One rank's share of a job of any size, run by the library: the chunks of the other ranks are made on demand.

N positions of the rank, H query heads, G key/value heads, D head dim, M rows of one head in a chunk.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from ring_dilated_attention.attention import dilated_attention
from ring_dilated_attention.pattern import DilatedPattern
from ring_dilated_attention.plan.counts import Counter
from ring_dilated_attention.plan.job import Job
from ring_dilated_attention.plan.plan import Message, Plan
from ring_dilated_attention.plan.planner import make_plan
from ring_dilated_attention.plan.sharding import Shard, make_shards
from ring_dilated_attention.simulate import OtherRanks, one_rank
from ring_dilated_attention.simulate.one_rank import GlobalChunk, chunk_finder

from .counter import CounterTensors


class SlicedJob(NamedTuple):
    """A call that no machine holds as a whole, batch 1, float32, contiguous shards."""

    pattern: DilatedPattern
    seq_len: int
    num_ranks: int
    num_heads: int = 4
    num_kv_heads: int = 4
    head_dim: int = 64
    seed: int = 0

    @property
    def num_rows(self) -> int:
        return self.seq_len // self.num_ranks

    @property
    def tensors(self) -> CounterTensors:
        return CounterTensors(self.head_dim, self.seed)

    def rows_of(self, rank: int) -> range:
        return range(rank * self.num_rows, (rank + 1) * self.num_rows)

    @property
    def shards(self) -> tuple[Shard, ...]:
        return make_shards("contiguous", (self.num_rows,) * self.num_ranks)

    @property
    def call(self) -> Job:
        return Job(self.pattern, self.shards, self.num_heads, self.num_kv_heads)

    def plan(self, rank: int) -> Plan:
        return make_plan(self.call, rank)

    def chunk_finder(self, rank: int) -> Callable[[Message], GlobalChunk]:
        return chunk_finder(self.call, rank)


def longnet_pattern(seq_len: int, *, is_causal: bool = True) -> DilatedPattern:
    """The branches of LongNet's paper, continued in steps of 8 up to the whole sequence, at most 256 rows each.

    The rates of the continuation are 257/256 of a power of two. With 256 the wide branches would have rows only where
    all narrower segments begin; the rank that holds them would be the first of every ring, and meet no chunk.
    """
    branches = [(2048, 1), (4096, 2), (8192, 4), (16_384, 6), (32_768, 12)]
    wide: list[tuple[int, int]] = []
    while (length := seq_len // 8 ** len(wide)) > branches[-1][0]:
        wide.append((length, max(1, 257 * length // 2**16)))
    # Below 2,048 positions the first branch is all there is: its one segment is the sequence.
    branches = [(w, r) for w, r in branches if w <= max(seq_len, 2048)] + wide[::-1]
    return DilatedPattern(*zip(*branches, strict=True), is_causal=is_causal)


@lru_cache(maxsize=8)
def choose_rank(job: SlicedJob) -> int:
    """A rank with rows of the widest branch: in as many rings as possible behind another rank, so that every branch
    brings it keys; with others behind it, so that gradients come home, but as few as possible, as each of them is run.
    """
    widest = max(range(len(job.pattern.branches)), key=lambda branch: job.pattern.segment_lengths[branch])
    candidates = [rank for rank in range(job.num_ranks) if any(own for _, own, _ in _ring_shares(job, rank, widest))]
    if not candidates:
        raise ValueError(
            f"the widest branch has segments of {job.pattern.segment_lengths[widest]} positions, and each of "
            f"{job.num_ranks} ranks holds {job.num_rows} with whole segments: nothing would travel. Use more ranks."
        )

    def merit(rank: int) -> tuple[bool, int, int]:
        shares = [share for b in range(len(job.pattern.branches)) for share in _ring_shares(job, rank, b) if share[1]]
        is_between = all(before and after for before, _, after in _ring_shares(job, rank, widest))
        return is_between, sum(before > 0 for before, _, _ in shares), -sum(after for _, _, after in shares)

    return max(candidates, key=merit)


@lru_cache(maxsize=8)  # asked for every rank and branch
def _counter(job: SlicedJob) -> Counter:
    return Counter(job.call)


def _ring_shares(job: SlicedJob, rank: int, branch: int) -> list[tuple[int, int, int]]:
    """Of a rank's rings in a branch: how many ranks at most come before, how many rows it has, how many ranks after."""
    own, found = job.rows_of(rank), []
    w, keys = job.pattern.segment_lengths[branch], _counter(job).keys[branch]
    for origin in sorted({own.start - own.start % w, own.stop - 1 - (own.stop - 1) % w}):
        end = min(origin + w, job.seq_len)
        start, stop = max(own.start, origin), min(own.stop, end)
        if (start, stop) != (origin, end):  # which straddles shards
            before, through, whole = (keys.rows(x - origin) for x in (start, stop, end))
            most_before, most_after = -(-(start - origin) // job.num_rows), -(-(end - stop) // job.num_rows)
            ranks = min(before // keys.num, most_before), min((whole - through) // keys.num, most_after)
            found.append((ranks[0], through - before, ranks[1]))
    return found


class Others(OtherRanks):
    """Keys and values from the generator. Gradients that leave are kept (for one owner, or all); `home` comes home."""

    def __init__(self, tensors: CounterTensors, owner: int | None = None) -> None:
        self.tensors, self.owner = tensors, owner
        self.taken: list[tuple[GlobalChunk, Tensor]] = []
        self.home: dict[tuple[int, int, int], Tensor] = {}

    def keys_and_values(self, positions_GM: Tensor, heads_G1: Tensor) -> tuple[Tensor, Tensor]:
        key, value = (self.tensors.rows(name, positions_GM, heads_G1).unsqueeze(0) for name in ("key", "value"))
        return key, value

    def take_gradient(self, chunk: GlobalChunk, gradient: Tensor) -> None:
        if self.owner in (None, chunk.owner):
            self.taken.append((chunk, gradient.clone()))

    def gradient_home(self, chunk: GlobalChunk) -> Tensor | None:
        return self.home.get((chunk.branch, chunk.origin, chunk.lane))


@dataclass
class Share:
    """What the library made of one rank: out (N, H, D), lse (N, H), dq, and dk, dv (N, G, D), twice.

    own: dk and dv as this rank contributes to them; complete: with what all other ranks contribute.
    sent: contributions to other ranks' chunks.
    viewers: the ranks that meet this rank's chunks.
    """

    out: Tensor
    lse: Tensor
    dq: Tensor
    own: tuple[Tensor, Tensor]
    complete: tuple[Tensor, Tensor]
    sent: list[tuple[GlobalChunk, Tensor]]
    viewers: list[int]
    seconds: dict[str, float] = field(default_factory=dict)


def viewers_of(plan: Plan) -> list[int]:
    """The ranks that meet a rank's chunks."""
    return sorted({message.peer for hop in plan.hops for message in hop.targets})


def run_share(job: SlicedJob, rank: int, step: Callable[[str], None], others: Others | None = None) -> Share:
    """Run a rank forward and backward, and then again backward with the gradients that come home.

    Args:
        step: called with what comes next: twice, and once for each viewer.
        others: what the other ranks send, if not what the generator makes.
    """
    others = Others(job.tensors) if others is None else others
    viewers = viewers_of(job.plan(rank))
    clock = _Clock()
    step("forward and backward")
    call = _Call(job, rank, others)
    clock.lap("forward")
    dq, *own = call.gradients()
    clock.lap("backward")
    sent, others.taken = others.taken, []
    for viewer in viewers:
        step(f"gradients of rank {viewer}")
        its_others = Others(job.tensors, owner=rank)
        _Call(job, viewer, its_others).gradients()
        for chunk, gradient in its_others.taken:
            place = chunk.branch, chunk.origin, chunk.lane
            others.home[place] = others.home[place] + gradient if place in others.home else gradient
    clock.lap("other ranks")
    step("backward with gradients that come home")
    _, *complete = call.gradients()
    clock.lap("backward again")
    out, lse = call.out.detach()[0], call.lse.detach()[0]
    return Share(out, lse, dq, tuple(own), tuple(complete), sent, viewers, clock.seconds)  # type: ignore[arg-type]


class _Call:
    """A forward of one rank; its backward may be run again."""

    def __init__(self, job: SlicedJob, rank: int, others: Others) -> None:
        self.parallel = one_rank(rank, job.num_ranks, others)
        positions = self.parallel.positions(job.seq_len)
        heads = {"query": job.num_heads, "key": job.num_kv_heads, "value": job.num_kv_heads, "dout": job.num_heads}
        *inputs, self.dout = (job.tensors.local(name, positions, number) for name, number in heads.items())
        self.inputs = [x.requires_grad_() for x in inputs]
        query, key, value = self.inputs
        out, lse = dilated_attention(query, key, value, job.pattern, parallel=self.parallel, return_lse=True)
        self.out: Tensor = out
        self.lse: Tensor = lse

    def gradients(self) -> tuple[Tensor, ...]:
        grads = torch.autograd.grad(self.out, self.inputs, self.dout, retain_graph=True)
        return tuple(grad[0] for grad in grads)


class _Clock:
    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.last = time.perf_counter()

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.seconds[name], self.last = now - self.last, now
