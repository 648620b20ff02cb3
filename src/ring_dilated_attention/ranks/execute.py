"""What the custom ops do: handshake -> plan -> exchange.

B batch, N positions, H query heads, G key/value heads, D head dim.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import kernels
from ..pattern import DilatedPattern
from ..plan.choice import check_dealing, choose_exchange
from ..plan.plan import Plan
from ..plan.planner import chunk_finder, make_plan
from ..plan.sharding import Shard, check_documents, join_shards, make_shards
from ..run import all_gather, ring
from ..run.dealing import to_heads, to_positions
from .context import ContextParallel, context_named
from .handshake import all_or_none
from .held import Held
from .link import Link
from .one_rank import OneRankLink
from .simulated import SimulatedLink, run_ranks

_LOOPS: dict[str, ModuleType] = {"ring": ring, "all_gather": all_gather, "all_to_all": ring, "simulated": ring}


@dataclass(frozen=True)
class Call:
    """What a call is beside its tensors. `parallel` is the key of a context, "" for one device."""

    pattern: DilatedPattern
    scale: float
    backend: str
    parallel: str
    needs_grad: str
    return_lse: bool

    @property
    def kernel_scale(self) -> float:
        """Kernels put -inf at masked scores and scale afterwards: NaN for 0, +inf for negative scales."""
        return abs(self.scale) or 1.0

    def signed(self, x: Tensor) -> Tensor:
        """query, or dq, times what `kernel_scale` leaves out: the sign of the scale, or 0."""
        return x if self.scale > 0 else x * math.copysign(self.scale != 0, self.scale)


class _Route(NamedTuple):
    """How this rank carries out a call: the loop, its plan, the link of the ring, and the link that deals heads.

    loop: a module with `forward` and `backward` over a plan, or a kernel's own way to do all of it on one device.
    """

    kernel: ModuleType
    loop: Any
    plan: Plan
    link: Link | None
    inner: Link | None
    inner_lengths: tuple[int, ...]


def forward(
    call: Call, query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensor, int]:
    """out (B, N, H, D), lse (B, N, H), and the number of the call."""
    context = context_named(call.parallel)
    number = context.calls + 1 if context is not None else 0
    if context is not None and context.runs_all:
        return *_simulated_forward(call, context.num_simulated, context, query, key, value, cu_seqlens), number
    with all_or_none(context, ValueError):
        route = _route(call, context, "forward", number, query, key, cu_seqlens)
    if context is not None:
        context.calls = number  # on all ranks or on none: a call that one rank refused has no number
    with all_or_none(context):
        if route.inner is not None:
            query, key, value = (_heads(x, route, "forward") for x in (query, key, value))
        out, lse = route.loop.forward(route.kernel, route.plan, call.kernel_scale, query, key, value, route.link)
        if route.inner is not None:
            out, lse = _positions(out, route, "forward"), _positions(lse.unsqueeze(-1), route, "forward")[..., 0]
    return out, lse, number


def backward(
    call: Call,
    number: int,
    dout: Tensor,
    dlse: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq (B, N, H, D), dk and dv (B, N, G, D)."""
    context = context_named(call.parallel)
    if context is not None and context.runs_all:
        tensors = (dout, dlse, query, key, value, out, lse)
        return _simulated_backward(call, context.num_simulated, context, tensors, cu_seqlens)
    with all_or_none(context, ValueError):
        route = _route(call, context, "backward", number, query, key, cu_seqlens)
    with all_or_none(context):
        if route.inner is not None:
            if dlse is None and call.return_lse:  # the loss of a rank may not use lse: all deal its gradient, or none
                dlse = torch.zeros_like(lse)
            dout, query, key, value, out = (_heads(x, route, "backward") for x in (dout, query, key, value, out))
            lse = _heads(lse.unsqueeze(-1), route, "backward")[..., 0]
            dlse = None if dlse is None else _heads(dlse.unsqueeze(-1), route, "backward")[..., 0]
        tensors = (dout, dlse, query, key, value, out, lse)
        grads = route.loop.backward(route.kernel, route.plan, call.kernel_scale, *tensors, route.link)
        if route.inner is not None:
            grads = tuple(_positions(x, route, "backward") for x in grads)
    return grads


def _heads(x: Tensor, route: _Route, stage: str) -> Tensor:
    assert route.inner is not None
    return to_heads(x, route.inner_lengths, route.inner, f"{stage}, heads for positions")


def _positions(x: Tensor, route: _Route, stage: str) -> Tensor:
    assert route.inner is not None
    return to_positions(x, route.inner_lengths, route.inner, f"{stage}, positions for heads")


def _route(
    call: Call,
    context: ContextParallel | None,
    stage: str,
    number: int,
    query: Tensor,
    key: Tensor,
    cu_seqlens: Tensor | None,
) -> _Route:
    """Handshake, choose the exchange, plan."""
    batch, length, num_heads, head_dim = query.shape
    num_kv_heads = key.shape[2]
    kernel = kernels.choose(call.backend, query)
    if context is None or (context.link is None and context.others is None):
        documents = documents_of(cu_seqlens, length)
        plan = make_plan(call.pattern, make_shards("contiguous", (length,)), 0, num_heads, num_kv_heads, documents)
        borders = documents or (0, length)
        return _Route(kernel, _one_device_loop(kernel, call, borders, query, num_kv_heads, stage), plan, None, None, ())
    given = None if cu_seqlens is None else tuple(cu_seqlens.tolist())
    lengths = context.handshake(
        length,
        {
            "call": f"{stage} {number}",
            "pattern": call.pattern,
            "shape": f"batch {batch}, {num_heads} heads, {num_kv_heads} key/value heads, head dim {head_dim}",
            "dtype": query.dtype,
            "device": query.device.type,
            "scale": call.scale,
            "sharding": context.sharding,
            "exchange": context.exchange,
            "cu_seqlens": given if given is None or len(given) <= 64 else (len(given), hash(given)),
            "gradients": call.needs_grad or "none",
            "return_lse": call.return_lse,
        },
    )
    documents = documents_of(cu_seqlens, sum(lengths))
    name, shards = context.exchange, context.shards(lengths)
    if name == "auto" and context.inner is None:
        sizes = (batch, head_dim, query.element_size())
        name = choose_exchange(call.pattern, shards, num_heads, num_kv_heads, documents, *sizes).exchange
    inner, link = (context.link, None) if name == "all_to_all" else (context.inner, context.outer)
    if inner is None:
        plan = make_plan(call.pattern, shards, context.rank, num_heads, num_kv_heads, documents)
        if context.others is not None:
            finder = chunk_finder(call.pattern, shards, context.rank, num_heads, num_kv_heads, documents)
            link = OneRankLink(context.rank, context.others, finder)
        return _Route(kernel, _LOOPS[name], plan, link, None, ())
    held = _dealt_heads(num_heads, num_kv_heads, inner)
    size = inner.world_size
    groups = [lengths[i : i + size] for i in range(0, len(lengths), size)]
    plan = make_plan(
        call.pattern,
        tuple(join_shards(shards[i : i + size]) for i in range(0, len(lengths), size)),
        context.rank // size,
        num_heads,
        num_kv_heads,
        documents,
        held,
    )
    return _Route(kernel, _LOOPS.get(name, ring), plan, link, inner, groups[context.rank // size])


def _one_device_loop(
    kernel: ModuleType, call: Call, borders: tuple[int, ...], query: Tensor, num_kv_heads: int, stage: str
) -> Any:
    """The kernel's own way over all branches at once, if it has one and it pays; else the ring of one."""
    if hasattr(kernel, "whole") and query.numel():
        whole = kernel.whole(call.pattern, borders, query, num_kv_heads, backward=stage == "backward")
        if whole.is_fused:
            return whole
    return ring


def _dealt_heads(num_heads: int, num_kv_heads: int, inner: Link) -> range:
    """The query heads that an all-to-all deals to this rank."""
    size = inner.world_size
    check_dealing(num_kv_heads, size)
    share = num_heads // size
    return range(inner.rank * share, (inner.rank + 1) * share)


def documents_of(cu_seqlens: Tensor | None, seq_len: int) -> tuple[int, ...] | None:
    """The borders as integers, checked against the length of the whole sequence."""
    if cu_seqlens is None:
        return None
    borders = tuple(cu_seqlens.tolist())
    check_documents(borders, seq_len)
    return borders


def _rows_of(x: Tensor, shard: Shard) -> Tensor:
    """A simulated rank's rows of a full (B, N, ...) tensor, laid out as a rank's own: the loop makes fewer calls then.

    A view if they are one span of a batch of 1.
    """
    if len(shard) == 1:
        return x[:, shard[0].start : shard[0].stop].contiguous()
    return torch.cat([x[:, :0], *(x[:, start:stop] for start, stop in shard)], dim=1)


def _place(full: Tensor, shard: Shard, rows: Tensor) -> None:
    row = 0
    for start, stop in shard:
        full[:, start:stop] = rows[:, row : row + stop - start]
        row += stop - start


def _simulated_forward(
    call: Call,
    world_size: int,
    context: ContextParallel,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor]:
    plans, shards, kernel = _simulated_plans(call, world_size, context, query, key, cu_seqlens)

    def work(rank: int, link: SimulatedLink) -> tuple[Tensor, Tensor]:
        q, k, v = (_rows_of(x, shards[rank]) for x in (query, key, value))
        with _measured(context, rank, link, (q, k, v)):
            return ring.forward(kernel, plans[rank], call.kernel_scale, q, k, v, link)

    parts = run_ranks(world_size, work)
    out, lse = torch.empty_like(query, memory_format=torch.contiguous_format), None
    for shard, (out_k, lse_k) in zip(shards, parts, strict=True):
        lse = lse_k.new_empty(query.shape[:3]) if lse is None else lse
        _place(out, shard, out_k)
        _place(lse, shard, lse_k)
    assert lse is not None
    return out, lse


def _simulated_backward(
    call: Call,
    world_size: int,
    context: ContextParallel,
    tensors: tuple[Tensor, Tensor | None, Tensor, Tensor, Tensor, Tensor, Tensor],
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    query, key, value = tensors[2:5]
    plans, shards, kernel = _simulated_plans(call, world_size, context, query, key, cu_seqlens)

    def work(rank: int, link: SimulatedLink) -> tuple[Tensor, Tensor, Tensor]:
        dout, q, k, v, out, lse = (_rows_of(x, shards[rank]) for x in (tensors[0], *tensors[2:]))
        dlse = None if tensors[1] is None else _rows_of(tensors[1], shards[rank])
        with _measured(context, rank, link, (dout, dlse, q, k, v, out, lse)):
            return ring.backward(kernel, plans[rank], call.kernel_scale, dout, dlse, q, k, v, out, lse, link)

    dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (query, key, value))
    for shard, parts in zip(shards, run_ranks(world_size, work), strict=True):
        for full, rows in zip((dq, dk, dv), parts, strict=True):
            _place(full, shard, rows)
    return dq, dk, dv


@contextmanager
def _measured(
    context: ContextParallel, rank: int, link: SimulatedLink, rows: Sequence[Tensor | None]
) -> Iterator[None]:
    """Add what a simulated rank sends and holds to the context's list, if it keeps one."""
    if context.uses is None:
        yield
        return
    with Held(rows) as held:
        yield
    context.uses[rank] = context.uses[rank].after(link.bytes_sent, held.peak_bytes)


def _simulated_plans(
    call: Call, world_size: int, context: ContextParallel, query: Tensor, key: Tensor, cu_seqlens: Tensor | None
) -> tuple[list[Plan], tuple[Shard, ...], ModuleType]:
    num_heads, num_kv_heads, length = query.shape[2], key.shape[2], query.shape[1]
    documents = documents_of(cu_seqlens, length)
    shards = context.shards(context.default_lengths(length))
    plans = [make_plan(call.pattern, shards, k, num_heads, num_kv_heads, documents) for k in range(world_size)]
    return plans, shards, kernels.choose(call.backend, query)
