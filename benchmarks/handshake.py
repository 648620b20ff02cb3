"""Messages of a handshake per rank, in rounds and if each rank sends to all others, and how long both take here.

Messages are counted in this process, by the library's own loop over a link that only counts. Before that, rounds
without processes show that every rank hears of every other. Times are of the messages alone, between processes.

A call that repeats another computes while its handshake goes on. Its steps are timed by turns with steps of contexts
that have forgotten their calls, and wait for the handshake first.
"""

import time
from collections.abc import Callable
from functools import reduce
from operator import or_
from typing import Any, NamedTuple

import torch

from ring_dilated_attention.commands.errors import Squares
from ring_dilated_attention.commands.local_ranks import Launch, Worker, run_ranks
from ring_dilated_attention.pattern import DilatedPattern
from ring_dilated_attention.plan.rounds import num_rounds, rounds_of
from ring_dilated_attention.ranks.context import ContextParallel
from ring_dilated_attention.ranks.link import Addressed, GroupLink
from ring_dilated_attention.ranks.processes import Processes

from .gate import GateError, gate, gate_squares
from .measure import Sizes, attend, make_tensors, quantiles
from .record import markdown, seconds

SUMMARY = "messages of a handshake per rank, counted to 4,096 ranks, and its time"
RECORD = torch.zeros(3, dtype=torch.int64)


class Settings(NamedTuple):
    counted: tuple[int, ...] = (2, 3, 4, 5, 8, 16, 64, 256, 1024, 4096)
    timed: tuple[int, ...] = (2, 3, 4)
    repeats: int = 40
    in_a_row: int = 25
    sizes: Sizes = Sizes(256, 2, 16)
    pattern: DilatedPattern = DilatedPattern((64, 256), (1, 4))
    steps: tuple[int, ...] = (512, 2048, 8192, 32_768)  # positions
    seconds: float = 600


FULL = Settings()
QUICK = Settings(counted=(2, 3, 4, 64), timed=(2, 3), repeats=2, in_a_row=2, steps=(256,))


def num_steps(settings: Settings) -> int:
    return len(settings.counted)


class CountingLink(GroupLink):
    """A rank of so many that sends nothing, and counts what it would send."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size, self.num_sent = rank, world_size, 0

    def _meet(self, sends: Addressed, receives: Addressed, moment: str) -> None:
        self.num_sent += len(sends)


def run(settings: Settings, step: Callable[[str], None]) -> list[dict[str, Any]]:
    rows = []
    for num_ranks in settings.counted:
        step(f"{num_ranks:,} ranks")
        row: dict[str, Any] = {
            "segment_lengths": settings.pattern.segment_lengths,
            "dilation_rates": settings.pattern.dilation_rates,
            "is_causal": settings.pattern.is_causal,
            **settings.sizes.as_json(),
            "ranks": num_ranks,
            "messages": messages(num_ranks),
            "gate": {"passed": True, "error": check_all_hear(num_ranks), "tolerance": 0},
        }
        if num_ranks in settings.timed:
            launch = Launch(num_ranks, is_pinned=True, seconds=settings.seconds)
            found = run_ranks(launch, _rank, settings)
            gate(settings.sizes, settings.pattern, [squares for squares, _, _ in found])
            slowest = {way: [max(x) for x in zip(*(times[way] for _, times, _ in found), strict=True)] for way in WAYS}
            row |= {"threads_per_rank": launch.num_threads, "seconds": {w: quantiles(x) for w, x in slowest.items()}}
            row |= {"steps": found[0][2]} if num_ranks == 2 else {}
        rows.append(row)
    return rows


def messages(num_ranks: int) -> dict[str, int]:
    """By way: what the rank sends that sends most."""
    found = {}
    for way, meet in WAYS.items():
        links = [CountingLink(rank, num_ranks) for rank in {0, num_ranks // 2, num_ranks - 1}]
        for link in links:
            meet(link)
        found[way] = max(link.num_sent for link in links)
    return found


def check_all_hear(num_ranks: int) -> int:
    """Raise GateError unless each rank hears of all others in the rounds; 0 then."""
    rounds = [list(rounds_of(rank, num_ranks)) for rank in range(num_ranks)]
    known = [1 << rank for rank in range(num_ranks)]
    for number in range(num_rounds(num_ranks)):
        heard = [[known[source] for _, source in rounds[rank][number]] for rank in range(num_ranks)]
        known = [reduce(or_, some, known[rank]) for rank, some in enumerate(heard)]
    if deaf := sum(x != (1 << num_ranks) - 1 for x in known):
        raise GateError(f"{deaf:,} of {num_ranks:,} ranks do not hear of all others")
    return 0


def _in_rounds(link: GroupLink) -> None:
    link.largest(RECORD, "the benchmark")


def _all_to_all(link: GroupLink) -> None:
    others = [peer for peer in range(link.world_size) if peer != link.rank]
    come = [(torch.empty_like(RECORD), peer) for peer in others]
    link._meet([(RECORD, peer) for peer in others], come, "the benchmark")


WAYS: dict[str, Callable[[GroupLink], None]] = {"rounds": _in_rounds, "all to all": _all_to_all}


def _rank(worker: Worker, settings: Settings) -> tuple[Squares, dict[str, list[float]], list[dict[str, Any]]]:
    parallel = ContextParallel(exchange="ring")
    squares = gate_squares(settings.sizes, settings.pattern, parallel)
    assert isinstance(parallel.ranks, Processes)
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    for repeat in range(1 + settings.repeats):
        for way in list(WAYS)[:: 1 if repeat % 2 else -1]:
            _all_to_all(parallel.ranks.control)  # ranks begin together
            start = time.perf_counter()
            for _ in range(settings.in_a_row):
                WAYS[way](parallel.ranks.control)
            if repeat:
                times[way].append((time.perf_counter() - start) / settings.in_a_row)
    return squares, times, _steps(settings, parallel) if parallel.world_size == 2 else []


def _steps(settings: Settings, parallel: ContextParallel) -> list[dict[str, Any]]:
    """Forward and backward with the handshake first and with a hidden one, by turns."""
    rows = []
    for n in settings.steps:
        sizes, pattern = Sizes(n, 4, 32), DilatedPattern((n // 8, n), (1, 8), is_causal=True)
        inputs, dout = make_tensors(sizes, parallel)
        found: dict[str, list[float]] = {"first": [], "hidden": []}
        num_steps = max(1, min(settings.in_a_row, 16_384 // n))
        for repeat in range(1 + settings.repeats):
            for way in list(found)[:: 1 if repeat % 2 else -1]:
                _in_rounds(parallel.ranks.control)  # type: ignore[attr-defined]  # ranks begin together
                start = time.perf_counter()
                for _ in range(num_steps):
                    if way == "first":
                        parallel.ranks.known.clear()
                    torch.autograd.grad(attend(inputs, pattern, parallel), inputs, dout)
                if repeat:
                    found[way].append((time.perf_counter() - start) / num_steps)
        ratios = [hidden / first for first, hidden in zip(*found.values(), strict=True)]
        rows.append({"positions": n, **{way: quantiles(x) for way, x in found.items()}, "ratio": quantiles(ratios)})
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    headers = (
        "ranks",
        "messages per rank, in rounds",
        "to all others",
        "ms in rounds",
        "ms to all others",
    )
    lines = []
    for row in rows:
        sent, found = row["messages"], row.get("seconds")
        times = [_milliseconds(found[way]) if found else "" for way in WAYS]
        lines.append((f"{row['ranks']:,}", *(f"{sent[way]:,}" for way in WAYS), *times))
    steps = [
        (f"{step['positions']:,}", *(_milliseconds(step[way]) for way in ("first", "hidden")), seconds(step["ratio"]))
        for row in rows
        for step in row.get("steps", ())
    ]
    names = ("positions", "ms, handshake first", "ms, handshake hidden", "hidden / first")
    return (
        "Messages are counted, of one forward or backward whose lengths are those of the call before. Times are "
        "medians (least to most) of the slowest rank, between processes of one thread, each on a core of its own where "
        f"there are as many cores.\n\n{markdown(headers, lines)}\n\n"
        "Steps (a forward and its backward) of (n/8, n)/(1, 8), causal, on 2 ranks: with the handshake first, as in a "
        "first call, and with a handshake that goes on while the rank computes with its own rows. The ratio is that of "
        f"turns beside each other.\n\n{markdown(names, steps)}"
    )


def _milliseconds(found: dict[str, float]) -> str:
    return seconds({name: 1e3 * found[name] for name in ("min", "median", "max")})
