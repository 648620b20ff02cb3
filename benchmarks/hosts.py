"""Two hosts on one machine, and a slow link between them: what crosses it, counted by the interface, and the time.

The hosts are namespaces (`two_hosts`), with one core each. A torchrun on each starts its ranks and numbers them host by
host. `srun --distribution=cyclic` deals ranks to hosts in turn: rank 0 to the first host, rank 1 to the second. A
context puts the ranks of a host side by side all the same, by their hosts' names. "Hosts alternate" is what the ring is
without them, where all ranks say the same name.

The clock (`forecast/clock.py`) is given the rate that was set for the link, and what the ranks measured before: the
rate of their kernels, all at once, and messages inside a host. It gives each rank a network card of its own. Where k
ranks of a host send across, they share the link, and the clock is given a k-th of its rate.
"""

import os
import socket
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ring_dilated_attention.commands.errors import Squares
from ring_dilated_attention.forecast import call_cost
from ring_dilated_attention.forecast.clock import Hardware, model_step
from ring_dilated_attention.pattern import DilatedPattern
from ring_dilated_attention.plan.exchange import RankPlan
from ring_dilated_attention.plan.job import Job
from ring_dilated_attention.plan.sharding import make_shards, split_lengths
from ring_dilated_attention.plan.sizes import Sizes as PlannedSizes
from ring_dilated_attention.ranks.context import ContextParallel
from ring_dilated_attention.ranks.link import GroupLink

from . import two_hosts
from .gate import gate, gate_squares
from .measure import Sizes, dilated_call, quantiles
from .overlap import HANDSHAKE, Stage, take_step
from .record import branches, markdown, tensors
from .two_hosts import left_bytes, run_ranks

SUMMARY = "two hosts on one machine, with a torchrun each: what crosses a slow link between them, and the time"
NUM_HOSTS = 2
SMALL_BYTES, PROBES = 256, 3


class Way(NamedTuple):
    """How rows travel. in_turn: whether ranks are dealt to hosts in turn. is_told: whether they hear of each other's
    hosts."""

    name: str
    exchange: str = "ring"
    deals: bool = False  # heads, inside a host
    in_turn: bool = False
    is_told: bool = True


RING, GATHER = Way("ring, by host"), Way("all-gather", "all_gather")
IN_TURN, ALTERNATE = Way("ring, dealt in turn", in_turn=True), Way("ring, hosts alternate", in_turn=True, is_told=False)
WAYS = (RING, IN_TURN, ALTERNATE, GATHER, Way("2-D mesh", deals=True))


class Setup(NamedTuple):
    sizes: Sizes
    pattern: DilatedPattern
    ranks_per_host: int
    ways: tuple[Way, ...]


class Settings(NamedTuple):
    setups: tuple[Setup, ...]
    bits_per_second: int = 200_000_000
    delay_seconds: float = 1e-3
    repeats: int = 3
    seconds: float = 600


FULL = Settings(
    (
        Setup(Sizes(4096, 4, 64), DilatedPattern.dense(), 2, WAYS),
        Setup(Sizes(16_384, 4, 64), DilatedPattern((2048, 16_384), (1, 4)), 2, WAYS),
        Setup(Sizes(4096, 4, 64), DilatedPattern.dense(), 1, (RING, GATHER)),
        Setup(Sizes(16_384, 2, 64), DilatedPattern.dense(), 1, (RING, GATHER)),
    )
)
QUICK = Settings(
    (Setup(Sizes(512, 2, 16), DilatedPattern((64, 512), (1, 8)), 1, (RING, GATHER)),), repeats=1, seconds=120
)


def why_not() -> str | None:
    """The reason why it cannot run here, or None."""
    return two_hosts.why_not(FULL.bits_per_second, FULL.delay_seconds)


def num_steps(settings: Settings) -> int:
    return len(settings.setups)


def run(settings: Settings, step: Callable[[str], None]) -> list[dict[str, Any]]:
    rows = []
    with two_hosts.two_hosts(settings.bits_per_second, settings.delay_seconds) as hosts:
        for setup in settings.setups:
            step(f"{setup.ranks_per_host} ranks a host, {setup.sizes.seq_len:,} positions")
            ranks = run_ranks(hosts, setup.ranks_per_host, settings.seconds, _rank, setup, settings.repeats)
            for i, way in enumerate(setup.ways):
                found = [rank.ways[i] for rank in ranks]
                row = _row(settings, setup, way, ranks[0].measured, found)
                row |= {"threads_per_rank": 1, "why_no_delay": hosts.why_no_delay}
                rows.append(row | {"gate": gate(setup.sizes, setup.pattern, [one.squares for one in found])})
    return rows


class Measured(NamedTuple):
    """Of the slowest rank, before any step."""

    forward_seconds: float
    backward_seconds: float
    handshake_seconds: float
    across_seconds: float  # of a small message
    inside_seconds: tuple[float, float]  # of a small message and of a chunk


class OfWay(NamedTuple):
    """What a rank found of one way. left: bytes that left its host in each step."""

    squares: Squares
    left: float
    steps: list[dict[str, Stage]]


class OfRank(NamedTuple):
    measured: Measured
    ways: list[OfWay]


def _rank(setup: Setup, repeats: int) -> OfRank:
    host, place, size = int(os.environ["GROUP_RANK"]), int(os.environ["LOCAL_RANK"]), setup.ranks_per_host
    store, number, world_size = next(dist.rendezvous("env://"))
    measured, found = None, []
    for way in setup.ways:
        socket.sethostname(f"host-{host}" if way.is_told else "host")
        rank = place * NUM_HOSTS + host if way.in_turn else number
        # Under a name of its own: in the store are addresses of the last group, at which nobody listens any more.
        own = dist.PrefixStore(way.name, store)
        dist.init_process_group("gloo", store=own, rank=rank, world_size=world_size)
        rows = torch.arange(world_size).view(NUM_HOSTS, size)
        parallel = ContextParallel(DeviceMesh("cpu", rows) if way.deals else None, exchange=way.exchange)
        measured = measured or _measure(setup, parallel)
        squares, steps = gate_squares(setup.sizes, setup.pattern, parallel), []
        for repeat in range(1 + repeats):
            if repeat == 1:
                before = _left(parallel)
            steps.append(take_step(setup.sizes, setup.pattern, parallel))
        found.append(OfWay(squares, (_left(parallel) - before) / repeats, steps[1:]))
        parallel.close()
        dist.destroy_process_group()
    assert measured is not None
    return OfRank(measured, found)


def _meet(parallel: ContextParallel) -> None:
    parallel.ranks.handshake(0, {"call": "start together"})


def _left(parallel: ContextParallel) -> int:
    """The host's counter, while no rank sends."""
    _meet(parallel)
    time.sleep(0.1)  # what was sent last is confirmed
    left = left_bytes()
    _meet(parallel)
    return left


def _measure(setup: Setup, parallel: ContextParallel) -> Measured:
    link, size = getattr(parallel.ranks, "all", None), setup.ranks_per_host
    assert isinstance(link, GroupLink)
    place = link.rank % size
    inside, across = link.rank - place + (place + 1) % size, (link.rank + size) % link.world_size
    own = setup.sizes._replace(seq_len=setup.sizes.seq_len // link.world_size)
    chunk = 2 * own.batch * own.seq_len * own.num_heads * own.head_dim * own.dtype.itemsize

    def seconds(action: Callable[[], object]) -> float:
        times = []
        for _ in range(1 + PROBES):
            _meet(parallel)
            began = time.perf_counter()
            action()
            times.append(time.perf_counter() - began)
        return statistics.median(times[1:])

    def swap(peer: int, num_bytes: int) -> Callable[[], object]:
        leaves, comes = torch.zeros(2, num_bytes, dtype=torch.uint8)
        return lambda: link.exchange([(leaves, peer)], [(comes, peer)], "a probe").wait()

    call, times = dilated_call(own, DilatedPattern.dense()), []
    for _ in range(1 + PROBES):
        _meet(parallel)
        times.append(call())
    forward, backward = (statistics.median(x) for x in zip(*times[1:], strict=True))
    inner = tuple(seconds(swap(inside, n)) for n in (SMALL_BYTES, chunk)) if size > 1 else (0.0, 0.0)
    mine = (forward, backward, seconds(lambda: _meet(parallel)), seconds(swap(across, SMALL_BYTES)), *inner)
    everyone = link.records(torch.tensor(mine, dtype=torch.float64), "the exchange of what was measured")
    forward, backward, handshake, small_across, small, large = torch.stack(everyone).amax(0).tolist()
    return Measured(forward, backward, handshake, small_across, (small, large))


def _row(settings: Settings, setup: Setup, way: Way, measured: Measured, ranks: Sequence[OfWay]) -> dict[str, Any]:
    sizes, pattern, p = setup.sizes, setup.pattern, len(ranks)
    plans, inner = plans_of(setup, way), setup.ranks_per_host if way.deals else 1
    # Hosts by place in the order of the ring, and by rank.
    hosts = [place // setup.ranks_per_host for place in range(p)] if way.is_told else [k % NUM_HOSTS for k in range(p)]
    crossing = crossing_bytes(plans, hosts, inner, sizes.planned())
    out_of = [[x for x, host in zip(crossing, hosts, strict=True) if host == k] for k in range(NUM_HOSTS)]
    sharing = max(sum(x > 0 for x in ranks_of) for ranks_of in out_of)
    hardware = hardware_of(settings, setup, measured, sharing, is_told=way.is_told)
    dealings = [plan.dealing for plan in plans if plan.dealing is not None]
    modelled = model_step([plan.plan for plan in plans], sizes.planned(), hardware, dealings or None)
    steps = list(zip(*([_step_of(step) for step in rank.steps] for rank in ranks), strict=True))
    seconds = quantiles(max(one.seconds for one in step) for step in steps)
    return {
        "segment_lengths": pattern.segment_lengths,
        "dilation_rates": pattern.dilation_rates,
        "is_causal": pattern.is_causal,
        **sizes.as_json(),
        "ranks": p,
        "hosts": NUM_HOSTS,
        "way": way.name,
        "bits_per_second": settings.bits_per_second,
        "planned_bytes": [sum(ranks_of) for ranks_of in out_of],
        "counted_bytes": [rank.left for rank in ranks[:: setup.ranks_per_host]],
        "step_seconds": seconds,
        "exposed_share": quantiles(max(one.exposed / one.seconds for one in step) for step in steps),
        "handshake_share": quantiles(max(one.handshakes / one.seconds for one in step) for step in steps),
        "modelled_seconds": modelled.step_seconds,
        "modelled_exposed_share": max(rank.exposed_seconds for rank in modelled.ranks) / modelled.step_seconds,
        "hardware": hardware._asdict(),
        "sharing": sharing,
    }


def plans_of(setup: Setup, way: Way) -> list[RankPlan]:
    """By place in the order of the ring."""
    sizes, num_ranks = setup.sizes, NUM_HOSTS * setup.ranks_per_host
    shards = make_shards("contiguous", split_lengths(sizes.seq_len, num_ranks))
    job = Job(setup.pattern, shards, sizes.num_heads, sizes.num_heads)
    return call_cost.all_plans(job, call_cost.Way(way.exchange, setup.ranks_per_host if way.deals else 1))


def crossing_bytes(plans: Sequence[RankPlan], hosts: Sequence[int], inner: int, sizes: PlannedSizes) -> list[int]:
    """The bytes that each rank sends to another host in a forward and its backward. hosts: of each rank. inner: the
    ranks of a group that deals heads; a peer is then the number of a group, and heads are dealt inside hosts."""
    found = []
    for rank, (plan, _) in enumerate(plans):

        def units(messages: Any, rank: int = rank) -> int:
            return sum(m.size for m in messages if hosts[m.peer * inner + rank % inner] != hosts[rank])

        chunks, gradients = (sum(units(getattr(hop, x)) for hop in plan.hops) for x in ("sends", "grad_sends"))
        found.append(sizes.unit * (2 * chunks * sizes.itemsize + gradients * sizes.sum_itemsize))
    return found


def hardware_of(settings: Settings, setup: Setup, measured: Measured, sharing: int, *, is_told: bool) -> Hardware:
    """What the clock is given: two networks if neighbours in the ring may share a host, otherwise the slow one."""
    sizes, size = setup.sizes, setup.ranks_per_host
    rows = sizes.seq_len // (NUM_HOSTS * size)
    product = 2 * sizes.batch * sizes.num_heads * sizes.head_dim * rows**2
    chunk = 2 * sizes.batch * rows * sizes.num_heads * sizes.head_dim * sizes.dtype.itemsize
    small, large = measured.inside_seconds
    hardware = Hardware(
        flops_per_second=2 * product / measured.forward_seconds,
        bytes_per_second=settings.bits_per_second / 8 / max(sharing, 1),
        latency_seconds=measured.across_seconds,
        backward_flops_per_second=5 * product / measured.backward_seconds,
        handshake_seconds=measured.handshake_seconds,
    )
    if size == 1 or not is_told:
        return hardware
    fast = chunk / max(large - small, large / 2)
    return hardware._replace(gpus_per_host=size, host_bytes_per_second=fast, host_latency_seconds=small)


class _Step(NamedTuple):
    seconds: float
    exposed: float
    handshakes: float


def _step_of(step: dict[str, Stage]) -> _Step:
    waits = [wait for stage in step.values() for wait in stage.waits if wait.moment.endswith(HANDSHAKE)]
    seconds, exposed = (sum(getattr(stage, name) for stage in step.values()) for name in ("seconds", "exposed"))
    return _Step(seconds, exposed, sum(wait.end - wait.start for wait in waits))


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        (
            f"{branches(row)}, {row['seq_len']:,} positions, {tensors(row)}",
            str(row["ranks"] // row["hosts"]),
            row["way"],
            f"{max(row['planned_bytes']) / 1e6:.2f}",
            f"{max(row['counted_bytes']) / 1e6:.2f}",
            f"{row['step_seconds']['median']:.2f}",
            f"{row['modelled_seconds']:.2f}",
            f"{row['modelled_seconds'] / row['step_seconds']['median']:.2f}",
            f"{row['exposed_share']['median']:.0%}",
            f"{row['handshake_share']['median']:.0%}",
        )
        for row in rows
    ]
    headers = (
        "pattern",
        "ranks a host",
        "way",
        "out of a host by the plan, MB",
        "counted, MB",
        "step, s",
        "clock, s",
        "clock / step",
        "exposed",
        "in handshakes",
    )
    first = rows[0]
    delay = f"no delay ({first['why_no_delay']})" if first["why_no_delay"] else "a delay"
    return (
        f"Two hosts on one machine, one core and one torchrun each, with {first['bits_per_second'] / 1e6:.0f} Mbit/s "
        f"each way between them and {delay}. torchrun numbers ranks host by host. Dealt in turn: rank 0 is on the "
        "first host, rank 1 on the second, and so on. Hosts alternate: so too, and both hosts have one name. Forward "
        "and backward. Counted: by the host's interface, headers and handshakes included. "
        "Exposed: of the rank that waits most, for messages and in handshakes; a rank that waits in a handshake waits "
        f"for a late one.\n\n{markdown(headers, lines)}"
    )
