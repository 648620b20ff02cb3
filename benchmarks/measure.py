"""Measures calls on the CPU: seconds by the clock, and by the profiler the peak memory and the bytes sent."""

import os
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.profiler import ProfilerActivity, profile

from ring_dilated_attention.attention import dilated_attention
from ring_dilated_attention.pattern import DilatedPattern
from ring_dilated_attention.plan import step
from ring_dilated_attention.plan.exchange import plan_exchange
from ring_dilated_attention.plan.plan import Plan
from ring_dilated_attention.plan.sharded_call import ShardedCall
from ring_dilated_attention.plan.sharding import ShardSpec, make_shards
from ring_dilated_attention.ranks.context import ContextParallel
from ring_dilated_attention.ranks.watching import Worker

# The bytes of an element, by the profiler's name of its dtype. Messages of int64 and uint8 control the exchange: they
# are not counted.
_ITEMSIZE = {"float": 4, "double": 8, "c10::BFloat16": 2, "c10::Half": 2}


class Sizes(NamedTuple):
    """The sizes of query, key and value of a call. seq_len is the whole sequence's, over all ranks."""

    seq_len: int
    num_heads: int
    head_dim: int
    dtype: torch.dtype = torch.float32
    batch: int = 1

    def as_json(self) -> dict[str, Any]:
        return self._asdict() | {"dtype": str(self.dtype).removeprefix("torch.")}


def call_json(sizes: Sizes, pattern: DilatedPattern) -> dict[str, Any]:
    """The entries of a record's row that describe a call."""
    branches = {
        "segment_lengths": pattern.segment_lengths,
        "dilation_rates": pattern.dilation_rates,
    }
    return {**branches, "is_causal": pattern.is_causal, **sizes.as_json()}


class Times(NamedTuple):
    """Seconds of one forward and of its backward."""

    forward: float
    backward: float

    @property
    def both(self) -> float:
        return self.forward + self.backward


def seconds_of(times: Iterable[Times], stage: str) -> list[float]:
    """The seconds of a stage: "forward" for the forward alone, any other text for forward and backward."""
    return [t.forward if stage == "forward" else t.both for t in times]


class Allocated(NamedTuple):
    """The peak of the memory that a function allocated, without its inputs, and the bytes of data that it sent."""

    peak_bytes: int
    sent_bytes: int


def dense_call(sizes: Sizes, *, is_causal: bool) -> Callable[[], Times]:
    """A function that runs and times one forward and backward of torch's attention, on random tensors."""
    inputs, dout = make_tensors(sizes)

    def forward() -> Tensor:
        query, key, value = (x.transpose(1, 2) for x in inputs)
        return scaled_dot_product_attention(query, key, value, is_causal=is_causal).transpose(1, 2)

    return lambda: _time(forward, inputs, dout)


def dilated_call(
    sizes: Sizes, pattern: DilatedPattern, parallel: ContextParallel | None = None
) -> Callable[[], Times]:
    """A function that runs and times one forward and backward of `dilated_attention`, on random tensors.

    Under `parallel` the tensors are this rank's shard of the sequence.
    """
    inputs, dout = make_tensors(sizes, parallel)
    return lambda: _time(lambda: attend(inputs, pattern, parallel), inputs, dout)


def attend(
    inputs: list[Tensor], pattern: DilatedPattern, parallel: ContextParallel | None
) -> Tensor:
    query, key, value = inputs
    out = dilated_attention(query, key, value, pattern, parallel=parallel)
    assert isinstance(out, Tensor)
    return out


def make_tensors(
    sizes: Sizes, parallel: ContextParallel | None = None, *, device: str = "cpu"
) -> tuple[list[Tensor], Tensor]:
    """Random query, key and value, and a random gradient of out. Under `parallel` these are this rank's rows alone."""
    length = sizes.seq_len if parallel is None else len(parallel.positions(sizes.seq_len))
    generator = torch.Generator(device).manual_seed(0)
    shape = (sizes.batch, length, sizes.num_heads, sizes.head_dim)
    tensors = [
        torch.randn(shape, generator=generator, dtype=sizes.dtype, device=device) for _ in range(4)
    ]
    return [x.requires_grad_() for x in tensors[:3]], tensors[3]


def by_turns(
    calls: Mapping[str, Callable[[], Times]], repeats: int, step: Callable[[str], None]
) -> dict[str, list[Times]]:
    """The times of each call, by name. Calls run in turn, so that a change of the CPU's clock affects all of them."""
    times: dict[str, list[Times]] = {name: [] for name in calls}
    for repeat in range(1 + repeats):
        for name, call in calls.items():
            step(name)
            measured = call()
            if repeat > 0:  # the first run warms up
                times[name].append(measured)
    return times


def _time(forward: Callable[[], Tensor], inputs: list[Tensor], dout: Tensor) -> Times:
    start = time.perf_counter()
    out = forward()
    middle = time.perf_counter()
    torch.autograd.grad(out, inputs, dout)
    return Times(middle - start, time.perf_counter() - middle)


def allocated(function: Callable[[], object]) -> Allocated:
    """Run a function once under the profiler, which sees every allocation, also the scratch memory of kernels."""
    # Without this the profiler writes to stderr when it starts and stops.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    profiler = profile(activities=[ProfilerActivity.CPU], profile_memory=True, record_shapes=True)
    with mock.patch.object(Worker, "submit", _at_once), profiler as profiled:
        function()
    current, peak, sent = 0, 0, 0.0
    assert profiled.profiler is not None
    for event in sorted(
        profiled.profiler.kineto_results.events(), key=lambda event: event.start_ns()
    ):
        if event.name() == "[memory]":
            current += event.nbytes()
            peak = max(peak, current)
        else:
            sent += _sent_bytes(event)
    return Allocated(peak, round(sent))


def _at_once(worker: Worker, function: Callable[[], Any]) -> Future[Any]:
    """Run a function in this thread, in place of `Worker.submit`: the profiler sees no messages of other threads."""
    future: Future[Any] = Future()
    future.set_result(function())
    return future


def _sent_bytes(event: Any) -> float:
    """The bytes that this rank sends to other ranks in an event of the profiler.

    For a collective this is the smallest number that any implementation must send.
    """
    sent = {
        "c10d::alltoall_base_": 1,
        "c10d::_reduce_scatter_base_": 1,
        "gloo:send": 0,
        "gloo:all_gather": 0,
    }
    if (tensor := sent.get(event.name())) is None:
        return 0
    num_bytes = torch.Size(event.shapes()[tensor]).numel() * _ITEMSIZE.get(
        event.dtypes()[tensor], 0
    )
    others = dist.get_world_size() - 1
    if event.name() == "gloo:all_gather":
        return num_bytes * others
    if event.name() == "c10d::_reduce_scatter_base_":
        return num_bytes * others / (others + 1)
    if event.name() == "c10d::alltoall_base_":  # an empty list of rows means equal shares
        rows = event.concrete_inputs()[4] or [1] * (others + 1)
        return num_bytes * (1 - rows[dist.get_rank()] / sum(rows))
    return num_bytes


def flops_of(plan: Plan, batch: int, head_dim: int) -> tuple[int, int]:
    """The floating-point operations of a forward, and of its backward.

    They are 2 and 5 matrix products. A product has 2 * head_dim operations for each (query, key) pair.
    """
    product = 2 * head_dim * batch * plan.pairs
    return 2 * product, 5 * product


def planned_bytes(
    sizes: Sizes, pattern: DilatedPattern, num_ranks: int, sharding: str = "contiguous"
) -> list[int]:
    """The bytes that each rank sends in a forward and backward, according to its plan."""
    shards = make_shards(sharding, ShardSpec(sharding, num_ranks).default_lengths(sizes.seq_len))
    of_call = step.Sizes(sizes.batch, sizes.head_dim, sizes.dtype.itemsize)
    of_ranks = []
    for rank in range(num_ranks):
        sharded_call = ShardedCall(pattern, shards, sizes.num_heads, sizes.num_heads)
        plan = plan_exchange("ring", sharded_call, rank)
        of_ranks.append(plan.bytes_sent(of_call) + plan.bytes_sent(of_call, backward=True))
    return of_ranks


def quantiles(values: Iterable[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {
        "min": ordered[0],
        "median": statistics.median(ordered),
        "max": ordered[-1],
        "repeats": len(ordered),
    }
