"""CPU seconds in which a rank makes its plan before its first message: of thousands of ranks, and of packed documents.

Measured is what a call does between its handshake and its program: shards, documents, the exchange, the rank's plan.
Garbage is collected before each measurement, and as usual within it. Before that, plans of small jobs are compared
with counts of the same jobs.
"""

import gc
import random
import time
from collections.abc import Callable
from itertools import product
from typing import Any, NamedTuple

from ring_dilated_attention.pattern import DilatedPattern
from ring_dilated_attention.plan import exchange, planner, sharding
from ring_dilated_attention.plan.exchange import choose_exchange, plan_exchange
from ring_dilated_attention.plan.job import Job
from ring_dilated_attention.plan.sharding import Cut, documents_of
from ring_dilated_attention.plan.sizes import Sizes

from . import planned_counts
from .measure import quantiles
from .record import branches, markdown, seconds

SUMMARY = "CPU seconds of a rank's own plan, of a new batch of documents and of a repeated one"
NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 32, 8, 128
SIZES = Sizes(1, HEAD_DIM, 2)
REPEATS = 200  # of a batch that comes again
DENSE = DilatedPattern.dense(is_causal=True)
DILATED = DilatedPattern((2048, 4096, 8192, 16_384, 32_768), (1, 2, 4, 6, 12), is_causal=True)


class Settings(NamedTuple):
    """ranks: of the one document; the largest number has a target. batch_ranks: of the packed batches. num_documents:
    in a batch, and in one of a few long documents. targets: in seconds, but for "zigzag_documents", which has none."""

    ranks: tuple[int, ...]
    batch_ranks: int
    num_documents: tuple[int, int]
    local_len: int
    repeats: int
    targets: tuple[float, float, float] = (0.1, 0.02, 0.00002)


FULL = Settings((8, 64, 1024, 4096), 16, (300, 8), 8192, 7)
QUICK = Settings((64,), 4, (8, 2), 512, 1)


def num_steps(settings: Settings) -> int:
    return len(settings.ranks) + 8


def run(settings: Settings, step: Callable[[str], None]) -> list[dict[str, Any]]:
    passed, rng, rows = planned_counts.gate(), random.Random(0), []

    def row(
        what: str, pattern: DilatedPattern, cut: Cut, target: float | None, used: set[str], times: list[float]
    ) -> None:
        facts = {"what": what, **facts_of(pattern)}
        facts |= {"sharding": cut.sharding, "ranks": cut.num_shards, "seq_len": cut.num_shards * settings.local_len}
        facts |= {"num_heads": NUM_HEADS, "num_kv_heads": NUM_KV_HEADS, "head_dim": HEAD_DIM, "dtype": "bfloat16"}
        facts |= {"exchanges": sorted(used), "cpu_seconds": times, "target": target, "gate": passed}
        rows.append(facts)

    for ranks in settings.ranks:
        step(f"{ranks:,} ranks, one document")
        cut, some = Cut("zigzag", ranks), [0, ranks - 1, *(rng.randrange(ranks) for _ in range(settings.repeats))]
        found = [_plan(DENSE, cut, ranks * settings.local_len, None, x, "ring") for x in some[: settings.repeats]]
        target = settings.targets[0] if ranks == max(settings.ranks) else None
        row("one document", DENSE, cut, target, {"ring"}, [taken for taken, _ in found])
    many, few = settings.num_documents
    batches = ((many, "contiguous"), (many, "zigzag"), (few, "zigzag_documents"), (many, "zigzag_documents"))
    for pattern, (num_documents, name) in product((DENSE, DILATED), batches):
        step(f"{num_documents} documents, {branches(facts_of(pattern))}, {name}")
        cut, length = Cut(name, settings.batch_ranks), settings.batch_ranks * settings.local_len
        new: list[float] = []
        again: list[float] = []
        used: set[str] = set()
        for _ in range(settings.repeats):
            borders = (0, *sorted(rng.sample(range(1, length), num_documents - 1)), length)
            rank = rng.randrange(settings.batch_ranks)
            taken, chosen = _plan(pattern, cut, length, borders, rank, "auto")
            new.append(taken)
            used.add(chosen)
            again.append(_plan(pattern, cut, length, borders, rank, "auto", is_new=False)[0])
        first, later = (None, None) if name == "zigzag_documents" else settings.targets[1:]
        row(f"{num_documents} documents, new", pattern, cut, first, used, new)
        row(f"{num_documents} documents, again", pattern, cut, later, used, again)
    return rows


def facts_of(pattern: DilatedPattern) -> dict[str, Any]:
    return {"segment_lengths": pattern.segment_lengths, "dilation_rates": pattern.dilation_rates, "is_causal": True}


def _plan(
    pattern: DilatedPattern,
    cut: Cut,
    seq_len: int,
    borders: tuple[int, ...] | None,
    rank: int,
    exchange_asked: str,
    *,
    is_new: bool = True,
) -> tuple[float, str]:
    """CPU seconds, and the exchange. is_new: nothing is kept of earlier plans; else the mean of many times."""
    repeats = 1 if is_new else REPEATS
    if is_new:
        for kept in (planner.make_plan, planner.planner_of, exchange.plan_exchange, exchange.choose_exchange):
            kept.cache_clear()
        sharding._shards_of.cache_clear()
        sharding.deal_documents.cache_clear()
    gc.collect()
    began = time.process_time()
    for _ in range(repeats):
        documents = documents_of(borders, seq_len)
        shards = cut.shards_of(cut.default_lengths(seq_len, documents), documents)
        job = Job(pattern, shards, NUM_HEADS, NUM_KV_HEADS, documents)
        chosen = choose_exchange(job, SIZES).exchange if exchange_asked == "auto" else exchange_asked
        plan_exchange(chosen, job, rank)
    return (time.process_time() - began) / repeats, chosen


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        (
            f"{row['ranks']:,}",
            row["what"],
            branches(row),
            row["sharding"],
            ", ".join(row["exchanges"]),
            seconds(quantiles(1e3 * x for x in row["cpu_seconds"])),
            f"{1e3 * row['target']:g}" if row["target"] else "",
        )
        for row in rows
    ]
    headers = ("ranks", "planned", "pattern", "sharding", "exchange", "CPU ms of a rank", "at most")
    first = rows[0]
    heads = f"{first['num_heads']} query heads and {first['num_kv_heads']} key/value heads"
    how = f"{heads}, {first['seq_len'] // first['ranks']:,} positions a rank."
    return f"{how}\n\n{markdown(headers, lines)}"
