"""Sockets of a context in each process on gloo, counted after a forward and a backward, beside the peers of the plans.

Connections open on first use. A rank then has sockets to the ranks that it meets in handshakes, and to those that its
plan names. Each of the two groups has one more, which listens.
"""

import os
from collections.abc import Callable
from contextlib import suppress
from itertools import chain
from typing import Any, NamedTuple

import torch

from ring_dilated_attention import dilated_attention
from ring_dilated_attention.commands.errors import Squares
from ring_dilated_attention.commands.local_ranks import Launch, Worker, run_ranks
from ring_dilated_attention.pattern import DilatedPattern
from ring_dilated_attention.plan.job import Job
from ring_dilated_attention.plan.planner import make_plan
from ring_dilated_attention.plan.rounds import rounds_of
from ring_dilated_attention.plan.sharding import Cut
from ring_dilated_attention.ranks.context import ContextParallel
from ring_dilated_attention.ranks.processes import Processes

from .gate import GateError, gate, gate_squares
from .measure import Sizes
from .record import markdown

SUMMARY = "sockets of a context in each process, counted on gloo to 32 ranks"
ROWS_PER_RANK, NUM_GROUPS = 8, 2


class Settings(NamedTuple):
    ranks: tuple[int, ...] = (4, 8, 16, 32)
    seconds: float = 300


FULL = Settings()
QUICK = Settings(ranks=(4,))
CALLS = ((False, "contiguous"), (True, "contiguous"), (True, "zigzag"))


def num_steps(settings: Settings) -> int:
    return len(settings.ranks) * len(CALLS)


def run(settings: Settings, step: Callable[[str], None]) -> list[dict[str, Any]]:
    rows = []
    for num_ranks in settings.ranks:
        for is_causal, sharding in CALLS:
            step(f"{num_ranks} ranks, {sharding}{', causal' * is_causal}")
            sizes = Sizes(ROWS_PER_RANK * num_ranks, 2, 8)
            pattern = DilatedPattern((sizes.seq_len,), (1,), is_causal=is_causal)
            launch = Launch(num_ranks, seconds=settings.seconds)
            found = run_ranks(launch, _rank, sizes, pattern, sharding)
            counted = [number for _, number in found]
            if counted != (
                expected := [planned(rank, num_ranks, sizes, pattern, sharding) for rank in range(num_ranks)]
            ):
                raise GateError(f"ranks have {counted} sockets, and by their plans {expected}")
            rows.append(
                {
                    "segment_lengths": pattern.segment_lengths,
                    "dilation_rates": pattern.dilation_rates,
                    "is_causal": is_causal,
                    "sharding": sharding,
                    **sizes.as_json(),
                    "ranks": num_ranks,
                    "gate": gate(sizes, pattern, [squares for squares, _ in found]),
                    "sockets": counted,
                }
            )
    return rows


def planned(rank: int, num_ranks: int, sizes: Sizes, pattern: DilatedPattern, sharding: str) -> int:
    """One socket for each group, for each rank that this one meets in handshakes, and for each peer of its plan."""
    met = set(chain(*rounds_of(rank, num_ranks)))
    shards = Cut(sharding, num_ranks).shards_of((ROWS_PER_RANK,) * num_ranks)
    plan = make_plan(Job(pattern, shards, sizes.num_heads, sizes.num_heads), rank)
    messages = chain(*((*hop.sends, *hop.receives, *hop.grad_sends, *hop.grad_receives) for hop in plan.hops))
    return NUM_GROUPS + len(met) + len({message.peer for message in messages})


def _rank(worker: Worker, sizes: Sizes, pattern: DilatedPattern, sharding: str) -> tuple[Squares, int]:
    before = _num_sockets()
    parallel = ContextParallel(exchange="ring", sharding=sharding)
    assert isinstance(parallel.ranks, Processes)
    rows = [torch.randn(1, ROWS_PER_RANK, sizes.num_heads, sizes.head_dim, requires_grad=True) for _ in range(3)]
    dilated_attention(*rows, pattern, parallel=parallel).sum().backward()
    opened = _num_sockets() - before
    parallel.ranks.records(torch.zeros(1), "the end of the count")  # until here no rank leaves
    return gate_squares(sizes, pattern, parallel), opened


def _num_sockets() -> int:
    """Of this process."""
    found = 0
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # the folder that is listed has gone
            found += os.readlink(f"/proc/self/fd/{name}").startswith("socket:")
    return found


def table(rows: list[dict[str, Any]]) -> str:
    headers = ("ranks", "sharding", "causal", "sockets of a process", "if all were connected")
    lines = []
    for row in rows:
        least, most = min(row["sockets"]), max(row["sockets"])
        spread = str(least) if least == most else f"{least} to {most}"
        # Each group would have a socket that listens, and p - 1 connections.
        all_connected = NUM_GROUPS * row["ranks"]
        lines.append(
            (str(row["ranks"]), row["sharding"], "yes" if row["is_causal"] else "no", spread, f"{all_connected}")
        )
    return (
        "A dense ring, forward and backward. Counted: the sockets that a process has after the backward and had not "
        "before it made the context. Each process has one for each group, for each rank that it meets in handshakes, "
        f"and for each peer of its plan: the benchmark fails otherwise.\n\n{markdown(headers, lines)}"
    )
