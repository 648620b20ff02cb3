"""Two ranks of one thread against one rank of one thread, and what this machine allows at most.

Parallel efficiency is T1 / (2 T2). The ceiling is the same figure for two processes that share nothing: each computes
half of the heads on one device. All three are timed in turn, in the same two processes, each on a core of its own.
Beside the time of two ranks stands the share of it in which a rank only waits, in hops and handshakes.

Two cores say nothing on more ranks. For those, and beside the two measured ones, stands what the plan's model says.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ring_dilated_attention.commands.errors import Squares
from ring_dilated_attention.commands.local_ranks import Launch, Worker, run_ranks
from ring_dilated_attention.forecast.clock import Hardware, model_step
from ring_dilated_attention.pattern import DilatedPattern
from ring_dilated_attention.plan.job import Job
from ring_dilated_attention.plan.planner import make_plan
from ring_dilated_attention.plan.sharding import default_lengths, make_shards
from ring_dilated_attention.ranks.context import ContextParallel
from ring_dilated_attention.ranks.processes import Processes, recorded_waits

from .gate import gate, gate_squares
from .measure import Sizes, Times, dilated_call, flops_of, quantiles, stopwatch
from .record import branches, markdown, seconds, tensors

SUMMARY = "parallel efficiency of two ranks, beside the machine's ceiling"
NUM_RANKS = 2
MODELLED_RANKS = (2, 4, 8)
SETUPS = ("one rank", "two ranks", "two processes, half of the heads each")
WAITING = "waiting share of two ranks"


class Settings(NamedTuple):
    sizes: Sizes = Sizes(32_768, 4, 64)
    patterns: tuple[tuple[DilatedPattern, str, int], ...] = (  # with the sharding and the number of repeats
        (DilatedPattern((2048, 32_768), (1, 16)), "contiguous", 9),
        (DilatedPattern((32_768,), (1,)), "contiguous", 2),
        (DilatedPattern((32_768,), (1,), is_causal=True), "zigzag", 3),
    )
    seconds: float = 1800


FULL = Settings()
QUICK = Settings(
    Sizes(2048, 2, 32),
    (
        (DilatedPattern((256, 2048), (1, 16)), "contiguous", 2),
        (DilatedPattern((2048,), (1,), is_causal=True), "zigzag", 1),
    ),
    120,
)


def num_steps(settings: Settings) -> int:
    return sum(len(SETUPS) * repeats for *_, repeats in settings.patterns)


def run(settings: Settings, step: Callable[[str], None]) -> list[dict[str, Any]]:
    launch = Launch(NUM_RANKS, num_threads=1, is_pinned=True, seconds=settings.seconds)
    found = run_ranks(launch, _rank_and_network, settings, on_report=lambda rank, message: step(message))
    ranks, networks = zip(*found, strict=True)
    rows = []
    for i, (pattern, sharding, _) in enumerate(settings.patterns):
        passed = gate(settings.sizes, pattern, [found[i][0] for found in ranks])
        row = _row(settings.sizes, pattern, sharding, passed, [found[i][1] for found in ranks])
        rate = min(rates[i] for rates in networks)
        row["threads_per_rank"] = launch.num_threads
        rows.append(row | {"modelled": _modelled(settings.sizes, pattern, row, rate)})
    return rows


def _rank_and_network(
    worker: Worker, settings: Settings
) -> tuple[list[tuple[Squares, dict[str, list[float]]]], list[float]]:
    return _rank(worker, settings), [_bytes_per_second(settings.sizes, *setup[:2]) for setup in settings.patterns]


def _rank(worker: Worker, settings: Settings) -> list[tuple[Squares, dict[str, list[float]]]]:
    """This rank's part of the gate, its seconds in each setup and its waiting share, for each pattern."""
    results = []
    for pattern, sharding, repeats in settings.patterns:
        parallel = ContextParallel(exchange="ring", sharding=sharding)
        squares = gate_squares(settings.sizes, pattern, parallel)
        calls = _calls(worker, settings.sizes, pattern, parallel)
        times: dict[str, list[float]] = {name: [] for name in (*SETUPS, WAITING)}
        for _ in range(repeats):
            for setup, call in calls.items():  # the gate was the warm-up
                if worker.rank == 0:
                    worker.report(f"{branches(_pattern_json(pattern))}, {setup}")
                parallel.ranks.handshake(0, {"call": "start together"})  # and leave the core to whoever is alone
                if call is None:
                    continue
                with recorded_waits(parallel.ranks) as waits:
                    times[setup].append(call().both)
                if setup == SETUPS[1]:
                    times[WAITING].append(sum(wait.end - wait.start for wait in waits) / times[setup][-1])
        results.append((squares, times))
    return results


def _calls(
    worker: Worker, sizes: Sizes, pattern: DilatedPattern, parallel: ContextParallel
) -> dict[str, Callable[[], Times] | None]:
    half = sizes._replace(num_heads=sizes.num_heads // NUM_RANKS)
    return {
        SETUPS[0]: dilated_call(sizes, pattern) if worker.rank == 0 else None,
        SETUPS[1]: dilated_call(sizes, pattern, parallel),
        SETUPS[2]: dilated_call(half, pattern),
    }


def _row(
    sizes: Sizes, pattern: DilatedPattern, sharding: str, passed: dict[str, Any], ranks: list[dict[str, list[float]]]
) -> dict[str, Any]:
    one, two, apart, waiting = ([max(found) for found in _by_repeat(ranks, name)] for name in (*SETUPS, WAITING))
    efficiency = quantiles(a / (NUM_RANKS * b) for a, b in zip(one, two, strict=True))
    ceiling = quantiles(a / (NUM_RANKS * b) for a, b in zip(one, apart, strict=True))
    shards = make_shards(sharding, default_lengths(sharding, sizes.seq_len, NUM_RANKS))
    plans = [make_plan(Job(pattern, shards, sizes.num_heads, sizes.num_heads), rank) for rank in range(NUM_RANKS)]
    arguments = (sizes.batch, sizes.head_dim, sizes.dtype.itemsize)
    sent = [sum(plan.bytes_sent(*arguments, backward=backward) for backward in (False, True)) for plan in plans]
    assert all(sent), "two ranks that send nothing measure no exchange"
    return {
        **_pattern_json(pattern),
        **sizes.as_json(),
        "exchange": "ring",
        "sharding": sharding,
        "one_rank_seconds": quantiles(one),
        "two_ranks_seconds": quantiles(two),
        "two_processes_seconds": quantiles(apart),
        "sent_bytes": max(sent),
        "efficiency": efficiency,
        "ceiling": ceiling,
        "ratio": efficiency["median"] / ceiling["median"],
        "waiting_share": quantiles(waiting),
        "gate": passed,
    }


def _by_repeat(ranks: list[dict[str, list[float]]], name: str) -> list[tuple[float, ...]]:
    """The figures of all ranks that took part, repeat by repeat: the larger one counts."""
    return list(zip(*(found[name] for found in ranks if found[name]), strict=True))


def _bytes_per_second(sizes: Sizes, pattern: DilatedPattern, sharding: str) -> float:
    """One way of this rank's network: the first hop's chunks with nothing to compute, the median of several passes."""
    parallel = ContextParallel(exchange="ring", sharding=sharding)
    shards = parallel.cut.shards_of(parallel.cut.default_lengths(sizes.seq_len))
    plan = make_plan(Job(pattern, shards, sizes.num_heads, sizes.num_heads), parallel.rank)
    unit, hop = sizes.batch * sizes.head_dim, plan.hops[0]
    own, free = (torch.zeros(plan.chunk_size * unit, dtype=sizes.dtype) for _ in range(2))
    sends, receives = (
        [(buffer[m.offset * unit : (m.offset + m.size) * unit], m) for m in way]
        for buffer, way in ((own, hop.sends), (free, hop.receives))
    )
    assert isinstance(parallel.ranks, Processes)
    link = parallel.ranks.all
    size = max(sum(m.size for m in way) for way in (hop.sends, hop.receives))
    passes = []
    for _ in range(5):
        parallel.ranks.handshake(0, {"call": "start together"})
        watch = stopwatch()
        link.carry(sends, receives, "messages alone").wait()
        passes.append(watch())
    return size * unit * sizes.dtype.itemsize / quantiles(passes)["median"]


def _modelled(
    sizes: Sizes, pattern: DilatedPattern, row: dict[str, Any], bytes_per_second: float
) -> list[dict[str, Any]]:
    """What the plan's model says of several numbers of ranks, each as fast as the one rank of the row."""
    found = []
    for num_ranks in MODELLED_RANKS:
        shards = make_shards(row["sharding"], default_lengths(row["sharding"], sizes.seq_len, num_ranks))
        plans = [make_plan(Job(pattern, shards, sizes.num_heads, sizes.num_heads), rank) for rank in range(num_ranks)]
        flops = sum(sum(flops_of(plan, sizes.batch, sizes.head_dim)) for plan in plans)
        hardware = Hardware(flops / row["one_rank_seconds"]["median"], bytes_per_second)
        step = model_step(plans, sizes.planned(), hardware)
        exposed = max(rank.exposed_seconds for rank in step.ranks) / step.step_seconds
        model = {"ranks": num_ranks, "efficiency": step.efficiency, "exposed_share": exposed}
        found.append(model | hardware._asdict())
    return found


def _pattern_json(pattern: DilatedPattern) -> dict[str, Any]:
    return {
        "segment_lengths": pattern.segment_lengths,
        "dilation_rates": pattern.dilation_rates,
        "is_causal": pattern.is_causal,
    }


def table(rows: list[dict[str, Any]]) -> str:
    texts = [_measured_table(rows)]
    if all("modelled" in row for row in rows):  # records made before the model have none
        texts.append(_modelled_table(rows))
    return "\n\n".join(texts)


def _modelled_table(rows: list[dict[str, Any]]) -> str:
    headers = (
        "pattern",
        "ranks",
        "efficiency, modelled",
        "exposed, modelled",
        "efficiency, measured",
        "of the ceiling",
    )
    lines = []
    for row in rows:
        for model in row["modelled"]:
            measured = (f"{row['efficiency']['median']:.1%}", f"{row['ratio']:.1%}")
            lines.append(
                (
                    f"{branches(row)}, {row['sharding']}",
                    str(model["ranks"]),
                    f"{model['efficiency']:.1%}",
                    f"{model['exposed_share']:.1%}",
                    *(measured if model["ranks"] == NUM_RANKS else ("not measured", "")),
                )
            )
    rates = [model["flops_per_second"] / 1e9 for row in rows for model in row["modelled"]]
    networks = [model["bytes_per_second"] / 1e9 for row in rows for model in row["modelled"]]
    return (
        "Two cores say nothing on 4 and 8 ranks: those rows are the plan's model (`rda plan --flops --bandwidth`), not "
        "measurements. The model's ranks compute as fast as the one rank and send as fast as a chunk travels alone, "
        f"both from this run: {min(rates):.3g} to {max(rates):.3g} GFLOPS, {min(networks):.2g} to "
        f"{max(networks):.2g} GB/s; latency is left out. The model counts ranks' waits for each other, but not what "
        "else keeps the machine below its ceiling."
        f"\n\n{markdown(headers, lines)}"
    )


def _measured_table(rows: list[dict[str, Any]]) -> str:
    headers = (
        "pattern",
        "one rank, s",
        "two ranks, s",
        "two processes apart, s",
        "efficiency",
        "ceiling",
        "of the ceiling",
        "waiting",
    )
    lines = [
        (
            branches(row) + (", zigzag" if row["sharding"] == "zigzag" else ""),
            seconds(row["one_rank_seconds"]),
            seconds(row["two_ranks_seconds"]),
            seconds(row["two_processes_seconds"]),
            f"{row['efficiency']['median']:.1%}",
            f"{row['ceiling']['median']:.1%}",
            f"{row['ratio']:.1%}",
            f"{row['waiting_share']['median']:.1%}",
        )
        for row in rows
    ]
    first = rows[0]
    return (
        f"{first['seq_len']:,} positions, {tensors(first)}, forward and backward, one thread per rank. The ceiling is "
        f"that of two processes that exchange nothing and compute half of the heads each. Waiting: the share of a "
        f"step, of the rank that waits longer, in hops and handshakes.\n\n{markdown(headers, lines)}"
    )
